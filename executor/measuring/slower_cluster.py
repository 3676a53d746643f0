"""Ways on for a run with hosts that have become slower: stay, give them less to do, or leave them out. Needs no
torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...planner.answers.candidate import Candidate
from ...planner.answers.search import InfeasibleError, SearchResult, adopted
from ...planner.answers.verdict import FITS
from ...planner.cost.estimate import estimate
from ...planner.plan.document import Plan
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.machine.units import format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..reporting.switching import WORTH, Switching, pays_after
from .slow_hosts import HostSpeeds, SlowHost, slower_cluster


@dataclass(frozen=True)
class WayOn:
    """One way to go on. predicted_s: predicted step on the hosts as they are now. step_s: the same, corrected by what
    the run has measured of its own plan; both are None if there is no plan. pays_after: number of steps after which
    switching has paid for itself; None if it never does, or its cost is not known. pays: that in words, or why there is
    no plan."""

    what: str
    layout: str
    num_devices: int
    predicted_s: float | None
    step_s: float | None
    pays_after: float | None
    pays: str


@dataclass(frozen=True)
class WaysOn:
    """All ways to go on. rows: to stay with the plan comes first. best: the fastest of the plans that were searched
    for. chosen: its row. slow: the hosts with slower devices, in words."""

    rows: tuple[WayOn, ...]
    best: SearchResult
    chosen: WayOn
    slow: str

    @property
    def launch(self) -> str:
        """How to start the job of the chosen plan, in words."""
        if self.chosen is self.rows[1]:
            return f"start the hosts in the same order as before: the plan gives {self.slow} slower devices"
        return f"start the job without {self.slow}"


def without_slow(cluster: ClusterSpec, slow: Sequence[SlowHost]) -> ClusterSpec | None:
    """The cluster without the slow hosts; if it has one host only, that host without the devices of its slow ranks.
    None if nothing is left."""
    if cluster.num_hosts > 1:
        return cluster.without([each.host for each in slow])
    (host,), dropped = cluster.hosts, sum(len(each.ranks) for each in slow)
    if dropped >= host.devices_per_host:
        return None
    left = host.model_copy(update={"devices_per_host": host.devices_per_host - dropped})
    name = f"{cluster.name} without {dropped} of its {host.devices_per_host} devices"
    return cluster.model_copy(update={"name": name, "hosts": (left,)})


def ways_on(
    plan: Plan,
    profile: ModelProfile,
    speeds: HostSpeeds,
    cost: Switching | None,
    search: Callable[[ClusterSpec], SearchResult],
    may_stay: bool,
) -> WaysOn:
    """The ways in which a run can go on with slow hosts. search: returns the best plan for a cluster; raises
    InfeasibleError. speeds: names at least one slow host. cost: that of switching; None if not known. may_stay: the
    present plan may be chosen, if the search found none that is faster in its time. Raises InfeasibleError if no plan
    fits on all hosts."""
    now, rest = (
        slower_cluster(plan.cluster, speeds.slow),
        without_slow(plan.cluster, speeds.slow),
    )
    on_now = plan.model_copy(update={"cluster": now})
    stay = estimate(on_now, profile)
    stay_s = stay.step_time_s
    numbers = ", ".join(str(each.host) for each in speeds.slow)
    slow = f"host{'s' if len(speeds.slow) > 1 else ''} {numbers}" if plan.cluster.num_hosts > 1 else "the slow GPUs"
    rows = [WayOn("as it is", plan.label, plan.degrees.num_devices, stay_s, speeds.step_s, None, "")]
    best = search(now)
    if may_stay and stay.fits:
        best = adopted(best, [Candidate(plan.label, on_now, stay, FITS)])
    chosen = _searched(f"with {slow}", best, stay_s, speeds.step_s, cost)
    rows.append(chosen)
    if rest is not None:
        what = f"without {slow}"
        try:
            found = search(rest)
        except InfeasibleError as error:
            rows.append(WayOn(what, "", rest.num_devices, None, None, None, str(error)))
        else:
            rows.append(_searched(what, found, stay_s, speeds.step_s, cost))
            if found.estimate.step_time_s < best.estimate.step_time_s:
                best, chosen = found, rows[-1]
    return WaysOn(tuple(rows), best, chosen, slow)


def _searched(what: str, found: SearchResult, stay_s: float, measured_s: float, cost: Switching | None) -> WayOn:
    """A plan as a way to go on. Its step is taken to be as much shorter than the measured one as it is predicted to
    be."""
    predicted_s = found.estimate.step_time_s
    step_s = measured_s * predicted_s / stay_s
    gain_s = measured_s - step_s
    if 0.0 <= gain_s < WORTH * measured_s:
        after = None
        pays = f"it does not pay: {format_seconds(step_s)} a step, within {WORTH:.0%} of the plan as it is"
    else:
        after = cost.seconds / gain_s if cost is not None and gain_s > 0 else None
        pays = pays_after(measured_s, step_s, cost, measured=True)
    return WayOn(what, found.plan.label, found.plan.degrees.num_devices, predicted_s, step_s, after, pays)
