"""Lower bounds on the step of a pipeline whose ranks each hold whole layers, for many shapes at once.

Rank q holds n[q] layers of the commonest kind, beside the first or last layer of the model if its stage begins or ends
there. In any step of any schedule it does not begin before the first micro-batch has passed the stages before it, then
has all its passes to do, and then

    without zero bubbles, the last backward passes those stages again,      T >= ahead[q] + m work[q](n[q]) + after[q]
    or its own layers reduce their gradients and the optimizer runs         T >= ahead[q] + m work[q](n[q]) + once[q]

where a stage before it holds at least one layer, and work[q](n) includes the recompute that memory asks of n layers, in
any shares. Memory has a price for that: let each layer take the option that is cheapest at some price of a byte; their
sum, less the price of the room, is no more than the real seconds, whatever the price. Each stage of the rank holds at
least one layer, with the micro-batches that are in flight there; further layers may be in the stage with the fewest. If
there are more layers than stages, two are in one stage, and the gradients of one are reduced in the turn of the other.
All times grow with n. So, of all ranks' times for 1, 2, ... layers, the N-th smallest is the least time in which N
layers find a place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Ints
from ..plan.schedules import ZERO_BUBBLE
from .path_prices import ManyLayers
from .table import Table

ALIKE = 0.9
"""Layers that take at least this share of the time of the commonest kind are counted with it."""

TINY = 1e-9
"""A number of micro-batches that is smaller than any schedule holds."""


@dataclass(frozen=True)
class OnDevice:
    """Costs of layers on one kind of device. runs: of the chain there; rooms: [rank][shape] -> bytes; waits_s, end_s:
    [stage but the last][shape] and [shape], as for fluid.least_of_many_s."""

    runs: Sequence[ManyLayers]
    rooms: Floats
    waits_s: Floats
    end_s: Floats


def least_of_ranks_s(table: Table, devices: Sequence[OnDevice], flights: Floats, on: Ints | None = None) -> Floats:
    """[shape] -> lower bound in seconds for all steps of shapes with this table; infinite if layers cannot be held.

    flights: [stage] -> micro-batches in flight; on: [rank] -> index of its device; None: there is one device for all.
    """
    num_ranks, last, runs = table.num_ranks, table.num_stages - 1, devices[0].runs
    on_rank = np.zeros(num_ranks, dtype=np.int64) if on is None else on
    ends = {stage: run for stage, run in ((0, 0), (last, len(runs) - 1)) if runs[run].count == 1}
    inner = [run for run in range(len(runs)) if run not in ends.values()]
    num_shapes = len(devices[0].end_s)
    if not inner or last == 0:
        return np.zeros(num_shapes)
    common = max(inner, key=lambda run: runs[run].count)
    kinds = list({id(runs[run].both_s): run for run in inner}.values())
    alike = [r for r in kinds if all((d.runs[r].both_s >= ALIKE * d.runs[common].both_s).all() for d in devices)]
    # [rank][shape]
    both_s, fixed, once_s = (
        np.array([np.min([getattr(d.runs[r], name) for r in alike], axis=0) for d in devices])[on_rank]
        for name in ("both_s", "fixed", "once_s")
    )
    waits_s, least_end_s = (np.min([getattr(d, name) for d in devices], axis=0) for name in ("waits_s", "end_s"))
    nothing = np.zeros((1, num_shapes))
    both_sides_s = np.concatenate((nothing, waits_s)) + np.concatenate((waits_s, nothing))
    rooms = np.array([d.rooms for d in devices])[on_rank, np.arange(num_ranks)]
    # of the first and the last layer, and of transfers
    own_s, own_once_s, sides_s = (np.zeros((num_ranks, num_shapes)) for _ in range(3))
    fewest, own = np.full(num_ranks, np.inf), [list[float]() for _ in range(num_ranks)]
    for stage, rank in enumerate(table.rank_of):
        sides_s[rank] += both_sides_s[stage]
        flight = max(float(flights[stage]), TINY)
        fewest[rank] = min(fewest[rank], flight)
        if stage in ends:
            end = devices[on_rank[rank]].runs[ends[stage]]
            own_s[rank] += end.both_s
            own_once_s[rank] += end.once_s
            rooms[rank] -= end.fixed + flights[stage] * end.kept.min()
        elif len(alike) == len(kinds):
            own[rank].append(flight)
    those = {id(runs[run].both_s) for run in alike}
    number = int(sum(runs[run].count for run in inner if id(runs[run].both_s) in those))
    most = min(number, max(table.virtual, 2 * -(-number // num_ranks) + 2))
    numbers = np.arange(1, most + 1, dtype=float)
    beside = numbers * fixed[:, :, None] - rooms[:, :, None]
    if len(inner) == 1 and table.virtual > 1:
        beside[:, :, table.virtual :] += np.array([d.runs[common].paired for d in devices])[on_rank][:, :, None]
    # [rank][shape][layers]
    each = [_again_s(own, fewest, *_trade([device.runs[run] for run in alike]), beside, most) for device in devices]
    seconds = np.array(each)[on_rank, np.arange(num_ranks)]
    seconds = table.num_microbatches * (seconds + numbers * both_s[:, :, None] + (own_s + sides_s)[:, :, None])
    ahead_s, after_s = _ways_there_and_back(table, devices, ends.get(0), kinds, int(on_rank[0]), waits_s)
    seconds += (ahead_s + least_end_s)[:, :, None]
    once = numbers * once_s[:, :, None] + own_once_s[:, :, None]
    seconds += once if table.schedule in ZERO_BUBBLE else np.maximum(once, after_s[:, :, None])
    least = np.where((rooms < 0).any(axis=0), np.inf, 0.0)
    for rank, flights_there in enumerate(own):  # what its stages hold at least
        if flights_there:
            least = np.maximum(least, seconds[rank, :, min(len(flights_there), most) - 1])
    if most < number:
        least = np.maximum(least, np.minimum(_nth(seconds, number), seconds[:, :, -1].min(axis=0)))
    else:
        least = np.maximum(least, _nth(seconds, number))
    return least


def _again_s(
    own: Sequence[Sequence[float]], fewest: Floats, kept: Floats, again_s: Floats, beside: Floats, most: int
) -> Floats:
    """[rank][shape][layers] -> seconds that 1 to `most` layers of a rank run again for a micro-batch, at least;
    infinite where they cannot be held. own: [rank] -> micro-batches in flight in each of its stages that holds a layer;
    fewest: [rank] -> those where further layers may be; kept, again_s: as of `_trade`; beside: [rank][shape][layers] ->
    bytes of the layers whatever they keep, less those of the room."""
    num_ranks, width = len(own), max(map(len, own))
    flights = np.array([[*sorted(each), *[0.0] * (width - len(each))] for each in own]).reshape(num_ranks, width)
    numbers = np.arange(1, most + 1)
    counts = np.array([len(each) for each in own])[:, None]
    first = np.minimum(numbers, counts)  # of so many layers, those in stages of their own
    others = numbers - first

    def of_layers(each: Floats, further: Floats) -> Floats:
        """[rank][layers] -> sum over layers. each: [rank][stage of its own]; further: [rank]."""
        sums = np.concatenate((np.zeros((num_ranks, 1)), np.cumsum(each, axis=1)), axis=1)
        total: Floats = np.take_along_axis(sums, first, axis=1) + others * further[:, None]
        return total

    found = np.zeros_like(beside)
    known = [sorted({*each, few}) for each, few in zip(own, fewest.tolist(), strict=True)]
    for place in range(max(map(len, known))):
        at = np.array([each[min(place, len(each) - 1)] for each in known])
        for price in -np.diff(again_s) / np.diff(kept):
            per_byte_s = price / at
            each, further = (
                np.min([seconds + per_byte_s.reshape(-1, *[1] * (f.ndim - 1)) * f * size
                        for seconds, size in zip(again_s, kept, strict=True)], axis=0)
                for f in (flights, fewest)
            )  # fmt: skip
            cost = of_layers(each, further)[:, None, :] + per_byte_s[:, None, None] * beside
            np.maximum(found, cost, out=found)
    least = kept[0] * of_layers(flights, fewest)
    return np.where(least[:, None, :] + beside > 0, np.inf, found)


def _nth(seconds: Floats, number: int) -> Floats:
    """[shape] -> the `number`-th smallest of the entries [rank][layers]; infinite if there are fewer. seconds:
    [rank][shape][layers]."""
    places = seconds.swapaxes(0, 1).reshape(seconds.shape[1], -1)
    if places.shape[1] < number:
        return np.full(len(places), np.inf)
    found: Floats = np.partition(places, number - 1, axis=1)[:, number - 1]
    return found


def _ways_there_and_back(
    table: Table, devices: Sequence[OnDevice], first: int | None, inner: Sequence[int], begins_on: int, waits_s: Floats
) -> tuple[Floats, Floats]:
    """([rank][shape] -> seconds in which the first micro-batch passes the stages before it, in which the last backward
    passes them) at least: a layer each. first: the run of the layer that the first stage begins with, on that device,
    if it is known."""
    layers = [device.runs[run] for device in devices for run in inner]
    forward_s = np.min([each.forward_s for each in layers], axis=0)
    backward_s = np.min([each.both_s - each.forward_s for each in layers], axis=0)
    begin_s, return_s = forward_s, backward_s
    if first is not None:
        begin_s = devices[begins_on].runs[first].forward_s
        return_s = devices[begins_on].runs[first].both_s - begin_s
    others = np.arange(table.num_ranks, dtype=float)[:, None] - 1  # between a rank and the first
    waited_s = np.concatenate((np.zeros((1, len(begin_s))), np.cumsum(waits_s[: table.num_ranks - 1], axis=0)))
    ahead_s = begin_s + others * forward_s
    ahead_s[1:] += waited_s[:-1]
    after_s = return_s + others * backward_s + waited_s
    ahead_s[0] = after_s[0] = 0.0
    return ahead_s, after_s


def _trade(alike: Sequence[ManyLayers]) -> tuple[Floats, Floats]:
    """(bytes that a layer keeps of a micro-batch, least seconds of its recompute): corners of the lower convex hull of
    all ways to recompute, the fewest bytes first."""
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
