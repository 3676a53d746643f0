"""Bytes of model state and of gathered copies, per parameter, as FSDP2 and DDP hold them."""

from dataclasses import dataclass

from .strategy import Shape
from .training import TrainingSpec

MASTER_BYTES = 4
"""Parameters and gradients between steps are fp32, sharded (FSDP2 mixed precision; DDP under autocast)."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one parameter element costs on a rank that holds its tensor-parallel shard.

    sharded_*: always there. gathered: there from the first forward to the end of the step if the parameter stays
    gathered. passing: there only while its layer (and the next, being prefetched) runs. accumulated: what unsharded
    gradients, kept between micro-batches, take beyond their shards. root_gradients: the part of passing_gradients that
    lasts for the whole backward where parameters belong to fully_shard's root. new_gradient: for one parameter at a
    time, while its gradient is being added to the one that is there. held_twice: what the sum over layers of what they
    hold has too much for an element that two layers of a stage read.
    """

    sharded_parameters: float
    sharded_gradients: float
    optimizer: float
    optimizer_temporaries: float
    gathered: float
    accumulated: float
    passing_gradients: float
    root_gradients: float
    new_gradient: float
    held_twice: float


def state_bytes(shape: Shape, training: TrainingSpec) -> StateBytes:
    """Bytes per parameter element under a shape.

    fully_shard (data_shard or tensor above 1, pipelines in bf16): compute copies of gathered layers; gradients of the
    layer at work in compute dtype and fp32 until reduced; fp32 accumulations where gradients are reduced only after
    the last of several micro-batches. DDP and one device: autocast's compute copies; gradients in place, to which new
    ones, in fp32 and in the compute dtype, are added: with DDP always, else from the second micro-batch on.
    AdamW's foreach step makes one fp32 temporary of the shard.
    An accumulated gradient shrinks to its shard when it is reduced, layer by layer, so both together are never more
    than the whole of it. Tied weights of one stage stay gathered with fully_shard's root, even where a pipeline gives
    everything else back: then the layers count no copy, where there is one.
    """
    shard = shape.data_shard
    fully_sharded = uses_fully_shard(shape, training)
    accumulates = fully_sharded and shape.gradient_sync == "last" and shape.num_microbatches > 1
    copies = training.compute_bytes if fully_sharded or training.is_mixed else 0
    accumulated = MASTER_BYTES * (1 - 1 / shard) if accumulates else 0
    root_gradients = training.compute_bytes if fully_sharded else 0
    adds = not fully_sharded and (shape.num_microbatches > 1 or (shape.data_replicate > 1 and shape.pipeline == 1))
    new_gradient = MASTER_BYTES + (training.compute_bytes if training.is_mixed else 0)
    return StateBytes(
        sharded_parameters=MASTER_BYTES / shard,
        sharded_gradients=MASTER_BYTES / shard,
        optimizer=training.state_bytes / shard,
        optimizer_temporaries=(MASTER_BYTES if training.optimizer == "adamw" else 0) / shard,
        gathered=copies,
        accumulated=accumulated,
        passing_gradients=training.compute_bytes + MASTER_BYTES if fully_sharded else 0,
        root_gradients=root_gradients,
        new_gradient=new_gradient if adds else 0,
        held_twice=accumulated
        + (-copies if fully_sharded and shape.reshard else copies)
        + (root_gradients if shape.pipeline == 1 else 0),
    )


def uses_fully_shard(shape: Shape, training: TrainingSpec) -> bool:
    """Whether the executor wraps layers in FSDP2; else plain DDP, or nothing on one data rank."""
    mixed_pipeline = shape.pipeline > 1 and training.is_mixed
    return shape.data_shard > 1 or shape.tensor > 1 or mixed_pipeline
