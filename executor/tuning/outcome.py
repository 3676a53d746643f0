"""What a race came to, as data: the plan, what became of every candidate, and what was fitted."""

from dataclasses import dataclass
from typing import Literal

from ...planner.plan.document import MeasuredPlan, Plan
from ...profiler.machine.cluster import Device
from ..measuring.slow_hosts import SlowHost
from ..measuring.slow_links import SlowLink
from .cut_down import Unseen

NOT_MEASURED = "not measured before the race ended"


@dataclass(frozen=True)
class StandIn:
    """What ran in the place of a candidate that takes more hosts than there are. predicted_s, fitted_s: of what ran,
    before anything was measured and by the constants at the end."""

    label: str
    plan: Plan
    rank: int | None
    predicted_s: float
    fitted_s: float
    measured: MeasuredPlan | None
    outcome: str


@dataclass(frozen=True)
class Contender:
    """What became of one candidate. predicted_s: before anything was measured; fitted_s: by the constants at the end;
    outcome: against the leader, or why it was not measured. stand_ins: what was measured in its place; unseen: what of
    its step that does not show. ratio: its step over the leader's, in the turns that both took."""

    label: str
    by: str
    plan: Plan
    predicted_s: float
    fitted_s: float | None
    measured: MeasuredPlan | None
    outcome: str
    stand_ins: tuple[StandIn, ...] = ()
    unseen: tuple[Unseen, ...] = ()
    ratio: float | None = None


@dataclass(frozen=True)
class MemoryRow:
    """Peak memory of the fullest process of a pipeline coordinate, beside what is predicted of it before and after the
    fit. kind: of the whole process, or of torch's allocator on the GPU."""

    label: str
    position: int
    kind: Literal["resident", "allocated", "reserved"]
    measured_bytes: float
    predicted_bytes: float
    fitted_bytes: float


@dataclass(frozen=True)
class Tuned:
    """The outcome: the plan (the best measured one; the best predicted one where none could be measured), constants for
    the next model, every candidate the fastest first, and how it ended. smaller: what ran in the place of candidates,
    in words; "" where they ran themselves. memory: of all that ran. slow, slow_links: hosts that compute slower than
    the others, and those whose links are slower."""

    plan: Plan
    label: str
    device: Device
    factors: dict[str, float]
    standings: tuple[Contender, ...]
    agreed: bool
    reason: str
    rounds: int
    elapsed_s: float
    interrupted: bool = False
    memory: tuple[MemoryRow, ...] = ()
    smaller: str = ""
    slow: tuple[SlowHost, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
