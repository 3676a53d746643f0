"""Lower bounds in seconds for all plans below a node of the search: of splits, micro-batches, families and shapes.

Each bounds the simulated step, without the time that the software takes once per step. What is not decided yet at a
node (where groups of ranks sit, how layers are cut, what is recomputed) is taken at its best. Bounds of shapes are
columns over all shapes of a family.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from ..arrays import Flags, Floats, Ints
from ..cost.chain import Chain
from ..cost.memory_cost import state_bytes
from ..cost.simulate import even_step_s
from ..cost.stage_cost import allocatable_bytes
from ..plan.document import ContextKind, Recompute
from ..plan.pins import Pins
from ..plan.schedules import ZERO_BUBBLE, is_chunked
from ..plan.shape import Offered, Shape
from .chunked import Chunking, Chunkings, HeldByRank, StageCuts
from .columns import ROUNDING, StagePrices
from .fluid import MOST_PRICES, FluidPipelines
from .fluid_program import Layers
from .layer_lower_bounds import Least, LeastWork
from .memory_bounds import MemoryBounds
from .path_prices import least_of_many_s
from .rank_bounds import OnDevice, least_of_ranks_s
from .shape_bounds import ShapeBounds
from .space import Family, Leaves, Space, Split
from .table import Table
from .unequal import Kinds, UnequalPrices
from .unequal_bounds import UnequalBounds
from .whole_ranks import LayerTurns

SCALES = (0.0, 0.6, 0.8, 1.0, 1.25, 1.7)
"""Factors on the prices of memory that were found for one shape, with which they are tried on others."""


AMPLE = 0.8
"""Share of a rank's room that the least bytes of its layers may fill before other cuts are looked for: in fact layers
hold more than their least."""


class Bounds:
    """Bounds for one model, cluster and job; keeps what nodes share. kinds: kinds of devices, None if all devices are
    equal."""

    def __init__(self, chain: Chain, kinds: Kinds | None) -> None:
        self.chain = chain
        self.model = chain.model
        self.training = chain.model.training
        self.kinds = kinds
        self.pipelines = FluidPipelines()
        self._unequal = None if kinds is None else UnequalBounds(kinds)
        self._least_on_kinds = [LeastWork(chain, model) for model in kinds.models] if kinds else []
        self._leasts: dict[Family, Least | None] = {}
        self._leasts_by_kind: dict[tuple[Shape, Offered], list[Least] | None] = {}
        self._anywhere: dict[tuple[Split, int, Pins], float] = {}
        self._shapes = ShapeBounds(chain)
        self._least = self._shapes.least
        self._memory = MemoryBounds(self._shapes)
        self._cuts: dict[Frame, list[StageCuts]] = {}
        self._fitting: set[Frame] = set()
        self._chunkings = Chunkings(chain)

    def of_splits(self, splits: Sequence[Split], space: Space) -> list[float]:
        """[split] -> lower bound in seconds for all its shapes: compute of all micro-batches, and tensor traffic with
        tensor ranks where it takes least, shared evenly by the stages."""
        groups: dict[tuple[object, ...], dict[tuple[int, int, int], list[int]]] = {}
        for i, split in enumerate(splits):
            # what micro-batches take depends on the one, how many there are on the other
            alike = groups.setdefault((split.tensor, split.sequence, split.expert, split.cuts), {})
            alike.setdefault((split.pipeline, split.data, split.context), []).append(i)
        bounds = np.zeros(len(splits))
        for alike in groups.values():
            counts = {key: dict(space.micro_batches(splits[places[0]])) for key, places in alike.items()}
            samples = sorted({size / context for (_, _, context), sizes in counts.items() for size in sizes})
            place = {number: i for i, number in enumerate(samples)}
            slowest: dict[int, Floats] = {}
            for (pipeline, data, context), places in alike.items():
                if pipeline not in slowest:
                    slowest[pipeline] = self.slowest_s(splits[places[0]], pipeline, samples)
                sizes = counts[pipeline, data, context]
                each_s = slowest[pipeline][[place[size / context] for size in sizes]]
                bounds[places] = (np.array(list(sizes.values())) * each_s).min()
        return bounds.tolist()

    def slowest_s(self, split: Split, pipeline: int, samples: Sequence[float]) -> Floats:
        """[samples] -> least seconds that a micro-batch takes on the slowest of so many stages, for compute, tensor
        traffic and tokens sent to experts, if a rank has so many samples of it; whatever the number of context
        ranks."""
        shape = Shape(1, 1, split.tensor, pipeline, 1, 1, split.sequence, expert=split.expert, cuts=split.cuts)
        works = self._least.passes_at_s(shape, samples)[:, :, 0]
        alike = self._shapes.slowest_s(works[:, self._shapes.first_run].T, pipeline)
        if self.kinds is None or not self.kinds.may_have_own(pipeline):
            return alike
        each = [least.passes_at_s(shape, samples)[:, :, 0] for least in self._least_on_kinds]
        shares = [self.kinds.shares(kinds, pipeline).slowest_s for kinds in zip(*each, strict=True)]
        return np.minimum(alike, shares)

    def anywhere_s(self, family: Family, space: Space) -> float:
        """Lower bound in seconds for all shapes of a family, and of those that differ in the kind of context
        parallelism, from what memory asks for and what data ranks exchange. Every group of ranks is placed where its
        traffic takes least. For a pipeline it holds under all schedules."""
        key = replace(family.split, context_kind="ring"), family.micro_batch, space.pins
        if key not in self._anywhere:
            least = self._anywhere_alike_s(family, space)
            if self._unequal is not None and self._unequal.kinds.may_have_own(family.pipeline):
                own = self._unequal.slowest_s(family, space.unplaced(family), space.pins).min() * (1 - ROUNDING)
                least = min(least, family.num_microbatches * own)
            self._anywhere[key] = float(least)
        return self._anywhere[key]

    def _anywhere_alike_s(self, family: Family, space: Space) -> float:
        """The same for those shapes whose stages are all on equal devices, or priced as if they were."""
        if self.least_of_family(family) is None:
            return float("inf")
        leaves, pins, memory = space.unplaced(family), space.pins, self._memory
        if family.pipeline == 1:
            some = np.arange(len(leaves.each))
            least = memory.seconds(family, leaves, some, pins.recompute, pins).min() * (1 - ROUNDING)
        else:
            least = family.num_microbatches * memory.slowest_s(family, leaves, pins.recompute, pins).min()
        return float(least)

    def of_family(self, family: Family) -> float:
        """Lower bound in seconds for all shapes of a family: compute, and traffic of tensor, context and expert ranks
        where it takes least, perfectly balanced, with an optimizer sharded over all data ranks. Infinite if even so all
        devices together have too little memory."""
        alike = self._of_equal(family)
        return alike if self.kinds is None else min(alike, self._of_unequal(family, self.kinds))

    def held_s(self, family: Family, space: Space) -> float:
        """Lower bound in seconds for a chunked family, from what its schedule holds in memory, what it lets layers
        recompute, and what data ranks exchange."""
        if not is_chunked(family.schedule) or self.kinds is not None:
            return 0.0
        recompute, leaves = recompute_of(family, space.pins), space.leaves(family)
        slowest = self._memory.slowest_chunked_s(family, leaves, recompute, space.pins)
        even_s = self._shapes.even_s(family, leaves, recompute, space.pins.reshard)
        way_s = self._shapes.way_s(family, leaves, recompute, space.pins.reshard)
        least_s = np.maximum(np.maximum(family.num_microbatches * slowest, even_s), way_s)
        return float(least_s[self._may_be_held(family, space)].min(initial=np.inf))

    def of_shapes(self, family: Family, space: Space, enough_s: float = float("inf")) -> Floats:
        """[shape of the family] -> lower bound in seconds, without the recompute that memory asks for; infinite if all
        devices together cannot hold the model. On unequal devices memory counts, and bounds are raised no further than
        `enough_s`."""
        pins, leaves, count = space.pins, space.leaves(family), family.num_microbatches
        recompute = recompute_of(family, pins)
        if family.pipeline == 1:
            seconds = self._shapes.seconds(family, leaves, recompute, pins.reshard)
        else:
            seconds = self._shapes.even_s(family, leaves, recompute, pins.reshard)
            if not is_chunked(family.schedule):
                pass_s, slowest = self._shapes.pass_s(family, leaves, recompute, pins.reshard)
                seconds = np.maximum(seconds, even_step_s(family.schedule, family.pipeline, count, slowest, pass_s))
        seconds[~self._may_be_held(family, space)] = np.inf
        own = np.flatnonzero(~self._alike(leaves, np.arange(len(leaves.each))))
        if self._unequal is not None and len(own):
            seconds[own] = self._unequal.seconds(family, leaves, own, recompute, pins, enough_s) * (1 - ROUNDING)
        return seconds

    def with_memory_s(
        self, family: Family, space: Space, some: Sequence[int], enough_s: float = float("inf")
    ) -> Floats:
        """[of these shapes] -> the same, with the recompute that memory asks for. A shape whose cheap bound already is
        `enough_s` gets that one."""
        leaves, where, pins = space.leaves(family), np.array(some, dtype=np.int64), space.pins
        seconds, recompute = np.zeros(len(where)), recompute_of(family, pins)
        alike = self._alike(leaves, where)
        if alike.any():
            seconds[alike] = self.of_whole_ranks(family, space, where[alike]) * (1 - ROUNDING)
            left = np.flatnonzero(alike & (seconds < enough_s))
            least = self._memory.seconds(family, leaves, where[left], recompute, pins)
            least = np.maximum(least, self.by_prices_s(family, space, where[left])) * (1 - ROUNDING)
            seconds[left] = np.maximum(seconds[left], least)
        return seconds

    @staticmethod
    def _alike(leaves: Leaves, some: Ints) -> Flags:
        """[of these shapes] -> whether their stages are all on equal devices, or priced as if they were."""
        return np.array([not leaves.each[i].kind_order for i in some.tolist()], dtype=bool)

    def of_whole_ranks(self, family: Family, space: Space, some: Ints) -> Floats:
        """[of these shapes] -> lower bound in seconds from what their ranks take, each with whole layers
        (rank_bounds.py)."""
        if family.pipeline == 1:
            return np.zeros(len(some))
        leaves, recompute = space.leaves(family), recompute_of(family, space.pins)
        runs, flights, *costs = self._memory.layers(family, leaves, some, recompute, space.pins)
        return least_of_ranks_s(Table.of(family.frugal), [OnDevice(runs, *costs)], flights)

    def guesses(self, family: Family, space: Space, some: Sequence[int], with_memory: bool) -> Floats:
        """[of these shapes] -> seconds that a chunked family is likely to take: no less than with the best of the cuts
        that are tried first, where each rank recomputes what its memory asks for, as if layers could be divided. Not a
        bound; it orders the search."""
        leaves, where, pins = space.leaves(family), np.array(some, dtype=np.int64), space.pins
        likely, alike = np.zeros(len(where)), self._alike(leaves, where)
        if not is_chunked(family.schedule) or not alike.any():
            return likely
        where, recompute = where[alike], recompute_of(family, pins)
        cuts = self.tried(family, with_memory)
        if with_memory:
            likely[alike] = self._memory.of_cuts(family, leaves, where, recompute, pins, cuts)
        else:
            likely[alike] = self._shapes.of_cuts(family, leaves, recompute, pins.reshard, cuts)[where]
        return likely

    def tried(self, family: Family, fitting: bool) -> list[StageCuts]:
        """The cuts of a chunked family that are tried first: those that balance its ranks. fitting: also others, if
        memory leaves no rank room to spare with those."""
        key = frame_of(family.frugal)
        least = self.least_of_family(family)
        if least is None and self.kinds is not None:  # the slowest device has too little memory, others may do
            least = next(iter(self.leasts_of_kinds(family, self.kinds) or []), None)
        if least is None:
            return []
        frame, shape = key[0], family.frugal
        if key not in self._cuts:
            self._cuts[key] = self._chunkings.of(frame, least.seconds)
        if fitting and key not in self._fitting:
            self._fitting.add(key)
            ways = [kept[:1] if family.schedule in ZERO_BUBBLE else kept for kept, _ in least.held]
            held = HeldByRank(
                np.array([kept.min() for kept in ways]),
                np.array([fixed for _, fixed in least.held]),
                np.array([float(shape.in_flight(stage)) for stage in range(frame.num_stages)]),
                AMPLE * allocatable_bytes(shape, self.model.device, self.training) - float(least.turn.max()),
            )
            self._cuts[key] = self._chunkings.with_fitting(frame, self._cuts[key], least.seconds, held)
        return self._cuts[key]

    def num_prices(self, family: Family) -> int:
        """Number of prices that programs have found so far for the table of a family's shapes."""
        return 0 if family.pipeline == 1 else self.pipelines.num_prices[Table.of(family.frugal)]

    def by_prices_s(self, family: Family, space: Space, some: Ints, latest: int | None = None) -> Floats:
        """[of these shapes] -> lower bound in seconds by the prices that programs of shapes with the same table have
        found (fluid.py); 0 if there are none yet. latest: use only so many of the latest prices."""
        table = Table.of(family.frugal)
        known = self.pipelines.prices.get(table, [])[-(latest or MOST_PRICES) :]
        least = np.zeros(len(some))
        leaves = space.leaves(family)
        alike = self._alike(leaves, some)
        if family.pipeline == 1 or not known or not alike.any():
            return least
        many = self._memory.layers(family, leaves, some[alike], recompute_of(family, space.pins), space.pins)
        runs, flights, rooms, waits_s, end_s = many
        each = least_of_many_s(table, known, runs, flights, rooms, waits_s, end_s, SCALES)
        least[alike] = np.maximum(least[alike], each)
        return least

    def of_prices(
        self, prices: StagePrices | UnequalPrices, enough_s: float, in_order: bool = True
    ) -> tuple[float, Ints | None]:
        """(lower bound in seconds for a pipeline's shape, whatever its cuts and options, [stage] -> numbers of the
        places where stages begin in the cuts nearest to the solution), by a linear program (fluid.py). It ends as soon
        as the bound reaches `enough_s`. in_order: whether layers must stay in their order, which takes longer where
        kinds take turns (`kinds_take_turns`)."""
        runs, rooms, waits_s, end_s, turns = fluid_layers(prices)
        table = Table.of(prices.shape)
        found, layers = self.pipelines.least_s(table, runs, rooms, waits_s, end_s, enough_s, turns, in_order)
        return found * (1 - ROUNDING), self._nearest(layers) if found < enough_s else None

    @cached_property
    def kinds_take_turns(self) -> bool:
        """Whether layers of one kind occur again after layers of another kind."""
        kinds = [self.model.kinds[self.chain.runs[group[0]].start] for group in self.chain.alike]
        return len(set(kinds)) < len(kinds)

    def of_whole_layers(
        self, prices: StagePrices | UnequalPrices, below_s: float, seconds: float
    ) -> tuple[float, Ints | None]:
        """(lower bound in seconds for a pipeline's shape, cuts whose step may be below `below_s`, None if none were
        found), by the integer program of fluid.py, which runs for `seconds`."""
        runs, rooms, waits_s, end_s, turns = fluid_layers(prices)
        table = Table.of(prices.shape)
        found, layers = self.pipelines.whole(table, runs, rooms, waits_s, end_s, below_s, seconds, turns)
        return found * (1 - ROUNDING), None if layers is None else self._nearest(layers)

    def _nearest(self, layers: Floats) -> Ints:
        """[stage] -> number of the place where it begins, and at last of the end, so that stages come nearest to so
        many layers. layers: [stage], not whole."""
        places = np.array(self.chain.places)
        ends = np.cumsum(layers) * self.chain.num_layers / max(1.0, float(layers.sum()))
        found = np.abs(places[None, :] - ends[:-1, None]).argmin(axis=1) if len(layers) > 1 else np.zeros(0, dtype=int)
        for stage in range(len(found)):  # each has some place
            found[stage] = max(found[stage], stage + 1, found[stage - 1] + 1 if stage else 0)
        for stage in range(len(found) - 1, -1, -1):
            later = found[stage + 1] if stage + 1 < len(found) else len(places) - 1
            found[stage] = min(found[stage], later - 1)
        return np.concatenate(([0], found, [len(places) - 1]))

    def least_of_family(self, family: Family) -> Least | None:
        """Least seconds and bytes of the layers of a family, whatever the schedule; None if even those exceed
        memory."""
        any_schedule = family.any_schedule
        if any_schedule not in self._leasts:
            shape = any_schedule.frugal
            room = allocatable_bytes(shape, self.model.device, self.training)
            fits = self._may_fit_with_less(any_schedule)
            self._leasts[any_schedule] = self._least.of(shape, room * shape.pipeline, family.offered) if fits else None
        return self._leasts[any_schedule]

    def _may_fit_with_less(self, family: Family) -> bool:
        """Whether several micro-batches of the smallest size may fit in memory. If not, larger ones need not be priced:
        they hold more."""
        count, size = family.num_microbatches, family.micro_batch
        if count == 1 or size == 1:
            return True
        return self.least_of_family(replace(family, micro_batch=1, num_microbatches=count * size)) is not None

    def leasts_of_kinds(self, family: Family, kinds: Kinds) -> list[Least] | None:
        """[kind] -> what layers of a family take at least on such devices; None if no shape of it has each stage on one
        kind of device, or all devices together have too little memory."""
        if not kinds.may_have_own(family.pipeline):
            return None
        shape = replace(family.frugal, schedule="1f1b", virtual_stages=1)
        key = shape, family.offered
        if key not in self._leasts_by_kind:
            found = [least.of(shape, kinds.room(shape), family.offered) for least in self._least_on_kinds]
            each = [least for least in found if least is not None]
            self._leasts_by_kind[key] = each if len(each) == len(found) else None
        return self._leasts_by_kind[key]

    def _of_equal(self, family: Family) -> float:
        counts = np.array([run.length for run in self.chain.runs], dtype=float)
        least, shape, count = self.least_of_family(family), family.frugal, family.num_microbatches
        if least is None:
            return float("inf")
        pass_s = float(counts @ least.seconds)
        of_kinds = self._shapes.of_kinds
        slowest = float(self._shapes.slowest_s(of_kinds(least.seconds)[:, None], family.pipeline)[0])
        update_s = self.model.optimizer_s(
            least.elements / shape.sharded_over / family.pipeline, shape.offload_optimizer
        )
        if family.pipeline == 1:
            return count * pass_s + update_s
        if not is_chunked(family.schedule):
            even_s = float(even_step_s(family.schedule, family.pipeline, count, slowest, pass_s))
            return max(even_s, count * pass_s / family.pipeline + update_s)
        return max(count * slowest, self._of_chunked(family, least, pass_s, update_s))

    def _of_chunked(self, family: Family, least: Least, pass_s: float, update_s: float) -> float:
        """Lower bound in seconds for all cuts of a chunked family: the mean over the ranks of the work of each, which
        begins after at least one place of the chain on every rank before it. Where gradients of weights do not come
        last, each rank also waits for the backward of those before. The step is also no shorter than the way of one
        micro-batch through all stages and back. update_s: seconds of the optimizer, on each rank's even share."""
        if family.pipeline * family.virtual_stages > len(self.chain.places) - 1:
            return float("inf")
        ahead, of_kinds = self._shapes.least_ahead(family.pipeline), self._shapes.of_kinds
        busy_s = family.num_microbatches * pass_s
        bound = (busy_s + float(ahead @ of_kinds(least.forward_s))) / family.pipeline + update_s
        if family.schedule in ZERO_BUBBLE:
            return max(bound, pass_s - float(self._shapes.counts @ self._shapes.weights_s(family)))
        return max(bound, pass_s, (busy_s + float(ahead @ of_kinds(least.seconds))) / family.pipeline)

    def _of_unequal(self, family: Family, kinds: Kinds) -> float:
        """Lower bound in seconds for those shapes of a family whose stages are each on one kind of device, in any
        order; infinite if there is no such shape."""
        least, shape = self.leasts_of_kinds(family, kinds), family.frugal
        if least is None:
            return float("inf")
        shares = kinds.shares([each.seconds for each in least], shape.pipeline)
        return family.num_microbatches * shares.slowest_s if is_chunked(family.schedule) else shares.step_s(shape)

    def _may_be_held(self, family: Family, space: Space) -> Flags:
        """[shape] -> False if all ranks of the pipeline together cannot hold the least that every layer keeps."""
        leaves = space.leaves(family)
        least = self.least_of_family(family)
        if least is None:
            return np.zeros(len(leaves.each), dtype=bool)
        held = self._shapes.held(family, leaves)
        need = least.fewest_bytes + least.whole * held.parameters + least.whole_trainable * held.trained
        return need <= held.room


Frame = tuple[Chunking, int, int, bool, int, ContextKind, int]
"""The properties of a chunked shape that decide which cuts are tried."""


def frame_of(shape: Shape) -> Frame:
    """The frame of a shape."""
    frame = Chunking(shape.schedule, shape.pipeline, shape.virtual_stages)
    return frame, shape.micro_batch, shape.tensor, shape.sequence, shape.context, shape.context_kind, shape.expert


def recompute_of(family: Family, pins: Pins) -> Recompute | None:
    """The recompute of all layers of a family, if they have no choice; else None."""
    return "none" if family.schedule in ZERO_BUBBLE else pins.recompute


FluidLayers = tuple[list[Layers], list[float], Floats, float, list[LayerTurns]]
"""What a program is given of a shape: ([run] of layers with their costs, [rank] -> bytes of room, [stage but the last]
-> seconds waited for what crosses after it, seconds at the end of a step beyond those of layers, the turns of layers
where ranks hold several stages)."""


def fluid_layers(prices: StagePrices | UnequalPrices) -> FluidLayers:
    """What a program is given of a shape with these prices."""
    if isinstance(prices, UnequalPrices):
        return _on_unequal(prices)
    memory, rooms, turns = _held(prices)
    runs = [_layers(prices, group, memory) for group in prices.chain.alike]
    shared = prices.chain.counted_twice(prices.shape)
    return runs, rooms, _waits_s(prices), -shared * _update_s(prices), turns


def _held(prices: StagePrices) -> tuple[list[Floats], list[float], list[LayerTurns]]:
    """([run] -> [stage][option] bytes of a layer, [rank] -> bytes of room for them, turns of layers where ranks hold
    several stages)."""
    shape = prices.shape
    if shape.virtual_stages > 1:
        return _held_by_several(prices, prices.chain.counted_twice(shape))
    _, memory, rooms = prices.divisible(range(shape.pipeline))
    return memory, rooms.tolist(), []


def _layers(prices: StagePrices, group: Sequence[int], memory: Sequence[Floats]) -> Layers:
    """Neighbouring runs of one kind as the program's layers. memory: [run] -> [stage][option] bytes of a layer."""
    costs = prices.costs[group[0]]
    return Layers(
        float(prices.chain.lengths[group].sum()),
        np.array([cost.forward_total_s for cost in costs]),
        np.array([cost.backward_total_s for cost in costs]),
        np.array([cost.weight_s for cost in costs]),
        np.maximum(0.0, np.min([memory[run] for run in group], axis=0)),
        min(cost.once_data_s for cost in costs) + costs[0].trainable_elements * _update_s(prices),
    )


def _update_s(prices: StagePrices) -> float:
    """Seconds of the optimizer for each parameter element of a layer."""
    return prices.model.optimizer_s(1.0, prices.shape.offload_optimizer) / prices.shape.sharded_over


def _waits_s(prices: StagePrices) -> Floats:
    """[stage but the last] -> lower bound on the seconds that it and the next one each wait for what crosses between
    them."""
    chain, shape, crossings = prices.chain, prices.shape, prices.model.crossings(prices.shape)
    at_place = np.array([crossings[place].waited_s for place in chain.places])
    return chain.least_between(at_place, shape.pipeline * shape.virtual_stages)


def _on_unequal(prices: UnequalPrices) -> FluidLayers:
    """What layers cost on each stage's device. Devices may leave different options: the last one fills up."""
    chain, of_ranks = prices.chain, np.array(prices.kinds)
    of_stages = of_ranks[Table.of(prices.shape).rank_of]
    rooms, each = np.zeros(len(of_ranks)), []
    for kind, on in enumerate(prices.by_kind):
        memory, there, _ = _held(on)
        rooms[of_ranks == kind] = np.array(there)[of_ranks == kind]
        each.append([_layers(on, group, memory) for group in chain.alike])
    runs = []
    for alike in zip(*each, strict=True):
        most = max(layers.bytes.shape[1] for layers in alike)
        joined, once_s = np.zeros((4, len(of_stages), most)), np.zeros(len(of_stages))
        for kind, layers in enumerate(alike):
            option = np.minimum(np.arange(most), layers.bytes.shape[1] - 1)
            seconds, own = (layers.forward_s, layers.backward_s, layers.weight_s), of_stages == kind
            joined[:, own] = np.array([layers.of_each(row)[:, option] for row in (*seconds, layers.bytes)])[:, own]
            once_s[own] = layers.once_s
        forward_s, backward_s, weight_s, held = joined
        runs.append(Layers(alike[0].count, forward_s, backward_s, weight_s, held, once_s))
    shared = chain.counted_twice(prices.shape)
    end_s = -shared * max(map(_update_s, prices.by_kind))
    return runs, rooms.tolist(), np.min([*map(_waits_s, prices.by_kind)], axis=0), end_s, []


def _held_by_several(prices: StagePrices, shared: float) -> tuple[list[Floats], list[float], list[LayerTurns]]:
    """([run] -> [stage][option] bytes of a layer, [rank] -> bytes of room for them, turns of layers), for ranks that
    hold several stages: all that a stage ever keeps, and the least that passes in a turn. shared: elements that are
    counted too often."""
    shape, model = prices.shape, prices.model
    state, table = state_bytes(shape, model.training), Table.of(shape)
    flights = np.array([float(shape.in_flight(stage)) for stage in range(table.num_stages)])
    memory = []
    for costs in prices.costs:
        fixed = np.array([
            cost.elements * state.sharded_parameters
            + cost.trainable_elements * (state.optimizer + state.sharded_gradients)
            + cost.accumulated_bytes + cost.held_bytes + cost.root_bytes
            for cost in costs
        ])  # fmt: skip
        memory.append(flights[:, None] * np.array([cost.least_kept_bytes for cost in costs]) + fixed)
    twice = state.sharded_parameters + state.optimizer + state.sharded_gradients + state.accumulated
    twice += max(0.0, state.copied_twice)
    passing = [min(cost.ending_bytes for cost in costs) for costs in prices.costs]
    rooms = np.full(shape.pipeline, prices.budget - shape.virtual_stages * model.held_bytes(shape) + shared * twice)
    left = prices.chain.least_turns(table.rank_of, np.array(passing)[:, None])[:, 0]
    rooms -= left
    np.subtract.at(rooms, table.rank_of, prices.least_crossing(table.num_stages))
    return memory, rooms.tolist(), [*_turns(prices, left)]


def _turns(prices: StagePrices, left: Floats) -> Iterator[LayerTurns]:
    """Turns of each run that has several layers which may recompute. left: as in `LayerTurns`."""
    lengths = [int(prices.chain.lengths[group].sum()) for group in prices.chain.alike]
    ahead = 0
    for run, (group, length) in enumerate(zip(prices.chain.alike, lengths, strict=True)):
        each = [prices.costs[i] for i in group]
        if length > 1 and len(each[0]) > 1:
            alone = np.min([[cost.ending_bytes for cost in costs] for costs in each], axis=0)
            paired = np.min([[min(c.reducing_bytes(o) for o in costs) for c in costs] for costs in each], axis=0)
            yield LayerTurns(run, ahead, sum(lengths) - ahead - length, alone, paired, left)
        ahead += length
