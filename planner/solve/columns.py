"""Columns: one pipeline stage that holds one interval of the chain, at its best options under the stage's memory.

Equal neighbours in the chain form runs. Intervals with equal counts of each run cost the same: such a class of
intervals is a composition, priced once for each number of micro-batches in flight. Within a composition each layer
takes one option (recompute x reshard). The least time at which the running maximum of memory (peak.py) fits is found
exactly (knapsack.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import Flags, Floats, Ints
from ..cost.chain import Chain, of_each
from ..cost.crossing_cost import Cut
from ..cost.memory_cost import StateBytes, state_bytes
from ..cost.peak import Arrivals, Moment, moments_of, running
from ..cost.priced_layer import LayerCost
from ..cost.stage_cost import StageCost, allocatable_bytes, combine, sent_bytes
from ..plan.document import Recompute
from ..plan.shape import NO_EXTRAS, InFlight, LayerOption, Offered, Shape
from .knapsack import Turns, in_time, lightest, tie_prices
from .solver import OutOfTimeError

ROUNDING = 1e-9
"""Relative difference up to which sums of the same terms in another order may differ."""

_UNKNOWN = np.int8(-1)
"""Marks a composition for which it has not been asked yet whether it fits."""


@dataclass(frozen=True)
class Choice:
    """Options of a composition's layers: (run, option, number of layers that take it)."""

    parts: tuple[tuple[int, LayerOption, int], ...]


class Prices(Protocol):
    """Prices of the stages of a shape."""

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
    """Work that the stages of a pipeline on unequal devices share: a layer of each run counts `per_run`, all layers
    together `whole`. The stages on other devices do at most `others_rate` of it in a second. pass_s: least seconds of a
    micro-batch through all stages."""

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
        offered: Offered = NO_EXTRAS,
        work: "Work | None" = None,
    ) -> None:
        """work: what the other stages can do at most, if they are on other devices than those priced here."""
        self.chain = chain
        self.shape = shape
        self._work = work
        model = chain.model
        self.model = model
        self.pinned = recompute, reshard, offered
        self._passes: dict[InFlight, list[_Pass]] = {}
        self._known_rooms: dict[InFlight, list[tuple[Floats, Floats]]] = {}
        self._known_fits: dict[InFlight, NDArray[np.int8]] = {}
        self._priced: dict[tuple[int, InFlight], tuple[StageCost, Choice] | None] = {}

    @property
    def options(self) -> list[list[LayerOption]]:
        """[run] -> options of its layers."""
        return self._priced_options[0]

    @property
    def costs(self) -> list[list[LayerCost]]:
        """[run][option] -> what a layer costs."""
        return self._priced_options[1]

    @cached_property
    def _priced_options(self) -> tuple[list[list[LayerOption]], list[list[LayerCost]]]:
        return self.chain.priced(self.shape, *self.pinned)

    @cached_property
    def budget(self) -> float:
        """Bytes that the allocator may hand out on one rank."""
        return allocatable_bytes(self.shape, self.model.device, self.model.training)

    @cached_property
    def _state(self) -> StateBytes:
        return state_bytes(self.shape, self.model.training)

    @cached_property
    def _held_bytes(self) -> float:
        return self.model.held_bytes(self.shape)

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
        return self.chain.arrivals(self.shape)

    @cached_property
    def _arrived(self) -> list[Floats]:
        return of_each(self.costs, lambda costs: np.array([cost.arrived_bytes for cost in costs]))

    @cached_property
    def _weights(self) -> list[Floats]:
        return of_each(self.costs, lambda costs: np.array([self._weight(cost) for cost in costs]))

    @cached_property
    def _fastest(self) -> list[int]:
        return of_each(self._weights, lambda weights: int(np.argmin(weights)))

    def per_run(self, find: Callable[[list[LayerCost]], float]) -> Floats:
        """[run] -> what `find` returns for the costs of its options."""
        return np.array(of_each(self.costs, find))

    def _weight(self, cost: LayerCost) -> float:
        """Seconds that the choice of options minimises: with one stage those of the whole step, else those of one
        micro-batch (what is paid once per step does not depend on the options then)."""
        if self.shape.pipeline == 1:
            return self.shape.num_microbatches * cost.microbatch_s + cost.once_s
        return cost.microbatch_s

    def on(self, stage: int) -> "StagePrices":
        """The prices on the device of a stage; here all stages have the same."""
        return self

    def stage_cost(self, composition: int, choice: Choice, in_flight: InFlight) -> StageCost:
        """Full cost of a composition with these options."""
        item = self.chain.compositions[composition]
        layers = [(self.costs[run][self.options[run].index(option)], count) for run, option, count in choice.parts]
        return combine(
            layers,
            in_flight,
            self._receives[item.first_run],
            self._sends[item.last_run],
            self._arrivals.at(composition),
            float(self._shared_elements[composition]),
            self.model.tie_s(float(self._tied_elements[composition]), self.shape),
            self._state,
            self.model.training,
            self.model.device,
            self.shape,
            self.model.batch_bytes(self.shape),
            self.model.buffer_bytes(self.shape),
        )

    @cached_property
    def _fastest_microbatch_s(self) -> Floats:
        """[composition] -> lower bound on the seconds per micro-batch: every layer at its fastest option, memory
        ignored."""
        seconds: Floats = self.chain.counts @ self._least_s + self._waits
        return seconds

    @cached_property
    def _least_s(self) -> Floats:
        """[run] -> seconds of a layer per micro-batch at its fastest option."""
        return self.per_run(lambda costs: min(cost.microbatch_s for cost in costs))

    @cached_property
    def forward_s(self) -> tuple[Floats, Floats]:
        """([run] -> most seconds of a layer's forward with any option, [run] -> least seconds)."""
        most = self.per_run(lambda costs: max(cost.forward_total_s for cost in costs))
        return most, self.per_run(lambda costs: min(cost.forward_total_s for cost in costs))

    @cached_property
    def received_s(self) -> Floats:
        """[composition] -> seconds that a stage waits for the transfer before it."""
        seconds: Floats = np.array([cut.waited_s for cut in self._receives])[self.chain.first_runs]
        return seconds

    @cached_property
    def _waits(self) -> Floats:
        """[composition] -> seconds that a stage waits for the transfers before and after it."""
        sends = np.array([cut.waited_s for cut in self._sends])
        seconds: Floats = self.received_s + sends[self.chain.last_runs]
        return seconds

    def _weight_bounds(self, in_flight: InFlight, some: Ints) -> Floats:
        """[of these compositions] -> lower bound on the weight of its options: memory has a price, and the highest
        bound counts, over all passes and all prices at which two options of a run tie."""
        counts, last_runs = self.chain.counts[some], self.chain.last_runs[some]
        weights = self._weights
        bounds: Floats = counts @ np.array(of_each(weights, np.min))
        for one, (room, _) in zip(self._passes_of(in_flight), self._rooms(in_flight), strict=True):
            spare = room[some] - np.array(of_each(one.ending, np.min))[last_runs]
            options = {id(w): (w, held) for w, held in zip(weights, one.before, strict=True)}
            prices = tie_prices([w for w, _ in options.values()], [held for _, held in options.values()])
            at = {key: (w + prices[:, None] * held).min(axis=1) for key, (w, held) in options.items()}
            least = np.array([at[id(w)] for w in weights])
            priced = counts @ least - spare[:, None] * prices
            bounds = np.maximum(bounds, priced.max(axis=1, initial=-np.inf))
        return bounds

    def divisible(self, stages: Sequence[int]) -> tuple[list[Floats], list[Floats], Floats]:
        """Costs of these stages if layers could be divided: ([run][option] -> seconds of a layer, [run] ->
        [stage][option] least bytes of it, [stage] -> most bytes of room for them)."""
        shape, state = self.shape, self._state
        each = self._state_bytes(state.optimizer)
        shared = self.chain.counted_twice(shape)
        passes = [self._passes_of(shape.flights(stage))[0] for stage in stages]
        twice = shared * max(one.moment.shared(state) for one in passes)
        rooms = np.full(len(passes), self.budget - self._held_bytes + twice)
        rooms -= [
            min(one.ending[run].min() for run in self.chain.may_end(stage, shape.pipeline))
            for stage, one in zip(stages, passes, strict=True)
        ]
        memory = [np.array([one.before[run] for one in passes]) + fixed for run, fixed in enumerate(each)]
        return self._weights, memory, rooms

    def least_crossing(self, num_stages: int) -> Floats:
        """[stage] -> bytes that a stage of so many holds at least of what it receives and sends, wherever it begins and
        ends: every other stage has some place of the chain."""
        shape, crossings = self.shape, self.model.crossings(self.shape)
        at_place = np.array([crossings[place].bytes for place in self.chain.places])
        arrived = np.array([row.max() for row in self._arrived])[self.chain.first_runs]
        known: dict[int, Floats] = {}
        found, spare = np.zeros(num_stages), len(at_place) - num_stages
        sent = self.chain.least_between(at_place, num_stages)
        for stage in range(num_stages):
            flights = shape.in_flight(stage)
            if flights not in known:
                known[flights] = self._arrivals.held(flights, False, arrived)
            begins, ends = slice(stage, stage + spare), slice(stage + 1, stage + 1 + spare)
            compositions = self.chain.composition_of[begins, ends]
            found[stage] = known[flights][compositions[compositions >= 0]].min(initial=np.inf)
            if stage < num_stages - 1:
                found[stage] += (flights + 1) * sent[stage]
        return found

    def bounds(
        self, stage: int, cutoff_s: float = float("inf"), step_s: float = float("inf")
    ) -> tuple[Floats, Floats, Flags]:
        """([composition] -> lower bound on the seconds per micro-batch, [composition] -> seconds once per step,
        [composition] -> whether these are the exact price).

        Infinite if the composition cannot be on that stage, if nothing fits, if it cannot be part of a closed form
        below `cutoff_s`, or if the passes of the stage alone make a step longer than `step_s`.
        """
        shape, chain = self.shape, self.chain
        in_flight = shape.flights(stage)
        seconds = fastest = self._fastest_microbatch_s
        may_stand = self._update_fits & self._balanced(cutoff_s, fastest)
        may_stand &= shape.num_microbatches * fastest <= step_s * (1 + ROUNDING)
        if stage == 0:
            may_stand &= chain.at_start
        if stage == shape.pipeline - 1:
            may_stand &= chain.at_end
        some = np.flatnonzero(may_stand)
        fits = np.zeros(len(fastest), dtype=bool)
        fits[some] = self._fits(in_flight, some)
        others = some[~fits[some]]
        if len(others):
            may_stand[others] = self._may_fit(in_flight, others)
            if shape.pipeline > 1:
                least = self._weight_bounds(in_flight, others) + self._waits[others]
                seconds = fastest.copy()
                seconds[others] = np.maximum(fastest[others], least * (1 - ROUNDING))
                may_stand &= self._balanced(cutoff_s, seconds)
        return np.where(may_stand, seconds, np.inf), np.where(may_stand, self._once_s, np.inf), fits | ~may_stand

    def _balanced(self, cutoff_s: float, seconds: Floats) -> Flags:
        """[composition] -> whether it can be part of a step below `cutoff_s`: not so long that it alone makes the step
        longer, nor so short that the other stages must. seconds: [composition] -> least seconds of a micro-batch."""
        shape, fastest = self.shape, self._fastest_microbatch_s
        more = shape.num_microbatches - 1
        if not np.isfinite(cutoff_s) or more == 0:
            return seconds <= cutoff_s * (1 + ROUNDING)
        if self._work is not None:
            longest_s = (cutoff_s - self._work.pass_s) / more
            done = self.chain.counts @ self._work.per_run
            least = self._work.whole - self._work.others_rate * longest_s
            return (seconds <= longest_s * (1 + ROUNDING)) & (done >= least - ROUNDING * self._work.whole)
        whole_s = float(self.chain.lengths @ self._least_s)
        longest_s = (cutoff_s - whole_s) / more
        shortest_s = whole_s - (shape.pipeline - 1) * longest_s
        return (seconds <= longest_s * (1 + ROUNDING)) & (fastest >= shortest_s * (1 - ROUNDING))

    def price(self, stage: int, cutoff_s: float = float("inf")) -> tuple[Floats, Floats]:
        """([composition] -> seconds per micro-batch, [composition] -> seconds once per step) of a stage at the best
        options that fit.

        Infinite where `bounds` is, and if nothing fits.
        """
        seconds, once, exact = self.bounds(stage, cutoff_s)
        for i in np.flatnonzero(~exact):
            if self.shape.pipeline > 1:
                in_time(self.chain.deadline_s)
            seconds[i] = self.exact_s(int(i), stage, cutoff_s)
            if not np.isfinite(seconds[i]):
                once[i] = np.inf
        if self.shape.pipeline == 1 and np.isfinite(seconds).any():
            seconds, once = self._single_stage(seconds)
        return seconds, once

    def exact_s(self, composition: int, stage: int, cutoff_s: float = float("inf")) -> float:
        """Seconds per micro-batch of a composition on a stage at its best options; infinite if none fit."""
        found = self._priced_one(composition, self.shape.flights(stage), cutoff_s)
        return np.inf if found is None else found[0].microbatch_s

    def _single_stage(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Prices of the only composition if there is one stage, where what is paid once per step depends on the
        options."""
        whole = int(np.flatnonzero(np.isfinite(seconds))[0])
        found = self._priced_one(whole, self.shape.flights(0), float("inf"))
        assert found is not None
        once = np.full(len(seconds), np.inf)
        seconds[whole], once[whole] = found[0].microbatch_s, found[0].once_s
        return seconds, once

    def cheapest(self, composition: int, in_flight: InFlight) -> tuple[StageCost, Choice] | None:
        """(cost, options) of a composition at its best options; None if none fit."""
        return self._priced_one(composition, in_flight, float("inf"))

    def choice(self, composition: int, in_flight: InFlight) -> Choice:
        """The options with which a composition has its price."""
        priced = self.cheapest(composition, in_flight)
        assert priced is not None
        return priced[1]

    @cached_property
    def _once_s(self) -> Floats:
        """[composition] -> seconds once per step; with several stages they do not depend on the options."""
        counts, shard = self.chain.counts, self.shape.sharded_over
        data = counts @ self.per_run(lambda costs: costs[0].once_data_s)
        tied = self._tied_elements
        known = {elements: self.model.tie_s(elements, self.shape) for elements in set(tied.tolist())}
        data += np.array([known[elements] for elements in tied.tolist()])
        trainable = counts @ self.per_run(lambda costs: costs[0].trainable_elements)
        each_s = self.model.optimizer_s(1.0, self.shape.offload_optimizer)
        seconds: Floats = data + (trainable - self._shared_elements) / shard * each_s
        return seconds

    def _priced_one(self, composition: int, in_flight: InFlight, cutoff_s: float) -> tuple[StageCost, Choice] | None:
        key = composition, in_flight
        if key not in self._priced:
            try:
                choice = self._best_choice(composition, in_flight, self._weight_cutoff(cutoff_s))
            except OutOfTimeError:
                choice = self._quick_choice(composition, in_flight)
            cost = None if choice is None else self.stage_cost(composition, choice, in_flight)
            fits = cost is not None and cost.allocated_bytes <= self.budget
            self._priced[key] = (cost, choice) if cost is not None and choice is not None and fits else None
        return self._priced[key]

    def _best_choice(self, composition: int, in_flight: InFlight, cutoff: float) -> Choice | None:
        """The options of least total weight with which a composition's layers fit, in the order of their turns; None if
        none below `cutoff` do."""
        item = self.chain.compositions[composition]
        runs = range(item.first_run, item.last_run + 1)
        if self._fits(in_flight, np.array([composition]))[0]:
            fastest = [(run, self.options[run][self._fastest[run]]) for run in runs]
            return Choice(tuple((run, option, n) for (run, option), n in zip(fastest, item.counts, strict=True)))
        passes = self._passes_of(in_flight)
        orders = [self._order(run, in_flight) for run in runs]
        rows = [
            Turns(
                count,
                self._weights[run][order],
                np.array([one.before[run][order] for one in passes]),
                np.array([one.after[run][order] for one in passes]),
                np.array([one.transient[run][order] for one in passes]),
                np.array([(one.ending if run == runs[-1] else one.joined)[run][order] for one in passes]),
            )
            for run, count, order in zip(runs, item.counts, orders, strict=True)
        ]
        rooms = np.array([room[composition] for room, _ in self._rooms(in_flight)])
        found = lightest(rows, rooms, cutoff, self._starting(composition, orders[0], passes), self.chain.deadline_s)
        if found is None:
            return None
        parts = [
            (run, self.options[run][o], int(n))
            for run, order, counts in zip(runs, orders, found.counts, strict=True)
            for o, n in zip(order, counts, strict=True)
            if n
        ]
        return Choice(tuple(parts))

    def _quick_choice(self, composition: int, in_flight: InFlight) -> Choice:
        """The options that are cheapest at the lowest price of memory at which they fit; at the highest price, if there
        is none."""
        item, held = self.chain.compositions[composition], self._passes_of(in_flight)[0].before
        runs = range(item.first_run, item.last_run + 1)
        ties = tie_prices([self._weights[run] for run in runs], [held[run] for run in runs])

        def at(price: float) -> Choice:
            cost = [self._weights[run] / (1.0 + price) + held[run] * (price / (1.0 + price)) for run in runs]
            options = [self.options[run][int(np.argmin(row))] for run, row in zip(runs, cost, strict=True)]
            return Choice(tuple(zip(runs, options, item.counts, strict=True)))

        low, high = 0, len(ties)
        while low < high:
            middle = (low + high) // 2
            price = float(ties[middle]) * (1 + ROUNDING)
            if self.stage_cost(composition, at(price), in_flight).allocated_bytes <= self.budget:
                high = middle
            else:
                low = middle + 1
        return at(float(ties[min(low, len(ties) - 1)]) * (1 + ROUNDING))

    def _rooms(self, in_flight: InFlight) -> list[tuple[Floats, Floats]]:
        """[pass] -> ([composition] -> most bytes that layers may hold, beyond parameters and optimizer state; the same
        if the first layer takes its fastest option). The option of a stage's first layer decides how much the stage
        holds of what arrives."""
        if in_flight not in self._known_rooms:
            most = np.array([row.max() for row in self._arrived])
            fastest = np.array([row[o] for row, o in zip(self._arrived, self._fastest, strict=True)])
            found = []
            for one in self._passes_of(in_flight):
                moment = one.moment
                sent = np.array([sent_bytes(cut, moment.flights) for cut in self._sends])[self.chain.last_runs]
                room = self._free - sent + self._shared_elements * moment.shared(self._state)
                first = self.chain.first_runs
                held = (self._arrivals.held(moment.flights, moment.sends, row[first]) for row in (most, fastest))
                least, usual = held
                found.append((room - least, room - usual))
            self._known_rooms[in_flight] = found
        return self._known_rooms[in_flight]

    @cached_property
    def _free(self) -> Floats:
        """[composition] -> bytes left for everything except parameters, optimizer state, buffers and the samples of a
        step."""
        state = self._state
        free: Floats = self.budget - self._held_bytes - self.chain.counts @ self._state_bytes(state.optimizer)
        return free

    def _state_bytes(self, trainable_bytes: float) -> Floats:
        """[run] -> bytes of a layer's parameters, plus `trainable_bytes` for each trainable element."""
        parameter_bytes = self._state.sharded_parameters
        return self.per_run(lambda c: c[0].elements * parameter_bytes + c[0].trainable_elements * trainable_bytes)

    def _passes_of(self, in_flight: InFlight) -> "list[_Pass]":
        """Bytes of every option of every run, in each of the passes that may hold most."""
        if in_flight not in self._passes:
            self._passes[in_flight] = [
                _Pass.of(moment, self.costs) for moment in moments_of(self.shape, self._state, in_flight)
            ]
        return self._passes[in_flight]

    def _order(self, run: int, in_flight: InFlight) -> list[int]:
        """Options of a run in the order in which its layers take them, so that the peak is lowest. Options with the
        largest transients come first, because their backward runs last, when least is kept. Before these come options
        that hold more after their turn than before it, those with the lowest peak first."""
        passes = self._passes_of(in_flight)
        rise = passes[0].before[run] - passes[0].after[run]
        most = np.max([one.transient[run] for one in passes], axis=0)
        return sorted(
            range(len(rise)), key=lambda o: (0, float(rise[o] + most[o])) if rise[o] < 0 else (1, -float(most[o]))
        )

    def _holds(self, in_flight: InFlight, some: Ints, fastest: bool) -> Flags:
        """[of these compositions] -> whether it fits with the fastest option of each run; if not `fastest`, with the
        least of every item over all options."""

        def picked(rows: list[Floats]) -> Floats:
            if fastest:
                return np.array([row[option] for row, option in zip(rows, self._fastest, strict=True)])
            return np.array(of_each(rows, np.min))

        fits = np.ones(len(some), dtype=bool)
        is_last = np.arange(len(self.costs)) == self.chain.last_runs[some][:, None]
        for one, rooms in zip(self._passes_of(in_flight), self._rooms(in_flight), strict=True):
            all_rows = one.before, one.after, one.transient, one.joined, one.ending
            before, after, transient, joined, ending = map(picked, all_rows)
            at_end = np.where(is_last, ending, joined)  # the stage's last layer has none after it
            _, most = running(before, after, transient, at_end, self.chain.counts[some])
            fits &= most.max(axis=1) <= rooms[fastest][some]
        return fits

    def _fits(self, in_flight: InFlight, some: Ints) -> Flags:
        """[of these compositions] -> whether it fits with the fastest option of each run."""
        if in_flight not in self._known_fits:
            known = np.full(len(self.chain.compositions), _UNKNOWN)
            for other, fitting in self._known_fits.items():  # fewer micro-batches hold no more
                if other[1:] == in_flight[1:]:
                    known[fitting == int(other > in_flight)] = int(other > in_flight)
            self._known_fits[in_flight] = known
        known = self._known_fits[in_flight]
        fresh = some[known[some] == _UNKNOWN]
        if len(fresh):
            known[fresh] = self._holds(in_flight, fresh, fastest=True)
        fits: Flags = known[some] == 1
        return fits

    def _may_fit(self, in_flight: InFlight, some: Ints) -> Flags:
        """[of these compositions] -> False if it does not fit even with the least of every item over all options."""
        return self._holds(in_flight, some, fastest=False)

    @cached_property
    def _update_fits(self) -> Flags:
        """[composition] -> whether the optimizer's step fits, when activations are gone; the options do not matter for
        it."""
        counts, state = self.chain.counts, self._state
        trainable_bytes = state.sharded_gradients + state.optimizer
        root = counts @ self.per_run(lambda costs: costs[0].root_end_bytes)
        root -= self._shared_elements * state.root_end
        temporary = self.per_run(lambda costs: costs[0].trainable_elements) * state.optimizer_temporaries
        total: Floats = counts @ self._state_bytes(trainable_bytes) + self._held_bytes
        total -= self._shared_elements * (state.sharded_parameters + trainable_bytes)
        total += np.maximum(root, counts @ temporary - self._shared_elements * state.optimizer_temporaries)
        return total <= self.budget

    @cached_property
    def _shared_elements(self) -> Floats:
        """[composition] -> parameter elements that several of its layers share, and that would otherwise be counted
        more than once."""
        found = np.zeros(len(self.chain.compositions))
        for runs, elements in self._shared_by_runs:
            found += elements * np.maximum(0.0, self.chain.counts[:, runs].sum(axis=1) - 1.0)
        return found

    @cached_property
    def _tied_elements(self) -> Floats:
        """[composition] -> parameter elements of which other stages hold copies."""
        found = np.zeros(len(self.chain.compositions))
        for runs, elements in self._shared_by_runs:
            here = self.chain.counts[:, runs].sum(axis=1)
            found += elements * ((here > 0) & (here < sum(self.chain.runs[run].length for run in runs)))
        return found

    @cached_property
    def _shared_by_runs(self) -> list[tuple[list[int], float]]:
        run_of = self.chain.run_of
        return [
            (sorted({int(run_of[layer]) for layer in layers}), elements)
            for layers, elements in self.chain.shared_weights(self.shape)
        ]

    def arriving_bytes(self, composition: int, flights: int) -> Floats:
        """[option of the composition's first layer] -> bytes that a stage holds of tensors from earlier stages."""
        arrived = self._arrived[self.chain.compositions[composition].first_run]
        return self._arrivals.at(composition).held(flights, False, arrived)

    def _starting(self, composition: int, order: list[int], passes: "list[_Pass]") -> Floats:
        """[pass][option, in this order] -> bytes of arriving tensors that the stage holds beyond the least, if its
        first layer takes the option."""
        arrivals = self._arrivals.at(composition)
        arrived = self._arrived[self.chain.compositions[composition].first_run][order]
        held = np.array([arrivals.held(one.moment.flights, one.moment.sends, arrived) for one in passes])
        starting: Floats = held - held.min(axis=1, keepdims=True)
        return starting

    def _weight_cutoff(self, cutoff_s: float) -> float:
        """Total weight above which one stage alone makes a step longer than `cutoff_s`. (Shared weights are updated
        once, but are counted with every layer that reads them.)"""
        if self.shape.pipeline > 1:
            return float("inf")
        return cutoff_s + sum(
            (len(layers) - 1) * self.model.optimizer_s(elements / self.shape.sharded_over, self.shape.offload_optimizer)
            for layers, elements in self.chain.shared_weights(self.shape)
        )


@dataclass(frozen=True)
class _Pass:
    """Bytes that options hold in one pass: [run] -> [option]. transient: of a layer followed by one of its own run;
    joined: of one followed by the first of the next run; ending: of one followed by none."""

    moment: Moment
    before: list[Floats]
    after: list[Floats]
    transient: list[Floats]
    joined: list[Floats]
    ending: list[Floats]

    @classmethod
    def of(cls, moment: Moment, costs: list[list[LayerCost]]) -> "_Pass":
        """What options hold in the pass at this moment."""
        joined: dict[tuple[int, int], Floats] = {}
        pairs = list(zip(costs, [*(row[0] for row in costs[1:]), None], strict=True))
        for row, following in pairs:
            if (id(row), id(following)) not in joined:
                joined[id(row), id(following)] = np.array([moment.transient(cost, following) for cost in row])
        return cls(
            moment,
            of_each(costs, lambda row: np.array([moment.before(cost) for cost in row])),
            of_each(costs, lambda row: np.array([moment.after(cost) for cost in row])),
            of_each(costs, lambda row: np.array([moment.transient(cost, cost) for cost in row])),
            [joined[id(row), id(following)] for row, following in pairs],
            of_each(costs, lambda row: np.array([moment.transient(cost, None) for cost in row])),
        )
