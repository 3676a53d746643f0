"""Puts layer costs together into one pipeline stage: seconds, and bytes by item. The only place that does."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..profiler.cluster import Device
from .compute_cost import optimizer_s
from .layer_cost import P2P_EXPOSED, Cut, LayerCost
from .memory_cost import StateBytes
from .plan import Axis
from .strategy import Shape
from .training import TrainingSpec


@dataclass(frozen=True)
class StageCost:
    """One stage on one rank: seconds per micro-batch and per step, and its peak of memory by item."""

    forward_s: float
    backward_s: float
    weight_s: float
    once_s: float
    optimizer_s: float
    items: dict[str, float]

    @property
    def microbatch_s(self) -> float:
        """Forward and backward of one micro-batch, waiting for the neighbours' tensors included."""
        return self.forward_s + self.backward_s

    @property
    def allocated_bytes(self) -> float:
        """Peak of what the allocator hands out."""
        return sum(self.items.values())


def combine(
    layers: Sequence[tuple[LayerCost, int]],
    in_flight: int,
    receives: Cut,
    sends: Cut,
    shared_elements: float,
    tie_s: float,
    state: StateBytes,
    training: TrainingSpec,
    device: Device,
    data_shard: int,
) -> StageCost:
    """Cost of a stage that holds each layer of `layers` the given number of times.

    Memory is the sum of what is kept plus the largest transient, or the optimizer step if that is more: activations
    are gone by then. receives, sends: the cuts before and behind the stage. shared_elements: parameter elements
    counted more than once because layers of this stage share them (tied weights). tie_s: seconds of summing the
    gradients of weights that are tied to weights of other stages.
    """
    elements = sum(cost.elements * n for cost, n in layers) - shared_elements
    trainable = sum(cost.trainable_elements * n for cost, n in layers) - shared_elements
    update_s = optimizer_s(trainable / data_shard, training.optimizer, device)
    items = {
        "parameters": elements * state.sharded_parameters,
        "gradients": trainable * state.sharded_gradients,
        "optimizer": trainable * state.optimizer,
        "gathered": sum(cost.held_bytes * n for cost, n in layers) - shared_elements * state.held_twice,
        "activations": in_flight * sum(cost.kept_bytes * n for cost, n in layers) + sent_bytes(sends, in_flight),
        "transient": max((cost.transient_bytes for cost, n in layers if n), default=0.0),
    }
    step_bytes = trainable * state.optimizer_temporaries
    passing = items["gathered"] + items["activations"] + items["transient"]
    items["transient"] += max(0.0, step_bytes - passing)
    return StageCost(
        forward_s=sum(cost.forward_total_s * n for cost, n in layers) + P2P_EXPOSED * receives.seconds,
        backward_s=sum(cost.backward_total_s * n for cost, n in layers) + P2P_EXPOSED * sends.seconds,
        weight_s=sum(cost.weight_s * n for cost, n in layers),
        once_s=sum(cost.once_data_s * n for cost, n in layers) + tie_s + update_s,
        optimizer_s=update_s,
        items=items,
    )


def on_one_rank(stages: Sequence[StageCost]) -> StageCost:
    """The account of a rank that holds several stages: all of each, and the largest transient."""
    items = {name: sum(stage.items[name] for stage in stages) for name in stages[0].items}
    items["transient"] = max(stage.items["transient"] for stage in stages)
    return StageCost(
        forward_s=sum(stage.forward_s for stage in stages),
        backward_s=sum(stage.backward_s for stage in stages),
        weight_s=sum(stage.weight_s for stage in stages),
        once_s=sum(stage.once_s for stage in stages),
        optimizer_s=sum(stage.optimizer_s for stage in stages),
        items=items,
    )


def sent_bytes(sends: Cut, in_flight: int) -> float:
    """Bytes that a stage holds of what it sends: outputs stay until their backward, and one set of their gradients."""
    return (in_flight + 1) * sends.bytes


def closed_form_s(microbatch_s: Sequence[float], once_s: Sequence[float], num_microbatches: int) -> float:
    """Seconds of one step: (m - 1) of the slowest stage, one pass through all, and the slowest end of a step.

    Exact for equal stages; for unequal ones within 1.00-1.17 (median 1.00) of the event simulation of 1F1B and GPipe.
    """
    return (num_microbatches - 1) * max(microbatch_s) + sum(microbatch_s) + max(once_s)


def allocatable_bytes(shape: Shape, device: Device, training: TrainingSpec) -> float:
    """Bytes that the allocator may hand out on one device: what is left of its memory after the margin, the context,
    the communicators, and the share lost to fragmentation."""
    return (budget_bytes(device, training) - outside_bytes(shape, device)) / (1.0 + device.fragmentation)


def budget_bytes(device: Device, training: TrainingSpec) -> float:
    """Bytes of a device that a plan may use in all."""
    return device.memory * (1.0 - training.memory_margin)


def outside_bytes(shape: Shape, device: Device) -> float:
    """Bytes outside the allocator: context, and one communicator per mesh axis in use."""
    axes: tuple[Axis, ...] = ("pipeline", "data_replicate", "data_shard", "tensor")
    return device.context + device.communicator * sum(shape.degree(axis) > 1 for axis in axes)
