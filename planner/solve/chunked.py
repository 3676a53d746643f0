"""Pipelines whose ranks hold several stages or split their backward: balanced chunkings, each priced as a whole.

For one stage per rank the ILP chooses among all cuts. Interleaved and zero-bubble schedules have no closed form that is
linear in the stages: a rank's memory and time join several of them. Here the space is therefore a short list of cuts,
the ones that balance the ranks, each with the first k layers of every stage recomputed, all in one way, and each is
priced exactly: memory by the schedule's table, time by event simulation.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from ..cost.memory_cost import state_bytes
from ..cost.simulate import ZERO_BUBBLE, simulated_step_s
from ..cost.stage_cost import StageCost, on_one_rank
from ..plan import Recompute, Schedule, stage_of
from ..strategy import LayerOption, Shape
from .columns import Chain, Choice, StagePrices
from .knapsack import tie_prices
from .scan import Assignment

Floats = NDArray[np.float64]

FEW_CUTS = 30
"""So many ways to cut the chain, or fewer, are all priced."""


@dataclass(frozen=True)
class Chunking:
    """The schedule's frame: how many ranks and stages there are, and which rank holds which."""

    schedule: Schedule
    num_ranks: int
    virtual: int

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.num_ranks * self.virtual

    def stages(self, rank: int) -> list[int]:
        """Stages of a rank, in the order of its chunks."""
        return [stage_of(self.schedule, rank, chunk, self.num_ranks) for chunk in range(self.virtual)]

    @property
    def holds(self) -> Floats:
        """[rank][stage] -> 1 where the rank holds the stage."""
        return _holds(self)


@dataclass(frozen=True)
class Cuts:
    """First layer of every stage and the number of layers at the end. stages: [stage][run] -> layers; work, ahead:
    [rank][run] -> layers that a rank holds, and layers in the first chunks of the ranks before it."""

    places: tuple[int, ...]
    stages: Floats
    work: Floats
    ahead: Floats

    def least_s(
        self,
        schedule: Schedule,
        num_microbatches: int,
        per_run_s: Floats,
        forward_s: Floats,
        added_s: Floats | float = 0.0,
    ) -> float:
        """Seconds that no order of passes beats: a rank begins when the first micro-batch has passed all ranks before
        it, then has all micro-batches of all its stages to do, and unless gradients of weights come last, the last
        one's backward has those ranks still before it. per_run_s, forward_s: [run] -> seconds of a layer. added_s:
        [rank] -> seconds that a micro-batch takes beyond that."""
        beside = forward_s if schedule in ZERO_BUBBLE else per_run_s
        return float((num_microbatches * (self.work @ per_run_s + added_s) + self.ahead @ beside).max())


@lru_cache(maxsize=256)
def _holds(frame: Chunking) -> Floats:
    found = np.zeros((frame.num_ranks, frame.num_stages))
    for rank in range(frame.num_ranks):
        found[rank, frame.stages(rank)] = 1.0
    return found


@lru_cache(maxsize=256)
def _flights(schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int) -> tuple[float, ...]:
    """[stage] -> micro-batches whose activations it holds when its rank holds most."""
    shape = Shape(1, 1, 1, num_ranks, 1, num_microbatches, schedule=schedule, virtual_stages=virtual)
    return tuple(float(shape.in_flight(stage)) for stage in range(num_ranks * virtual))


@dataclass(frozen=True)
class LeastRecompute:
    """What bringing the memory of a chunked shape's ranks into the budget adds at least: bytes at a price, the best of
    several prices, with layers' transients at their least.

    least: [stage][price][run] -> least seconds and priced bytes of a layer beyond its fastest option. fewest:
    [stage][run] -> bytes of activations. static, passing: [run] -> bytes held, and there only in a layer's turn.
    """

    frame: Chunking
    rates: Floats
    least: Floats
    fewest: Floats
    static: Floats
    passing: Floats
    free: float

    @classmethod
    def of(cls, prices: StagePrices) -> "LeastRecompute":
        """That of a shape."""
        shape, state, model = prices.shape, state_bytes(prices.shape, prices.model.training), prices.model
        flights = np.array(_flights(shape.schedule, shape.pipeline, shape.num_microbatches, shape.virtual_stages))
        several = shape.virtual_stages > 1
        if not several:  # the peak is a running maximum: one micro-batch may be there in part
            flights -= 1
        gradients = state.sharded_gradients if several or shape.num_microbatches > 1 else 0.0
        static = np.array([
            costs[0].elements * state.sharded_parameters + costs[0].trainable_elements * (gradients + state.optimizer)
            + (min(c.held_bytes + c.root_bytes + c.accumulated_bytes for c in costs) if several else 0.0)
            for costs in prices.costs
        ])  # fmt: skip
        weights = [np.array([cost.microbatch_s for cost in costs]) for costs in prices.costs]
        kept = [np.array([cost.kept_bytes for cost in costs]) for costs in prices.costs]
        kinds = [model.kinds[run.start] for run in prices.chain.runs]
        passing = np.array([model.least_transient_bytes(kind, shape) for kind in kinds]) * several
        shared = sum(n * (len(layers) - 1) for layers, n in prices.chain.shared_weights(shape))
        twice = state.sharded_parameters + gradients + state.optimizer + max(0.0, state.copied_twice)
        ties = tie_prices(weights, kept)
        rates = np.unique(np.concatenate([ties / n for n in (1.0, max(1.0, flights.max()), max(1.0, flights.mean()))]))
        distinct, place = np.unique(flights, return_inverse=True)
        priced = (distinct[:, None] * rates)[:, :, None]
        least = [(w - w.min() + priced * held).min(axis=2) for w, held in zip(weights, kept, strict=True)]
        return cls(
            Chunking(shape.schedule, shape.pipeline, shape.virtual_stages),
            rates,
            np.stack(least, axis=2)[place],
            flights[:, None] * np.array([held.min() for held in kept]),
            static,
            passing,
            prices.budget + shared * (twice + state.accumulated),
        )

    def added_s(self, cuts: Cuts) -> Floats:
        """[rank] -> seconds per micro-batch; infinite where all recompute there is does not do."""
        room = self.free - cuts.work @ self.static - np.where(cuts.work > 0, self.passing, 0.0).max(axis=1)
        holds = self.frame.holds
        dear = holds @ (cuts.stages[:, None, :] * self.least).sum(axis=2) - room[:, None] * self.rates
        fits = holds @ (cuts.stages * self.fewest).sum(axis=1) <= room
        return np.where(fits, dear.max(axis=1), np.inf)


def chunkings(chain: Chain, frame: Chunking, per_run_s: Floats) -> list[Cuts]:
    """Cuts that balance the ranks, or all there are if those are few; none if the chain has too few places.

    Three starts: stages of equal seconds, stages of equal numbers of the most frequent layer with everything else
    added (as people set it up), and with everything else counted as one such layer; from each, single boundaries
    are moved by one place while that makes the slowest rank faster.
    """
    places = chain.places
    if frame.num_stages > len(places) - 1:
        return []
    if math.comb(len(places) - 2, frame.num_stages - 1) <= FEW_CUTS:
        inner = combinations(places[1:-1], frame.num_stages - 1)
        return [_counted(chain, frame, (0, *cuts, chain.num_layers)) for cuts in inner]
    runs = chain.runs
    layer_s = np.repeat(per_run_s, [run.length for run in runs])
    common = chain.model.kinds[max(runs, key=lambda run: run.length).start]
    is_common = np.array([float(kind == common) for kind in chain.model.kinds])
    found = {
        _improved(_balanced(weights, places, frame.num_stages), places, frame, layer_s)
        for weights in (layer_s, is_common, np.ones(chain.num_layers))
    }
    return [_counted(chain, frame, cuts) for cuts in sorted(found)]


def _counted(chain: Chain, frame: Chunking, places: tuple[int, ...]) -> Cuts:
    of_run = np.zeros((chain.num_layers, len(chain.runs)))
    of_run[np.arange(chain.num_layers), chain.run_of] = 1.0
    stages = np.add.reduceat(of_run, places[:-1], axis=0)
    work = np.stack([stages[frame.stages(rank)].sum(axis=0) for rank in range(frame.num_ranks)])
    ahead = np.stack([stages[:rank].sum(axis=0) for rank in range(frame.num_ranks)])
    return Cuts(places, stages, work, ahead)


def _balanced(weights: Floats, places: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Cuts where the running sum comes nearest to equal shares, every stage with at least one place."""
    passed = np.concatenate(([0.0], np.cumsum(weights)))[list(places)]
    chosen = [0]
    for stage in range(1, num_stages):
        first, last = chosen[-1] + 1, len(places) - 1 - (num_stages - stage)
        share = passed[-1] * stage / num_stages
        chosen.append(first + int(np.argmin(np.abs(passed[first : last + 1] - share))))
    return tuple(places[i] for i in (*chosen, len(places) - 1))


def _improved(cuts: tuple[int, ...], places: Sequence[int], frame: Chunking, layer_s: Floats) -> tuple[int, ...]:
    """Boundaries moved one by one while the slowest rank, then the sum of squares of all ranks, gets less."""
    passed = np.concatenate(([0.0], np.cumsum(layer_s)))[list(places)]
    rank_of = np.zeros(frame.num_stages, dtype=int)
    for rank in range(frame.num_ranks):
        rank_of[frame.stages(rank)] = rank
    here = np.searchsorted(places, cuts)
    boundaries = np.tile(np.arange(1, frame.num_stages), 2)
    steps = np.repeat([-1, 1], frame.num_stages - 1)
    holds = np.eye(frame.num_ranks)[rank_of]
    for _ in range(4 * frame.num_stages):
        rank_s = np.bincount(rank_of, weights=np.diff(passed[here]))
        more_s = passed[here[boundaries] + steps] - passed[here[boundaries]]
        loads = rank_s + more_s[:, None] * (holds[boundaries - 1] - holds[boundaries])
        moved = here[boundaries] + steps
        legal = (moved > here[boundaries - 1]) & (moved < here[boundaries + 1])
        worst = np.where(legal, loads.max(axis=1), np.inf)
        square = (loads**2).sum(axis=1)
        best = int(np.lexsort((square, worst))[0])
        if (worst[best], square[best]) >= (rank_s.max(), (rank_s**2).sum()):
            break
        here[boundaries[best]] += steps[best]
    return tuple(int(places[i]) for i in here)


_Known = dict[tuple[int, Choice, int], StageCost]
"""Composition, its options, and micro-batches in flight -> what that stage costs."""


def best_chunking(prices: StagePrices, cuts_tried: Sequence[Cuts], cutoff_s: float) -> Assignment | None:
    """The fastest of these cuts that fits, with as few recomputed layers as that takes; None if none is faster than
    `cutoff_s`."""
    best: Assignment | None = None
    known: _Known = {}
    for cuts in cuts_tried:
        numbers = np.searchsorted(prices.chain.places, cuts.places)
        compositions = [int(prices.chain.composition_of[a, b]) for a, b in pairwise(numbers)]
        for recompute in _recomputes(prices):
            fitting = _least_recomputed(prices, compositions, recompute, known)
            found = None if fitting is None else _played(prices, fitting, best.seconds if best else cutoff_s)
            best = found or best
    return best


def _recomputes(prices: StagePrices) -> Iterator[Recompute]:
    """Ways to recompute that some layer may take."""
    ways = {option.recompute for options in prices.options for option in options} - {"none"}
    yield from sorted(ways) or ["none"]


@dataclass(frozen=True)
class _Fitting:
    """Stages whose memory fits every rank. costs: [stage]; once_s: [rank]."""

    compositions: tuple[int, ...]
    choices: tuple[Choice, ...]
    costs: list[StageCost]
    once_s: list[float]


def _least_recomputed(
    prices: StagePrices, compositions: Sequence[int], recompute: Recompute, known: _Known
) -> _Fitting | None:
    """With the fewest layers recomputed in each stage, equally many, whose memory fits every rank."""
    low, high = 0, max(sum(prices.chain.compositions[c].counts) for c in compositions)
    best = _fitting(prices, compositions, recompute, high, known)
    while best is not None and low < high:
        middle = (low + high) // 2
        found = _fitting(prices, compositions, recompute, middle, known)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def _fitting(
    prices: StagePrices, compositions: Sequence[int], recompute: Recompute, count: int, known: _Known
) -> _Fitting | None:
    """The stages with up to `count` layers of each recomputed, or None if a rank's memory does not do."""
    shape: Shape = prices.shape
    frame = Chunking(shape.schedule, shape.pipeline, shape.virtual_stages)
    choices = {c: _choice(prices, c, recompute, count) for c in set(compositions)}
    stages: dict[int, StageCost] = {}
    once_s = []
    for rank in range(frame.num_ranks):  # the first holds most micro-batches: what does not fit ends here, mostly
        for stage in frame.stages(rank):
            composition, in_flight = compositions[stage], shape.in_flight(stage)
            key = composition, choices[composition], in_flight
            if key not in known:
                known[key] = prices.stage_cost(*key)
            stages[stage] = known[key]
        whole = on_one_rank([stages[stage] for stage in frame.stages(rank)])
        if whole.allocated_bytes > prices.budget:
            return None
        once_s.append(whole.once_s)
    in_order = [stages[stage] for stage in range(frame.num_stages)]
    return _Fitting(tuple(compositions), tuple(choices[c] for c in compositions), in_order, once_s)


def _played(prices: StagePrices, fitting: _Fitting, cutoff_s: float) -> Assignment | None:
    """The step by event simulation, or None if it is not below `cutoff_s`: not even what the busiest rank has to do may
    reach that."""
    shape, costs = prices.shape, fitting.costs
    frame = Chunking(shape.schedule, shape.pipeline, shape.virtual_stages)
    busy_s = frame.holds @ np.array([cost.forward_s + cost.backward_s for cost in costs])
    if shape.num_microbatches * float(busy_s.max()) >= cutoff_s:
        return None
    step_s = simulated_step_s(
        shape.schedule,
        [cost.forward_s for cost in costs],
        [cost.backward_s for cost in costs],
        fitting.once_s,
        shape.num_microbatches,
        [cost.weight_s for cost in costs],
    )
    return Assignment(step_s, fitting.compositions, fitting.choices) if step_s < cutoff_s else None


def _choice(prices: StagePrices, composition: int, recompute: Recompute, count: int) -> Choice:
    """The first `count` layers of a composition that may be recomputed are; others take what else there is."""
    item = prices.chain.compositions[composition]
    parts: list[tuple[int, LayerOption, int]] = []
    left = count
    for run, number in zip(range(item.first_run, item.last_run + 1), item.counts, strict=True):
        by_way = {option.recompute: option for option in prices.options[run] if not option.offload}
        recomputed = min(left, number) if recompute in by_way else 0
        if "none" not in by_way:
            recomputed = number
        rest = number - recomputed
        if recomputed:
            parts.append((run, by_way.get(recompute, prices.options[run][0]), recomputed))
        if rest:
            parts.append((run, by_way["none"], rest))
        left -= recomputed
    return Choice(tuple(parts))
