"""Why one plan and not another, in words with numbers."""

from ..profiler.units import format_bytes, format_seconds
from .estimate import Estimate
from .plan import Plan

CAUSES = {
    "compute": "compute",
    "recompute": "recompute",
    "tensor": "tensor-parallel communication",
    "data": "exposed gradient and parameter communication",
    "pipeline": "pipeline bubble and waiting",
    "optimizer": "optimizer step",
}
"""Breakdown item -> how people call it."""


def does_not_fit(found: Estimate) -> str:
    """Which stage is over its budget, by how much, and its largest item."""
    stage, memory = max(enumerate(found.memory), key=lambda pair: pair[1].over_bytes)
    name, size = max(memory.items.items(), key=lambda item: item[1])
    where = f"stage {stage}" if len(found.memory) > 1 else "every GPU"
    return (
        f"does not fit: {where} needs {format_bytes(memory.device_bytes)} of {format_bytes(memory.budget_bytes)} "
        f"({name} {format_bytes(size)})"
    )


def compared(other: Estimate, best: Estimate, why_not: str = "less simple or with less memory to spare") -> str:
    """How much slower `other` is, and the cause that costs it most; if it is faster, why it is not the plan."""
    ratio = other.step_time_s / best.step_time_s - 1.0
    if abs(ratio) < 0.0005:
        return "as fast as the plan"
    extra = {name: other.breakdown[name] - best.breakdown[name] for name in CAUSES}
    cause = max(extra, key=lambda name: extra[name])
    pace = f"{1 + ratio:.1f} times as long" if ratio >= 1 else f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'}"
    if ratio < 0:
        return f"{pace}, but {why_not}"
    return f"{pace}: {format_seconds(extra[cause])} more {CAUSES[cause]}"


def reason(plan: Plan, found: Estimate, replicas: str | None = None) -> str:
    """Why the plan's main choices are what they are, in one clause each.

    replicas: the verdict on plain data parallelism, if it was priced.
    """
    degrees, reasons = plan.degrees, []
    if degrees.data_shard > 1:
        reasons.append(_why_sharded(replicas))
    if degrees.tensor > 1:
        inside = plan.cluster.group(degrees.tensor, plan.stride("tensor")).hosts == 1
        reasons.append(f"tensor parallelism {'stays inside a node' if inside else 'runs across nodes'}")
    if degrees.pipeline > 1:
        reasons.append(
            f"stages send only activations; the bubble costs {found.breakdown['pipeline'] / found.step_time_s:.0%}"
        )
    recomputed = sum(layer.recompute == "full" for stage in plan.stages for layer in stage.layers)
    total = sum(len(stage.layers) for stage in plan.stages)
    if recomputed:
        reasons.append(f"{recomputed} of {total} layers are recomputed to fit")
    return "; ".join(reasons) or "everything fits without sharding, and replicas communicate least"


def _why_sharded(replicas: str | None) -> str:
    if replicas is None:
        return "model state is sharded, as every GPU would otherwise hold all of it"
    if replicas.startswith("does not fit"):
        return f"replicas (DDP) are out: {replicas.removeprefix('does not fit: ')}"
    if " slower" in replicas:
        return f"replicas (DDP) would be {replicas}"
    if " as long" in replicas:
        return f"replicas (DDP) would take {replicas}"
    return "sharding the model state costs no time here and leaves more memory free than replicas (DDP)"
