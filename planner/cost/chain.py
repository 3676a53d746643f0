"""The chain of layers as runs of equal neighbours, its intervals, and those options of layers that no other option
beats."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...profiler.model.model_profile import CrossingTensor, ModelProfile
from ..arrays import Flags, Floats, Ints
from ..plan.document import Recompute
from ..plan.schedules import ZERO_BUBBLE
from ..plan.shape import LayerOption, Offered, Shape
from .crossing_cost import work_of
from .kept import kept, memo_by
from .kinds import Kind, kinds_of, shared_groups
from .layer_cost import CostModel
from .peak import Arrivals
from .priced_layer import LayerCost

_Row = TypeVar("_Row")
_Found = TypeVar("_Found")


def of_each(rows: Sequence[_Row], find: Callable[[_Row], _Found]) -> list[_Found]:
    """[row] -> what `find` makes of it. Rows that are one object are looked up once."""
    known = {key: find(row) for key, row in {id(row): row for row in rows}.items()}
    return [known[id(row)] for row in rows]


@dataclass(frozen=True)
class Run:
    """Consecutive layers of one kind, with the same tensors crossing before and after each, and the same shared
    weights."""

    start: int
    length: int


@dataclass(frozen=True)
class Composition:
    """How many layers of each run an interval of the chain holds, from its first run on; the same for many
    intervals."""

    first_run: int
    counts: tuple[int, ...]

    @property
    def last_run(self) -> int:
        """The last run with layers in the interval."""
        return self.first_run + len(self.counts) - 1


@kept
def _runs(profile: ModelProfile) -> tuple[Run, ...]:
    kinds, groups = kinds_of(profile), shared_groups(profile)
    can_slice = [profile.classes[layer.layer_class].sequence is not None for layer in profile.layers]
    crossing: list[list[tuple[object, ...]]] = [[] for _ in range(len(kinds) + 1)]
    for t in profile.tensors:
        for position in range(t.made_by + 1, t.last_used_by + 1):
            sliced = can_slice[t.made_by] and position < len(kinds) and can_slice[position]
            crossing[position].append((t.shape, t.dims, t.dtype, t.requires_grad, sliced))
    crossings = [sorted(found) for found in crossing]
    runs = [Run(0, 1)]
    for i in range(1, len(kinds)):
        start = runs[-1].start
        alike = crossings[i] == crossings[start] and crossings[i + 1] == crossings[start + 1]
        if kinds[i] == kinds[start] and alike and groups[i] == groups[start]:
            runs[-1] = Run(start, runs[-1].length + 1)
        else:
            runs.append(Run(i, 1))
    return tuple(runs)


class Chain:
    """The model's chain as runs, and the composition of every interval of it; the same for all shapes."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.num_layers = len(model.profile.layers)
        self.deadline_s = math.inf
        """time.monotonic() from which a stage gets any options that fit, instead of the best ones."""
        self._fastest_s: dict[tuple[object, ...], Floats] = {}
        self._costs: dict[object, tuple[list[list[LayerOption]], list[list[LayerCost]]]] = {}

    def priced(
        self, shape: Shape, recompute: Recompute | None, reshard: bool | None, offered: Offered
    ) -> tuple[list[list[LayerOption]], list[list[LayerCost]]]:
        """([run] -> options of its layers that no other beats, [run] -> what a layer costs with each of them). They
        hold for all schedules of a pipeline that split the backward, or for all that do not. Runs that cost the same
        share one list of costs."""
        key = _any_such_schedule(shape), recompute, reshard, offered
        if key not in self._costs:
            by_kind: dict[Kind, tuple[list[LayerOption], list[LayerCost]]] = {}
            for kind in {self.model.kinds[run.start] for run in self.runs}:
                options = self.model.options(kind, shape, recompute, reshard, offered)
                costs = [self.model.cost(kind, shape, option) for option in options]
                best = unbeaten(costs)
                by_kind[kind] = [options[i] for i in best], [costs[i] for i in best]
            rows: dict[tuple[Kind, float], list[LayerCost]] = {}
            waiting = zip(self.runs, self.waiting_bytes(shape), strict=True)
            each = [(self.model.kinds[run.start], size) for run, size in waiting]
            for kind, size in dict.fromkeys(each):
                rows[kind, size] = [cost.with_waiting(size) for cost in by_kind[kind][1]]
            self._costs[key] = [by_kind[kind][0] for kind, _ in each], [rows[one] for one in each]
        return self._costs[key]

    def fastest_s(self, shape: Shape, recompute: Recompute | None, reshard: bool | None) -> Floats:
        """[run] -> seconds that a layer takes per micro-batch at its fastest option, without recompute unless that is
        pinned."""
        key = _any_such_schedule(shape), recompute, reshard
        if key not in self._fastest_s:
            by_kind: dict[Kind, float] = {}
            for kind in {self.model.kinds[run.start] for run in self.runs}:
                options = self.model.options(kind, shape, recompute or "none", reshard)
                by_kind[kind] = min(self.model.cost(kind, shape, option).microbatch_s for option in options)
            self._fastest_s[key] = np.array([by_kind[self.model.kinds[run.start]] for run in self.runs])
        return self._fastest_s[key]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Runs in order."""
        return _runs(self.model.profile)

    @cached_property
    def alike(self) -> list[list[int]]:
        """Numbers of neighbouring runs whose layers are of one kind, in groups: such runs differ at most in what
        crosses before and after their layers."""
        kinds = [self.model.kinds[run.start] for run in self.runs]
        return [[number for number, _ in group] for _, group in groupby(enumerate(kinds), key=itemgetter(1))]

    @cached_property
    def lengths(self) -> Floats:
        """[run] -> number of its layers."""
        return np.array([run.length for run in self.runs], dtype=float)

    @cached_property
    def shared_groups(self) -> list[list[int]]:
        """[layer] -> tie groups it reads."""
        return shared_groups(self.model.profile)

    @cached_property
    def places(self) -> list[int]:
        """Layers before which a stage may begin, the first layer included, and then the end of the chain."""
        return [0, *self.model.starts, self.num_layers]

    def shared_weights(self, shape: Shape) -> list[tuple[list[int], float]]:
        """For each weight that several layers read: those layers, and its padded elements on one tensor rank."""
        profile = self.model.profile
        result = []
        for group in sorted({g for groups in self.shared_groups for g in groups}):
            layers = [i for i, groups in enumerate(self.shared_groups) if group in groups]
            first = profile.layers[layers[0]]
            names = (
                set(profile.ties[group])
                if group < len(profile.ties)
                else set.intersection(*(set(profile.layers[i].parameters) for i in layers))
            )
            prefix = f"{first.root}." if first.root else ""
            held = self.model.held(self.model.kinds[layers[0]], shape)
            result.append((layers, float(sum(item.elements for item in held if prefix + item.name in names))))
        return result

    def may_end(self, stage: int, num_stages: int) -> range:
        """Numbers of the runs in which the last layer of a stage may lie, so that every stage before and after it has
        at least one layer."""
        first, last = self.run_of[[stage, self.num_layers - num_stages + stage]].tolist()
        return range(len(self.runs) - 1 if stage == num_stages - 1 else first, last + 1)

    def least_turns(self, rank_of: Sequence[int], per_run: Floats) -> Floats:
        """[rank][shape] -> lower bound on the bytes that are there during some layer's turn on a rank: those of the
        last layer of one of its stages, wherever the stage ends. rank_of: [stage] -> rank; per_run: [run][shape] ->
        bytes in the turn of a layer."""
        found = np.zeros((max(rank_of) + 1, per_run.shape[1]))
        for stage, rank in enumerate(rank_of):
            found[rank] = np.maximum(found[rank], per_run[self.may_end(stage, len(rank_of))].min(axis=0))
        return found

    def least_between(self, each: Floats, num_stages: int) -> Floats:
        """[stage but the last] -> the least entry of `each` over the places where the stage may end, so that every
        other stage has at least one place. each: indexed by the number of the place; further dimensions stay."""
        spare = len(self.places) - num_stages
        if spare < 1:
            return np.zeros((num_stages - 1, *each.shape[1:]))
        found: Floats = sliding_window_view(each[1:-1], spare, axis=0).min(axis=-1)
        return found

    def counted_twice(self, shape: Shape) -> float:
        """Upper bound on the padded elements (on one tensor rank) that layers of one stage count more than once,
        because several of them read the weight. Layers that are far apart, as an embedding at one end and a head at the
        other, are never in one stage: every other stage needs a place between them."""
        most = len(self.places) - shape.pipeline
        twice = 0.0
        for layers, elements in self.shared_weights(shape):
            at = [bisect_right(self.places, layer) for layer in layers]
            if any(after - before < most for before, after in pairwise(at)):
                twice += elements * (len(layers) - 1)
        return twice

    def waiting_bytes(self, shape: Shape) -> list[float]:
        """[run] -> bytes of other layers' tensors that are there during the turn of one of its layers: gradients that
        later layers have made for a tensor of an earlier one, and the tensor itself if it is kept for this layer or an
        earlier one, since its bytes are counted with its last reader. 0 in a pipeline, where what passes by a stage is
        sent."""
        if shape.pipeline > 1:
            return [0.0] * len(self.runs)
        at = np.array([1.0, shape.samples, 1.0, shape.samples])
        elements, other_bytes = _passing(self.model.profile)
        there = (self.model.training.compute_bytes * elements + other_bytes) @ at
        return [float(there[run.start : run.start + run.length].max()) for run in self.runs]

    @cached_property
    def run_of(self) -> Ints:
        """[layer] -> number of its run."""
        return np.repeat(np.arange(len(self.runs)), [run.length for run in self.runs])

    @cached_property
    def compositions(self) -> tuple[Composition, ...]:
        """All compositions that intervals of the chain have."""
        return self._intervals[0]

    @cached_property
    def composition_of(self) -> Ints:
        """[start][end], by number of the place -> composition of the layers between them; -1 for an empty interval."""
        return self._intervals[1]

    @cached_property
    def _intervals(self) -> tuple[tuple[Composition, ...], Ints]:
        index: dict[Composition, int] = {}
        table = np.full((len(self.places), len(self.places)), -1, dtype=np.int64)
        between = [np.unique(self.run_of[a:b], return_counts=True) for a, b in pairwise(self.places)]
        steps = [list(zip(runs.tolist(), counts.tolist(), strict=True)) for runs, counts in between]
        for start in range(len(steps)):
            first = steps[start][0][0]
            counts: list[int] = []
            for end in range(start + 1, len(self.places)):
                for run, number in steps[end - 1]:
                    if run - first == len(counts):
                        counts.append(0)
                    counts[run - first] += number
                key = Composition(first, tuple(counts))
                table[start, end] = index.setdefault(key, len(index))
        return tuple(index), table

    @cached_property
    def examples(self) -> tuple[Ints, Ints]:
        """([composition] -> first layer of one of its intervals, the layer after its last)."""
        found, where = np.unique(self.composition_of, return_index=True)
        where, places = where[found >= 0], np.array(self.places)
        return places[where // len(places)], places[where % len(places)]

    @memo_by(lambda _, shape: (work_of(shape), shape.pipeline == 1))
    def arrivals(self, shape: Shape) -> Arrivals:
        """[composition] -> what a stage with it holds of tensors from earlier stages."""
        return self.model.arrivals(shape, *self.examples)

    @cached_property
    def first_runs(self) -> Ints:
        """[composition] -> its first run."""
        return np.array([c.first_run for c in self.compositions])

    @cached_property
    def last_runs(self) -> Ints:
        """[composition] -> its last run."""
        return np.array([c.last_run for c in self.compositions])

    @cached_property
    def at_start(self) -> Flags:
        """[composition] -> whether some interval of it begins the chain."""
        return self._seen(self.composition_of[0])

    @cached_property
    def at_end(self) -> Flags:
        """[composition] -> whether some interval of it ends the chain."""
        return self._seen(self.composition_of[:, -1])

    def _seen(self, compositions: Ints) -> Flags:
        seen = np.zeros(len(self.compositions), dtype=bool)
        seen[compositions[compositions >= 0]] = True
        return seen

    @cached_property
    def counts(self) -> Floats:
        """[composition][run] -> number of layers."""
        table = np.zeros((len(self.compositions), len(self.runs)))
        for i, composition in enumerate(self.compositions):
            table[i, composition.first_run : composition.last_run + 1] = composition.counts
        return table


def _any_such_schedule(shape: Shape) -> Shape:
    """The shape with one schedule in place of all under which its layers cost the same."""
    if shape.pipeline == 1:
        return shape
    return replace(shape, schedule="zb-h1" if shape.schedule in ZERO_BUBBLE else "1f1b", virtual_stages=1)


def unbeaten(costs: Sequence[LayerCost]) -> list[int]:
    """Indices of those options, given by their costs, for which no other option is at most as large in every time and
    in bytes at every moment; of equal options the first."""
    table = np.array([_felt(cost) for cost in costs])
    no_worse = (table[:, None, :] <= table[None, :, :]).all(axis=2)
    order = np.arange(len(costs))
    beats = no_worse & (~no_worse.T | (order[:, None] < order[None, :]))
    return [int(i) for i in np.flatnonzero(~beats.any(axis=0))]


def _felt(cost: LayerCost) -> tuple[float, ...]:
    """All numbers of an option that change what a stage costs; less of each is better. What a layer keeps counts with
    and without the tensors that arrive from earlier layers, which may take the place of what the stage holds of them
    anyway."""
    return (
        cost.forward_total_s,
        cost.backward_total_s,
        -cost.weight_s,
        cost.once_s,
        cost.kept_bytes,
        cost.kept_bytes - cost.arrived_bytes,
        cost.held_bytes,
        cost.held_bytes - cost.released_bytes,
        cost.accumulated_bytes,
        cost.root_bytes,
        cost.root_end_bytes,
        cost.transient_bytes,
        cost.ending_bytes,
        cost.waiting_bytes,
    )


@kept
def _passing(profile: ModelProfile) -> tuple[Floats, Floats]:
    """[layer] -> (coefficients of the elements that pass by it, coefficients of the bytes of other dtypes)."""
    groups: dict[int, list[CrossingTensor]] = {}
    for i, tensor in enumerate(profile.tensors):
        groups.setdefault(i if tensor.same_as is None else tensor.same_as, []).append(tensor)
    elements, other_bytes = np.zeros((len(profile.layers), 4)), np.zeros((len(profile.layers), 4))
    for group in groups.values():
        savers = [reader for tensor in group for reader in tensor.saved_by]
        size = group[0].size
        for layer in range(group[0].made_by + 1, max(tensor.last_used_by for tensor in group)):
            times = group[0].requires_grad + (min(savers, default=len(profile.layers)) <= layer)
            elements[layer] += times * np.array(size.elements)
            other_bytes[layer] += times * np.array(size.other_bytes)
    return elements, other_bytes
