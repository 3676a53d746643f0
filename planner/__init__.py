"""What to do: from a ModelProfile, a ClusterSpec and a TrainingSpec to a proven Plan. Never imports torch."""

from .plan.document import Plan, load_plan
from .plan.training import TrainingSpec

__all__ = ["Plan", "TrainingSpec", "load_plan"]
