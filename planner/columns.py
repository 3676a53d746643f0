"""Columns: one pipeline stage holding one interval of the chain, at its best options under the stage's memory.

Equal neighbours in the chain form runs, and intervals with equal counts of each run cost the same: such a class of
intervals is a composition, priced once per number of micro-batches in flight. Within a composition each layer takes
one option (recompute x reshard); the least time whose running maximum of memory (peak.py) fits is exact (knapsack.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..profiler.model_profile import CrossingTensor, ModelProfile
from .kept import kept
from .kinds import Kind, kinds_of, shared_groups
from .knapsack import Group, Packing, Turns, least_weight, lightest_in_turns
from .layer_cost import P2P_EXPOSED, CostModel, Cut, LayerCost
from .memory_cost import StateBytes, state_bytes
from .peak import Arrivals, Moment, moments_of, running
from .plan import Recompute
from .stage_cost import StageCost, allocatable_bytes, combine, sent_bytes
from .strategy import LayerOption, Shape, legal_cuts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDING = 1e-9
"""Relative: sums of the same terms in another order differ by less."""


@dataclass(frozen=True)
class Run:
    """Neighbouring layers that are alike in kind, in what crosses on both sides, and in the weights they share."""

    start: int
    length: int


@dataclass(frozen=True)
class Composition:
    """Intervals of the chain that hold the same number of layers of each run."""

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
    """The model's chain as runs, with every interval's composition; the same for all shapes."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.num_layers = len(model.profile.layers)
        self._costs: dict[object, tuple[list[list[LayerOption]], list[list[LayerCost]]]] = {}

    def priced(
        self, shape: Shape, recompute: Recompute | None, reshard: bool | None
    ) -> tuple[list[list[LayerOption]], list[list[LayerCost]]]:
        """([run] -> options of its layers, what a layer costs with each): the same for all schedules of a pipeline."""
        alike = shape if shape.pipeline == 1 else replace(shape, schedule="1f1b", virtual_stages=1)
        key = alike, recompute, reshard
        if key not in self._costs:
            by_kind: dict[Kind, tuple[list[LayerOption], list[LayerCost]]] = {}
            for kind in {self.model.kinds[run.start] for run in self.runs}:
                options = self.model.options(kind, shape, recompute, reshard)
                by_kind[kind] = options, [self.model.cost(kind, shape, option) for option in options]
            found = [by_kind[self.model.kinds[run.start]] for run in self.runs]
            waiting = self.waiting_bytes(shape)
            self._costs[key] = (
                [options for options, _ in found],
                [[cost.with_waiting(size) for cost in costs] for (_, costs), size in zip(found, waiting, strict=True)],
            )
        return self._costs[key]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Runs in order."""
        return _runs(self.model.profile)

    @cached_property
    def lengths(self) -> Floats:
        """[run] -> layers."""
        return np.array([run.length for run in self.runs], dtype=float)

    @cached_property
    def shared_groups(self) -> list[list[int]]:
        """[layer] -> tie groups it reads."""
        return shared_groups(self.model.profile)

    @cached_property
    def uncuttable(self) -> set[int]:
        """Layers before which no stage may begin."""
        return set(range(1, self.num_layers)) - set(legal_cuts(self.model.profile))

    def shared_weights(self, shape: Shape) -> list[tuple[list[int], float]]:
        """Per group of layers that read one weight: those layers, and its padded elements on one tensor rank."""
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

    def waiting_bytes(self, shape: Shape) -> list[float]:
        """[run] -> bytes of tensors that pass by a layer while it has its turn: gradients of what later layers have
        read already and an earlier one has made, and what is kept of it, where that counts with its last reader. Of
        stages of a pipeline none: what passes by them is sent."""
        if shape.pipeline > 1:
            return [0.0] * len(self.runs)
        at = np.array([1.0, shape.samples, 1.0, shape.samples])
        elements, other_bytes = _passing(self.model.profile)
        there = (self.model.training.compute_bytes * elements + other_bytes) @ at
        return [float(there[run.start : run.start + run.length].max()) for run in self.runs]

    @cached_property
    def run_of(self) -> Ints:
        """[layer] -> run."""
        return np.repeat(np.arange(len(self.runs)), [run.length for run in self.runs])

    @cached_property
    def compositions(self) -> tuple[Composition, ...]:
        """Every composition an interval can have."""
        return self._intervals[0]

    @cached_property
    def composition_of(self) -> Ints:
        """[start][end] -> composition of layers start..end-1; -1 for an empty interval."""
        return self._intervals[1]

    @cached_property
    def _intervals(self) -> tuple[tuple[Composition, ...], Ints]:
        index: dict[Composition, int] = {}
        table = np.full((self.num_layers + 1, self.num_layers + 1), -1, dtype=np.int64)
        for start in range(self.num_layers):
            if start in self.uncuttable:
                continue
            counts: list[int] = []
            for end in range(start + 1, self.num_layers + 1):
                offset = int(self.run_of[end - 1] - self.run_of[start])
                if offset == len(counts):
                    counts.append(0)
                counts[offset] += 1
                if end in self.uncuttable:
                    continue
                key = Composition(int(self.run_of[start]), tuple(counts))
                table[start, end] = index.setdefault(key, len(index))
        return tuple(index), table

    @cached_property
    def examples(self) -> tuple[Ints, Ints]:
        """([composition] -> first layer of one of its intervals, the layer behind its last)."""
        found, places = np.unique(self.composition_of, return_index=True)
        places = places[found >= 0]
        return places // (self.num_layers + 1), places % (self.num_layers + 1)

    @cached_property
    def first_runs(self) -> Ints:
        """[composition] -> its first run."""
        return np.array([c.first_run for c in self.compositions])

    @cached_property
    def last_runs(self) -> Ints:
        """[composition] -> its last run."""
        return np.array([c.last_run for c in self.compositions])

    @cached_property
    def at_start(self) -> NDArray[np.bool_]:
        """[composition] -> whether some interval of it begins the chain."""
        return self._seen(self.composition_of[0])

    @cached_property
    def at_end(self) -> NDArray[np.bool_]:
        """[composition] -> whether some interval of it ends the chain."""
        return self._seen(self.composition_of[:, -1])

    def _seen(self, compositions: Ints) -> NDArray[np.bool_]:
        seen = np.zeros(len(self.compositions), dtype=bool)
        seen[compositions[compositions >= 0]] = True
        return seen

    @cached_property
    def counts(self) -> Floats:
        """[composition][run] -> layers."""
        table = np.zeros((len(self.compositions), len(self.runs)))
        for i, composition in enumerate(self.compositions):
            table[i, composition.first_run : composition.last_run + 1] = composition.counts
        return table


@kept
def _passing(profile: ModelProfile) -> tuple[Floats, Floats]:
    """[layer] -> coefficients of elements, and of bytes of other dtypes, that pass by it."""
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


@dataclass(frozen=True)
class Choice:
    """Options of a composition's layers: per run, how many layers take which option."""

    parts: tuple[tuple[int, LayerOption, int], ...]


class Prices(Protocol):
    """Prices of a shape's stages."""

    @property
    def shape(self) -> Shape:
        """The shape."""

    @property
    def chain(self) -> Chain:
        """The chain that its stages cut."""

    def on(self, stage: int) -> "StagePrices":
        """The prices on the device of a stage."""


@dataclass(frozen=True)
class Work:
    """What the stages of a pipeline share between them, where their devices are unequal: a layer of each run counts
    `per_run`, all layers `whole`. Of it the other stages do at most others_rate in a second. pass_s: seconds that a
    micro-batch takes at least through all stages."""

    per_run: Floats
    whole: float
    others_rate: float
    pass_s: float


class StagePrices:
    """Prices of all compositions under one shape: seconds per micro-batch, seconds per step, and what to choose."""

    def __init__(
        self,
        chain: Chain,
        shape: Shape,
        recompute: Recompute | None = None,
        reshard: bool | None = None,
        work: "Work | None" = None,
    ) -> None:
        """work: what else the other stages can do, where they have other devices than those priced here."""
        self.chain = chain
        self.shape = shape
        self._work = work
        model = chain.model
        self.model = model
        self.options, self.costs = chain.priced(shape, recompute, reshard)
        self._passes: dict[int, list[_Pass]] = {}
        self._priced: dict[tuple[int, int], tuple[float, float, Choice] | None] = {}

    @cached_property
    def budget(self) -> float:
        """Bytes that the allocator may hand out on one rank."""
        return allocatable_bytes(self.shape, self.model.device, self.model.training)

    @cached_property
    def _state(self) -> StateBytes:
        return state_bytes(self.shape, self.model.training)

    @cached_property
    def _batch_bytes(self) -> float:
        return self.model.batch_bytes(self.shape)

    @cached_property
    def _receives(self) -> list[Cut]:
        crossings = self.model.crossings(self.shape)
        return [crossings[run.start] for run in self.chain.runs]

    @cached_property
    def _sends(self) -> list[Cut]:
        crossings = self.model.crossings(self.shape)
        return [crossings[run.start + run.length] for run in self.chain.runs]

    @cached_property
    def _arrivals(self) -> Arrivals:
        return self.model.arrivals(self.shape, *self.chain.examples)

    @cached_property
    def _arrived(self) -> list[Floats]:
        return [np.array([cost.arrived_bytes for cost in costs]) for costs in self.costs]

    @cached_property
    def _weights(self) -> list[list[float]]:
        return [[self._weight(cost) for cost in costs] for costs in self.costs]

    @cached_property
    def _fastest(self) -> list[int]:
        return [int(np.argmin(weights)) for weights in self._weights]

    def _weight(self, cost: LayerCost) -> float:
        """What the choice of options minimises: with one stage the whole step, else one micro-batch (what is paid once
        per step does not depend on the options then)."""
        if self.shape.pipeline == 1:
            return self.shape.num_microbatches * cost.microbatch_s + cost.once_s
        return cost.microbatch_s

    def on(self, stage: int) -> "StagePrices":
        """The prices on the device of a stage: here, the same for all."""
        return self

    def stage_cost(self, composition: int, choice: Choice, in_flight: int) -> StageCost:
        """The whole account of a composition with its options."""
        item = self.chain.compositions[composition]
        layers = [(self.costs[run][self.options[run].index(option)], count) for run, option, count in choice.parts]
        return combine(
            layers,
            in_flight,
            self._receives[item.first_run],
            self._sends[item.last_run],
            self._arrivals.at(composition),
            self._shared(composition),
            self.model.tie_s(self._tied(composition), self.shape),
            self._state,
            self.model.training,
            self.model.device,
            self.shape,
            self._batch_bytes,
        )

    @cached_property
    def _fastest_microbatch_s(self) -> Floats:
        """[composition] -> seconds per micro-batch with the fastest options, memory ignored: a lower bound."""
        per_run = np.array([min(c.microbatch_s for c in costs) for costs in self.costs])
        seconds: Floats = self.chain.counts @ per_run + P2P_EXPOSED * self._waits
        return seconds

    @cached_property
    def _waits(self) -> Floats:
        """[composition] -> seconds of the transfers before and behind it."""
        receives = np.array([cut.seconds for cut in self._receives])
        sends = np.array([cut.seconds for cut in self._sends])
        seconds: Floats = receives[self.chain.first_runs] + sends[self.chain.last_runs]
        return seconds

    def _balanced(self, cutoff_s: float, saving_s: Floats) -> NDArray[np.bool_]:
        """Compositions that can be part of a step below `cutoff_s`: not so long that they alone make it longer, nor so
        short that the other stages must. saving_s: what each takes at least beyond its fastest options."""
        shape, fastest = self.shape, self._fastest_microbatch_s
        more = shape.num_microbatches - 1
        if not np.isfinite(cutoff_s) or more == 0:
            return fastest <= cutoff_s * (1 + ROUNDING)
        if self._work is not None:
            longest_s = (cutoff_s - self._work.pass_s) / more
            done = self.chain.counts @ self._work.per_run
            least = self._work.whole - self._work.others_rate * longest_s
            return (fastest + saving_s <= longest_s * (1 + ROUNDING)) & (done >= least - ROUNDING * self._work.whole)
        per_run = np.array([min(c.microbatch_s for c in costs) for costs in self.costs])
        whole_s = float(np.array([run.length for run in self.chain.runs]) @ per_run)
        longest_s = (cutoff_s - whole_s) / more
        shortest_s = whole_s - (shape.pipeline - 1) * longest_s
        return (fastest + saving_s <= longest_s * (1 + ROUNDING)) & (fastest >= shortest_s * (1 - ROUNDING))

    def _saving_s(self, in_flight: int) -> Floats:
        """[composition] -> least seconds per micro-batch that bringing its memory into the budget adds: bytes over, at
        the price of the option that saves bytes most cheaply. 0 for a single stage, whose options trade otherwise."""
        if self.shape.pipeline == 1:
            return np.zeros(len(self.chain.compositions))
        first = self._passes_of(in_flight)[0]
        prices = []
        for run, (costs, fast) in enumerate(zip(self.costs, self._fastest, strict=True)):
            for option, cost in enumerate(costs):
                saved = float(first.before[run][fast] - first.before[run][option])
                if saved > 0:
                    prices.append((cost.microbatch_s - costs[fast].microbatch_s) / saved)
        before = np.array([row[fast] for row, fast in zip(first.before, self._fastest, strict=True)])
        ending = np.array([row.min() for row in first.ending])
        there = self.chain.counts @ before + ending[self.chain.last_runs]
        over = np.maximum(0.0, there - self._room(first.moment, [row.max() for row in self._arrived]))
        saving: Floats = over * min(prices, default=0.0)
        return saving

    def price(self, stage: int, cutoff_s: float = float("inf")) -> tuple[Floats, Floats]:
        """([composition] -> seconds per micro-batch, seconds once per step) of a stage at the best options that fit.

        Infinite where the composition cannot stand on that stage, where nothing fits, and where it cannot be part of
        a step below `cutoff_s`.
        """
        shape, chain = self.shape, self.chain
        num_compositions = len(chain.compositions)
        seconds, once = np.full(num_compositions, np.inf), np.full(num_compositions, np.inf)
        in_flight = shape.in_flight(stage)
        fits = self._fits(in_flight, self._fastest)
        may_stand = self._balanced(cutoff_s, self._saving_s(in_flight)) & (fits | self._may_fit(in_flight))
        may_stand &= self._update_fits
        if stage == 0:
            may_stand &= chain.at_start
        if stage == shape.pipeline - 1:
            may_stand &= chain.at_end
        if self._recomputable is not None:
            best = self._fastest_microbatch_s + self._recompute_s(in_flight, fits)
            may_stand &= np.isfinite(best)
            return np.where(may_stand, best, np.inf), np.where(may_stand, self._once_s, np.inf)
        for i in np.flatnonzero(may_stand):
            priced = self._priced_one(int(i), in_flight, bool(fits[i]), cutoff_s)
            if priced is not None:
                seconds[i], once[i] = priced[0], priced[1]
        return seconds, once

    def choice(self, composition: int, in_flight: int) -> Choice:
        """The options behind a price."""
        fits = bool(self._fits(in_flight, self._fastest)[composition])
        priced = self._priced_one(composition, in_flight, fits, float("inf"))
        assert priced is not None
        return priced[2]

    @cached_property
    def _recomputable(self) -> int | None:
        """The one run whose layers may be recomputed, if nothing else is to be decided: then the fewest recomputed
        layers that fit are a closed form. None: it takes the knapsack."""
        runs = [run for run, options in enumerate(self.options) if len(options) > 1]
        if self.shape.pipeline == 1 or len(runs) != 1:
            return None
        run = runs[0]
        orders = [self._order(run, self.shape.in_flight(stage)) for stage in range(self.shape.pipeline)]
        return run if all(order == [1 - self._fastest[run], self._fastest[run]] for order in orders) else None

    def _recompute_s(self, in_flight: int, fits: NDArray[np.bool_]) -> Floats:
        """[composition] -> seconds per micro-batch that the fewest recomputed layers add; infinite if none suffice.

        The recomputed ones come first, so while any layer is at work, what is there is linear in their number k.
        """
        run = self._recomputable
        assert run is not None
        fast, slow = self._fastest[run], 1 - self._fastest[run]
        added_s = self.costs[run][slow].microbatch_s - self.costs[run][fast].microbatch_s
        layers = self.chain.counts[:, run]
        few, many = np.ones(len(layers)), layers - 2
        arrived = [row[o] for row, o in zip(self._arrived, self._fastest, strict=True)]
        arrived[run] = self._arrived[run][slow]
        all_fit, but_one = layers > 0, layers > 1
        for one in self._passes_of(in_flight):
            room = self._room(one.moment, arrived)
            before, behind, transient, joined, ending = (
                np.array([row[o] for row, o in zip(rows, self._fastest, strict=True)])
                for rows in (one.before, one.behind, one.transient, one.joined, one.ending)
            )
            starts, highest = running(before, behind, transient, self._at_end(joined, ending), self.chain.counts)
            start, rise = starts[:, run], before[run] - behind[run]
            is_last = self.chain.last_runs == run
            end = np.where(is_last, ending[run], joined[run])
            end_slow = np.where(is_last, one.ending[run][slow], one.joined[run][slow])
            earlier = (np.max(highest[:, :run], axis=1, initial=-np.inf), one.behind[run][slow] - behind[run])
            later = (np.max(highest[:, run + 1 :], axis=1, initial=-np.inf), one.before[run][slow] - before[run])
            to_slow = one.before[run][slow] - behind[run]
            own = one.before[run][slow] - one.behind[run][slow] + one.transient[run][slow]
            first = start + own, one.behind[run][slow] - behind[run]
            late = one.before[run][slow] - before[run]
            mixed = [
                (start + one.transient[run][slow], to_slow),
                (start + layers * rise + end, late),
            ]
            several = [(start + rise + transient[run], to_slow), (start + (layers - 1) * rise + transient[run], late)]
            for there, slope in (earlier, later, first, *mixed, *several):
                if slope < 0:
                    few = np.maximum(few, np.ceil((there - room) / -slope))
                elif slope > 0:
                    many = np.minimum(many, np.floor((room - there) / slope))
                else:
                    many = np.where(there <= room, many, -np.inf)
            for there, slope in (earlier, later, first, *mixed):
                but_one &= there + (layers - 1) * slope <= room
            for there, slope in (earlier, later, (start + end_slow, to_slow)):
                all_fit &= there + layers * slope <= room
            inner = first[0] + layers * first[1], start + one.transient[run][slow] + (layers - 1) * to_slow
            all_fit &= (layers == 1) | (np.maximum(*inner) <= room)
        needed = np.select([few <= many, but_one, all_fit], [few, layers - 1, layers], np.inf)
        seconds: Floats = np.where(fits, 0.0, needed) * added_s
        return seconds

    @cached_property
    def _once_s(self) -> Floats:
        """[composition] -> seconds once per step; the options do not change it where stages are several."""
        counts, shard = self.chain.counts, self.shape.sharded_over
        data = counts @ np.array([costs[0].once_data_s for costs in self.costs])
        data += np.array([self.model.tie_s(self._tied(i), self.shape) for i in range(len(counts))])
        trainable = counts @ np.array([costs[0].trainable_elements for costs in self.costs])
        shared = np.array([self._shared(i) for i in range(len(counts))])
        seconds: Floats = data + (trainable - shared) / shard * self.model.optimizer_s(1.0)
        return seconds

    def _priced_one(
        self, composition: int, in_flight: int, fits_fastest: bool, cutoff_s: float
    ) -> tuple[float, float, Choice] | None:
        key = composition, in_flight
        if key not in self._priced:
            self._priced[key] = self._price_one(composition, in_flight, fits_fastest, cutoff_s)
        return self._priced[key]

    def _passes_of(self, in_flight: int) -> "list[_Pass]":
        """What every option of every run holds in the passes that may hold most."""
        if in_flight not in self._passes:
            self._passes[in_flight] = [
                _Pass.of(moment, self.costs) for moment in moments_of(self.shape, self._state, in_flight)
            ]
        return self._passes[in_flight]

    def _order(self, run: int, in_flight: int) -> list[int]:
        """Options of a run in the order in which its layers take them, so that it holds least: those that pass through
        most come first, when least is kept. What shrinks memory comes before all others, the lowest first."""
        passes = self._passes_of(in_flight)
        rise = passes[0].before[run] - passes[0].behind[run]
        most = np.max([one.transient[run] for one in passes], axis=0)
        return sorted(
            range(len(rise)), key=lambda o: (0, float(rise[o] + most[o])) if rise[o] < 0 else (1, -float(most[o]))
        )

    def _room(self, moment: Moment, arrived: Sequence[float]) -> Floats:
        """[composition] -> bytes that layers may hold in a pass, beyond parameters and optimizer state. arrived: [run]
        -> what a stage's first layer keeps of what arrives because it is recomputed."""
        state = self._state
        each = [
            costs[0].elements * state.sharded_parameters + costs[0].trainable_elements * state.optimizer
            for costs in self.costs
        ]
        sent = np.array([sent_bytes(cut, moment.flights) for cut in self._sends])[self.chain.last_runs]
        room: Floats = self.budget - self._batch_bytes - self.chain.counts @ np.array(each) - sent
        room += self._shared_elements * moment.shared(state)
        room -= self._arrivals.held(moment.flights, moment.sends, np.array(arrived)[self.chain.first_runs])
        return room

    def _at_end(self, joined: Floats, ending: Floats) -> Floats:
        """[composition][run] -> transient of the run's last layer: the stage's last one has none behind it."""
        is_last = np.arange(len(joined)) == self.chain.last_runs[:, None]
        return np.where(is_last, ending, joined)

    def _holds(
        self, in_flight: int, pick: Callable[[Floats, int], float], arrived: Sequence[float]
    ) -> NDArray[np.bool_]:
        """[composition] -> whether it fits with the amounts that `pick` takes of each run's options."""
        fits = np.ones(len(self.chain.compositions), dtype=bool)
        for one in self._passes_of(in_flight):
            before, behind, transient, joined, ending = (
                np.array([pick(row, run) for run, row in enumerate(rows)])
                for rows in (one.before, one.behind, one.transient, one.joined, one.ending)
            )
            _, most = running(before, behind, transient, self._at_end(joined, ending), self.chain.counts)
            fits &= most.max(axis=1) <= self._room(one.moment, arrived)
        return fits

    def _fits(self, in_flight: int, options: list[int]) -> NDArray[np.bool_]:
        """[composition] -> whether it fits with the given option of each run."""
        arrived = [row[o] for row, o in zip(self._arrived, options, strict=True)]
        return self._holds(in_flight, lambda row, run: row[options[run]], arrived)

    def _may_fit(self, in_flight: int) -> NDArray[np.bool_]:
        """[composition] -> False where not even the least of every item fits."""
        return self._holds(in_flight, lambda row, run: row.min(), [row.max() for row in self._arrived])

    @cached_property
    def _update_fits(self) -> NDArray[np.bool_]:
        """[composition] -> whether the optimizer's step fits, when activations are gone; no option changes that."""
        counts, state = self.chain.counts, self._state
        trainable_bytes = state.sharded_gradients + state.optimizer
        each = [
            costs[0].elements * state.sharded_parameters + costs[0].trainable_elements * trainable_bytes
            for costs in self.costs
        ]
        root = counts @ np.array([costs[0].root_end_bytes for costs in self.costs])
        root -= self._shared_elements * state.root_end
        temporary = np.array([costs[0].trainable_elements for costs in self.costs]) * state.optimizer_temporaries
        total: Floats = counts @ np.array(each) + self._batch_bytes
        total -= self._shared_elements * (state.sharded_parameters + trainable_bytes)
        total += np.maximum(root, counts @ temporary - self._shared_elements * state.optimizer_temporaries)
        return total <= self.budget

    @cached_property
    def _shared_elements(self) -> Floats:
        return np.array([self._shared(i) for i in range(len(self.chain.compositions))])

    def _shared(self, composition: int) -> float:
        """Parameter elements that layers of a composition hold together and must not be counted twice."""
        counts = self.chain.counts[composition]
        return sum(
            elements * max(0.0, float(sum(counts[run] for run in runs)) - 1.0)
            for runs, elements in self._shared_by_runs
        )

    def _tied(self, composition: int) -> float:
        """Parameter elements of a composition that other stages hold copies of."""
        counts = self.chain.counts[composition]
        return sum(
            elements
            for runs, elements in self._shared_by_runs
            if 0 < sum(counts[run] for run in runs) < sum(self.chain.runs[run].length for run in runs)
        )

    @cached_property
    def _shared_by_runs(self) -> list[tuple[list[int], float]]:
        run_of = self.chain.run_of
        return [
            (sorted({int(run_of[layer]) for layer in layers}), elements)
            for layers, elements in self.chain.shared_weights(self.shape)
        ]

    def _price_one(
        self, composition: int, in_flight: int, fits_fastest: bool, cutoff_s: float
    ) -> tuple[float, float, Choice] | None:
        item = self.chain.compositions[composition]
        runs = range(item.first_run, item.last_run + 1)
        if fits_fastest:
            choice = Choice(
                tuple((r, self.options[r][self._fastest[r]], n) for r, n in zip(runs, item.counts, strict=True))
            )
        else:
            found = self._knapsack(composition, in_flight, self._weight_cutoff(cutoff_s))
            if found is None:
                return None
            choice = found
        cost = self.stage_cost(composition, choice, in_flight)
        if cost.allocated_bytes > self.budget:
            return None
        return cost.microbatch_s, cost.once_s, choice

    def _knapsack(self, composition: int, in_flight: int, cutoff: float) -> Choice | None:
        """Least total weight whose memory fits.

        First without all turns but the last, which bounds it from below: if what that finds fits, it is the best. Then
        as if every turn came when most is kept, which gives something that fits, and at last all that may lie between.
        """
        item = self.chain.compositions[composition]
        runs = list(range(item.first_run, item.last_run + 1))
        passes = self._passes_of(in_flight)
        rooms = [float(self._room(one.moment, [row.max() for row in self._arrived])[composition]) for one in passes]
        orders = [self._order(run, in_flight) for run in runs]
        room = rooms[0] - float(passes[0].ending[runs[-1]].min())
        every = [list(range(len(self.options[run]))) for run in runs]
        groups = self._all_groups(runs, every, item.counts, [passes[0].before[run] for run in runs])
        relaxed = least_weight(groups, room, cutoff)
        if relaxed is None:
            return None
        choice = self._choice_of(runs, every, item.counts, relaxed, orders)
        if self._holds_choice(composition, choice, in_flight):
            return choice
        best, limit = self._cautious(composition, in_flight, cutoff), cutoff
        if best is not None:
            limit = self._weight_of(best)
            if limit <= relaxed.weight * (1 + ROUNDING):
                return best
        found = lightest_in_turns(
            [
                Turns(
                    count,
                    np.array([self._weights[run][o] for o in order]),
                    np.array([one.before[run][order] for one in passes]),
                    np.array([one.behind[run][order] for one in passes]),
                    np.array([one.transient[run][order] for one in passes]),
                    np.array([(one.ending if run == runs[-1] else one.joined)[run][order] for one in passes]),
                )
                for run, count, order in zip(runs, item.counts, orders, strict=True)
            ],
            np.array(rooms),
            limit,
            self._starting(composition, orders[0], passes),
        )
        if found is None:
            return best
        parts = [
            (run, self.options[run][o], int(n))
            for run, order, counts in zip(runs, orders, found.counts, strict=True)
            for o, n in zip(order, counts, strict=True)
            if n
        ]
        return Choice(tuple(parts))

    def _starting(self, composition: int, order: list[int], passes: "list[_Pass]") -> Floats:
        """[pass][option, in this order] -> bytes of what arrives that the stage holds more than it must if its first
        layer takes the option."""
        arrivals = self._arrivals.at(composition)
        arrived = self._arrived[self.chain.compositions[composition].first_run][order]
        held = np.array([arrivals.held(one.moment.flights, one.moment.sends, arrived) for one in passes])
        starting: Floats = held - held.min(axis=1, keepdims=True)
        return starting

    def _cautious(self, composition: int, in_flight: int, cutoff: float) -> Choice | None:
        """The least total weight that fits even if every turn came when most is kept: the best packing over every bound
        on the largest transient."""
        item = self.chain.compositions[composition]
        runs = list(range(item.first_run, item.last_run + 1))
        passes = self._passes_of(in_flight)
        orders = [self._order(run, in_flight) for run in runs]
        room = min(float(self._room(one.moment, [row.min() for row in self._arrived])[composition]) for one in passes)
        most = {run: np.max([np.maximum(one.before[run], one.behind[run]) for one in passes], axis=0) for run in runs}
        passing = {
            run: np.max([np.maximum(one.transient[run], one.joined[run]) for one in passes], axis=0) for run in runs
        }
        best: tuple[Packing, list[list[int]]] | None = None
        for bound in sorted({float(size) for run in runs for size in passing[run]}):
            allowed = [[o for o, size in enumerate(passing[run]) if size <= bound] for run in runs]
            if bound > room or not all(allowed):
                continue
            groups = self._all_groups(runs, allowed, item.counts, [most[run] for run in runs])
            packing = least_weight(groups, room - bound, best[0].weight if best else cutoff)
            if packing is not None:
                best = packing, allowed
        return None if best is None else self._choice_of(runs, best[1], item.counts, best[0], orders)

    def _holds_choice(self, composition: int, choice: Choice, in_flight: int) -> bool:
        return self.stage_cost(composition, choice, in_flight).allocated_bytes <= self.budget

    def _weight_of(self, choice: Choice) -> float:
        return sum(self._weights[run][self.options[run].index(option)] * n for run, option, n in choice.parts)

    def _all_groups(
        self, runs: list[int], allowed: list[list[int]], counts: tuple[int, ...], memory: list[Floats]
    ) -> list[Group]:
        return [
            group
            for run, options, count, sizes in zip(runs, allowed, counts, memory, strict=True)
            for group in self._groups(run, options, count, sizes)
        ]

    def _weight_cutoff(self, cutoff_s: float) -> float:
        """Total weight above which one stage alone makes a step longer than `cutoff_s` (shared weights are updated
        once, but stand in every reader's weight)."""
        if self.shape.pipeline > 1:
            return float("inf")
        return cutoff_s + sum(
            (len(layers) - 1) * self.model.optimizer_s(elements / self.shape.sharded_over)
            for layers, elements in self.chain.shared_weights(self.shape)
        )

    def _groups(self, run: int, allowed: list[int], count: int, sizes: Floats) -> list[Group]:
        """Items of the knapsack for `count` layers of a run.

        Recompute and resharding add up, in time and in bytes. So where all four combinations are allowed, every layer
        is two items with two options each instead of one with four: the same sums, and far fewer of them.
        """
        weights = np.array([self._weights[run][o] for o in allowed])
        memory = sizes[allowed]
        if not self._is_product(run, allowed) or not self._adds_up(weights, memory, self._product_order(run, allowed)):
            return [Group(count, weights, memory)]
        order = self._product_order(run, allowed)
        keep, reshard, full_keep = (weights[order[0]], memory[order[0]]), order[1], order[2]
        recompute = Group(count, np.array([keep[0], weights[full_keep]]), np.array([keep[1], memory[full_keep]]))
        give_back = Group(
            count,
            np.array([0.0, weights[reshard] - keep[0]]),
            np.array([0.0, memory[reshard] - keep[1]]),
        )
        return [recompute, give_back]

    def _adds_up(self, weights: Floats, memory: Floats, order: list[int]) -> bool:
        """Whether giving back and recompute change weight and memory by as much together as one by one."""
        return all(
            abs(x[order[0]] + x[order[3]] - x[order[1]] - x[order[2]]) <= ROUNDING * float(np.abs(x).max())
            for x in (weights, memory)
        )

    def _is_product(self, run: int, allowed: list[int]) -> bool:
        return len({self.options[run][o] for o in allowed}) == 4

    def _product_order(self, run: int, allowed: list[int]) -> list[int]:
        """Places in `allowed` of (none, keep), (none, reshard), (full, keep), (full, reshard)."""
        places = {(self.options[run][o].recompute, self.options[run][o].reshard): i for i, o in enumerate(allowed)}
        return [places["none", False], places["none", True], places["full", False], places["full", True]]

    def _choice_of(
        self,
        runs: list[int],
        allowed: list[list[int]],
        counts: tuple[int, ...],
        packing: Packing,
        orders: list[list[int]],
    ) -> Choice:
        """Options of every run's layers from the packing's items."""
        items = iter(packing.counts)
        parts: list[tuple[int, LayerOption, int]] = []
        for run, options, count, order in zip(runs, allowed, counts, orders, strict=True):
            taken = [int(n) for n in next(items)]
            places = list(range(len(options)))
            if len(taken) != len(options):
                full, given = taken[1], int(next(items)[1])
                both = max(0, full + given - count)
                places = self._product_order(run, options)
                taken = [count - full - given + both, given - both, full - both, both]
            number = {options[place]: n for place, n in zip(places, taken, strict=True)}
            parts += [(run, self.options[run][o], number[o]) for o in order if number.get(o)]
        return Choice(tuple(parts))


@dataclass(frozen=True)
class _Pass:
    """What the options of each run hold in one pass: [run] -> [option] -> bytes. transient: of layers with one of their
    run behind them; joined: with the next run's first; ending: with none."""

    moment: Moment
    before: list[Floats]
    behind: list[Floats]
    transient: list[Floats]
    joined: list[Floats]
    ending: list[Floats]

    @classmethod
    def of(cls, moment: Moment, costs: list[list[LayerCost]]) -> "_Pass":
        """Amounts of a pass."""
        return cls(
            moment,
            [np.array([moment.before(cost) for cost in row]) for row in costs],
            [np.array([moment.behind(cost) for cost in row]) for row in costs],
            [np.array([moment.transient(cost, cost) for cost in row]) for row in costs],
            [
                np.array([moment.transient(cost, behind) for cost in row])
                for row, behind in zip(costs, [*(row[0] for row in costs[1:]), None], strict=True)
            ],
            [np.array([moment.transient(cost, None) for cost in row]) for row in costs],
        )
