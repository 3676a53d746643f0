"""One layout that was weighed beside the plan, and why it is not the plan."""

from dataclasses import dataclass, field

from ..cost.estimate import Estimate
from ..plan.document import Plan
from .verdict import Verdict


@dataclass(frozen=True)
class Candidate:
    """One layout that was weighed beside the plan. If plan and estimate are None it does not fit or is not legal; the
    verdict says which.

    by_rule: whether a rule of thumb or a framework leads to it.
    """

    label: str
    plan: Plan | None
    estimate: Estimate | None
    verdict: Verdict
    seconds: float = field(default=float("inf"), compare=False)
    by_rule: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """The label for people to read. A rule that is called FSDP may be fastest with all parameters gathered, which
        is ZeRO-1 or ZeRO-2; then it says so."""
        stage = 3 if self.plan is None else self.plan.zero_stage
        return f"{self.label} as ZeRO-{stage}" if self.by_rule and self.label == "FSDP" and stage < 3 else self.label
