"""Exact multiple-choice knapsack over groups of equal items: the packing of least weight that fits in memory.

Each of a group's `count` items takes one of its options. Giving memory a price lambda yields a lower bound,

    L(lambda) = sum_g count_g min_o (weight_o + lambda memory_o) - lambda room  <=  optimum,

and rounding the best such relaxation yields a solution. An option that costs d_o more than its group's cheapest at that
price can be taken by at most (solution - L) / d_o items (Lagrangian reduced costs: Geoffrion 1974). That leaves few
combinations, and all of them are tried.
"""

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..arrays import Flags, Floats, Ints
from .solver import OutOfTimeError

FIRST_STEP = 64
"""What is not proven yet is divided by this to give the first limit up to which packings are looked through; then the
limit is doubled, and so on. The nearer it is to the bound the fewer packings there are, whatever the number of options.
(With turns the first step is the widest choice divided by the square of this.)"""

FURTHER = 4
"""Factor from one step to the next with turns, where bounds leave few packings in a step."""

FEW = 200_000
"""Most combinations that are looked through at once."""

SMALL = 4096
"""Most combinations of a row among which those that others beat are always left out. Of more they are only left out if
they are multiplied by those of other rows: of 24 layers with 8 options 720,000 are looked through in a second or two,
but comparing them with each other takes minutes."""

BLOCK = 64
"""Combinations that are compared with all others at once: with 20,000 combinations that is five times as fast as one by
one (measured; from 16 to 1,024 the same within a fifth)."""

FALLING = 0.9
"""Combinations are compared with the one before them again, as long as that leaves fewer than this share of them: what
is looked through for Zamba on 64 GPUs took 1.5 instead of 4.1 s, with 0.8 and 0.95 as well."""

_LATER = np.triu(np.ones((BLOCK, BLOCK), dtype=np.bool_), 1)
"""[one of a block][other of the block] -> whether the other comes later."""

SLACK = 1e-12
"""Relative difference up to which sums count as equal, whatever the order of addition."""


def in_time(deadline_s: float) -> None:
    """Raise OutOfTimeError if time.monotonic() has passed the deadline."""
    if time.monotonic() > deadline_s:
        raise OutOfTimeError("time is over before the best options are found; give it longer with --time-limit")


@dataclass(frozen=True)
class ItemGroup:
    """`count` equal items: weights and memory of each option."""

    count: int
    weights: Floats
    memory: Floats

    @cached_property
    def options(self) -> tuple[bytes, bytes]:
        """Key that is equal for items with the same options."""
        return self.weights.tobytes(), self.memory.tobytes()


@dataclass(frozen=True)
class Packing:
    """A solution: total weight, and for each group how many items take which option."""

    weight: float
    counts: tuple[Ints, ...]


@dataclass(frozen=True)
class Turns:
    """`count` equal items in a row that take their options in the order given, with what they hold in each of several
    passes over all items: [pass][option] -> bytes before an item's turn, after it, and during it beyond what it held
    before (ending: during it, if it is the last of them)."""

    count: int
    weights: Floats
    before: Floats
    after: Floats
    transient: Floats
    ending: Floats

    def of(self, options: slice) -> "Turns":
        """These items with only some of their options."""
        return Turns(
            self.count,
            self.weights[options],
            self.before[:, options],
            self.after[:, options],
            self.transient[:, options],
            self.ending[:, options],
        )


@dataclass(frozen=True)
class _Tail:
    """Options of a row from one option on, at several prices of memory. each: least price of an item with these
    options; others: least price of all other rows, less that of the room."""

    prices: Floats
    each: Floats
    others: Floats

    def light(self, limit: float, table: Ints, group: ItemGroup, left: Ints, option: int) -> tuple[Ints, Ints, float]:
        """([combination] -> least and most of `left` items that may take the option before these for the packing to
        weigh `limit` at most; what packings with fewer or more of them weigh at least)."""
        weight, memory = table @ group.weights, table @ group.memory
        each = group.weights[option] + self.prices * group.memory[option] - self.each
        none = weight[:, None] + left[:, None] * self.each + memory[:, None] * self.prices + self.others
        fewest, most = _meeting(left, *zip(each, (limit - none).T, strict=True))
        outside = np.column_stack((fewest - 1, most + 1))
        weighs = (none[:, None, :] + outside[:, :, None] * each).max(axis=2)
        there = (outside >= 0) & (outside <= left[:, None])
        return fewest, most, float(weighs[there].min(initial=math.inf))


@dataclass(frozen=True)
class _PackingCase:
    """Rows to pack, of which the last has a single item with a single option, and what is known of their packings in
    advance.

    rooms: [pass]. starting: [pass][option] -> bytes held throughout if the very first item takes the option. A single
    turn, that of the last item of a row in one pass, is a knapsack of `groups` and `room`. It gives the lower bound
    `bound` on the weight, at the `price` of memory at which that is highest.
    """

    rows: list[Turns]
    rooms: Floats
    starting: Floats
    groups: list[ItemGroup]
    room: float
    price: float
    bound: float

    @classmethod
    def of(
        cls, rows: list[Turns], rooms: Floats, starting: Floats, turn: tuple[int, int] | None = None
    ) -> "_PackingCase":
        """The case of these rows, bounded by the turn (row, pass) of the last item of a row; without `turn` by that of
        the very last item in the first pass."""
        place, number = turn or (len(rows) - 1, 0)
        groups = [
            ItemGroup(row.count, row.weights, (row.before if i <= place else row.after)[number])
            for i, row in enumerate(rows)
        ]
        room = float(rooms[number] - rows[place].ending[number].min() - starting[number].min())
        return cls(rows, rooms, starting, groups, room, *_best_price(groups, room))

    @cached_property
    def tails(self) -> list[list[_Tail]]:
        """[row][option but the last] -> the options after it, at their prices."""
        known: dict[tuple[int, tuple[bytes, bytes]], list[_Tail]] = {}
        for row, group in enumerate(self.groups):
            if (group.count, group.options) not in known:
                tails = [self._tail(row, option + 1) for option in range(len(group.weights) - 1)]
                known[group.count, group.options] = tails
        return [known[group.count, group.options] for group in self.groups]

    @cached_property
    def alone(self) -> list[Floats]:
        """[row of one item][option] -> lower bound on the weight of packings in which the item takes the option."""
        known: dict[tuple[bytes, bytes], Floats] = {}
        for row, group in enumerate(self.groups):
            if group.count == 1 and group.options not in known:
                prices = np.concatenate((tie_prices([group.weights], [group.memory]), [self.price]))
                others = self.others(row, prices)
                priced = group.weights[:, None] + prices * group.memory[:, None]
                known[group.options] = (priced + others).max(axis=1)
        return [known.get(group.options, np.zeros(0)) for group in self.groups]

    def _tail(self, row: int, first: int) -> _Tail:
        weights, memory = self.groups[row].weights[first:], self.groups[row].memory[first:]
        prices = tie_prices([weights], [memory])
        costs = weights[:, None] + prices * memory[:, None]
        if len(weights) > 1:  # a bound is the most where the two cheapest tie
            least, second = np.partition(costs, 1, axis=0)[:2]
            prices = prices[second - least <= SLACK * np.maximum(1.0, np.abs(second))]
        prices = np.concatenate((prices, [self.price]))
        least = np.min(weights[:, None] + prices * memory[:, None], axis=0)
        return _Tail(prices, least, self.others(row, prices))

    def others(self, row: int, prices: Floats) -> Floats:
        """[price of memory] -> least price of all rows but this one, less that of the room."""
        found: Floats = -prices * self.room
        for kind in self.kinds:
            count = kind.count - (self.groups[row].count if kind.options == self.groups[row].options else 0)
            found += count * np.min(kind.weights[:, None] + prices * kind.memory[:, None], axis=0)
        return found

    @cached_property
    def kinds(self) -> list[ItemGroup]:
        """The groups, with all groups that have the same options joined into one."""
        found: dict[tuple[bytes, bytes], ItemGroup] = {}
        for group in self.groups:
            known = found.get(group.options)
            found[group.options] = replace(group, count=group.count + (known.count if known else 0))
        return list(found.values())

    @cached_property
    def later(self) -> Floats:
        """[row][pass] -> lower bound on the bytes that the row and all rows after it hold after their turns."""
        least = np.array([row.count * row.after.min(axis=1) for row in self.rows])
        return np.concatenate((np.cumsum(least[::-1], axis=0)[::-1], np.zeros((1, len(self.rooms)))))

    @cached_property
    def earlier(self) -> Floats:
        """[row][pass] -> lower bound on the bytes that all rows before it hold before their turns."""
        least = np.array([row.count * row.before.min(axis=1) for row in self.rows])
        return np.concatenate((np.zeros((1, len(self.rooms))), np.cumsum(least, axis=0)))


def lightest(
    rows: list[Turns], rooms: Floats, cutoff: float, starting: Floats, deadline_s: float = math.inf
) -> Packing | None:
    """The packing of least weight below `cutoff` that at no turn in any pass holds more than that pass's room; None if
    there is none.

    Each option of the very last item is a case of its own, the most promising first. starting: [pass][option] -> bytes
    held throughout if the very first item takes the option. Raises OutOfTimeError at the deadline.
    """
    last = rows[-1]
    cases = []
    for option in range(len(last.weights)):
        # in their order, so none after this one
        fixed = replace(last.of(slice(option, option + 1)), count=1)
        others = replace(last.of(slice(0, option + 1)), count=last.count - 1, ending=last.transient[:, : option + 1])
        those = [*rows[:-1], *([others] if last.count > 1 else []), fixed]
        begins = starting[:, option : option + 1] if len(those) == 1 else starting
        cases.append((_PackingCase.of(those, rooms, begins), option))
    best: tuple[Packing, int] | None = None
    for case, option in sorted(cases, key=lambda one: one[0].bound):
        limit = best[0].weight if best else cutoff
        if case.bound >= limit:
            break
        found = _lightest_of_case(case, limit, deadline_s)
        if found is not None:
            best = found, option
    if best is None:
        return None
    packing, option = best
    counts = np.zeros(len(last.weights), dtype=np.int64)
    counts[option] = 1
    if last.count > 1:
        counts[: option + 1] += packing.counts[len(rows) - 1]
    return Packing(packing.weight, (*packing.counts[: len(rows) - 1], counts))


def _lightest_of_case(case: _PackingCase, cutoff: float, deadline_s: float) -> Packing | None:
    """The packing of a case that is lightest and below `cutoff`.

    First a single turn is held to its room. That gives a lower bound; if its packing fits in all turns, it is the best.
    Else the turn in which it lacks most room may give a higher bound. Then all packings up to a little above the bound
    are looked through, and further and further above it, until one fits: that is the best, as all lighter ones were
    looked through.
    """
    least = -math.inf
    while True:
        relaxed = least_weight(case.groups, case.room, cutoff, deadline_s)
        if relaxed is None:
            return None
        turn = _fullest_turn(case, relaxed)
        if turn is None:
            return relaxed
        least = max(least, relaxed.weight)
        other = _PackingCase.of(case.rows, case.rooms, case.starting, turn)
        if other.bound <= case.bound:
            break
        case = other
    heaviest = sum(group.count * float(group.weights.max()) for group in case.groups)
    heaviest = min(cutoff, heaviest + SLACK * max(1.0, heaviest))
    widest = max(float(group.weights.max() - group.weights.min()) for group in case.groups)
    step = max(least - case.bound, SLACK * heaviest, widest / FIRST_STEP**2) or heaviest
    while least < heaviest:
        limit = min(least + step, heaviest)
        found, least = _lightest_in_turns(case, limit, deadline_s)
        if found is not None:
            return found
        step *= FURTHER
    return None


def _fullest_turn(case: _PackingCase, packing: Packing) -> tuple[int, int] | None:
    """(row, pass) of the turn at which a packing exceeds its room most; None if it fits."""
    first = int(np.argmax(packing.counts[0] > 0))
    before = case.starting[:, first]
    own = np.array([row.after @ counts for row, counts in zip(case.rows, packing.counts, strict=True)])
    later = own[::-1].cumsum(axis=0)[::-1] - own
    lacking = []
    for row, counts, after in zip(case.rows, packing.counts, later, strict=True):
        lacking.append(before + _most_inside(counts[None, :], row)[0] + after - case.rooms)
        before = before + row.before @ counts
    place, number = np.unravel_index(np.argmax(lacking), (len(case.rows), len(case.rooms)))
    return (int(place), int(number)) if lacking[place][number] > 0 else None


def _lightest_in_turns(case: _PackingCase, limit: float, deadline_s: float) -> tuple[Packing | None, float]:
    """(The packing of least weight below `limit` that in no pass and at no turn holds more than that pass's room, or
    None; what any weighs at least, at least `limit` if there is none.)

    While an item has its turn, those up to it hold `before`, those after it `after`. The price of memory at the last
    turn of the first pass bounds how far from the cheapest option any item may be.
    """
    rows, rooms, gap = case.rows, case.rooms, limit - case.bound
    tables: dict[int, Ints] = {}
    for i in sorted(range(len(rows)), key=lambda i: -rows[i].count):
        in_time(deadline_s)
        tables[i], least = _counts_in_turns(case, i, limit)
        if not len(tables[i]):
            return None, max(limit, least)
    for i in sorted(tables, key=lambda i: len(tables[i])):
        with_others = math.prod(map(len, tables.values()))
        if len(tables[i]) <= SMALL or FEW < with_others > len(tables[i]):
            tables[i] = tables[i][_unbeaten_of_row(case, i, tables[i], deadline_s)]
    weight, excess = np.zeros(1), np.zeros(1)
    before, most = np.zeros((1, len(rooms))), np.full((1, len(rooms)), -np.inf)
    chosen: list[tuple[Ints, Ints]] = []
    for i, (row, group) in enumerate(zip(rows, case.groups, strict=True)):
        in_time(deadline_s)
        table = tables[i]
        weights = (weight[:, None] + (table @ row.weights)[None, :]).ravel()
        excesses = (excess[:, None] + (table @ _reduced(group, case.price))[None, :]).ravel()
        if i == 0:
            before = case.starting[:, np.argmax(table > 0, axis=1)].T
        inner = _most_inside(table, row)
        base = before[None, :, :] if i == 0 else before[:, None, :]
        mosts = np.maximum(most[:, None, :] + (table @ row.after.T)[None, :, :], base + inner[None, :, :])
        mosts = mosts.reshape(-1, len(rooms))
        befores = (base + (table @ row.before.T)[None, :, :]).reshape(-1, len(rooms))
        inside = np.flatnonzero(
            (mosts + case.later[i + 1] <= rooms).all(axis=1) & (excesses <= gap) & (weights < limit)
        )
        if not len(inside):
            return None, limit
        keep = inside
        if i + 1 == len(rows):
            keep = inside[[np.argmin(weights[inside])]]
        elif len(inside) * math.prod(len(tables[later]) for later in range(i + 1, len(rows))) > FEW:
            keep = inside[_unbeaten(np.column_stack([weights[inside], befores[inside], mosts[inside]]), deadline_s)]
        chosen.append((keep // len(table), keep % len(table)))
        weight, excess, before, most = weights[keep], excesses[keep], befores[keep], mosts[keep]
    return _traced([tables[i] for i in range(len(rows))], chosen, weight), limit


def _counts_in_turns(case: _PackingCase, place: int, limit: float) -> tuple[Ints, float]:
    """([combination][option] -> items, for the combinations of a row that may be part of a packing below `limit` and do
    not hold too much by themselves; what packings with others of them weigh at least).

    Option by option in the order of their turns: those that take it must fit, and what is left must be light enough
    with the options after it.
    """
    row, group = case.rows[place], case.groups[place]
    limit += SLACK * max(1.0, float(np.abs(group.weights).max())) * group.count
    free = case.rooms - case.earlier[place] - case.later[place + 1]
    free += SLACK * np.maximum(1.0, np.abs(case.rooms))
    if group.count == 1:
        return _options_of_one(case, place, limit, free)
    table, left, least = np.zeros((1, len(row.weights)), dtype=np.int64), np.array([group.count]), math.inf
    for option, tail in enumerate(case.tails[place]):
        least_after = row.after[:, option + 1 :].min(axis=1)
        there, rise = table @ row.before.T + left[:, None] * least_after, row.before[:, option] - least_after
        fewest, most, other = tail.light(limit, table, group, left, option)
        least = min(least, other)
        if (rise > 0).all():  # the more take the option, the more is held at the last one's turn
            turn = np.minimum(row.transient[:, option], row.ending[:, option])
            fitting = np.clip(((free - turn - there) / rise).min(axis=1), 0, left).astype(np.int64)
            most = np.maximum(np.minimum(most, fitting), fewest - 1)
        rows, taken = _extended(fewest, most)
        after = left[rows] - taken
        turn = np.where(after[:, None] > 0, row.transient[:, option], row.ending[:, option])
        fits = (there[rows] + taken[:, None] * rise + turn <= free).all(axis=1) | (taken == 0)
        table = table[rows[fits]]
        table[:, option] = taken[fits]
        left = after[fits]
    table[:, -1] = left
    return table, least


def _options_of_one(case: _PackingCase, place: int, limit: float, free: Floats) -> tuple[Ints, float]:
    """The same for a row of one item, whose options are all looked at together. free: [pass] -> bytes at its turn."""
    row, weighs = case.rows[place], case.alone[place]
    held = row.before + row.ending
    light = weighs <= limit
    taken = np.flatnonzero(light & (free >= held.T).all(axis=1))[::-1]
    return np.eye(len(weighs), dtype=np.int64)[taken], float(weighs[~light].min(initial=math.inf))


def _unbeaten_of_row(case: _PackingCase, place: int, table: Ints, deadline_s: float) -> Ints:
    """Combinations of a row without those that another one beats, by being lower in weight or in some bytes, and higher
    in none."""
    row = case.rows[place]
    begins = case.starting[:, np.argmax(table > 0, axis=1)].T if place == 0 else np.zeros(len(case.rooms))
    before, most = (held + begins for held in (table @ row.before.T, _most_inside(table, row)))
    return _unbeaten(np.column_stack([table @ row.weights, before, table @ row.after.T, most]), deadline_s)


def _most_inside(table: Ints, row: Turns) -> Floats:
    """[combination][pass] -> most bytes that are held during the turns of a row's own items, without other rows."""
    if row.count == 1:
        alone: Floats = (row.before + row.ending).T[table.argmax(axis=1)]
        return alone
    rest = table @ row.after.T
    most = np.full(rest.shape, -np.inf)
    for option in range(len(row.weights)):
        taken = table[:, option : option + 1]
        rise = (row.before - row.after)[:, option]
        is_end = (table[:, option + 1 :].sum(axis=1) == 0)[:, None]
        inner = taken - is_end
        highest = rest + np.maximum(rise, inner * rise) + row.transient[:, option]
        highest = np.where(inner > 0, highest, -np.inf)
        end = rest + taken * rise + row.ending[:, option]
        highest = np.where(is_end, np.maximum(highest, end), highest)
        most = np.where(taken > 0, np.maximum(most, highest), most)
        rest = rest + taken * rise
    return most


def _unbeaten(points: Floats, deadline_s: float) -> Ints:
    """Indices of the rows that no other row beats, by being lower in some column and higher in none; of equal rows the
    first. Rows are sorted by their columns, so that a row which beats another stands before it, and mostly right before
    it."""
    order = np.lexsort(points.T[::-1])
    left, kept, before = points.T[1:, order], [], math.inf
    while BLOCK < len(order) < FALLING * before:
        before, follow = len(order), np.flatnonzero((left[:, :-1] > left[:, 1:]).any(axis=0)) + 1
        stay = np.concatenate(([0], follow))
        left, order = left[:, stay], order[stay]
    while len(order):
        in_time(deadline_s)
        block, rest = left[:, :BLOCK], left[:, BLOCK:]
        stays = ~(_nowhere_above(block, block) & _LATER[: block.shape[1], : block.shape[1]]).any(axis=0)
        kept.append(order[:BLOCK][stays])
        longer = ~_nowhere_above(block[:, stays], rest).any(axis=0)
        left, order = rest[:, longer], order[BLOCK:][longer]
    return np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)


def _nowhere_above(some: Floats, others: Floats) -> Flags:
    """[one][other] -> whether it is above the other in no column. some, others: [column][one], without the column by
    which they are sorted."""
    found = np.ones((some.shape[1], others.shape[1]), dtype=np.bool_)
    for one, other in zip(some, others, strict=True):
        found &= one[:, None] <= other
    return found


def least_weight(
    groups: list[ItemGroup], room: float, cutoff: float = math.inf, deadline_s: float = math.inf
) -> Packing | None:
    """The packing of least weight that fits in `room`; None if nothing fits, or nothing is lighter than `cutoff`."""
    kept = [_undominated(group) for group in groups]
    slim = [ItemGroup(g.count, g.weights[k], g.memory[k]) for g, k in zip(groups, kept, strict=True)]
    if sum(g.count * float(g.memory.min()) for g in slim) > room:
        return None
    price, bound = _best_price(slim, room)
    if bound >= cutoff:
        return None
    rounded = _rounded(slim, room, price)
    slack = SLACK * max(1.0, abs(bound))
    found, gap = rounded, rounded.weight - bound
    step = gap / FIRST_STEP
    while gap > slack:
        lighter = _enumerated(slim, room, price, min(step, gap) + slack, deadline_s)
        if lighter is not None and lighter.weight <= bound + min(step, gap) + slack:
            found = lighter
        if found is lighter or step >= gap:
            break
        step *= 2
    if found.weight >= cutoff:
        return None
    return Packing(found.weight, tuple(_spread(c, k, g) for c, k, g in zip(found.counts, kept, groups, strict=True)))


def _undominated(group: ItemGroup) -> Ints:
    """Indices of the options that no other beats in both weight and memory."""
    order = np.lexsort((group.weights, group.memory))
    lightest_before = np.concatenate(([np.inf], np.minimum.accumulate(group.weights[order])[:-1]))
    return order[group.weights[order] < lightest_before]


def _spread(counts: Ints, kept: Ints, group: ItemGroup) -> Ints:
    full = np.zeros(len(group.weights), dtype=np.int64)
    full[kept] = counts
    return full


def tie_prices(weights: list[Floats], memory: list[Floats]) -> Floats:
    """Prices of memory at which two options of a row cost the same, ascending, with 0 first. The tightest bound is at
    one of them."""
    found = [np.zeros(1)]
    for weight, size in zip(weights, memory, strict=True):
        dearer, saved = weight[:, None] - weight[None, :], size[None, :] - size[:, None]
        trade = (saved > 0) & (dearer > 0)
        found.append(dearer[trade] / saved[trade])
    return np.unique(np.concatenate(found))


def _best_price(groups: list[ItemGroup], room: float) -> tuple[float, float]:
    """(lambda, L(lambda)) with the tightest bound. L is concave, and has kinks where two options of a group cost the
    same."""
    prices = tie_prices([group.weights for group in groups], [group.memory for group in groups])
    bounds = -prices * room
    for group in groups:
        bounds += group.count * np.min(group.weights[:, None] + prices[None, :] * group.memory[:, None], axis=0)
    best = int(np.argmax(bounds))
    return float(prices[best]), float(bounds[best])


def _rounded(groups: list[ItemGroup], room: float, price: float) -> Packing:
    """A packing with every item at its cheapest option at this price, the smallest of equally cheap ones; then with
    lighter options as far as they fit."""
    counts = []
    used = weight = 0.0
    for group in groups:
        cost = group.weights + price * group.memory
        tied = np.flatnonzero(cost <= cost.min() + SLACK * max(1.0, abs(float(cost.min()))))
        smallest = tied[np.argmin(group.memory[tied])]
        count = np.zeros(len(cost), dtype=np.int64)
        count[smallest] = group.count
        counts.append(count)
        used += group.count * float(group.memory[smallest])
    if used > room:
        counts = [_all_at(group, int(np.argmin(group.memory))) for group in groups]
        used = sum(float(c @ g.memory) for c, g in zip(counts, groups, strict=True))
    for group, count in zip(groups, counts, strict=True):
        for option in np.argsort(group.weights):
            current = int(np.flatnonzero(count)[0])
            more = float(group.memory[option] - group.memory[current])
            if group.weights[option] >= group.weights[current]:
                break
            moved = group.count if more <= 0 else min(group.count, int((room - used) // more))
            if moved > 0:
                count[current] -= moved
                count[option] += moved
                used += moved * more
                break
    weight = sum(float(c @ g.weights) for c, g in zip(counts, groups, strict=True))
    return Packing(weight, tuple(counts))


def _all_at(group: ItemGroup, option: int) -> Ints:
    count = np.zeros(len(group.weights), dtype=np.int64)
    count[option] = group.count
    return count


def _enumerated(groups: list[ItemGroup], room: float, price: float, gap: float, deadline_s: float) -> Packing | None:
    """The lightest of all packings whose reduced cost, plus the price of the room that they leave free, is at most
    `gap`; None if there is none."""
    fewest = [group.count * float(group.memory.min()) for group in groups]
    largest = [group.count * float(group.memory.max()) for group in groups]
    known: dict[tuple[int, tuple[bytes, bytes]], Ints] = {}
    for group, least, most in zip(groups, fewest, largest, strict=True):
        if (group.count, group.options) not in known:
            table = _counts_within(group, price, gap, room - (sum(largest) - most), room - (sum(fewest) - least))
            known[group.count, group.options] = table
    tables = [known[group.count, group.options] for group in groups]
    if not all(map(len, tables)):
        return None
    lightest_of = [float((table @ group.memory).min()) for table, group in zip(tables, groups, strict=True)]
    least_after = np.cumsum(lightest_of[::-1])
    weight, memory, excess = np.zeros(1), np.zeros(1), np.zeros(1)
    chosen: list[tuple[Ints, Ints]] = []
    for i, (table, group) in enumerate(zip(tables, groups, strict=True)):
        in_time(deadline_s)
        after = float(least_after[len(groups) - 2 - i]) if i + 1 < len(groups) else 0.0
        reduced = _reduced(group, price)
        weights = (weight[:, None] + (table @ group.weights)[None, :]).ravel()
        memories = (memory[:, None] + (table @ group.memory)[None, :]).ravel()
        excesses = (excess[:, None] + (table @ reduced)[None, :]).ravel()
        inside = np.flatnonzero((memories <= room - after) & (excesses <= gap))
        keep = inside[_pareto(weights[inside], memories[inside])]
        chosen.append((keep // len(table), keep % len(table)))
        weight, memory, excess = weights[keep], memories[keep], excesses[keep]
        if not len(keep):
            return None
    return _traced(tables, chosen, weight)


def _traced(tables: list[Ints], chosen: list[tuple[Ints, Ints]], weight: Floats) -> Packing:
    """The packing of the lightest label. chosen: for each group, (label before it, row of its table) of every label."""
    label = int(np.argmin(weight))
    total = float(weight[label])
    counts: list[Ints] = []
    for table, (left, right) in zip(reversed(tables), reversed(chosen), strict=True):
        counts.append(table[right[label]])
        label = int(left[label])
    return Packing(total, tuple(reversed(counts)))


def _reduced(group: ItemGroup, price: float) -> Floats:
    """[option] -> what it costs above the group's cheapest option at this price."""
    cost: Floats = group.weights + price * group.memory
    reduced: Floats = cost - cost.min()
    return reduced


def _counts_within(group: ItemGroup, price: float, gap: float, least: float, most: float) -> Ints:
    """[combination][option] -> items, for the combinations of a group that hold at most `most` bytes, and whose reduced
    cost, plus the price of the bytes that they hold below `least`, is at most `gap`; without those that another
    beats."""
    reduced = _reduced(group, price)
    base = int(np.argmin(reduced))
    tiny = SLACK * max(1.0, float(np.abs(group.weights).max()))
    within = gap + tiny * group.count
    most += SLACK * max(1.0, abs(most))
    table = np.zeros((1, len(reduced)), dtype=np.int64)
    left, spent, held = np.array([group.count]), np.zeros(1), np.zeros(1)
    order = [int(option) for option in np.argsort(-reduced) if option != base and reduced[option] <= within]
    for place, option in enumerate(order):
        cost, size = reduced[option], group.memory[option]
        others = group.memory[[*order[place + 1 :], base]]
        fewest, at_most = _meeting(
            left,
            (cost if cost > tiny else 0.0, within - spent),
            (size - others.min(), most - held - left * others.min()),
            (cost - price * (size - others.max()), within - spent - price * (least - held - left * others.max())),
        )
        rows, taken = _extended(fewest, at_most)
        left, spent, held = left[rows] - taken, spent[rows] + taken * cost, held[rows] + taken * size
        table = table[rows]
        table[:, option] = taken
    table[:, base] = left
    return table[_pareto(table @ group.weights, table @ group.memory)]


def _meeting(left: Ints, *limits: tuple[float, Floats]) -> tuple[Ints, Ints]:
    """[combination] -> (fewest, most) of the `left` items that may take an option within all limits. limits: (what each
    such item adds, [combination] -> what all of them may add at most)."""
    fewest, most = np.zeros(len(left)), left.astype(float)
    for each, room in limits:
        if each > 0:
            most = np.minimum(most, np.floor(room / each + SLACK * left))
        elif each < 0:
            fewest = np.maximum(fewest, np.minimum(np.ceil(room / each - SLACK * left), left + 1))
    return fewest.astype(np.int64), np.maximum(most, fewest - 1).astype(np.int64)


def _extended(fewest: Ints, most: Ints) -> tuple[Ints, Ints]:
    """(combination, number of its items that take the next option), one for each number from `fewest` to `most`."""
    widths = most - fewest + 1
    rows = np.repeat(np.arange(len(most)), widths)
    return rows, fewest[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(widths) - widths, widths)


def _pareto(weight: Floats, memory: Floats) -> Ints:
    """Indices of the labels that no other beats in both weight and memory, by ascending memory."""
    if not len(weight):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((weight, memory))
    lightest_before = np.concatenate(([np.inf], np.minimum.accumulate(weight[order])[:-1]))
    return order[weight[order] < lightest_before]
