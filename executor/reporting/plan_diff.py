"""What differs between two plans, and what the difference costs in time and memory, by cause."""

from dataclasses import dataclass

from ...planner.cost.estimate import Estimate
from ...planner.plan.document import Plan, parts_in_words
from .report import collapse


@dataclass(frozen=True)
class Change:
    """One decision that two plans take differently."""

    what: str
    first: str
    second: str


@dataclass(frozen=True)
class Cost:
    """One item of time (seconds) or memory (bytes of the fullest rank) of both plans."""

    name: str
    first: float
    second: float


@dataclass(frozen=True)
class PlanDifference:
    """Changes in the order of their weight; times and sizes where they are known."""

    changes: tuple[Change, ...]
    times: tuple[Cost, ...]
    sizes: tuple[Cost, ...]


def difference(first: Plan, second: Plan, priced: tuple[Estimate, Estimate] | None) -> PlanDifference:
    """What the second plan does differently. priced: both plans' estimates; without them only the totals that the
    documents state are compared."""
    times, sizes = _costs(*priced) if priced else _stated(first, second)
    batches = [plan.training.global_batch for plan in (first, second)]
    if times and batches[0] != batches[1]:
        times = (Cost("step per sample", times[0].first / batches[0], times[0].second / batches[1]), *times)
    return PlanDifference(tuple(_changes(first, second)), times, sizes)


def _changes(first: Plan, second: Plan) -> list[Change]:
    views = [_view(plan) for plan in (first, second)]
    return [Change(what, value, views[1][what]) for what, value in views[0].items() if value != views[1][what]]


def _view(plan: Plan) -> dict[str, str]:
    """Every decision of a plan in words; plans that differ anywhere differ in one of them."""
    degrees, training = plan.degrees, plan.training
    layers = plan.layers
    hosts = plan.cluster.num_hosts
    view = {
        "model": f"{plan.model.name} ({plan.model.fingerprint[:12]})",
        "cluster": f"{plan.cluster.devices} on {hosts:,} host{'s' if hosts > 1 else ''}",
        "links": f"{plan.cluster.link.bandwidth / 1e9:,.4g} GB/s",
        "network": f"{plan.cluster.between_hosts.bandwidth / 1e9:,.4g} GB/s per host",
        "layout": plan.label,
    }
    view |= {name.replace("_", " "): str(degree) for name, degree in degrees.model_dump().items()}
    view |= {
        "schedule": plan.schedule,
        "micro-batch": f"{plan.micro_batch} x {plan.num_microbatches}",
        "gradients reduced": "after every micro-batch"
        if plan.gradient_sync == "every"
        else "after the last micro-batch",
        "sequence parallel": "on" if plan.sequence_parallel else "off",
        "cut classes": ", ".join(f"{c.name} ({len(c.cuts)})" for c in plan.classes if c.cuts) or "none",
        "mesh, outermost first": ", ".join(axis for axis in plan.mesh_axes if degrees.of(axis) > 1) or "one device",
        "layers of each stage": _counted([len(stage.layers) for stage in plan.stages]),
    }
    for recompute in ("full", "selective", "attention"):
        view[f"recompute {recompute}"] = _named([layer.name for layer in layers if layer.recompute == recompute])
    ways: dict[str, list[str]] = {}
    for layer in layers:
        ways.setdefault(parts_in_words(layer.recompute), []).append(layer.name)
    view["recompute parts"] = "; ".join(f"{p}: {_named(names)}" for p, names in ways.items() if p) or "none"
    view["parameters given back"] = _named([layer.name for layer in layers if layer.reshard])
    known = {"model", "cluster", "training", "degrees", "mesh_axes", "schedule", "micro_batch", "num_microbatches"}
    known |= {"gradient_sync", "classes", "stages", "versions", "schema_version", "kind"}
    known |= {"prediction", "certificate", "alternatives", "measured"}  # what was found out, not what was decided
    view |= {name.replace("_", " "): str(getattr(plan, name)) for name in type(plan).model_fields if name not in known}
    view |= {f"job: {name.replace('_', ' ')}": str(value) for name, value in training.model_dump().items()}
    return view


def _named(names: list[str]) -> str:
    return f"{len(names)} layer{'s' if len(names) > 1 else ''}: {collapse(names)}" if names else "none"


def _counted(sizes: list[int]) -> str:
    """Runs of equal numbers joined: "8 x 14, 13"."""
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1] = (runs[-1][0] + 1, size)
        else:
            runs.append((1, size))
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def _costs(first: Estimate, second: Estimate) -> tuple[tuple[Cost, ...], tuple[Cost, ...]]:
    causes = dict.fromkeys((*first.breakdown, *second.breakdown))
    times = [Cost(name, first.breakdown.get(name, 0.0), second.breakdown.get(name, 0.0)) for name in causes]
    fullest = [max(found.memory, key=lambda stage: stage.device_bytes) for found in (first, second)]
    items = dict.fromkeys((*fullest[0].items, *fullest[1].items))
    sizes = [Cost(name, fullest[0].items.get(name, 0.0), fullest[1].items.get(name, 0.0)) for name in items]
    return (
        (Cost("step", first.step_time_s, second.step_time_s), *_largest_first(times)),
        (Cost("fullest GPU", fullest[0].device_bytes, fullest[1].device_bytes), *_largest_first(sizes)),
    )


def _largest_first(costs: list[Cost]) -> list[Cost]:
    return sorted((c for c in costs if c.first or c.second), key=lambda c: -abs(c.second - c.first))


def _stated(first: Plan, second: Plan) -> tuple[tuple[Cost, ...], tuple[Cost, ...]]:
    if first.prediction is None or second.prediction is None:
        return (), ()
    one, two = first.prediction, second.prediction
    step = Cost("step", one.step_time_s, two.step_time_s)
    return (step,), (Cost("fullest GPU", max(one.stage_memory_bytes), max(two.stage_memory_bytes)),)
