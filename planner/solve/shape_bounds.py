"""Bounds of all shapes of a family at once, from what layers take at their fastest options, computed in columns of
numbers.

Gathers, reductions and the optimizer depend on how data is split and axes are ordered, not on micro-batch and schedule,
so they are priced once for a split; a family adds compute and exchanges. The numbers are those of CostModel.cost at the
fastest options, without recompute unless that is pinned. If leaves stand for all orders of the axes, they are those of
the order in which traffic takes least. Columns are [shape], tables [kind of layer][shape].
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from ..arrays import Flags, Floats, Ints
from ..cost.chain import Chain
from ..cost.comm_cost import CollectiveKind, Exchanged, RingTimes, ring_rates
from ..cost.data_cost import DataRates, added_elements, added_share, exposed_data_s, gather_s, reduce_s
from ..cost.kinds import Kind
from ..cost.memory_cost import state_bytes
from ..cost.stage_cost import allocatable_bytes
from ..plan.document import Recompute, parts_of
from ..plan.schedules import ZERO_BUBBLE
from ..plan.shape import Shape
from .chunked import Chunking, StageCuts
from .layer_lower_bounds import LeastWork
from .space import Family, Leaf, Leaves

AXES_OF_LAYERS = ("tensor", "context", "expert")
"""Mesh axes whose ranks exchange something in every layer and micro-batch."""

MOST_KEPT = 20_000_000
"""Most numbers in tables that are kept for further families of the same splits: 160 MB."""


@dataclass(frozen=True)
class FastestTables:
    """Tables of least seconds of a layer: per micro-batch; of its forward; of reductions and gathers once per step; and
    of a whole step with one stage."""

    microbatch_s: Floats
    forward_s: Floats
    once_s: Floats
    step_s: Floats

    def at_most(self, other: "FastestTables") -> "FastestTables":
        """The smaller of both, entry by entry."""
        return FastestTables(
            np.minimum(self.microbatch_s, other.microbatch_s),
            np.minimum(self.forward_s, other.forward_s),
            np.minimum(self.once_s, other.once_s),
            np.minimum(self.step_s, other.step_s),
        )


@dataclass(frozen=True)
class RankBytes:
    """Columns: bytes that a rank holds for each parameter element; bytes that it holds in addition for each trainable
    element; and bytes that all ranks of a pipeline together may hand out."""

    parameters: Floats
    trained: Floats
    room: Floats


@dataclass(frozen=True)
class Elements:
    """Tables of a layer's parameter elements in the sizes of expert_cost.Spread. moved, trained: of those parameters
    that it is the first to hold, all that are moved, and the trainable ones. The others: of all its parameters, and of
    the trainable ones."""

    moved: Floats
    trained: Floats
    stored: Floats
    gathered: Floats
    trainable_stored: Floats
    trainable_gathered: Floats
    trainable_reduced: Floats


@dataclass(frozen=True)
class _Columns:
    """What only leaves and degrees decide. alike: [leaf] -> index into `shapes`, the same for all leaves that differ
    only in placement; degree: [leaf] -> index into `shards`, one shape for each shard degree; issuing: [leaf] -> index
    into `issued`, one for each way in which the host issues layers. tensor, pipeline, context, expert: strides of those
    groups; strides that put all ranks on different hosts anyway count as one. rates: of the collectives of data
    ranks."""

    shapes: tuple[Shape, ...]
    alike: Ints
    shards: tuple[Shape, ...]
    degree: Ints
    issued: tuple[Shape, ...]
    issuing: Ints
    sharded_over: Floats
    overlap: Floats
    every: Flags
    reshard: Flags
    tensor: tuple[int, ...]
    pipeline: tuple[int, ...]
    context: tuple[int, ...]
    expert: tuple[int, ...]
    rates: DataRates[Floats]
    held: RankBytes


@dataclass(frozen=True)
class Data:
    """Tables of what data ranks and the optimizer take, for all micro-batches and schedules of a split. resharded: all
    layers give parameters back; chooses: each layer decides that. twice_s: the column of seconds that the optimizer's
    have too much, because several layers read a weight; shared: elements of such weights. in_root: layers whose
    parameters are in fully_shard's root."""

    elements: "Elements"
    shared: Floats
    in_root: Flags
    gather_s: Floats
    reduce_s: Floats
    accumulate_s: Floats
    optimizer_s: Floats
    resharded: Flags
    chooses: Flags
    twice_s: Floats


class ShapeBounds:
    """Bounds of families for one model, cluster and job; keeps what families share."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.model = chain.model
        self.least = LeastWork(chain, chain.model)
        self.kinds: list[Kind] = list(self.model.kinds_of_layers)
        self.kind_of_run = np.array([self.kinds.index(self.model.kinds[run.start]) for run in chain.runs])
        self.first_run = np.unique(self.kind_of_run, return_index=True)[1]
        self.counts: Floats = self.model.layers_of_kinds
        self._waits: dict[tuple[object, ...], tuple[Floats, Ints]] = {}
        self._columns: dict[tuple[Leaves, bool], _Columns] = {}
        self._tables: dict[tuple[object, ...], Data] = {}
        self._options: dict[tuple[object, ...], tuple[FastestTables, FastestTables | None]] = {}
        self._even: dict[tuple[object, ...], Floats] = {}
        self._whole: dict[tuple[object, ...], Floats] = {}
        self._aheads: dict[int, Floats] = {}
        self._known_rates: dict[tuple[CollectiveKind, bool], dict[tuple[int, int], tuple[float, ...]]] = {}
        self._kept = self._kept_options = 0
        self._elements: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._exchanges: dict[tuple[object, ...], tuple[Floats, Floats, Floats]] = {}

    def seconds(self, family: Family, leaves: Leaves, recompute: Recompute | None, reshard: bool | None) -> Floats:
        """[shape] -> lower bound in seconds for all options, without a pipeline: fastest options, without memory, and
        with layers that may be divided. For equal devices only."""
        fastest = self.fastest(family, leaves, recompute, reshard)
        alone_s: Floats = self.counts @ fastest.step_s - self.data(family, leaves).twice_s
        return alone_s

    def pass_s(
        self, family: Family, leaves: Leaves, recompute: Recompute | None, reshard: bool | None
    ) -> tuple[Floats, Floats]:
        """[shape] -> lower bounds on (seconds of a micro-batch on all ranks of a pipeline together, seconds on the
        slowest)."""
        each = self.fastest(family, leaves, recompute, reshard).microbatch_s
        pass_s: Floats = self.counts @ each + self.least_waits_s(family, leaves)
        return pass_s, np.maximum(self.slowest_s(each, family.pipeline), pass_s / family.pipeline)

    def of_cuts(
        self,
        family: Family,
        leaves: Leaves,
        recompute: Recompute | None,
        reshard: bool | None,
        cuts: Sequence[StageCuts],
    ) -> Floats:
        """[shape] -> lower bound in seconds for a chunked family with the best of these cuts, without memory; infinite
        if there are no cuts."""
        fastest = self.fastest(family, leaves, recompute, reshard)
        runs = fastest.microbatch_s[self.kind_of_run], fastest.forward_s[self.kind_of_run]
        found = [np.full(len(leaves.each), np.inf)]
        for cut in cuts:
            beside = self.waits_s(family, leaves, cut), self.once_s(family, leaves, fastest, cut.work)
            found.append(cut.least_of_each_s(family.schedule, family.num_microbatches, *runs, *beside))
        least_s: Floats = np.min(found, axis=0)
        return least_s

    def even_s(self, family: Family, leaves: Leaves, recompute: Recompute | None, reshard: bool | None) -> Floats:
        """[shape] -> lower bound in seconds for all cuts of a pipeline, whatever the schedule: the mean over the ranks
        of the work of each, which begins after at least one place of the chain on every rank before it."""
        whole = replace(family, schedule="1f1b")
        key = leaves, whole, recompute or "none", reshard
        if key not in self._even:
            fastest = self.fastest(whole, leaves, recompute, reshard)
            pass_s = self.counts @ fastest.microbatch_s + self.least_waits_s(family, leaves)
            once_s = self.once_s(family, leaves, fastest, self.chain.lengths)
            ahead_s = self.least_ahead(family.pipeline) @ fastest.forward_s
            self._even[key] = (family.num_microbatches * pass_s + once_s + ahead_s) / family.pipeline
        return self._even[key]

    def way_s(self, family: Family, leaves: Leaves, recompute: Recompute | None, reshard: bool | None) -> Floats:
        """[shape] -> lower bound on the seconds of a micro-batch's way through all stages and back; no step of a
        pipeline is shorter. With zero bubbles gradients of weights may come after it, and are left out."""
        pass_s = self.counts @ self.fastest(family, leaves, recompute, reshard).microbatch_s
        if family.schedule in ZERO_BUBBLE:
            pass_s = pass_s - self.counts @ self.weights_s(family)
        way: Floats = pass_s + self.least_waits_s(family, leaves)
        return way

    def weights_s(self, family: Family) -> Floats:
        """[kind] -> seconds of the gradients of a layer's weights, for one micro-batch."""
        return np.array([self.model.compute(kind, family.frugal).backward_weight for kind in self.kinds])

    def least_ahead(self, pipeline: int) -> Floats:
        """[kind] -> least number of layers before the first stage of a rank, summed over the ranks: every rank before
        it holds at least one place of the chain."""
        if pipeline not in self._aheads:
            kinds = [self.kind_of_run[self.chain.run_of[:first]] for first in self.chain.places[:pipeline]]
            self._aheads[pipeline] = np.bincount(np.concatenate(kinds), minlength=len(self.kinds)).astype(float)
        return self._aheads[pipeline]

    def once_s(self, family: Family, leaves: Leaves, fastest: FastestTables, work: Floats) -> Floats:
        """[rank][shape] -> lower bound on the seconds after the last pass, for ranks with so many layers. work:
        [rank][run] -> number of layers, or [run] for one rank."""
        data = self.data(family, leaves)
        update: Floats = np.maximum(0.0, work @ data.optimizer_s[self.kind_of_run] - data.twice_s)
        total: Floats = work @ fastest.once_s[self.kind_of_run] + update
        return total

    def waits_s(self, family: Family, leaves: Leaves, cuts: StageCuts) -> Floats:
        """[rank][shape] -> seconds that a rank waits for the transfers of a micro-batch, with these cuts."""
        seconds, which = self._transfers(family, leaves)
        each = seconds[list(cuts.places)]
        holds = Chunking(family.schedule, family.pipeline, family.virtual_stages).holds
        waits: Floats = (holds @ (each[:-1] + each[1:]))[:, which]
        return waits

    def least_waits_s(self, family: Family, leaves: Leaves) -> Floats:
        """[shape] -> lower bound on the seconds that all stages together wait for the transfers of a micro-batch, each
        at another place."""
        seconds, which = self._transfers(family, leaves)
        inner = np.sort(seconds[self.chain.places[1:-1]], axis=0)
        least: Floats = 2 * inner[: family.pipeline * family.virtual_stages - 1].sum(axis=0)
        return least[which]

    def least_between_s(self, family: Family, leaves: Leaves) -> Floats:
        """[stage but the last][shape] -> lower bound on the seconds that it and the next one each wait for what crosses
        between them."""
        seconds, which = self._transfers(family, leaves)
        return self.chain.least_between(seconds[self.chain.places], family.pipeline * family.virtual_stages)[:, which]

    def _transfers(self, family: Family, leaves: Leaves) -> tuple[Floats, Ints]:
        """([place of the chain][stride] -> seconds waited for what crosses there, [shape] -> index of its stride)."""
        strides = self._columns_of(family, leaves).pipeline
        examples = dict(zip(strides, leaves.each, strict=True))
        key = leaves, family.sequence, family.cuts, family.micro_batch, family.virtual_stages
        if key not in self._waits:
            crossings = [self.model.crossings(family.shape(leaf)) for leaf in examples.values()]
            table = np.array([[cut.waited_s for cut in cuts] for cuts in crossings]).T
            place = {stride: i for i, stride in enumerate(examples)}
            self._waits[key] = table, np.array([place[stride] for stride in strides])
        return self._waits[key]

    def of_kinds(self, per_run: Floats) -> Floats:
        """[kind] -> what `per_run` has for its first run."""
        return per_run[self.first_run]

    def slowest_s(self, each: Floats, pipeline: int) -> Floats:
        """[shape] -> lower bound on the seconds per micro-batch of a pipeline's slowest rank: an even share of all
        layers, and for each kind the number that some rank must have. each: table of seconds of a layer."""
        most = (np.ceil(self.counts / pipeline) * each.T).max(axis=1)
        slowest: Floats = np.maximum(self.counts @ each / pipeline, most)
        return slowest

    def held(self, family: Family, leaves: Leaves) -> RankBytes:
        """What the ranks of the family's shapes hold of the model."""
        return self._columns_of(family, leaves).held

    def sharded_over(self, family: Family, leaves: Leaves) -> Floats:
        """[shape] -> number of ranks that share the parameters, except those of spread experts."""
        return self._columns_of(family, leaves).sharded_over

    def alike(self, family: Family, leaves: Leaves) -> tuple[tuple[Shape, ...], Ints]:
        """(one shape for each group of shapes that differ only in placement, [shape] -> index of its group)."""
        columns = self._columns_of(family, leaves)
        return columns.shapes, columns.alike

    def fastest(
        self, family: Family, leaves: Leaves, recompute: Recompute | None, reshard: bool | None
    ) -> FastestTables:
        """Least seconds of layers under each shape of a family, whatever memory says."""
        kept, given = self.options(family, leaves, recompute, reshard)
        return kept if given is None else kept.at_most(given)

    def options(
        self, family: Family, leaves: Leaves, recompute: Recompute | None, reshard: bool | None
    ) -> tuple[FastestTables, FastestTables | None]:
        """Least seconds of layers under each shape of a family, whatever memory says: (of layers that keep gathered
        parameters, or do what the shape says; of layers that give them back, None if no layer may choose). Infinite for
        a choice that a layer does not have."""
        key = leaves, family.any_schedule, family.schedule in ZERO_BUBBLE, recompute or "none", reshard
        if key not in self._options:
            self._kept_options += 8 * len(self.kinds) * len(leaves.each)
            if self._kept_options > MOST_KEPT:
                self._options.clear()
                self._kept_options = 0
            everything = range(len(self.kinds))
            self._options[key] = self._found_options(family, leaves, recompute, reshard, everything)
        return self._options[key]

    def microbatch_s(
        self, family: Family, leaves: Leaves, kind: int, recompute: Recompute | None, reshard: bool | None
    ) -> Floats:
        """[shape] -> `options` of one kind: seconds per micro-batch of a layer that does what the shape says."""
        alone: Floats = self._found_options(family, leaves, recompute, reshard, [kind])[0].microbatch_s[0]
        return alone

    def _found_options(
        self, family: Family, leaves: Leaves, recompute: Recompute | None, reshard: bool | None, some: Sequence[int]
    ) -> tuple[FastestTables, FastestTables | None]:
        """What `options` returns, computed for some kinds of layers. some: their numbers."""
        model, shape, columns = self.model, family.frugal, self._columns_of(family, leaves)
        data, count, kinds = self.data(family, leaves), family.num_microbatches, [self.kinds[i] for i in some]
        ways = [model.pinned(kind, recompute or "none") for kind in kinds]
        issued = [replace(shape, data_replicate=s.data_replicate, data_shard=s.data_shard) for s in columns.issued]
        host_s = np.array([model.host_s(kind, shape) for kind in kinds])[:, None]
        passes_s = np.array([[model.passes_s(kind, each)[:2] for each in issued] for kind in kinds])
        forward, backward = np.moveaxis(passes_s[:, columns.issuing], 2, 0)
        pairs = list(zip(kinds, ways, strict=True))
        again = np.array([[model.again_s(kind, each, way) for each in issued] for kind, way in pairs])
        again = again[:, columns.issuing]
        if leaves.anywhere:
            sent_s, beside_s = self.least.exchanged_s(shape)[self.first_run[some]].T[:, :, None]
            ahead, back = forward + sent_s + host_s, backward + beside_s + host_s + again
        else:
            more = [self._exchanged(family, columns, axis, recompute, some) for axis in AXES_OF_LAYERS]
            ahead = forward + host_s + sum(part[0] for part in more)
            back = backward + host_s + again + sum(part[1] for part in more)
        back = back + data.accumulate_s[some] * added_share(count)
        traffic, whole_s = (data.gather_s[some], data.reduce_s[some]), self._whole_s(family, leaves)[some]
        chooses, optimizer_s = data.chooses[some], data.optimizer_s[some]

        def priced(resharded: Flags, allowed: Flags) -> FastestTables:
            shown = exposed_data_s(
                *traffic, forward, backward, resharded, columns.every, columns.overlap, model.device.contention
            )
            ahead_s, once_s = ahead + shown.forward_s, shown.once_s + whole_s
            pass_s = ahead_s + back + shown.backward_s
            tables = pass_s, ahead_s, once_s, count * pass_s + once_s + optimizer_s
            return FastestTables(*(np.where(allowed, table, np.inf) for table in tables))

        kept = priced(data.resharded[some], ~chooses if reshard else np.ones_like(chooses))
        if reshard is False or not chooses.any():
            return kept, None
        return kept, priced(np.ones_like(chooses), chooses)

    def exchanges_again_s(self, family: Family, leaves: Leaves, some: Sequence[int]) -> tuple[Floats, Floats]:
        """[of these kinds] -> (seconds of exchanges that recompute of attention repeats, seconds of the others), the
        least over all places."""
        if leaves.anywhere:
            sent_s: Floats = self.least.exchanged_s(family.frugal)[self.first_run[some], 0]
            return np.zeros_like(sent_s), sent_s
        columns = self._columns_of(family, leaves)
        found = {
            axis: np.min([self._exchange_at(family, axis, s)[2] for s in set(getattr(columns, axis))], axis=0)
            for axis in AXES_OF_LAYERS
        }
        return found["context"][some], (found["tensor"] + found["expert"])[some]

    def _exchanged(
        self, family: Family, columns: _Columns, axis: str, recompute: Recompute | None, some: Sequence[int]
    ) -> tuple[Floats, Floats]:
        """Tables of exposed seconds of exchanges with tensor, context or expert ranks, for some kinds: (in the forward,
        in the backward with what recompute repeats)."""
        strides: tuple[int, ...] = getattr(columns, axis)
        if getattr(family, axis) == 1:
            nothing = np.zeros((len(some), 1))
            return nothing, nothing
        ways = [self.model.pinned(kind, recompute or "none") for kind in self.kinds]
        places = {stride: i for i, stride in enumerate(dict.fromkeys(strides))}
        repeated = np.array(
            [self._repeats(kind, family, axis, way) for kind, way in zip(self.kinds, ways, strict=True)]
        )
        found = [self._exchange_at(family, axis, stride, ways) for stride in places]
        here = [places[stride] for stride in strides]
        ahead = np.stack([forward[some] for forward, _, _ in found], axis=1)
        back = np.stack([(backward + repeated * again)[some] for _, backward, again in found], axis=1)
        return ahead[:, here], back[:, here]

    def _repeats(self, kind: Kind, family: Family, axis: str, way: Recompute) -> bool:
        """Whether a recompute repeats exchanges on a mesh axis."""
        if axis == "context":
            return self.model.repeats_attention(kind, family.frugal, way)
        return self.model.repeats_experts(kind, way) if axis == "expert" else way not in ("none", "attention")

    def _exchange_at(
        self, family: Family, axis: str, stride: int, ways: Sequence[Recompute] = ()
    ) -> tuple[Floats, Floats, Floats]:
        """[kind] -> exposed seconds at one stride: (in the forward, in the backward, of what recompute repeats). ways:
        [kind] -> the recompute; that of parts repeats only some of the exchanges with tensor ranks."""
        parts = tuple(way if parts_of(way) else "full" for way in ways or ["full"] * len(self.kinds))
        split = family.tensor, family.sequence, family.cuts, family.context, family.expert, family.micro_batch
        key = axis, stride, *split, family.context_kind if axis == "context" else None, parts
        if key not in self._exchanges:
            pairs = zip(self.kinds, parts, strict=True)
            found = [self._exchange_s(axis, kind, family.frugal, stride, way) for kind, way in pairs]
            ahead, back, again = np.array([(each.forward_s, each.backward_s, each.again_s) for each in found]).T
            self._exchanges[key] = ahead, back, again
        return self._exchanges[key]

    def _exchange_s(self, axis: str, kind: Kind, shape: Shape, stride: int, way: Recompute) -> Exchanged:
        """Exposed seconds of a kind's exchanges on a mesh axis whose ranks are `stride` apart."""
        model = self.model
        if axis == "tensor":
            traffic = model.tensor_traffic(kind, shape, way)
            return model.tensor_s(kind, shape, traffic, model.links(shape.tensor, stride))
        return (model.context_s if axis == "context" else model.expert_s)(kind, shape, stride)

    def _columns_of(self, family: Family, leaves: Leaves) -> _Columns:
        key = leaves, family.sequence
        if key not in self._columns:
            other = self._columns.get((leaves, not family.sequence))
            if other is None or family.expert > 1:
                self._columns[key] = self._found_columns(family, leaves)
            else:  # sequence parallelism gives no group another place, but those of experts
                alike, shards, issued = (
                    tuple(replace(shape, sequence=family.sequence) for shape in each)
                    for each in (other.shapes, other.shards, other.issued)
                )
                self._columns[key] = replace(other, shapes=alike, shards=shards, issued=issued)
        return self._columns[key]

    def _found_columns(self, family: Family, leaves: Leaves) -> _Columns:
        each = leaves.each
        unplaced = [(leaf.data_replicate, leaf.data_shard, leaf.gradient_sync, leaf.reshard) for leaf in each]
        alike = {key: family.shape(Leaf(*key)) for key in dict.fromkeys(unplaced)}
        splits = dict.fromkeys((leaf.data_replicate, leaf.data_shard) for leaf in each)
        shards = {shard: family.shape(Leaf(replicate, shard)) for replicate, shard in splits}
        held = np.array([self._held(shape) for shape in alike.values()])
        orders = [(leaf.data_replicate, leaf.data_shard, leaf.mesh_axes) for leaf in each]
        strides = {key: self._strides(family.shape(Leaf(*key[:2], mesh_axes=key[2]))) for key in dict.fromkeys(orders)}
        placed = [strides[key] for key in orders]
        sharding = [(leaf.data_shard * family.context, at.shard) for leaf, at in zip(each, placed, strict=True)]
        replicas = [(leaf.data_replicate, at.replicate) for leaf, at in zip(each, placed, strict=True)]
        place = {shard: i for i, shard in enumerate(shards)}
        degree = np.array([place[leaf.data_shard] for leaf in each])
        ways = [self.model.issued_as(shape) for shape in shards.values()]
        issued = dict(zip(ways, shards.values(), strict=True))
        group = {key: i for i, key in enumerate(alike)}
        which = np.array([group[key] for key in unplaced])
        return _Columns(
            shapes=tuple(alike.values()),
            alike=which,
            shards=tuple(shards.values()),
            degree=degree,
            issued=tuple(issued.values()),
            issuing=np.array([list(issued).index(way) for way in ways])[degree],
            sharded_over=np.array([float(size) for size, _ in sharding]),
            overlap=np.array([self.model.data_overlap(shape) for shape in alike.values()])[which],
            every=np.array([leaf.gradient_sync == "every" for leaf in each]),
            reshard=np.array([leaf.reshard for leaf in each]),
            tensor=tuple(at.tensor for at in placed),
            pipeline=tuple(at.pipeline for at in placed),
            context=tuple(at.context for at in placed),
            expert=tuple(at.expert for at in placed),
            rates=DataRates(
                gather=self._rates("all_gather", sharding, leaves.anywhere),
                scatter=self._rates("reduce_scatter", sharding, leaves.anywhere),
                reduce=self._rates("all_reduce", replicas, leaves.anywhere),
            ),
            held=RankBytes(*held[which].T),
        )

    def _held(self, shape: Shape) -> tuple[float, float, float]:
        state, training = state_bytes(shape, self.model.training), self.model.training
        # With one micro-batch a gradient comes when its layer's activations go.
        gradients = state.sharded_gradients if shape.num_microbatches > 1 else 0.0
        room = allocatable_bytes(shape, self.model.device, training) * shape.pipeline
        return state.sharded_parameters, gradients + state.optimizer, room

    def _strides(self, shape: Shape) -> "_Strides":
        """Strides of a shape's groups; those that put all ranks on different hosts anyway count as one."""
        most = self.model.cluster.devices_per_host
        return _Strides(
            shard=min(most, shape.shard_stride),
            replicate=min(most, shape.stride("data_replicate")),
            tensor=min(most, shape.stride("tensor")),
            pipeline=min(most, shape.stride("pipeline")),
            context=min(most, shape.stride("context")),
            expert=min(most, shape.expert_stride),
        )

    def _rates(self, kind: CollectiveKind, groups: Sequence[tuple[int, int]], anywhere: bool) -> RingTimes[Floats]:
        """Columns of the times of a collective of groups of (size, stride); anywhere: of their size where each is
        least."""
        known, model = self._known_rates.setdefault((kind, anywhere), {}), self.model
        for size, stride in {*groups} - known.keys():
            strides = model.places(size) if anywhere else (stride,)
            rates = [astuple(ring_rates(kind, model.links(size, apart))) for apart in strides]
            known[size, stride] = tuple(map(min, zip(*rates, strict=True)))
        return RingTimes(*np.array([known[group] for group in groups]).T)

    def data(self, family: Family, leaves: Leaves) -> Data:
        key = leaves, family.sequence, family.cuts
        if key not in self._tables:
            self._kept += len(self.kinds) * len(leaves.each)
            if self._kept > MOST_KEPT:
                self._tables.clear()
                self._kept = 0
            self._tables[key] = self._found_data(family, leaves)
        return self._tables[key]

    def _found_data(self, family: Family, leaves: Leaves) -> Data:
        model, columns = self.model, self._columns_of(family, leaves)
        # [shard degree][kind][amount] -> [amount][kind][shape]
        shards = [replace(shape, cuts=family.cuts) for shape in columns.shards]
        amounts = np.array([[self._elements_of(kind, shape) for kind in self.kinds] for shape in shards])
        elements = Elements(*amounts.transpose(2, 1, 0)[:, :, columns.degree])
        in_root = np.array([kind.is_in_root(family.frugal) for kind in self.kinds])[:, None]
        bare = np.array([not model.layer_class(kind).parameters for kind in self.kinds])[:, None]
        one = family.pipeline == 1
        shared = [self.chain.counted_twice(shape) for shape in shards]
        twice = np.array(shared, dtype=float)[columns.degree]
        on_host = family.offload_optimizer
        return Data(
            shared=twice,
            twice_s=model.optimizer_s(twice / columns.sharded_over, on_host),
            elements=elements,
            in_root=in_root,
            gather_s=gather_s(elements.moved, model.gathered_bytes, columns.rates),
            reduce_s=reduce_s(elements.trained, model.software.gradient_bytes, columns.sharded_over, columns.rates),
            accumulate_s=self._accumulated_s(family, columns, elements.trainable_gathered),
            optimizer_s=model.optimizer_s(elements.trainable_stored / columns.sharded_over, on_host),
            resharded=columns.reshard & ~in_root,
            chooses=(columns.sharded_over > 1) & ~in_root & ~bare & one,
        )

    def _elements_of(self, kind: Kind, shape: Shape) -> tuple[float, ...]:
        """The elements of a layer, in the order of Elements."""
        split = shape.tensor, shape.sequence, shape.cuts, shape.sharded_over, shape.expert, shape.pipeline == 1
        key = kind, *split
        if key not in self._elements:
            own, own_trainable = self.model.spread_of(kind, shape, kind.held_before(shape))
            total, trainable = self.model.spread_of(kind, shape)
            self._elements[key] = (
                *(own.reduced, own_trainable.reduced, total.stored, total.gathered),
                *(trainable.stored, trainable.gathered, trainable.reduced),
            )
        return self._elements[key]

    def _accumulated_s(self, family: Family, columns: _Columns, gathered: Floats) -> Floats:
        """Seconds per micro-batch to add gradients to those of earlier micro-batches, if these are very many."""
        if not self.model.adds_gradients(family.num_microbatches):
            return np.zeros_like(gathered)
        elements = added_elements(gathered, columns.sharded_over, columns.every)
        distinct, where = np.unique(elements, return_inverse=True)
        seconds = np.array([self.model.added_s(size) for size in distinct.tolist()])
        return seconds[where].reshape(elements.shape)

    def _whole_s(self, family: Family, leaves: Leaves) -> Floats:
        """Seconds per step to sum gradients of weights that tensor ranks hold whole."""
        key = leaves, family.sequence, family.cuts
        if key not in self._whole:
            columns, shape = self._columns_of(family, leaves), family.shape(leaves.each[0])
            groups = list(zip(columns.degree.tolist(), columns.tensor, strict=True))
            examples = dict(zip(groups, leaves.each, strict=True))
            seconds = np.zeros((len(self.kinds), len(groups)))
            for i, kind in enumerate(() if leaves.anywhere else self.kinds):
                if self.model.whole_gradients_s(kind, shape):
                    found = {g: self.model.whole_gradients_s(kind, family.shape(leaf)) for g, leaf in examples.items()}
                    seconds[i] = [found[group] for group in groups]
            self._whole[key] = seconds
        return self._whole[key]

    def shared_elements(self, family: Family, leaves: Leaves) -> Floats:
        """The column of elements that several layers read, counted once for every reader except the first."""
        return self.data(family, leaves).shared


@dataclass(frozen=True)
class _Strides:
    """Distance in ranks between neighbours of each group."""

    shard: int
    replicate: int
    tensor: int
    pipeline: int
    context: int
    expert: int
