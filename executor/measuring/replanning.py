"""Tells why a running job is slower than it could be (a slow host, or constants that are off), and whether another plan
would pay for the restart. Needs no torch."""

from pathlib import Path

from ...planner.answers.infeasible import InfeasibleError
from ...planner.answers.landscape import weighed
from ...planner.answers.search import search
from ...planner.cost.axis_seconds import axis_seconds
from ...planner.cost.estimate import estimate
from ...planner.cost.refit import COLLECTIVES, COMPUTE, MeasuredStep, refit, turned_hosts
from ...planner.plan.document import Plan
from ...planner.solve.solver import SolverError
from ...profiler.machine.units import format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..reporting.run_diagnosis import slower_axis
from ..reporting.switching import WORTH, Switching, pays_after, restart_of, step_seconds, switching
from ..run_document import RunStep, load_run
from .measured_steps import computed_s
from .measurement import WARM_UP_STEPS
from .slow_hosts import HostSpeeds, SpeedsUnknownError, host_speeds
from .slower_cluster import ways_on

LINKS = ("link bandwidth", "link latency", "network bandwidth", "network latency", *COLLECTIVES)
"""Constants that are fitted if a slow link explains why a step is longer than predicted; those of COMPUTE are fitted,
too, if ranks tell what they computed. Otherwise those of COMPUTE alone are."""

_WEIGHED_S = 8.0
"""Seconds of search for other layouts; with slow hosts for each way to go on."""


def replanning(plan: Plan, profile: ModelProfile, run: Path) -> list[str]:
    """Sentences on which hosts of a run compute slower than the others, and on what another plan would bring: one for
    hosts as slow as these, and one without them. Without slow hosts: what the best layout that was weighed beside the
    plan would bring."""
    _, steps = load_run(run)
    step_s = step_seconds(steps)
    if step_s is None:
        return []
    cost = None if restart_of(run) is None else switching(None, steps[-1].step, run)
    if plan.degrees.num_devices == 1:
        return _by_constants(plan, profile, steps, step_s, cost)
    try:
        speeds = host_speeds(plan, profile, run)
    except SpeedsUnknownError as error:
        return [f"slow hosts are not looked for: {error}", *_by_constants(plan, profile, steps, step_s, cost)]
    if not speeds.slow:
        return [str(speeds), *_by_constants(plan, profile, steps, step_s, cost)]
    return [str(speeds), *_around_slow_hosts(plan, profile, speeds, cost, run)]


def _around_slow_hosts(
    plan: Plan, profile: ModelProfile, speeds: HostSpeeds, cost: Switching | None, run: Path
) -> list[str]:
    """Sentences on whether a plan with the slow hosts, or one without them, pays for the restart, and how to get it."""
    way_out = (
        f"`plan replan --checkpoint DIR --run {run.name}`, DIR being the run's folder, searches for both and writes "
        "the better plan"
    )
    try:
        ways = ways_on(
            plan,
            profile,
            speeds,
            cost,
            lambda cluster: search(profile, cluster, plan.training, time_limit_s=_WEIGHED_S),
            may_stay=True,
        )
    except (InfeasibleError, SolverError) as error:
        return [f"whether another plan pays is not known: {error}", way_out]
    told = []
    for way in ways.rows[1:]:
        by = "" if way.step_s is None else f" by {way.layout} on {way.num_devices} GPUs"
        told.append(f"{way.what}{by}: {way.pays}")
    return [*told, _in_words(cost), way_out]


def _by_constants(
    plan: Plan, profile: ModelProfile, steps: list[RunStep], step_s: float, cost: Switching | None
) -> list[str]:
    """Sentences on what the fastest layout that was weighed beside the plan would bring, with constants fitted to the
    run."""
    timed = steps[WARM_UP_STEPS:]
    expected_s = estimate(plan, profile).step_time_s
    told = {str(axis): seconds for axis, seconds in axis_seconds(plan, profile).items()}
    axis = slower_axis(timed, told, step_s - expected_s)
    cluster = plan.cluster
    linked = cluster.device.model_copy(update={"link": cluster.link, "network": cluster.between_hosts})
    compute_s = computed_s(plan, [step.rank_compute_s for step in timed])
    measured = MeasuredStep(plan.label, plan, profile, step_s, compute_s=compute_s)
    names = COMPUTE if axis is None else (*LINKS, *(COMPUTE if compute_s else ()))
    factors = refit(linked, [measured], names).factors
    moved = plan.model_copy(update={"cluster": turned_hosts(cluster, factors)})
    own = estimate(moved, profile)
    others = [each for each in weighed(moved, own, profile, _WEIGHED_S) if each.plan is not None and each.estimate]
    fitting = [each for each in others if each.estimate is not None and each.estimate.fits]
    best = min(fitting, key=lambda each: each.estimate.step_time_s if each.estimate else 0.0, default=None)
    what = "compute" if axis is None else f"links of {axis}{' and compute' if compute_s else ''}"
    if best is None or best.estimate is None or best.estimate.step_time_s > own.step_time_s * (1 - WORTH):
        return [
            f"replanning would not pay: with {what} as this run has them no layout that was weighed beside the plan is "
            f"more than {WORTH:.0%} faster"
        ]
    now_s = step_s * best.estimate.step_time_s / own.step_time_s
    faster = f"with {what} as this run has them {best.label} is predicted to take {format_seconds(now_s)} a step"
    return [f"{faster}: {pays_after(step_s, now_s, cost, measured=True)}; {_in_words(cost)}"]


def _in_words(cost: Switching | None) -> str:
    if cost is None:
        return "what a restart costs is not known, for this run was not resumed (plan replan times its checkpoint)"
    return str(cost)
