"""What crosses from one pipeline stage to the next: seconds and bytes at every place of the chain."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ...profiler.machine.cluster import Device
from ...profiler.model.model_profile import Costs, ModelProfile
from ..arrays import Flags, Floats, Ints
from ..plan.document import Axis
from ..plan.shape import Shape
from ..plan.training import TrainingSpec
from .comm_cost import GroupLinks, collective_s
from .compute_cost import Seconds
from .host_cost import FORWARD, SHARDED_UNIT
from .kept import kept, memo_by
from .kinds import Kind, kept_with_last
from .peak import Arrivals
from .software import Software

P2P_EXPOSED = 0.216
"""Share of a transfer between stages that its receiver waits for. Fit to published runs, see
benchmarks/published/fitted/fit.md."""


@dataclass(frozen=True)
class Cut:
    """What crosses one place of the chain for one micro-batch: seconds until the next stage has it; bytes of it that
    the stage before holds until its backward; and seconds that the host takes to call a stage, as far as the stage's
    work does not hide them."""

    seconds: float
    bytes: float
    call_s: float = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds that a stage loses in a pass by waiting for what crosses: the stage after the cut in the forward, the
        stage before it in the backward."""
        return P2P_EXPOSED * self.seconds + self.call_s


NOTHING = Cut(0.0, 0.0)
"""What crosses at the ends of the chain."""


class CrossingModel(Protocol):
    """The part of a cost model that prices of crossings need."""

    @property
    def profile(self) -> ModelProfile:
        """The model."""

    @property
    def training(self) -> TrainingSpec:
        """The job."""

    @property
    def software(self) -> Software:
        """The training stack."""

    @property
    def device(self) -> Device:
        """The cluster's device, as the stack uses it."""

    @property
    def kinds(self) -> Sequence[Kind]:
        """[layer] -> its kind."""

    def mode(self, kind: Kind, shape: Shape) -> tuple[str, Costs, int]:
        """(name, observed costs, tensor degree) that a kind runs with under a shape."""

    def axis_links(self, shape: Shape, axis: Axis) -> GroupLinks:
        """Links of a mesh axis."""

    def compute(self, kind: Kind, shape: Shape) -> Seconds:
        """Compute seconds of a layer for one micro-batch."""


class Crossings:
    """Prices what crosses between the layers of one model on one cluster, with caches."""

    def __init__(self, model: CrossingModel) -> None:
        self._model = model

    @cached_property
    def _counts(self) -> Counter[Kind]:
        """Kind -> number of layers."""
        return Counter(self._model.kinds)

    @memo_by(lambda _, shape: (work_of(shape), shape.pipeline, shape.virtual_stages, shape.stride("pipeline")))
    def cuts(self, shape: Shape) -> list[Cut]:
        """[place of the chain] -> what crosses there in the forward (the backward returns the same): before the first
        layer, between layers, after the last. Megatron's schedules replace an output by a scalar once it is sent, as
        only its node of autograd is used again (megatron/core/pipeline_parallel/schedules.py,
        deallocate_output_tensor)."""
        links = self._model.axis_links(shape, "pipeline")
        sizes, call_s = self._bytes(shape), self._call_s(shape)
        share = 0.0 if self._model.software.memory.frees_sent else 1.0
        cuts = {size: Cut(collective_s("p2p", size, links), share * size, call_s) for size in set(sizes)}
        return [cuts[size] if size else NOTHING for size in sizes]

    @memo_by(lambda _, shape: (work_of(shape), shape.pipeline, shape.virtual_stages))
    def _call_s(self, shape: Shape) -> float:
        """Seconds that a device waits for the host to send a micro-batch through a stage. 0 if the host is far enough
        ahead after an average stage, because the stage's kernels take longer than the host takes to issue them."""
        ahead_s = sum(count * self._ahead_s(kind, shape) for kind, count in self._counts.items())
        return max(0.0, self._model.software.host_stage_s - ahead_s / (shape.pipeline * shape.virtual_stages))

    def _ahead_s(self, kind: Kind, shape: Shape) -> float:
        """Seconds by which the host gets ahead of the device in a layer's forward. The layer is taken to be a unit of
        sharded parameters under every shape, because what crosses must not depend on how data is split."""
        seconds, each_s = self._model.compute(kind, shape), self._model.device.dispatch
        return max(0.0, seconds.forward - seconds.host_forward - FORWARD * SHARDED_UNIT * each_s)

    def _on_slices(self, kind: Kind, shape: Shape) -> bool:
        return self._model.mode(kind, shape)[0] == "sequence"

    def _layers_on_slices(self, shape: Shape) -> Flags:
        """[layer] -> whether it works on slices of the sequence; with one more entry at the end, False."""
        kinds = self._model.kinds
        known = {kind: self._on_slices(kind, shape) for kind in dict.fromkeys(kinds)}
        return np.array([*(known[kind] for kind in kinds), False])

    @memo_by(lambda _, shape: work_of(shape))
    def _bytes(self, shape: Shape) -> list[float]:
        spans = _spans(self._model.profile)
        at = np.array([1.0, shape.samples, 1.0, shape.samples])
        sizes = (self._model.training.compute_bytes * spans.elements + spans.other_bytes) @ at
        sequence = self._layers_on_slices(shape)
        sliced = spans.may_slice & sequence[spans.made_by]
        parts = sizes[spans.tensor]
        parts = np.where(sliced[spans.tensor] & sequence[spans.position], parts / shape.tensor, parts)
        summed: list[float] = np.bincount(spans.position, parts, len(self._model.kinds) + 1).tolist()
        return summed

    def arrivals(self, shape: Shape, firsts: Ints, ends: Ints) -> Arrivals:
        """[stage] -> what it holds of tensors from earlier stages. firsts, ends: [stage] -> its first layer, and the
        layer after its last."""
        tensors = self._model.profile.tensors
        if shape.pipeline == 1 or not tensors:
            nothing = np.zeros(len(firsts))
            return Arrivals(nothing, nothing, nothing)
        spans = _spans(self._model.profile)
        whole, counted = self._sizes(shape)
        crosses = (spans.made_by < firsts[:, None]) & (firsts[:, None] <= spans.last_used_by)
        received = np.where(crosses, self._slices(shape)[firsts] * whole, 0.0)
        stays = spans.kept_with < ends[:, None]
        inputs = np.maximum(0.0, received - counted) * stays
        gradients = received * spans.requires_grad
        return Arrivals(inputs.sum(axis=1), (gradients * ~stays).sum(axis=1), gradients.sum(axis=1))

    def _slices(self, shape: Shape) -> Floats:
        """[place of the chain][crossing tensor] -> share of the tensor that crosses there on one rank: 1, or less if it
        crosses as slices of the sequence."""
        spans = _spans(self._model.profile)
        sequence = self._layers_on_slices(shape)
        sliced = spans.may_slice & sequence[spans.made_by] & sequence[:, None]
        return np.where(sliced, 1 / shape.tensor, 1.0)

    @memo_by(lambda _, shape: (shape.samples, _slices_of(shape), shape.cuts))
    def _sizes(self, shape: Shape) -> tuple[Floats, Floats]:
        """([crossing tensor] -> its bytes for one micro-batch, [crossing tensor] -> those of them that are counted with
        its last reader)."""
        batch, element_bytes = shape.samples, self._model.training.compute_bytes
        whole = [tensor.size.at(batch, element_bytes) for tensor in self._model.profile.tensors]
        counted = [
            item.size.at(batch, element_bytes)
            / (shape.tensor if item.slices and self._on_slices(self._model.kinds[last], shape) else 1)
            for last, item in kept_with_last(self._model.profile)
        ]
        return np.array(whole), np.array(counted)


def work_of(shape: Shape) -> tuple[object, ...]:
    """The fields of a shape that decide what a micro-batch computes and sends."""
    return shape.samples, shape.tensor, shape.sequence, shape.cuts, shape.context, shape.context_kind, shape.expert


def _slices_of(shape: Shape) -> int:
    """Number of slices into which sequence parallelism cuts a sequence; 1 without it."""
    return shape.tensor if shape.sequence else 1


@dataclass(frozen=True)
class _Spans:
    """Crossing tensors by columns: their sizes as coefficients, and the layers that make them, use them last, and are
    counted as keeping them. tensor, position: one entry for each place of the chain that a tensor crosses."""

    elements: Floats
    other_bytes: Floats
    may_slice: Flags
    requires_grad: Flags
    made_by: Ints
    last_used_by: Ints
    kept_with: Ints
    tensor: Ints
    position: Ints


@kept
def _spans(profile: ModelProfile) -> _Spans:
    tensors = profile.tensors
    places = [(i, at) for i, t in enumerate(tensors) for at in range(t.made_by + 1, t.last_used_by + 1)]
    return _Spans(
        elements=np.array([t.size.elements for t in tensors], dtype=np.float64).reshape(len(tensors), 4),
        other_bytes=np.array([t.size.other_bytes for t in tensors], dtype=np.float64).reshape(len(tensors), 4),
        may_slice=np.array([t.requires_grad and "sequence" in t.dims for t in tensors], dtype=bool),
        requires_grad=np.array([t.requires_grad for t in tensors], dtype=bool),
        made_by=np.array([t.made_by for t in tensors], dtype=np.int64),
        last_used_by=np.array([t.last_used_by for t in tensors], dtype=np.int64),
        kept_with=np.array([last for last, _ in kept_with_last(profile)], dtype=np.int64),
        tensor=np.array([i for i, _ in places], dtype=np.int64),
        position=np.array([at for _, at in places], dtype=np.int64),
    )
