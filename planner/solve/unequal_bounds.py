"""Bounds of all shapes of a family at once, for shapes whose stages are each on one kind of device (unequal.py).

Each kind of device has its own columns of what layers take and hold there (shape_bounds.py, memory_bounds.py). The
order of the kinds decides which stages are on which kind, so the bound of a shape is one of stages that differ in
seconds, bytes and room (relaxed.py). Columns are [shape], tables [kind of layer][shape], as there.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Floats, Ints
from ..cost.simulate import even_step_s
from ..plan.document import Recompute
from ..plan.pins import Pins
from ..plan.schedules import ZERO_BUBBLE, is_chunked
from .chunked import Chunking
from .memory_bounds import MemoryBounds, in_flight
from .rank_bounds import OnDevice, least_of_ranks_s
from .relaxed import DeviceColumns, least_slowest_of_unequal_s
from .shape_bounds import ShapeBounds
from .space import Family, Leaves
from .table import Table
from .unequal import Kinds, kind_orders


@dataclass(frozen=True)
class _OnKind:
    """What a family's shapes take on one kind of device.

    layers: seconds of a micro-batch, and what is held; where nothing is known of what layers keep, they hold nothing,
    in no room. way_s: table of seconds that a micro-batch takes in a layer on its way there and back; once_s: of a
    layer per step; waits_s: column of seconds that all transfers of a micro-batch take; twice_s: of what the
    optimizer's seconds have too much. flights: [rank] -> micro-batches, at its stage of fewest; whole: micro-batches of
    each stage, and what whole layers cost."""

    layers: DeviceColumns
    way_s: Floats
    once_s: Floats
    waits_s: Floats
    twice_s: Floats
    flights: Floats
    whole: tuple[Floats, OnDevice]


class UnequalBounds:
    """Such bounds for one model, cluster and job; keeps what families share."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self._memory = [MemoryBounds(ShapeBounds(chain)) for chain in kinds.chains]
        self._unordered: dict[Leaves, tuple[Leaves, Ints]] = {}

    def seconds(
        self, family: Family, leaves: Leaves, some: Ints, recompute: Recompute | None, pins: Pins, enough_s: float
    ) -> Floats:
        """[of these shapes, whose stages are on one kind each] -> lower bound in seconds for all cuts and options, with
        the recompute that memory asks for; infinite if the layers cannot be held. Bounds are raised no further than
        `enough_s`."""
        unordered, place = self._without_order(leaves)
        on = [self._on(memory, family, unordered, recompute, pins) for memory in self._memory]
        orders = [leaves.each[i].kind_order for i in some.tolist()]
        in_order = {order: self._in_order(family, on, order, enough_s) for order in dict.fromkeys(orders)}
        return np.array([in_order[order][i] for order, i in zip(orders, place[some].tolist(), strict=True)])

    def slowest_s(self, family: Family, leaves: Leaves, pins: Pins) -> Floats:
        """[shape] -> lower bound on the seconds per micro-batch of the slowest stage, whatever the schedule and the
        order of the kinds. No rank has fewer micro-batches in flight in any of its stages than 1F1B has there, except
        under ZB-V, which has 1F1B's numbers from the last rank to the first: as if the kinds came in the opposite
        order."""
        family = family.any_schedule
        devices = [memory.columns(family, leaves, pins.recompute, pins) for memory in self._memory]
        flights, counts = np.array(in_flight(family)), self._memory[0].bounds.counts
        nothing = [[np.zeros_like(device.each_s) for device in devices]]
        ranks = [np.array(self.kinds.on_stages(order, family.pipeline)) for order in kind_orders(self.kinds.parts)]
        each = [least_slowest_of_unequal_s(devices, on, flights, counts, nothing)[0] for on in ranks]
        least: Floats = np.min(each, axis=0)
        return least

    def _in_order(self, family: Family, on: list[_OnKind], order: tuple[int, ...], enough_s: float) -> Floats:
        """[shape without order] -> the same, with kinds in this order."""
        counts, count, is_even = self._memory[0].bounds.counts, family.num_microbatches, not is_chunked(family.schedule)
        ranks, layers = np.array(self.kinds.on_stages(order, family.pipeline)), [each.layers for each in on]
        of_stages, devices = on[0].whole[0], [each.whole[1] for each in on]
        least = least_of_ranks_s(Table.of(family.frugal), devices, of_stages, ranks)
        if (least >= enough_s).all():
            return least
        cases = [[each.once_s / count for each in on], *([[np.zeros_like(each.once_s) for each in on]] * is_even)]
        busiest, *slowest = least_slowest_of_unequal_s(layers, ranks, on[0].flights, counts, cases)
        fits = np.isfinite(busiest)
        step_s = count * np.where(fits, busiest, 0.0) - np.max([each.twice_s for each in on], axis=0)
        way_s = counts @ np.min([each.way_s for each in on], axis=0) + np.min([each.waits_s for each in on], axis=0)
        if is_even:
            passes = family.schedule, family.pipeline, count, np.where(fits, slowest[0], 0.0), way_s
            way_s = even_step_s(*passes)
        return np.where(fits, np.maximum(np.maximum(step_s, way_s), least), np.inf)

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
        """What the shapes take on the kind of device of these bounds."""
        bounds, everything, num_ranks = memory.bounds, np.arange(len(leaves.each)), family.pipeline
        fastest, data = bounds.fastest(family, leaves, recompute, pins.reshard), bounds.data(family, leaves)
        runs, of_stages, rooms, *ends = memory.layers(family, leaves, everything, recompute, pins)
        weights_s = bounds.weights_s(family) if family.schedule in ZERO_BUBBLE else np.zeros(len(bounds.kinds))
        frame = Chunking(family.schedule, num_ranks, family.virtual_stages)
        kinds = [int(bounds.kind_of_run[group[0]]) for group in bounds.chain.alike]
        each = [runs[kinds.index(kind)] for kind in range(len(bounds.kinds))]
        ways = [run.again_s for run in each], [run.kept for run in each]
        return _OnKind(
            layers=DeviceColumns(fastest.microbatch_s, np.array([run.fixed for run in each]), *ways, rooms),
            way_s=fastest.microbatch_s - weights_s[:, None],
            once_s=fastest.once_s + data.optimizer_s,
            waits_s=bounds.least_waits_s(family, leaves),
            twice_s=data.twice_s,
            flights=np.array([min(of_stages[frame.stages(rank)]) for rank in range(num_ranks)]),
            whole=(of_stages, OnDevice(runs, rooms, *ends)),
        )
