"""Exact multiple-choice knapsack over groups of equal items: the least weight whose memory fits.

Each of a group's `count` items takes one of its options. Pricing memory at lambda gives a lower bound,

    L(lambda) = sum_g count_g min_o (weight_o + lambda memory_o) - lambda room  <=  optimum,

and rounding the best such relaxation gives a solution. An option that costs d_o more than its group's cheapest at
that price can be taken by at most (solution - L) / d_o items (Lagrangian reduced costs: Geoffrion 1974), which leaves
few combinations to try, all of which are.
"""

import math
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .solver import OutOfTimeError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST_STEP = 64
"""Packings are looked through first up to this part of what is not proven yet, or of the widest choice; then twice as
far, and so on: the nearer the limit, the fewer there are, whatever the number of options."""

FEW = 200_000
"""So many combinations, or fewer, are looked through at once."""

SLACK = 1e-12
"""Relative: sums that differ by less are equal, whatever the order of addition."""


def in_time(deadline_s: float) -> None:
    """Raises OutOfTimeError when time.monotonic() has passed the deadline."""
    if time.monotonic() > deadline_s:
        raise OutOfTimeError("time is over before the best options are found; give it longer with --time-limit")


@dataclass(frozen=True)
class Group:
    """`count` equal items with their options."""

    count: int
    weights: Floats
    memory: Floats


@dataclass(frozen=True)
class Packing:
    """A solution: total weight, and per group how many items take which option."""

    weight: float
    counts: tuple[Ints, ...]


@dataclass(frozen=True)
class Turns:
    """`count` equal items in a row, whose options are taken in the order given, and what they hold in each of several
    passes over all items, [pass][option]: before an item's turn, after it, and during it beyond what it held before
    (ending: if it is the last of them)."""

    count: int
    weights: Floats
    before: Floats
    behind: Floats
    transient: Floats
    ending: Floats

    def of(self, options: slice) -> "Turns":
        """The same items with some of their options."""
        return Turns(
            self.count,
            self.weights[options],
            self.before[:, options],
            self.behind[:, options],
            self.transient[:, options],
            self.ending[:, options],
        )


def lightest(
    rows: list[Turns], rooms: Floats, cutoff: float, starting: Floats, deadline_s: float = math.inf
) -> Packing | None:
    """The packing of least weight below `cutoff` that in no pass and at no turn holds more than that pass's room.

    One case for each option that the very last item may take, the most promising first. starting: [pass][option] ->
    what is held throughout, by the option that the very first item takes. Raises OutOfTimeError at the deadline.
    """
    last = rows[-1]
    cases = []
    for option in range(len(last.weights)):
        # in their order, so none behind this one
        fixed = replace(last.of(slice(option, option + 1)), count=1)
        others = replace(last.of(slice(0, option + 1)), count=last.count - 1, ending=last.transient[:, : option + 1])
        case = [*rows[:-1], *([others] if last.count > 1 else []), fixed]
        groups = [Group(row.count, row.weights, row.before[0]) for row in case]
        bound = _best_price(groups, float(rooms[0] - fixed.ending[0, 0]))[1]
        cases.append((bound, option, case))
    best: tuple[Packing, int] | None = None
    for bound, option, case in sorted(cases, key=lambda one: one[0]):
        limit = best[0].weight if best else cutoff
        if bound >= limit:
            break
        begins = starting[:, option : option + 1] if len(case) == 1 else starting
        found = _lightest_of_case(case, rooms, limit, begins, deadline_s)
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


def _lightest_of_case(
    rows: list[Turns], rooms: Floats, cutoff: float, starting: Floats, deadline_s: float
) -> Packing | None:
    """The same for a single item in the last row, with a single option.

    First without all turns but the last of the first pass, which bounds it from below: if what that finds fits, it is
    the best. Else all packings up to a little more than that are looked through, then up to twice as much more, until
    one fits: that is the best, as all lighter ones were looked through.
    """
    groups = [Group(row.count, row.weights, row.before[0]) for row in rows]
    room = float(rooms[0] - rows[-1].ending[0, 0])
    relaxed = least_weight(groups, room, cutoff, deadline_s)
    if relaxed is None:
        return None
    if _fits_in_turns(rows, relaxed, rooms, starting):
        return relaxed
    heaviest = sum(row.count * float(row.weights.max()) for row in rows)
    heaviest = min(cutoff, heaviest + SLACK * max(1.0, heaviest))
    widest = max(float(row.weights.max() - row.weights.min()) for row in rows)
    step = max(relaxed.weight - _best_price(groups, room)[1], SLACK * heaviest, widest / FIRST_STEP**2) or heaviest
    limit = relaxed.weight
    while limit < heaviest:
        limit, step = min(limit + step, heaviest), 2 * step
        found = lightest_in_turns(rows, rooms, limit, starting, deadline_s)
        if found is not None:
            return found
    return None


def _fits_in_turns(rows: list[Turns], packing: Packing, rooms: Floats, starting: Floats) -> bool:
    """Whether a packing holds no more than there is room for in every pass."""
    first = int(np.argmax(packing.counts[0] > 0))
    before, most = starting[:, first], np.full(len(rooms), -np.inf)
    for row, counts in zip(rows, packing.counts, strict=True):
        table = counts[None, :]
        most = np.maximum(most + row.behind @ counts, before + _most_inside(table, row)[0])
        before = before + row.before @ counts
    return bool((most <= rooms).all())


def lightest_in_turns(
    rows: list[Turns], rooms: Floats, limit: float, starting: Floats, deadline_s: float = math.inf
) -> Packing | None:
    """The packing of least weight below `limit` that in no pass and at no turn holds more than that pass's room.

    While an item has its turn, those up to it hold `before`, those behind it `behind`. starting: [pass][option] ->
    what is held throughout, by the option that the very first item takes. The last turn of the first pass
    alone is a knapsack, whose price of memory bounds how far from the cheapest option any item may be.
    """
    groups = [Group(row.count, row.weights, row.before[0]) for row in rows]
    price, bound = _best_price(groups, float(rooms[0] - rows[-1].ending[0].min()))
    heaviest = sum(row.count * float(row.weights.max()) for row in rows)
    limit = min(limit, heaviest + SLACK * max(1.0, heaviest))
    gap = limit - bound
    tables = [_counts_within(group, price, gap) for group in groups]
    least_behind = np.cumsum([(row.count * row.behind.min(axis=1)) for row in rows][::-1], axis=0)[::-1]
    weight, excess = np.zeros(1), np.zeros(1)
    before, most = np.zeros((1, len(rooms))), np.full((1, len(rooms)), -np.inf)
    chosen: list[tuple[Ints, Ints]] = []
    for i, (table, row, group) in enumerate(zip(tables, rows, groups, strict=True)):
        in_time(deadline_s)
        weights = (weight[:, None] + (table @ row.weights)[None, :]).ravel()
        excesses = (excess[:, None] + (table @ _reduced(group, price))[None, :]).ravel()
        if i == 0:
            before = starting[:, np.argmax(table > 0, axis=1)].T
        inner = _most_inside(table, row)
        base = before[None, :, :] if i == 0 else before[:, None, :]
        mosts = np.maximum(most[:, None, :] + (table @ row.behind.T)[None, :, :], base + inner[None, :, :])
        mosts = mosts.reshape(-1, len(rooms))
        befores = (base + (table @ row.before.T)[None, :, :]).reshape(-1, len(rooms))
        after = least_behind[i + 1] if i + 1 < len(rows) else 0.0
        inside = np.flatnonzero((mosts + after <= rooms).all(axis=1) & (excesses <= gap) & (weights < limit))
        if not len(inside):
            return None
        keep = inside
        if i + 1 == len(rows):
            keep = inside[[np.argmin(weights[inside])]]
        elif len(inside) * math.prod(len(later) for later in tables[i + 1 :]) > FEW:
            keep = inside[_unbeaten(np.column_stack([weights[inside], befores[inside], mosts[inside]]), deadline_s)]
        chosen.append((keep // len(table), keep % len(table)))
        weight, excess, before, most = weights[keep], excesses[keep], befores[keep], mosts[keep]
    return _traced(tables, chosen, weight)


def _most_inside(table: Ints, row: Turns) -> Floats:
    """[combination][pass] -> the most that is held during the turns of a row's own items, without other rows."""
    rest = table @ row.behind.T
    most = np.full(rest.shape, -np.inf)
    for option in range(len(row.weights)):
        taken = table[:, option : option + 1]
        rise = (row.before - row.behind)[:, option]
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
    """Rows that no other is below in one column and nowhere above."""
    left = np.lexsort(points.T[::-1])
    kept = []
    while len(left):
        in_time(deadline_s)
        best = left[0]
        kept.append(best)
        left = left[~(points[left] >= points[best]).all(axis=1)]
    return np.array(kept, dtype=np.int64)


def least_weight(
    groups: list[Group], room: float, cutoff: float = math.inf, deadline_s: float = math.inf
) -> Packing | None:
    """The packing of least weight within `room`, or None if nothing fits or nothing is lighter than `cutoff`."""
    kept = [_undominated(group) for group in groups]
    slim = [Group(g.count, g.weights[k], g.memory[k]) for g, k in zip(groups, kept, strict=True)]
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


def _undominated(group: Group) -> Ints:
    """Options that no other beats in both weight and memory."""
    order = np.lexsort((group.weights, group.memory))
    lightest_before = np.concatenate(([np.inf], np.minimum.accumulate(group.weights[order])[:-1]))
    return order[group.weights[order] < lightest_before]


def _spread(counts: Ints, kept: Ints, group: Group) -> Ints:
    full = np.zeros(len(group.weights), dtype=np.int64)
    full[kept] = counts
    return full


def tie_prices(weights: list[Floats], memory: list[Floats]) -> Floats:
    """Prices of memory at which two options of a row cost the same, in ascending order: the tightest bound is at one of
    them, or at none."""
    found = [np.zeros(1)]
    for weight, size in zip(weights, memory, strict=True):
        dearer, saved = weight[:, None] - weight[None, :], size[None, :] - size[:, None]
        trade = (saved > 0) & (dearer > 0)
        found.append(dearer[trade] / saved[trade])
    return np.unique(np.concatenate(found))


def _best_price(groups: list[Group], room: float) -> tuple[float, float]:
    """(lambda, L(lambda)) of the tightest bound; L is concave with kinks where two options of a group tie."""
    prices = tie_prices([group.weights for group in groups], [group.memory for group in groups])
    bounds = -prices * room
    for group in groups:
        bounds += group.count * np.min(group.weights[:, None] + prices[None, :] * group.memory[:, None], axis=0)
    best = int(np.argmax(bounds))
    return float(prices[best]), float(bounds[best])


def _rounded(groups: list[Group], room: float, price: float) -> Packing:
    """Every item at its cheapest option at this price, ties to the smaller; then lighter ones while they fit."""
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


def _all_at(group: Group, option: int) -> Ints:
    count = np.zeros(len(group.weights), dtype=np.int64)
    count[option] = group.count
    return count


def _enumerated(groups: list[Group], room: float, price: float, gap: float, deadline_s: float) -> Packing | None:
    """The best packing among all whose reduced cost is within `gap`."""
    tables = [_counts_within(group, price, gap) for group in groups]
    least = [float((table @ group.memory).min()) for table, group in zip(tables, groups, strict=True)]
    least_after = np.cumsum(least[::-1])
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
    """The lightest label's choices. chosen: per group (label before it, row of its table) of every label."""
    label = int(np.argmin(weight))
    total = float(weight[label])
    counts: list[Ints] = []
    for table, (left, right) in zip(reversed(tables), reversed(chosen), strict=True):
        counts.append(table[right[label]])
        label = int(left[label])
    return Packing(total, tuple(reversed(counts)))


def _reduced(group: Group, price: float) -> Floats:
    """Per option: what it costs above the group's cheapest at this price."""
    cost: Floats = group.weights + price * group.memory
    reduced: Floats = cost - cost.min()
    return reduced


def _counts_within(group: Group, price: float, gap: float) -> Ints:
    """[combination][option] -> items, for all combinations of a group whose reduced cost is within `gap`."""
    reduced = _reduced(group, price)
    base = int(np.argmin(reduced))
    tiny = SLACK * max(1.0, float(np.abs(group.weights).max()))
    within = gap + tiny * group.count
    table = np.zeros((1, len(reduced)), dtype=np.int64)
    left, spent = np.array([group.count]), np.zeros(1)
    for option in np.argsort(-reduced):
        if option == base or reduced[option] > within:
            continue
        most = left
        if reduced[option] > tiny:
            most = np.minimum(left, ((within - spent) / reduced[option]).astype(np.int64))
        rows = np.repeat(np.arange(len(table)), most + 1)
        taken = np.arange(len(rows)) - np.repeat(np.cumsum(most + 1) - most - 1, most + 1)
        table = table[rows]
        table[:, option] = taken
        left, spent = left[rows] - taken, spent[rows] + taken * reduced[option]
    table[:, base] = left
    return table


def _pareto(weight: Floats, memory: Floats) -> Ints:
    """Labels that no other beats in both, by ascending memory."""
    if not len(weight):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((weight, memory))
    lightest_before = np.concatenate(([np.inf], np.minimum.accumulate(weight[order])[:-1]))
    return order[weight[order] < lightest_before]
