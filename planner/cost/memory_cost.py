"""Bytes of model state and of gathered copies, per parameter element, as FSDP2 and DDP hold them."""

from dataclasses import dataclass

from ..plan.shape import Shape
from ..plan.training import TrainingSpec
from .software import load_software

MASTER_BYTES = 4
"""Bytes of an element of parameters and of gradients between steps: fp32, sharded (FSDP2's mixed precision; DDP under
autocast)."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one parameter element costs on a rank that holds its tensor-parallel shard.

    sharded_*: always there. gathered: of a compute copy. accumulated: what unsharded gradients, kept between
    micro-batches, take beyond their shards. root_gradients: of gradients that fully_shard's root reduces at the end of
    the backward; root_end: what that takes beyond their shards. new_gradient: for one parameter at a time, while its
    gradient is being added to the one that is there (its compute copy is gone by then). copied_twice: what is too much
    for an element that two layers of a stage read, when the copies that layers hold are added up. gradients_stay: they
    are there before the first backward, too. copies_stay: what is kept gathered is kept until the last micro-batch.
    on_host: optimizer state is in the host's memory, and the step is done there. buffers: `gathered` and `accumulated`
    are there whole, all step long.
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
    buffers: bool = False


def state_bytes(shape: Shape, training: TrainingSpec) -> StateBytes:
    """Bytes per parameter element under a shape.

    With fully_shard (see uses_fully_shard): compute copies of gathered layers, and fp32 accumulations if gradients are
    reduced only after the last of several micro-batches. Without it: autocast's compute copies, and gradients in place,
    to which new ones are added (with DDP always, as they are views of its buckets, else from the second micro-batch
    on). AdamW's foreach step makes one fp32 temporary of the shard. An accumulated gradient shrinks to its shard when
    it is reduced, layer by layer, so both together are never more than the whole of it. Tied weights of one stage stay
    gathered with fully_shard's root, even if a pipeline gives everything else back: then the layers count no copy,
    although there is one.
    """
    if uses_buffers(shape, training):
        return _in_buffers(shape, training)
    shard, stack = shape.sharded_over, load_software(training.software).memory
    own_bytes = training.compute_bytes if stack.pure else MASTER_BYTES
    held = training.state_bytes * own_bytes / MASTER_BYTES + stack.optimizer_copies
    fully_sharded = uses_fully_shard(shape, training)
    accumulates = fully_sharded and shape.gradient_sync == "last" and shape.num_microbatches > 1
    on_host = shape.offload_optimizer
    copies = training.compute_bytes if fully_sharded or (training.is_mixed and not stack.pure) else 0
    replicas = not fully_sharded and shape.data_replicate > 1 and shape.pipeline == 1
    accumulated = own_bytes * (1 - 1 / shard) if accumulates else 0
    return StateBytes(
        sharded_parameters=own_bytes / shard,
        sharded_gradients=own_bytes / shard,
        optimizer=0.0 if on_host else held / shard,
        optimizer_temporaries=0.0 if on_host or training.optimizer != "adamw" else own_bytes / shard,
        gathered=copies,
        accumulated=accumulated,
        root_gradients=training.compute_bytes if fully_sharded else 0,
        root_end=own_bytes + (accumulated if accumulates else training.compute_bytes) if fully_sharded else 0,
        new_gradient=own_bytes if not fully_sharded and (shape.num_microbatches > 1 or replicas) else 0,
        copied_twice=-copies if fully_sharded and shape.reshard and shape.pipeline > 1 else copies,
        gradients_stay=replicas,
        copies_stay=accumulates,
        on_host=on_host,
    )


def _in_buffers(shape: Shape, training: TrainingSpec) -> StateBytes:
    stack, shard, on_host = load_software(training.software), shape.sharded_over, shape.offload_optimizer
    held = training.state_bytes * stack.memory.moments + stack.memory.optimizer_copies
    copies = training.compute_bytes
    return StateBytes(
        sharded_parameters=0.0 if on_host else MASTER_BYTES / shard,
        sharded_gradients=0.0,
        optimizer=0.0 if on_host else held / shard,
        optimizer_temporaries=0.0,
        gathered=copies,
        accumulated=stack.gradient_bytes + stack.memory.gradient_copies,
        root_gradients=0.0,
        root_end=0.0,
        new_gradient=0.0,
        copied_twice=copies,
        gradients_stay=True,
        copies_stay=True,
        on_host=on_host,
        buffers=True,
    )


def uses_buffers(shape: Shape, training: TrainingSpec) -> bool:
    """Whether weights and gradients lie in buffers, whole, all step long: in stacks that have such buffers, unless
    parameters are gathered layer by layer or gradients are reduced after every micro-batch."""
    if not training.is_mixed or shape.reshard or shape.gradient_sync == "every":
        return False
    return load_software(training.software).memory.buffers


def uses_fully_shard(shape: Shape, training: TrainingSpec) -> bool:
    """Whether the executor wraps layers in FSDP2; if not it uses plain DDP, or nothing on one data rank.

    FSDP2 is also used where nothing is sharded. It casts, so that layers of a tensor-parallel model and what crosses
    the cuts of a pipeline are bf16 (autocast keeps much of it in fp32); and it averages gradients of tensor-parallel
    replicas, and of experts that ranks share.
    """
    if shape.sharded_over > 1 or (training.is_mixed and shape.pipeline > 1):
        return True
    return shape.tensor > 1 and (training.is_mixed or shape.data_replicate > 1 or shape.expert > 1)
