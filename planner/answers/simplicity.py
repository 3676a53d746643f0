"""Which of two plans that are about as fast a practitioner would rather run: the one with less machinery."""

from ..cost.bands import memory_band
from ..cost.estimate import Estimate
from ..plan.document import AXES, Plan
from ..plan.schedules import ZERO_BUBBLE

HEADROOM = 0.04
"""Of a device's budget: what a plan leaves free where no band of memory predictions is known."""


def simplicity(plan: Plan, found: Estimate) -> tuple[float, ...]:
    """Smaller is simpler, the first difference decides: the most demanding mechanism, how many kinds of parallelism,
    how data ranks share the model, layers recomputed, micro-batches accumulated without a pipeline, whether the mesh
    axes are out of their usual order, and bytes by which memory comes nearer to the budget than predictions are sure.
    Context ranks shard the model's state between them, which is a kind of its own.
    """
    return *machinery(plan), _shortfall(plan, found)


def machinery(plan: Plan) -> tuple[int, ...]:
    """What makes a plan simple or not, memory apart, in the order of `simplicity`."""
    degrees, layers = plan.degrees, plan.layers
    kinds = (degrees.data_replicate, degrees.sharded_over, degrees.tensor, degrees.context, degrees.expert)
    used = [axis for axis in plan.mesh_axes if degrees.of(axis) > 1]
    return (
        mechanism(plan),
        sum(degree > 1 for degree in (*kinds, degrees.pipeline)) + plan.sequence_parallel,
        _of_data(plan),
        sum(layer.recompute != "none" for layer in layers),
        plan.num_microbatches if degrees.pipeline == 1 else 0,
        used != [axis for axis in AXES if degrees.of(axis) > 1],
    )


def preference(plan: Plan, found: Estimate) -> tuple[object, ...]:
    """Smaller is preferred among plans that are about as fast: the simpler one; of equally simple layouts the first in
    an order that no price has a say in, so that small changes of the question leave the answer; of plans of one layout
    the faster one."""
    degrees = plan.degrees
    ranks = degrees.pipeline, degrees.virtual_stages, degrees.tensor, degrees.context, degrees.expert
    named = plan.schedule, plan.context_kind, plan.mesh_axes
    return *simplicity(plan, found), *ranks, degrees.data_replicate, *named, found.step_time_s


def mechanism(plan: Plan) -> int:
    """The most demanding mechanism of a plan: one device, DDP, ZeRO-1 or 2, FSDP, HSDP, tensor, context or expert
    parallelism, a pipeline by 1F1B or GPipe, an interleaved one, one with zero bubbles."""
    degrees = plan.degrees
    if degrees.pipeline > 1:
        return 9 if plan.schedule in ZERO_BUBBLE else 8 if degrees.virtual_stages > 1 else 7
    if degrees.context > 1 or degrees.expert > 1:
        return 6
    return 5 if degrees.tensor > 1 else _of_data(plan)


def _of_data(plan: Plan) -> int:
    """How data ranks share the model: not at all, as replicas, gathered once a step (ZeRO-1 or 2), layer by layer
    (FSDP), within groups of them (HSDP)."""
    degrees = plan.degrees
    if degrees.sharded_over == 1:
        return int(degrees.data_replicate > 1)
    if degrees.data_replicate > 1:
        return 4
    return 3 if plan.zero_stage == 3 else 2


def _shortfall(plan: Plan, found: Estimate) -> float:
    """Bytes by which the fullest stage may exceed its budget if memory is as much more than predicted as one published
    run in ten."""
    band = memory_band(plan)
    more = 1 + HEADROOM if band is None else max(1.0, band.high)
    return max(0.0, *(stage.device_bytes * more - stage.budget_bytes for stage in found.memory))
