"""Columns: one pipeline stage holding one interval of the chain, at its best options under the stage's memory.

Equal neighbours in the chain form runs, and intervals with equal counts of each run cost the same: such a class of
intervals is a composition, priced once per number of micro-batches in flight. Within a composition each layer takes
one option (recompute x reshard); the least time that fits is an exact knapsack (knapsack.py) for every bound on the
largest transient.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .knapsack import Group, Packing, least_weight
from .layer_cost import P2P_EXPOSED, CostModel, LayerCost
from .memory_cost import state_bytes
from .plan import Recompute
from .stage_cost import StageCost, allocatable_bytes, combine, sent_bytes
from .strategy import LayerOption, Shape, is_cut, legal_cuts

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


class Chain:
    """The model's chain as runs, with every interval's composition; the same for all shapes."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.num_layers = len(model.profile.layers)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Runs in order."""
        kinds, runs = self.model.kinds, [Run(0, 1)]
        for i in range(1, self.num_layers):
            start = runs[-1].start
            if kinds[i] == kinds[start] and self._signature(i) == self._signature(start):
                runs[-1] = Run(start, runs[-1].length + 1)
            else:
                runs.append(Run(i, 1))
        return tuple(runs)

    def _signature(self, layer: int) -> tuple[object, ...]:
        profile = self.model.profile
        can_slice = [profile.classes[other.layer_class].sequence is not None for other in profile.layers]

        def crossing(position: int) -> tuple[object, ...]:
            alive = [t for t in profile.tensors if t.made_by < position <= t.last_used_by]
            sliced = [can_slice[t.made_by] and can_slice[position] for t in alive]
            return tuple(
                sorted((t.shape, t.dims, t.dtype, t.requires_grad, s) for t, s in zip(alive, sliced, strict=True))
            )

        return crossing(layer), crossing(layer + 1), tuple(self.shared_groups[layer])

    @cached_property
    def shared_groups(self) -> list[list[int]]:
        """[layer] -> tie groups it reads."""
        profile = self.model.profile
        group_of = {name: g for g, names in enumerate(profile.ties) for name in names}
        readers: dict[str, list[int]] = {}
        for i, layer in enumerate(profile.layers):
            for name in layer.parameters:
                readers.setdefault(name, []).append(i)
        for name, layers in readers.items():
            if len(layers) > 1 and name not in group_of:
                group_of[name] = len(group_of) + len(profile.ties)
        return [sorted({group_of[n] for n in layer.parameters if n in group_of}) for layer in profile.layers]

    @cached_property
    def uncuttable(self) -> set[int]:
        """Layers before which no stage may begin."""
        return set(range(1, self.num_layers)) - set(legal_cuts(self.model.profile))

    def shared_weights(self, shape: Shape) -> list[tuple[list[int], float]]:
        """Per group of layers that read one weight: those layers, and its elements on one tensor rank."""
        profile = self.model.profile
        result = []
        for group in sorted({g for groups in self.shared_groups for g in groups}):
            layers = [i for i, groups in enumerate(self.shared_groups) if group in groups]
            first = profile.layers[layers[0]]
            layer_class = profile.classes[first.layer_class]
            names = (
                set(profile.ties[group])
                if group < len(profile.ties)
                else set.intersection(*(set(profile.layers[i].parameters) for i in layers))
            )
            divisor = shape.tensor if is_cut(layer_class, shape) else 1
            sharded = {name for cut in layer_class.cuts for name in cut.sharded}
            prefix = f"{first.root}." if first.root else ""
            held = [p for p in layer_class.parameters if prefix + p.name in names]
            elements = sum(p.num_elements / (divisor if p.name in sharded else 1) for p in held)
            result.append((layers, elements))
        return result

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


@dataclass(frozen=True)
class Choice:
    """Options of a composition's layers: per run, how many layers take which option."""

    parts: tuple[tuple[int, LayerOption, int], ...]


class StagePrices:
    """Prices of all compositions under one shape: seconds per micro-batch, seconds per step, and what to choose."""

    def __init__(
        self, chain: Chain, shape: Shape, recompute: Recompute | None = None, reshard: bool | None = None
    ) -> None:
        self.chain = chain
        self.shape = shape
        model = chain.model
        self.model = model
        crossings = model.crossings(shape)
        self._receives = [crossings[run.start] for run in chain.runs]
        self._sends = [crossings[run.start + run.length] for run in chain.runs]
        self._state = state_bytes(shape, model.training)
        self.budget = allocatable_bytes(shape, model.device, model.training)
        self.options: list[list[LayerOption]] = []
        self.costs: list[list[LayerCost]] = []
        cache: dict[object, tuple[list[LayerOption], list[LayerCost]]] = {}
        for run in chain.runs:
            kind = model.kinds[run.start]
            if kind not in cache:
                options = model.options(kind, shape, recompute, reshard)
                cache[kind] = options, [model.cost(kind, shape, option) for option in options]
            self.options.append(cache[kind][0])
            self.costs.append(cache[kind][1])
        self._weights = [[self._weight(cost) for cost in costs] for costs in self.costs]
        self._fastest = [int(np.argmin(weights)) for weights in self._weights]
        self._priced: dict[tuple[int, int], tuple[float, float, Choice] | None] = {}

    def _weight(self, cost: LayerCost) -> float:
        """What the choice of options minimises: with one stage the whole step, else one micro-batch (what is paid once
        per step does not depend on the options then)."""
        if self.shape.pipeline == 1:
            return self.shape.num_microbatches * cost.microbatch_s + cost.once_s
        return cost.microbatch_s

    def stage_cost(self, composition: int, choice: Choice, in_flight: int) -> StageCost:
        """The whole account of a composition with its options."""
        item = self.chain.compositions[composition]
        layers = [(self.costs[run][self.options[run].index(option)], count) for run, option, count in choice.parts]
        return combine(
            layers,
            in_flight,
            self._receives[item.first_run],
            self._sends[item.last_run],
            self._shared(composition),
            self.model.tie_s(self._tied(composition), self.shape),
            self._state,
            self.model.training,
            self.model.device,
            self.shape.data_shard,
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
        prices = []
        for run, (costs, fast) in enumerate(zip(self.costs, self._fastest, strict=True)):
            for option, cost in enumerate(costs):
                saved = self._kept(run, fast, in_flight) - self._kept(run, option, in_flight)
                if saved > 0:
                    prices.append((cost.microbatch_s - costs[fast].microbatch_s) / saved)
        kept = [self._kept(run, option, in_flight) for run, option in enumerate(self._fastest)]
        transient = [min(cost.transient_bytes for cost in costs) for costs in self.costs]
        over = np.maximum(0.0, self._total_bytes(kept, transient, in_flight) - self.budget)
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
    def _recomputable(self) -> NDArray[np.bool_] | None:
        """[run] -> whether its layers may be recomputed, if they are all of one kind and nothing else is to be decided:
        then the fewest recomputed layers that fit are a closed form. None: it takes the knapsack."""
        if self.shape.pipeline == 1:
            return None
        chain = self.chain
        kinds = {self.model.kinds[run.start] for run, o in zip(chain.runs, self.options, strict=True) if len(o) > 1}
        if len(kinds) != 1:
            return None
        return np.array([self.model.kinds[run.start] in kinds for run in chain.runs])

    def _recompute_s(self, in_flight: int, fits: NDArray[np.bool_]) -> Floats:
        """[composition] -> seconds per micro-batch that the fewest recomputed layers add; infinite if none suffice."""
        mask = self._recomputable
        assert mask is not None
        run = int(np.argmax(mask))
        fast, slow = self._fastest[run], 1 - self._fastest[run]
        saved = self._kept(run, fast, in_flight) - self._kept(run, slow, in_flight)
        added_s = self.costs[run][slow].microbatch_s - self.costs[run][fast].microbatch_s
        if saved <= 0:
            return np.where(fits, 0.0, np.inf)
        kept = [self._kept(r, option, in_flight) for r, option in enumerate(self._fastest)]
        rest = [0.0 if mask[r] else self.costs[r][self._fastest[r]].transient_bytes for r in range(len(kept))]
        layers = self.chain.counts @ mask.astype(float)
        fast_bytes, slow_bytes = (self.costs[run][option].transient_bytes for option in (fast, slow))
        over_all_slow = self._total_bytes(kept, [max(b, slow_bytes) for b in rest], in_flight) - self.budget
        over_mixed = self._total_bytes(kept, [max(b, slow_bytes, fast_bytes) for b in rest], in_flight) - self.budget
        some = np.maximum(1.0, np.ceil(over_mixed / saved))
        needed = np.where(some < layers, some, np.where(over_all_slow <= layers * saved, layers, np.inf))
        needed = np.where(fits, 0.0, np.where(layers > 0, needed, np.inf))
        seconds: Floats = needed * added_s
        return seconds

    @cached_property
    def _once_s(self) -> Floats:
        """[composition] -> seconds once per step; the options do not change it where stages are several."""
        counts, shard = self.chain.counts, self.shape.data_shard
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

    def _kept(self, run: int, option: int, in_flight: int) -> float:
        """Bytes that a layer adds to its stage whatever else is there."""
        cost, state = self.costs[run][option], self._state
        return (
            cost.elements * state.sharded_parameters
            + cost.trainable_elements * (state.sharded_gradients + state.optimizer)
            + cost.held_bytes
            + in_flight * cost.kept_bytes
        )

    def _fits(self, in_flight: int, options: list[int]) -> NDArray[np.bool_]:
        """[composition] -> whether it fits with the given option of each run."""
        kept = [self._kept(run, option, in_flight) for run, option in enumerate(options)]
        transient = [costs[option].transient_bytes for costs, option in zip(self.costs, options, strict=True)]
        return self._total_bytes(kept, transient, in_flight) <= self.budget

    def _may_fit(self, in_flight: int) -> NDArray[np.bool_]:
        """[composition] -> False where not even the least of every item fits."""
        kept = [min(self._kept(run, o, in_flight) for o in range(len(c))) for run, c in enumerate(self.costs)]
        transient = [min(cost.transient_bytes for cost in costs) for costs in self.costs]
        return self._total_bytes(kept, transient, in_flight) <= self.budget

    @cached_property
    def _update_fits(self) -> NDArray[np.bool_]:
        """[composition] -> whether the optimizer's step fits, when activations are gone; no option changes that."""
        counts, state = self.chain.counts, self._state
        trainable_bytes = state.sharded_gradients + state.optimizer + state.optimizer_temporaries
        each = [
            costs[0].elements * state.sharded_parameters + costs[0].trainable_elements * trainable_bytes
            for costs in self.costs
        ]
        shared = np.array([self._shared(i) for i in range(len(counts))])
        total: Floats = counts @ np.array(each) - shared * (state.sharded_parameters + trainable_bytes)
        return total <= self.budget

    def _total_bytes(self, kept: list[float], transient: list[float], in_flight: int) -> Floats:
        counts = self.chain.counts
        largest = np.max(np.where(counts > 0, np.array(transient)[None, :], 0.0), axis=1)
        total: Floats = counts @ np.array(kept) - self._saved_by_sharing + largest + self._sent_bytes(in_flight)
        return total

    def _sent_bytes(self, in_flight: int) -> Floats:
        """[composition] -> bytes held of what its stage sends on."""
        return np.array([sent_bytes(cut, in_flight) for cut in self._sends])[self.chain.last_runs]

    @cached_property
    def _saved_by_sharing(self) -> Floats:
        state = self._state
        per_element = state.sharded_parameters + state.sharded_gradients + state.optimizer + state.held_twice
        return np.array([per_element * self._shared(i) for i in range(len(self.chain.compositions))])

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
        """Least total weight whose memory fits: the best packing over every bound on the largest transient."""
        item = self.chain.compositions[composition]
        runs = range(item.first_run, item.last_run + 1)
        room = self.budget + float(self._saved_by_sharing[composition])
        room -= sent_bytes(self._sends[item.last_run], in_flight)
        bounds = sorted({cost.transient_bytes for run in runs for cost in self.costs[run]})
        best: tuple[Packing, list[list[int]]] | None = None
        for bound in bounds:
            allowed = [[o for o, c in enumerate(self.costs[run]) if c.transient_bytes <= bound] for run in runs]
            if bound > room or not all(allowed):
                continue
            groups = [
                group
                for run, options, count in zip(runs, allowed, item.counts, strict=True)
                for group in self._groups(run, options, count, in_flight)
            ]
            packing = least_weight(groups, room - bound, best[0].weight if best else cutoff)
            if packing is not None:
                best = packing, allowed
        if best is None:
            return None
        return self._choice_of(list(runs), best[1], item.counts, best[0])

    def _weight_cutoff(self, cutoff_s: float) -> float:
        """Total weight above which one stage alone makes a step longer than `cutoff_s` (shared weights are updated
        once, but stand in every reader's weight)."""
        if self.shape.pipeline > 1:
            return float("inf")
        return cutoff_s + sum(
            (len(layers) - 1) * self.model.optimizer_s(elements / self.shape.data_shard)
            for layers, elements in self.chain.shared_weights(self.shape)
        )

    def _groups(self, run: int, allowed: list[int], count: int, in_flight: int) -> list[Group]:
        """Items of the knapsack for `count` layers of a run.

        Recompute and resharding add up, in time and in bytes. So where all four combinations are allowed, every layer
        is two items with two options each instead of one with four: the same sums, and far fewer of them.
        """
        weights = np.array([self._weights[run][o] for o in allowed])
        memory = np.array([self._kept(run, o, in_flight) for o in allowed])
        if not self._is_product(run, allowed):
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

    def _is_product(self, run: int, allowed: list[int]) -> bool:
        return len({self.options[run][o] for o in allowed}) == 4

    def _product_order(self, run: int, allowed: list[int]) -> list[int]:
        """Places in `allowed` of (none, keep), (none, reshard), (full, keep), (full, reshard)."""
        places = {(self.options[run][o].recompute, self.options[run][o].reshard): i for i, o in enumerate(allowed)}
        return [places["none", False], places["none", True], places["full", False], places["full", True]]

    def _choice_of(
        self, runs: list[int], allowed: list[list[int]], counts: tuple[int, ...], packing: Packing
    ) -> Choice:
        """Options of every run's layers from the packing's items."""
        items = iter(packing.counts)
        parts: list[tuple[int, LayerOption, int]] = []
        for run, options, count in zip(runs, allowed, counts, strict=True):
            taken = [int(n) for n in next(items)]
            order = list(range(len(options)))
            if self._is_product(run, options):
                full, given = taken[1], int(next(items)[1])
                both = max(0, full + given - count)
                order = self._product_order(run, options)
                taken = [count - full - given + both, given - both, full - both, both]
            parts += [(run, self.options[run][options[o]], n) for o, n in zip(order, taken, strict=True) if n]
        return Choice(tuple(parts))
