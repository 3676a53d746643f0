"""Reads measured steps from the telemetry of runs: leaves out warm-up and outliers, and tells of drift and slow ranks.
Needs no torch."""

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
"""Fewest steps, after the warm-up, of a run that can be learned from."""

FENCE = 3.0
"""A step is an outlier if it lies beyond a quartile by more than so many times the distance between the quartiles
(Tukey's outer fence): a checkpoint written beside it, a neighbour, a page fault."""

DRIFT = 0.05
"""Least change of the median step, from the first third of a run to its last, that is reported: repeats differ by
less."""

APART = 0.1
"""A rank is called slow if it waits for others less than all other ranks do, by more than this share of the step."""


@dataclass(frozen=True)
class LearnedRun:
    """A run in the form that the fit takes, and notes on it for the user."""

    step: MeasuredStep
    notes: tuple[str, ...]


def learn_runs(paths: Sequence[Path], profile_of: Callable[[Plan], ModelProfile]) -> list[LearnedRun]:
    """The runs in these files. profile_of: returns the profile of a plan's model.

    Raises ValueError for files of another kind, for runs with too few steps, and for plans of several devices.
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
    """The steps that are no outliers."""
    low, high = quantile(seconds, 0.25), quantile(seconds, 0.75)
    reach = FENCE * (high - low)
    return tuple(value for value in seconds if low - reach <= value <= high + reach)


def what_to_say(steps: Sequence[RunStep]) -> list[str]:
    """Sentences on drift, outliers and slow ranks in the steps of a run after the warm-up."""
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
    """(the rank that all others wait for, for which share of a step); None if no rank stands out. It is the rank whose
    own communication takes the least of a step, in the median over the steps, because it arrives last."""
    known = [step for step in steps if len(step.rank_communication_s) > 1]
    if not known:
        return None
    ranks = range(len(known[0].rank_communication_s))
    waits = [quantile(tuple(s.rank_communication_s[r] / s.step_time_s for s in known), 0.5) for r in ranks]
    least = min(ranks, key=lambda rank: waits[rank])
    others = sorted(waits[:least] + waits[least + 1 :])
    apart = others[0] - waits[least]
    return (least, apart) if apart > APART else None
