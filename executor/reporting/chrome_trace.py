"""One step of a plan as Chrome trace events, for ui.perfetto.dev and chrome://tracing."""

import json
from pathlib import Path
from typing import Any

from ...planner.cost.estimate import estimate
from ...planner.cost.simulate import Event
from ...planner.plan.document import Plan
from ...planner.plan.schedules import stage_of
from ...profiler.machine.units import GIB
from ...profiler.model.model_profile import ModelProfile
from .report import collapse, gpus_of
from .report_facts import Played, played

MOST_MICROBATCHES = 256
"""A longer step is cut: its middle repeats."""

_PASSES, _CAUSES, _ONCE = 1, 2, 3
_THREADS = {_PASSES: "passes", _CAUSES: "of which", _ONCE: "once per step"}


def write_trace(plan: Plan, profile: ModelProfile, path: Path) -> int:
    """Write the trace; the number of its events comes back."""
    events = trace_events(plan, profile)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n")
    return len(events)


def trace_events(plan: Plan, profile: ModelProfile) -> list[dict[str, Any]]:
    """Trace events of one step, a process for each pipeline rank; times in microseconds.

    Tracks of a process: its passes, joined by arrows where a stage waits for another; what each pass consists of; what
    comes once per step; and the activations that it holds, in GiB, as a counter.
    """
    found = estimate(plan, profile)
    step = played(plan, profile, found, _whole_rounds(plan))
    events: list[dict[str, Any]] = []
    for position in range(plan.degrees.pipeline):
        events += _names(plan, position)
    for event in step.events:
        events += _pass(plan, step, event)
    events += _arrows(plan, step)
    for position, (start, end) in enumerate(zip(step.passes_end_s, step.step_end_s, strict=True)):
        optimizer_s = min(found.breakdown["optimizer"], end - start)
        events.append(_slice("last gradients", position, _ONCE, start, end - optimizer_s, {}))
        events.append(_slice("optimizer", position, _ONCE, end - optimizer_s, end, {}))
    peaks = [memory.items["activations"] for memory in found.memory]
    return events + _held(plan, step, peaks)


def _whole_rounds(plan: Plan) -> int:
    if plan.num_microbatches <= MOST_MICROBATCHES:
        return plan.num_microbatches
    return max(1, MOST_MICROBATCHES // plan.degrees.pipeline) * plan.degrees.pipeline


def _names(plan: Plan, position: int) -> list[dict[str, Any]]:
    stages = plan.stages_of(position)
    held = collapse(layer.name for stage in stages for layer in plan.stages[stage].layers)
    name = f"stage {', '.join(str(stage) for stage in stages)}: {gpus_of(plan, position)}, {held}"
    common = {"ph": "M", "pid": position}
    return [
        {**common, "name": "process_name", "args": {"name": name}},
        {**common, "name": "process_sort_index", "args": {"sort_index": position}},
        *({**common, "tid": t, "name": "thread_name", "args": {"name": thread}} for t, thread in _THREADS.items()),
    ]


def _pass(plan: Plan, step: Played, event: Event) -> list[dict[str, Any]]:
    kind, rank = event.action.kind, event.rank
    stage = stage_of(plan.schedule, rank, event.action.chunk, plan.degrees.pipeline)
    arguments = {"micro-batch": event.action.microbatch, "stage": stage, "chunk": event.action.chunk}
    found = [_slice(f"{kind} {event.action.microbatch}", rank, _PASSES, event.start_s, event.end_s, arguments)]
    causes = step.causes[stage].get(kind, {})
    if kind == "weight" or abs(sum(causes.values()) - (event.end_s - event.start_s)) > 1e-6 * event.end_s:
        return found
    start = event.start_s
    for cause, seconds in causes.items():
        name = "transfer" if cause == "pipeline" else cause
        found.append(_slice(name, rank, _CAUSES, start, start + seconds, arguments))
        start += seconds
    return found


def _slice(
    name: str, process: int, thread: int, start_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s)}
    return {"ph": "X", "name": name, "cat": "step", "pid": process, "tid": thread, **times, "args": arguments}


def _arrows(plan: Plan, step: Played) -> list[dict[str, Any]]:
    """From each pass to that of the next stage (forward) or the one before (backward) that takes its result."""
    ends = {}
    for event in step.events:
        stage = stage_of(plan.schedule, event.rank, event.action.chunk, plan.degrees.pipeline)
        ends[event.action.kind, event.action.microbatch, stage] = event
    found: list[dict[str, Any]] = []
    for (kind, microbatch, stage), event in ends.items():
        source = ends.get((kind, microbatch, stage - 1 if kind == "forward" else stage + 1))
        if kind == "weight" or source is None or source.rank == event.rank:
            continue
        common = {"name": kind, "cat": "transfer", "id": len(found) // 2}
        at = 1e6 * source.end_s - 1e-3
        found.append({**common, "ph": "s", "pid": source.rank, "tid": _PASSES, "ts": at})
        found.append({**common, "ph": "f", "bp": "e", "pid": event.rank, "tid": _PASSES, "ts": 1e6 * event.start_s})
    return found


def _held(plan: Plan, step: Played, peaks: list[float]) -> list[dict[str, Any]]:
    """Activations of each rank over time, in proportion to the micro-batches that it holds."""
    frees = "weight" if any(event.action.kind == "weight" for event in step.events) else "backward"
    changes: list[tuple[int, float, int]] = []
    for event in step.events:
        if event.action.kind == "forward":
            changes.append((event.rank, event.start_s, 1))
        elif event.action.kind == frees:
            changes.append((event.rank, event.end_s, -1))
    found: list[dict[str, Any]] = []
    for rank in range(plan.degrees.pipeline):
        held, counts = 0, []
        for _, at, change in sorted(c for c in changes if c[0] == rank):
            held += change
            counts.append((at, held))
        most = max(count for _, count in counts)
        for at, count in counts:
            gib = count / most * peaks[rank] / GIB
            common = {"ph": "C", "name": "activations, GiB", "pid": rank, "ts": 1e6 * at}
            found.append({**common, "args": {"GiB": round(gib, 3)}})
    return found
