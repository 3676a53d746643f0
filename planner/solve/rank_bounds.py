"""What the ranks of a pipeline take at least when each holds whole layers: a bound for many shapes at once.

Rank q holds n[q] layers of the commonest kind, beside the first or last layer of the model if its stage begins or ends
there. In any step of any schedule it does not begin before the first micro-batch has passed the stages before it, then
has all its passes to do, and then

    without zero bubbles, the last backward passes those stages again,      T >= ahead[q] + m work[q](n[q]) + after[q]
    or its own layers reduce their gradients and the optimizer runs         T >= ahead[q] + m work[q](n[q]) + once[q]

where a stage before it holds at least one layer, and work[q](n) knows what its memory makes n layers run again (in any
shares: a convex function of the bytes that each may keep). All times grow with n, so the N-th least of all ranks' times
for 1, 2, ... layers is the least time in which N layers find a place.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan.schedules import ZERO_BUBBLE
from .fluid import ManyLayers, Table

Floats = NDArray[np.float64]

ALIKE = 0.9
"""Layers that take at least this share of the commonest kind's time are counted with it."""

TINY = 1e-9
"""Micro-batches: fewer than any schedule holds."""


def least_of_ranks_s(
    table: Table,
    runs: Sequence[ManyLayers],
    flights: Floats,
    rooms: Floats,
    wait_s: Floats,
    least_end_s: Floats,
) -> Floats:
    """[shape] -> seconds that no step of shapes with the table beats; infinite where layers cannot be held.

    flights: [stage] -> micro-batches; rooms: [rank][shape] -> bytes; wait_s, least_end_s: [shape], as of
    fluid.least_of_many_s.
    """
    num_ranks, last, num_shapes = table.num_ranks, table.num_stages - 1, len(wait_s)
    ends = {stage: layers for stage, layers in ((0, runs[0]), (last, runs[-1])) if layers.count == 1}
    inner = [layers for layers in runs if not any(layers is end for end in ends.values())]
    if not inner or last == 0:
        return np.zeros(num_shapes)
    common = max(inner, key=lambda layers: layers.count)
    alike = [layers for layers in inner if (layers.both_s >= ALIKE * common.both_s).all()]
    both_s, fixed, once_s = (
        np.min([getattr(layers, name) for layers in alike], axis=0) for name in ("both_s", "fixed", "once_s")
    )
    # [rank][shape]: of the first and the last layer, and of transfers
    own_s, own_once_s, sides_s = (np.zeros((num_ranks, num_shapes)) for _ in range(3))
    rooms, fewest, flight = rooms.copy(), np.full(num_ranks, table.virtual), np.full(num_ranks, np.inf)
    for stage, rank in enumerate(table.rank_of):
        sides_s[rank] += ((stage > 0) + (stage < last)) * wait_s
        flight[rank] = min(flight[rank], max(flights[stage], TINY))
        if stage in ends:
            own_s[rank] += ends[stage].both_s
            own_once_s[rank] += ends[stage].once_s
            rooms[rank] -= ends[stage].fixed + flights[stage] * ends[stage].kept.min()
            fewest[rank] -= 1
    number = int(sum(layers.count for layers in alike))
    most = min(number, max(table.virtual, 2 * -(-number // num_ranks) + 2))
    numbers = np.arange(1, most + 1, dtype=float)
    kept, again_s = _trade(alike)
    # [rank][shape][layers]
    per_layer = (rooms[:, :, None] / numbers - fixed[:, None]) / flight[:, None, None]
    seconds = numbers * (both_s[:, None] + np.where(per_layer < kept[0], np.inf, np.interp(per_layer, kept, again_s)))
    seconds = table.num_microbatches * (seconds + (own_s + sides_s)[:, :, None])
    ahead_s, after_s = _ways_there_and_back(table, ends.get(0), inner, wait_s)
    seconds += (ahead_s + least_end_s)[:, :, None]
    once = numbers * once_s[:, None] + own_once_s[:, :, None]
    seconds += once if table.schedule in ZERO_BUBBLE else np.maximum(once, after_s[:, :, None])
    least = np.where((rooms < 0).any(axis=0), np.inf, 0.0)
    if len(alike) == len(inner):  # what its stages hold at least
        ranks = np.flatnonzero(fewest > 0)
        least = np.maximum(least, seconds[ranks, :, np.minimum(fewest[ranks], most) - 1].max(axis=0, initial=0.0))
    if most < number:
        least = np.maximum(least, np.minimum(_nth(seconds, number), seconds[:, :, -1].min(axis=0)))
    else:
        least = np.maximum(least, _nth(seconds, number))
    return least


def _nth(seconds: Floats, number: int) -> Floats:
    """[shape] -> the so-manieth least of [rank][shape][layers]; infinite if there are fewer."""
    places = seconds.swapaxes(0, 1).reshape(seconds.shape[1], -1)
    if places.shape[1] < number:
        return np.full(len(places), np.inf)
    found: Floats = np.partition(places, number - 1, axis=1)[:, number - 1]
    return found


def _ways_there_and_back(
    table: Table, first: ManyLayers | None, inner: Sequence[ManyLayers], wait_s: Floats
) -> tuple[Floats, Floats]:
    """([rank][shape] -> seconds in which the first micro-batch passes the stages before it, in which the last backward
    passes them) at least: a layer each. first: the layer that the first stage begins with, if that is known."""
    forward_s = np.min([layers.forward_s for layers in inner], axis=0)
    backward_s = np.min([layers.both_s - layers.forward_s for layers in inner], axis=0)
    begin_s = forward_s if first is None else first.forward_s
    return_s = backward_s if first is None else first.both_s - first.forward_s
    others = np.arange(table.num_ranks, dtype=float)[:, None] - 1  # between a rank and the first
    ahead_s = begin_s + others * (forward_s + wait_s)
    after_s = return_s + wait_s + others * (backward_s + wait_s)
    ahead_s[0] = after_s[0] = 0.0
    return ahead_s, after_s


def _trade(alike: Sequence[ManyLayers]) -> tuple[Floats, Floats]:
    """(bytes that a layer keeps of a micro-batch, seconds that it runs again for it at least): the corners of the
    lower convex hull of all ways to recompute, the fewest bytes first."""
    points = sorted({
        (float(size), float(seconds))
        for layers in alike
        for size, seconds in zip(layers.kept, layers.again_s, strict=True)
    })  # fmt: skip
    hull: list[tuple[float, float]] = []
    for size, seconds in points:
        if hull and seconds >= hull[-1][1]:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], (size, seconds)):
            hull.pop()
        hull.append((size, seconds))
    kept, again_s = np.array(hull).T
    return kept, again_s


def _above(one: tuple[float, float], two: tuple[float, float], three: tuple[float, float]) -> bool:
    """Whether the second of three points is on or above the line through the others."""
    return (two[1] - one[1]) * (three[0] - one[0]) >= (three[1] - one[1]) * (two[0] - one[0])
