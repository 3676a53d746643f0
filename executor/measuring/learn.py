"""Measured steps out of the telemetry of runs: outliers and warm-up left out, drift and slow ranks told. Needs no
torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...planner.cost.refit import MeasuredStep
from ...planner.plan.document import Plan
from ...profiler.machine.units import format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..run_document import RunStep, load_run
from .measured_steps import computed_s
from .measurement import WARM_UP_STEPS, quantile

FEWEST = 3
"""Steps, after the warm-up, that a run must have to be learned from."""

FENCE = 3.0
"""Distances between the quartiles beyond the nearer one from which a step is an outlier (Tukey's outer fence): a
checkpoint written beside it, a neighbour, a page fault."""

DRIFT = 0.05
"""Change of the median step from a run's first third to its last that is told: repeats differ by less."""

APART = 0.1
"""Share of the step by which a rank must wait less for others than the median rank to be called slow."""


@dataclass(frozen=True)
class LearnedRun:
    """A run as the fit takes it, and what must be said of it."""

    step: MeasuredStep
    notes: tuple[str, ...]


def learn_runs(paths: Sequence[Path], profile_of: Callable[[Plan], ModelProfile]) -> list[LearnedRun]:
    """The runs in these files, each with its plan. profile_of: the profile of a plan's model.

    Raises ValueError for files of another kind, runs of too few steps, and plans of several devices.
    """
    found = [_learned(path, profile_of) for path in paths]
    devices = sorted({run.step.plan.cluster.device.name for run in found})
    if len(devices) > 1:
        raise ValueError(
            f"the runs are of {', '.join(devices)}: one device is learned at a time, so give each its own runs"
        )
    return found


def _learned(path: Path, profile_of: Callable[[Plan], ModelProfile]) -> LearnedRun:
    header, steps = load_run(path)
    if header.plan is None:
        raise ValueError(
            f"{path} does not say by which plan it ran (an earlier version wrote it): calibrate --from takes "
            f'{{"plan": "plan.json", "run": "{path.name}"}}'
        )
    timed = steps[WARM_UP_STEPS:]
    if len(timed) < FEWEST:
        raise ValueError(
            f"{path} has {len(steps)} steps: {WARM_UP_STEPS} to warm up and at least {FEWEST} more are needed"
        )
    usual = inliers(tuple(step.step_time_s for step in timed))
    label = f"{header.model}, {header.plan.label}"
    known = [step.rank_compute_s for step in timed if step.rank_compute_s]
    compute_s = computed_s(header.plan, known)
    measured = MeasuredStep(label, header.plan, profile_of(header.plan), quantile(usual, 0.5), compute_s=compute_s)
    notes = tuple(f"{path.name}: {note}" for note in what_to_say(timed))
    return LearnedRun(measured, notes)


def inliers(seconds: tuple[float, ...]) -> tuple[float, ...]:
    """Steps within the outer fences."""
    low, high = quantile(seconds, 0.25), quantile(seconds, 0.75)
    reach = FENCE * (high - low)
    return tuple(value for value in seconds if low - reach <= value <= high + reach)


def what_to_say(steps: Sequence[RunStep]) -> list[str]:
    """Drift, outliers and slow ranks of a run's steps after the warm-up, in sentences."""
    seconds = tuple(step.step_time_s for step in steps)
    usual = inliers(seconds)
    found = []
    if len(usual) < len(seconds):
        found.append(
            f"{len(seconds) - len(usual)} of {len(seconds)} steps are outliers, the longest "
            f"{format_seconds(max(seconds))} beside a median of {format_seconds(quantile(usual, 0.5))}"
        )
    third = len(seconds) // 3
    if third >= FEWEST:
        first, last = quantile(seconds[:third], 0.5), quantile(seconds[-third:], 0.5)
        if abs(last / first - 1) > DRIFT:
            found.append(
                f"steps drift: {format_seconds(first)} in the first third, {format_seconds(last)} in the last "
                f"({last / first - 1:+.1%})"
            )
    slow = slow_rank(steps)
    if slow is not None:
        rank, share = slow
        found.append(
            f"rank {rank} waits {share:.0%} of a step less for others than they do: they wait for it, so its device, "
            "its link or its input is slower"
        )
    return found


def slow_rank(steps: Sequence[RunStep]) -> tuple[int, float] | None:
    """(the rank that all others wait for, the share of a step by which), where one stands out: its own communication is
    under way for less time than the others', in the median over the steps."""
    known = [step for step in steps if len(step.rank_communication_s) > 1]
    if not known:
        return None
    ranks = range(len(known[0].rank_communication_s))
    waits = [quantile(tuple(s.rank_communication_s[r] / s.step_time_s for s in known), 0.5) for r in ranks]
    least = min(ranks, key=lambda rank: waits[rank])
    others = sorted(waits[:least] + waits[least + 1 :])
    apart = others[0] - waits[least]
    return (least, apart) if apart > APART else None
