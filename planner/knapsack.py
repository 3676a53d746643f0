"""Exact multiple-choice knapsack over groups of equal items: the least weight whose memory fits.

Each of a group's `count` items takes one of its options. Pricing memory at lambda gives a lower bound,

    L(lambda) = sum_g count_g min_o (weight_o + lambda memory_o) - lambda room  <=  optimum,

and rounding the best such relaxation gives a solution. An option that costs d_o more than its group's cheapest at
that price can be taken by at most (solution - L) / d_o items (Lagrangian reduced costs: Geoffrion 1974), which leaves
few combinations to try, all of which are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SLACK = 1e-12
"""Relative: sums that differ by less are equal, whatever the order of addition."""


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


def lightest_in_turns(rows: list[Turns], rooms: Floats, limit: float, starting: Floats) -> Packing | None:
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
        points = np.column_stack([weights[inside], befores[inside], mosts[inside]])
        keep = inside[_unbeaten(points)]
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


def _unbeaten(points: Floats) -> Ints:
    """Rows that no other is below in one column and nowhere above."""
    left = np.lexsort(points.T[::-1])
    kept = []
    while len(left):
        best = left[0]
        kept.append(best)
        left = left[~(points[left] >= points[best]).all(axis=1)]
    return np.array(kept, dtype=np.int64)


def least_weight(groups: list[Group], room: float, cutoff: float = float("inf")) -> Packing | None:
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
    found = rounded
    if rounded.weight - bound > slack:
        found = _enumerated(slim, room, price, rounded.weight - bound + slack) or rounded
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


def _best_price(groups: list[Group], room: float) -> tuple[float, float]:
    """(lambda, L(lambda)) of the tightest bound; L is concave with kinks where two options of a group tie."""
    kinks = {0.0}
    for group in groups:
        for a in range(len(group.weights)):
            for b in range(a + 1, len(group.weights)):
                saved = group.memory[b] - group.memory[a]
                if saved > 0:
                    kinks.add(float((group.weights[a] - group.weights[b]) / saved))
    prices = np.array(sorted(kink for kink in kinks if kink >= 0))
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


def _enumerated(groups: list[Group], room: float, price: float, gap: float) -> Packing | None:
    """The best packing among all whose reduced cost is within `gap`."""
    tables = [_counts_within(group, price, gap) for group in groups]
    least = [float((table @ group.memory).min()) for table, group in zip(tables, groups, strict=True)]
    least_after = np.cumsum(least[::-1])
    weight, memory, excess = np.zeros(1), np.zeros(1), np.zeros(1)
    chosen: list[tuple[Ints, Ints]] = []
    for i, (table, group) in enumerate(zip(tables, groups, strict=True)):
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
    others = [o for o in range(len(reduced)) if o != base]
    tiny = SLACK * max(1.0, float(np.abs(group.weights).max()))
    most = [group.count if reduced[o] <= tiny else min(group.count, int(gap / reduced[o])) for o in others]
    grids = np.meshgrid(*(np.arange(m + 1) for m in most), indexing="ij")
    table = np.zeros((grids[0].size if others else 1, len(reduced)), dtype=np.int64)
    for option, grid in zip(others, grids, strict=False):
        table[:, option] = grid.ravel()
    table[:, base] = group.count - table.sum(axis=1)
    return table[(table[:, base] >= 0) & (table @ reduced <= gap + tiny * group.count)]


def _pareto(weight: Floats, memory: Floats) -> Ints:
    """Labels that no other beats in both, by ascending memory."""
    if not len(weight):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((weight, memory))
    lightest_before = np.concatenate(([np.inf], np.minimum.accumulate(weight[order])[:-1]))
    return order[weight[order] < lightest_before]
