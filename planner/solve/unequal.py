"""Pipelines over unequal devices: each stage is on one kind of device, and priced with that kind's speed, links and
memory.

Hosts are of one kind if their device, links and number of devices are equal. Each stage has devices of one kind only if
the pipeline is the outermost axis of the mesh, and the number of a stage's devices divides that of every kind; then the
kinds may follow each other in any order. In every other layout stages hold devices of several kinds, so that all wait
for the slowest: those are priced as if every device were the slowest, with the least memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from ...profiler.machine.cluster import ClusterSpec
from ..arrays import Floats
from ..cost.chain import Chain
from ..cost.layer_cost import CostModel
from ..cost.simulate import even_step_s
from ..cost.stage_cost import allocatable_bytes
from ..plan.document import Recompute
from ..plan.schedules import rank_and_chunk
from ..plan.shape import Offered, Shape
from .columns import StagePrices, Work

MOST_KINDS = 4
"""Most kinds of devices whose orders are all tried."""


def have_own(kinds: Sequence[ClusterSpec], pipeline: int) -> bool:
    """Whether there are several kinds of devices, and each stage of a pipeline has devices of one kind, if the pipeline
    is the outermost axis."""
    total = sum(kind.num_devices for kind in kinds)
    return len(kinds) > 1 and pipeline > 1 and not any(kind.num_devices * pipeline % total for kind in kinds)


def kind_orders(kinds: Sequence[ClusterSpec]) -> list[tuple[int, ...]]:
    """Orders of the kinds of devices along the stages: all orders; if there are many kinds, only by memory and by
    speed, up and down."""
    numbers = range(len(kinds))
    if len(kinds) <= MOST_KINDS:
        return list(permutations(numbers))
    by_memory = sorted(numbers, key=lambda k: kinds[k].device.memory)
    by_speed = sorted(numbers, key=lambda k: max(kinds[k].device.flops.values()))
    found = (by_memory, by_memory[::-1], by_speed, by_speed[::-1])
    return list(dict.fromkeys(tuple(order) for order in found))


@dataclass(frozen=True)
class Shares:
    """The best way in which stages on unequal devices could share layers.

    Let a layer of run r count w_r. Stages on kind k, which take t_kr for it, do at most rate_k = max_r w_r / t_kr in a
    second, whatever they hold. So with n_k stages on kind k none of which takes longer than T, sum_r count_r w_r <= T
    sum_k n_k rate_k. This holds for any w; each kind's own times are tried.
    """

    each: tuple[Floats, ...]
    counts: Floats
    stages: tuple[int, ...]
    per_run: Floats
    rates: tuple[float, ...]

    @classmethod
    def of(cls, each: Sequence[Floats], counts: Floats, stages: Sequence[int]) -> "Shares":
        """The shares with the highest bound on the slowest stage. each: [kind][run] -> least seconds of a layer;
        counts: [run] -> number of layers; stages: [kind] -> number of stages."""
        found = [cls._weighted(each, counts, stages, per_run) for per_run in (*each, np.minimum.reduce(each))]
        return max(found, key=lambda shares: shares.slowest_s)

    @classmethod
    def _weighted(cls, each: Sequence[Floats], counts: Floats, stages: Sequence[int], per_run: Floats) -> "Shares":
        per_run = np.where(np.minimum.reduce(each) > 0, per_run, 0.0)
        rates = tuple(
            float(np.max(np.divide(per_run, seconds, out=np.zeros_like(seconds), where=seconds > 0)))
            for seconds in each
        )
        return cls(tuple(each), counts, tuple(stages), per_run, rates)

    @property
    def whole(self) -> float:
        """What all layers together count."""
        return float(self.counts @ self.per_run)

    @property
    def slowest_s(self) -> float:
        """Lower bound on the seconds of the slowest stage for a micro-batch: with perfect balance, or from the longest
        layer."""
        rate = sum(n * rate for n, rate in zip(self.stages, self.rates, strict=True))
        longest = float(np.minimum.reduce(self.each).max())
        return max(self.whole / rate if rate else 0.0, longest)

    @property
    def pass_s(self) -> float:
        """Lower bound on the seconds of all stages together for a micro-batch, with every layer where it is fastest."""
        return float(self.counts @ np.minimum.reduce(self.each))

    def step_s(self, shape: Shape) -> float:
        """Lower bound on the seconds of a step's passes, under 1F1B and GPipe."""
        even_s = even_step_s(shape.schedule, shape.pipeline, shape.num_microbatches, self.slowest_s, self.pass_s)
        return float(even_s)

    def work(self, kind: int) -> Work:
        """What a stage on this kind of device can leave to the others."""
        total = sum(n * rate for n, rate in zip(self.stages, self.rates, strict=True))
        return Work(self.per_run, self.whole, total - self.rates[kind], self.pass_s)


@dataclass(frozen=True)
class UnequalPrices:
    """Prices of a pipeline's stages, each on its own kind of device. kinds: [pipeline coordinate] -> number of its
    kind."""

    shape: Shape
    kinds: tuple[int, ...]
    by_kind: tuple[StagePrices, ...]

    @property
    def chain(self) -> Chain:
        """The chain that the stages cut."""
        return self.by_kind[0].chain

    def on(self, stage: int) -> StagePrices:
        """The prices on the device of a stage."""
        return self.by_kind[self.kinds[rank_and_chunk(self.shape.schedule, stage, self.shape.pipeline)[0]]]


class Kinds:
    """The kinds of devices of a cluster, with costs of layers on each; caches what orders of kinds share."""

    def __init__(self, model: CostModel) -> None:
        self.cluster = model.cluster
        self.parts = model.cluster.kinds
        whole = model.cluster, model.framework
        self.models = [CostModel(model.profile, part, model.training, *whole) for part in self.parts]
        self.chains = [Chain(kind) for kind in self.models]
        self._prices: dict[tuple[object, ...], tuple[StagePrices, ...]] = {}

    def _stages(self, pipeline: int) -> list[int]:
        """[kind] -> number of pipeline coordinates on it."""
        return [part.num_devices * pipeline // self.cluster.num_devices for part in self.parts]

    def priced(
        self, shape: Shape, recompute: Recompute | None, reshard: bool | None, offered: Offered
    ) -> UnequalPrices:
        """The prices of a shape whose stages are each on one kind of device."""
        any_order = replace(shape, kind_order=())
        key = any_order, recompute, reshard, offered
        if key not in self._prices:
            fastest_s = [chain.fastest_s(any_order, recompute, reshard) for chain in self.chains]
            shares = self.shares(fastest_s, shape.pipeline)
            self._prices[key] = tuple(
                StagePrices(chain, any_order, recompute, reshard, offered, shares.work(kind))
                for kind, chain in enumerate(self.chains)
            )
        return UnequalPrices(shape, self.on_stages(shape.kind_order, shape.pipeline), self._prices[key])

    def on_stages(self, order: Sequence[int], pipeline: int) -> tuple[int, ...]:
        """[pipeline coordinate] -> number of its kind, if kinds follow each other in this order."""
        stages = self._stages(pipeline)
        return tuple(kind for kind in order for _ in range(stages[kind]))

    def room(self, shape: Shape) -> float:
        """Bytes that the allocator may hand out on one rank of every stage together."""
        stages = self._stages(shape.pipeline)
        each = (allocatable_bytes(shape, model.device, model.training) for model in self.models)
        return sum(n * size for n, size in zip(stages, each, strict=True))

    def may_have_own(self, pipeline: int) -> bool:
        """Whether the stages of a pipeline may each have devices of one kind."""
        return have_own(self.parts, pipeline)

    def shares(self, each: Sequence[Floats], pipeline: int) -> Shares:
        """The best way in which the stages of a pipeline could share layers. each: [kind][run] -> least seconds of a
        layer."""
        return Shares.of(each, self.chains[0].lengths, self._stages(pipeline))

    def optimizer_s(self, elements: float, on_host: bool) -> float:
        """Seconds of the optimizer step over `elements` parameters, on the device that does it fastest."""
        return min(model.optimizer_s(elements, on_host) for model in self.models)
