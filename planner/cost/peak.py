"""Memory of one stage as a running maximum over the turns of its layers: what is there while each of them is at
work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..arrays import Floats
from ..plan.shape import InFlight, Shape
from .memory_cost import MASTER_BYTES, StateBytes
from .priced_layer import LayerCost


@dataclass(frozen=True)
class Moment:
    """One backward pass over a stage, with what is there meanwhile. While a layer has its turn, it and the layers
    before it still hold what `before` gives, and the layers after it, whose turn is over, what `after` gives.

    flights: micro-batches whose activations are there when the pass begins; put_off: how many of them wait for their
    backward for weights. kind: a whole backward; or that for inputs, which frees nothing and leaves one more
    micro-batch waiting; or that for weights. before_shards, after_shards: bytes of gradients per trainable element;
    before_whole, after_whole: whether accumulated gradients are there beyond these. copies_stay: layers keep gathered
    copies after their turn. reduces: gradients are reduced in this pass. sends: gradients of the micro-batch before are
    still on their way to the stage before.
    """

    flights: int
    before_shards: float
    after_shards: float
    before_whole: bool
    after_whole: bool
    copies_stay: bool
    reduces: bool
    sends: bool
    put_off: int = 0
    kind: Literal["whole", "inputs", "weights"] = "whole"

    def kept_before(self, cost: LayerCost) -> float:
        """Bytes of a layer's activations until its turn is over."""
        return self.flights * cost.kept_bytes + self.put_off * cost.put_off_bytes

    def kept_after(self, cost: LayerCost) -> float:
        """Bytes of a layer's activations after its turn."""
        if self.kind == "inputs":
            return self.kept_before(cost) + cost.put_off_bytes
        return (self.flights - 1) * cost.kept_bytes + max(0, self.put_off - 1) * cost.put_off_bytes

    def before(self, cost: LayerCost) -> float:
        """Bytes that a layer holds until its turn is over."""
        return self.kept_before(cost) + cost.held_bytes + self.gradients_before(cost)

    def after(self, cost: LayerCost) -> float:
        """Bytes that a layer holds after its turn."""
        return self.kept_after(cost) + self.copies_after(cost) + self.gradients_after(cost)

    def copies_after(self, cost: LayerCost) -> float:
        """Bytes of gathered copies of parameters that a layer holds after its turn."""
        return cost.held_bytes - (0.0 if self.copies_stay else cost.released_bytes)

    def gradients_before(self, cost: LayerCost) -> float:
        """Bytes of a layer's gradients until its turn is over."""
        return cost.trainable_elements * self.before_shards + (cost.accumulated_bytes if self.before_whole else 0.0)

    def gradients_after(self, cost: LayerCost) -> float:
        """Bytes of a layer's gradients after its turn."""
        whole = cost.accumulated_bytes if self.after_whole else 0.0
        return cost.trainable_elements * self.after_shards + whole + cost.root_bytes

    def transient(self, cost: LayerCost, following: LayerCost | None) -> float:
        """Bytes that are there only during a layer's turn. following: the next layer of the stage, if there is one."""
        if self.kind == "weights" and not self.reduces:
            return min(cost.transient_bytes, cost.trainable_elements * MASTER_BYTES)
        return cost.reducing_bytes(following) if self.reduces else cost.transient_bytes

    def shared_gradients(self, state: StateBytes) -> float:
        """Bytes of gradients per element that are counted twice if two layers of a stage share the element."""
        whole = state.accumulated if self.before_whole and self.after_whole else 0.0
        return min(self.before_shards, self.after_shards) + whole

    def shared(self, state: StateBytes) -> float:
        """Bytes per element, of all kinds, that are counted twice if two layers of a stage share the element."""
        return state.sharded_parameters + state.optimizer + state.copied_twice + self.shared_gradients(state)


@dataclass(frozen=True)
class Arrivals:
    """[stage] -> bytes of tensors from earlier stages that it holds, beyond what its layers keep and what it sends.

    inputs: what arrived for one micro-batch in flight and stays as it came, if the first layer is not recomputed.
    passed: gradients of what the stage hands on to the next one; they are there throughout the backward. gradients:
    what the backward sends; under 1F1B it is there until that of the next micro-batch has been made.
    """

    inputs: Floats
    passed: Floats
    gradients: Floats

    def held(self, flights: int, sends: bool, arrived: Floats | float) -> Floats:
        """[stage] -> bytes in all. arrived: bytes of inputs that the first layer keeps itself, because it is
        recomputed."""
        held: Floats = flights * np.maximum(0.0, self.inputs - arrived) + self.passed
        return held + self.gradients if sends else held

    def at(self, stage: int) -> "Arrivals":
        """What one stage holds."""
        here = slice(stage, stage + 1)
        return Arrivals(self.inputs[here], self.passed[here], self.gradients[here])


def moments_of(shape: Shape, state: StateBytes, in_flight: InFlight) -> tuple[Moment, ...]:
    """Those backward passes of a step that may hold most: one in the middle (all gradients are there), the last
    (gradients are reduced, one micro-batch is left), and the first, if it alone finds the pipeline full. If the
    backward is split each is two passes, and the one for inputs frees nothing."""
    whole = _whole_passes(shape, state, in_flight.held)
    if not in_flight.splits or state.buffers:  # stacks with buffers have schedules of their own
        return whole
    return tuple(part for moment in whole for part in _parts(moment, in_flight.put_off))


def _parts(moment: Moment, put_off: int) -> tuple[Moment, Moment]:
    """(the pass for inputs, the pass for weights) of a whole backward."""
    put_off = min(put_off, moment.flights - 1)
    inputs = replace(
        moment,
        after_shards=moment.before_shards,
        after_whole=moment.before_whole,
        reduces=False,
        put_off=put_off,
        kind="inputs",
    )
    return inputs, replace(moment, put_off=put_off + 1, kind="weights")


def _whole_passes(shape: Shape, state: StateBytes, in_flight: int) -> tuple[Moment, ...]:
    count, shards = shape.num_microbatches, state.sharded_gradients
    if state.buffers:
        return (Moment(min(in_flight, count), shards, shards, True, True, True, reduces=False, sends=False),)
    stay = state.copies_stay
    early = shards if count > 1 or state.gradients_stay else 0.0
    sends = shape.schedule == "1f1b" and count > 1
    last = Moment(1, early, shards, count > 1, after_whole=False, copies_stay=False, reduces=True, sends=sends)
    if count == 1:
        return (last,)
    middle = Moment(min(in_flight, count - 1), shards, shards, stay, stay, stay, not stay, sends)
    found = (middle, last) if stay else (middle,)
    if in_flight < count:
        return found
    early = shards if state.gradients_stay else 0.0
    first = Moment(in_flight, early, shards, False, stay, stay, reduces=not stay, sends=False)
    return (*found, first)


def highest(moment: Moment, layers: Sequence[tuple[LayerCost, int]]) -> tuple[int, int]:
    """(index, turn) of the moment in a pass when layers hold most: during the turn of the `turn`-th of the equal layers
    at this index of `layers`. Among equal neighbours that is the first, the last, or the last but one, which still has
    an equal layer after it."""
    there, best = 0.0, (-math.inf, 0, 0)
    for index, (cost, n) in enumerate(layers):
        more = moment.before(cost) - moment.after(cost)
        for turn in {1, max(1, n - 1), n}:
            transient = moment.transient(cost, following_layer(layers, index, turn))
            best = max(best, (there + turn * more + transient, index, turn))
        there += n * more
    return best[1], best[2]


def following_layer(layers: Sequence[tuple[LayerCost, int]], index: int, turn: int) -> LayerCost | None:
    """The next layer of the stage after the `turn`-th of the equal layers at this index."""
    if turn < layers[index][1]:
        return layers[index][0]
    return layers[index + 1][0] if index + 1 < len(layers) else None


def running(before: Floats, after: Floats, transient: Floats, at_end: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """([composition][run] -> bytes before the run's first turn, [composition][run] -> largest number of bytes during a
    turn of one of its layers, -inf if it has none there).

    before, after, transient: [run] -> bytes of one layer. at_end: [composition][run] -> transient of the run's last
    layer. counts: [composition][run] -> number of layers.
    """
    more = before - after
    rise = counts * more
    start = np.cumsum(rise, axis=1) - rise + (counts @ after)[:, None]
    inner = start + np.maximum(more, (counts - 1) * more) + transient
    most = np.maximum(start + rise + at_end, np.where(counts > 1, inner, -np.inf))
    return start, np.where(counts == 0, -np.inf, most)
