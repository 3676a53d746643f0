"""Bounds of all shapes of a family at once whose stages are each on one kind of device (unequal.py).

Each kind of device has columns of its own of what layers take and hold there (shape_bounds.py, memory_bounds.py). Which
stages are on which kind is decided by the order of the kinds, so that a shape's bound is that of stages which differ in
seconds, bytes and room (relaxed.py). Columns are [shape], tables [kind of layer][shape], as there.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cost.simulate import even_step_s
from ..plan.document import Recompute
from ..plan.pins import Pins
from ..plan.schedules import is_chunked
from .memory_bounds import MemoryBounds
from .relaxed import StageColumns, least_slowest_of_each_unequal_s
from .shape_bounds import ShapeBounds
from .space import Family, Leaves
from .unequal import Kinds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class _OnKind:
    """What a family's shapes take on one kind of device.

    microbatch_s, once_s: tables of seconds of a layer, per micro-batch and per step; waits_s: column of seconds that
    all transfers of a micro-batch take; twice_s: of what the optimizer's seconds have too much. fixed: table of bytes
    whatever is recomputed; again_s, kept: [kind of layer][way to recompute] -> seconds longer, bytes kept; flights:
    [stage] -> micro-batches; rooms: [stage][shape] -> bytes. Where nothing is known of what layers keep, they hold
    nothing, in no room."""

    microbatch_s: Floats
    once_s: Floats
    waits_s: Floats
    twice_s: Floats
    fixed: Floats
    again_s: list[Floats]
    kept: list[Floats]
    flights: Floats
    rooms: Floats

    def stage(self, stage: int, some: Ints, share_of_once: float) -> StageColumns:
        """What a stage on this kind can take in these shapes; share_of_once: of what is done once per step, that counts
        with each micro-batch."""
        each_s = self.microbatch_s[:, some] + share_of_once * self.once_s[:, some]
        held = self.fixed[:, some], self.again_s, self.kept
        return StageColumns(each_s, *held, float(self.flights[stage]), self.rooms[stage, some])


class UnequalBounds:
    """Such bounds of one model, cluster and job; keeps what families share."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self._memory = [MemoryBounds(ShapeBounds(chain)) for chain in kinds.chains]
        self._unordered: dict[Leaves, tuple[Leaves, Ints]] = {}

    def seconds(self, family: Family, leaves: Leaves, recompute: Recompute | None, pins: Pins) -> tuple[Flags, Floats]:
        """(which shapes have stages on one kind each, [of those] -> seconds that no assignment beats, with the
        recompute that memory asks for; infinite where the layers cannot be held)."""
        own = np.array([bool(leaf.kind_order) for leaf in leaves.each])
        if not own.any():
            return own, np.zeros(0)
        unordered, place = self._without_order(leaves)
        on = [self._on(memory, family, unordered, recompute, pins) for memory in self._memory]
        orders = [leaf.kind_order for leaf in leaves.each if leaf.kind_order]
        least = np.zeros(len(orders))
        for order in dict.fromkeys(orders):
            here = np.array([other == order for other in orders])
            least[here] = self._in_order(family, on, order, place[own][here])
        return own, least

    def _in_order(self, family: Family, on: list[_OnKind], order: tuple[int, ...], some: Ints) -> Floats:
        """[of these shapes without order] -> the same with kinds in that order."""
        counts, count = self._memory[0].bounds.counts, family.num_microbatches
        stages = list(enumerate(self.kinds.on_stages(order, family.pipeline)))
        slowest, busiest = (
            least_slowest_of_each_unequal_s([on[kind].stage(stage, some, share) for stage, kind in stages], counts)
            for share in (0.0, 1 / count)
        )
        fits = np.isfinite(slowest)
        slowest, busiest = np.where(fits, slowest, 0.0), np.where(fits, busiest, 0.0)
        step_s = count * busiest - np.max([each.twice_s[some] for each in on], axis=0)
        if not is_chunked(family.schedule):
            pass_s = counts @ np.min([each.microbatch_s[:, some] for each in on], axis=0)
            pass_s += np.min([each.waits_s[some] for each in on], axis=0)
            step_s = np.maximum(step_s, even_step_s(family.schedule, family.pipeline, count, slowest, pass_s))
        return np.where(fits, step_s, np.inf)

    def _without_order(self, leaves: Leaves) -> tuple[Leaves, Ints]:
        """(leaves without the order of kinds, [leaf] -> which of them): layers cost the same in every order."""
        if leaves not in self._unordered:
            each = [replace(leaf, kind_order=()) if leaf.kind_order else None for leaf in leaves.each]
            place = {leaf: i for i, leaf in enumerate(dict.fromkeys(leaf for leaf in each if leaf))}
            self._unordered[leaves] = Leaves(tuple(place)), np.array([place[leaf] if leaf else -1 for leaf in each])
        return self._unordered[leaves]

    def _on(
        self, memory: MemoryBounds, family: Family, leaves: Leaves, recompute: Recompute | None, pins: Pins
    ) -> _OnKind:
        """What the shapes take on the kind that has these bounds."""
        bounds, everything = memory.bounds, np.arange(len(leaves.each))
        fastest, data = bounds.fastest(family, leaves, recompute, pins.reshard), bounds.data(family, leaves)
        seconds = fastest.microbatch_s, fastest.once_s + data.optimizer_s
        waits_s, num_stages = bounds.least_waits_s(family, leaves), family.pipeline
        many = None if is_chunked(family.schedule) else memory.layers(family, leaves, everything, recompute, pins)
        if many is None:
            nothing = [np.zeros(1) for _ in bounds.kinds]
            held = np.zeros_like(fastest.microbatch_s), nothing, nothing
            flights, rooms = np.zeros(num_stages), np.zeros((num_stages, len(everything)))
        else:
            runs, flights, rooms, _, _ = many
            kinds = [int(bounds.kind_of_run[group[0]]) for group in bounds.chain.alike]
            each = [runs[kinds.index(kind)] for kind in range(len(bounds.kinds))]
            held = np.array([run.fixed for run in each]), [run.again_s for run in each], [run.kept for run in each]
        return _OnKind(*seconds, waits_s, data.twice_s, *held, flights, rooms)
