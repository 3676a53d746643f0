"""Best-first branch and bound over the space of shapes: bound, solve by scan or by chunkings, prove by ILP."""

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..cost.chain import Chain
from ..cost.layer_cost import CostModel
from ..cost.memory_cost import state_bytes
from ..cost.stage_cost import allocatable_bytes
from ..plan.document import ContextKind, Plan, Recompute
from ..plan.making import make_plan
from ..plan.pins import Pins
from ..plan.schedules import ZERO_BUBBLE, is_chunked
from ..plan.shape import NO_EXTRAS, Offered, Shape
from ..plan.training import TrainingSpec
from .chunked import Chunking, Chunkings, Cuts, HeldByRank, best_chunking
from .columns import ROUNDING, StagePrices
from .ilp import solve_master
from .least_work import Least, LeastWork
from .memory_bounds import MemoryBounds
from .polish import evened, polished
from .scan import Assignment, scan
from .shape_bounds import ShapeBounds
from .solver import OutOfTimeError
from .space import Family, Space, Split
from .tensor_choice import CutChoice
from .unequal import Held, Kinds, UnequalPrices

WINDOW = 0.03
"""Shapes that may come this near the best are solved too: runners-up, and finalists of the event simulation."""

SIMPLE = 0.01
"""Among plans this near the best the simplest wins."""

MAX_NEAR = 40
"""Shapes solved inside the window once the best is proven: enough for runners-up, and keeps the search in seconds."""

ALTERNATIVES = 5
"""Other layouts that are shown beside the plan, if there are as many legal ones that fit."""

MAX_SLOW = 60
"""Shapes outside the window that are solved for their sake, at most."""

SLOWEST = 4.0
"""Layouts that take longer than the best by this factor are no alternatives."""

TIE = 0.001
"""Shapes this near the best are put to the ILP as well; all others are bounded, or solved exactly by the scan."""

MAX_TIES = 4
"""At most so many, the best first."""

CUTOFF_SLACK = 1e-5
"""The ILP need only rule out steps shorter than the scan's: longer ones by more than this are cut off."""

AMPLE = 0.8
"""Share of a rank's room that layers may fill at least before other cuts are looked for: they hold more in fact."""

SOLVER_S = 1e-9
"""The solver's tolerance of 1e-6 ms, which every micro-batch may fall short of: as much as steps of microseconds."""

COUNTED = 0.5
"""Share of the time in which a space may be counted; what is left out then (of clusters whose number has hundreds of
divisors) is not searched."""

Floats = NDArray[np.float64]

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Solved:
    """A shape with its best assignment, as a plan and priced."""

    shape: Shape
    prices: StagePrices | UnequalPrices
    assignment: Assignment

    @property
    def seconds(self) -> float:
        """Closed form of the step."""
        return self.assignment.seconds


@dataclass
class Outcome:
    """What a search over a space found and proved."""

    solved: list[Solved] = field(default_factory=list)
    bound: float = float("inf")
    complete: bool = True
    total: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    pruned: int = 0
    num_solved: int = 0

    @property
    def best(self) -> Solved | None:
        """The shape of least closed-form step time."""
        return min(self.solved, key=lambda s: s.seconds, default=None)


@dataclass(frozen=True)
class _Held:
    """Families of one micro-batch whose layers every rank can hold, as far as is known."""

    families: tuple[Family, ...]


@dataclass(frozen=True)
class _Balanced:
    """A chunked family whose cuts are known."""

    family: Family


@dataclass
class _Queue:
    """Shapes of a family that are still to be looked at, the least bounds first."""

    family: Family
    shapes: list[int]
    bounds: list[float]
    recompute: Recompute | None
    place: int = 0


_Item = Split | tuple[Family, ...] | _Held | Family | _Balanced | _Queue | StagePrices | UnequalPrices
"""What is looked at when it is its bound's turn: splits, their families of one micro-batch, each of these, with its
cuts if it is chunked, its shapes, and one shape."""

_Frame = tuple[Chunking, int, int, bool, int, ContextKind, int]
"""What the cuts of a chunked shape depend on."""


class Explorer:
    """Searches spaces of one model, cluster and job; caches what all of them share."""

    def __init__(self, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec) -> None:
        self.profile = profile
        self.cluster = cluster
        self.training = training
        self.model = CostModel(profile, cluster, training)
        self.chain = Chain(self.model)
        self.kinds = Kinds(self.model) if len(cluster.kinds) > 1 else None
        self.choice = CutChoice(self.model)
        self._least_on_kinds = [LeastWork(self.chain, model) for model in self.kinds.models] if self.kinds else []
        self._leasts: dict[Family, Least | None] = {}
        self._leasts_by_kind: dict[tuple[Shape, Offered], list[Least] | None] = {}
        self._least_anywhere: dict[tuple[Split, int, Pins], float] = {}
        self._cuts: dict[_Frame, list[Cuts]] = {}
        self._fitting: set[_Frame] = set()
        self._chunkings = Chunkings(self.chain)
        self._bounds = ShapeBounds(self.chain)
        self._least = self._bounds.least
        self._memory = MemoryBounds(self._bounds)

    def explore(
        self,
        pins: Pins,
        deadline_s: float,
        near: int = MAX_NEAR,
        progress: Progress | None = None,
        cutoff_s: float = float("inf"),
        any_will_do: bool = False,
    ) -> Outcome:
        """Solve every shape that could be the best, up to `near` more within the window of it, and (unless near is 0)
        as many as it takes for enough alternatives to show, even slower ones.

        deadline_s: time.monotonic() at which to stop; the outcome then says it is not complete, and has no bound where
        not even all splits were counted. cutoff_s: the closed
        form of a plan that is known; with near 0 only faster ones are looked for. any_will_do: stop at the first plan
        that fits; none is found only where none fits.
        """
        space = Space(self.profile, self.cluster, self.training, pins, self.choice.faster)
        outcome = Outcome()
        order = itertools.count()
        heap: list[tuple[float, int, _Item, bool]] = []
        started_s = time.monotonic()
        counted_until_s = started_s + COUNTED * (deadline_s - started_s)
        splits: list[Split] = []
        for split in space.splits():
            if time.monotonic() > counted_until_s:
                outcome.complete, outcome.bound = False, 0.0
                break
            outcome.total += space.num_shapes_of(split)
            splits.append(split)
        for split, split_s in zip(splits, self._bounds_of_splits(splits, space), strict=True):
            heapq.heappush(heap, (split_s, next(order), split, False))
        outcome.rejected = dict(space.rejected)
        outcome.total += sum(space.rejected.values())
        best = cutoff_s
        window = WINDOW if near > 0 else 0.0
        extra = 0
        later: list[tuple[float, int, Family, bool]] = []
        layouts: set[tuple[object, ...]] = set()
        while heap or later:
            if later and (not heap or best < cutoff_s):
                heap += later  # now that there is a plan to be compared with
                heapq.heapify(heap)
                later = []
            bound = heap[0][0]
            few = near > 0 and extra < MAX_NEAR + MAX_SLOW and len(layouts) <= ALTERNATIVES
            if not few and (bound >= best * (1 + window) or (bound >= best and extra >= near)):
                break
            cutoff = best * (SLOWEST if few else 1 + window)
            if time.monotonic() > deadline_s:
                outcome.complete = False
                outcome.bound = min([outcome.bound, bound, *(entry[0] for entry in later)])
                break
            _, _, item, raised = heapq.heappop(heap)
            if not raised:  # dearer bounds wait until it is an item's turn by its cheap one
                least_s = self._least_with_recompute_s(item, space, cutoff)
                if least_s >= cutoff:
                    continue
                if least_s > bound:
                    heapq.heappush(heap, (least_s, next(order), item, True))
                    continue
            if isinstance(item, Split):
                groups = _by_micro_batch(space.families_of(item))
                samples = [families[0].frugal.samples for families in groups]
                slowest = self._slowest_s(item, item.pipeline, samples).tolist()
                for families, slowest_s in zip(groups, slowest, strict=True):
                    least_s = families[0].num_microbatches * slowest_s
                    if least_s < cutoff:
                        heapq.heappush(heap, (max(bound, least_s), next(order), families, False))
                continue
            if isinstance(item, tuple):
                least_s = max(bound, self._least_held_s(item[0], space))
                if least_s < cutoff:
                    heapq.heappush(heap, (least_s, next(order), _Held(item), True))
                continue
            if isinstance(item, _Held):
                for family in item.families:
                    family_bound = max(bound, self._family_bound(family))
                    if np.isfinite(family_bound) and family_bound < cutoff:
                        entry = family_bound, next(order), family, False
                        if is_chunked(family.schedule) and best >= cutoff_s:
                            later.append(entry)
                        else:
                            heapq.heappush(heap, entry)
                continue
            if isinstance(item, Family) and is_chunked(item.schedule) and not self._may_have_own(item):
                least_s = max(bound, self._least_chunked_s(item))
                if least_s < cutoff:
                    heapq.heappush(heap, (least_s, next(order), _Balanced(item), True))
                continue
            if isinstance(item, Family | _Balanced):
                family = item if isinstance(item, Family) else item.family
                queue = self._queue_of(family, space, bound, cutoff)
                if queue.bounds:
                    heapq.heappush(heap, (queue.bounds[0], next(order), queue, False))
                continue
            if isinstance(item, _Queue):
                shape = item.family.shape(space.leaves(item.family).each[item.shapes[item.place]])
                prices = self.priced(shape, item.recompute, pins.reshard, pins.offered)
                heapq.heappush(heap, (bound, next(order), prices, False))
                item.place += 1
                if item.place < len(item.bounds) and item.bounds[item.place] < cutoff:
                    heapq.heappush(heap, (item.bounds[item.place], next(order), item, True))
                continue
            extra += bound >= best
            outcome.num_solved += 1
            found = self._solved(item, cutoff, deadline_s)
            if found is not None:
                outcome.solved.append(Solved(item.shape, item, found))
                layouts.add(item.shape.layout)
                best = min(best, found.seconds)
                if any_will_do:
                    break
                if progress is not None:
                    progress(f"{outcome.num_solved} shapes solved", min(0.9, bound / best))
            if time.monotonic() > deadline_s:  # it may have been left half solved
                outcome.complete = False
                outcome.bound = min([outcome.bound, bound, *(entry[0] for entry in later)])
                break
        outcome.pruned = outcome.total - sum(outcome.rejected.values()) - outcome.num_solved
        if heap and outcome.complete:
            outcome.bound = min(outcome.bound, heap[0][0])
        if not any_will_do and time.monotonic() < deadline_s:
            _polish(outcome)
        outcome.bound = min([outcome.bound, *(s.seconds for s in outcome.solved)])
        return outcome

    def _queue_of(self, family: Family, space: Space, least_s: float, cutoff_s: float) -> _Queue:
        """The shapes of a family whose bounds are below the cut-off, and whose memory may do. least_s: the family's
        bound."""
        pins, leaves = space.pins, space.leaves(family)
        recompute = _recompute_of(family, pins)
        seconds = self._bounds.seconds(family, leaves, recompute, pins.reshard, self._cuts_of(family))
        seconds[~self._may_be_held(family, space)] = np.inf
        if self.kinds is not None:
            own = np.array([bool(leaf.kind_order) for leaf in leaves.each])
            seconds = np.where(own, self._bound_of_unequal_with_memory(family, self.kinds, pins), seconds)
        seconds = np.maximum(seconds, least_s)
        order = np.argsort(seconds, kind="stable")
        order = order[seconds[order] < cutoff_s].tolist()
        return _Queue(family, order, seconds[order].tolist(), recompute)

    def _least_with_recompute_s(self, item: "_Item", space: Space, cutoff_s: float) -> float:
        """Seconds that shapes take at least with the recompute that memory asks for; 0 where nothing is known. A queue
        is put in the order of that."""
        if isinstance(item, _Queue):
            self._raise(item, space, cutoff_s)
            return item.bounds[0] if item.bounds else float("inf")
        if isinstance(item, Split | _Held | _Balanced):
            return 0.0
        if isinstance(item, tuple):
            return self._least_anywhere_s(item[0], space)
        if isinstance(item, Family):
            if not is_chunked(item.schedule) or self._may_have_own(item):
                return 0.0
            least_s = self._least_chunks_held_s(item, space)
            return least_s if least_s >= cutoff_s else max(least_s, self._least_even_s(item, space))
        if not self._may_hold(item):
            return float("inf")
        if isinstance(item, UnequalPrices):
            return 0.0 if is_chunked(item.shape.schedule) else item.least_with_memory_s()
        if item.shape.pipeline > 1 and not is_chunked(item.shape.schedule):
            pass_s = float(self.chain.lengths @ item.fastest.microbatch_s)
            return (item.shape.num_microbatches - 1) * item.least_slowest_s() + pass_s
        return 0.0

    def _may_have_own(self, family: Family) -> bool:
        """Whether some shapes of a family may have stages on one kind of device each, of several."""
        return self.kinds is not None and self.kinds.may_have_own(family.pipeline)

    def _least_anywhere_s(self, family: Family, space: Space) -> float:
        """Seconds that no shape of a family, or of those with another kind of context parallelism, beats, with all
        groups where their traffic takes least: by memory, and by the data ranks' traffic. In a pipeline that is for all
        schedules."""
        if self.kinds is not None:
            return 0.0
        key = replace(family.split, context_kind="ring"), family.micro_batch, space.pins
        if key not in self._least_anywhere:
            leaves, pins, memory = space.unplaced(family), space.pins, self._memory
            if family.pipeline == 1:
                some = np.arange(len(leaves.each))
                least = memory.seconds(family, leaves, some, pins.recompute, pins, ()).min() * (1 - ROUNDING)
            else:
                least = family.num_microbatches * memory.slowest_s(family, leaves, pins.recompute, pins).min()
            self._least_anywhere[key] = float(least)
        return self._least_anywhere[key]

    def _least_held_s(self, family: Family, space: Space) -> float:
        """Seconds that a pipeline of equal devices takes at least to hold its layers, over all shapes of a family, and
        of those that differ in nothing but the schedule; 0 where `_least_anywhere_s` says hardly less."""
        if family.pipeline == 1 or family.context == 1 or self.kinds is not None:
            return 0.0
        slowest = self._memory.slowest_s(family, space.leaves(family), _recompute_of(family, space.pins), space.pins)
        return family.num_microbatches * float(slowest.min())

    def _least_chunks_held_s(self, family: Family, space: Space) -> float:
        """The same of a chunked family, by what its schedule holds and lets layers recompute."""
        if self.kinds is not None:
            return 0.0
        recompute = _recompute_of(family, space.pins)
        slowest = self._memory.slowest_chunked_s(family, space.leaves(family), recompute, space.pins)
        return family.num_microbatches * float(slowest.min())

    def _raise(self, queue: _Queue, space: Space, cutoff_s: float) -> None:
        """Bounds of a queue's shapes with the recompute that memory asks for, which is when cuts for the sake of memory
        are looked for, and of those on unequal devices with what their stages take; those above the cut-off are left
        out."""
        family, leaves, pins = queue.family, space.leaves(queue.family), space.pins
        some, seconds = np.array(queue.shapes), np.array(queue.bounds)
        more = self._fitting_cuts(family)
        if more:
            others = self._bounds.seconds(family, leaves, queue.recompute, pins.reshard, more)
            seconds = np.minimum(seconds, others[some])
        own = np.array([bool(leaves.each[i].kind_order) for i in queue.shapes])
        if not own.all():
            cuts = self._cuts_of(family)
            least = self._memory.seconds(family, leaves, some[~own], queue.recompute, pins, cuts)
            seconds[~own] = np.maximum(seconds[~own], least * (1 - ROUNDING))
        for place in np.flatnonzero(own):
            shape = family.shape(leaves.each[some[place]])
            prices = self.priced(shape, queue.recompute, pins.reshard, pins.offered)
            if isinstance(prices, UnequalPrices) and not is_chunked(family.schedule):
                seconds[place] = max(seconds[place], prices.least_s())
        order = np.argsort(seconds, kind="stable")
        order = order[seconds[order] < cutoff_s]
        queue.shapes, queue.bounds = some[order].tolist(), seconds[order].tolist()

    def priced(
        self, shape: Shape, recompute: Recompute | None, reshard: bool | None, offered: Offered = NO_EXTRAS
    ) -> StagePrices | UnequalPrices:
        """Prices of a shape's stages, on unequal devices each on its own."""
        if shape.kind_order and self.kinds is not None:
            return self.kinds.priced(shape, recompute, reshard, offered)
        return StagePrices(self.chain, shape, recompute, reshard, offered)

    def _solved(self, prices: StagePrices | UnequalPrices, cutoff_s: float, deadline_s: float) -> Assignment | None:
        """The best stages of a shape, as far as time allows."""
        if is_chunked(prices.shape.schedule):
            cuts = self._cuts[_frame_of(prices.shape)]
            tried = [np.searchsorted(self.chain.places, each.places) for each in cuts]
            if isinstance(prices, UnequalPrices):
                tried += evened(prices, cuts)
            return best_chunking(prices, tried, cutoff_s)
        with self._until(deadline_s):
            return scan(prices, cutoff_s)

    @contextmanager
    def _until(self, deadline_s: float) -> Iterator[None]:
        """The best options are looked for until then."""
        for chain in self._chains:
            chain.deadline_s = deadline_s
        try:
            yield
        finally:
            for chain in self._chains:
                chain.deadline_s = float("inf")

    @property
    def _chains(self) -> list[Chain]:
        """That of all devices, and of each kind."""
        return [self.chain, *(self.kinds.chains if self.kinds is not None else [])]

    def _may_be_held(self, family: Family, space: Space) -> NDArray[np.bool_]:
        """[shape] -> the same before anything is priced, with devices alike."""
        leaves = space.leaves(family)
        least = self._least_of_family(family)
        if least is None:
            return np.zeros(len(leaves.each), dtype=bool)
        held = self._bounds.held(family, leaves)
        need = least.fewest_bytes + least.whole * held.parameters + least.whole_trainable * held.trained
        return need <= held.room

    def _may_hold(self, prices: StagePrices | UnequalPrices) -> bool:
        """False where all ranks of the pipeline together cannot hold the least that every layer keeps."""
        if isinstance(prices, UnequalPrices):
            return self._fits_together(prices.on(0), prices.budget)
        return self._fits_together(prices, prices.budget * prices.shape.pipeline)

    def _fits_together(self, prices: StagePrices, room: float) -> bool:
        shape = prices.shape
        state = state_bytes(shape, self.training)
        gradients = state.sharded_gradients if shape.num_microbatches > 1 else 0.0
        per_element = state.sharded_parameters + gradients + state.optimizer
        least = [
            min(c.elements * state.sharded_parameters + c.kept_bytes + c.trainable_elements * (
                gradients + state.optimizer) for c in costs)
            for costs in prices.costs
        ]  # fmt: skip
        shared = sum(elements * (len(layers) - 1) for layers, elements in self.chain.shared_weights(shape))
        need = sum(run.length * each for run, each in zip(self.chain.runs, least, strict=True)) - per_element * shared
        return need <= room

    def _cuts_of(self, family: Family) -> list[Cuts]:
        """The cuts that are tried of a chunked family; none of others."""
        if not is_chunked(family.schedule):
            return []
        key = _frame_of(family.frugal)
        if key not in self._cuts:
            least = self._least_of_family(family)
            if least is None and self.kinds is not None:  # the slowest device has too little memory, others may do
                least = next(iter(self._leasts_of_kinds(family, self.kinds) or []), None)
            self._cuts[key] = [] if least is None else self._chunkings.of(key[0], least.seconds)
        return self._cuts[key]

    def _fitting_cuts(self, family: Family) -> list[Cuts]:
        """Where memory leaves no rank of a chunked family's balanced cuts room to spare: others, to be tried, too."""
        key, least, shape = _frame_of(family.frugal), self._least_of_family(family), family.frugal
        if not is_chunked(family.schedule) or least is None or key in self._fitting:
            return []
        self._fitting.add(key)
        cuts, frame = self._cuts_of(family), key[0]
        ways = [kept[:1] if family.schedule in ZERO_BUBBLE else kept for kept, _ in least.held]
        held = HeldByRank(
            np.array([kept.min() for kept in ways]),
            np.array([fixed for _, fixed in least.held]),
            np.array([float(shape.in_flight(stage)) for stage in range(frame.num_stages)]),
            AMPLE * allocatable_bytes(shape, self.model.device, self.training) - float(least.passing.max()),
        )
        self._cuts[key] = self._chunkings.with_fitting(frame, cuts, least.seconds, held)
        return self._cuts[key][len(cuts) :]

    def _least_even_s(self, family: Family, space: Space) -> float:
        """Seconds that a chunked family takes at least with what data ranks exchange, before its cuts are known."""
        recompute, reshard = _recompute_of(family, space.pins), space.pins.reshard
        seconds = self._bounds.even_s(family, space.leaves(family), recompute, reshard)
        return float(seconds[self._may_be_held(family, space)].min(initial=np.inf))

    def _least_chunked_s(self, family: Family) -> float:
        """Seconds that a chunked family takes at least over all cuts that are tried, memory aside; infinite if there
        are none."""
        least, count = self._least_of_family(family), family.num_microbatches
        if least is None:
            return float("inf")
        times = least.seconds, least.forward_s
        return min((cuts.least_s(family.schedule, count, *times) for cuts in self._cuts_of(family)), default=np.inf)

    def _bounds_of_splits(self, splits: Sequence[Split], space: Space) -> list[float]:
        """[split] -> seconds that no shape of it can beat: compute of all micro-batches, tensor traffic at its best
        place, shared evenly by the stages."""
        groups: dict[tuple[object, ...], dict[tuple[int, int, int], list[int]]] = {}
        for i, split in enumerate(
            splits
        ):  # what micro-batches take depends on the one, how many there are on the other
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
                    slowest[pipeline] = self._slowest_s(splits[places[0]], pipeline, samples)
                sizes = counts[pipeline, data, context]
                each_s = slowest[pipeline][[place[size / context] for size in sizes]]
                bounds[places] = (np.array(list(sizes.values())) * each_s).min()
        return bounds.tolist()

    def _slowest_s(self, split: Split, pipeline: int, samples: Sequence[float]) -> Floats:
        """[samples] -> least seconds of compute, tensor traffic and tokens sent to experts that a micro-batch is for
        the slowest of so many stages, if a rank has so many samples of it, whatever the context ranks."""
        shape = Shape(1, 1, split.tensor, 1, 1, 1, split.sequence, expert=split.expert, cuts=split.cuts)
        works = self._least.passes_at_s(shape, samples)[:, :, 0]
        alike = self._bounds.slowest_s(works[:, self._bounds.first_run].T, pipeline)
        if self.kinds is None or not self.kinds.may_have_own(pipeline):
            return alike
        each = [least.passes_at_s(shape, samples)[:, :, 0] for least in self._least_on_kinds]
        shares = [self.kinds.shares(kinds, pipeline).slowest_s for kinds in zip(*each, strict=True)]
        return np.minimum(alike, shares)

    def _family_bound(self, family: Family) -> float:
        """Seconds that no shape of a family can beat: compute, traffic of tensor, context and expert ranks at their
        best places, perfect balance, and an optimizer sharded over all data ranks. Infinite if even so the memory of
        all devices does not do."""
        alike = self._bound_of_equal(family)
        return alike if self.kinds is None else min(alike, self._bound_of_unequal(family, self.kinds))

    def _bound_of_unequal(self, family: Family, kinds: Kinds) -> float:
        """The same of shapes whose stages are each on one kind of device, in any order; infinite if there are none."""
        least, shape = self._leasts_of_kinds(family, kinds), family.frugal
        if least is None:
            return float("inf")
        shares = kinds.shares([each.seconds for each in least], shape.pipeline)
        if is_chunked(family.schedule):
            return family.num_microbatches * shares.slowest_s
        step_s = shares.step_s(shape.num_microbatches)
        return step_s + self._update_of_kinds_s(shape, least, kinds)

    def _update_of_kinds_s(self, shape: Shape, least: list[Least], kinds: Kinds) -> float:
        """Seconds of the optimizer's step at least."""
        return kinds.optimizer_s(least[0].elements / shape.sharded_over / shape.pipeline)

    def _leasts_of_kinds(self, family: Family, kinds: Kinds) -> list[Least] | None:
        """[kind] -> what layers of a family take at least on such devices; None if none of its shapes has stages on one
        kind each, or the memory of all together does not do."""
        if not kinds.may_have_own(family.pipeline):
            return None
        shape = replace(family.frugal, schedule="1f1b", virtual_stages=1)
        key = shape, family.offered
        if key not in self._leasts_by_kind:
            found = [least.of(shape, kinds.room(shape), family.offered) for least in self._least_on_kinds]
            each = [least for least in found if least is not None]
            self._leasts_by_kind[key] = each if len(each) == len(found) else None
        return self._leasts_by_kind[key]

    def _bound_of_equal(self, family: Family) -> float:
        shape = family.frugal
        counts = np.array([run.length for run in self.chain.runs], dtype=float)
        least = self._least_of_family(family)
        if least is None:
            return float("inf")
        pass_s = float(counts @ least.seconds)
        slowest = float(self._bounds.slowest_s(self._bounds.of_kinds(least.seconds)[:, None], family.pipeline)[0])
        update_s = self.model.optimizer_s(least.elements / shape.sharded_over / family.pipeline)
        if is_chunked(shape.schedule):
            return max(family.num_microbatches * slowest, self._bound_of_chunked(family, least, pass_s, update_s))
        return (family.num_microbatches - 1) * slowest + pass_s + update_s

    def _bound_of_chunked(self, family: Family, least: Least, pass_s: float, update_s: float) -> float:
        """Seconds that no cuts of a chunked family beat, as ShapeBounds.even_s; where gradients of weights do not come
        last, each rank also waits for the backward of those before, and the step is no shorter than the way of one
        micro-batch. update_s: of the optimizer, on each rank's even share."""
        if family.pipeline * family.virtual_stages > len(self.chain.places) - 1:
            return float("inf")
        ahead, of_kinds = self._bounds.least_ahead(family.pipeline), self._bounds.of_kinds
        busy_s = family.num_microbatches * pass_s
        bound = (busy_s + float(ahead @ of_kinds(least.forward_s))) / family.pipeline + update_s
        if family.schedule in ZERO_BUBBLE:
            return bound
        return max(bound, pass_s, (busy_s + float(ahead @ of_kinds(least.seconds))) / family.pipeline)

    def _least_of_family(self, family: Family) -> Least | None:
        """What the layers of a family take at least, whatever the schedule; None if their memory does not do."""
        any_schedule = family.any_schedule
        if any_schedule not in self._leasts:
            shape = any_schedule.frugal
            room = allocatable_bytes(shape, self.model.device, self.training)
            self._leasts[any_schedule] = self._least.of(shape, room * shape.pipeline, family.offered)
        return self._leasts[any_schedule]

    def _bound_of_unequal_with_memory(self, family: Family, kinds: Kinds, pins: Pins) -> float:
        """Seconds that shapes whose stages are each on one kind of device take at least, with the recompute that memory
        asks for where everything is sharded over all data ranks; infinite if there are none."""
        least = self._leasts_of_kinds(family, kinds)
        if least is None:
            return float("inf")
        if "offload" in pins.offered or is_chunked(family.schedule):
            return 0.0
        shape, count = family.frugal, family.num_microbatches
        held = [
            Held(
                each.weights,
                each.held,
                allocatable_bytes(shape, model.device, self.training) + each.twice,
            )
            for each, model in zip(least, kinds.models, strict=True)
        ]
        flights = [float(max(1, min(shape.in_flight(s), count - 1))) for s in range(shape.pipeline)]
        slowest = kinds.least_slowest_s(held, flights)
        pass_s = kinds.shares([each.seconds for each in least], shape.pipeline).pass_s
        return (count - 1) * slowest + pass_s + self._update_of_kinds_s(shape, least, kinds)

    def plan_of(self, solved: Solved) -> Plan:
        """The plan of an assignment: equal layers take their options in the order of the choice."""
        stages = [
            [option for _, option, count in choice.parts for _ in range(count)] for choice in solved.assignment.choices
        ]
        return make_plan(self.profile, self.cluster, self.training, solved.shape, stages)

    def prove(self, outcome: Outcome, time_limit_s: float) -> tuple[float, str, str]:
        """(bound, status, solver): for the best shape and near ties the ILP must find what the scan found.

        Near ties are settled one by one, which is faster than one master ILP over them (HiGHS, 405B on 16,384 devices:
        1 s against 5 s for three shapes). The bound holds for the whole space: the ILP's for its shapes, the exact
        scan's for the other solved ones, the relaxation's for the pruned ones. Where time is short for the ILP, as with
        thousands of layers in many stages, what the scan found stands, unproven. Raises SolverError.
        """
        ranked = sorted(outcome.solved, key=lambda s: s.seconds)
        best = ranked[0].seconds
        ties = [s for s in ranked[:MAX_TIES] if s.seconds <= best * (1 + TIE) and not is_chunked(s.shape.schedule)]
        bound, optimal, name = outcome.bound, outcome.complete, "enumeration"
        deadline = time.monotonic() + time_limit_s
        if any(chain.was_late for chain in self._chains):
            ties, optimal = [], False  # some prices are not exact
        for tie in ties:
            try:
                with self._until(deadline):
                    left_s = deadline - time.monotonic()
                    result = solve_master([tie.prices], tie.seconds * (1 + CUTOFF_SLACK), left_s)
            except OutOfTimeError:
                optimal = False
                break
            assert result is not None, "the ILP finds nothing where the scan has a plan"
            solution = result[0]
            name = solution.solver
            if solution.status == "optimal":
                difference = abs(solution.objective - tie.seconds)
                allowed = 2 * CUTOFF_SLACK * tie.seconds + SOLVER_S * tie.shape.num_microbatches
                assert difference < allowed, f"ILP {solution.objective} and scan {tie.seconds} differ"
            else:
                optimal = False
                bound = min(bound, solution.bound)
        return bound, "optimal" if optimal else "feasible", name


def _polish(outcome: Outcome) -> None:
    """Give the best shape, if it is chunked, the cuts that its simulated step asks for."""
    found = outcome.best
    if found is not None and is_chunked(found.shape.schedule):
        better = replace(found, assignment=polished(found.prices, found.assignment))
        outcome.solved = [better if each is found else each for each in outcome.solved]


def _by_micro_batch(families: Iterable[Family]) -> list[tuple[Family, ...]]:
    """Families of a split that have the same micro-batches, which share what a micro-batch takes at least."""
    groups: dict[int, list[Family]] = {}
    for family in families:
        groups.setdefault(family.micro_batch, []).append(family)
    return [tuple(group) for group in groups.values()]


def _recompute_of(family: Family, pins: Pins) -> Recompute | None:
    """What all layers of a family recompute, if they have no choice."""
    return "none" if family.schedule in ZERO_BUBBLE else pins.recompute


def _frame_of(shape: Shape) -> _Frame:
    frame = Chunking(shape.schedule, shape.pipeline, shape.virtual_stages)
    split = shape.context, shape.context_kind, shape.expert
    return frame, shape.micro_batch, shape.tensor, shape.sequence, *split
