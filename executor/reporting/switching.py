"""What it costs to go on under another plan, measured, and after how many steps that pays. Needs no torch."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...planner.plan.document import Plan
from ...profiler.machine.units import counted, format_bytes, format_seconds
from ..measuring.measurement import WARM_UP_STEPS, quantile
from ..run_document import RunRestart, RunStep, load_restarts, load_run
from ..tuning.rounds import START_S

WORTH = 0.02
"""Share of a step from which a faster plan is worth a restart: the noise of what is compared."""

READ_S = 2.0
"""Seconds for which a checkpoint is read to time it."""

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Switching:
    """Seconds of a restart. source: how each of them is known; lost_steps: to take again, behind the checkpoint."""

    load_s: float
    start_s: float
    lost_steps: int
    step_s: float | None
    source: str

    @property
    def seconds(self) -> float:
        """All of them; steps to take again as long as they took."""
        return self.load_s + self.start_s + self.lost_steps * (self.step_s or 0.0)

    def __str__(self) -> str:
        lost = ""
        if self.lost_steps:
            took = "" if self.step_s is None else f", {format_seconds(self.lost_steps * self.step_s)}"
            lost = f", and {counted(self.lost_steps, 'step')} since the checkpoint again{took}"
        return (
            f"switching costs about {format_seconds(self.seconds)}: {format_seconds(self.start_s)} to start, "
            f"{format_seconds(self.load_s)} to read the checkpoint ({self.source}){lost}"
        )


def switching(checkpoint: Path | None, steps_saved: int, run: Path | None) -> Switching:
    """The cost of a restart from a checkpoint: as a run has measured it, else by reading the checkpoint here.

    steps_saved: that the checkpoint has behind it. Raises ValueError where neither is there.
    """
    restarts, steps = ([], []) if run is None else (load_restarts(run), load_run(run)[1])
    step_s = step_seconds(steps)
    lost = max(0, steps[-1].step - steps_saved) if steps else 0
    if restarts:
        last = restarts[-1]
        start_s = START_S if last.start_s is None else last.start_s
        return Switching(last.load_s, start_s, lost, step_s, f"measured by the run on {last.num_ranks} ranks")
    if checkpoint is None:
        raise ValueError("neither a run that was resumed nor a checkpoint says what a restart costs")
    size, rate = read_rate(checkpoint)
    source = f"{format_bytes(size)} at {format_bytes(rate)}/s, timed here by one reader; the start is assumed"
    return Switching(size / rate, START_S, lost, step_s, source)


def step_seconds(steps: Sequence[RunStep]) -> float | None:
    """Median of a run's steps after the warm-up; None without any."""
    timed = tuple(step.step_time_s for step in steps[WARM_UP_STEPS:])
    return quantile(timed, 0.5) if timed else None


def read_rate(folder: Path) -> tuple[int, float]:
    """(bytes of a checkpoint's files, bytes of them that one reader gets in a second), read for READ_S seconds and past
    what the system keeps of them in memory, where it can be told to."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    size = sum(path.stat().st_size for path in files)
    began, read = time.monotonic(), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := file.read(_CHUNK_BYTES):
                read += len(chunk)
                if time.monotonic() - began > READ_S:
                    return size, read / (time.monotonic() - began)
    return size, max(read, 1) / max(time.monotonic() - began, 1e-9)


def whether_it_pays(before: Plan, after: Plan, cost: Switching) -> str:
    """From when on it pays to go on by the plan `after`, in a sentence.

    With as many devices or more, the plan before could go on: its step is the measured one, or the predicted one. With
    fewer it cannot, so that the other choice is to wait until they are back, and switching costs twice. Beside a
    measured step that of `after` is as long as it is predicted to be beside that of `before`.
    """
    predicted_s = None if before.prediction is None else before.prediction.step_time_s
    off = cost.step_s / predicted_s if cost.step_s and predicted_s else 1.0
    now_s = 0.0 if after.prediction is None else off * after.prediction.step_time_s
    if after.degrees.num_devices < before.degrees.num_devices:
        twice_s = 2 * cost.seconds - cost.lost_steps * (cost.step_s or 0.0)  # those are lost either way, and once
        return (
            f"it pays beside waiting if the others are away for more than {format_seconds(twice_s)} "
            f"({twice_s / now_s:,.0f} steps of {format_seconds(now_s)}): they cost a second switch when they are back"
        )
    before_s = cost.step_s or predicted_s or 0.0
    return pays_after(before_s, now_s, cost, measured=cost.step_s is not None)


def pays_after(before_s: float, now_s: float, cost: Switching | None, measured: bool) -> str:
    """After how many steps a faster plan has made up for the restart, or that it never does. cost: None where it is not
    known."""
    gain_s = before_s - now_s
    how = "measured" if measured else "predicted"
    beside = f"{format_seconds(now_s)} a step beside {format_seconds(before_s)} {how} before"
    if gain_s <= 0:
        return f"it does not pay: {beside}"
    if cost is None:
        return f"it would bring {format_seconds(gain_s)} a step: {beside}"
    return f"it pays after {counted(round(cost.seconds / gain_s), 'step')}: {beside}"


def restart_of(run: Path) -> RunRestart | None:
    """The last restart that a run has measured."""
    return next(reversed(load_restarts(run)), None)
