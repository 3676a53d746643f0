"""What the dual of a program (fluid_program.py) is worth for other shapes: a bound of its own for every shape with the
same table, whatever its layers take, each layer where it is cheapest at the prices of paths and memory. It is worked
out for many shapes at once, and spares most of them a program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Floats
from .table import Table


@dataclass(frozen=True)
class PathPrices:
    """The dual of a program: the price of a second of each pass, and of a byte on each rank.

    passes: [forward, backward, weight][stage] -> a mean over paths. ends: [rank] -> share of the paths that end on it.
    per_byte_s: [rank] -> seconds. given: [run][stage] -> seconds by which a layer there is cheaper, for the order of
    layers and because every stage holds some; given_s: sum of what that is worth.
    """

    passes: Floats
    ends: Floats
    per_byte_s: Floats
    given: Floats
    given_s: float

    @property
    def num_waits(self) -> Floats:
        """[stage but the last] -> number of transfers after it for which the paths wait."""
        return num_waits_of(self.passes)


def num_waits_of(passes: Floats) -> Floats:
    """[stage but the last] -> number of passes that wait for what crosses after it: forwards of the next stage, and its
    own backwards."""
    waits: Floats = passes[0, 1:] + passes[1, :-1]
    return waits


@dataclass(frozen=True)
class ManyLayers:
    """Lower bounds on the costs of the layers of one run, in many shapes. forward_s, both_s: [shape] -> seconds of the
    forward, and of both passes, at the fastest option; fixed: [shape] -> bytes with any option; again_s, kept: [option]
    -> seconds longer, bytes that a micro-batch keeps. weight_s: seconds of gradients of weights, with zero bubbles;
    once_s: [shape] -> seconds at the end of a step; paired: [shape] -> bytes by which the turn of a layer takes more,
    if one of its kind comes after it in its stage. Runs of one kind share these arrays."""

    count: float
    forward_s: Floats
    both_s: Floats
    weight_s: float
    fixed: Floats
    again_s: Floats
    kept: Floats
    once_s: Floats
    paired: Floats

    def of(self, count: float) -> "ManyLayers":
        """`count` layers that cost the same."""
        return replace(self, count=count)


def least_of_many_s(
    table: Table,
    prices: Sequence[PathPrices],
    runs: Sequence[ManyLayers],
    flights: Floats,
    rooms: Floats,
    waits_s: Floats,
    least_end_s: Floats,
    scales: Sequence[float] = (1.0,),
) -> Floats:
    """[shape] -> lower bound in seconds for all steps of a shape with this table, by prices that were found for other
    shapes: the highest that any of them gives. flights: [stage] -> micro-batches; rooms: [rank][shape] -> bytes;
    waits_s, least_end_s: [stage but the last][shape] and [shape], as of FluidPipelines.least_s; scales: of the prices
    of memory, any of which gives a bound."""
    rank_of, last = np.array(table.rank_of), table.num_stages - 1
    each = np.repeat(np.arange(len(prices)), len(scales))  # [price], at each of the scales
    scale = np.tile(np.array(scales), len(prices))
    per_byte_s = np.array([one.per_byte_s for one in prices])[each] * scale[:, None]
    ends, given = (np.array([getattr(one, name) for one in prices]) for name in ("ends", "given"))
    passes = np.array([one.passes for one in prices]).transpose(1, 0, 2)
    num_waits, given_s = (np.array([getattr(one, name) for one in prices])[each] for name in ("num_waits", "given_s"))
    seconds: Floats = num_waits @ waits_s + least_end_s + given_s[:, None] - per_byte_s @ rooms
    known: dict[tuple[int, int | None], Floats] = {}  # by kind, and the stage if that is known: [price][stage][shape]
    counts: dict[tuple[tuple[int, int | None], bytes], tuple[float, Floats]] = {}
    for r, layers in enumerate(runs):
        alone = layers.count == 1
        stage = 0 if alone and r == 0 else last if alone and r == len(runs) - 1 else None
        some = slice(None) if stage is None else slice(stage, stage + 1)
        kind = id(layers.both_s), stage
        if kind not in known:
            forward, backward, weight = passes[:, :, some]
            at = rank_of[some]
            memory = per_byte_s[:, at]
            # [price][stage][option]
            again = backward[each, :, None] * layers.again_s + (memory * flights[some])[:, :, None] * layers.kept
            beside = again.min(axis=2) + ((weight - backward) * layers.weight_s)[each]
            passed = (
                (forward - backward)[:, :, None] * layers.forward_s
                + backward[:, :, None] * layers.both_s
                + ends[:, at, None] * layers.once_s
            )
            known[kind] = passed[each] + memory[:, :, None] * layers.fixed + beside[:, :, None]
        here = given[:, r, some]
        key = kind, here.tobytes()
        counts[key] = counts.get(key, (0.0, here))[0] + layers.count, here
    for (kind, _), (count, here) in counts.items():
        seconds = seconds + count * (known[kind] - here[each, :, None]).min(axis=1)
    most: Floats = seconds.max(axis=0)
    return most
