"""All options of given cuts, for stages that hold few layers: those that fit, and the fastest of them by event
simulation.

Of the choices of a stage only those remain that no other beats in all bytes and all seconds; of a rank, those whose
stages fit together. A rank's choice is left out if the step takes too long even with all other ranks at their least
times. Every combination of what remains is simulated. So the best plan with these cuts is found, and it is known that
none is faster.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, product

import numpy as np

from ..arrays import Flags, Floats, Ints
from ..cost.simulate import simulated_step_s
from ..cost.stage_cost import StageCost
from ..plan.shape import InFlight
from .chunked import HeldStages, Known
from .columns import ROUNDING, Choice, StagePrices
from .scan import Assignment

MOST_CHOICES = 2500
"""Most choices of a stage's layers that are all priced: those of seven layers with three options each, in 0.1 s."""

MOST_PLAYED = 20_000
"""Most combinations of the choices of all ranks that are all simulated, in about 0.1 s."""


@dataclass(frozen=True)
class _StageChoices:
    """Choices of a stage that remain: [choice] -> its parts, and (bytes beside transients, transient bytes, seconds of
    the forward, of the backward without weights, of weights, and once a step)."""

    choices: tuple[Choice, ...]
    table: Floats


@dataclass(frozen=True)
class _RankChoices:
    """Choices of a rank that remain. chosen: [choice][stage of the rank] -> index of the stage's choice; seconds:
    [choice][forward, backward without weights, weights][stage of the rank]; once_s: [choice]."""

    stages: tuple[_StageChoices, ...]
    chosen: Ints
    seconds: Floats
    once_s: Floats

    def of(self, some: Flags) -> "_RankChoices":
        """Those of the choices that `some` marks."""
        return _RankChoices(self.stages, self.chosen[some], self.seconds[some], self.once_s[some])


class Enumerated:
    """All options of one shape's stages, cached as they are asked for."""

    def __init__(self, known: Known, deadline_s: float) -> None:
        self.known = known
        self.prices = known.prices
        self.deadline_s = deadline_s
        self._stages: dict[tuple[int, int, InFlight], _StageChoices | None] = {}
        self._ranks: dict[HeldStages, _RankChoices | None] = {}

    def best(self, cuts: Ints, below_s: float) -> tuple[Assignment | None, float]:
        """(the fastest plan with these cuts if it takes less than `below_s`, else None, lower bound in seconds for all
        plans with them, which is at least `below_s` if none takes less); (None, 0.0) where there are too many choices,
        or time is over. cuts: [stage] -> number of the place."""
        compositions = [int(self.prices.chain.composition_of[a, b]) for a, b in pairwise(cuts)]
        ranks = []
        for stages in self.known.stages_of:
            found = self._rank(self.known.held(stages, compositions))
            if found is None:
                return None, 0.0
            if not len(found.once_s):
                return None, math.inf
            ranks.append(found)
        least_s = below_s * (1 - ROUNDING)
        for number, rank in enumerate(ranks):  # beside the least of the others, which grow as choices are left out
            beside = [rank if i == number else _least(other) for i, other in enumerate(ranks)]
            ranks[number] = rank.of(self._played(beside, [np.arange(len(each.once_s)) for each in beside]) < least_s)
            if not len(ranks[number].once_s):
                return None, below_s
        sizes = [len(each.once_s) for each in ranks]
        if math.prod(sizes) > MOST_PLAYED:
            least = [_least(each) for each in ranks]
            return None, float(self._played(least, [np.zeros(1, dtype=np.int64)] * len(least))[0])
        combined = np.indices(sizes).reshape(len(sizes), -1)
        steps_s = self._played(ranks, list(combined))
        first = int(np.argmin(steps_s))
        if steps_s[first] >= least_s:
            return None, below_s
        choices: list[Choice | None] = [None] * len(compositions)
        for stages, which, each in zip(self.known.stages_of, combined[:, first], ranks, strict=True):
            for stage, of_stage, chosen in zip(stages, each.stages, each.chosen[which], strict=True):
                choices[stage] = of_stage.choices[chosen]
        step_s = float(steps_s[first])
        return Assignment(step_s, tuple(compositions), tuple(c for c in choices if c is not None)), step_s

    def _played(self, ranks: Sequence[_RankChoices], chosen: Sequence[Ints]) -> Floats:
        """[combination] -> seconds of the step. chosen: [rank][combination, or 1 for all] -> index of the rank's
        choice."""
        shape = self.prices.shape
        passes: list[list[Floats]] = [[np.zeros(0)] * self.known.frame.num_stages for _ in range(3)]
        for stages, rank, which in zip(self.known.stages_of, ranks, chosen, strict=True):
            for chunk, stage in enumerate(stages):
                for part, each in enumerate(passes):
                    each[stage] = rank.seconds[which, part, chunk]
        forward_s, input_s, weight_s = passes
        backward_s = [each + weight for each, weight in zip(input_s, weight_s, strict=True)]
        once_s = [rank.once_s[which] for rank, which in zip(ranks, chosen, strict=True)]
        step_s: Floats = simulated_step_s(
            shape.schedule, forward_s, backward_s, once_s, shape.num_microbatches, weight_s
        )
        return step_s

    def _rank(self, held: HeldStages) -> _RankChoices | None:
        if held not in self._ranks:
            self._ranks[held] = self._found_rank(held)
        return self._ranks[held]

    def _found_rank(self, held: HeldStages) -> _RankChoices | None:
        """Choices with which the stages of a rank fit together; None if there are too many to price."""
        stages = []
        for key in held:
            if key not in self._stages:
                self._stages[key] = self._found_stage(*key)
            stage = self._stages[key]
            if stage is None:
                return None
            stages.append(stage)
        sizes = [len(stage.choices) for stage in stages]
        if math.prod(sizes) > MOST_PLAYED:
            return None
        chosen: Ints = np.indices(sizes).reshape(len(sizes), -1).T
        # [choice][what][stage]
        tables = np.stack([stage.table[chosen[:, i]] for i, stage in enumerate(stages)], axis=2)
        allocated = tables[:, 0].sum(axis=1) + tables[:, 1].max(axis=1)
        fits = allocated <= self.prices.on(held[0][0]).budget
        chosen, tables = chosen[fits], tables[fits]
        seconds, once_s = tables[:, 2:5], tables[:, 5].sum(axis=1)
        left = unbeaten(np.concatenate((seconds.reshape(len(seconds), 3 * len(stages)), once_s[:, None]), axis=1))
        return _RankChoices(tuple(stages), chosen[left], seconds[left], once_s[left])

    def _found_stage(self, device: int, composition: int, flights: InFlight) -> _StageChoices | None:
        """Choices of a stage that remain, with layers in every order of options; None if there are too many."""
        prices = self.prices.on(device)
        if self.prices.shape.virtual_stages == 1 and not any(o.offload for row in prices.options for o in row):
            return _cheapest(prices, composition, flights)
        item = self.prices.chain.compositions[composition]
        runs = range(item.first_run, item.last_run + 1)
        layers = [run for run, number in zip(runs, item.counts, strict=True) for _ in range(number)]
        if math.prod(len(prices.options[run]) for run in layers) > MOST_CHOICES:
            return None
        choices, rows = [], []
        for options in product(*(range(len(prices.options[run])) for run in layers)):
            if time.monotonic() > self.deadline_s:
                return None
            grouped = groupby(zip(layers, options, strict=True))
            choice = Choice(tuple((run, prices.options[run][o], len(list(same))) for (run, o), same in grouped))
            choices.append(choice)
            rows.append(_row(prices.stage_cost(composition, choice, flights)))
        table = np.array(rows)
        left = np.flatnonzero(unbeaten(table)).tolist()
        return _StageChoices(tuple(choices[i] for i in left), table[left])


def _cheapest(prices: StagePrices, composition: int, flights: InFlight) -> _StageChoices:
    """The one choice of a rank's only stage that remains, if any fits: recompute makes only the backward longer, and
    the cheapest choice has the shortest one."""
    found = prices.cheapest(composition, flights)
    if found is None:
        return _StageChoices((), np.zeros((0, 6)))
    cost, choice = found
    return _StageChoices((choice,), np.array([_row(cost)]))


def _row(cost: StageCost) -> tuple[float, ...]:
    transient = cost.items["transient"]
    return (
        cost.allocated_bytes - transient,
        transient,
        cost.forward_s,
        cost.backward_s - cost.weight_s,
        cost.weight_s,
        cost.once_s,
    )


def _least(rank: _RankChoices) -> _RankChoices:
    """An imaginary choice whose every number is the least of all choices of a rank."""
    return _RankChoices(rank.stages, rank.chosen[:1], rank.seconds.min(axis=0)[None], rank.once_s.min()[None])


def unbeaten(table: Floats) -> Flags:
    """[row] -> True unless another row is nowhere larger and somewhere smaller, or an earlier row is equal."""
    found = np.ones(len(table), dtype=bool)
    order = np.lexsort(table.T[::-1])
    kept: list[int] = []
    for row in order.tolist():
        if kept and (table[kept] <= table[row]).all(axis=1).any():
            found[row] = False
        else:
            kept.append(row)
    return found
