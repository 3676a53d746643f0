"""Exact lower bounds on what ranks with several stages recompute, where each layer is whole and has one option.

If layers could be divided, a rank would recompute just the fraction of a layer that its memory asks for, and leave room
for that fraction of its turn. Here options are packed layer by layer: of all (bytes, seconds) that so many layers can
have, those are kept that no other beats in both. That is done for each option whose turn may be the largest: the other
layers then have options whose turns are no larger, and the room is less by that turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..arrays import Floats

ROUNDING = 1e-9
"""Relative difference up to which sums of the same bytes in another order may differ."""


@dataclass(frozen=True)
class LayerTurns:
    """Bytes that are there only in a layer's turn, for a run of layers that may be cut. alone, paired: [option] ->
    bytes for a layer alone, and for one with another after it in its stage. run: number of the run; ahead, after:
    layers before and after it in the chain, which may be all that the first and last stages hold; left: [rank] -> bytes
    that its room leaves for turns already."""

    run: int
    ahead: int
    after: int
    alone: Floats
    paired: Floats
    left: Floats


def least_again_s(
    own: Sequence[Floats],
    further: Floats,
    again_s: Floats,
    alone: Floats,
    paired: Floats,
    num_stages: int,
    room: float,
    most: int,
) -> Floats:
    """[layers] -> lower bound on the seconds of recompute for a micro-batch with so many layers on a rank, from one for
    each of its `own` stages to `most`; infinite if they cannot be held.

    own: for each stage that holds a layer for certain, [option] -> bytes of it; further: [option] -> bytes of each
    further layer; again_s, alone, paired: [option]; num_stages: of the rank; with more layers than that, two are in one
    stage; room: bytes, turns included.
    """
    found = np.full(most - len(own) + 1, np.inf)
    if not own:
        found[0] = 0.0
    order = np.argsort(alone, kind="stable")
    for number in range(1, len(order) + 1):
        allowed, largest = order[:number], float(alone[order[number - 1]])
        sizes, seconds = np.zeros(1), np.zeros(1)
        for count in range(1, most + 1):
            each = own[count - 1] if count <= len(own) else further
            turn = largest if count <= num_stages else max(largest, float(paired[allowed].min()))
            sizes = np.add.outer(sizes, each[allowed]).ravel()
            seconds = np.add.outer(seconds, again_s[allowed]).ravel()
            fits = sizes <= (room - turn) * (1 + ROUNDING)
            sizes, seconds = _unbeaten(sizes[fits], seconds[fits])
            if not len(sizes):
                break
            if count >= len(own):
                found[count - len(own)] = min(found[count - len(own)], float(seconds[-1]))
    return found * (1 - ROUNDING)


def _unbeaten(sizes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Those (bytes, seconds) that no other beats in both, the fewest bytes first; of several that differ only by
    rounding, one."""
    order = np.lexsort((seconds, sizes))
    sizes, seconds = sizes[order], seconds[order]
    before = np.minimum.accumulate(np.concatenate(([np.inf], seconds[:-1])))
    better = seconds < before - ROUNDING * np.abs(seconds)
    return sizes[better], seconds[better]


def hull(first: int, seconds: Floats) -> list[tuple[float, float]]:
    """(seconds at no layers, seconds for each layer) of lines below [layers] -> seconds, from `first` layers on: the
    sides of its lower convex hull. The seconds are finite up to some number of layers."""
    corners: list[tuple[int, float]] = []
    for number, value in enumerate(seconds[np.isfinite(seconds)].tolist(), first):
        while len(corners) > 1:
            (a, at_a), (b, at_b) = corners[-2:]
            if (at_b - at_a) * (number - a) < (value - at_a) * (b - a):
                break
            corners.pop()
        corners.append((number, value))
    lines = []
    for (a, at_a), (b, at_b) in pairwise(corners):
        slope = (at_b - at_a) / (b - a)
        lines.append((at_a - slope * a, slope))
    return lines or [(value, 0.0) for _, value in corners]
