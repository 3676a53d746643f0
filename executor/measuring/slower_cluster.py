"""What to do about hosts that have become slower: go on as it is, by a plan that gives them less, or without them.
Needs no torch."""

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
    """One way to go on. predicted_s: of its step on the hosts as they are now; step_s: the same, put right by what the
    run has measured of its own plan; both None where there is no plan. pays_after: steps that make up for switching,
    None if none do or its cost is not known; pays: the same in words, or why there is no plan."""

    what: str
    layout: str
    num_devices: int
    predicted_s: float | None
    step_s: float | None
    pays_after: float | None
    pays: str


@dataclass(frozen=True)
class WaysOn:
    """All of them, staying first; the fastest of the plans that were searched for, and its row. slow: the hosts with
    slower devices, in words."""

    rows: tuple[WayOn, ...]
    best: SearchResult
    chosen: WayOn
    slow: str

    @property
    def launch(self) -> str:
        """How the job of the chosen plan has to be started."""
        if self.chosen is self.rows[1]:
            return f"start the hosts in the same order as before: the plan gives {self.slow} slower devices"
        return f"start the job without {self.slow}"


def without_slow(cluster: ClusterSpec, slow: Sequence[SlowHost]) -> ClusterSpec | None:
    """The cluster without the slow hosts; where it is one host, without the devices of its slow ranks. None if nothing
    would be left."""
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
    """What a run can do about its slow hosts. search: the best plan for a cluster; raises InfeasibleError. speeds: with
    a slow host. cost: None where it is not known. may_stay: whether the plan as it is may be the best, where the search
    found none that is faster in its time. Raises InfeasibleError if no plan fits on all hosts."""
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
    """A plan beside staying: its step as long beside the measured one as it is predicted to be."""
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
