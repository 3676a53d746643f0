"""Bounds that take memory into account, for all shapes of a family: what each shape holds whatever is recomputed, and
what recompute adds.

Layers are taken as divisible, and memory has a price (relaxed.py). The ways to recompute are those of the family, at
their least costs, so shapes differ only in what they hold of parameters, gradients and copies. Columns are [shape],
tables [kind of layer][shape], as in shape_bounds.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Flags, Floats, Ints
from ..cost.kinds import Kind
from ..cost.memory_cost import state_bytes, uses_fully_shard
from ..cost.simulate import even_step_s
from ..plan.document import Recompute
from ..plan.pins import Pins
from ..plan.schedules import ZERO_BUBBLE, is_chunked, rank_and_chunk
from ..plan.shape import LayerOption, Offered, Shape
from .chunked import Chunking, LeastRecompute, Recomputable, StageCuts
from .path_prices import ManyLayers
from .relaxed import DeviceColumns, least_of_each_one_s, least_slowest_of_each_s, least_slowest_of_whole_s
from .shape_bounds import FastestTables, ShapeBounds
from .space import Family, Leaves
from .transient_bounds import Gathered, passing_bytes


@dataclass(frozen=True)
class _Ways:
    """[kind] -> [way to recompute] -> seconds that a micro-batch takes longer at least, and bytes that a layer keeps of
    it. options: those ways, each with the place of what it keeps."""

    again_s: list[Floats]
    kept: list[Floats]
    options: list[tuple[LayerOption, ...]]


@dataclass(frozen=True)
class _HeldBytes:
    """Bytes in the middle of a step, whatever is recomputed. Tables of what a layer holds without copies of parameters,
    and of those copies; the column of what is counted too often for elements that several layers read."""

    fixed: Floats
    copies: Floats
    twice: Floats
    copies_stay: Flags
    sharded: Flags


class MemoryBounds:
    """Such bounds for one model, cluster and job; keeps what families share."""

    def __init__(self, bounds: ShapeBounds) -> None:
        self.bounds = bounds
        self.model = bounds.model
        self._common = int(bounds.counts.argmax())
        self._known_ways: dict[tuple[object, ...], _Ways] = {}
        self._known_slowest: dict[tuple[object, ...], Floats] = {}
        self._known_held: dict[tuple[object, ...], _HeldBytes] = {}

    def seconds(self, family: Family, leaves: Leaves, some: Ints, recompute: Recompute | None, pins: Pins) -> Floats:
        """[of these shapes] -> lower bound in seconds for all cuts and options; infinite if what is held cannot fit.
        For equal devices only."""
        ways, counts = self._ways(family, leaves, recompute, pins.offered), self.bounds.counts
        held = self._held(family, leaves)
        room = self.bounds.held(family, leaves).room / family.pipeline + held.twice
        kept, given = self.bounds.options(family, leaves, recompute, pins.reshard)
        if family.pipeline == 1:
            seconds = self._on_one(family, kept, given, held, ways, room, some)
            return seconds - self.bounds.data(family, leaves).twice_s[some]
        count, shape = family.num_microbatches, family.frugal
        slowest = self.slowest_s(family, leaves, recompute, pins)[some]
        if is_chunked(family.schedule):
            return count * slowest
        each, room = kept.microbatch_s[:, some], room[some] - self.model.held_bytes(shape)
        # At the last layer's turn all but one micro-batch are there; the last one's too, if there is no other.
        flights = np.array([float(max(1, min(shape.in_flight(s), count - 1))) for s in range(shape.pipeline)])
        first, where, least_s = self._grouped(family, leaves, each, some)
        fixed = (held.fixed + held.copies)[:, some][:, first]
        fluid = least_slowest_of_each_s(least_s, fixed, room[first], ways.again_s, ways.kept, flights, counts)
        slowest = np.maximum(slowest, fluid[where])
        fits = np.isfinite(slowest)
        pass_s = counts @ each + self.bounds.least_waits_s(family, leaves)[some]
        least_step_s = even_step_s(family.schedule, family.pipeline, count, np.where(fits, slowest, 0.0), pass_s)
        return np.where(fits, least_step_s, np.inf)

    def layers(
        self, family: Family, leaves: Leaves, some: Ints, recompute: Recompute | None, pins: Pins
    ) -> tuple[list[ManyLayers], Floats, Floats, Floats, Floats]:
        """What layers take in these shapes of a pipeline, as least_of_many_s wants it: ([run] of layers,
        [stage] -> micro-batches, [rank][shape] -> bytes, [stage but the last][shape] -> seconds waited for a transfer
        after it, and [shape] -> seconds at the end)."""
        ways, bounds, shape = self._ways(family, leaves, recompute, pins.offered), self.bounds, family.frugal
        held, fastest = self._held(family, leaves), bounds.fastest(family, leaves, recompute, pins.reshard)
        data = bounds.data(family, leaves)
        fixed = (held.fixed + held.copies)[:, some]
        zero_bubble = family.schedule in ZERO_BUBBLE
        turns = [
            self._passing(family, leaves, kind, options, kept, some)
            for kind, (options, kept) in enumerate(zip(ways.options, ways.kept, strict=True))
        ]
        alone, paired = (np.array([turn[i].min(axis=0) for turn in turns]) for i in (0, 1))
        each = [
            ManyLayers(
                count=1.0,
                forward_s=fastest.forward_s[kind, some],
                both_s=fastest.microbatch_s[kind, some],
                weight_s=self.model.compute(bounds.kinds[kind], shape).backward_weight if zero_bubble else 0.0,
                fixed=fixed[kind],
                again_s=ways.again_s[kind] - ways.again_s[kind].min(),
                kept=ways.kept[kind],
                once_s=fastest.once_s[kind, some] + data.optimizer_s[kind, some],
                paired=paired[kind] - alone[kind],
            )
            for kind in range(len(bounds.kinds))
        ]
        groups = bounds.chain.alike
        runs = [each[bounds.kind_of_run[group[0]]].of(float(bounds.chain.lengths[group].sum())) for group in groups]
        num_stages, count = shape.pipeline * shape.virtual_stages, shape.num_microbatches
        flights = np.array([float(shape.in_flight(stage)) for stage in range(num_stages)])
        if shape.virtual_stages == 1:  # a running maximum: at the last layer's turn another micro-batch may be gone
            flights = np.minimum(flights, max(1, count - 1))
        room = bounds.held(family, leaves).room[some] / family.pipeline + held.twice[some]
        rooms = np.tile(room - shape.virtual_stages * self.model.held_bytes(shape), (family.pipeline, 1))
        rank_of = [rank_and_chunk(shape.schedule, stage, shape.pipeline)[0] for stage in range(num_stages)]
        rooms -= bounds.chain.least_turns(rank_of, alone[bounds.kind_of_run])
        crossings = self.model.crossings(shape)
        at_place = np.array([crossings[place].bytes for place in bounds.chain.places])
        crossing = bounds.chain.least_between(at_place, num_stages)
        for stage, rank in enumerate(rank_of[:-1]):
            rooms[rank] -= (flights[stage] + 1) * crossing[stage]
        return runs, flights, rooms, bounds.least_between_s(family, leaves)[:, some], -data.twice_s[some]

    def columns(self, family: Family, leaves: Leaves, recompute: Recompute | None, pins: Pins) -> DeviceColumns:
        """Lower bounds for every stage of these shapes of a pipeline on this device, whatever the schedule."""
        ways, held = self._ways(family, leaves, recompute, pins.offered), self._held(family, leaves)
        room = self.bounds.held(family, leaves).room / family.pipeline + held.twice
        return DeviceColumns(
            each_s=self.bounds.fastest(family, leaves, recompute, pins.reshard).microbatch_s,
            fixed=held.fixed + held.copies,
            again_s=[seconds - seconds.min() for seconds in ways.again_s],
            kept=ways.kept,
            rooms=np.tile(room - self.model.held_bytes(family.frugal), (family.pipeline, 1)),
        )

    def of_cuts(
        self,
        family: Family,
        leaves: Leaves,
        some: Ints,
        recompute: Recompute | None,
        pins: Pins,
        cuts: Sequence[StageCuts],
    ) -> Floats:
        """[of these shapes] -> lower bound in seconds for a chunked family with the best of these cuts, where each rank
        recomputes what its memory asks for, and layers may be divided."""
        bounds, here, shape = self.bounds, self.bounds.kind_of_run, family.frugal
        ways, held = self._ways(family, leaves, recompute, pins.offered), self._held(family, leaves)
        room = (bounds.held(family, leaves).room / family.pipeline + held.twice)[some]
        room -= self.model.held_bytes(shape)
        fastest, each = (
            bounds.options(family, leaves, recompute, pins.reshard)[0],
            zip(ways.options, ways.kept, strict=True),
        )
        turns = [self._passing(family, leaves, kind, *own, some) for kind, own in enumerate(each)]
        layers = Recomputable(
            again_s=[ways.again_s[kind] for kind in here],
            kept=[ways.kept[kind] for kind in here],
            turn=[turns[kind][0] for kind in here],
            kind=here,
        )
        least = LeastRecompute.of(shape, layers)
        runs = fastest.microbatch_s[:, some][here], fastest.forward_s[:, some][here]
        fixed = (held.fixed + held.copies)[here][:, some]
        crossing = np.array([cut.bytes for cut in self.model.crossings(shape)])
        found = [np.full(len(some), np.inf)]
        for cut in cuts:
            waits_s = bounds.waits_s(family, leaves, cut)[:, some]
            once_s = bounds.once_s(family, leaves, fastest, cut.work)[:, some]
            beside = waits_s + least.added_s(cut, fixed, room, crossing), once_s
            found.append(cut.least_of_each_s(family.schedule, family.num_microbatches, *runs, *beside))
        least_s: Floats = np.min(found, axis=0)
        return least_s

    def slowest_s(self, family: Family, leaves: Leaves, recompute: Recompute | None, pins: Pins) -> Floats:
        """[shape] -> lower bound on the seconds per micro-batch of a pipeline's slowest rank, from holding all layers
        of the most frequent kind, whatever the schedule: none has fewer micro-batches in flight than 1F1B. Infinite if
        they cannot be held. recompute: as in `seconds`; it counts if it is pinned."""
        recompute = recompute if pins.recompute else None
        return self._slowest_s(family.any_schedule, leaves, recompute, pins, in_flight(family.any_schedule))

    def slowest_chunked_s(self, family: Family, leaves: Leaves, recompute: Recompute | None, pins: Pins) -> Floats:
        """[shape] -> lower bound on the seconds per micro-batch of a chunked family's slowest rank, from holding all
        layers of the most frequent kind, with the recompute that its schedule allows. For an interleaved rank the
        micro-batches in flight are those of the stage that has fewest."""
        if family.schedule in ZERO_BUBBLE:
            return self._slowest_s(family.any_schedule, leaves, recompute, pins, in_flight(family.any_schedule))
        frame = Chunking(family.schedule, family.pipeline, family.virtual_stages)
        each = frame.flights(family.num_microbatches)
        fewest = tuple(min(each[stage] for stage in frame.stages(rank)) for rank in range(family.pipeline))
        return self._slowest_s(replace(family, virtual_stages=2), leaves, recompute, pins, fewest)

    def _slowest_s(
        self, family: Family, leaves: Leaves, recompute: Recompute | None, pins: Pins, flights: tuple[float, ...]
    ) -> Floats:
        """[shape] -> lower bound on the seconds per micro-batch of the slowest rank, from holding all layers of the
        most frequent kind. flights: [rank] -> micro-batches in flight. recompute: of all layers; None: each chooses."""
        key = leaves, family, recompute, pins.offered, flights
        if key not in self._known_slowest:
            kind, everywhere = self._common, np.arange(len(leaves.each))
            ((again_s, kept),) = self._ways_of_kinds(family, leaves, recompute, pins.offered, [kind])
            each_s = self.bounds.microbatch_s(family, leaves, kind, recompute, pins.reshard)
            first, where, least_s = self._grouped(family, leaves, each_s[None], everywhere)
            held = self._held(family, leaves)
            room = self.bounds.held(family, leaves).room / family.pipeline + held.twice
            room = room[first] - self.model.held_bytes(family.frugal)
            fixed = (held.fixed[kind] + held.copies[kind])[first]
            options = self.model.ways_with_places(self.bounds.kinds[kind], recompute, pins.offered)
            passing, _ = self._passing(family, leaves, kind, options, kept, first)
            alone = again_s, kept, passing, np.array(flights), int(self.bounds.counts[kind])
            self._known_slowest[key] = least_slowest_of_whole_s(least_s[0], fixed, room, *alone)[where]
        return self._known_slowest[key]

    def _grouped(self, family: Family, leaves: Leaves, each_s: Floats, some: Ints) -> tuple[Ints, Ints, Floats]:
        """(indices of one shape for each group of shapes that differ only in placement, [of these shapes] -> number of
        its group, [kind][group] -> least of `each_s` in it). Shapes that are only placed differently have the same
        memory."""
        if leaves.anywhere:
            return np.arange(len(some)), np.arange(len(some)), each_s
        alike = self.bounds.alike(family, leaves)[1]
        _, first, where = np.unique(alike[some], return_index=True, return_inverse=True)
        order = np.argsort(where, kind="stable")
        starts = np.searchsorted(where[order], np.arange(len(first)))
        return first, where, np.minimum.reduceat(each_s[:, order], starts, axis=1)

    def _on_one(
        self,
        family: Family,
        kept: FastestTables,
        given: FastestTables | None,
        held: _HeldBytes,
        ways: _Ways,
        room: Floats,
        some: Ints,
    ) -> Floats:
        """[of these shapes] -> lower bound in seconds for all options with a single stage, where each layer keeps or
        gives back its gathered parameters; infinite if the layers cannot be held."""
        room = room[some] - self.model.held_bytes(family.frugal)
        choices = [(kept.step_s[:, some], (held.fixed + held.copies)[:, some])]
        if given is not None:
            choices.append((given.step_s[:, some], held.fixed[:, some]))
        again_s = [family.num_microbatches * seconds for seconds in ways.again_s]
        return least_of_each_one_s(choices, room, again_s, ways.kept, self.bounds.counts)

    def _passing(
        self, family: Family, leaves: Leaves, kind: int, options: tuple[LayerOption, ...], kept: Floats, some: Ints
    ) -> tuple[Floats, Floats]:
        """[way][of these shapes] -> bytes that are there only during the turn of a layer of this kind, as passing_bytes
        gives them. options, kept: [way]."""
        data, held, own = self.bounds.data(family, leaves), self._held(family, leaves), self.bounds.kinds[kind]
        ahead = self.model.fetched_ahead(own, family.frugal)
        gathered = data.elements.gathered
        columns = Gathered(
            gathered=gathered[kind][some],
            trainable=data.elements.trainable_gathered[kind][some],
            reduced=data.elements.trainable_reduced[kind][some],
            ahead=gathered[self.bounds.kinds.index(ahead)][some] if ahead else np.zeros(len(some)),
            sharded_over=self.bounds.sharded_over(family, leaves)[some],
            copies_stay=held.copies_stay[some],
            sharded=held.sharded[some],
        )
        resharded = data.resharded[kind][some]
        return passing_bytes(self.model, own, family.frugal, options, kept, columns, resharded)

    def _ways(self, family: Family, leaves: Leaves, recompute: Recompute | None, offered: Offered) -> _Ways:
        split = family.tensor, family.sequence, family.cuts, family.context, family.context_kind, family.expert
        key = leaves, *split, family.micro_batch, family.schedule in ZERO_BUBBLE, recompute, offered
        if key not in self._known_ways:
            found = self._ways_of_kinds(family, leaves, recompute, offered, range(len(self.bounds.kinds)))
            self._known_ways[key] = _Ways(
                [seconds for seconds, _ in found],
                [kept for _, kept in found],
                [self.model.ways_with_places(kind, recompute, offered) for kind in self.bounds.kinds],
            )
        return self._known_ways[key]

    def _ways_of_kinds(
        self, family: Family, leaves: Leaves, recompute: Recompute | None, offered: Offered, some: Sequence[int]
    ) -> list[tuple[Floats, Floats]]:
        """[of these kinds] -> what `_ways_of` returns for it."""
        attention_s, rest_s = self.bounds.exchanges_again_s(family, leaves, some)
        return [
            self._ways_of(self.bounds.kinds[i], family.frugal, recompute, offered, float(a), float(r))
            for i, a, r in zip(some, attention_s, rest_s, strict=True)
        ]

    def _ways_of(
        self,
        kind: Kind,
        shape: Shape,
        recompute: Recompute | None,
        offered: Offered,
        attention_s: float,
        rest_s: float,
    ) -> tuple[Floats, Floats]:
        """([way] -> seconds longer than without recompute, or than with the pinned one; [way] -> bytes kept)."""
        model, options = self.model, self.model.ways_with_places(kind, recompute, offered)
        kept, again_s = self.bounds.least.of_ways(kind, shape, options)
        attention = np.array([model.repeats_attention(kind, shape, way.recompute) for way in options])
        rest = np.array([way.recompute in ("selective", "full") for way in options])  # parts repeat some of it, or none
        again_s = again_s + attention_s * attention + rest_s * rest
        return again_s - again_s[0], kept

    def _held(self, family: Family, leaves: Leaves) -> _HeldBytes:
        key = leaves, family.sequence, family.cuts, family.virtual_stages > 1
        if key not in self._known_held:
            self._known_held[key] = self._found_held(family, leaves)
        return self._known_held[key]

    def _found_held(self, family: Family, leaves: Leaves) -> _HeldBytes:
        data = self.bounds.data(family, leaves)
        shapes, alike = self.bounds.alike(family, leaves)
        several, chunks = family.num_microbatches > 1, family.virtual_stages > 1
        rows = []
        for shape in shapes:
            state = state_bytes(shape, self.model.training)
            gradients = state.sharded_gradients
            present, whole, root = several or state.gradients_stay, several and state.copies_stay, 0.0
            if chunks:  # all that a stage ever holds
                present, whole, root = True, True, state.root_gradients
            copied = uses_fully_shard(shape, self.model.training)
            twice = state.sharded_parameters + gradients + state.optimizer + max(0.0, state.copied_twice)
            rows.append((
                state.sharded_parameters,
                state.optimizer + (gradients if present else 0.0),
                state.gathered if copied else 0.0,
                state.accumulated if whole or state.buffers else 0.0,
                float(state.buffers),
                root,
                twice + state.accumulated,
                float(state.copies_stay),
                float(copied),
            ))  # fmt: skip
        stored, trained, gathered, accumulated, buffers, root, twice, stay, copied = np.array(rows).T[:, alike]
        elements = data.elements
        fixed = elements.stored * stored + elements.trainable_stored * trained
        late = np.where(buffers > 0, elements.trainable_gathered, elements.trainable_reduced)
        fixed += late * accumulated + np.where(data.in_root, elements.trainable_gathered * root, 0.0)
        copies = np.where(data.resharded, 0.0, elements.gathered * gathered)
        twice = twice * self.bounds.shared_elements(family, leaves)
        return _HeldBytes(fixed, copies, twice, stay > 0, copied > 0)


def in_flight(family: Family) -> tuple[float, ...]:
    """[rank] -> micro-batches in flight under 1F1B during the last layer's turn, when one may be gone already."""
    most = max(1, family.num_microbatches - 1)
    return tuple(float(min(ahead, most)) for ahead in range(family.pipeline, 0, -1))
