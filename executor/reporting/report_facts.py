"""What a report says of a plan, as plain data: alternatives, sensitivity, one step played out, who sits where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import networkx as nx

from ...planner.answers.candidate import Candidate
from ...planner.answers.landscape import landscape, weighed
from ...planner.answers.sensitivity import Shift, sensitivity
from ...planner.cost.estimate import Estimate, StageMemory, estimate, priced_stages
from ...planner.cost.priced_layer import LayerCost
from ...planner.cost.simulate import Event, simulate
from ...planner.plan.document import Plan
from ...planner.plan.schedules import stage_of
from ...profiler.model.layer_graph import graph_of
from ...profiler.model.model_profile import ModelProfile
from .report import candidate_document

DRAWN_PASSES = 5000
"""Passes of micro-batches in a timeline, unless one round of the pipeline has more: what a browser draws at once."""

EXPLORED_SECONDS = 8.0
"""Time for pricing alternatives beside a plan; the rules of thumb are priced in any case."""


@dataclass(frozen=True)
class Played:
    """One step by event simulation: passes in order, and per pipeline rank the end of its passes and of its step.
    causes: [stage]["forward" or "backward"] -> seconds of one pass by cause."""

    events: tuple[Event, ...]
    passes_end_s: tuple[float, ...]
    step_end_s: tuple[float, ...]
    num_microbatches: int
    causes: tuple[dict[str, dict[str, float]], ...]

    @property
    def seconds(self) -> float:
        """The end of the last rank's step."""
        return max(self.step_end_s)


@dataclass(frozen=True)
class HostPattern:
    """Hosts whose devices hold the same stages: [device] -> pipeline coordinate."""

    positions: tuple[int, ...]
    hosts: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """Everything that a report draws. alternatives: the list of what was weighed beside the plan; others: more layouts,
    priced for the picture of time against memory."""

    plan: Plan
    estimate: Estimate
    alternatives: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    shifts: tuple[Shift, ...]
    spare_memory: str
    played: Played
    patterns: tuple[HostPattern, ...]
    ideal_s: float
    graph: nx.DiGraph
    """Of the plan's model, with bytes of one sample in the dtype that the plan computes in."""


def gather(
    plan: Plan,
    profile: ModelProfile,
    say: Callable[[str, float | None], None] = lambda *_: None,
    seconds: float = EXPLORED_SECONDS,
) -> Facts:
    """The facts of a plan's report; seconds: how long alternatives are looked for. Raises ValueError when the plan is
    for another model."""
    found = estimate(plan, profile)
    say("pricing alternatives", None)
    listed = weighed(plan, found, profile, seconds)
    others = tuple(landscape(plan, found, profile, listed, seconds))
    say("playing the schedule", None)
    return Facts(
        plan=plan,
        estimate=found,
        alternatives=listed,
        others=others,
        shifts=sensitivity(plan, found, profile, (*listed, *others)),
        spare_memory=_spare_memory(found),
        played=played(plan, profile, found, drawn_microbatches(plan)),
        patterns=host_patterns(plan),
        ideal_s=found.mfu * found.step_time_s,
        graph=graph_of(profile, plan.training.compute_bytes),
    )


def facts_document(facts: Facts) -> dict[str, Any]:
    """What a report says, as plain data: estimate, alternatives, sensitivity and the room that is left."""
    return {
        "kind": "meshwright-report",
        "estimate": facts.estimate.model_dump(mode="json"),
        "alternatives": [candidate_document(each) for each in facts.alternatives],
        "shifts": [
            {**{name: getattr(shift, name) for name in ("name", "value", "lower_s", "higher_s")}, "overtaken_by": word}
            for shift in facts.shifts
            for word in (None if shift.overtaken_by is None else str(shift.overtaken_by),)
        ],
        "spare_memory": facts.spare_memory,
    }


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (memory, time) that none beats in both, from little memory to much."""
    best: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], points[i][1])):
        if not best or points[i][1] < points[best[-1]][1]:
            best.append(i)
    return best


def _spare_memory(found: Estimate) -> str:
    """How much less memory a device may have before the plan no longer fits."""
    fullest = max(found.memory, key=lambda stage: stage.device_bytes / stage.budget_bytes)
    spare = 1.0 - fullest.device_bytes / fullest.budget_bytes
    if spare < 0:
        return f"The plan is over its budget by {-spare:.0%}."
    fits = "still fits" if spare >= 0.2 else "no longer fits"
    return f"With 20% less device memory the plan {fits}: {spare:.0%} of the budget is free on the fullest GPU."


def drawn_microbatches(plan: Plan) -> int:
    """How many of a step's micro-batches a timeline shows: all, or some rounds of the pipeline."""
    degrees = plan.degrees
    passes = degrees.pipeline * degrees.virtual_stages * (3 if plan.schedule.startswith("zb") else 2)
    rounds = max(1, min(3, DRAWN_PASSES // (passes * degrees.pipeline)))
    most = max(6, rounds * degrees.pipeline)
    return min(plan.num_microbatches, most)


def played(plan: Plan, profile: ModelProfile, found: Estimate, num_microbatches: int) -> Played:
    """So many micro-batches of a step, played as the plan's schedule has them; each rank ends with what it does once
    (the last gradients and the optimizer)."""
    stages = priced_stages(plan, profile)
    costs = [cost for cost, _ in stages]
    ranks = plan.degrees.pipeline
    events = simulate(
        plan.schedule,
        [cost.forward_s for cost in costs],
        [cost.backward_s for cost in costs],
        num_microbatches,
        [cost.weight_s for cost in costs],
        ranks,
    )
    ends = [max(event.end_s for event in events if event.rank == rank) for rank in range(ranks)]
    return Played(
        events=tuple(events),
        passes_end_s=tuple(ends),
        step_end_s=tuple(end + once for end, once in zip(ends, found.stage_once_s, strict=True)),
        num_microbatches=num_microbatches,
        causes=tuple(
            {
                "forward": _causes(layers, "forward", cost.forward_s),
                "backward": _causes(layers, "backward", cost.backward_s),
            }
            for cost, layers in stages
        ),
    )


_CAUSES = tuple(
    field.name.removesuffix("_forward_s") for field in fields(LayerCost) if field.name.endswith("_forward_s")
)
"""Kinds of communication that a layer's passes wait for."""


def _causes(layers: Sequence[LayerCost], part: str, total_s: float) -> dict[str, float]:
    """Seconds of one pass through a stage by cause; what its layers do not account for is waiting for its neighbours'
    tensors ("pipeline")."""
    found = {"compute": sum(getattr(layer, f"{part}_s") for layer in layers)}
    if part == "backward":
        found["recompute"] = sum(layer.recompute_s for layer in layers)
    for cause in _CAUSES:
        found[cause] = sum(getattr(layer, f"{cause}_{part}_s") for layer in layers)
    found["pipeline"] = total_s - sum(found.values())
    return {cause: seconds for cause, seconds in found.items() if seconds > 1e-6 * total_s}


def stage_of_event(plan: Plan, event: Event) -> int:
    """The stage that an event's pass goes through."""
    return stage_of(plan.schedule, event.rank, event.action.chunk, plan.degrees.pipeline)


def host_patterns(plan: Plan) -> tuple[HostPattern, ...]:
    """The cluster's hosts, joined where their devices hold the same stages."""
    stride, pipeline = plan.stride("pipeline"), plan.degrees.pipeline
    found: dict[tuple[int, ...], list[int]] = {}
    rank = 0
    for group in plan.cluster.hosts:
        for _ in range(group.count):
            ranks = range(rank, rank + group.devices_per_host)
            host = plan.cluster.host_of(rank)[0]
            found.setdefault(tuple(r // stride % pipeline for r in ranks), []).append(host)
            rank += group.devices_per_host
    return tuple(HostPattern(positions, tuple(hosts)) for positions, hosts in found.items())


def collapsed(stages: Sequence[StageMemory]) -> list[tuple[int, int, StageMemory]]:
    """(first, last, memory) of neighbouring ranks whose items are equal to 0.1 GiB."""
    rows: list[tuple[int, int, StageMemory]] = []
    for i, stage in enumerate(stages):
        if rows and _figures(rows[-1][2]) == _figures(stage):
            rows[-1] = (rows[-1][0], i, rows[-1][2])
        else:
            rows.append((i, i, stage))
    return rows


def _figures(stage: StageMemory) -> tuple[float, ...]:
    return tuple(round(size / 2**30, 1) for size in stage.items.values())
