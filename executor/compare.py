"""The plan beside manual set-ups: the same profile, cluster, global batch and evaluator for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..planner.explain import compared
from ..planner.setups import Setup
from ..planner.training import TrainingSpec
from ..profiler.cluster import ClusterSpec
from ..profiler.model_profile import ModelProfile

if TYPE_CHECKING:
    from ..planner.estimate import Estimate
    from ..planner.plan import Plan
    from ..planner.search import Candidate, SearchResult
    from ..profiler.load import LoadedModel
    from .measurement import Measurement

PLANNED = "planned"


@dataclass(frozen=True)
class Comparison:
    """The planned layout first, then every set-up in the order asked for."""

    candidates: tuple["Candidate", ...]
    planned: "SearchResult | None"

    @property
    def plans(self) -> dict[str, "Plan"]:
        """Label -> plan, of those that fit."""
        return {c.label: c.plan for c in self.candidates if c.plan is not None and c.estimate is not None}


def compare(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    setups: Sequence[Setup],
    *,
    time_limit_s: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
) -> Comparison:
    """Price the best plan and every set-up; without set-ups, the rules of thumb that the search prices anyway."""
    from ..planner.search import Candidate, InfeasibleError, price_setup, search

    planned: SearchResult | None = None
    try:
        planned = search(profile, cluster, training, time_limit_s=time_limit_s, progress=progress)
        first = Candidate(label=PLANNED, plan=planned.plan, estimate=planned.estimate, verdict="the plan")
    except InfeasibleError as error:
        first = Candidate(label=PLANNED, plan=None, estimate=None, verdict=f"does not fit: {error}")
    manual = [price_setup(setup, profile, cluster, training) for setup in setups]
    if planned is not None:
        manual = [_against(candidate, planned.estimate) for candidate in manual]
    if not setups and planned is not None:
        manual = list(planned.baselines)
    return Comparison(candidates=(first, *manual), planned=planned)


def _against(candidate: "Candidate", planned: "Estimate") -> "Candidate":
    """The candidate with a verdict that says how far it is from the plan, and what costs it most."""
    if candidate.estimate is None:
        return candidate
    return replace(candidate, verdict=compared(candidate.estimate, planned))


def measured(comparison: Comparison, loaded: "LoadedModel", *, steps: int = 5) -> dict[str, "Measurement | str"]:
    """Label -> what it really took on the local devices, or in a sentence why it could not be run."""
    from .measure import measure

    return measure(comparison.plans, loaded, steps=steps)
