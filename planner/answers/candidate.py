"""One layout beside the plan, with what became of it."""

from dataclasses import dataclass, field

from ..cost.estimate import Estimate
from ..plan.document import Plan
from .verdict import Verdict


@dataclass(frozen=True)
class Candidate:
    """One layout beside the plan; without plan and estimate it does not fit or is not legal, as the verdict says.

    by_rule: whether it is what a rule of thumb or a framework leads to.
    """

    label: str
    plan: Plan | None
    estimate: Estimate | None
    verdict: Verdict
    seconds: float = field(default=float("inf"), compare=False)
    by_rule: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """The label as people read it: a rule that says FSDP may be at its best with all parameters gathered, which is
        ZeRO-1 or ZeRO-2."""
        stage = 3 if self.plan is None else self.plan.zero_stage
        return f"{self.label} as ZeRO-{stage}" if self.by_rule and self.label == "FSDP" and stage < 3 else self.label
