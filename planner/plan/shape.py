"""Shapes, each of which is one choice of degrees, schedule and micro-batch, and the options of layers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from .document import AXES, Axis, ContextKind, Degrees, Recompute, layout_name
from .schedules import ZERO_BUBBLE, Schedule, rank_and_chunk, rank_in_flight, rank_put_off


class InFlight(NamedTuple):
    """Micro-batches of a stage at the moment when its rank holds most. held: those whose activations are there. splits:
    a zero-bubble schedule divides the backward into one for inputs and one for weights. put_off: how many of those held
    wait for the backward for weights, when the next one for inputs begins."""

    held: int
    put_off: int = 0
    splits: bool = False


@dataclass(frozen=True)
class Cuts:
    """The cuts that tensor parallelism applies, out of those that the profile has. by_class: (class, names of its cuts)
    for each class with any."""

    by_class: tuple[tuple[str, tuple[str, ...]], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.by_class)

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        return dict(self.by_class)

    def of(self, layer_class: str) -> tuple[str, ...]:
        """Names of the cuts of a class."""
        return self._names.get(layer_class, ())


@dataclass(frozen=True)
class Shape:
    """Everything that a plan decides except which layers are on which stage and their options; the ILP chooses among
    shapes by y_k."""

    data_replicate: int
    data_shard: int
    tensor: int
    pipeline: int
    micro_batch: int
    num_microbatches: int
    sequence: bool = False
    schedule: Schedule = "none"
    virtual_stages: int = 1
    gradient_sync: Literal["every", "last"] = "last"
    reshard: bool = False
    """Pipelines only: all layers give gathered parameters back after forward. Without a pipeline each layer chooses."""
    mesh_axes: tuple[Axis, ...] = AXES
    context: int = 1
    context_kind: ContextKind = "ring"
    expert: int = 1
    offload_optimizer: bool = False
    kind_order: tuple[int, ...] = ()
    """Numbers of the kinds of devices, in the order of the stages, if devices are unequal and each stage lies on one
    kind. () if devices are equal or all count as the slowest; also in the shape of a plan, whose cluster has that order
    already."""
    cuts: Cuts | None = None
    """Cuts of tensor parallelism; None: all that the degree divides."""

    @property
    def samples(self) -> float:
        """Work that a rank has in one micro-batch, in samples: context ranks share the tokens of each sample, and each
        has s^2 / context of its s^2 scores."""
        return self.micro_batch / self.context

    @property
    def sharded_over(self) -> int:
        """Ranks that parameters are sharded over."""
        return self.data_shard * self.context

    @property
    def shard_stride(self) -> int:
        """Distance in ranks between neighbours of the group that parameters are sharded over."""
        return self.stride("data_shard" if self.context == 1 else "context")

    @property
    def experts_over(self) -> int:
        """Number of ranks of a stage that hold different tokens and share the experts."""
        return self.sharded_over * (self.tensor if self.sequence else 1)

    @property
    def same_experts(self) -> int:
        """Number of ranks that hold the same experts, and shard them between each other."""
        return self.experts_over // self.expert

    @property
    def expert_stride(self) -> int:
        """Distance in ranks between neighbours over which experts are spread: the nearest ranks with other tokens."""
        axes: tuple[Axis, ...] = ("data_shard", "context", "tensor")
        spread = axes if self.sequence else axes[:2]
        return min((self.stride(axis) for axis in spread if self.degree(axis) > 1), default=1)

    @property
    def data(self) -> int:
        """Number of ranks that see different samples."""
        return self.data_replicate * self.data_shard

    @property
    def degrees(self) -> Degrees:
        """The degrees as the plan states them."""
        return Degrees(
            data_replicate=self.data_replicate,
            data_shard=self.data_shard,
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
            pipeline=self.pipeline,
            virtual_stages=self.virtual_stages,
        )

    def degree(self, axis: Axis) -> int:
        """Degree of a mesh axis."""
        return int(getattr(self, axis))

    def stride(self, axis: Axis) -> int:
        """Distance in ranks between neighbours on a mesh axis."""
        return self._strides[axis]

    @cached_property
    def _strides(self) -> dict[Axis, int]:
        found, stride = {}, 1
        for axis in reversed(self.mesh_axes):
            found[axis], stride = stride, stride * self.degree(axis)
        return found

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds when its rank holds most; counted from the schedule's table."""
        if self.schedule == "1f1b":
            return min(self.num_microbatches, self.pipeline - stage)
        if self.schedule in ("none", "gpipe"):
            return self.num_microbatches if self.schedule == "gpipe" else 1
        rank, chunk = rank_and_chunk(self.schedule, stage, self.pipeline)
        held = rank_in_flight(self.schedule, self.pipeline, self.num_microbatches, self.virtual_stages)[rank]
        return held[chunk] if chunk < len(held) else 0

    def flights(self, stage: int) -> InFlight:
        """Micro-batches of a stage in flight. On the first stage nobody waits for gradients of inputs, so its backward
        is not divided: it runs as a whole when the one for weights would."""
        if stage == 0 or self.schedule not in ZERO_BUBBLE:
            return InFlight(min(self.in_flight(stage), self.num_microbatches))
        rank, chunk = rank_and_chunk(self.schedule, stage, self.pipeline)
        waiting = rank_put_off(self.schedule, self.pipeline, self.num_microbatches, self.virtual_stages)[rank]
        return InFlight(min(self.in_flight(stage), self.num_microbatches), waiting[chunk], True)

    @property
    def layout(self) -> tuple[object, ...]:
        """Properties of a shape that people tell layouts apart by."""
        return self.degrees, self.schedule, self.micro_batch, self.sequence, self.context_kind

    @property
    def label(self) -> str:
        """The shape's degrees in words. For a whole plan use Plan.label, which also tells ZeRO stages apart."""
        return layout_name(self.degrees, self.schedule, self.sequence, self.context_kind)


@dataclass(frozen=True)
class LayerOption:
    """Choices for one layer: its recompute, whether gathered parameters are given back after forward, and offload."""

    recompute: Recompute = "none"
    reshard: bool = False
    offload: bool = False
    """What the layer keeps for its backward waits in the host's memory."""


Offered = frozenset[Literal["parts", "offload"]]
"""Options of layers beyond the usual ones: recompute of any of their parts, and activations in the host's memory."""

NO_EXTRAS: Offered = frozenset()
