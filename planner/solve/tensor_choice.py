"""Which of the cuts that were found tensor parallelism applies: an integer program over the ways of a model's modules.

    minimise    sum_w seconds_w x_w + sum_e seconds_e y_e
    subject to  (module)  sum_{w that cut module n} x_w <= 1       each module n that several ways would cut
                (some)    sum_w x_w >= 1                           unless layers on slices need cuts anyway
                (entry)   y_e >= x_w                               each tensor e that columns of way w read

x_w in {0, 1}: modules of way w are cut (columns and the row after them, a vocabulary, ...), not left whole; seconds_w:
what that adds to a step, less than 0 where it saves more compute than its collectives take. y_e: the collective where
tensor e enters columns, one for all of them. Left whole, modules run on every rank (under sequence parallelism each on
its slice). Ways whose weights are tied stand or fall together, and count as one. Layouts change only where modules
begin and end: within a way as it was tried on fake tensors, between ways tensors are alike (or slices) on all ranks.

What nothing couples is decided by its sign, so that the solver sees the rest only; that is exact.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import pulp

from ...profiler.model.model_profile import Costs, ModelProfile
from ..arrays import Floats
from ..cost.comm_cost import CollectiveKind, RingTimes, collective_s, ring_rates, ring_s
from ..cost.kinds import Kind
from ..cost.layer_cost import CostModel
from ..plan.legality import chosen_cuts, runs_on_slices
from ..plan.shape import Cuts, Shape
from .solver import solve

MS = 1e3

WORTH = 0.01
"""Share of the time of all layers that a choice has to save; if it saves less, whole weights are not worth their
memory."""

MOST_SOLVER_S = 10.0


CutOf = tuple[int, int]
"""(index of the class, index of its cut)."""


@dataclass(frozen=True)
class Way:
    """Modules that are cut together, or left whole. seconds: what cutting them adds to a step, without entries.
    modules: those that no other way may cut at the same time. entries: (tensor that its columns read, seconds of its
    collective); ways that read one tensor share the collective."""

    seconds: float
    modules: frozenset[str] = frozenset()
    entries: tuple[tuple[str, float], ...] = ()


def best_ways(ways: Sequence[Way], some: bool) -> tuple[frozenset[int], float]:
    """(indices of the ways to cut, seconds that they add to a step) with the least seconds. some: at least one way must
    be cut."""
    taken: set[int] = set()
    unclear = [i for i, way in enumerate(ways) if way.seconds < 0.0]
    for i in list(unclear):
        others = [ways[j] for j in unclear if j != i]
        alone = not any(ways[i].modules & other.modules for other in others)
        if alone and ways[i].seconds + sum(seconds for _, seconds in ways[i].entries) < 0.0:
            taken.add(i)
    unclear = [i for i in unclear if i not in taken and _may_pay(ways, unclear, i)]
    if unclear:
        taken |= _solved(ways, frozenset(taken), unclear, some=False)
    if some and ways and not taken:
        taken = _solved(ways, frozenset(), range(len(ways)), some)
    return frozenset(taken), added_s(ways, taken)


def _may_pay(ways: Sequence[Way], unclear: Sequence[int], index: int) -> bool:
    """Whether cutting a way could save time if all entries that others might share were free."""
    shared = {name for i in unclear if i != index for name, _ in ways[i].entries}
    return ways[index].seconds + sum(seconds for name, seconds in ways[index].entries if name not in shared) < 0.0


def added_s(ways: Sequence[Way], taken: frozenset[int] | set[int]) -> float:
    """Seconds that cutting these ways adds to a step."""
    entries = dict(entry for i in taken for entry in ways[i].entries)
    return sum(ways[i].seconds for i in taken) + sum(entries.values())


def _solved(ways: Sequence[Way], taken: frozenset[int], unclear: Sequence[int], some: bool) -> set[int]:
    problem = pulp.LpProblem("cuts", pulp.LpMinimize)
    x = {i: problem.add_variable(f"x_{i}", cat="Binary") for i in unclear}
    paid = {name for i in taken for name, _ in ways[i].entries}
    entries = {name: seconds for i in unclear for name, seconds in ways[i].entries if name not in paid}
    y = {name: problem.add_variable(f"y_{k}", lowBound=0, upBound=1) for k, name in enumerate(entries)}
    for module in {module for i in unclear for module in ways[i].modules}:
        users = [x[i] for i in unclear if module in ways[i].modules]
        if len(users) > 1:
            problem += pulp.lpSum(users) <= 1
    for i in unclear:
        for name, _ in ways[i].entries:
            if name in y:
                problem += y[name] >= x[i]
    if some:
        problem += pulp.lpSum(x.values()) >= 1
    costs = [MS * ways[i].seconds * x[i] for i in unclear] + [MS * entries[name] * y[name] for name in y]
    problem.setObjective(pulp.lpSum(costs))
    solve(problem, MOST_SOLVER_S)
    return {i for i in unclear if float(x[i].varValue or 0.0) > 0.5}


class CutChoice:
    """Chooses cuts for one model, cluster and job; keeps what micro-batches of one size share."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._tables: dict[tuple[int, bool, float], list[_CutTable]] = {}
        self._places: dict[int, _Places] = {}
        self._tied: dict[tuple[CutOf, ...], list[list[CutOf]]] = {}
        self._kinds: dict[int, Kind] = {}
        self._counts: Counter[int] = Counter(kind.layer_class for kind in model.kinds)
        for kind in model.kinds:
            self._kinds.setdefault(kind.layer_class, kind)

    def worth_trying(self, shape: Shape) -> tuple[Cuts, ...]:
        """The cuts that make the layers fastest, for each place of tensor ranks on the hosts, neighbours first, if
        leaving the other cuts whole is worth it. Empty if it is best to cut all that the degree divides."""
        if shape.tensor == 1:
            return ()
        key = shape.tensor, shape.sequence, shape.samples
        if key not in self._tables:
            self._tables[key] = self._tables_of(shape)
        found = dict.fromkeys(self._fastest(shape, table) for table in self._tables[key])
        return tuple(cuts for cuts in found if cuts is not None)

    def _fastest(self, shape: Shape, table: "_CutTable") -> Cuts | None:
        """The cuts with the least time, None if these are all. Time is compute, traffic between tensor ranks in one
        place, and the optimizer sharded over all data ranks, as in the bound of a shape's family."""
        ways = table.ways(shape.num_microbatches, shape.data, shape.offload_optimizer)
        taken, seconds = best_ways(ways, some=not table.fixed)
        if len(taken) == len(ways):
            return None
        saved = added_s(ways, frozenset(range(len(ways)))) - seconds
        return table.cuts(taken) if saved > WORTH * shape.num_microbatches * table.all_cut_s else None

    def _tables_of(self, shape: Shape) -> "list[_CutTable]":
        """What each way of this shape's layers adds, for each place of tensor ranks; only places with something to
        choose."""
        if shape.tensor not in self._places:
            self._places[shape.tensor] = _Places(self.model, shape.tensor)
        every, places = replace(shape, cuts=None), self._places[shape.tensor]
        parts: dict[CutOf, _CutCost] = {}
        fixed: set[CutOf] = set()
        all_cut_s = np.zeros(len(places.links))
        for index in self._kinds:
            layer_class = self.model.profile.classes[index]
            legal = chosen_cuts(layer_class, every)
            slices = shape.sequence and layer_class.sequence is not None
            all_cut_s += self._counts[index] * self._seconds(index, every, places)
            for i in legal:
                left = tuple(j for j in legal if j != i) if slices else ()
                if slices and not (left and runs_on_slices(layer_class, left)):
                    fixed.add((index, i))
                else:
                    parts[index, i] = self._part(index, i, left, every, places)
        groups = []
        cuts = *parts, *sorted(fixed)
        if cuts not in self._tied:
            self._tied[cuts] = tied_cuts(self.model.profile, cuts)
        for group in self._tied[cuts]:
            if fixed.intersection(group):
                fixed.update(group)
            else:
                groups.append(group)
        # Cut weights never make a step's end longer, so no choice saves more than all that costs micro-batches time.
        most = np.zeros(len(places.links))
        for group in groups:
            most += np.maximum(0.0, sum(parts[cut].most_s for cut in group))
        return [
            _CutTable(groups, parts, tuple(sorted(fixed)), self.model, float(all_cut_s[place]), place)
            for place in np.flatnonzero(most > WORTH * all_cut_s).tolist()
        ]

    def _seconds(self, index: int, shape: Shape, places: "_Places", without_entries: bool = False) -> Floats:
        """[place] -> seconds of compute and collectives of a layer for one micro-batch, forward and backward."""
        kind = self._kinds[index]
        computed = self.model.compute(kind, shape)
        total = np.full(len(places.links), computed.forward + computed.backward)
        for entry, seconds in self._collectives_s(self.model.mode(kind, shape)[1], shape, places):
            if not (entry and without_entries):
                total += seconds
        return total

    def _part(self, index: int, cut: int, left: tuple[int, ...], shape: Shape, places: "_Places") -> "_CutCost":
        """What one cut adds to the layers of a class: beside other cuts, if layers are on slices; else alone."""
        layer_class, kind, count = self.model.profile.classes[index], self._kinds[index], self._counts[index]
        own = layer_class.cuts[cut]
        beside = tuple(layer_class.cuts[i].name for i in left)
        with_it = replace(shape, cuts=Cuts(((layer_class.name, (*beside, own.name)),)))
        without = replace(shape, cuts=Cuts(((layer_class.name, beside),)))
        entries: dict[str, Floats] = {}
        for entry, seconds in self._collectives_s(self.model.mode(kind, with_it)[1], with_it, places):
            if entry in own.inputs.values() or (entry and entry == own.gather):
                name = f"{index}:{entry}"
                entries[name] = entries.get(name, 0.0) + count * seconds
        model = self.model
        once_s = model.whole_gradients_s(kind, with_it) - model.whole_gradients_s(kind, without)
        return _CutCost(
            seconds=count * (self._seconds(index, with_it, places, True) - self._seconds(index, without, places, True)),
            once_s=count * once_s,
            elements=count * (model.elements(kind, with_it)[1] - model.elements(kind, without)[1]),
            modules=frozenset(f"{index}:{name}" for name in (*own.columns, *own.rows)),
            entries=tuple(entries.items()),
        )

    def _collectives_s(self, costs: Costs, shape: Shape, places: "_Places") -> list[tuple[str, Floats]]:
        """(name of the tensor that enters, [place] -> exposed seconds) of each collective of a layer."""
        usual, gathered = self.model.training.compute_bytes, self.model.gathered_bytes
        sizes = {c.kind: gathered if c.kind == "all_gather" else usual for c in costs.collectives}
        return [
            (c.entry, places.shown * places.seconds(c.kind, c.tensor.at(shape.samples, sizes[c.kind], shape.tensor)))
            for c in costs.collectives
        ]


class _Places:
    """Links of tensor groups of one size, in each place that they can take. shown: [place] -> share of a collective
    that compute does not hide."""

    def __init__(self, model: CostModel, size: int) -> None:
        self.links = [model.links(size, stride) for stride in model.places(size)]
        self.shown = np.array([1.0 - model.hidden_tensor(links) for links in self.links])
        self._rates: dict[CollectiveKind, RingTimes[Floats]] = {}

    def seconds(self, kind: CollectiveKind, num_bytes: float) -> Floats:
        """[place] -> seconds of a collective."""
        if kind in ("p2p", "all_to_all"):
            return np.array([collective_s(kind, num_bytes, links) for links in self.links])
        if kind not in self._rates:
            self._rates[kind] = RingTimes(*np.array([astuple(ring_rates(kind, links)) for links in self.links]).T)
        return ring_s(np.full(len(self.links), num_bytes), self._rates[kind])


@dataclass(frozen=True)
class _CutCost:
    """What one cut adds: [place] -> seconds of all layers of its class for one micro-batch, and of its entries; and
    seconds and elements once per step."""

    seconds: Floats
    once_s: float
    elements: float
    modules: frozenset[str]
    entries: tuple[tuple[str, Floats], ...]

    @property
    def most_s(self) -> Floats:
        """[place] -> seconds for one micro-batch, with all of its entries."""
        return sum((seconds for _, seconds in self.entries), self.seconds)


@dataclass(frozen=True)
class _CutTable:
    """Groups of tied cuts, what each cut adds, and the cuts without a choice. all_cut_s: seconds of all layers for one
    micro-batch with everything cut, and tensor ranks in `place`."""

    groups: list[list[CutOf]]
    parts: dict[CutOf, _CutCost]
    fixed: tuple[CutOf, ...]
    model: CostModel
    all_cut_s: float
    place: int

    def ways(self, num_microbatches: int, data: int, on_host: bool) -> list[Way]:
        """The groups as ways, with what they add to a step of so many micro-batches."""
        ways = []
        for group in self.groups:
            parts = [self.parts[member] for member in group]
            elements = sum(part.elements for part in parts)
            update_s = self.model.optimizer_s(abs(elements) / data, on_host) * (1.0 if elements > 0.0 else -1.0)
            ways.append(
                Way(
                    seconds=num_microbatches * sum(float(part.seconds[self.place]) for part in parts)
                    + sum(part.once_s for part in parts)
                    + update_s,
                    modules=frozenset().union(*(part.modules for part in parts)),
                    entries=tuple(
                        (name, num_microbatches * float(s[self.place])) for part in parts for name, s in part.entries
                    ),
                )
            )
        return ways

    def cuts(self, taken: frozenset[int]) -> Cuts:
        """The chosen cuts by name."""
        chosen = sorted([*self.fixed, *(member for i in taken for member in self.groups[i])])
        names: dict[str, list[str]] = {}
        for index, cut in chosen:
            layer_class = self.model.profile.classes[index]
            names.setdefault(layer_class.name, []).append(layer_class.cuts[cut].name)
        return Cuts(tuple((name, tuple(cuts)) for name, cuts in names.items()))


def tied_cuts(profile: ModelProfile, cuts: Sequence[CutOf]) -> list[list[CutOf]]:
    """Groups of cuts that divide the same parameters, under one name or several."""
    names: dict[CutOf, set[str]] = {cut: set() for cut in cuts}
    first_of = {name: group[0] for group in profile.ties for name in group}
    for layer in profile.layers:
        prefix = f"{layer.root}." if layer.root else ""
        for i, cut in enumerate(profile.classes[layer.layer_class].cuts):
            if (layer.layer_class, i) in names:
                full = {prefix + name for name in cut.sharded}
                names[layer.layer_class, i] |= {first_of.get(name, name) for name in full}
    groups: list[tuple[list[CutOf], set[str]]] = []
    for member, own in names.items():
        same = [group for group in groups if group[1] & own]
        groups = [group for group in groups if group not in same]
        groups.append(
            ([*(c for members, _ in same for c in members), member], own.union(*(found for _, found in same)))
        )
    return [sorted(members) for members, _ in groups]
