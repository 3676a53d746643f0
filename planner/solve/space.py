"""The space of shapes as a tree: first degrees, then micro-batch and schedule, then how data is split and how axes are
ordered.

Every shape is counted. Subtrees that are not expanded, or that a rule excludes, are counted by products.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Literal, NamedTuple, get_args

from ...profiler.machine.cluster import ClusterSpec, Group
from ...profiler.model.model_profile import ModelProfile
from ..plan.document import AXES, Axis, ContextKind
from ..plan.frameworks import Asked, Framework
from ..plan.legality import (
    check_parts,
    context_rule,
    divisors,
    expert_rule,
    fp8_rule,
    has_experts,
    has_sequence_attention,
    micro_batch_rule,
    pipeline_rule,
    sequence_rule,
    sharding_rule,
    stage_starts,
    tensor_rule,
    zero_bubble_rule,
)
from ..plan.pins import Pins
from ..plan.schedules import ZERO_BUBBLE, Schedule
from ..plan.shape import NO_EXTRAS, Cuts, Offered, Shape
from ..plan.training import COMPILING, TrainingSpec
from .unequal import have_own, kind_orders


@dataclass(frozen=True)
class Split:
    """How the model, its sequences and its experts are split, and how many ranks see different samples. Families of a
    split differ only in micro-batch and schedule."""

    tensor: int
    pipeline: int
    data: int
    sequence: bool
    context: int = 1
    context_kind: ContextKind = "ring"
    expert: int = 1
    cuts: Cuts | None = None
    """Cuts of tensor parallelism; None: all that the degree divides."""

    @property
    def tokens_over(self) -> int:
        """Number of tensor ranks that hold different tokens."""
        return self.tensor if self.sequence else 1


@dataclass(frozen=True)
class Family:
    """Shapes that differ only in how data ranks are split, when gradients are reduced, and in the order of axes."""

    tensor: int
    pipeline: int
    data: int
    sequence: bool
    schedule: Schedule
    micro_batch: int
    num_microbatches: int
    virtual_stages: int = 1
    context: int = 1
    context_kind: ContextKind = "ring"
    expert: int = 1
    cuts: Cuts | None = None
    offered: Offered = NO_EXTRAS
    """Options of layers beyond the usual ones."""
    offload_optimizer: bool = False

    @property
    def split(self) -> Split:
        """The split of this family."""
        spread = self.context, self.context_kind, self.expert
        return Split(self.tensor, self.pipeline, self.data, self.sequence, *spread, self.cuts)

    @functools.cached_property
    def any_schedule(self) -> "Family":
        """The family that stands for all that differ only in the schedule and in the number of stages on each rank."""
        return replace(self, schedule="1f1b", virtual_stages=1) if self.pipeline > 1 else self

    def shape(self, leaf: "Leaf") -> Shape:
        """The shape of this family with this leaf."""
        return Shape(
            data_replicate=leaf.data_replicate,
            data_shard=leaf.data_shard,
            tensor=self.tensor,
            pipeline=self.pipeline,
            micro_batch=self.micro_batch,
            num_microbatches=self.num_microbatches,
            sequence=self.sequence,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            gradient_sync=leaf.gradient_sync,
            reshard=leaf.reshard,
            mesh_axes=leaf.mesh_axes,
            context=self.context,
            context_kind=self.context_kind,
            expert=self.expert,
            kind_order=leaf.kind_order,
            cuts=self.cuts,
            offload_optimizer=self.offload_optimizer,
        )

    @functools.cached_property
    def frugal(self) -> Shape:
        """The family's shape with everything sharded over all data ranks."""
        return self.shape(Leaf(1, self.data))


@dataclass(frozen=True)
class Leaf:
    """What a shape has beyond its family: the split of data ranks, when gradients are reduced, reshard, and the order
    of axes and kinds of devices."""

    data_replicate: int
    data_shard: int
    gradient_sync: Literal["every", "last"] = "last"
    reshard: bool = False
    mesh_axes: tuple[Axis, ...] = AXES
    kind_order: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a family. They are compared by identity, so that they can be keys of caches."""

    each: tuple[Leaf, ...]
    anywhere: bool = False
    """Whether each leaf stands for all orders of the mesh axes, with the one in which traffic takes least."""


Placing = tuple[tuple[Axis, ...], tuple[int, ...]]
"""(order of the mesh axes, order of the kinds of devices); the second is () if devices are equal, or stages mix their
kinds."""

Number = tuple[int, int]
"""(number of cases with several micro-batches, number of cases with one)."""


@dataclass(frozen=True)
class _Passes:
    """Micro-batches and schedules for a pipeline degree and a number of data ranks. legal: (schedule, stages on each
    rank, micro-batch, number of micro-batches) of each; rejected: rule -> number of those that it excludes."""

    legal: tuple[tuple[Schedule, int, int, int], ...]
    rejected: dict[str, Number]

    @functools.cached_property
    def num_legal(self) -> Number:
        """Number of legal pairs of micro-batch and schedule."""
        several = sum(count > 1 for _, _, _, count in self.legal)
        return several, len(self.legal) - several

    @functools.cached_property
    def total(self) -> Number:
        """Number of all pairs, legal or not."""
        several, one = self.num_legal
        return several + sum(n for n, _ in self.rejected.values()), one + sum(n for _, n in self.rejected.values())


class _Placed(NamedTuple):
    """An order of the mesh axes. places: a number that is equal for orders in which all groups are placed alike;
    expert_strides: distance between neighbours that hold different tokens, without and with sequence parallelism."""

    axes: tuple[Axis, ...]
    places: int
    expert_strides: tuple[int, int]
    outermost: Axis | None


MOST_CHUNKS = 8
"""Most stages on one rank that are tried, unless more are pinned: with more the bubble hardly changes, and transfers
add up."""


class Space:
    """All shapes of a model on a cluster for a job that agree with the pins.

    rejected: rule -> number of shapes that it excludes, if shapes are `counted`; shapes that the pins exclude are not
    among them. choices: returns the cuts that are worth trying under a shape, beside all that its tensor degree
    divides. anywhere: one order of the mesh axes stands for all, if devices are equal, because memory is the same in
    all.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: ClusterSpec,
        training: TrainingSpec,
        pins: Pins,
        choices: Callable[[Shape], tuple[Cuts, ...]] = lambda shape: (),
        anywhere: bool = False,
        counted: bool = True,
    ) -> None:
        check_parts(profile, pins.recompute)
        self._counted = counted
        self._worth_trying = choices
        self._anywhere = anywhere and len(cluster.kinds) == 1
        self.profile = profile
        self.cluster = cluster
        self.training = training
        self.pins = pins
        self.rejected: Counter[str] = Counter()
        self._framework = pins.framework
        starts = stage_starts(profile) if pins.framework is None else pins.framework.starts(profile)
        self._most_stages = len(starts) + 1
        self._sharding_rule = sharding_rule(profile, training.precision)
        self._expert_rule = functools.cache(functools.partial(expert_rule, profile))
        self._pipeline_rule = functools.cache(functools.partial(pipeline_rule, profile, most_stages=self._most_stages))
        self._zero_bubble_rule = zero_bubble_rule(profile, training)
        self._kinds = _context_kinds(profile, training, pins)
        self._device_kinds = cluster.kinds
        self._spreads_experts = (pins.expert or 1) > 1 or has_experts(profile)
        self._context_is_free = _context_is_free(pins)
        self._places: dict[tuple[int, int], int] = {}
        self._numbers: dict[tuple[Group | int, ...], int] = {}
        self._known_passes: dict[tuple[int, int, int], _Passes] = {}
        self._known_placed: dict[tuple[int, int, int, int, int], tuple[_Placed, ...]] = {}
        self._known_choices: dict[tuple[object, ...], tuple[Cuts, ...]] = {}
        self._known_orders: dict[tuple[object, ...], tuple[Placing, ...]] = {}
        self._known_leaves: dict[tuple[int, ...], Number] = {}
        self._known_shapes: dict[tuple[int, ...], Leaves] = {}
        self._known_unplaced: dict[tuple[int, ...], Leaves] = {}

    def families(self) -> Iterator[Family]:
        """Legal families; fills `rejected` on the way."""
        for split in self.splits():
            yield from self.families_of(split)

    def splits(self) -> Iterator[Split]:
        """Legal splits that have legal families; fills `rejected` on the way, also with what is illegal below them."""
        num_devices, mixed = self.cluster.num_devices, self.training.is_mixed
        for tensor in divisors(num_devices):
            if not self.pins.allows("tensor", tensor):
                continue
            by_tensor = tensor_rule(self.profile, tensor) or fp8_rule(self.profile, self.training, tensor)
            for context in self._contexts(num_devices // tensor):
                modes = [s for s in (False, True)[: 1 + (tensor > 1)] if self.pins.splits_sequences(tensor, s, context)]
                if not modes:
                    continue
                by_mode = {s: sequence_rule(self.profile, tensor, context) if s else None for s in modes}
                kinds = self._kinds if context > 1 else ("ring",)
                by_kind = {kind: context_rule(self.profile, context, tensor, kind) for kind in kinds}
                for pipeline in divisors(num_devices // tensor // context):
                    data = num_devices // tensor // context // pipeline
                    if not (self.pins.allows("pipeline", pipeline) and self._shards(data)):
                        continue
                    sharded = tensor > 1 or context > 1 or (pipeline > 1 and mixed)
                    rule = by_tensor or (self._sharding_rule if sharded else None) or self._degree_rule(pipeline, data)
                    passes = self._passes(pipeline, data, context)
                    for kind, sequence in product(kinds, modes):
                        tokens_over = tensor if sequence else 1
                        for expert in self._experts(data * context * tokens_over):
                            split = Split(tensor, pipeline, data, sequence, context, kind, expert)
                            found = self._framework_rule(split) or rule or by_kind[kind] or by_mode[sequence]
                            found = found or self._expert_rule(expert, sequence)
                            self._reject(passes.rejected if found is None else {found: passes.total}, split)
                            if found is not None:
                                continue
                            if passes.legal and self.num_shapes_of(split):
                                yield split
                                yield from (replace(split, cuts=cuts) for cuts in self._choices(split))

    def _framework_rule(self, split: Split) -> str | None:
        """Why the framework does not run a split, whatever its data ranks share; None if it does, or there is no
        framework."""
        framework = self._framework
        if framework is None:
            return None
        found = framework.split_rule(self._asked(split, 1, split.data))
        shares = self._possible_data_splits(split)
        if found is None and shares and not self._data_splits(split):
            return framework.data_rule(self._asked(split, *shares[-1]))
        return found

    def _asked(self, split: Split, replicate: int, shard: int) -> Asked:
        """A split and its data ranks, as the framework's rules look at them."""
        shape = Shape(
            replicate,
            shard,
            split.tensor,
            split.pipeline,
            1,
            1,
            split.sequence,
            context=split.context,
            context_kind=split.context_kind,
            expert=split.expert,
            reshard=self.pins.reshard is True,
        )
        return Asked(shape, self.profile, self.training)

    def _choices(self, split: Split) -> tuple[Cuts, ...]:
        """Cuts that are worth trying for some micro-batch of a split, beside all that its tensor degree divides. With a
        framework none, because it cuts all."""
        if split.tensor == 1 or self._framework is not None:
            return ()
        key = split.tensor, split.sequence, split.context, split.pipeline, split.data
        if key not in self._known_choices:
            whole = Shape(1, split.data, split.tensor, 1, 1, 1, split.sequence, context=split.context)
            whole = replace(whole, offload_optimizer=self.pins.offload_optimizer)
            shapes = (replace(whole, micro_batch=n, num_microbatches=count) for n, count in self.micro_batches(split))
            found = dict.fromkeys(cuts for shape in shapes for cuts in self._worth_trying(shape))
            self._known_choices[key] = tuple(found)
        return self._known_choices[key]

    def _degree_rule(self, pipeline: int, data: int) -> str | None:
        by_stages = self._pipeline_rule(pipeline)
        if by_stages is not None:
            return by_stages
        if self.training.global_batch % data:
            return f"global batch {self.training.global_batch} is no multiple of {data} data ranks"
        return None

    def _contexts(self, num_ranks: int) -> list[int]:
        """Context degrees that the pins allow, legal or not; only 1 if the model or the executor has no context
        parallelism."""
        degrees = divisors(num_ranks) if self._kinds else [1]
        return [context for context in degrees if self.pins.allows("context", context)]

    def _experts(self, num_ranks: int) -> list[int]:
        """Expert degrees that the pins allow, legal or not, for so many ranks with different tokens; only 1 if experts
        are not spread."""
        degrees = divisors(num_ranks) if self._spreads_experts else [1]
        return [expert for expert in degrees if self.pins.allows("expert", expert)]

    def _reject(self, rejected: dict[str, Number], split: Split) -> None:
        """Add the shapes below a split that rules exclude to the counts. rejected: rule -> number of pairs of
        micro-batch and schedule."""
        if not self._counted:
            return
        leaves = self._leaves(split)
        for rule, number in rejected.items():
            count = _times(number, leaves)
            if not count and self._framework is not None:  # no use of data ranks is left: one for each of the others
                count = sum(number)
            if count:
                self.rejected[rule] += count

    def families_of(self, split: Split) -> Iterator[Family]:
        """The legal families of a legal split."""
        offered = self.pins.offered
        for schedule, virtual, micro_batch, count in self._passes(split.pipeline, split.data, split.context).legal:
            family = Family(
                split.tensor,
                split.pipeline,
                split.data,
                split.sequence,
                schedule,
                micro_batch,
                count,
                virtual,
                split.context,
                split.context_kind,
                split.expert,
                split.cuts,
                offered - {"offload"} if schedule in ZERO_BUBBLE else offered,
                self.pins.offload_optimizer,
            )
            if self.num_shapes(family):  # none: what is pinned goes only with several micro-batches, or only with one
                yield family

    def micro_batches(self, split: Split) -> Iterator[tuple[int, int]]:
        """(micro-batch, number of micro-batches) in the legal families of a split."""
        passes = self._passes(split.pipeline, split.data, split.context)
        yield from dict.fromkeys((micro_batch, count) for _, _, micro_batch, count in passes.legal)

    def _passes(self, pipeline: int, data: int, context: int) -> _Passes:
        key = pipeline, data, context if self._context_is_free else 1
        if key not in self._known_passes:
            self._known_passes[key] = self._found_passes(*key)
        return self._known_passes[key]

    def _found_passes(self, pipeline: int, data: int, context: int) -> _Passes:
        share = max(1, self.training.global_batch // data)
        legal: list[tuple[Schedule, int, int, int]] = []
        rejected: dict[str, Number] = {}
        schedules = self._schedules(pipeline)
        for micro_batch in divisors(share):
            if not self.pins.allows("micro_batch", micro_batch):
                continue
            count = share // micro_batch
            by_size = self._size_rule(micro_batch, context) or micro_batch_rule(
                self.profile, data, count, self.pins.micro_batch is not None
            )
            for schedule, virtual in schedules:
                rule = by_size or self._schedule_rule(schedule, pipeline, count)
                if rule is None:
                    legal.append((schedule, virtual, micro_batch, count))
                else:
                    several, one = rejected.get(rule, (0, 0))
                    rejected[rule] = (several + 1, one) if count > 1 else (several, one + 1)
        return _Passes(tuple(legal), rejected)

    def _size_rule(self, micro_batch: int, context: int) -> str | None:
        """The rule that excludes a micro-batch beside a context degree; None if it is legal. If the two have a common
        divisor, that many of the context ranks could be data ranks instead: they would hold as much of each
        micro-batch, shard as much, and exchange less."""
        fewest = self.profile.smallest_micro_batch
        if micro_batch < fewest:
            return f"a batch norm of the model needs micro-batches of {fewest} samples"
        common = math.gcd(micro_batch, context)
        if common > 1 and micro_batch // common >= fewest:
            return "context: data ranks with smaller micro-batches hold as much and exchange less"
        return None

    def _schedules(self, pipeline: int) -> list[tuple[Schedule, int]]:
        """(schedule, stages on each rank) pairs that the pins allow, legal or not."""
        if pipeline == 1:
            return [("none", 1)] if self.pins.schedule in (None, "none") else []
        most = max(1, self._most_stages // pipeline)
        chunks = [v for v in range(2, most + 1) if v <= MOST_CHUNKS or v == self.pins.virtual_stages]
        pairs: list[tuple[Schedule, int]] = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-h2", 1)]
        pairs += [("interleaved", v) for v in chunks] + [("zb-v", 2)] * (most >= 2)
        return [
            (schedule, virtual)
            for schedule, virtual in pairs
            if self.pins.allows("schedule", schedule)
            and self.pins.allows("virtual_stages", virtual)
            and (not self._framework or not self._framework.schedules or schedule in self._framework.schedules)
        ]

    def _schedule_rule(self, schedule: Schedule, pipeline: int, count: int) -> str | None:
        """The rule that excludes a schedule for `count` micro-batches; None if it is legal."""
        if schedule == "1f1b" and count < pipeline:
            return "1F1B needs at least as many micro-batches as stages"
        if self._framework is not None and (rule := self._framework.schedule_rule(schedule, pipeline, count)):
            return rule
        if schedule == "gpipe" and count >= pipeline and self.pins.allows("schedule", "1f1b"):
            return "GPipe takes as long as 1F1B and holds more"
        if schedule == "interleaved" and count % max(1, count // pipeline):
            return "interleaved 1F1B needs equal rounds of micro-batches"
        if schedule in ZERO_BUBBLE and self.pins.recompute not in (None, "none"):
            return "zero-bubble schedules run without recompute"
        if schedule in ZERO_BUBBLE and self.training.software == COMPILING and not self.pins.everything:
            return "zero-bubble schedules do a layer's backward in two parts, which a compiled layer does in one"
        return self._zero_bubble_rule if schedule in ZERO_BUBBLE else None

    def _leaves(self, split: Split) -> Number:
        """Number of shapes below one family of a split."""
        key = self._leaves_key(split)
        if key not in self._known_leaves:
            several = one = 0
            for replicate, shard in self._data_splits(split):
                orders = len(self._orders(split, replicate, shard))
                sharded = shard * split.context > 1
                several += orders * len(_modes(self.pins, split.pipeline, sharded, 2))
                one += orders * len(_modes(self.pins, split.pipeline, sharded, 1))
            self._known_leaves[key] = several, one
        return self._known_leaves[key]

    @staticmethod
    def _leaves_key(split: Split) -> tuple[int, ...]:
        """The fields of a split that decide which shapes are below a family."""
        tokens_over = split.tokens_over if split.expert > 1 else 1
        return split.tensor, split.context, split.pipeline, split.data, split.expert, tokens_over

    def num_shapes_of(self, split: Split) -> int:
        """Number of shapes in all legal families of a split."""
        return _times(self._passes(split.pipeline, split.data, split.context).num_legal, self._leaves(split))

    def num_shapes(self, family: Family) -> int:
        """Number of shapes in a family."""
        several, one = self._leaves(family.split)
        return several if family.num_microbatches > 1 else one

    def shapes(self, family: Family) -> Iterator[Shape]:
        """Every shape of a family."""
        return (family.shape(leaf) for leaf in self.leaves(family).each)

    def leaves(self, family: Family) -> "Leaves":
        """The leaves of a family; the same object for all families that have the same leaves."""
        key = self._leaves_of_key(family)
        if key not in self._known_shapes:
            found = [
                Leaf(leaf.data_replicate, leaf.data_shard, leaf.gradient_sync, leaf.reshard, order, kinds)
                for leaf in self.unplaced(family).each
                for order, kinds in self._orders(family.split, leaf.data_replicate, leaf.data_shard)
            ]
            self._known_shapes[key] = Leaves(tuple(found))
        return self._known_shapes[key]

    def unplaced(self, family: Family) -> "Leaves":
        """The leaves of a family without the order of the mesh axes and of the kinds of devices: one leaf stands for
        all such orders."""
        key = self._leaves_of_key(family)
        if key not in self._known_unplaced:
            split, count = family.split, min(2, family.num_microbatches)
            found = [
                Leaf(replicate, shard, sync, reshard)
                for replicate, shard in self._data_splits(split)
                for sync, reshard in _modes(self.pins, split.pipeline, shard * split.context > 1, count)
            ]
            self._known_unplaced[key] = Leaves(tuple(found), anywhere=True)
        return self._known_unplaced[key]

    def _leaves_of_key(self, family: Family) -> tuple[int, ...]:
        return *self._leaves_key(family.split), family.num_microbatches > 1

    def _data_splits(self, split: Split) -> list[tuple[int, int]]:
        """(data_replicate, data_shard) pairs that the experts can be spread over, and that the framework, if any,
        runs."""
        found, framework = self._possible_data_splits(split), self._framework
        if framework is None:
            return found
        return [shares for shares in found if framework.data_rule(self._asked(split, *shares)) is None]

    def _possible_data_splits(self, split: Split) -> list[tuple[int, int]]:
        """(data_replicate, data_shard) pairs that the experts can be spread over."""
        over = split.context * split.tokens_over
        return [(split.data // shard, shard) for shard in self._shards(split.data) if shard * over % split.expert == 0]

    def _shards(self, data: int) -> list[int]:
        """data_shard degrees that the pins allow; only 1 if fully_shard cannot take the model."""
        return [
            shard
            for shard in (divisors(data) if self._sharding_rule is None else [1])
            if self.pins.allows("data_shard", shard) and self.pins.allows("data_replicate", data // shard)
        ]

    def _orders(self, split: Split, replicate: int, shard: int) -> tuple[Placing, ...]:
        """Orders of the mesh axes and of the kinds of devices, one for each way in which groups are placed; a single
        one on one host."""
        tokens_over = split.tokens_over if split.expert > 1 else 1
        key = replicate, shard, split.context, split.tensor, split.pipeline, split.expert, tokens_over
        if key not in self._known_orders:
            orders: dict[tuple[object, ...], Placing] = {}
            found = self._placed(replicate, shard, split.context, split.tensor, split.pipeline)
            strides = {placed.expert_strides[tokens_over > 1] for placed in found}
            places = {s: self._place(split.expert, s) if split.expert > 1 else 0 for s in strides}
            for placed in found:
                expert = places[placed.expert_strides[tokens_over > 1]]
                for kinds in self._kind_orders(split.pipeline, placed.outermost):
                    orders.setdefault((placed.places, expert, kinds), (placed.axes, kinds))
            self._known_orders[key] = tuple(orders.values())
        return self._known_orders[key]

    def _kind_orders(self, pipeline: int, outermost: Axis | None) -> list[tuple[int, ...]]:
        """Orders of the kinds of devices; only () if stages are not each on one kind."""
        own = outermost == "pipeline" and have_own(self._device_kinds, pipeline)
        return kind_orders(self._device_kinds) if own else [()]

    def _placed(self, replicate: int, shard: int, context: int, tensor: int, pipeline: int) -> tuple[_Placed, ...]:
        """All orders of the axes, with how their groups are placed; a single one on one host. Context ranks shard
        parameters together with data_shard, so they follow it."""
        key = replicate, shard, context, tensor, pipeline
        if key not in self._known_placed:
            degrees: dict[Axis, int] = {
                "pipeline": pipeline,
                "data_replicate": replicate,
                "data_shard": shard,
                "context": context,
                "tensor": tensor,
            }
            self._known_placed[key] = self._found_placed(degrees)
        return self._known_placed[key]

    def _found_placed(self, degrees: dict[Axis, int]) -> tuple[_Placed, ...]:
        joined: tuple[Axis, ...] = ("data_shard", "context") if degrees["context"] > 1 else ("data_shard",)
        units: tuple[tuple[Axis, ...], ...] = (("pipeline",), ("data_replicate",), joined, ("tensor",))
        active = [unit for unit in units if any(degrees[axis] > 1 for axis in unit)]
        if self.cluster.num_hosts == 1 or len(active) < 2:
            return (_Placed(AXES, 0, (1, 1), active[0][0] if active else None),)
        used = [axis for unit in active for axis in unit]
        held = [axis for axis in joined if degrees[axis] > 1]
        sliced = [*held, "tensor"] if degrees["tensor"] > 1 else held
        sharded, place = degrees["data_shard"] * degrees["context"], self._place
        strides: dict[Axis, int] = {}
        found = []
        for axes, outermost, backwards in _orders_of(tuple(active)):
            if self._framework is not None and not self._framework.may_lie(backwards[::-1], degrees["context"]):
                continue
            stride = 1
            for axis in backwards:
                strides[axis] = stride
                stride *= degrees[axis]
            places = [place(degrees[axis], strides[axis]) for axis in used]
            if len(joined) > 1:
                places.append(place(sharded, strides["context"]))
            near = min([strides[axis] for axis in held], default=1)
            apart = near, min([strides[axis] for axis in sliced], default=1)
            together = self._numbers.setdefault(tuple(places), len(self._numbers))
            found.append(_Placed(axes, together, apart, outermost))
            if self._anywhere:
                break
        return tuple(found)

    def _place(self, size: int, stride: int) -> int:
        """A number that is equal for groups placed alike on the cluster, and on the hosts of each kind."""
        key = size, stride
        if key not in self._places:
            alone = self._device_kinds if len(self._device_kinds) > 1 else ()
            groups = tuple(part.group(size, stride) for part in (self.cluster, *alone))
            self._places[key] = self._numbers.setdefault(groups, len(self._numbers))
        return self._places[key]


@functools.cache
def _orders_of(units: tuple[tuple[Axis, ...], ...]) -> tuple[tuple[tuple[Axis, ...], Axis, tuple[Axis, ...]], ...]:
    """Orders of axes that come in units: (all axes, with those in no unit first; the outermost axis in a unit; axes in
    units from the innermost outwards)."""
    used = [axis for unit in units for axis in unit]
    idle = tuple(axis for axis in AXES if axis not in used)
    found = []
    for order in permutations(units):
        axes = tuple(axis for unit in order for axis in unit)
        found.append((idle + axes, axes[0], axes[::-1]))
    return tuple(found)


def _times(pairs: Number, leaves: Number) -> int:
    """Number of shapes for so many pairs of micro-batch and schedule, with so many shapes below each."""
    return pairs[0] * leaves[0] + pairs[1] * leaves[1]


def _context_kinds(profile: ModelProfile, training: TrainingSpec, pins: Pins) -> tuple[ContextKind, ...]:
    """Kinds of context parallelism in the space. Unless the user asks for it, none if the model has no use for it, or
    under a compiler, which has no place for other attention."""
    asked = (pins.context or 1) > 1
    if not (asked or has_sequence_attention(profile)):
        return ()
    allowed: tuple[ContextKind, ...] = tuple(k for k in get_args(ContextKind) if pins.allows("context_kind", k))
    if pins.framework is not None:
        return tuple(kind for kind in allowed if kind in pins.framework.contexts)
    is_asked = pins.everything or pins.context_kind is not None or asked
    return () if training.software == COMPILING and not is_asked else allowed


def _context_is_free(pins: Pins) -> bool:
    """Whether the pins allow data ranks with smaller micro-batches in place of context ranks."""
    pinned = pins.context, pins.sequence_ways, pins.micro_batch, pins.data_shard, pins.data_replicate
    return all(pin is None for pin in pinned) and not any(name == "data_shard" for name, _ in pins.most)


def _modes(pins: Pins, pipeline: int, sharded: bool, count: int) -> list[tuple[Literal["every", "last"], bool]]:
    """(when gradients are reduced, whether a pipeline's layers give parameters back) pairs that are tried. There is a
    choice only where it saves memory: for both only with shards, and for the first only with several micro-batches."""
    if pins.framework is not None:
        return _modes_of(pins.framework, pins, pipeline, sharded, count)
    syncs: tuple[Literal["every", "last"], ...] = ("last",)
    if sharded and count > 1:
        syncs = ("every", "last") if pins.gradient_sync is None else (pins.gradient_sync,)
    reshards: tuple[bool, ...] = (False,)
    if sharded and pipeline > 1:
        reshards = (False, True) if pins.reshard is None else (pins.reshard,)
    return [(sync, reshard) for sync in syncs for reshard in reshards]


def _modes_of(
    framework: Framework, pins: Pins, pipeline: int, sharded: bool, count: int
) -> list[tuple[Literal["every", "last"], bool]]:
    """The same for a framework. With shards, plans that give gathered parameters back are other plans than those that
    keep them; without shards plans count as keeping them."""
    if not sharded:
        return [] if pins.reshard else [("last", False)]
    found: dict[tuple[Literal["every", "last"], bool], None] = {}
    for sync, reshard in framework.zero_in_pipelines if pipeline > 1 else framework.zero:
        if pins.reshard in (None, reshard) and (pins.gradient_sync in (None, sync) or count == 1):
            found[sync if count > 1 else "last", reshard and pipeline > 1] = None
    return list(found)
