"""A run beside the prediction of its plan: rows of words, for terminals and reports alike. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...planner.plan.document import GroupAxis, Plan
from ...planner.plan.making import shape_of
from ...profiler.machine.units import GIB, format_change
from ..measuring.measurement import WARM_UP_STEPS, quantile
from ..run_document import RunHeader, RunStep, load_run
from .run_diagnosis import diagnosis


@dataclass(frozen=True)
class RunTable:
    """Predicted and measured figures. difference: measured over predicted, minus one; "" where it says nothing."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def check_run_of(plan: Plan, header: RunHeader, path: Path) -> None:
    """Raise ValueError if a run was of another model or layout than the plan's."""
    layouts = plan.label, shape_of(plan).label  # runs of older versions say its degrees
    if header.model != plan.model.name or header.layout not in layouts:
        raise ValueError(
            f"{path} is a run of {header.model} by {header.layout}, the plan is for {plan.model.name} by {plan.label}"
        )


def run_table(plan: Plan, path: Path, communication_s: Mapping[GroupAxis, float] | None = None) -> RunTable:
    """The run in `path` (parallelize(..., telemetry=path)) beside the plan's prediction.

    communication_s: predicted, of axis_seconds. What ranks wait for each other in is part of what was measured.
    Raises ValueError if the run is of another model or layout, or has too few steps.
    """
    header, steps = load_run(path)
    check_run_of(plan, header, path)
    timed = steps[WARM_UP_STEPS:]
    if not timed:
        raise ValueError(f"{path} has {len(steps)} steps; {WARM_UP_STEPS} to warm up and some more are needed")
    seconds = tuple(step.step_time_s for step in timed)
    found_s = quantile(seconds, 0.5)
    spread = (quantile(seconds, 0.75) - quantile(seconds, 0.25)) / 2 / found_s
    rate = "samples/s" if plan.training.seq_len is None else "tokens/s"
    predicted = plan.prediction
    rows = [
        _row("step time, ms", None if predicted is None else predicted.step_time_s * 1e3, found_s * 1e3, 1),
        _row(rate, None if predicted is None else predicted.tokens_per_s, header.tokens_per_step / found_s, 0),
    ]
    if predicted is not None:
        rows.append(_row("MFU, %", predicted.mfu * 100, predicted.mfu * predicted.step_time_s / found_s * 100, 1))
    rows += _memory(plan, timed)
    told: dict[str, float] = {str(axis): seconds for axis, seconds in (communication_s or {}).items()}
    for axis in timed[0].communication_s:
        measured = quantile(tuple(step.communication_s[axis].mean for step in timed), 0.5)
        own_s = told.get(axis)
        rows.append(
            _row(f"communication {axis}, ms under way", None if own_s is None else own_s * 1e3, measured * 1e3, 1)
        )
    notes = [
        f"{len(timed)} steps after {WARM_UP_STEPS} to warm up, on {header.num_ranks} x {header.device}, torch "
        f"{header.torch_version}; median, half of the distance between quartiles {spread:.1%}",
        f"between steps {sum(s.between_s for s in timed) / len(timed) * 1e3:,.1f} ms: data and checkpoints, not "
        "predicted",
    ]
    notes += diagnosis(plan, timed, told)
    if told:
        notes.append("communication under way includes what ranks wait for each other, which is predicted as 0")
    if header.memory_kind == "resident":
        notes.append("memory is that of the whole process, libraries included: on the CPU torch tells no other")
    return RunTable(
        f"{header.model} by {plan.label}: the run in {path.name} beside the prediction",
        ("", "predicted", "measured", "difference"),
        tuple(rows),
        tuple(notes),
    )


def _memory(plan: Plan, steps: list[RunStep]) -> list[tuple[str, ...]]:
    """Of every pipeline coordinate the fullest rank."""
    peaks = [max(step.peak_memory_bytes[rank] for step in steps) for rank in range(plan.degrees.num_devices)]
    rows = []
    for position in range(plan.degrees.pipeline):
        own = [peak for rank, peak in enumerate(peaks) if plan.coordinates(rank)["pipeline"] == position]
        predicted = plan.prediction.stage_memory_bytes[position] / GIB if plan.prediction is not None else None
        name = "peak memory, GiB" if plan.degrees.pipeline == 1 else f"peak memory of pipeline rank {position}, GiB"
        rows.append(_row(name, predicted, max(own) / GIB, 2))
    return rows


def _row(name: str, predicted: float | None, measured: float, digits: int) -> tuple[str, ...]:
    found = f"{measured:,.{digits}f}"
    if not predicted:
        return name, "", found, ""
    return name, f"{predicted:,.{digits}f}", found, format_change(measured / predicted - 1)
