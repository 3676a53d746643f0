"""Whether a running job would be faster under another plan, by constants fitted to its own steps, and when that would
pay for the restart. Needs no torch."""

from pathlib import Path

from ...planner.answers.landscape import weighed
from ...planner.cost.axis_seconds import axis_seconds
from ...planner.cost.estimate import estimate
from ...planner.cost.refit import COLLECTIVES, COMPUTE, MeasuredStep, refit, turned_hosts
from ...planner.plan.document import Plan
from ...profiler.machine.units import format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..reporting.run_diagnosis import slower_axis
from ..reporting.run_report import WARM_UP_STEPS
from ..reporting.switching import pays_after, restart_of, step_seconds, switching
from ..run_document import load_run

LINKS = ("link bandwidth", "link latency", "network bandwidth", "network latency", *COLLECTIVES)
"""Constants that are fitted where a link explains a step that is longer than predicted; else those of COMPUTE are."""

WORTH = 0.02
"""Share of a step from which a faster plan is worth a restart: the noise of what is compared."""

_WEIGHED_S = 8.0


def replanning(plan: Plan, profile: ModelProfile, run: Path) -> list[str]:
    """What another plan would bring to a run of `plan`, in sentences; of the layouts that were weighed beside it."""
    _, steps = load_run(run)
    step_s = step_seconds(steps)
    if step_s is None:
        return []
    timed = steps[WARM_UP_STEPS:]
    expected_s = estimate(plan, profile).step_time_s
    told = {str(axis): seconds for axis, seconds in axis_seconds(plan, profile).items()}
    axis = slower_axis(timed, told, step_s - expected_s)
    cluster = plan.cluster
    linked = cluster.device.model_copy(update={"link": cluster.link, "network": cluster.network})
    measured = MeasuredStep(plan.label, plan, profile, step_s)
    factors = refit(linked, [measured], COMPUTE if axis is None else LINKS).factors
    moved = plan.model_copy(update={"cluster": turned_hosts(cluster, factors)})
    own = estimate(moved, profile)
    others = [each for each in weighed(moved, own, profile, _WEIGHED_S) if each.plan is not None and each.estimate]
    fitting = [each for each in others if each.estimate is not None and each.estimate.fits]
    best = min(fitting, key=lambda each: each.estimate.step_time_s if each.estimate else 0.0, default=None)
    what = "compute" if axis is None else f"links of {axis}"
    if best is None or best.estimate is None or best.estimate.step_time_s > own.step_time_s * (1 - WORTH):
        return [
            f"replanning would not pay: with {what} as this run has them no layout that was weighed beside the plan is "
            f"more than {WORTH:.0%} faster"
        ]
    now_s = step_s * best.estimate.step_time_s / own.step_time_s
    faster = f"with {what} as this run has them {best.label} is predicted to take {format_seconds(now_s)} a step"
    if restart_of(run) is None:
        return [
            f"replanning would bring {format_seconds(step_s - now_s)} a step: {faster}; what a restart costs is not "
            "known, for this run was not resumed (plan replan times its checkpoint)"
        ]
    cost = switching(None, steps[-1].step, run)
    return [f"{faster}: {pays_after(step_s, now_s, cost, measured=True)}; {cost}"]
