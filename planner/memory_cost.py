"""Bytes of model state and of gathered copies, per parameter, as FSDP2 and DDP hold them."""

from dataclasses import dataclass

from .strategy import Shape
from .training import TrainingSpec

MASTER_BYTES = 4
"""Parameters and gradients between steps are fp32, sharded (FSDP2 mixed precision; DDP under autocast)."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one parameter element costs on a rank that holds its tensor-parallel shard.

    sharded_*: always there. gathered: of a compute copy. accumulated: what unsharded gradients, kept between
    micro-batches, take beyond their shards. root_gradients: of gradients that fully_shard's root reduces at the end of
    the backward; root_end: what that takes beyond their shards. new_gradient: for one parameter at a time, while its
    gradient is being added to the one that is there (its compute copy is gone by then). copied_twice: what the sum over
    layers of the copies that they hold has too much for an element that two layers of a stage read. gradients_stay:
    they are there before the first backward, too. copies_stay: what is kept gathered is kept until the last
    micro-batch. on_host: optimizer state is in the host's memory, and the step is done there.
    """

    sharded_parameters: float
    sharded_gradients: float
    optimizer: float
    optimizer_temporaries: float
    gathered: float
    accumulated: float
    root_gradients: float
    root_end: float
    new_gradient: float
    copied_twice: float
    gradients_stay: bool
    copies_stay: bool
    on_host: bool


def state_bytes(shape: Shape, training: TrainingSpec) -> StateBytes:
    """Bytes per parameter element under a shape.

    fully_shard (data_shard or tensor above 1, pipelines in bf16): compute copies of gathered layers; fp32 accumulations
    where gradients are reduced only after the last of several micro-batches. DDP and one device: autocast's compute
    copies; gradients in place, to which new ones are added: with DDP always (they are views of its buckets), else from
    the second micro-batch on. AdamW's foreach step makes one fp32 temporary of the shard. An accumulated gradient
    shrinks to its shard when it is reduced, layer by layer, so both together are never more than the whole of it. Tied
    weights of one stage stay gathered with fully_shard's root, even where a pipeline gives everything else back: then
    the layers count no copy, where there is one.
    """
    shard = shape.sharded_over
    fully_sharded = uses_fully_shard(shape, training)
    accumulates = fully_sharded and shape.gradient_sync == "last" and shape.num_microbatches > 1
    on_host = shape.offload_optimizer
    copies = training.compute_bytes if fully_sharded or training.is_mixed else 0
    replicas = not fully_sharded and shape.data_replicate > 1 and shape.pipeline == 1
    accumulated = MASTER_BYTES * (1 - 1 / shard) if accumulates else 0
    return StateBytes(
        sharded_parameters=MASTER_BYTES / shard,
        sharded_gradients=MASTER_BYTES / shard,
        optimizer=0.0 if on_host else training.state_bytes / shard,
        optimizer_temporaries=0.0 if on_host or training.optimizer != "adamw" else MASTER_BYTES / shard,
        gathered=copies,
        accumulated=accumulated,
        root_gradients=training.compute_bytes if fully_sharded else 0,
        root_end=MASTER_BYTES + (accumulated if accumulates else training.compute_bytes) if fully_sharded else 0,
        new_gradient=MASTER_BYTES if not fully_sharded and (shape.num_microbatches > 1 or replicas) else 0,
        copied_twice=-copies if fully_sharded and shape.reshard and shape.pipeline > 1 else copies,
        gradients_stay=replicas,
        copies_stay=accumulates,
        on_host=on_host,
    )


def uses_fully_shard(shape: Shape, training: TrainingSpec) -> bool:
    """Whether the executor wraps layers in FSDP2; else plain DDP, or nothing on one data rank."""
    mixed_pipeline = shape.pipeline > 1 and training.is_mixed
    return shape.sharded_over > 1 or shape.tensor > 1 or mixed_pipeline
