"""Which of two plans that are about equally fast a practitioner would prefer to run: the one with less machinery."""

from ..cost.bands import memory_band
from ..cost.estimate import Estimate
from ..plan.document import AXES, Plan
from ..plan.schedules import ZERO_BUBBLE

HEADROOM = 0.04
"""Share of a device's budget that a plan should leave free if there is no band of memory predictions for it."""


def simplicity(plan: Plan, found: Estimate) -> tuple[float, ...]:
    """Sort key of a plan; smaller is simpler, and the first entry that differs decides. The entries are: the most
    demanding mechanism, the number of kinds of parallelism, how data ranks share the model, the number of recomputed
    layers, micro-batches accumulated without a pipeline, whether the mesh axes are out of their usual order, and bytes
    by which memory may exceed the budget within the band of predictions. Context ranks shard the model's state, which
    counts as a kind of its own."""
    return *machinery(plan), _shortfall(plan, found)


def machinery(plan: Plan) -> tuple[int, ...]:
    """The sort key of `simplicity` without its last entry, which is on memory."""
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
    """Sort key among plans that are about equally fast; smaller is preferred. First the simpler plan; then, among
    equally simple layouts, an order that does not depend on any price, so that small changes of the question do not
    change the answer; then, among plans of one layout, the faster one."""
    degrees = plan.degrees
    ranks = degrees.pipeline, degrees.virtual_stages, degrees.tensor, degrees.context, degrees.expert
    named = plan.schedule, plan.context_kind, plan.mesh_axes
    return *simplicity(plan, found), *ranks, degrees.data_replicate, *named, found.step_time_s


def mechanism(plan: Plan) -> int:
    """Rank of the most demanding mechanism of a plan, from 0 up: one device, DDP, ZeRO-1 or 2, FSDP, HSDP, tensor
    parallelism, context or expert parallelism, a pipeline by 1F1B or GPipe, an interleaved one, one with zero
    bubbles."""
    degrees = plan.degrees
    if degrees.pipeline > 1:
        return 9 if plan.schedule in ZERO_BUBBLE else 8 if degrees.virtual_stages > 1 else 7
    if degrees.context > 1 or degrees.expert > 1:
        return 6
    return 5 if degrees.tensor > 1 else _of_data(plan)


def _of_data(plan: Plan) -> int:
    """Rank, from 0 up, of how data ranks share the model: not at all, as replicas, gathered once a step (ZeRO-1 or 2),
    layer by layer (FSDP), or within groups of ranks (HSDP)."""
    degrees = plan.degrees
    if degrees.sharded_over == 1:
        return int(degrees.data_replicate > 1)
    if degrees.data_replicate > 1:
        return 4
    return 3 if plan.zero_stage == 3 else 2


def _shortfall(plan: Plan, found: Estimate) -> float:
    """Bytes by which the fullest stage would exceed its budget, if memory exceeded its prediction by as much as it does
    in one published run of ten."""
    band = memory_band(plan)
    more = 1 + HEADROOM if band is None else max(1.0, band.high)
    return max(0.0, *(stage.device_bytes * more - stage.budget_bytes for stage in found.memory))
