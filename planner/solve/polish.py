"""Better cuts of a pipeline, judged by its simulated step: the best of all cuts if these are few, else better
neighbours of cuts that were found.

The cuts that chunked.py tries balance the ranks before memory is known. From the best of these, places are handed from
stage to stage, each time so that the step, simulated with the recompute that memory asks for, gets shortest.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, combinations, islice

import numpy as np

from ..arrays import Floats, Ints
from ..cost.kept import kept
from ..cost.priced_layer import LayerCost
from ..cost.simulate import simulated_step_s
from ..plan.schedules import is_chunked
from .chunked import Chunking, Known, StageCuts, evenness, handed_on, loads
from .columns import ROUNDING, Prices
from .enumerated import Enumerated
from .scan import Assignment

MOST_CUTS, MOST_CHUNKED = 50_000, 300_000
"""Most ways to cut a chain that are all looked at if no bound reaches the best plan and there is time: for 1F1B and
GPipe, whose cuts scan.py finds, and for chunked schedules. Tried with ten chains of 24 unequal layers as four ranks of
two stages: with the first number for both, eight of their plans are 0.5 to 9% slower, and gaps of 4 to 21% are left;
with the second they are proven, but for two that fill the memory, in 0.6 to 3.6 s."""

CUTS_PER_S = 150_000
"""Cuts that are simulated in a second, at least."""

AT_ONCE = 50_000
"""Cuts that are simulated at a time, in about 80 MB."""

FEW_CUTS = 300
"""Most ways to cut a chain that are all looked at instead of making a program for a bound."""

MANY_CUTS = 5_000
"""Most ways to cut a chain that are all simulated with layers at their least times, before memory is taken into
account."""

LIKELY = 64
"""Number of these cuts, those with the shortest steps, that are priced with options that fit. Tried with twelve random
chains of 12 layers as ZB-V on two GPUs: balanced cuts alone are up to 11% slower than the best of all cuts, these
nowhere."""

MOST_PASSES = 600_000
"""Most passes (of micro-batches through stages) that may be simulated in looking for better cuts of longer chains."""

FAR = 64
"""Most stages with which places are handed from any stage to any other; with more, only to the nearest stage of each
rank."""


def num_cuts(prices: Prices) -> int:
    """Number of ways to cut the chain into the stages of a pipeline."""
    return math.comb(len(prices.chain.places) - 2, prices.shape.pipeline * prices.shape.virtual_stages - 1)


def best_of_all(prices: Prices, below_s: float, deadline_s: float) -> tuple[Assignment | None, float]:
    """(the fastest plan of a pipeline that takes less than `below_s`, whatever its cuts, None if none was found, lower
    bound in seconds for all plans of the shape: the step of that plan, or `below_s`, if there was time to look at all
    cuts)."""
    known = Known(prices)
    options = Enumerated(known, deadline_s)
    found = _fastest(known, None, below_s, deadline_s)
    below_s = below_s if found is None else found.seconds
    least_s = below_s
    for cuts, cut_s in _shortest_first(prices):
        if cut_s >= least_s * (1 - ROUNDING):
            break
        if time.monotonic() > deadline_s:
            return found, cut_s
        this_s = max(cut_s, known.least_s(cuts))
        if this_s < least_s:
            best, best_s = options.best(cuts, below_s)
            if best is not None:
                found, below_s = best, best.seconds
            this_s = max(this_s, best_s)
        least_s = min(least_s, this_s)
    return found, least_s


def best_of_likely(prices: Prices, below_s: float) -> Assignment | None:
    """The fastest plan of a pipeline below `below_s` with one of the cuts whose step would be shortest if every layer
    took its least times; None if there is none."""
    return _fastest(Known(prices), LIKELY, below_s, math.inf)


def _fastest(known: Known, most: int | None, below_s: float, deadline_s: float) -> Assignment | None:
    """The fastest plan below `below_s` that is found before the deadline, trying cuts in the order of their step if
    every layer took its least times. most: how many cuts are tried, None: all."""
    found = None
    for cuts, cut_s in islice(_shortest_first(known.prices), most):
        if cut_s >= below_s * (1 - ROUNDING) or time.monotonic() > deadline_s:
            break
        better = known.fastest(cuts, below_s)
        if better is not None:
            found, below_s = better, better.seconds
    return found


def least_of_cuts_s(prices: Prices, known_s: float, enough_s: float) -> float:
    """Lower bound in seconds for all plans of a pipeline, whatever their cuts: at least `known_s`, and raised no
    further than `enough_s`. Memory is looked at for the LIKELY cuts whose step would be the shortest without it."""
    known, least_s = Known(prices), enough_s
    for number, (cuts, cut_s) in enumerate(_shortest_first(prices)):
        if cut_s >= least_s or least_s <= known_s:
            break
        if number == LIKELY:
            return cut_s
        least_s = min(least_s, max(cut_s, known.least_s(cuts)))
    return max(least_s, known_s)


def _shortest_first(prices: Prices) -> Iterator[tuple[Ints, float]]:
    """(cuts, seconds of their step if every layer took its least times) for all cuts, the shortest step first."""
    every, each_s = _cuts_of_shape(prices), _every_least_s(prices)
    for which in np.argsort(each_s).tolist():
        yield every[which], float(each_s[which])


def _cuts_of_shape(prices: Prices) -> Ints:
    return all_cuts(len(prices.chain.places) - 2, prices.shape.pipeline * prices.shape.virtual_stages)


@kept
def _every_least_s(prices: Prices) -> Floats:
    """[cuts] -> `_least_s` of it, for all cuts. Cached, because the search for a bound, for a plan and for the proof
    all begin with it."""
    return _least_s(prices, _cuts_of_shape(prices))


@lru_cache(maxsize=16)
def all_cuts(num_inner: int, num_stages: int) -> Ints:
    """[cut][stage] -> number of the place where it begins, and at last of the end; all cuts there are."""
    number = math.comb(num_inner, num_stages - 1)
    inner = chain.from_iterable(combinations(range(1, num_inner + 1), num_stages - 1))
    found = np.zeros((number, num_stages + 1), dtype=np.int64)
    found[:, 1:-1] = np.fromiter(inner, np.int64, number * (num_stages - 1)).reshape(number, -1)
    found[:, -1] = num_inner + 1
    return found


def are_few(prices: Prices, left_s: float) -> bool:
    """Whether all cuts of a pipeline can be looked at in `left_s` seconds."""
    most = MOST_CHUNKED if is_chunked(prices.shape.schedule) else MOST_CUTS
    return prices.shape.pipeline > 1 and num_cuts(prices) <= min(most, CUTS_PER_S * left_s)


def _least_s(prices: Prices, cuts: Ints) -> Floats:
    """[cuts] -> seconds of a step in which every layer takes its least times, and stages wait for what crosses at these
    cuts."""
    parts = np.array_split(cuts, max(1, -(-len(cuts) // AT_ONCE)))
    return np.concatenate([_played_s(prices, part) for part in parts])


def _played_s(prices: Prices, cuts: Ints) -> Floats:
    shape = prices.shape
    frame = Chunking(shape.schedule, shape.pipeline, shape.virtual_stages)
    received_s, sent_s = _waited(prices, cuts)

    def of_stages(seconds: Callable[[LayerCost], float]) -> list[Floats]:
        return list(loads(cuts, _passed(prices, frame, seconds)).T)

    once_s, weight_s = of_stages(lambda cost: cost.once_data_s), of_stages(lambda cost: cost.weight_s)
    input_s = of_stages(lambda cost: cost.backward_total_s - cost.weight_s)
    forward_s = of_stages(lambda cost: cost.forward_total_s)
    found: Floats = simulated_step_s(
        shape.schedule,
        [each + wait for each, wait in zip(forward_s, received_s, strict=True)],
        [each + weight + wait for each, weight, wait in zip(input_s, weight_s, sent_s, strict=True)],
        [np.sum([once_s[stage] for stage in frame.stages(rank)], axis=0) for rank in range(frame.num_ranks)],
        shape.num_microbatches,
        weight_s,
    )
    return found


def _waited(prices: Prices, cuts: Ints) -> tuple[Floats, Floats]:
    """([stage][cuts] -> seconds that a stage waits for what it receives, the same for what it sends)."""
    received_s, sent_s = np.zeros((2, cuts.shape[1] - 1, len(cuts)))
    for stage in range(cuts.shape[1] - 1):
        on = prices.on(stage)
        crossings = on.model.crossings(on.shape)
        at_place = np.array([crossings[place].waited_s for place in on.chain.places])
        received_s[stage], sent_s[stage] = at_place[cuts[:, stage]], at_place[cuts[:, stage + 1]]
    return received_s, sent_s


def polished(prices: Prices, found: Assignment, deadline_s: float) -> Assignment:
    """The plan that was found, or a faster one with other cuts."""
    shape = prices.shape
    frame, known = Chunking(shape.schedule, shape.pipeline, shape.virtual_stages), Known(prices)
    passed_s = _passed_s(prices, frame)
    here = _cuts_of(prices, found)
    each = 2 * frame.num_stages * min(shape.num_microbatches, 6 * frame.num_ranks)
    left, tried = MOST_PASSES // each, {tuple(here.tolist())}
    improves = True
    while improves:
        near = _near(here, frame)
        busy_s = evenness(near, passed_s, frame)
        order = np.lexsort(busy_s.T[::-1])
        order = order[shape.num_microbatches * busy_s[order, 0] < found.seconds]
        fresh = [cuts for cuts in near[order] if tuple(cuts.tolist()) not in tried][:left]
        left -= len(fresh)
        improves = False
        for cuts in fresh:
            if time.monotonic() > deadline_s:
                return found
            tried.add(tuple(cuts.tolist()))
            better = known.fastest(cuts, found.seconds)
            if better is not None:
                found, here, improves = better, cuts, True
    return found


def evened(prices: Prices, tried: Sequence[StageCuts]) -> list[Ints]:
    """[stage] -> number of the place, of cuts for unequal devices: from each of the tried ones places are handed on, as
    long as that makes the slowest rank faster, fewer ranks as slow, or the stages more even in time."""
    frame = Chunking(prices.shape.schedule, prices.shape.pipeline, prices.shape.virtual_stages)
    passed_s = _passed_s(prices, frame)
    found: dict[tuple[int, ...], Ints] = {}
    for cuts in tried:
        here: Ints = np.searchsorted(prices.chain.places, cuts.places)
        best = tuple(evenness(here[None], passed_s, frame)[0])
        while True:
            near = _near(here, frame)
            each = evenness(near, passed_s, frame)
            first = int(np.lexsort(each.T[::-1])[0]) if len(near) else 0
            if not len(near) or tuple(each[first]) >= best:
                break
            here, best = near[first], tuple(each[first])
        found[tuple(here.tolist())] = here
    return list(found.values())


def _passed_s(prices: Prices, frame: Chunking) -> Floats:
    """[stage][place] -> least seconds of a micro-batch in all layers before the place, on the stage's device."""
    return _passed(prices, frame, lambda cost: cost.microbatch_s)


def _passed(prices: Prices, frame: Chunking, of: Callable[[LayerCost], float]) -> Floats:
    """[stage][place] -> sum of the least of something over all layers before the place, on the stage's device."""
    each: dict[int, Floats] = {}
    for stage in range(frame.num_stages):
        on = prices.on(stage)
        if id(on) not in each:
            per_run = on.per_run(lambda costs: min(map(of, costs)))
            each[id(on)] = np.concatenate(([0.0], np.cumsum(per_run[on.chain.run_of])))[on.chain.places]
    return np.stack([each[id(prices.on(stage))] for stage in range(frame.num_stages)])


def _cuts_of(prices: Prices, found: Assignment) -> Ints:
    """[stage] -> number of the place where it begins, and at last of the end."""
    lengths = [sum(prices.chain.compositions[c].counts) for c in found.compositions]
    cuts: Ints = np.searchsorted(prices.chain.places, np.concatenate(([0], np.cumsum(lengths))))
    return cuts


def _near(cuts: Ints, frame: Chunking) -> Ints:
    """[neighbour][stage] -> the cuts with a place handed from one stage to another."""
    near = cuts + _moves(frame)
    found: Ints = near[(np.diff(near) > 0).all(axis=1)]
    return found


def _moves(frame: Chunking) -> Ints:
    """[move][boundary] -> number of places by which it moves."""
    if frame.num_stages > FAR:
        return np.unique(np.concatenate([handed_on(frame, rank) for rank in range(frame.num_ranks)]), axis=0)
    boundaries = np.arange(frame.num_stages + 1)
    moved = np.array([(boundaries > a) & (boundaries <= b) for a, b in combinations(range(frame.num_stages), 2)])
    return np.concatenate((moved, -moved.astype(np.int64)))
