"""Lower bounds for a pipeline under its memory, with layers taken as divisible, before any stage is priced.

A stage with room R holds fractions of layers, each at one of its options (seconds w, bytes m). With memory at a price
lambda, a stage that takes no longer than T does at most

    work(T) = min over lambda of (T + lambda R) / c(lambda),    c(lambda) = min over layers, options of
                                                                            (w + lambda m) / worth of the layer

of any kind of work of which every layer is worth something, since sum worth x <= sum (w + lambda m) x / c. All stages
together must do all layers' worth, so the least T is the one at which their work adds up to that. Any worth gives a
bound. Those that are tried are what layers cost at each of some prices of memory, because then no kind of layer looks
like a bargain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Ints
from .knapsack import tie_prices

MOST_PRICES = 24
"""Most prices of memory that are tried for shapes on one device, spread over all prices; any of them gives a bound."""

MOST_PRICES_OF_EACH = 8
"""Most prices of memory that are tried for shapes of several stages."""

MOST_WORTHS_OF_EACH = 2
"""Number of these prices at which the cost of layers is taken as their worth."""

STEPS = 8
"""Steps of Newton's method, from below. work(T) is concave, so no step goes too far, and fewer steps give a bound as
well."""


@dataclass(frozen=True)
class DeviceColumns:
    """Lower bounds for stages on one kind of device, in many shapes. each_s, fixed: [kind][shape] -> seconds of a layer
    without recompute, bytes that it holds beside activations; again_s, kept: [kind][way to recompute] -> seconds
    longer, bytes kept of a micro-batch; rooms: [stage][shape] -> bytes."""

    each_s: Floats
    fixed: Floats
    again_s: Sequence[Floats]
    kept: Sequence[Floats]
    rooms: Floats

    def beside_s(self, per_byte_s: Floats) -> Floats:
        """[price of what a micro-batch keeps][kind] -> least price of recompute and of what it keeps."""
        each = [(w + per_byte_s[:, None] * m).min(axis=1) for w, m in zip(self.again_s, self.kept, strict=True)]
        return np.array(each).T


def least_slowest_of_unequal_s(
    devices: Sequence[DeviceColumns], on: Ints, flights: Floats, counts: Floats, more_s: Sequence[Sequence[Floats]]
) -> list[Floats]:
    """[case][shape] -> lower bound on the seconds per micro-batch of the slowest stage, for stages on unequal devices;
    infinite if the layers cannot be held. on: [stage] -> index of its device; flights: [stage] -> micro-batches in
    flight; counts: [kind] -> number of layers; more_s: [case][device] -> [kind][shape] seconds more of a layer."""
    ties = np.concatenate([tie_prices(list(device.again_s), list(device.kept)) for device in devices])
    prices = np.unique(ties / np.unique(flights)[:, None] if flights.all() else np.zeros(1))
    prices = prices[_spread(len(prices), MOST_PRICES_OF_EACH)]
    stages = list(zip(on.tolist(), flights.tolist(), strict=True))
    # [price][kind] of each device and number of micro-batches, [shape][price][kind] of each device
    beside = {(number, flight): devices[number].beside_s(flight * prices) for number, flight in set(stages)}
    own = [d.each_s.T[:, None, :] + prices[:, None] * d.fixed.T[:, None, :] for d in devices]
    # [shape][stage][price][kind]
    cost = np.stack([own[number] + beside[number, flight] for number, flight in stages], axis=1)
    there = np.array([devices[number].rooms[i] for i, number in enumerate(on)]).T[:, :, None] * prices
    least = np.array([[flight * kept.min() for kept in devices[number].kept] for number, flight in stages])[:, :, None]
    need = counts @ (least + np.array([device.fixed for device in devices])[on]).min(axis=0)
    fits = need <= np.sum([devices[number].rooms[i] for i, number in enumerate(on)], axis=0)
    found = []
    for more in more_s:
        slowest = np.min([d.each_s + m for d, m in zip(devices, more, strict=True)], axis=0).max(axis=0)
        whole = cost + np.array(more)[on].transpose(2, 0, 1)[:, :, None, :]
        for worth in whole.mean(axis=1)[:, _spread(len(prices), MOST_WORTHS_OF_EACH)].swapaxes(0, 1):
            slowest = _slowest_of_each_s(whole, there, worth, counts, slowest)
        found.append(np.where(fits, slowest, np.inf))
    return found


def least_of_each_one_s(
    choices: Sequence[tuple[Floats, Floats]],
    rooms: Floats,
    again_s: Sequence[Floats],
    kept: Sequence[Floats],
    counts: Floats,
) -> Floats:
    """[shape] -> lower bound on the seconds of all layers on one device; infinite if they cannot be held.

    choices: (seconds, bytes) of every layer, each [kind][shape]; seconds are infinite where a layer does not have that
    choice. again_s, kept: [kind] -> [way to recompute] -> seconds and bytes beside that. rooms: [shape] -> bytes.
    counts: [kind] -> number of layers.
    """
    prices = tie_prices(list(again_s), list(kept))
    for seconds, size in choices[1:]:
        both = np.isfinite(seconds) & np.isfinite(choices[0][0])
        saved, dearer = (choices[0][1] - size)[both], seconds[both] - choices[0][0][both]
        trade = (saved > 0) & (dearer > 0)
        prices = np.union1d(prices, _quantiles(dearer[trade] / saved[trade]))
    prices = prices[_spread(len(prices), MOST_PRICES)]
    # [kind][price]
    beside = np.array([(w[:, None] + m[:, None] * prices).min(axis=0) for w, m in zip(again_s, kept, strict=True)])
    # [kind][shape][price]
    least = np.min([s[:, :, None] + size[:, :, None] * prices for s, size in choices], axis=0) + beside[:, None, :]
    seconds = (np.tensordot(counts, least, 1) - rooms[:, None] * prices).max(axis=1)
    smallest = np.min([np.where(np.isfinite(s), size, np.inf) for s, size in choices], axis=0)
    need = counts @ (smallest + np.array([held.min() for held in kept])[:, None])
    return np.where(need <= rooms, seconds, np.inf)


def least_slowest_of_each_s(
    each_s: Floats,
    fixed: Floats,
    rooms: Floats,
    again_s: Sequence[Floats],
    kept: Sequence[Floats],
    flights: Floats,
    counts: Floats,
) -> Floats:
    """[shape] -> lower bound on the seconds per micro-batch of the slowest stage, for shapes whose layers differ only
    in seconds without recompute and in bytes that they hold beside activations; infinite if the layers cannot be held.
    each_s, fixed: [kind][shape]; rooms: [shape] -> bytes of a stage; again_s, kept: [kind] -> [way to recompute];
    flights: [stage] -> micro-batches in flight; counts: [kind] -> number of layers."""
    prices = tie_prices(list(again_s), [flights.max() * held for held in kept])
    prices = prices[_spread(len(prices), MOST_PRICES_OF_EACH)]
    priced = flights[:, None] * prices
    # [stage][price][kind]
    beside = np.stack([(w + priced[:, :, None] * m).min(axis=2) for w, m in zip(again_s, kept, strict=True)], axis=2)
    fewest = counts @ (fixed + flights.min() * np.array([held.min() for held in kept])[:, None])
    slowest = np.maximum((np.ceil(counts / len(flights)) * each_s.T).max(axis=1), counts @ each_s / len(flights))
    there = rooms[:, None, None] * prices
    # [shape][stage][price][kind]
    cost = beside + (each_s.T[:, None, :] + prices[:, None] * fixed.T[:, None, :])[:, None]
    for worth in cost.mean(axis=1)[:, _spread(len(prices), MOST_WORTHS_OF_EACH)].swapaxes(0, 1):
        slowest = _slowest_of_each_s(cost, there, worth, counts, slowest)
    return np.where(fewest <= len(flights) * rooms, slowest, np.inf)


def least_slowest_of_whole_s(
    each_s: Floats,
    fixed: Floats,
    rooms: Floats,
    again_s: Floats,
    kept: Floats,
    passing: Floats,
    flights: Floats,
    count: int,
) -> Floats:
    """[shape] -> lower bound on the seconds per micro-batch of the slowest stage, for whole layers of one kind alone,
    each with room for what passes in its turn; infinite if they cannot be held.

    A stage that holds n of them takes at least f(n), whatever else it holds, and f grows with n: the `count`-th least
    of all stages' f(1), f(2), ... is the least time in which all layers find a place. At a price of memory, f(n) is
    what n - 1 layers cost and the last one, with what passes in its turn, less the room.

    each_s, fixed, rooms: columns of seconds without recompute, bytes beside activations, bytes of a stage; again_s,
    kept: [way to recompute]; passing: [way][shape] -> bytes; flights: [stage] -> micro-batches in flight; count: number
    of layers.
    """
    distinct, times = np.unique(flights, return_counts=True)
    even = -(-count // len(flights))
    others = np.arange(min(count, 2 * even + 1), dtype=float)  # layers beside the last one
    held = distinct[:, None] * kept
    # [flights][price]
    prices = tie_prices([again_s], [kept]) / distinct[:, None]
    # [flights][price][way]
    priced = again_s + prices[:, :, None] * held[:, None, :]
    # [shape][flights][price]
    own = each_s[:, None, None] + prices * fixed[:, None, None]
    last = (priced + prices[:, :, None] * passing.T[:, None, None, :]).min(axis=3) + own - prices * rooms[:, None, None]
    own += priced.min(axis=2)
    # [shape][flights][layers], price by price, as there are few
    slowest = last[:, :, 0, None] + own[:, :, 0, None] * others
    for price in range(1, prices.shape[1]):
        np.maximum(slowest, last[:, :, price, None] + own[:, :, price, None] * others, out=slowest)
    # [shape][flights]: bytes that every layer has at least, and the last one
    least = held.min(axis=1) + fixed[:, None]
    turn = (held + passing.T[:, None, :]).min(axis=2) + fixed[:, None]
    slowest[turn[..., None] + least[..., None] * others > rooms[:, None, None]] = np.inf
    most: Floats = slowest[:, :, -1].min(axis=1) if len(others) < count else np.full(len(slowest), np.inf)
    if len(flights) * len(others) < count:
        return most
    places = np.repeat(slowest, times, axis=1).reshape(len(slowest), -1)
    found: Floats = np.minimum(np.partition(places, count - 1, axis=1)[:, count - 1], most)
    return found


def _slowest_of_each_s(cost: Floats, there: Floats, worth: Floats, counts: Floats, slowest: Floats) -> Floats:
    """[shape] -> the least T with this worth of each kind of layer, but at least `slowest`. cost:
    [shape][stage][price][kind]; there: [shape][1][price] -> worth of the room at the price; worth: [shape][kind]."""
    per_worth = np.divide(
        cost, worth[:, None, None, :], out=np.full_like(cost, np.inf), where=worth[:, None, None, :] > 0
    ).min(axis=3)
    rate = np.divide(1.0, per_worth, out=np.full_like(per_worth, np.inf), where=per_worth > 0)
    whole = worth @ counts
    for _ in range(STEPS):
        work = (slowest[:, None, None] + there) * rate
        tightest = work.argmin(axis=2)[:, :, None]
        done = np.take_along_axis(work, tightest, axis=2)[:, :, 0]
        missing = np.maximum(whole - np.maximum(done, 0.0).sum(axis=1), 0.0)
        if not missing.any():
            break
        slowest = slowest + missing / np.take_along_axis(rate, tightest, axis=2)[:, :, 0].sum(axis=1)
    return slowest


def _quantiles(values: Floats) -> Floats:
    """A few of many values, evenly spread from the least to the largest."""
    return np.quantile(values, np.linspace(0, 1, 5)) if len(values) else values


def _spread(number: int, most: int) -> Ints:
    """All of `number` indices, or `most` of them, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, number - 1, min(number, most)).astype(np.int64))
