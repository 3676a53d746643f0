"""Pipelines whose ranks hold several stages or split their backward: cuts that are tried, and what ranks recompute.

The step of such a pipeline has no closed form that is linear in the stages, and the stages of a rank share its memory.
Lower bounds over all cuts come from linear programs (fluid.py). This module looks for plans that come near them: it
takes cuts that balance the ranks, chooses for every rank, layer by layer and option by option, the cheapest recompute
that fits its memory, and simulates the step. polish.py goes on from the best of these plans.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise

import numpy as np

from ..arrays import Flags, Floats, Ints
from ..cost.chain import Chain
from ..cost.kept import memo, memo_by
from ..cost.priced_layer import LayerCost
from ..cost.simulate import least_step_s, simulated_step_s
from ..cost.stage_cost import StageCost, allocated_on_one
from ..plan.schedules import ZERO_BUBBLE, Schedule, stage_of
from ..plan.shape import InFlight, Shape
from .columns import ROUNDING, Choice, Prices
from .knapsack import tie_prices
from .scan import Assignment

RESOLUTION = 1 / 64
"""Share of the mean layer's seconds: seconds of layers that differ by less give the same cuts."""

FEW_CUTS = 30
"""If a chain has no more than so many cuts, all are priced."""


@dataclass(frozen=True)
class Chunking:
    """Frame of a schedule: numbers of ranks and stages, and which rank holds which stages."""

    schedule: Schedule
    num_ranks: int
    virtual: int

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return self.num_ranks * self.virtual

    def stages(self, rank: int) -> list[int]:
        """Numbers of the stages that a rank holds, in the order of its chunks."""
        return [stage_of(self.schedule, rank, chunk, self.num_ranks) for chunk in range(self.virtual)]

    @property
    def ranks(self) -> tuple[object, ...]:
        """Key that is equal for frames in which each rank holds the same stages."""
        return self.schedule == "zb-v", self.num_ranks, self.virtual

    def flights(self, num_microbatches: int) -> tuple[float, ...]:
        """[stage] -> micro-batches whose activations it holds when its rank holds most."""
        return _flights(self.schedule, self.num_ranks, num_microbatches, self.virtual)

    @property
    def holds(self) -> Floats:
        """[rank][stage] -> 1 if the rank holds the stage, else 0."""
        return _holds(self)


@dataclass(frozen=True)
class StageCuts:
    """places: first layer of every stage, and the number of layers. stages: [stage][run] -> number of layers. work,
    ahead: [rank][run] -> number of layers on a rank, and in the first chunks of all ranks before it."""

    places: tuple[int, ...]
    stages: Floats
    work: Floats
    ahead: Floats

    def least_of_each_s(
        self,
        schedule: Schedule,
        num_microbatches: int,
        per_run_s: Floats,
        forward_s: Floats,
        added_s: Floats | float = 0.0,
        once_s: Floats | float = 0.0,
    ) -> Floats:
        """[shape] -> lower bound in seconds for all orders of passes, as `least_step_s` of simulate.py gives it.
        per_run_s, forward_s: [run][shape] -> seconds of a layer; added_s: [rank] -> seconds that a micro-batch takes
        beyond that; once_s: [rank][shape] -> seconds after the last pass of a rank."""
        passes = num_microbatches * (self.work @ per_run_s + added_s)
        ended = once_s
        if schedule not in ZERO_BUBBLE:  # while a rank ends its step, those before it end their passes
            first = once_s[:1] if isinstance(once_s, np.ndarray) else once_s
            ended = np.maximum(once_s, self.ahead @ (per_run_s - forward_s) + first)
        seconds: Floats = (passes + self.ahead @ forward_s + ended).max(axis=0)
        return seconds


@lru_cache(maxsize=256)
def _holds(frame: Chunking) -> Floats:
    found = np.zeros((frame.num_ranks, frame.num_stages))
    for rank in range(frame.num_ranks):
        found[rank, frame.stages(rank)] = 1.0
    return found


@lru_cache(maxsize=256)
def _flights(schedule: Schedule, num_ranks: int, num_microbatches: int, virtual: int) -> tuple[float, ...]:
    shape = Shape(1, 1, 1, num_ranks, 1, num_microbatches, schedule=schedule, virtual_stages=virtual)
    return tuple(float(shape.in_flight(stage)) for stage in range(num_ranks * virtual))


@dataclass(frozen=True)
class Recomputable:
    """Layers by what each way to recompute them costs and saves: [run][way] -> seconds that a micro-batch takes longer
    than with the fastest way, and bytes that a layer keeps of it. turn: [run] -> [way][shape] bytes that are there only
    during its turn. kind: [run] -> number of its kind of layer."""

    again_s: Sequence[Floats]
    kept: Sequence[Floats]
    turn: Sequence[Floats]
    kind: Ints


@dataclass(frozen=True)
class LeastRecompute:
    """Seconds that recompute is likely to add until every rank of a chunked shape fits its budget: layers are taken as
    divisible, and memory has a price, the best of several. flights: [stage] -> micro-batches in flight."""

    frame: Chunking
    layers: Recomputable
    flights: Floats

    @classmethod
    def of(cls, shape: Shape, layers: Recomputable) -> "LeastRecompute":
        """The least recompute for the frame of a shape."""
        frame = Chunking(shape.schedule, shape.pipeline, shape.virtual_stages)
        flights = np.array(frame.flights(shape.num_microbatches))
        if shape.virtual_stages == 1:  # a running maximum: at the last layer's turn another micro-batch may be gone
            flights = np.minimum(flights, max(1, shape.num_microbatches - 1))
            layers = replace(layers, turn=[np.zeros_like(turn) for turn in layers.turn])
        return cls(frame, layers, flights)

    def added_s(self, cuts: StageCuts, static: Floats, free: Floats, crossing: Floats) -> Floats:
        """[rank][shape] -> seconds per micro-batch that recompute adds; infinite if no recompute is enough. static:
        [run][shape] -> bytes that a layer holds in any case; free: [shape] -> bytes on a rank; crossing: [place of the
        chain] -> bytes that cross there for a micro-batch."""
        holds, flights, (kinds, rates) = self.frame.holds, self.flights, self._kinds
        sent = holds @ ((flights + 1) * crossing[list(cuts.places[1:])])
        room = free * (1 + ROUNDING) - cuts.work @ static - sent[:, None]
        room = room - _most(cuts.work > 0, np.stack([turn.min(axis=0) for turn in self.layers.turn]))
        stages = np.stack([cuts.stages[:, self.layers.kind == number].sum(axis=1) for number in kinds], axis=1)
        priced = (flights[:, None] * rates)[:, :, None]
        # [stage][price][kind]: least seconds and priced bytes of a layer beyond its fastest option
        least = np.stack([(again - again.min() + priced * held).min(axis=2) for again, held in kinds.values()], axis=2)
        dear = holds @ (stages[:, None, :] * least).sum(axis=2)
        fewest = flights[:, None] * np.array([held.min() for _, held in kinds.values()])
        fits = (holds @ (stages * fewest).sum(axis=1))[:, None] <= room
        return np.where(fits, (dear[:, :, None] - room[:, None, :] * rates[:, None]).max(axis=1), np.inf)

    @cached_property
    def _kinds(self) -> tuple[dict[int, tuple[Floats, Floats]], Floats]:
        """(kind of layer -> seconds and bytes of each way to recompute it, prices of memory that are tried)."""
        each = zip(self.layers.kind.tolist(), self.layers.again_s, self.layers.kept, strict=True)
        kinds = {number: (again, kept) for number, again, kept in each}
        ties = tie_prices([again for again, _ in kinds.values()], [kept for _, kept in kinds.values()])
        flights = (1.0, max(1.0, self.flights.max()), max(1.0, self.flights.mean()))
        return kinds, np.unique(np.concatenate([ties / number for number in flights]))


def _most(there: Flags, of_runs: Floats) -> Floats:
    """[rank][shape] -> largest value of the runs that are on the rank, 0 if none is. there: [rank][run]."""
    most: Floats = (there[:, :, None] * of_runs).max(axis=1)
    return most


@dataclass(frozen=True)
class HeldByRank:
    """Lower bounds on bytes of layers. kept: [run] -> bytes of one micro-batch; fixed: [run] -> bytes beyond that;
    flights: [stage] -> micro-batches in flight; room: bytes that they may fill on a rank and still leave room to
    spare."""

    kept: Floats
    fixed: Floats
    flights: Floats
    room: float


class Chunkings:
    """The cuts of a chain that are tried first. They are cached, because many families have layers of nearly the same
    relative times."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._places = chain.places
        common = chain.model.kinds[max(chain.runs, key=lambda run: run.length).start]
        self._is_common = np.array([float(kind == common) for kind in chain.model.kinds])
        self._known: dict[tuple[object, ...], list[StageCuts]] = {}

    def of(self, frame: Chunking, per_run_s: Floats) -> list[StageCuts]:
        """Cuts that balance the ranks, or all cuts if these are few; none if the chain has too few places.

        Three cuts are starting points: stages of equal seconds; stages of equal numbers of the most frequent layer,
        with everything else added (as people set it up); and stages of equal numbers of places, the longest first. From
        each, places are handed to other stages as long as that makes the slowest rank faster, or stages more even.
        Seconds are rounded to RESOLUTION of the mean layer.
        """
        if frame.num_stages > len(self._places) - 1:
            return []
        mean_s = float(self.chain.lengths @ per_run_s) / self.chain.num_layers
        parts = np.rint(per_run_s / (RESOLUTION * mean_s))
        key = frame.ranks, tuple(parts.tolist())
        if key not in self._known:
            self._known[key] = self._found(frame, parts)
        return self._known[key]

    def with_fitting(
        self, frame: Chunking, tried: list[StageCuts], per_run_s: Floats, held: HeldByRank
    ) -> list[StageCuts]:
        """The cuts that were tried, and if none of them leaves every rank room to spare, more that do or come nearer:
        the fullest rank hands places of the chain to others, of equally good moves that which leaves stages most
        even."""
        places, run_of = self._places, self.chain.run_of
        before = [np.concatenate(([0.0], np.cumsum(w[run_of])))[places] for w in (held.kept, held.fixed, per_run_s)]

        def over(cuts: Ints) -> Floats:
            kept, fixed = (np.diff(table[cuts]) for table in before[:2])
            too_much: Floats = (held.flights * kept + fixed) @ frame.holds.T - held.room
            return too_much

        if not tried or (over(np.searchsorted(places, [cuts.places for cuts in tried])) <= 0).all(axis=1).any():
            return tried
        here = np.searchsorted(places, tried[0].places)
        now = over(here)
        gained, boundaries = _gained(frame, tuple(held.flights.tolist())), np.arange(frame.num_stages + 1)
        while now.max() > 0:
            first, last, up = _legal_ranges(frame, int(now.argmax()), here)
            if not len(first):
                break
            kept, fixed = (_steps(table, here) for table in before[:2])
            more = np.cumsum(kept[:, :, None] * gained + fixed[:, :, None] * _gained(frame), axis=1)
            after = now + more[up, last] - more[up, first]
            too_much = np.maximum(after, 0.0).sum(axis=1)
            if too_much.min() >= np.maximum(now, 0.0).sum() * (1 - ROUNDING):
                break
            least = np.flatnonzero(too_much <= too_much.min() * (1 + ROUNDING))
            moved = here + _moves(first[least], last[least], up[least], boundaries)
            best = np.lexsort(evenness(moved, before[2], frame).T[::-1])[0]
            here, now = moved[best], over(moved[best])
        found = self._counted(frame, tuple(places[i] for i in here))
        return [*tried, found] if found.places not in {cuts.places for cuts in tried} else tried

    def _found(self, frame: Chunking, per_run: Floats) -> list[StageCuts]:
        places, num_stages = self._places, frame.num_stages
        if math.comb(len(places) - 2, num_stages - 1) <= FEW_CUTS:
            inner = combinations(places[1:-1], num_stages - 1)
            return [self._counted(frame, (0, *cuts, self.chain.num_layers)) for cuts in inner]
        per_layer = per_run[self.chain.run_of]
        starts = {_balanced(w, places, num_stages) for w in (per_layer, self._is_common)}
        starts.add(_longest_first(places, num_stages))
        found = {_improved(start, places, frame, per_layer) for start in starts}
        return [self._counted(frame, cuts) for cuts in sorted(found)]

    def _counted(self, frame: Chunking, places: tuple[int, ...]) -> StageCuts:
        of_run = np.zeros((self.chain.num_layers, len(self.chain.runs)))
        of_run[np.arange(self.chain.num_layers), self.chain.run_of] = 1.0
        stages = np.add.reduceat(of_run, places[:-1], axis=0)
        before = np.concatenate((np.zeros((1, len(self.chain.runs))), np.cumsum(stages, axis=0)))
        return StageCuts(places, stages, frame.holds @ stages, before[: frame.num_ranks])


def _balanced(weights: Floats, places: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Cuts at which the running sum of weights comes nearest to equal shares, with at least one place in every
    stage."""
    passed = np.concatenate(([0.0], np.cumsum(weights)))[list(places)].tolist()
    chosen = [0]
    for stage in range(1, num_stages):
        first, last = chosen[-1] + 1, len(places) - 1 - (num_stages - stage)
        share = passed[-1] * stage / num_stages
        behind = min(max(bisect_left(passed, share), first), last)
        ahead = max(bisect_left(passed, passed[behind - 1]), first)
        chosen.append(ahead if abs(passed[ahead] - share) <= abs(passed[behind] - share) else behind)
    return tuple(places[i] for i in (*chosen, len(places) - 1))


def _longest_first(places: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Cuts with equally many places in every stage; if they do not divide, the first stages have one more, because all
    others wait for the last stages."""
    each, rest = divmod(len(places) - 1, num_stages)
    return tuple(places[stage * each + min(stage, rest)] for stage in range(num_stages + 1))


def _improved(cuts: tuple[int, ...], places: Sequence[int], frame: Chunking, per_layer: Floats) -> tuple[int, ...]:
    """Better balanced cuts: a stage of the slowest rank hands a place to another stage, and each stage between the two
    passes one on, as long as that makes the slowest rank faster, fewer ranks as slow, or the stages more even."""
    passed = np.concatenate(([0.0], np.cumsum(per_layer)))[list(places)]
    here = np.searchsorted(places, cuts)
    best = tuple(evenness(here[None], passed, frame)[0].tolist())
    holds, gained, boundaries = frame.holds, _gained(frame), np.arange(frame.num_stages + 1)
    for _ in range(4 * frame.num_stages):
        at = passed[here]
        loads = holds @ (at[1:] - at[:-1])
        first, last, up = _legal_ranges(frame, int(loads.argmax()), here)
        if not len(first):
            break
        more = (_steps(passed, here)[:, :, None] * gained).cumsum(axis=1)
        ranks = loads + more[up, last] - more[up, first]
        worst = ranks.max(axis=1)
        least = worst.min()
        if least > best[0]:
            break
        fastest = (worst == least).nonzero()[0]
        as_slow = (ranks[fastest] == least).sum(axis=1)
        near = fastest[as_slow == as_slow.min()]
        moved = here + _moves(first[near], last[near], up[near], boundaries)
        at = passed[moved]
        squares = ((at[:, 1:] - at[:, :-1]) ** 2).sum(axis=1)
        found = float(least), float(as_slow.min()), float(squares.min())
        if found >= best:
            break
        here, best = moved[squares.argmin()], found
    return tuple(int(places[i]) for i in here)


def loads(cuts: Ints, passed: Floats) -> Floats:
    """[cuts][stage] -> its load. passed: [place] -> load of all layers before it; on unequal devices [stage][place]."""
    if passed.ndim == 1:
        return np.diff(passed[cuts])
    stages = np.arange(len(passed))
    found: Floats = passed[stages, cuts[..., 1:]] - passed[stages, cuts[..., :-1]]
    return found


def evenness(cuts: Ints, passed: Floats, frame: Chunking) -> Floats:
    """[cuts] -> (load of the slowest rank, number of ranks as slow, sum of the squares of the stages' loads); less is
    better. cuts: [cuts][stage] -> number of the place; passed: as in `loads`."""
    stages = loads(cuts, passed)
    ranks = stages @ frame.holds.T
    worst = ranks.max(axis=1)
    return np.stack((worst, (ranks == worst[:, None]).sum(axis=1), (stages**2).sum(axis=1)), axis=1)


@lru_cache(maxsize=256)
def _gained(frame: Chunking, of_stages: tuple[float, ...] | None = None) -> Floats:
    """[boundary][rank] -> what a rank's load changes by if the boundary moves up by one place: 1 if the place comes to
    the rank, -1 if it leaves it, else 0. of_stages: [stage] -> what a place counts there, instead of 1."""
    worth = frame.holds * (1.0 if of_stages is None else np.array(of_stages))
    gained = np.zeros((frame.num_stages + 1, frame.num_ranks))
    gained[1:] += worth.T
    gained[:-1] -= worth.T
    gained[[0, -1]] = 0.0
    return gained


def _steps(passed: Floats, here: Ints) -> Floats:
    """[down, up][boundary] -> how the load before the boundary changes if it moves by one place. passed: [place] ->
    load of all layers before it."""
    inner, steps = here[1:-1], np.zeros((2, len(here)))
    at = passed[inner]
    steps[0, 1:-1], steps[1, 1:-1] = passed[inner - 1] - at, passed[inner + 1] - at
    return steps


@lru_cache(maxsize=4096)
def _ranges(frame: Chunking, rank: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Moves that hand a place from a stage of a rank to another stage, no further away than is needed to reach every
    rank: ([move] -> first of the stages that it passes, last of them, 1 if the boundaries between them move up and 0 if
    they move down, the stage that gives)."""
    down, up = [], []
    for stage in frame.stages(rank):
        down += [(stage, other, 0) for other in range(stage + 1, min(frame.num_stages, stage + frame.num_ranks + 1))]
        up += [(other, stage, 1) for other in range(max(0, stage - frame.num_ranks), stage)]
    down.sort(key=lambda move: (move[0], -move[1]))
    up.sort(key=lambda move: (-move[0], move[1]))
    first, last, direction = np.array(down + up, dtype=np.int64).reshape(-1, 3).T
    return first, last, direction, np.where(direction, last, first)


def _legal_ranges(frame: Chunking, rank: int, here: Ints) -> tuple[Ints, Ints, Ints]:
    """[move] -> (first stage, last stage, 1 for up or 0 for down), for those moves of `_ranges` whose giving stage has
    a place to spare. here: [stage] -> number of the place where it begins."""
    first, last, up, giver = _ranges(frame, rank)
    legal = here[giver + 1] - here[giver] > 1
    return first[legal], last[legal], up[legal]


def _moves(first: Ints, last: Ints, up: Ints, boundaries: Ints) -> Ints:
    """[move][boundary] -> number of places by which it moves."""
    between = (boundaries > first[:, None]) & (boundaries <= last[:, None])
    moves: Ints = between * (2 * up - 1)[:, None]
    return moves


def handed_on(frame: Chunking, rank: int) -> Ints:
    """[move][boundary] -> number of places by which it moves when a stage of a rank gives a place to another stage;
    moves reach only as far as is needed to come to every rank."""
    return _moves(*_ranges(frame, rank)[:3], np.arange(frame.num_stages + 1))


HeldStages = tuple[tuple[int, int, InFlight], ...]
"""[stage of a rank] -> (first stage on the same kind of device, composition, micro-batches in flight)."""

_Stages = tuple[tuple[Choice, StageCost], ...]
"""[stage of a rank] -> (its options, its cost)."""


@dataclass(frozen=True)
class _OptionStep:
    """Layers of one run of a stage that may change from one option to another, and the bytes that each then holds
    less."""

    run: int
    layers: int
    before: int
    after: int
    saved: float
    price: float


class Known:
    """Costs of the stages and ranks of one shape, cached as they are asked for."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        shape: Shape = prices.shape
        self.frame = Chunking(shape.schedule, shape.pipeline, shape.virtual_stages)
        self.stages_of = [self.frame.stages(rank) for rank in range(self.frame.num_ranks)]
        self.flights = [shape.flights(stage) for stage in range(self.frame.num_stages)]
        on = [prices.on(stage) for stage in range(self.frame.num_stages)]
        self.devices = [next(i for i, other in enumerate(on) if other is mine) for mine in on]
        self._stages: dict[tuple[int, int, InFlight, tuple[tuple[int, ...], ...]], tuple[Choice, StageCost]] = {}
        self._ranks: dict[HeldStages, _Stages | None] = {}
        self._busy: dict[HeldStages, float] = {}

    def held(self, stages: Sequence[int], compositions: Sequence[int]) -> HeldStages:
        """Key of what a rank's stages hold. compositions: [stage], of all stages."""
        return tuple((self.devices[stage], compositions[stage], self.flights[stage]) for stage in stages)

    def rank(self, held: HeldStages) -> _Stages | None:
        """A rank's stages, with the cheapest options with which they fit its memory; None if there are none."""
        if held not in self._ranks:
            self._ranks[held] = self._fitting(held)
        return self._ranks[held]

    def _fitting(self, held: HeldStages) -> _Stages | None:
        """A rank's stages with every layer at its fastest option, except that as many layers as memory asks for change
        to options that hold less: first those that pay the fewest seconds for a byte. None if that is not enough."""
        of_stages = [(step, place) for place, stage in enumerate(held) for step in self._steps(*stage)]
        of_stages.sort(key=lambda each: each[0].price)
        total = sum(step.layers for step, _ in of_stages)
        fastest = [self._fastest(*stage) for stage in held]

        def taken(number: int) -> _Stages:
            left = number
            counts = [[row.copy() for row in rows] for rows in fastest]
            for step, place in of_stages:
                moved = min(left, step.layers)
                row = counts[place][step.run]
                row[step.before] -= moved
                row[step.after] += moved
                left -= moved
                if not left:
                    break
            return tuple(self._stage(*stage, each) for stage, each in zip(held, counts, strict=True))

        budget = self.prices.on(held[0][0]).budget

        def beyond(stages: _Stages) -> float:
            return allocated_on_one([cost for _, cost in stages]) - budget

        found = taken(0)
        beyond_bytes = beyond(found)
        if beyond_bytes <= 0:
            return found
        found, low, high = taken(total), 1, total
        if beyond(found) > 0:
            return None
        middle, stride = _number_saving([step for step, _ in of_stages], beyond_bytes), 1
        while low < high:
            middle = middle if low <= middle < high else (low + high) // 2
            fewer = taken(middle)
            if beyond(fewer) <= 0:
                found, high, middle = fewer, middle, middle - stride
            else:
                low, middle = middle + 1, middle + stride
            stride *= 2
        return found

    @memo
    def _steps(self, device: int, composition: int, flights: InFlight) -> list[_OptionStep]:
        """Changes of options that are possible in a stage."""
        found, costs = [], self.prices.on(device).costs
        counts = self.prices.chain.compositions[composition].counts
        for index, (run, number) in enumerate(zip(self._runs(composition), counts, strict=True)):
            for before, after in pairwise(self._hull(device, flights, run)) if number else ():
                longer = costs[run][after].microbatch_s - costs[run][before].microbatch_s
                saved = _held_bytes(costs[run][before], flights) - _held_bytes(costs[run][after], flights)
                found.append(_OptionStep(index, number, before, after, saved, longer / saved))
        return found

    @memo_by(lambda self, device, flights, run: (flights, id(self.prices.on(device).costs[run])))
    def _hull(self, device: int, flights: InFlight, run: int) -> list[int]:
        """Numbers of options of a run, from the fastest on: each next one saves bytes over the one before at the fewest
        seconds for a byte. Runs that cost the same share one list."""
        costs = self.prices.on(device).costs[run]
        seconds = [cost.microbatch_s for cost in costs]
        size = [_held_bytes(cost, flights) for cost in costs]
        hull = [min(range(len(costs)), key=lambda o: (seconds[o], size[o]))]
        while True:
            here = hull[-1]
            less = [o for o in range(len(costs)) if size[o] < size[here] * (1 - ROUNDING)]
            if not less:
                return hull
            hull.append(min(less, key=lambda o: ((seconds[o] - seconds[here]) / (size[here] - size[o]), size[o])))

    def _runs(self, composition: int) -> range:
        item = self.prices.chain.compositions[composition]
        return range(item.first_run, item.last_run + 1)

    @memo
    def _fastest(self, device: int, composition: int, flights: InFlight) -> list[list[int]]:
        """[run of the composition][option] -> number of layers, with all layers at the fastest option."""
        counts = self.prices.chain.compositions[composition].counts
        found = []
        for run, number in zip(self._runs(composition), counts, strict=True):
            row = [0] * len(self.prices.on(device).options[run])
            row[self._hull(device, flights, run)[0]] = number
            found.append(row)
        return found

    def _stage(
        self, device: int, composition: int, flights: InFlight, counts: list[list[int]]
    ) -> tuple[Choice, StageCost]:
        """Options and cost of a stage. counts: [run][option] -> number of layers; options that hold least come
        first."""
        prices = self.prices.on(device)
        key = device, composition, flights, tuple(map(tuple, counts))
        if key not in self._stages:
            parts = []
            for run, row in zip(self._runs(composition), counts, strict=True):
                order = sorted(
                    range(len(row)), key=[_held_bytes(cost, flights) for cost in prices.costs[run]].__getitem__
                )
                parts += [(run, prices.options[run][o], row[o]) for o in order if row[o]]
            choice = Choice(tuple(parts))
            self._stages[key] = choice, prices.stage_cost(composition, choice, flights)
        return self._stages[key]

    def fastest(self, cuts: Ints, cutoff_s: float) -> Assignment | None:
        """The plan with these cuts and options that fit, if its step is shorter than `cutoff_s`; else None. cuts:
        [stage] -> number of the place where it begins, and at last of the end."""
        compositions = [int(self.prices.chain.composition_of[a, b]) for a, b in pairwise(cuts)]
        shape: Shape = self.prices.shape
        costs: list[StageCost | None] = [None] * len(compositions)
        choices: list[Choice | None] = [None] * len(compositions)
        once_s, before_s, after_s = [], 0.0, 0.0
        for stages in self.stages_of:  # the first holds most micro-batches: what does not fit ends here, mostly
            held = self.held(stages, compositions)
            rank = self.rank(held)
            if rank is None:
                return None
            busy_s = shape.num_microbatches * sum(cost.microbatch_s for _, cost in rank)
            if before_s + busy_s + after_s >= cutoff_s * (1 + ROUNDING):
                return None
            for stage, (choice, cost) in zip(stages, rank, strict=True):
                choices[stage], costs[stage] = choice, cost
            once_s.append(sum(cost.once_s for _, cost in rank))
            before_s += rank[0][1].forward_s
            after_s += 0.0 if shape.schedule in ZERO_BUBBLE else rank[0][1].backward_s
        return self._played([cost for cost in costs if cost], [c for c in choices if c], compositions, once_s, cutoff_s)

    def least_s(self, cuts: Ints) -> float:
        """Lower bound in seconds for all options with these cuts: what each rank waits for, with the other ranks at
        their fastest options, and what it has to do within its memory. Infinite if some rank cannot hold its layers."""
        compositions = [int(self.prices.chain.composition_of[a, b]) for a, b in pairwise(cuts)]
        shape: Shape = self.prices.shape
        busy_s = [self.least_busy_s(self.held(stages, compositions)) for stages in self.stages_of]
        if math.inf in busy_s:
            return math.inf
        each = self.held(range(len(compositions)), compositions)
        costs = [self._stage(*stage, self._fastest(*stage))[1] for stage in each]
        once_s = [sum(costs[stage].once_s for stage in stages) for stages in self.stages_of]
        passes = [cost.forward_s for cost in costs], [cost.backward_s for cost in costs]
        return least_step_s(shape.schedule, *passes, once_s, shape.num_microbatches, busy_s)

    def least_busy_s(self, held: HeldStages) -> float:
        """Lower bound on the seconds that a rank computes for a micro-batch, with options that fit; infinite if none
        do."""
        if held not in self._busy:
            self._busy[held] = self._found_busy_s(held)
        return self._busy[held]

    def _found_busy_s(self, held: HeldStages) -> float:
        """What `least_busy_s` returns, computed. Bytes of layers are added up by their options, beside the least
        transient. At any price of a byte let every layer take the option with the least seconds plus price of its
        bytes: their sum, less the price of the room, is no more than the seconds of any choice that fits."""
        fastest = [self._stage(*stage, self._fastest(*stage))[1] for stage in held]
        busy_s = sum(cost.microbatch_s for cost in fastest)
        if self.prices.shape.virtual_stages == 1:  # what is held depends on turns of passes
            return busy_s
        prices = np.array([0.0, *sorted({step.price for stage in held for step in self._steps(*stage)})])
        room = self.prices.on(held[0][0]).budget - sum(c.allocated_bytes - c.items["transient"] for c in fastest)
        least_s, least_bytes, transient = np.zeros(len(prices)), 0.0, 0.0
        for device, composition, flights in held:
            on, counts = self.prices.on(device), self.prices.chain.compositions[composition].counts
            arriving = on.arriving_bytes(composition, flights.held)
            for run, number in zip(self._runs(composition), counts, strict=True):
                costs, first = on.costs[run], self._hull(device, flights, run)[0]
                seconds = np.array([cost.microbatch_s for cost in costs]) - costs[first].microbatch_s
                size = np.array([_held_bytes(cost, flights) for cost in costs]) - _held_bytes(costs[first], flights)
                least_s += number * (seconds[:, None] + prices * size[:, None]).min(axis=0)
                least_bytes += number * size.min()
                transient = max(transient, min(cost.transient_bytes for cost in costs))
                if run == self._runs(composition)[0]:
                    room += float(arriving.max() - arriving.min())
        if least_bytes - (room - transient) > ROUNDING * self.prices.on(held[0][0]).budget:
            return math.inf
        more_s: float = (least_s - prices * (room - transient)).max()
        return busy_s + more_s

    def _played(
        self,
        costs: Sequence[StageCost],
        choices: Sequence[Choice],
        compositions: Sequence[int],
        once_s: Sequence[float],
        cutoff_s: float,
    ) -> Assignment | None:
        """The plan with its simulated step; None if the step is not below `cutoff_s`. It is only simulated if the lower
        bound by what each rank waits for and has to do is below that, too."""
        shape: Shape = self.prices.shape
        forward_s, backward_s = [cost.forward_s for cost in costs], [cost.backward_s for cost in costs]
        passes = shape.schedule, forward_s, backward_s, once_s, shape.num_microbatches
        if least_step_s(*passes) >= cutoff_s * (1 + ROUNDING):
            return None
        step_s = simulated_step_s(*passes, [cost.weight_s for cost in costs])
        return Assignment(step_s, tuple(compositions), tuple(choices)) if step_s < cutoff_s else None


def _number_saving(steps: Sequence[_OptionStep], size: float) -> int:
    """Number of layers that change options, in the order of the steps, until they hold `size` bytes less; all layers if
    that is not enough."""
    number = 0
    for step in steps:
        if step.layers * step.saved >= size:
            return number + math.ceil(size / step.saved)
        number, size = number + step.layers, size - step.layers * step.saved
    return number


def _held_bytes(cost: LayerCost, flights: InFlight) -> float:
    """Bytes that an option of a layer adds to its stage, without what is the same for all options."""
    return flights.held * cost.kept_bytes + cost.held_bytes


def best_chunking(prices: Prices, cuts_tried: Sequence[Ints], cutoff_s: float) -> Assignment | None:
    """The fastest plan with one of these cuts ([stage] -> number of the place) that fits; None if none is faster than
    `cutoff_s`."""
    best: Assignment | None = None
    known = Known(prices)
    for cuts in cuts_tried:
        best = known.fastest(cuts, best.seconds if best else cutoff_s) or best
    return best
