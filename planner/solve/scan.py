"""Joins columns into a pipeline of least closed form, exactly; and bounds the step of every way to join them.

Both walk from place to place of the chain. `scan` finds the pipeline (tests check the ILP by it); `least_by_ranks`
bounds the simulated step.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Ints
from ..cost.simulate import alone_s, simulated_step_s
from ..cost.stage_cost import closed_form_s
from ..plan.schedules import ZERO_BUBBLE, Schedule, first_forwards, rank_and_chunk
from .columns import ROUNDING, Choice, Prices
from .knapsack import in_time
from .solver import OutOfTimeError


@dataclass(frozen=True)
class Assignment:
    """Stages of one shape: the composition and options of each. seconds: closed form of the step."""

    seconds: float
    compositions: tuple[int, ...]
    choices: tuple[Choice, ...]


def scan(prices: Prices, cutoff_s: float = float("inf")) -> Assignment | None:
    """The stages with the least closed form of the step; None if nothing fits or nothing is faster than `cutoff_s`.

    For every candidate T of the slowest stage the cheapest way through the chain with no stage above T is a shortest
    path. T grows from the least feasible one until (m - 1) T alone cannot win any more. The end of the step (the
    slowest stage's once_s) is bounded in turn, from the loosest bound down.

    Stages are first taken at their bounds, and only those on the best way are priced exactly, until no way is better at
    its bounds than one that is known exactly. After the chain's deadline the best of what was found so far is returned.
    """
    chain, shape = prices.chain, prices.shape
    if shape.pipeline > chain.num_layers:
        return None
    best: tuple[float, tuple[int, ...]] | None = None
    try:
        for better in _ever_better(prices, cutoff_s):
            best = better
    except OutOfTimeError:
        pass
    if best is None:
        return None
    choices = tuple(prices.on(s).choice(c, shape.flights(s)) for s, c in enumerate(best[1]))
    return Assignment(best[0], best[1], choices)


def _ever_better(prices: Prices, cutoff_s: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(closed form, compositions) of ways through the chain at exact prices, each way faster than the one before."""
    chain, shape = prices.chain, prices.shape
    stages = []
    for number in range(shape.pipeline):
        stages.append(_ScannedStage(prices, number, cutoff_s))
        if not np.isfinite(stages[-1].seconds).any():
            return None
    cutoff = cutoff_s
    while True:
        cuts = _best_cuts(stages, shape.num_microbatches - 1, cutoff)
        if cuts is None:
            return
        here = tuple(int(chain.composition_of[cuts[s], cuts[s + 1]]) for s in range(shape.pipeline))
        known = [stage.was_exact(composition) for stage, composition in zip(stages, here, strict=True)]
        each = [float(stage.seconds[c]) for stage, c in zip(stages, here, strict=True)]
        once = [float(stage.once[c]) for stage, c in zip(stages, here, strict=True)]
        seconds = closed_form_s(each, once, shape.num_microbatches)
        if seconds < cutoff:
            cutoff = seconds
            yield seconds, here
        if all(known):
            return
        in_time(chain.deadline_s)


class _ScannedStage:
    """Costs of the compositions on one stage, as bounds or exact: [composition] -> seconds per micro-batch, seconds
    once per step."""

    def __init__(self, prices: Prices, stage: int, cutoff_s: float) -> None:
        self.prices, self._stage = prices.on(stage), stage
        if prices.shape.pipeline == 1:
            self.seconds, self.once = self.prices.price(stage, cutoff_s)
            self._exact = np.ones(len(self.seconds), dtype=bool)
        else:
            self.seconds, self.once, self._exact = self.prices.bounds(stage, cutoff_s)

    def was_exact(self, composition: int) -> bool:
        """Whether the price of a composition was exact already; if not, it is made exact."""
        if self._exact[composition]:
            return True
        self.seconds[composition] = self.prices.exact_s(composition, self._stage)
        self._exact[composition] = True
        return False

    def between(self, starts: Ints, ends: Ints) -> tuple[Floats, Floats]:
        """([start][end] -> seconds per micro-batch, [start][end] -> seconds once per step) of the intervals between
        these places; infinite if there is no such interval."""
        table = self.prices.chain.composition_of[np.ix_(starts, ends)]
        return np.where(table >= 0, self.seconds[table], np.inf), np.where(table >= 0, self.once[table], np.inf)


def _best_cuts(stages: list[_ScannedStage], more: int, cutoff: float) -> list[int] | None:
    """Cuts of least closed form below `cutoff`; None if there are none."""
    places = _places(stages)
    if places is None:
        return None
    matrices = [stage.between(places[s], places[s + 1]) for s, stage in enumerate(stages)]
    least_once = _least_bottleneck([once for _, once in matrices], [seconds for seconds, _ in matrices])
    if least_once is None:
        return None
    best: list[int] | None = None
    once_bound = float("inf")
    while True:
        allowed = [np.where(once <= once_bound, seconds, np.inf) for seconds, once in matrices]
        found = _cheapest(allowed, more, cutoff - least_once, stages[0].prices.chain.deadline_s)
        if found is None:
            break
        cuts = found[1]
        once = max(float(matrices[s][1][cuts[s], cuts[s + 1]]) for s in range(len(stages)))
        if found[0] + once < cutoff:
            cutoff = found[0] + once
            best = cuts
        if once <= least_once:
            break
        once_bound = np.nextafter(once, -np.inf)
    return None if best is None else [int(places[s][cut]) for s, cut in enumerate(best)]


PRECISION = 2e-4
"""Relative precision to which `least_by_ranks` finds the least step."""


def simulated_s(prices: Prices, assignment: Assignment) -> float:
    """Seconds of the step of these stages, by event simulation."""
    shape = prices.shape
    costs = [
        prices.on(stage).stage_cost(composition, choice, shape.flights(stage))
        for stage, (composition, choice) in enumerate(zip(assignment.compositions, assignment.choices, strict=True))
    ]
    once_s = [0.0] * shape.pipeline
    for stage, cost in enumerate(costs):
        once_s[rank_and_chunk(shape.schedule, stage, shape.pipeline)[0]] += cost.once_s
    passes = [cost.forward_s for cost in costs], [cost.backward_s for cost in costs], once_s
    return simulated_step_s(shape.schedule, *passes, shape.num_microbatches, [cost.weight_s for cost in costs])


def least_by_ranks(prices: Prices, enough_s: float) -> tuple[float, Ints | None]:
    """(lower bound in seconds for all cuts and options of a pipeline with one stage per rank, [stage] -> numbers of the
    places where stages begin in cuts that may come near it). The bound is raised no further than `enough_s`; it is
    infinite if nothing fits.

    A step is no shorter than what each rank waits for and does (simulate.alone_s): the forwards of all ranks before it,
    its own passes and waits, and, unless gradients of weights come last, the backwards of all before it. All that a
    stage needs to know of the stages before it is how long they take at least. So a walk from place to place of the
    chain tells whether a step of T is possible.
    """
    shape, count = prices.shape, prices.shape.num_microbatches
    stages = [_RankedStage.of(prices, stage, enough_s) for stage in range(shape.pipeline)]
    num_places = len(prices.chain.composition_of)
    after = np.where(np.arange(num_places) == num_places - 1, 0.0, np.inf)
    alone: list[Floats] = []
    for rank in range(shape.pipeline - 1, -1, -1):
        stage = stages[rank]
        later = np.where(np.isfinite(after), after, 0.0)[None, :]
        alone.insert(
            0, np.where(np.isfinite(after)[None, :], stage.alone_s(shape.schedule, rank, count, later), np.inf)
        )
        after = (stage.waited_s + after[None, :]).min(axis=1)
    if not np.isfinite(after[0]):
        return enough_s, None
    ends = float(stages[0].once_s.min())
    split = shape.schedule in ZERO_BUBBLE

    def way(step_s: float) -> Ints | None:
        """Places of a way through the chain on which no rank takes longer; None if there is none."""
        reached = np.where(np.arange(num_places) == 0, 0.0, np.inf)
        parents = []
        for stage, busy_s in zip(stages, alone, strict=True):
            least = stage.before_s[:, None] + busy_s + stage.once_s
            if not split:
                least = np.maximum(least, reached[:, None] + busy_s + ends)
            steps = np.where(least <= step_s, reached[:, None] + stage.both_s, np.inf)
            parents.append(steps.argmin(axis=0))
            reached = steps.min(axis=0)
        if not np.isfinite(reached[-1]):
            return None
        cuts = [num_places - 1]
        for parent in reversed(parents):
            cuts.insert(0, int(parent[cuts[0]]))
        return np.array(cuts)

    high = enough_s
    if not np.isfinite(enough_s):
        each = [busy_s + stage.once_s for busy_s, stage in zip(alone, stages, strict=True)]
        high = 2 * sum(float(seconds[np.isfinite(seconds)].max(initial=0.0)) for seconds in each)
    cuts = way(high)
    if cuts is None:
        return high, None
    low = 0.0
    while high - low > PRECISION * high:
        middle = (low + high) / 2 if low else high / 2
        found = way(middle)
        low, high, cuts = (middle, high, cuts) if found is None else (low, middle, found)
    return low * (1 - ROUNDING), cuts


@dataclass(frozen=True)
class _RankedStage:
    """Lower bounds for one stage between any two places of the chain; infinite where it cannot be. both_s: [start][end]
    -> seconds of a micro-batch; waited_s: [start][end] -> seconds of its forward and of that part of its backward for
    which ranks before wait; forward_s: (most, least) seconds of the forward; before_s: [start] -> forwards of all
    layers before; once_s: seconds at the end of the step."""

    both_s: Floats
    waited_s: Floats
    forward_s: tuple[Floats, Floats]
    before_s: Floats
    once_s: Floats
    num_ranks: int

    @classmethod
    def of(cls, prices: Prices, stage: int, enough_s: float) -> "_RankedStage":
        """Lower bounds for a stage of a shape, in steps of at most `enough_s`."""
        on, chain, shape = prices.on(stage), prices.chain, prices.shape
        seconds, once, _ = on.bounds(stage, step_s=enough_s)
        table = chain.composition_of
        there = table >= 0
        weight = on.per_run(lambda costs: min(cost.weight_s for cost in costs))
        receives = on.received_s
        most, least = (np.where(there, (chain.counts @ per + receives)[table], 0.0) for per in on.forward_s)
        both = np.where(there, seconds[table], np.inf)
        put_off = np.where(there, (chain.counts @ weight)[table], 0.0) if shape.schedule in ZERO_BUBBLE else 0.0
        everywhere = {id(each): each for each in (prices.on(other) for other in range(shape.pipeline))}
        fastest = np.min([each.forward_s[1] for each in everywhere.values()], axis=0)
        layers = np.concatenate(([0.0], np.cumsum(fastest[chain.run_of])))
        return cls(
            both,
            both - put_off,
            (most, least),
            layers[chain.places],
            np.where(there, once[table], np.inf),
            shape.pipeline,
        )

    def alone_s(self, schedule: Schedule, rank: int, count: int, after_s: Floats) -> Floats:
        """[start][end] -> lower bound in seconds until its last pass ends, as simulate.alone_s gives it. If options
        differ in their forward, only half of both waits together is certain."""
        most, least = self.forward_s
        both = np.where(np.isfinite(self.both_s), self.both_s, 0.0)
        if (most == least).all() or schedule in ZERO_BUBBLE:
            found = alone_s(schedule, rank, self.num_ranks, count, most, both - most, after_s)
        else:
            ahead = first_forwards(schedule, rank, self.num_ranks, count)
            waits = np.maximum(0.0, 2 * after_s - (ahead - 1) * both)
            found = count * both + (waits / 2 if ahead == count else waits)
        seconds: Floats = np.where(np.isfinite(self.both_s), found, np.inf)
        return seconds


def _places(stages: list[_ScannedStage]) -> list[Ints] | None:
    """[stage] -> places of the chain where it may begin, and at last the end; only those on some way through the chain.
    None if there is no way."""
    num_places = len(stages[0].prices.chain.composition_of)
    everywhere = np.arange(num_places)
    links = [np.isfinite(stage.between(everywhere, everywhere)[0]) for stage in stages]
    reached = [np.arange(num_places) == 0]
    for link in links:
        reached.append(link[reached[-1]].any(axis=0))
    there = reached[-1] & (everywhere == num_places - 1)
    found = [np.flatnonzero(there)]
    for link, before in zip(reversed(links), reversed(reached[:-1]), strict=True):
        there = before & link[:, there].any(axis=1)
        found.append(np.flatnonzero(there))
    return found[::-1] if len(found[-1]) else None


def _cheapest(matrices: list[Floats], more: int, cutoff: float, deadline_s: float) -> tuple[float, list[int]] | None:
    """(least (m - 1) max + sum over the stages' seconds, cuts that give it); None if it is not below `cutoff`."""
    free = _shortest(matrices, np.inf)
    if free is None:
        return None
    if more == 0:
        return free if free[0] < cutoff else None
    least = _least_bottleneck(matrices, matrices)
    assert least is not None
    most = (cutoff - free[0]) / more
    values = np.unique(np.concatenate([m[(m >= least) & (m <= most)] for m in matrices]))
    best: tuple[float, list[int]] | None = None
    for bottleneck in values:
        if more * bottleneck + free[0] >= cutoff:
            break
        path = _shortest(matrices, bottleneck)
        if path is not None and more * bottleneck + path[0] < cutoff:
            cutoff = more * bottleneck + path[0]
            best = cutoff, path[1]
        if time.monotonic() > deadline_s:
            break
    return best


def _shortest(matrices: list[Floats], bottleneck: float) -> tuple[float, list[int]] | None:
    """(sum, cuts) of the shortest way through the chain with one interval for each stage, none above `bottleneck`; None
    if there is no way."""
    reached = np.zeros(1)
    parents = []
    for matrix in matrices:
        steps = reached[:, None] + np.where(matrix <= bottleneck, matrix, np.inf)
        parents.append(np.argmin(steps, axis=0))
        reached = np.min(steps, axis=0)
    if not np.isfinite(reached[-1]):
        return None
    cuts = [0]
    for parent in reversed(parents):
        cuts.append(int(parent[cuts[-1]]))
    return float(reached[-1]), cuts[::-1]


def _least_bottleneck(values: list[Floats], feasible: list[Floats]) -> float | None:
    """Least possible maximum of `values`, over all ways through the chain along finite entries of `feasible`; None if
    there is no way."""
    reached = np.array([-np.inf])
    for value, seconds in zip(values, feasible, strict=True):
        step = np.maximum(reached[:, None], np.where(np.isfinite(seconds), value, np.inf))
        reached = np.min(step, axis=0)
    return float(reached[-1]) if np.isfinite(reached[-1]) else None
