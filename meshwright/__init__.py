"""Plan how to split a PyTorch model over GPUs, prove the plan, and train with it.

    import meshwright as mw

    plan = mw.plan("model.py", gpus=8, device="h100-80gb")
    trainer = mw.parallelize(MyModel, plan, optimizer)

These names are all that most programs need; each is imported when it is first used, so that planning from a saved
profile never loads torch. What lies below them stays importable: meshwright.profiler, .planner and .executor.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .executor.api import devices as devices
    from .executor.api import load as load
    from .executor.api import plan as plan
    from .executor.api import profile as profile
    from .executor.api import sweep as sweep
    from .executor.planned import Planned as Planned
    from .executor.start_up import parallelize as parallelize
    from .executor.state.weights import Weights as Weights
    from .executor.trainer import Metrics as Metrics
    from .executor.trainer import Trainer as Trainer
    from .planner.answers.infeasible import InfeasibleError as InfeasibleError
    from .planner.plan.document import Plan as Plan
    from .planner.plan.training import TrainingSpec as TrainingSpec
    from .profiler.machine.cluster import ClusterSpec as ClusterSpec
    from .profiler.machine.cluster import Device as Device
    from .profiler.model.model_profile import ModelProfile as ModelProfile

__version__ = "0.1.0"

_HOME = {
    "ClusterSpec": "profiler.machine.cluster",
    "Device": "profiler.machine.cluster",
    "InfeasibleError": "planner.answers.infeasible",
    "Metrics": "executor.trainer",
    "ModelProfile": "profiler.model.model_profile",
    "Plan": "planner.plan.document",
    "Planned": "executor.planned",
    "Trainer": "executor.trainer",
    "TrainingSpec": "planner.plan.training",
    "Weights": "executor.state.weights",
    "devices": "executor.api",
    "load": "executor.api",
    "parallelize": "executor.start_up",
    "plan": "executor.api",
    "profile": "executor.api",
    "sweep": "executor.api",
}
"""Name -> the module that defines it."""

__all__ = ["__version__", *_HOME]

if not (Path(__file__).parent / "planner").is_dir():  # the source tree: the packages lie beside this one
    __path__.append(str(Path(__file__).parent.parent))


def __getattr__(name: str) -> Any:
    """One of the names above, imported when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What a shell offers to complete."""
    return sorted(__all__)
