"""What is legal: the rules that exclude a degree, a schedule, a cut of the chain, or the recompute of a layer."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...profiler.model.model_profile import (
    CrossingTensor,
    LayerClass,
    LayerProfile,
    ModelProfile,
    ParameterProfile,
    TensorCut,
)
from .document import ContextKind, Recompute, parts_of
from .module_list_experts import listed_experts
from .shape import Shape
from .training import COMPILING, REFERENCE, Precision, TrainingSpec


def divides(cut: TensorCut, tensor: int) -> bool:
    """Whether `tensor` divides all numbers of a cut: heads, widths, and the widths of each part of fused modules."""
    return not any(size % tensor for size in divided(cut))


def _counted(cut: TensorCut, size: int) -> str:
    """Name of what a cut has `size` of."""
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
    """Indices of the cuts of a class that are applied under a shape: those that the degree divides and the shape does
    not leave out."""
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
    """Whether the layers of a class run on slices of the sequence if these cuts are applied and the others are left
    whole."""
    if layer_class.sequence is None:
        return False
    left = [i for i in range(len(layer_class.cuts)) if i not in chosen]
    return all(layer_class.sequence_without and layer_class.sequence_without[i] is not None for i in left)


def tensor_rule(profile: ModelProfile, tensor: int) -> str | None:
    """The rule that excludes a tensor degree; None if it is legal.

    A degree that leaves some cuts whole is legal only if no smaller degree that divides it divides them all: 8 heads on
    16 ranks should be cut in 8, but 25 heads stay whole on 2, 4 or 8, while other modules are cut.
    """
    if tensor == 1:
        return None
    cuts = inner_cuts(profile)
    if not cuts:
        because = ", because its frozen weights are kept in 4 bits" if profile.packed else ""
        return f"tensor: no layer can be cut{because}"
    whole = undivided(cuts, tensor)
    if whole is None:
        return None
    smaller = any(undivided(cuts, part) is None for part in divisors(tensor) if part > 1)
    return whole if smaller or not any(divides(cut, tensor) for _, cut in cuts) else None


def fp8_rule(profile: ModelProfile, training: TrainingSpec, tensor: int) -> str | None:
    """The rule that excludes a tensor degree, or all of them, because the executor does not run it in fp8; None if it
    does, or if the plan is for other software."""
    if training.precision != "fp8" or training.software not in (REFERENCE, COMPILING):
        return None
    if has_experts(profile):
        return "fp8: experts that share one tensor are run in bf16 only; plan with --precision bf16"
    return "fp8: linear layers that tensor parallelism cuts are run in bf16 only" if tensor > 1 else None


def inner_cuts(profile: ModelProfile) -> list[tuple[str, TensorCut]]:
    """(class, cut) of all cuts except those of embedding and head."""
    return [(c.name, cut) for c in profile.classes for cut in c.cuts if cut.kind in ("attention", "mlp", "table")]


def undivided(cuts: Sequence[tuple[str, TensorCut]], tensor: int) -> str | None:
    """The first cut that a degree does not divide, in words; None if it divides all."""
    for name, cut in cuts:
        for size in divided(cut):
            if size % tensor:
                return f"tensor={tensor} does not divide {size} {_counted(cut, size)} ({cut.kind} of {name})"
    return None


def sequence_rule(profile: ModelProfile, tensor: int, context: int = 1) -> str | None:
    """The rule that excludes sequence parallelism beside a tensor and a context degree, or None if it is legal."""
    able = [c for c in profile.classes if c.sequence is not None]
    if not able:
        return "sequence: no layer runs on a slice of its sequence; the notes of plan profile say why"
    if profile.seq_len is None or profile.seq_len % tensor:
        return f"sequence: tensor={tensor} does not divide the sequence of {profile.seq_len}"
    if profile.seq_len // context % tensor:
        return f"sequence: tensor={tensor} does not divide the {profile.seq_len // context} tokens of a context rank"
    for c in able:
        divided_ones = [i for i, cut in enumerate(c.cuts) if divides(cut, tensor)]
        if not divided_ones or not runs_on_slices(c, divided_ones):
            return f"sequence: {undivided([(c.name, cut) for cut in c.cuts], tensor)}, and whole it needs all of it"
    both = _names_read(profile, sliced=True) & _names_read(profile, sliced=False)
    if both:
        return f"sequence: {min(both)} is read on slices of the sequence and on the whole of it"
    lengths = {(_beside_tokens(t), t.shape[t.dims.index("sequence")]) for t in profile.tensors if _is_sliced(t)}
    for beside, length in sorted(lengths):
        if (beside, length * tensor) in lengths:
            return (
                f"sequence: tensors of {length * tensor} and of {length} tokens go from layer to layer, and the slice "
                f"of one that each of {tensor} ranks has is as long as the other; plan with --pin sequence=off"
            )
    return None


def _is_sliced(tensor: CrossingTensor) -> bool:
    """Whether ranks may hold slices of a tensor, if it crosses between layers that run on slices."""
    return tensor.requires_grad and "sequence" in tensor.dims


def _beside_tokens(tensor: CrossingTensor) -> tuple[int, ...]:
    """Number of the dim of tokens, followed by the sizes of all dims that are neither tokens nor samples."""
    others = (size for size, dim in zip(tensor.shape, tensor.dims, strict=True) if dim == "other")
    return tensor.dims.index("sequence"), *others


def has_sequence_attention(profile: ModelProfile) -> bool:
    """Whether the model has attention over a sequence, which context parallelism can split."""
    return profile.seq_len is not None and bool(profile.attention_modules)


def has_experts(profile: ModelProfile) -> bool:
    """Whether any layer has a bank of experts."""
    return any(c.experts for c in profile.classes)


def context_rule(profile: ModelProfile, context: int, tensor: int, kind: ContextKind) -> str | None:
    """The rule that excludes a context degree beside a tensor degree, or None if it is legal."""
    if context == 1:
        return None
    if profile.seq_len is None and profile.attention_modules:
        return (
            "context: the batch function does not say how long a sequence is, of which context ranks would have parts; "
            "if the batch has sequences, let it take their length: def batch(size, seq_len=2048)"
        )
    of_attention = profile.context_problem.startswith("attention ")  # with a learned bias torch takes it apart
    if profile.seq_len is None or not (profile.attention_modules or of_attention):
        return (
            "context: the model has no attention over a sequence by scaled_dot_product_attention, which context ranks "
            "share; scores that a model computes by itself stay whole"
        )
    if profile.context_problem:
        return f"context: {profile.context_problem}"
    if profile.gradient_problem:
        return (
            f"context: {profile.gradient_problem}, because a hook or an autograd function of the model clips it or "
            "adds to it, and each rank has the gradient of its own part; bound gradients in the training loop, and "
            "return what a function would add with the loss"
        )
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
    """The rule that excludes an expert degree, beside sequence parallelism or not; None if it is legal."""
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
    held = {name for layer in profile.layers for name in _expert_parameters(profile, layer)}
    read = Counter(name for layer in profile.layers for name in set(layer.parameters) & held)
    several = [name for name, count in read.items() if count > 1 or any(name in group for group in profile.ties)]
    if several:
        return f"expert: {several[0]} is read in several places, each of which would run a part of it"
    for layer_class, bank in banks:
        if bank.problem:
            return f"expert: {bank.module or layer_class.name} {bank.problem}"
        if not bank.called:
            return (
                f"expert: {bank.module or layer_class.name} is not called with tokens, the experts of each and their "
                "weights, by which it multiplies what its experts return, nor with as many tokens for each expert, so "
                "no rank can run a part of it"
            )
    whole = [c.name for c in classes if c.sequence is None]
    if sequence and whole:
        return f"expert: sequence-parallel ranks hold the same tokens in {whole[0]}, which needs the whole sequence"
    return None


def _expert_parameters(profile: ModelProfile, layer: LayerProfile) -> list[str]:
    prefix = f"{layer.root}." if layer.root else ""
    return [prefix + name for bank in profile.classes[layer.layer_class].experts for name in bank.parameters]


def _names_read(profile: ModelProfile, sliced: bool) -> set[str]:
    """Full names of the uncut parameters of layers that can (or cannot) run on slices, tied ones under all of their
    names."""
    names: set[str] = set()
    for layer in profile.layers:
        layer_class = profile.classes[layer.layer_class]
        if (layer_class.sequence is not None) == sliced:
            prefix = f"{layer.root}." if layer.root else ""
            cut = {prefix + name for c in layer_class.cuts for name in c.sharded}
            names |= set(layer.parameters) - cut
    return names | {name for group in profile.ties if names.intersection(group) for name in group}


def sharding_rule(profile: ModelProfile, precision: Precision) -> str | None:
    """The rule that excludes torch's fully_shard; None if there is none. fully_shard takes no parameter without
    elements; it puts hooks on a layer's inputs, which must not be written in place; and it casts parameters, but no
    buffers."""
    if profile.decides_by_values:
        return (
            f"data_shard: {profile.decides_by_values} decides by values, so ranks may run different layers and wait "
            "for each other's parameters for ever; replicas (DDP) are fine"
        )
    if profile.sharding_problem:
        return f"data_shard: {profile.sharding_problem}; replicas (DDP) are fine"
    if precision != "fp32" and profile.mixed_precision_problem:
        return (
            f"data_shard: parameters in bf16 meet tensors in fp32 ({profile.mixed_precision_problem}); "
            "cast buffers where they are used (.to(x.dtype)), or plan in fp32"
        )
    for layer in profile.layers:
        layer_class = profile.classes[layer.layer_class]
        if layer_class.writes_input and layer_class.parameters:
            return f"data_shard: {layer_class.name} writes into its input; use relu(x) for relu_(x), x + y for x += y"
        for name, parameter in _named(layer, layer_class):
            if 0 in parameter.shape:
                return f"data_shard: {name} has no elements to shard; leave it out"
    return None


def without_dims(profile: ModelProfile) -> str:
    """Full name of the first parameter without dims; "" if there is none."""
    for layer in profile.layers:
        for name, parameter in _named(layer, profile.classes[layer.layer_class]):
            if not parameter.shape:
                return name
    return ""


def dims_rule(profile: ModelProfile, framework: str) -> str | None:
    """The rule that excludes shards under frameworks that hand parameters without dims to fully_shard as they are; None
    if there is none such."""
    name = without_dims(profile)
    if not name:
        return None
    return (
        f"data_shard: {name} has no dims, and fully_shard, which {framework} gives it to as it is, takes none such; "
        "make it a tensor of one element"
    )


def _named(layer: LayerProfile, layer_class: LayerClass) -> Iterator[tuple[str, ParameterProfile]]:
    """Parameters of a layer by their full names."""
    for parameter in layer_class.parameters:
        inside = f"{layer.root}.{parameter.name}".strip(".")
        yield (inside if inside in layer.parameters else parameter.name), parameter


def pipeline_rule(profile: ModelProfile, pipeline: int, most_stages: int) -> str | None:
    """The rule that excludes a number of pipeline ranks; None if it is legal. most_stages: number of stages that
    `stage_starts` allows."""
    if pipeline <= most_stages:
        return None
    if profile.decides_by_values:
        return (
            f"pipeline: {profile.decides_by_values} decides by values, which the other stages have not; replicas (DDP) "
            "are fine"
        )
    return f"pipeline={pipeline} has more stages than the model can be cut into ({most_stages}){held_together(profile)}"


def held_together(profile: ModelProfile) -> str:
    """Reason why most layers must be on one stage (a shared weight, or the forward itself), as words that follow a
    rule; "" if there is none."""
    if profile.pipeline_problem:
        return f": {profile.pipeline_problem}"
    joined = [note for note in profile.notes if note.endswith(("is one layer", "are one layer"))]
    if whole := [note for note in joined if note.endswith("so all of it is one layer")]:
        return f": {whole[0]}"
    readers: dict[str, list[int]] = {}
    for place, layer in enumerate(profile.layers):
        for name in layer.parameters:
            readers.setdefault(name, []).append(place)
    name, places = max(readers.items(), key=lambda item: item[1][-1] - item[1][0], default=("", [0]))
    if places[0] == places[-1]:
        return f": {joined[0]}" if joined else ""
    first, last = (profile.layers[place].name for place in (places[0], places[-1]))
    return (
        f": {name} is read by {first} and by {last}, so one stage has both and all between them; two modules whose "
        "weights are tied (head.weight = embedding.weight) may be on two"
    )


def micro_batch_rule(profile: ModelProfile, data: int, count: int, pinned: bool) -> str | None:
    """The rule that excludes `count` micro-batches on each of `data` ranks; None if they are legal. pinned: the user
    has said how large a micro-batch is."""
    if count > 1 and profile.batch_problem:
        return f"micro_batch: all samples of a data rank are one, because they cannot be cut: {profile.batch_problem}"
    if data * count > 1 and profile.gradient_problem:
        return (
            f"micro_batch: {profile.gradient_problem}, because a hook or an autograd function of the model clips it or "
            "adds to it, so parts of a batch train something else; bound gradients in the training loop, and return "
            "what a function would add with the loss"
        )
    if data * count > 1 and profile.coupling and not pinned:
        return (
            f"micro_batch: the loss couples the samples of a batch ({profile.coupling}), so smaller micro-batches "
            "train something else; say how many samples are to see each other, for example --pin micro_batch=8"
        )
    return None


def zero_bubble_rule(profile: ModelProfile, training: TrainingSpec) -> str | None:
    """The rule that excludes zero-bubble schedules; None if they are legal. They go backward through a stage twice,
    once for inputs and once for weights. Then gradients of a weight that several layers read come at several times, and
    fully_shard finds some in fp32 and some in bf16 (seen in torch 2.13)."""
    if profile.hooks_gradients:
        return "zero-bubble schedules would call a layer's hooks on gradients (register_hook) twice"
    if profile.repeats_reentrantly:
        return (
            "zero-bubble schedules do a backward in two parts, which torch's reentrant checkpoints, that the model "
            "calls, refuse (checkpoint(..., use_reentrant=False) does not)"
        )
    if profile.repeats_selectively:
        return (
            "zero-bubble schedules do a backward in two parts, and the contexts of a checkpoint that the model calls "
            "with context_fn, as selective ones, can be entered once (checkpoint without context_fn goes)"
        )
    if training.is_mixed and shares_weights(profile):
        return "zero-bubble schedules run layers that share weights in fp32 only"
    return None


def can_recompute(profile: ModelProfile, layer: LayerProfile) -> bool:
    """Whether a layer's forward can be repeated: the layer is one module, and its inputs are not overwritten."""
    is_one_module = layer.root != "" and layer.modules == (layer.root,)
    return is_one_module and not profile.classes[layer.layer_class].input_overwritten


def check_parts(profile: ModelProfile, recompute: Recompute | None) -> None:
    """Raise ValueError if a recompute names a part that no layer has."""
    known = dict.fromkeys(part.name for layer_class in profile.classes for part in layer_class.parts)
    missing = [name for name in parts_of(recompute or "none") if name not in known]
    if missing:
        raise ValueError(
            f"recompute={recompute}: no layer of {profile.name} has a part {missing[0]} that can be run again by "
            f"itself; there are {', '.join(known) or 'none'}"
        )


def legal_cuts(profile: ModelProfile) -> list[int]:
    """Layers before which a stage may begin: the cut points of the model's graph, except where a tensor would cross
    that differs from run to run. A model that decides by values has none, because other stages do not have these
    values. If no layers share a weight every layer but the first is a cut point, and no graph is made, since importing
    networkx takes a tenth of a second."""
    if profile.decides_by_values:
        return []
    varying = [tensor for tensor in profile.tensors if tensor.varies]
    cuts = _whole_cuts(profile)
    return [cut for cut in cuts if not any(t.made_by < cut <= t.last_used_by for t in varying)] if varying else cuts


def _whole_cuts(profile: ModelProfile) -> list[int]:
    if not shares_weights(profile):
        return list(range(1, len(profile.layers)))
    from ...profiler.model.layer_graph import cut_points, graph_of

    return cut_points(graph_of(profile))


def shares_weights(profile: ModelProfile) -> bool:
    """Whether several layers read one parameter under one name."""
    names = [name for layer in profile.layers for name in set(layer.parameters)]
    return len(set(names)) < len(names)


MOST_STARTS = 500
"""Most layers at which the search lets a stage begin. With 64 stages that is 8 for each."""

MOST_COUNTS = 2_000_000
"""Most numbers in the table that says, for every interval of the chain, how many layers of each run of equal ones it
holds."""


def stage_starts(profile: ModelProfile) -> list[int]:
    """Layers before which the search lets a stage begin: all at which it is legal, or in very long chains only every
    n-th of these, so that there are not too many intervals."""
    legal = legal_cuts(profile)
    num_runs = 1 + sum(a.layer_class != b.layer_class for a, b in pairwise(profile.layers))
    most = min(MOST_STARTS, math.isqrt(2 * MOST_COUNTS // num_runs))
    step = -(-len(legal) // most)
    return legal[step - 1 :: step] if step > 1 else legal


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
