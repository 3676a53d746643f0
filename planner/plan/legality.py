"""Shapes (one choice of degrees, schedule and micro-batch), per-layer options, pins, and Shape -> Plan."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from ...profiler.cluster import ClusterSpec
from ...profiler.model_profile import LayerClass, LayerProfile, ModelProfile, TensorCut
from ..cost.simulate import rank_in_flight
from .document import (
    AXES,
    Axis,
    ClassPlan,
    ContextKind,
    Degrees,
    LayerPlan,
    ModelReference,
    Plan,
    Recompute,
    Schedule,
    Stage,
    parts_of,
    rank_and_chunk,
)
from .module_list_experts import listed_experts
from .training import Precision, TrainingSpec

SCHEDULE_NAMES: dict[Schedule, str] = {
    "none": "",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-v": "ZB-V",
}


CONTEXT_NAMES: dict[ContextKind, str] = {"ring": "ring", "all_to_all": "all-to-all", "all_gather": "all-gather"}


@dataclass(frozen=True)
class Cuts:
    """Which of the cuts that were found tensor parallelism applies: (class, names of its cuts), of classes that are
    cut at all."""

    by_class: tuple[tuple[str, tuple[str, ...]], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.by_class)

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        return dict(self.by_class)

    def of(self, layer_class: str) -> tuple[str, ...]:
        """Names of the cuts of a class."""
        return self._names.get(layer_class, ())


@dataclass(frozen=True)
class Shape:
    """All of a plan but the assignment of layers: what the ILP's y_k chooses between."""

    data_replicate: int
    data_shard: int
    tensor: int
    pipeline: int
    micro_batch: int
    num_microbatches: int
    sequence: bool = False
    schedule: Schedule = "none"
    virtual_stages: int = 1
    gradient_sync: Literal["every", "last"] = "last"
    reshard: bool = False
    """Pipelines only: all layers give gathered parameters back after forward. Without a pipeline each layer chooses."""
    mesh_axes: tuple[Axis, ...] = AXES
    context: int = 1
    context_kind: ContextKind = "ring"
    expert: int = 1
    offload_optimizer: bool = False
    recompute_parts: tuple[str, ...] = ()
    """Parts of layers that are run again in backward beside what their recompute says; see part_cost.py."""
    kind_order: tuple[int, ...] = ()
    """Unequal devices, each stage on one kind of them: the kinds by number, from the first stage on. () where devices
    are equal or all count as the slowest, and in shapes of plans, whose cluster is in that order."""
    cuts: Cuts | None = None
    """Cuts of tensor parallelism; None: all that the degree divides."""

    @property
    def samples(self) -> float:
        """Samples' worth of work that a rank has of one micro-batch: context ranks share each sample's tokens and, of
        its s^2 scores, s^2 / context."""
        return self.micro_batch / self.context

    @property
    def sharded_over(self) -> int:
        """Ranks that parameters are sharded over."""
        return self.data_shard * self.context

    @property
    def shard_stride(self) -> int:
        """Distance in ranks between neighbours of that group."""
        return self.stride("data_shard" if self.context == 1 else "context")

    @property
    def experts_over(self) -> int:
        """Ranks of a stage that hold different tokens, and share the experts between them."""
        return self.sharded_over * (self.tensor if self.sequence else 1)

    @property
    def same_experts(self) -> int:
        """Ranks of those that hold the same experts, and shard them."""
        return self.experts_over // self.expert

    @property
    def expert_stride(self) -> int:
        """Distance in ranks between neighbours over which experts are spread: the nearest that hold other tokens."""
        axes: tuple[Axis, ...] = ("data_shard", "context", "tensor")
        spread = axes if self.sequence else axes[:2]
        return min((self.stride(axis) for axis in spread if self.degree(axis) > 1), default=1)

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.data_replicate * self.data_shard

    @property
    def degrees(self) -> Degrees:
        """The degrees as the plan states them."""
        return Degrees(
            data_replicate=self.data_replicate,
            data_shard=self.data_shard,
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
            pipeline=self.pipeline,
            virtual_stages=self.virtual_stages,
        )

    def degree(self, axis: Axis) -> int:
        """Degree of a mesh axis."""
        return int(getattr(self, axis))

    def stride(self, axis: Axis) -> int:
        """Distance in ranks between neighbours on a mesh axis."""
        return self._strides[axis]

    @cached_property
    def _strides(self) -> dict[Axis, int]:
        found, stride = {}, 1
        for axis in reversed(self.mesh_axes):
            found[axis], stride = stride, stride * self.degree(axis)
        return found

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage holds when its rank holds most; counted from the schedule's table."""
        if self.schedule == "1f1b":
            return min(self.num_microbatches, self.pipeline - stage)
        if self.schedule in ("none", "gpipe"):
            return self.num_microbatches if self.schedule == "gpipe" else 1
        rank, chunk = rank_and_chunk(self.schedule, stage, self.pipeline)
        held = rank_in_flight(self.schedule, self.pipeline, self.num_microbatches, self.virtual_stages)[rank]
        return held[chunk] if chunk < len(held) else 0

    @property
    def layout(self) -> tuple[object, ...]:
        """What makes two shapes the same to a reader."""
        return self.degrees, self.schedule, self.micro_batch, self.sequence, self.context_kind

    @property
    def label(self) -> str:
        """How people call it: DDP, FSDP, HSDP 2x4, TP 4, PP 2, joined by ' + '."""
        names = []
        if self.data_shard > 1:
            hybrid = f"HSDP {self.data_replicate}x{self.data_shard}"
            names.append(hybrid if self.data_replicate > 1 else f"FSDP {self.data_shard}")
        elif self.data_replicate > 1:
            names.append(f"DDP {self.data_replicate}")
        if self.tensor > 1:
            names.append(f"TP {self.tensor}" + (" with sequence parallel" if self.sequence else ""))
        if self.context > 1:
            names.append(f"CP {self.context} ({CONTEXT_NAMES[self.context_kind]})")
        if self.expert > 1:
            names.append(f"EP {self.expert}")
        if self.pipeline > 1:
            chunks = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
            names.append(f"PP {self.pipeline}{chunks} ({SCHEDULE_NAMES[self.schedule]})")
        return " + ".join(names) or "one device"


@dataclass(frozen=True)
class LayerOption:
    """What is decided per layer: recompute, and whether gathered parameters are given back after forward."""

    recompute: Recompute = "none"
    reshard: bool = False
    offload: bool = False
    """What the layer keeps for its backward waits in the host's memory."""


Offered = frozenset[Literal["parts", "offload"]]
"""Options of layers beyond the usual: recompute of any of their parts, activations in the host's memory."""

NO_EXTRAS: Offered = frozenset()


@dataclass(frozen=True)
class Pins:
    """What the user (or a manual set-up) has decided already; None leaves it to the search."""

    data_replicate: int | None = None
    data_shard: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    sequence: bool | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    gradient_sync: Literal["every", "last"] | None = None
    recompute: Recompute | None = None
    reshard: bool | None = None
    parts: bool = False
    """Layers may recompute any of their parts, too."""
    everything: bool = False
    """Also what is priced but not run yet, and all options that a layer has."""
    context: int | None = None
    context_kind: ContextKind | None = None
    expert: int | None = None
    most: tuple[tuple[str, int], ...] = ()
    """(name, largest value) of numbers that are bounded, not fixed."""
    without: tuple[Schedule, ...] = ()
    """Schedules that are forbidden."""
    sequence_ways: int | None = None
    """Ranks between which the tokens of a sample are split, by sequence parallelism, context parallelism or both."""

    @property
    def may_go_beyond(self) -> bool:
        """Whether what the executor does not run yet was asked for: all of it, or by name or degree."""
        degrees = (self.context or 1) * (self.expert or 1)
        return self.everything or degrees > 1 or self.context_kind is not None or self.schedule is not None

    @property
    def offered(self) -> Offered:
        """Options of layers that the search tries beyond the usual."""
        if self.everything:
            return frozenset({"parts", "offload"})
        return frozenset({"parts"}) if self.parts else NO_EXTRAS

    def as_in(self, shape: Shape) -> "Pins":
        """These pins and how a shape splits the model, its sequences and its experts, by which schedule; how data ranks
        share their state, the micro-batch and recompute are left open."""
        return replace(
            self,
            tensor=shape.tensor,
            sequence=shape.sequence if shape.tensor > 1 else None,
            context=shape.context,
            context_kind=shape.context_kind if shape.context > 1 else None,
            expert=shape.expert,
            pipeline=shape.pipeline,
            schedule=shape.schedule,
            virtual_stages=shape.virtual_stages if shape.pipeline > 1 else None,
        )

    def allows(self, name: str, value: object) -> bool:
        """Whether a choice agrees with what is pinned."""
        pinned = getattr(self, name)
        if pinned is not None and pinned != value:
            return False
        if name == "schedule" and value in self.without:
            return False
        return all(limited != name or (isinstance(value, int) and value <= limit) for limited, limit in self.most)

    def splits_sequences(self, tensor: int, sequence: bool, context: int = 1) -> bool:
        """Whether that sequence parallelism, on or off beside a tensor degree, agrees with what is pinned."""
        ways = (tensor if sequence else 1) * context
        return (tensor == 1 or self.allows("sequence", sequence)) and self.sequence_ways in (None, ways)

    def allows_shape(self, shape: Shape) -> bool:
        """Whether all of a shape agrees with what is pinned."""
        names = ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert", "micro_batch")
        return (
            all(self.allows(name, getattr(shape, name)) for name in (*names, "schedule"))
            and (shape.pipeline == 1 or self.allows("virtual_stages", shape.virtual_stages))
            and (shape.context == 1 or self.allows("context_kind", shape.context_kind))
            and self.splits_sequences(shape.tensor, shape.sequence, shape.context)
        )


def divides(cut: TensorCut, tensor: int) -> bool:
    """Whether a cut divides into `tensor` parts: heads, widths, and each part of fused modules."""
    return not any(size % tensor for size in divided(cut))


def _counted(cut: TensorCut, size: int) -> str:
    """What a cut has so many of."""
    if cut.kind in ("embedding", "head"):
        return "words"
    whole = size == max(cut.units) or size not in cut.units
    if cut.kind == "attention" and size in cut.units:
        return "heads" if whole else "key-value heads"
    return "features" if whole else "groups"


def divided(cut: TensorCut) -> list[int]:
    """Numbers that a tensor degree must divide for this cut."""
    return [*cut.units, *(size for sizes in cut.parts.values() for size in sizes)]


def chosen_cuts(layer_class: LayerClass, shape: Shape) -> tuple[int, ...]:
    """Which cuts of a class, by index, are applied under a shape: of those that the degree divides, the wanted ones."""
    if shape.tensor == 1 or layer_class.tensor is None:
        return ()
    wanted = None if shape.cuts is None else shape.cuts.of(layer_class.name)
    return tuple(
        i
        for i, cut in enumerate(layer_class.cuts)
        if divides(cut, shape.tensor) and (wanted is None or cut.name in wanted)
    )


def is_cut(layer_class: LayerClass, shape: Shape) -> bool:
    """Whether the layers of a class are cut by tensor parallelism under a shape."""
    return bool(chosen_cuts(layer_class, shape))


def is_sequence_cut(layer_class: LayerClass, shape: Shape) -> bool:
    """Whether the layers of a class run on slices of the sequence between their cuts."""
    chosen = chosen_cuts(layer_class, shape) if shape.sequence else ()
    return bool(chosen) and runs_on_slices(layer_class, chosen)


def runs_on_slices(layer_class: LayerClass, chosen: Sequence[int]) -> bool:
    """Whether the layers of a class run on slices of the sequence with these cuts applied, and the rest left whole."""
    if layer_class.sequence is None:
        return False
    left = [i for i in range(len(layer_class.cuts)) if i not in chosen]
    return all(layer_class.sequence_without and layer_class.sequence_without[i] is not None for i in left)


def tensor_rule(profile: ModelProfile, tensor: int) -> str | None:
    """The rule that excludes a tensor degree, or None if it is legal.

    A degree that leaves some cuts whole is legal only where no part of it divides them all: 8 heads on 16 ranks are cut
    in 8, but 25 heads stay whole on 2, 4 or 8, and what lies beside them is cut.
    """
    if tensor == 1:
        return None
    cuts = inner_cuts(profile)
    if not cuts:
        return "tensor: no layer can be cut"
    undivided = _undivided(cuts, tensor)
    if undivided is None:
        return None
    smaller = any(_undivided(cuts, part) is None for part in divisors(tensor) if part > 1)
    return undivided if smaller or not any(divides(cut, tensor) for _, cut in cuts) else None


def inner_cuts(profile: ModelProfile) -> list[tuple[str, TensorCut]]:
    """(class, cut) of what lies between embedding and head."""
    return [(c.name, cut) for c in profile.classes for cut in c.cuts if cut.kind in ("attention", "mlp", "table")]


def _undivided(cuts: Sequence[tuple[str, TensorCut]], tensor: int) -> str | None:
    """The first cut that a degree does not divide, in words."""
    for name, cut in cuts:
        for size in divided(cut):
            if size % tensor:
                return f"tensor={tensor} does not divide {size} {_counted(cut, size)} ({cut.kind} of {name})"
    return None


def sequence_rule(profile: ModelProfile, tensor: int, context: int = 1) -> str | None:
    """The rule that excludes sequence parallelism beside a tensor and a context degree, or None if it is legal."""
    able = [c for c in profile.classes if c.sequence is not None]
    if not able:
        return "sequence: no layer runs on a slice of its sequence"
    if profile.seq_len is None or profile.seq_len % tensor:
        return f"sequence: tensor={tensor} does not divide the sequence of {profile.seq_len}"
    if profile.seq_len // context % tensor:
        return f"sequence: tensor={tensor} does not divide the {profile.seq_len // context} tokens of a context rank"
    for c in able:
        divided_ones = [i for i, cut in enumerate(c.cuts) if divides(cut, tensor)]
        if not divided_ones or not runs_on_slices(c, divided_ones):
            return f"sequence: {_undivided([(c.name, cut) for cut in c.cuts], tensor)}, and whole it needs all of it"
    both = _names_read(profile, sliced=True) & _names_read(profile, sliced=False)
    if both:
        return f"sequence: {min(both)} is read on slices of the sequence and on the whole of it"
    return None


def has_sequence_attention(profile: ModelProfile) -> bool:
    """Whether there is attention over a sequence, which context parallelism splits."""
    return profile.seq_len is not None and bool(profile.attention_modules)


def has_experts(profile: ModelProfile) -> bool:
    """Whether any layer has a bank of experts."""
    return any(c.experts for c in profile.classes)


def context_rule(profile: ModelProfile, context: int, tensor: int, kind: ContextKind) -> str | None:
    """The rule that excludes a context degree beside a tensor degree, or None if it is legal."""
    if context == 1:
        return None
    if profile.seq_len is None or not has_sequence_attention(profile):
        return "context: the model has no attention over a sequence"
    if profile.context_problem:
        return f"context: {profile.context_problem}"
    if profile.seq_len % (2 * context):
        return (
            f"context={context} does not divide the sequence of {profile.seq_len} into two chunks for each rank, "
            "an early one and a late one, which balance causal attention"
        )
    units = {unit for c in profile.classes for cut in c.cuts if cut.kind == "attention" for unit in cut.units}
    if kind == "all_to_all" and any(unit % (tensor * context) for unit in units):
        return f"context={context} x tensor={tensor} does not divide {min(units)} heads, which all-to-all spreads"
    return None


def expert_rule(profile: ModelProfile, expert: int, sequence: bool = False) -> str | None:
    """The rule that excludes an expert degree, with sequence parallelism or without, or None if it is legal."""
    if expert == 1:
        return None
    classes = [c for c in profile.classes if c.experts]
    banks = [(c, bank) for c in classes for bank in c.experts]
    if not banks:
        listed = listed_experts(profile.classes)
        return "expert: the model has no banks of experts" + (
            f": {listed[0]} is a list of {listed[1]} modules that are called one by one, with no one place from which "
            "tokens could be sent to other ranks; keep their weights in one tensor [experts, ...], as transformers "
            "does from version 5 on"
            if listed
            else ""
        )
    undivided = sorted(bank.count for _, bank in banks if bank.count % expert)
    if undivided:
        return f"expert={expert} does not divide {undivided[0]} experts"
    for layer_class, bank in banks:
        if not bank.called:
            return (
                f"expert: {bank.module or layer_class.name} is not called with tokens, the experts of each and their "
                "weights, by which it multiplies what its experts return, nor with as many tokens for each expert, so "
                "no rank can run a part of it"
            )
    whole = [c.name for c in classes if c.sequence is None]
    if sequence and whole:
        return f"expert: sequence-parallel ranks hold the same tokens in {whole[0]}, which needs the whole sequence"
    read = Counter(name for layer in profile.layers for name in _expert_parameters(profile, layer))
    several = [name for name, count in read.items() if count > 1 or any(name in group for group in profile.ties)]
    return f"expert: {several[0]} is read in several places, each of which would run a part of it" if several else None


def _expert_parameters(profile: ModelProfile, layer: LayerProfile) -> list[str]:
    prefix = f"{layer.root}." if layer.root else ""
    return [prefix + name for bank in profile.classes[layer.layer_class].experts for name in bank.parameters]


def _names_read(profile: ModelProfile, sliced: bool) -> set[str]:
    """Uncut parameters that layers read which can (or cannot) run on slices; tied ones under each of their names."""
    names: set[str] = set()
    for layer in profile.layers:
        layer_class = profile.classes[layer.layer_class]
        if (layer_class.sequence is not None) == sliced:
            prefix = f"{layer.root}." if layer.root else ""
            cut = {prefix + name for c in layer_class.cuts for name in c.sharded}
            names |= set(layer.parameters) - cut
    return names | {name for group in profile.ties if names.intersection(group) for name in group}


def sharding_rule(profile: ModelProfile, precision: Precision) -> str | None:
    """The rule that excludes torch's fully_shard: it takes no parameter without dims, hooks itself onto what goes into
    a layer, where nothing may be written in place, and casts parameters, but no buffers."""
    if profile.decides_by_values:
        return (
            f"data_shard: {profile.decides_by_values} decides by values, so ranks may run different layers and wait "
            "for each other's parameters for ever; replicas (DDP) are fine"
        )
    if precision != "fp32" and profile.mixed_precision_problem:
        return (
            f"data_shard: parameters in bf16 meet tensors in fp32 ({profile.mixed_precision_problem}); "
            "cast buffers where they are used (.to(x.dtype)), or plan in fp32"
        )
    for layer_class in profile.classes:
        if layer_class.writes_input and layer_class.parameters:
            return f"data_shard: {layer_class.name} writes into its input; use relu(x) for relu_(x), x + y for x += y"
        for parameter in layer_class.parameters:
            if not parameter.shape:
                return f"data_shard: {parameter.name} of {layer_class.name} has no dims; make it a tensor of one"
    return None


def zero_bubble_rule(profile: ModelProfile, training: TrainingSpec) -> str | None:
    """The rule that excludes zero-bubble schedules, or None if they are legal: gradients of weights that several layers
    read come at several times then, and fully_shard finds some in fp32 and some in bf16 (seen in torch 2.13)."""
    names = [name for layer in profile.layers for name in set(layer.parameters)]
    if training.is_mixed and len(set(names)) < len(names):
        return "zero-bubble schedules run layers that share weights in fp32 only"
    return None


def can_recompute(profile: ModelProfile, layer: LayerProfile) -> bool:
    """Whether a layer's forward can be repeated: it is one module, and still finds what it was given."""
    is_one_module = layer.root != "" and layer.modules == (layer.root,)
    return is_one_module and not profile.classes[layer.layer_class].input_overwritten


def check_parts(profile: ModelProfile, recompute: Recompute | None) -> None:
    """Raise ValueError for parts to recompute that no layer has."""
    known = dict.fromkeys(part.name for layer_class in profile.classes for part in layer_class.parts)
    missing = [name for name in parts_of(recompute or "none") if name not in known]
    if missing:
        raise ValueError(
            f"recompute={recompute}: no layer of {profile.name} has a part {missing[0]} that can be run again by "
            f"itself; there are {', '.join(known) or 'none'}"
        )


def legal_cuts(profile: ModelProfile) -> list[int]:
    """Layers before which a stage may begin: not between two that read one parameter under one name, which lives on one
    stage. (Tied weights have two names, and a copy on each side.) A model that decides by values stays whole: the other
    stages have no values to decide by."""
    if profile.decides_by_values:
        return []
    first: dict[str, int] = {}
    inside: set[int] = set()
    for i, layer in enumerate(profile.layers):
        for name in layer.parameters:
            inside.update(range(first.setdefault(name, i) + 1, i + 1))
    return [i for i in range(1, len(profile.layers)) if i not in inside]


MOST_STARTS = 500
"""Layers at which the search lets a stage begin, at most: a stage of 64 then has 8 between its ends."""

MOST_COUNTS = 2_000_000
"""Numbers that say how many layers of each run of equal ones an interval of the chain holds, over all intervals."""


def stage_starts(profile: ModelProfile) -> list[int]:
    """Layers before which the search lets a stage begin: before all that it may, or in chains of very many layers
    before one in so many, so that intervals stay few."""
    legal = legal_cuts(profile)
    num_runs = 1 + sum(a.layer_class != b.layer_class for a, b in pairwise(profile.layers))
    most = min(MOST_STARTS, math.isqrt(2 * MOST_COUNTS // num_runs))
    step = -(-len(legal) // most)
    return legal[step - 1 :: step] if step > 1 else legal


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def make_plan(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    shape: Shape,
    stages: Sequence[Sequence[LayerOption]],
) -> Plan:
    """The plan that runs consecutive layers on each stage with the given options.

    stages: [stage][layer] in the chain's order; together as many as the profile has layers.
    Raises ValueError when they are not.
    """
    num_layers = sum(len(stage) for stage in stages)
    if num_layers != len(profile.layers):
        raise ValueError(f"the stages hold {num_layers} layers, the model has {len(profile.layers)}")
    layers = iter(profile.layers)
    return Plan(
        model=reference_of(profile),
        cluster=cluster.in_order(shape.kind_order),
        training=training,
        degrees=shape.degrees,
        mesh_axes=shape.mesh_axes,
        schedule=shape.schedule,
        micro_batch=shape.micro_batch,
        num_microbatches=shape.num_microbatches,
        gradient_sync=shape.gradient_sync,
        context_kind=shape.context_kind,
        recompute_parts=shape.recompute_parts,
        offload_optimizer=shape.offload_optimizer,
        classes=tuple(
            ClassPlan(
                name=c.name,
                cuts=tuple(c.cuts[i] for i in chosen_cuts(c, shape)),
                sequence=is_sequence_cut(c, shape),
                experts=c.experts if shape.expert > 1 else (),
            )
            for c in profile.classes
            if is_cut(c, shape) or (shape.expert > 1 and c.experts)
        ),
        stages=tuple(
            Stage(
                layers=tuple(
                    LayerPlan(
                        name=layer.name,
                        layer_class=profile.classes[layer.layer_class].name,
                        root=layer.root,
                        modules=layer.modules,
                        parameters=layer.parameters,
                        recompute=option.recompute,
                        reshard=option.reshard,
                        offload=option.offload,
                    )
                    for option, layer in zip(stage, layers, strict=False)
                )
            )
            for stage in stages
        ),
    )


def reference_of(profile: ModelProfile) -> ModelReference:
    """What a plan says of its model."""
    return ModelReference(
        name=profile.name,
        source=profile.source,
        fingerprint=profile.fingerprint,
        num_parameters=profile.num_parameters,
        ties=profile.ties,
        tensors=profile.tensors,
        layer_modules=tuple(dict.fromkeys(name for layer in profile.layers for name in layer.modules)),
        attention_modules=profile.attention_modules,
        expert_modules=profile.expert_modules,
        decides_by_values=bool(profile.decides_by_values),
        returns_loss=profile.returns_loss,
    )


def shape_of(plan: Plan) -> Shape:
    """The shape a plan has."""
    return Shape(
        data_replicate=plan.degrees.data_replicate,
        data_shard=plan.degrees.data_shard,
        tensor=plan.degrees.tensor,
        pipeline=plan.degrees.pipeline,
        micro_batch=plan.micro_batch,
        num_microbatches=plan.num_microbatches,
        sequence=plan.sequence_parallel,
        schedule=plan.schedule,
        virtual_stages=plan.degrees.virtual_stages,
        gradient_sync=plan.gradient_sync,
        reshard=plan.degrees.pipeline > 1 and any(layer.reshard for stage in plan.stages for layer in stage.layers),
        mesh_axes=plan.mesh_axes,
        context=plan.degrees.context,
        context_kind=plan.context_kind,
        expert=plan.degrees.expert,
        offload_optimizer=plan.offload_optimizer,
        recompute_parts=plan.recompute_parts,
        cuts=None
        if plan.degrees.tensor == 1
        else Cuts(tuple((c.name, tuple(cut.name for cut in c.cuts)) for c in plan.classes)),
    )
