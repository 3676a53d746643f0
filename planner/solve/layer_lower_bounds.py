"""Lower bounds on what layers of a model take on one kind of device, before it is decided how data is split and where
ranks are: seconds of one micro-batch, and bytes that they keep and hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..arrays import Floats
from ..cost.chain import Chain, of_each
from ..cost.comm_cost import seconds_at_places
from ..cost.kept import memo_by
from ..cost.kinds import Kind
from ..cost.layer_cost import CostModel
from ..cost.memory_cost import state_bytes
from ..plan.schedules import ZERO_BUBBLE
from ..plan.shape import NO_EXTRAS, LayerOption, Offered, Shape


@dataclass(frozen=True)
class Least:
    """Lower bounds for the layers of a family. seconds, forward_s: [run] -> seconds of a layer for one micro-batch, and
    of its forward; elements: trainable elements of all layers.

    held: [run] -> ([way to recompute] -> bytes that a layer keeps of a micro-batch, bytes that it holds in any case).
    fewest_bytes: activations of all layers. whole, whole_trainable: elements of all layers, before they are sharded
    over data ranks. turn: [run] -> bytes of its activations during a layer's turn.
    """

    seconds: Floats
    forward_s: Floats
    elements: float
    held: list[tuple[Floats, float]]
    fewest_bytes: float
    whole: float
    whole_trainable: float
    turn: Floats


class LeastWork:
    """Lower bounds for one chain on one kind of device; keeps what shapes share."""

    def __init__(self, chain: Chain, model: CostModel) -> None:
        self.chain = chain
        self.model = model
        self._passes: dict[tuple[object, ...], dict[float, Floats]] = {}

    def passes_s(self, shape: Shape) -> Floats:
        """[run] -> (least seconds of a layer for one micro-batch on such devices: compute, tensor traffic and tokens
        sent to experts, seconds of its forward without tensor traffic); they are the least in the sum over all
        layers."""
        alone: Floats = self.passes_at_s(shape, [shape.samples])[0]
        return alone

    def exchanged_s(self, shape: Shape) -> Floats:
        """[run] -> parts of `passes_s`: (seconds of tokens sent in the forward, seconds of tokens sent in the backward
        and of tensor traffic)."""
        alone: Floats = self._parts_at_s(shape, [shape.samples])[0][:, 2:]
        return alone

    def passes_at_s(self, shape: Shape, samples: Sequence[float]) -> Floats:
        """[samples][run] -> the same as `passes_s`, for micro-batches of which a rank has so many samples; the shape's
        own do not matter."""
        return self._parts_at_s(shape, samples)[:, :, :2]

    def _parts_at_s(self, shape: Shape, samples: Sequence[float]) -> Floats:
        """[samples][run] -> the numbers of `passes_s` and `exchanged_s`."""
        key = shape.tensor, shape.sequence, shape.expert, shape.cuts, shape.pipeline == 1
        known = self._passes.setdefault(key, {})
        missing = [each for each in samples if each not in known]
        if missing:
            kinds = self.model.kinds_of_layers
            computed = _computed_s(self.model, shape, missing)
            each = [_passes_s(self.model, kind, shape, missing, of) for kind, of in zip(kinds, computed, strict=True)]
            found = dict(zip(kinds, each, strict=True))
            runs = np.stack([found[kind] for kind in self._kinds], axis=1)
            known.update(zip(missing, runs, strict=True))
        return np.array([known[each] for each in samples])

    def of(self, shape: Shape, room: float, offered: Offered = NO_EXTRAS) -> Least | None:
        """Lower bounds for the layers of a family; None if even these do not fit in memory. shape: the family's shape
        with everything sharded over all data ranks. room: bytes that the allocator may hand out on one rank of every
        stage together. offered: options of layers beyond the usual ones."""
        model, counts = self.model, self._counts
        state = state_bytes(shape, model.training)
        # With one micro-batch a gradient comes when its layer's activations go.
        gradients = state.sharded_gradients if shape.num_microbatches > 1 else 0.0
        trainable_bytes = gradients + state.optimizer
        stored, shared = self._stored(shape), self.chain.counted_twice(shape)
        fixed = stored @ np.array([state.sharded_parameters, trainable_bytes])
        twice = (state.sharded_parameters + trainable_bytes) * shared
        ways = self._ways(shape, offered)
        if ways.fewest + float(counts @ fixed) - twice > room or ways.turn.max() > room:
            return None
        context_s = np.array(of_each(self._kinds, lambda kind: model.least_context_s(kind, shape)))
        pass_s, forward_s = self.passes_s(shape).T
        seconds = pass_s + context_s.sum(axis=1)
        whole = self._stored(replace(shape, data_replicate=shape.data, data_shard=1))
        total, trainable = np.maximum(0.0, counts @ whole - shared)
        return Least(
            seconds,
            forward_s + context_s[:, 0],
            max(0.0, float(counts @ stored[:, 1]) - shared),
            list(zip(ways.kept, fixed.tolist(), strict=True)),
            ways.fewest,
            total,
            trainable,
            ways.turn,
        )

    @cached_property
    def _counts(self) -> Floats:
        return np.array([run.length for run in self.chain.runs], dtype=float)

    @cached_property
    def _kinds(self) -> list[Kind]:
        return [self.model.kinds[run.start] for run in self.chain.runs]

    @memo_by(lambda _, shape: (shape.tensor, shape.sequence, shape.cuts, shape.expert, shape.sharded_over))
    def _stored(self, shape: Shape) -> Floats:
        """[run] -> (all, trainable) elements of a layer."""
        return np.array(of_each(self._kinds, lambda kind: self.model.stored_elements(kind, shape)))

    @memo_by(lambda self, shape, offered: (offered, shape.pipeline == 1, *self._kept_as(shape)))
    def _ways(self, shape: Shape, offered: Offered) -> "LeastWays":
        """What layers keep and recompute, whatever the schedule."""
        model, any_schedule = self.model, shape if shape.pipeline == 1 else replace(shape, schedule="zb-h1")

        def found(kind: Kind) -> tuple[float, Floats, Floats]:
            ways = model.ways_with_places(kind, None, offered)
            kept, again_s = self.of_ways(kind, any_schedule, ways)
            working = [max(model.working_bytes(kind, any_schedule, way)[:2]) for way in ways]
            return float((kept + working).min()), kept, again_s

        each = of_each(self._kinds, found)
        kept = [kept for _, kept, _ in each]
        fewest = float(self._counts @ np.array([least.min() for least in kept]))
        return LeastWays(np.array([turn for turn, _, _ in each]), kept, [again_s for _, _, again_s in each], fewest)

    @memo_by(lambda self, kind, shape, ways: (kind, ways, *self._kept_as(shape)))
    def of_ways(self, kind: Kind, shape: Shape, ways: tuple[LayerOption, ...]) -> tuple[Floats, Floats]:
        """[way to recompute, and place] -> lower bounds on (bytes that a layer keeps of a micro-batch on the device,
        seconds that it takes longer)."""
        kept, longer_s = np.zeros(len(ways)), np.zeros(len(ways))
        for i, way in enumerate(ways):
            longer_s[i] = self.model.least_again_s(kind, shape, way.recompute)
            if way.offload:
                longer_s[i] += self.model.least_away_s(kind, shape, way.recompute)
            else:
                kept[i] = self.model.least_kept_bytes(kind, shape, way.recompute)
        return kept, longer_s

    def _kept_as(self, shape: Shape) -> tuple[object, ...]:
        """The fields of a shape that decide what its layers keep of a micro-batch."""
        work = shape.tensor, shape.sequence, shape.cuts, shape.expert, shape.samples
        return *work, shape.schedule in ZERO_BUBBLE


@dataclass(frozen=True)
class LeastWays:
    """Lower bounds on what layers keep and recompute of one micro-batch. turn: [run] -> bytes of activations during a
    layer's turn; kept, again_s: [run][way to recompute] -> bytes that it keeps, seconds of its recompute; fewest: bytes
    that all layers together keep."""

    turn: Floats
    kept: list[Floats]
    again_s: list[Floats]
    fewest: float


def _computed_s(model: CostModel, shape: Shape, samples: Sequence[float]) -> Floats:
    """[kind][pass][samples] -> lower bound on the seconds that layers compute: without hooks and casts, which depend on
    how data is split; with one stage also without waiting for the host, which long layers may hide."""
    kinds = [model.compute_of_each(kind, shape, samples) for kind in model.kinds_of_layers]
    if shape.pipeline > 1:
        return np.array([[[e[n].forward for n in samples], [e[n].backward for n in samples]] for e in kinds])
    return np.array([[[e[n].device_forward for n in samples], [e[n].device_backward for n in samples]] for e in kinds])


def _passes_s(model: CostModel, kind: Kind, shape: Shape, samples: Sequence[float], computed: Floats) -> Floats:
    """[samples] -> (seconds, those of its forward without tensor traffic, tokens sent in the forward, what is exchanged
    beside the backward) of a layer at least, with tensor and expert ranks where their traffic takes least. That need
    not be one host: two may mean fewer hops, and the links of both. Bytes grow in a straight line with the samples, so
    they are counted at two numbers of them. computed: [pass][samples]."""
    forward, backward = computed
    most = max(2, math.ceil(max(samples)))
    share = (np.array(samples) - 1) / (most - 1)
    at_one, at_most = (replace(shape, micro_batch=n, context=1) for n in (1, most))
    tensor_s = _tensor_s(model, kind, at_one, at_most, share).min(axis=0)
    one, largest = (_sent_s(model, kind, each)[:, None] for each in (at_one, at_most))
    sent_s = (one + (largest - one) * share).min(axis=0)
    each = model.compute_of_each(kind, shape, samples)
    expert_s = 2 * model.exposed_dispatch_s(sent_s, np.array([each[n].forward for n in samples]))
    beside_s = tensor_s + expert_s
    return np.stack([forward + backward + expert_s + beside_s, forward + expert_s, expert_s, beside_s], axis=1)


def _tensor_s(model: CostModel, kind: Kind, at_one: Shape, at_most: Shape, share: Floats) -> Floats:
    """[place of tensor ranks][samples] -> seconds of their traffic for one micro-batch that no compute hides. share:
    [samples] -> how far their bytes are from those of one shape to those of the other."""
    places = [model.links(at_one.tensor, stride) for stride in model.places(at_one.tensor)]
    pairs = zip(model.tensor_traffic(kind, at_one), model.tensor_traffic(kind, at_most), strict=True)
    traffic = [(one.kind, one.bytes + (most.bytes - one.bytes) * share) for (*_, one), (*_, most) in pairs]
    shown = np.array([1.0 - model.hidden_tensor(links) for links in places])
    found: Floats = shown[:, None] * seconds_at_places(traffic, places, len(share))
    return found


def _sent_s(model: CostModel, kind: Kind, shape: Shape) -> Floats:
    """[place of expert ranks] -> seconds to send tokens once."""
    return np.array([model.dispatch_of(kind, shape, stride)[0] for stride in model.places(shape.expert)])
