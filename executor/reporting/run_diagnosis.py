"""Whether a run is slower than its plan allows, and which term explains it, as far as telemetry tells."""

from collections.abc import Mapping, Sequence

from ...planner.cost.bands import time_band
from ...planner.plan.document import Plan
from ...profiler.machine.units import format_seconds
from ..measuring.measurement import quantile
from ..run_document import RunStep

UNKNOWN = 1.1
"""Measured over predicted step beyond which a run is called slow, where no band of errors is known."""

INPUT = 0.05
"""Share of a step between steps from which input is worth a word."""


def diagnosis(plan: Plan, steps: Sequence[RunStep], communication_s: Mapping[str, float]) -> list[str]:
    """What must be said of a run beside its plan. steps: after the warm-up. communication_s: predicted by mesh axis."""
    step_s = quantile(tuple(step.step_time_s for step in steps), 0.5)
    between_s = quantile(tuple(step.between_s for step in steps), 0.5)
    found = []
    expected_s, most = _expected(plan)
    if expected_s is not None and step_s > most * expected_s:
        excess_s = step_s - expected_s
        found.append(
            f"the run is slower than its plan allows: {format_seconds(step_s)} a step, {step_s / expected_s:.2f} times "
            f"the expected {format_seconds(expected_s)} (up to {most:.2f} times is usual); "
            f"{_explained(steps, communication_s, excess_s)}"
        )
    if between_s > INPUT * step_s:
        found.append(
            f"input takes long: {format_seconds(between_s)} between steps, {between_s / step_s:.0%} of a step; more "
            "loader workers, or fewer checkpoints, would help before another plan does"
        )
    return found


def _expected(plan: Plan) -> tuple[float | None, float]:
    """(seconds that a step should take, times that it may take): as measured by plan tune, else as predicted."""
    if plan.measured is not None:
        return plan.measured.step_time_s, 1 + max(0.03, 3 * plan.measured.spread)
    if plan.prediction is None:
        return None, 0.0
    band = time_band(plan)
    return plan.prediction.step_time_s, UNKNOWN if band is None else band.high


def slower_axis(steps: Sequence[RunStep], communication_s: Mapping[str, float], excess_s: float) -> str | None:
    """The mesh axis whose communication explains the larger part of a step that is so much longer than expected; None
    where compute does."""
    more = _more_s(steps, communication_s)
    worst = max(more, key=lambda axis: more[axis], default=None)
    return worst if worst is not None and excess_s > 0 and more[worst] > excess_s / 2 else None


def _more_s(steps: Sequence[RunStep], communication_s: Mapping[str, float]) -> dict[str, float]:
    """Axis -> seconds that its communication was under way beyond what is predicted."""
    more = {}
    for axis in steps[0].communication_s:
        if axis in communication_s:
            measured = quantile(tuple(s.communication_s[axis].mean for s in steps if axis in s.communication_s), 0.5)
            more[axis] = measured - communication_s[axis]
    return more


def _explained(steps: Sequence[RunStep], communication_s: Mapping[str, float], excess_s: float) -> str:
    """Which axis' links took more than predicted, or that compute did."""
    more = _more_s(steps, communication_s)
    axis = slower_axis(steps, communication_s, excess_s)
    if axis is not None:
        return (
            f"communication of {axis} is under way {format_seconds(more[axis])} longer than predicted, which is "
            "the larger part of it: its links are slower, or a rank that others wait for"
        )
    worst = max(more, key=lambda each: more[each], default=None)
    told = "" if worst is None else f"; {worst} accounts for {format_seconds(max(0.0, more[worst]))} of it"
    return f"communication does not explain it, so compute does (clocks, another process, a slower device){told}"
