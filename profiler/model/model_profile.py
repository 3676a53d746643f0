"""ModelProfile: everything the planner knows of a model, as a document that needs no torch to read.

A model is a chain of layers (the finest places where a pipeline may be cut). Equal layers share one LayerClass,
which holds what was *observed* when one representative ran forward and backward on fake tensors: operators, bytes
saved for backward, peaks. Every observed amount is fitted over micro-batch size b and tensor degree t as

    amount(b, t) = a[0] + a[1] b + (a[2] + a[3] b) / t

from runs at two batch sizes, and (where the class can be cut by tensor parallelism) with weights whole and halved.
The sequence length is that of the profile. Where the model was run at two more lengths, `at_seq_len` puts a parabola
through the three for every amount: work and memory of a layer grow with 1, s or s^2.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ..document import Document, Frozen

Amount = tuple[float, float, float, float]
"""(fixed, per sample, fixed / tensor, per sample / tensor); see amount_at."""

ZERO: Amount = (0.0, 0.0, 0.0, 0.0)

FP32_BYTES = 4

MOST_PARTS = 4
"""Parts of a layer that can be recomputed, at most: every set of them is a choice of its own."""

OpKind = Literal["matmul", "attention", "norm", "elementwise", "embedding", "loss", "copy", "other"]

SELECTIVELY_KEPT: tuple[OpKind, ...] = ("matmul", "attention")
"""Kinds of operators whose results selective recompute keeps: they are dear to run again and small to keep."""

OpPart = Literal["forward", "backward_input", "backward_weight", "backward"]

KeptAs = Literal["", "bf16", "fp16", "nf4"]
"""How a frozen parameter is kept (frozen.py); '': as all others are."""

KEPT_BYTES: dict[KeptAs, float] = {"bf16": 2.0, "fp16": 2.0, "nf4": 0.5 + 4 / 64}
"""Bytes of an element that is not kept as all others are; of nf4 with its share of a scale in fp32 for each 64."""


def amount_at(amount: Amount, batch: float, tensor: int = 1) -> float:
    """Value of a fitted amount for micro-batches of `batch` samples on `tensor` tensor-parallel ranks."""
    return amount[0] + amount[1] * batch + (amount[2] + amount[3] * batch) / tensor


class Bytes(Frozen):
    """Memory that follows the compute dtype (counted in elements) and memory of a dtype of its own (in bytes).

    in_fp32: what is added where the compute dtype is fp32; below zero, because casts to and from fp32 are no copies.
    """

    elements: Amount = ZERO
    other_bytes: Amount = ZERO
    in_fp32: Amount = ZERO

    def at(self, batch: float, element_bytes: int, tensor: int = 1) -> float:
        """Bytes for one micro-batch of `batch` samples with compute dtype of `element_bytes`."""
        size = element_bytes * amount_at(self.elements, batch, tensor) + amount_at(self.other_bytes, batch, tensor)
        return size + amount_at(self.in_fp32, batch, tensor) if element_bytes == FP32_BYTES else size


class OpProfile(Frozen):
    """One operator of a layer class as one rank runs it for one micro-batch."""

    name: str = Field(description="aten operator, for example mm")
    module: str = Field(description="module inside the layer that called it, '' for code between modules")
    kind: OpKind
    part: OpPart = Field(
        description="backward_input: gradient of activations; backward_weight: of parameters; backward: both or unclear"
    )
    flops: Amount = ZERO
    moved: Bytes = Field(default=Bytes(), description="tensors read and written")
    repeated: bool = Field(
        default=True, description="forward only: recompute repeats it (until the module's last saved tensor is there)"
    )
    core: bool = Field(default=False, description="forward of unfused attention, from the scores to its output")
    within: str = Field(default="", description="forward only: the part of the layer that repeats it if recomputed")
    shape: tuple[Amount, Amount, Amount] | None = Field(
        default=None, description="matmul only: rows, inner and columns of the product (batched: rows of all batches)"
    )
    kernels: PositiveFloat = Field(
        default=1.0,
        description="how many, all alike, this is, as in a loop over tokens: flops and moved are of all, shape of one",
    )


class CollectiveProfile(Frozen):
    """One tensor-parallel collective of a layer class, by one rank, for one micro-batch."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    part: Literal["forward", "backward"]
    tensor: Bytes = Field(description="the full tensor (gathered or reduced), not one rank's shard")
    repeated: bool = Field(default=True, description="forward only: recompute repeats it")
    within: str = Field(default="", description="forward only: the part of the layer that repeats it if recomputed")
    entry: str = Field(
        default="",
        description="of the input of columns: which; cuts whose columns read one tensor share its collective",
    )


class PartBytes(Frozen):
    """Tensors of a layer that are kept or not, depending on which of its parts are recomputed. torch.utils.checkpoint
    keeps what a part is given, and nothing of what is saved inside of it."""

    saved_in: tuple[NonNegativeInt, ...] = Field(
        description="parts that save them, by index; (): saved by none, so not in `saved`"
    )
    given_to: tuple[NonNegativeInt, ...] = Field(description="parts that are given them")
    size: Bytes

    def is_kept(self, parts: Collection[int]) -> bool:
        """Whether these tensors are kept if these parts are recomputed."""
        return any(part not in parts for part in self.saved_in) or any(part in parts for part in self.given_to)


class Costs(Frozen):
    """What one layer of a class does and keeps for one micro-batch in one tensor mode."""

    operators: tuple[OpProfile, ...]
    saved: Bytes = Field(description="kept from forward to backward without recompute; no parameters, no layer inputs")
    full: Bytes = Field(
        default=Bytes(),
        description="the same under full recompute: what code around the layer's module saves, or makes for it",
    )
    attention: Bytes = Field(
        default=Bytes(), description="the same if unfused attention is run again, from the scores to its output"
    )
    selective: Bytes = Field(
        default=Bytes(),
        description="the same under selective recompute: full, and what matmuls and attention in the module return",
    )
    part_bytes: tuple[PartBytes, ...] = Field(
        default=(), description="what the layer's parts save and are given; what is kept in any case is left out"
    )
    part_peaks: tuple[Bytes, ...] = Field(
        default=(),
        description="[parts that have not begun their backward] -> the peak until the next one has, beyond `saved` "
        "(or below it, as some is gone), with the forward of the last one begun, if it runs again; empty without parts",
    )
    inputs: Bytes = Field(description="activations from layers before; CrossingTensor says who keeps them")
    forward_transient: Bytes = Field(description="peak of the forward above saved and inputs")
    backward_transient: Bytes = Field(description="the same of the backward, without weight gradients")
    put_off: Bytes = Field(
        default=Bytes(),
        description="gradients that wait for the backward for weights, where a zero-bubble schedule puts that off",
    )
    spent: Bytes = Field(
        default=Bytes(), description="of `saved` of a layer that ends in the loss, what that backward has no use for"
    )
    fused: Bytes | None = Field(
        default=None,
        description="the same as `saved` where kernels are fused: what enters a chain of elementwise kernels, not what "
        "they make on the way (fused_kernels.py); None: not known, as in documents before 2026-11-28",
    )
    fused_inputs: Bytes = Field(
        default=Bytes(), description="of `inputs`, what such kernels keep beside what the layer saves otherwise"
    )
    collectives: tuple[CollectiveProfile, ...] = ()


class ParameterProfile(Frozen):
    """One parameter of a layer class, named relative to the layer's root module."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    trainable: bool = True
    kept_as: KeptAs = Field(default="", description="frozen, and kept in fewer bits; nf4: 4 with a scale for each 64")

    @model_validator(mode="after")
    def _what_is_trained_is_kept_as_all(self) -> Self:
        if self.kept_as and self.trainable:
            raise ValueError(f"{self.name} is kept as {self.kept_as} and trained; only frozen parameters are")
        return self

    @property
    def bytes_kept(self) -> float:
        """Bytes of an element between steps; 0 if it is kept like all others."""
        return KEPT_BYTES.get(self.kept_as, 0.0)

    @property
    def num_elements(self) -> int:
        """Elements of the whole, uncut parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class BufferProfile(Frozen):
    """One buffer of the model, or a tensor that it holds elsewhere: in a list, a closure, a module that it does not
    register. On every rank that runs its module; never sharded."""

    name: str = Field(description="full name, or place")
    shape: tuple[NonNegativeInt, ...]
    dtype: str = Field(description="a torch dtype name")


class TensorCut(Frozen):
    """A group of modules that tensor parallelism may cut together; found in the data flow and tried on fake tensors.

    columns give each rank a slice of their output features, rows take that slice as input and give a partial sum.
    kind "head": columns whose output (logits) is gathered again, unless it stays cut. kind "embedding": a
    vocabulary-cut nn.Embedding. kind "table": an nn.EmbeddingBag of which each rank holds some features of every row,
    gathered after it.
    Module names are relative to the layer's root module.
    """

    kind: Literal["attention", "mlp", "head", "embedding", "table"]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    parts: dict[str, tuple[int, ...]] = Field(
        default={}, description="fused column modules (qkv): output widths that are cut one by one"
    )
    attributes: dict[str, tuple[str, ...]] = Field(
        default={},
        description="module -> its integer attributes that must be divided by the degree (n_head, or config.n_head of "
        "an object that it keeps)",
    )
    inputs: dict[str, str] = Field(
        default={},
        description="column -> the first module that is given the same tensor: one collective for all; '': it reads "
        "what has entered already",
    )
    entries: tuple[str, ...] = Field(
        default=(),
        description="whole modules whose output enters, not their input: a column's input and more is made of it, or "
        "a head of keys that all queries read",
    )
    between: tuple[str, ...] = Field(
        default=(), description="modules between columns and row that hold a parameter for each cut feature"
    )
    partial: tuple[str, ...] = Field(
        default=(), description="whole parameters read between entry and row: each rank has a share of their gradient"
    )
    stays_cut: bool = Field(
        default=False, description="head: only a cross-entropy reads it, which is computed on slices of the classes"
    )
    gather: str = Field(
        default="",
        description="sequence mode: module whose sliced inputs are gathered; '': gather before each column module",
    )
    tables: tuple[str, ...] = Field(
        default=(), description="whole embeddings of which each rank reads the features of its heads (relative biases)"
    )
    narrowed: str = Field(
        default="", description="module that takes the number of its features off the shape of what it is given"
    )
    shown: tuple[NonNegativeInt, ...] = Field(
        default=(),
        description="leaves of that which only columns read: the module's code is shown them with one rank's features",
    )
    door: str = Field(default="", description="module that is given, or returns, something with a row for each head")
    given: dict[int, int] = Field(
        default={}, description="leaf of what the door is given -> the dim of which each rank takes its heads"
    )
    returned: dict[int, int] = Field(
        default={}, description="leaf of what the door returns -> the dim along which those of all ranks are joined"
    )
    units: tuple[PositiveInt, ...] = Field(description="the degree must divide each: heads, kv heads, feature widths")
    sharded: dict[str, NonNegativeInt] = Field(description="parameter (relative name) -> dim that is cut")

    @property
    def name(self) -> str:
        """A name that no other cut of the class has."""
        return f"{self.kind}:{(self.rows or self.columns)[0]}"

    def has_entered(self, column: str) -> bool:
        """Whether the input of a column has entered before, at an entry. (The name of a column that is the layer's root
        is '', like such an input.)"""
        return bool(self.entries) and self.inputs.get(column) == ""


class Experts(Frozen):
    """A bank of experts in one module: parameters stacked over experts, each token run through a few of them."""

    module: str = Field(description="relative to the layer's root module")
    count: PositiveInt
    parameters: tuple[str, ...] = Field(description="relative names; dim 0 counts the experts")
    routed: Amount = Field(description="tokens through all experts of a micro-batch: its tokens times the top-k")
    groups: PositiveInt = Field(
        default=1,
        description="equal groups of neighbouring experts, of which the router first takes some for a token",
    )
    chosen_groups: PositiveInt = Field(default=1, description="how many groups it takes, which hold all of its experts")
    called: Literal["", "routed", "stacked"] = Field(
        default="",
        description="routed: with tokens, the experts of each and their weights, in which what it returns is linear; "
        "stacked: with as many tokens for each expert, [experts, tokens, width], none of which sees another's; "
        "'': otherwise",
    )
    attributes: tuple[str, ...] = Field(default=(), description="the module's own numbers of experts")
    problem: str = Field(default="", description="what keeps ranks from running a part of it each; '' if nothing")


class LayerPart(Frozen):
    """A submodule of a layer that can be run again by itself."""

    name: str = Field(description="relative to the layer's root module")
    reads_arriving: bool = Field(default=True, description="it is given a tensor from an earlier layer")


class LayerClass(Frozen):
    """Layers that run the same operators on the same shapes."""

    name: str
    parameters: tuple[ParameterProfile, ...]
    whole: Costs
    cuts: tuple[TensorCut, ...] = ()
    tensor: Costs | None = Field(default=None, description="with every cut applied; None where nothing can be cut")
    sequence: Costs | None = Field(
        default=None, description="with every cut applied and the rest on a slice of the sequence; None if it cannot"
    )
    tensor_alone: tuple[Costs, ...] = Field(
        default=(), description="[cut] with this one applied alone; empty where there is but one, which is `tensor`"
    )
    sequence_without: tuple[Costs | None, ...] = Field(
        default=(), description="[cut] `sequence` with this one left whole, on slices; None (or empty) if it cannot"
    )
    experts: tuple[Experts, ...] = ()
    parts: tuple[LayerPart, ...] = Field(
        default=(), description="in the order in which they run; none inside of another"
    )
    writes_input: bool = Field(default=False, description="a module writes into what it is given")
    writes_into_kept: bool = Field(
        default=False, description="it writes into what a matmul or attention returned: no selective recompute"
    )
    writes_into_attention: bool = Field(
        default=False, description="it writes into what unfused attention has read: attention cannot be repeated"
    )
    input_overwritten: bool = Field(
        default=False,
        description="cannot run again: what it is given is written into, by it or later, it takes from an iterator, or "
        "a parameter is frozen for the forward alone",
    )


class Producer(Frozen):
    """Where a tensor came from in the model's own forward.

    kind "module": output leaf `leaf` of call number `call` of module `name`. kind "glue": result leaf `leaf` of the
    `call`-th torch function called outside every layer module (see producers.py, which counts for both the profiler
    and the executor).
    """

    kind: Literal["module", "glue"]
    name: str = ""
    call: int = 0
    leaf: int = 0


class CrossingTensor(Frozen):
    """A tensor made in one layer and read in a later one: every cut between them carries it.

    Tensors that depend on no parameter (masks, rotary tables, positions) are not listed: every stage holds the batch
    and makes them itself.
    """

    producer: Producer
    made_by: NonNegativeInt = Field(description="layer index")
    last_used_by: NonNegativeInt = Field(description="layer index")
    used_by: tuple[NonNegativeInt, ...] = Field(default=(), description="all layers that read it, in order")
    given_to: tuple[int, ...] | None = Field(
        default=None, description="of used_by, if not all: layers whose modules are given it, and need it to run again"
    )
    saved_by: tuple[int, ...] = Field(
        default=(), description="layers (its maker or readers) that save it for backward when nothing is recomputed"
    )
    saved_in_fp32_by: tuple[int, ...] | None = Field(
        default=None, description="where the compute dtype is fp32, if others: one that casts first saves this there"
    )
    varies: bool = Field(
        default=False, description="it is not there, or of another size, in some runs, so no stage begins behind it"
    )
    same_as: NonNegativeInt | None = Field(
        default=None, description="index of the first tensor with this memory, if handed on"
    )
    shape: tuple[NonNegativeInt, ...] = Field(description="at one sample")
    dims: tuple[Literal["batch", "sequence", "other"], ...]
    dtype: str = Field(description="'compute', or a torch dtype name for a fixed one")
    requires_grad: bool
    size: Bytes


class LayerProfile(Frozen):
    """One layer of the chain, in execution order."""

    name: str
    layer_class: NonNegativeInt = Field(description="index into ModelProfile.classes")
    root: str = Field(description="module that class-relative names start from; '' for the model itself")
    modules: tuple[str, ...] = Field(description="full names of the modules that run in this layer, outermost only")
    parameters: tuple[str, ...] = Field(description="full names of the parameters it reads; tied ones in each reader")


class BatchTensor(Frozen):
    """One tensor of a micro-batch of one sample."""

    name: str = Field(description="keyword, or position as a number")
    shape: tuple[NonNegativeInt, ...]
    dims: tuple[Literal["batch", "sequence", "other"], ...]
    dtype: str
    counts_rows: bool = Field(default=False, description="its numbers count rows of all samples: edges, offsets")


class ModelProfile(Document):
    """What the planner knows of a model, at one sequence length."""

    made_by: ClassVar[str] = "plan profile MODEL -o {path}"

    schema_version: Literal[3] = 3
    kind: Literal["meshwright-profile"] = "meshwright-profile"
    name: str
    source: str = Field(description="what it was made from: model.py, file.py:function, config.json, or a class name")
    fingerprint: str = Field(description="changes when the layers, their operators, shapes or parameters change")
    seq_len: PositiveInt | None = Field(description="None: the model has no sequence")
    torch_version: str
    classes: tuple[LayerClass, ...]
    layers: tuple[LayerProfile, ...] = Field(min_length=1)
    tensors: tuple[CrossingTensor, ...]
    ties: tuple[tuple[str, ...], ...] = Field(description="full names that are one and the same parameter")
    buffers: tuple[BufferProfile, ...] = ()
    batch: tuple[BatchTensor, ...]
    returns_loss: bool = Field(description="the module returns its own loss")
    attention_modules: tuple[str, ...] = ()
    mixed_precision_problem: str = Field(
        default="", description="why it does not run with parameters in bfloat16 and buffers in their own dtype"
    )
    context_problem: str = Field(
        default="", description="why ranks cannot run it on parts of its sequence: what would mix tokens, and how"
    )
    smallest_micro_batch: PositiveInt = Field(
        default=1, description="samples; batch norm over single values takes no fewer than 2"
    )
    sharding_problem: str = Field(default="", description="why fully_shard cannot take its modules")
    hooks_gradients: bool = Field(default=False, description="layers put hooks on gradients that they compute")
    repeats_reentrantly: bool = Field(
        default=False, description="it repeats forwards by reentrant checkpoints, whose backward is done in one part"
    )
    repeats_selectively: bool = Field(
        default=False,
        description="it repeats forwards in contexts of its own (context_fn), as selective checkpoints do",
    )
    batch_problem: str = Field(
        default="", description="why a batch cannot be cut into micro-batches: what in it counts rows of all samples"
    )
    coupling: str = Field(
        default="", description="where the loss of a sample depends on others of its batch: how that was seen, in words"
    )
    gradient_problem: str = Field(
        default="", description="which gradients hooks or functions of the model do not leave in proportion to the loss"
    )
    decides_by_values: str = Field(
        default="", description="where it decides by the values of tensors what to compute: file:line and the operator"
    )
    pipeline_problem: str = Field(
        default="", description="which tensors that would cross a cut are not the same in every run, in words"
    )
    global_batch: PositiveInt | None = Field(default=None, description="the model file's own suggestion")
    longest_seq_len: PositiveInt | None = Field(
        default=None, description="tokens per sample for which tables of positions have rows; None: no such table seen"
    )
    untrained: str = Field(default="", description="which parameters the model does not register, in words")
    told: tuple[str, ...] = Field(
        default=(), description="by what the numbers that are trained come to differ with the plan, in words"
    )
    notes: tuple[str, ...] = Field(default=(), description="what could not be cut or recognised, in words")
    assumes: tuple[str, ...] = Field(default=(), description="of its batches what nobody said: the size of pictures")
    other_lengths: tuple["ModelProfile", ...] = Field(default=(), description="the same model at two more lengths")

    @model_validator(mode="after")
    def _indices_and_names_fit_together(self) -> Self:
        for number, layer in enumerate(self.layers):
            if layer.layer_class >= len(self.classes):
                raise ValueError(
                    f"layer {number} is of class {layer.layer_class}, and there are {len(self.classes)} classes"
                )
            known = {parameter.name for parameter in self.classes[layer.layer_class].parameters}
            for name in layer.parameters:
                relative = name.removeprefix(layer.root + ".") if layer.root else name
                if relative not in known:
                    raise ValueError(f"layer {number} has a parameter {name} that its class does not know")
        for number, tensor in enumerate(self.tensors):
            check_crossing(number, tensor, len(self.layers), len(self.tensors))
        for layer_class in self.classes:
            _check_class(layer_class)
        for element in self.batch:
            if len(element.shape) != len(element.dims):
                raise ValueError(f"element {element.name} of a batch has {len(element.shape)} dims, kinds of others")
        return self

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; tied ones count once."""
        return sum(parameter.num_elements for parameter in self._parameters())

    @property
    def num_trainable(self) -> int:
        """Those of them that are trained."""
        return sum(parameter.num_elements for parameter in self._parameters() if parameter.trainable)

    def _parameters(self) -> Iterator[ParameterProfile]:
        """All parameters of the model, each once, however many layers read it."""
        repeated = {name for group in self.ties for name in group[1:]}
        for layer in self.layers:
            known = {parameter.name: parameter for parameter in self.classes[layer.layer_class].parameters}
            for full_name in layer.parameters:
                if full_name not in repeated:
                    repeated.add(full_name)
                    yield known[full_name.removeprefix(layer.root + ".") if layer.root else full_name]

    @property
    def packed(self) -> bool:
        """Whether weights are kept in 4 bits."""
        return any(parameter.kept_as == "nf4" for each in self.classes for parameter in each.parameters)

    @property
    def expert_modules(self) -> tuple[str, ...]:
        """Full names of the modules that are banks of experts."""
        found = (
            f"{layer.root}.{bank.module}".strip(".")
            for layer in self.layers
            for bank in self.classes[layer.layer_class].experts
        )
        return tuple(dict.fromkeys(found))

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in a sample; 1 for models without a sequence."""
        return self.seq_len or 1

    def flops_per_sample(self) -> float:
        """Model FLOPs of one sample, forward and backward, nothing recomputed; matmuls and attention as executed."""
        return sum(
            amount_at(op.flops, 2) - amount_at(op.flops, 1)
            for layer in self.layers
            for op in self.classes[layer.layer_class].whole.operators
        )


def check_crossing(number: int, tensor: CrossingTensor, layers: int, tensors: int) -> None:
    """Raises ValueError if a tensor names layers that do not exist, or in an order in which it cannot be made and
    read."""
    readers = (*tensor.used_by, *(tensor.given_to or ()), *tensor.saved_by, *(tensor.saved_in_fp32_by or ()))
    furthest = max((tensor.made_by, tensor.last_used_by, *readers))
    if furthest >= layers:
        raise ValueError(f"tensor {number} names layer {furthest}, and there are {layers} layers")
    if not tensor.made_by <= tensor.last_used_by or any(reader <= tensor.made_by for reader in tensor.used_by):
        raise ValueError(f"tensor {number} is read before layer {tensor.made_by} has made it")
    if tensor.same_as is not None and tensor.same_as >= tensors:
        raise ValueError(f"tensor {number} is the same as tensor {tensor.same_as}, and there are {tensors}")
    if len(tensor.shape) != len(tensor.dims):
        raise ValueError(f"tensor {number} has {len(tensor.shape)} dims, and kinds of {len(tensor.dims)}")


def _check_class(layer_class: LayerClass) -> None:
    """Raises ValueError if cuts, experts or parts of a class name parameters or parts that it does not have."""
    shapes = {parameter.name: parameter.shape for parameter in layer_class.parameters}
    for cut in layer_class.cuts:
        for name, dim in cut.sharded.items():
            if name not in shapes or dim >= len(shapes[name]):
                raise ValueError(f"a cut of {layer_class.name} cuts dim {dim} of {name}, which is not there")
        if not (cut.rows or cut.columns):
            raise ValueError(f"a cut of {layer_class.name} names no module")
    for bank in layer_class.experts:
        for name in bank.parameters:
            if name not in shapes:
                raise ValueError(f"experts of {layer_class.name} name a parameter {name} that is not there")
    count = len(layer_class.parts)
    modes = [layer_class.whole, layer_class.tensor, layer_class.sequence]
    for costs in filter(None, [*modes, *layer_class.tensor_alone, *layer_class.sequence_without]):
        if any(part >= count for held in costs.part_bytes for part in (*held.saved_in, *held.given_to)):
            raise ValueError(f"{layer_class.name} holds bytes of a part that is not there: it has {count}")
        if uneven := next((op for op in costs.operators if amount_at(op.flops, 1) < -1.0), None):
            raise ValueError(
                f"{uneven.name} in {uneven.module or 'the code'} of {layer_class.name} does less than no FLOPs for one "
                "sample, by what it does for two and three; work must grow evenly with the samples of a micro-batch "
                "(does it multiply samples with each other?)"
            )
    for named, found in (
        ("tensor_alone", layer_class.tensor_alone),
        ("sequence_without", layer_class.sequence_without),
    ):
        if found and len(found) != len(layer_class.cuts):
            raise ValueError(f"{layer_class.name} has {len(layer_class.cuts)} cuts, and {named} of {len(found)}")
    if layer_class.cuts and layer_class.tensor is None:
        raise ValueError(f"{layer_class.name} has cuts, and no costs with them applied")


def load_profile(path: Path) -> ModelProfile:
    """Read a profile document. Raises ValueError that says what is wrong with the file."""
    return ModelProfile.load(path)


def fingerprint_of(profile: ModelProfile) -> str:
    """Hash of what a plan depends on: layers, classes, tensors, ties and batch; not of names, notes or versions."""
    told = {"name", "source", "fingerprint", "torch_version", "notes", "global_batch", "mixed_precision_problem"}
    told |= {
        "context_problem",
        "coupling",
        "gradient_problem",
        "pipeline_problem",
        "batch_problem",
        "sharding_problem",
        "hooks_gradients",
        "repeats_reentrantly",
        "repeats_selectively",
        "assumes",
        "untrained",
        "told",
    }
    left_out: dict[str, Any] = {**dict.fromkeys(told, True), "batch": {"__all__": {"counts_rows"}}}
    left_out["tensors"] = {"__all__": {"varies"}}
    kernels: dict[str, Any] = {"operators": {"__all__": {"kernels"}}}  # they follow from amounts
    kernels |= dict.fromkeys(("fused", "fused_inputs"), True)  # they follow from operators
    each = {"whole": kernels, "tensor": kernels, "sequence": kernels}
    each |= {"tensor_alone": {"__all__": kernels}, "sequence_without": {"__all__": kernels}}
    left_out["classes"] = {"__all__": each}
    document = profile.model_dump(mode="json", exclude=left_out)
    for layer_class in document["classes"]:
        for parameter in layer_class["parameters"]:
            if not parameter["kept_as"]:  # as it was before there was another way
                del parameter["kept_as"]
        for cut in layer_class["cuts"]:
            if not cut["narrowed"]:
                del cut["narrowed"], cut["shown"]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
