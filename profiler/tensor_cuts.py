"""Find what tensor parallelism may cut in a layer, from the data flow, and try it on fake tensors.

A group is a row module (it takes a slice of features and gives a partial sum) with the column modules that all its
input comes from. Whether the layer still works with the group's weights cut is tried, and checked operator by operator:
nothing between columns and row may reduce over the cut features, and what a fused projection is split into is cut
part by part. The same trial decides whether the rest of the layer can run on a slice of the sequence.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .chain import Chain, Crossing, Shapes
from .fake import FakeModel
from .layer_run import Collective, LayerRun, Observation
from .meters import Op, Recorder, Size, View
from .model_profile import TensorCut

SMALLEST_VOCABULARY = 1024
"""Embeddings with fewer rows (positions of short sequences, token types) are not worth a collective."""

_DEGREES = (2, 3, 5, 7)


@dataclass(frozen=True)
class Found:
    """Cuts of one layer, and in words what could not be cut."""

    cuts: tuple[TensorCut, ...] = ()
    notes: tuple[str, ...] = ()
    attention_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Tap:
    """The one call of a linear or embedding module."""

    module: nn.Module
    input: View
    output: View
    like: str
    """The first module that was given the same tensor."""


@dataclass
class _Flow:
    """Data flow of a layer's forward, between storages."""

    taps: dict[str, _Tap]
    ops: list[Op]
    parameters: dict[int, str]
    arriving: dict[int, bool]
    made_from: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


def find_cuts(fake: FakeModel, chain: Chain, index: int, shapes: Sequence[Shapes], seq_len: int | None) -> Found:
    """Cuts of layer `index`; shapes: of runs with one and with two samples."""
    probe = _Probe(fake, chain, index, shapes[0], seq_len)
    flow = probe.flow()
    cuts: list[TensorCut] = []
    problems: dict[str, str] = {}
    for row, tap in flow.taps.items():
        used = {name for cut in cuts for name in (*cut.columns, *cut.rows)}
        if row in used or not is_product(tap.module):
            continue
        outcome = probe.group_of(flow, row, used)
        if isinstance(outcome, TensorCut):
            cuts.append(outcome)
        elif outcome:
            problems[row] = outcome
    others = (*_head_cuts(probe, flow, cuts), *_embedding_cuts(probe, flow, shapes), *_table_cuts(probe, flow))
    for name, outcome in others:
        if isinstance(outcome, TensorCut):
            cuts.append(outcome)
        else:
            problems[name] = outcome
    cut_modules = {name for cut in cuts for name in (*cut.columns, *cut.rows)}
    notes = tuple(
        f"{probe.where(name)}: not cut by tensor parallelism, {problem}"
        for name, problem in problems.items()
        if name not in cut_modules
    )
    attention = dict.fromkeys(op.module for op in flow.ops if op.kind == "attention")
    return Found(tuple(cuts), notes, tuple(attention))


def common_degree(cuts: Sequence[TensorCut]) -> int | None:
    """Smallest degree that divides every unit of every cut."""
    units = [unit for cut in cuts for unit in cut.units]
    return next((degree for degree in _DEGREES if all(unit % degree == 0 for unit in units)), None)


def run_cut(
    fake: FakeModel,
    chain: Chain,
    index: int,
    shapes: Shapes,
    size: int,
    seq_len: int | None,
    cuts: Sequence[TensorCut],
    degree: int,
    sequence_dims: dict[Any, int] | None = None,
    backward: bool = True,
) -> Observation:
    """One run of a layer as one of `degree` tensor-parallel ranks runs it.

    sequence_dims: producer of each arriving tensor -> its sequence dim, to run between the cuts on a slice of the
    sequence; None: on the whole.
    """
    run = LayerRun(fake, chain, index, shapes, size, seq_len)
    rank = _Rank(run, cuts, degree, seq_len, sequence_dims)
    with fake.mode or nullcontext(), rank.applied():
        seen = run.run(arrive=rank.arrive, backward=backward)
    seen.collectives = rank.collectives
    return seen


def gathering_ways(fake: FakeModel, chain: Chain, index: int, cuts: Sequence[TensorCut]) -> list[tuple[TensorCut, ...]]:
    """The cuts with each choice of where the sequence is gathered: before the columns, or before the module around.

    Attention modules that take shapes from their input (Hugging Face's) need the whole sequence at their door.
    """
    modules = layer_modules(fake, chain, index)

    def around(cut: TensorCut) -> TensorCut:
        parents = [column.split(".")[:-1] for column in cut.columns]
        shared = ".".join(a[0] for a in itertools.takewhile(lambda a: len(set(a)) == 1, zip(*parents, strict=False)))
        usable = cut.rows and shared and shared in modules
        return cut.model_copy(update={"gather": shared}) if usable else cut

    ways = [
        tuple(cuts),
        tuple(around(cut) if cut.kind == "attention" else cut for cut in cuts),
        tuple(around(cut) for cut in cuts),
    ]
    return [way for i, way in enumerate(ways) if way not in ways[:i]]


def sequence_problem(
    whole: Observation, cut: Observation, cuts: Sequence[TensorCut], degree: int, output_dims: Sequence[int | None]
) -> str:
    """Why a layer cannot run on a slice of the sequence, as the trial `cut` shows; "" if it can."""
    for spec, sliced, dim in zip(whole.outputs, cut.outputs, output_dims, strict=True):
        expected = list(spec.shape)
        if dim is not None:
            expected[dim] //= degree
        if tuple(expected) != sliced.shape:
            return f"an output has shape {sliced.shape} where the slice is {tuple(expected)}"
    rows = {row for group in cuts for row in group.rows}
    banks = tuple(
        f"{name}." for name, bank in whole.experts.items() if bank.called == "routed"
    )  # each token goes through alone
    runs = ([op for op in _forward(seen) if not f"{op.module}.".startswith(banks)] for seen in (whole, cut))
    return _reduction_problem(*runs, rows)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or Hugging Face's Conv1D (a linear layer with its weight transposed)."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_convolution(module: nn.Module) -> bool:
    """A convolution whose output channels each read all input channels."""
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1


def is_product(module: nn.Module) -> bool:
    """A module that may be cut by its output features, or by its input features."""
    return is_linear(module) or is_convolution(module)


def _features(module: nn.Module) -> tuple[int, int]:
    """(input, output) features of a linear module or channels of a convolution, from its weight."""
    first, second = module.get_parameter("weight").shape[:2]
    return (second, first) if _output_dim(module) == 0 else (first, second)


def _output_dim(module: nn.Module) -> int:
    return 0 if isinstance(module, nn.Linear) or is_convolution(module) else 1


class _Probe:
    """Runs of one layer at one sample, to see its data flow and to try cuts."""

    def __init__(self, fake: FakeModel, chain: Chain, index: int, shapes: Shapes, seq_len: int | None) -> None:
        self.fake = fake
        self.chain = chain
        self.index = index
        self.shapes = shapes
        self.seq_len = seq_len
        self.layer = chain.layers[index]
        self.modules = layer_modules(fake, chain, index)

    def where(self, name: str) -> str:
        """Full name of a module of the layer, for people."""
        return ".".join(part for part in (self.layer.root, name) if part)

    def flow(self, shapes: Shapes | None = None, size: int = 1) -> _Flow:
        """Data flow of the layer as it is."""
        run = LayerRun(self.fake, self.chain, self.index, shapes or self.shapes, size, self.seq_len)
        taps: dict[str, _Tap] = {}
        calls: dict[str, int] = defaultdict(int)
        given: list[tuple[torch.Tensor, str]] = []

        def tap(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                if run.recorder.active and args and isinstance(args[0], torch.Tensor):
                    calls[name] += 1
                    number = run.storages.number
                    like = next((first for tensor, first in given if tensor is args[0]), name)
                    given.append((args[0], like))
                    taps[name] = _Tap(module, View.of(args[0], number(args[0])), View.of(output, number(output)), like)

            return hook

        handles = [
            module.register_forward_hook(tap(name))
            for name, module in self.modules.items()
            if is_product(module) or isinstance(module, nn.Embedding | nn.EmbeddingBag)
        ]
        whole = run.run(backward=False)
        for handle in handles:
            handle.remove()
        if size == 1:
            self.whole = whole
        parameters = {run.storages.number(p): name for name, p in self.fake.module.named_parameters()}
        once = {name: taps[name] for name in taps if calls[name] == 1}
        flow = _Flow(once, whole.ops, parameters, whole.arrived)
        for op in whole.ops:
            if not op.is_view:
                for made in op.outputs:
                    flow.made_from[made.storage] |= {view.storage for view in op.inputs}
        return flow

    def group_of(self, flow: _Flow, row: str, used: set[str]) -> TensorCut | str:
        """The row with its columns as a cut; else the reason against it ("" if it is no row at all)."""
        group = _columns_of(flow, row)
        if isinstance(group, str):
            return group
        columns, between, entries = group
        if not columns or used & {*columns, *entries}:
            return ""
        return self.try_group(flow, row, columns, between, entries)

    def try_group(
        self, flow: _Flow, row: str, columns: tuple[str, ...], between: set[int], entries: tuple[str, ...]
    ) -> TensorCut | str:
        """The group as a cut, with what must be divided for it to work; else the reason against it."""
        parts = {}
        for column in columns:
            found = _channels(flow, column) if is_convolution(flow.taps[column].module) else _parts(flow, column)
            if isinstance(found, str):
                return found
            if len(found) > 1:
                parts[column] = found
        kind, units = _kind_and_units(flow, row, columns, parts, between)
        sharded: dict[str, int] = {}
        for column in columns:
            sharded |= self.sharded(column, _output_dim(flow.taps[column].module), bias=True)
        sharded |= self.sharded(row, 1 - _output_dim(flow.taps[row].module), bias=False)
        norms = _group_norms(flow, self.modules, between)
        for name in norms:
            sharded |= self.sharded(name, 0, bias=True)
        entered = {column for column in columns if _sources(flow, column) & set(entries)}
        cut = TensorCut(
            kind=kind,
            columns=columns,
            rows=(row,),
            parts=parts,
            inputs={column: "" if column in entered else flow.taps[column].like for column in columns},
            entries=entries,
            between=tuple(norms),
            partial=self._partial(flow, row, between, sharded),
            units=tuple(dict.fromkeys([*units, *norms.values()])),
            sharded=sharded,
        )
        return self._try_with_attributes(cut)

    def _partial(self, flow: _Flow, row: str, between: set[int], sharded: dict[str, int]) -> tuple[str, ...]:
        """Trained parameters that are joined with what differs between ranks before the row, by themselves or cast."""
        differs = _cut_storages(flow, between) - set(flow.parameters)
        prefix = self.layer.root + "." if self.layer.root else ""
        known = {number: {name.removeprefix(prefix)} for number, name in flow.parameters.items()}
        found: set[str] = set()
        for op in flow.ops:
            read = {view.storage for view in op.inputs}
            if read & differs and op.module != row:
                found |= {name for storage in read for name in known.get(storage, ())}
            elif read and read <= set(known):
                for storage in _made(op):
                    known.setdefault(storage, set()).update(*(known[s] for s in read))
        named = dict(self.fake.module.named_parameters(remove_duplicate=False))
        return tuple(sorted(n for n in found - set(sharded) if named[prefix + n].requires_grad))

    def sharded(self, name: str, dim: int, bias: bool) -> dict[str, int]:
        """Parameters of a cut module (and other names of the same ones in this layer) with the dim that is cut."""
        module = self.modules[name]
        cut = {id(module.weight): dim}
        if bias and getattr(module, "bias", None) is not None:
            cut[id(module.bias)] = 0
        named = dict(self.fake.module.named_parameters(remove_duplicate=False))
        prefix = self.layer.root + "." if self.layer.root else ""
        return {n.removeprefix(prefix): cut[id(named[n])] for n in self.layer.parameters if id(named[n]) in cut}

    def _try_with_attributes(self, cut: TensorCut) -> TensorCut | str:
        """The cut with the fewest attributes that must be divided for the layer to run; or why it does not run."""
        degree = common_degree([cut])
        if degree is None:
            return f"its {' and '.join(map(str, cut.units))} units have no common divisor up to {_DEGREES[-1]}"
        candidates = tuple(self._attributes(cut))

        def problem(chosen: tuple[tuple[str, str], ...]) -> str:
            return self.problem(self._dividing(cut, chosen), degree)

        found = problem(())
        if not found:
            return self._dividing(cut, ())
        if candidates and not problem(candidates):
            needed = candidates
            for candidate in candidates:
                fewer = tuple(c for c in needed if c != candidate)
                needed = needed if problem(fewer) else fewer
            return self._dividing(cut, needed)
        for chosen in (*itertools.combinations(candidates, 1), *itertools.combinations(candidates, 2)):
            if not problem(chosen):
                return self._dividing(cut, chosen)
        return found

    def _dividing(self, cut: TensorCut, chosen: tuple[tuple[str, str], ...]) -> TensorCut:
        """The cut, with these attributes divided by the degree (and Conv1D's own width, which it reshapes by)."""
        attributes: dict[str, tuple[str, ...]] = {c: ("nf",) for c in cut.columns if hasattr(self.modules[c], "nf")}
        attributes |= dict.fromkeys(cut.between, ("num_groups", "num_channels"))
        for module, attribute in chosen:
            attributes[module] = (*attributes.get(module, ()), attribute)
        return cut.model_copy(update={"attributes": attributes})

    def _attributes(self, cut: TensorCut) -> list[tuple[str, str]]:
        """Whole numbers kept by the modules around the columns that may count what is cut."""
        widths = {_features(self.modules[column])[1] for column in cut.columns}
        values = widths | set(cut.units) | {width for parts in cut.parts.values() for width in parts}
        found = []
        for name in dict.fromkeys(column.rpartition(".")[0] for column in cut.columns):
            for attribute, value in vars(self.modules.get(name, nn.Module())).items():
                if type(value) is int and value in values:
                    found.append((name, attribute))
        return found

    def problem(self, cut: TensorCut, degree: int) -> str:
        """Why the layer does not work with the cut; "" if it does."""
        try:
            seen = run_cut(
                self.fake, self.chain, self.index, self.shapes, 1, self.seq_len, [cut], degree, backward=False
            )
        except ValueError as error:
            return f"with its weights cut the layer does not run ({_first_line(error.__cause__ or error)})"
        if [spec.shape for spec in seen.outputs] != [spec.shape for spec in self.whole.outputs]:
            return "with its weights cut the layer's output changes its shape"
        whole, trial = _forward(self.whole), _forward(seen)
        problem = _reduction_problem(whole, trial, set(cut.rows))
        if problem or not cut.rows:
            return problem
        return _leading_problem(self, whole, trial, cut) or _order_problem(self, whole, trial, cut)


def layer_modules(fake: FakeModel, chain: Chain, index: int) -> dict[str, nn.Module]:
    """Modules of a layer by name relative to its root."""
    layer = chain.layers[index]
    prefix = layer.root + "." if layer.root else ""
    found = {}
    for unit in layer.units:
        for name, module in fake.module.get_submodule(unit).named_modules(prefix=unit):
            found["" if name == layer.root else name.removeprefix(prefix)] = module
    return found


def _columns_of(flow: _Flow, row: str) -> tuple[tuple[str, ...], set[int], tuple[str, ...]] | str:
    """(column modules, storages between them and the row, entries); or why the row's input does not come from linears
    alone. An entry is a linear whose output the row's input is made of, and a column's input as well.

    An empty reason: the row simply starts from the layer's input, as every column does.
    """
    linears = _outputs_of_linears(flow)
    tables = {tap.output.storage: name for name, tap in flow.taps.items() if isinstance(tap.module, nn.Embedding)}
    columns: set[str] = set()
    between: set[int] = set()
    reason = ""
    todo = [flow.taps[row].input.storage]
    while todo:
        storage = todo.pop()
        if storage in between:
            continue
        between.add(storage)
        if storage in linears and linears[storage] != row:
            columns.add(linears[storage])
        elif storage in tables:
            reason = f"because {tables[storage]} (an embedding) is mixed in between"
        elif flow.arriving.get(storage):
            reason = reason or "because a trained input of the layer is mixed in between"
        else:
            todo += flow.made_from.get(storage, ())
    if reason:
        return reason if _has_attention(flow, between) and columns else ""
    entries = {entry for column in columns for entry in _sources(flow, column) & columns}
    columns -= entries
    for column in columns:
        if _sources(flow, column) & entries:
            between |= _upstream(flow, column)
    if columns and (leak := _leak(flow, row, between)):
        return leak
    return tuple(n for n in flow.taps if n in columns), between, tuple(n for n in flow.taps if n in entries)


def _outputs_of_linears(flow: _Flow) -> dict[int, str]:
    return {tap.output.storage: name for name, tap in flow.taps.items() if is_product(tap.module)}


def _upstream(flow: _Flow, name: str) -> set[int]:
    """Storages that a module's input is made of, as far as the outputs of linears."""
    linears = _outputs_of_linears(flow)
    found: set[int] = set()
    todo = [flow.taps[name].input.storage]
    while todo:
        storage = todo.pop()
        if storage not in found:
            found.add(storage)
            todo += () if storage in linears else flow.made_from.get(storage, ())
    return found


def _sources(flow: _Flow, name: str) -> set[str]:
    """Linears whose outputs a module's input is made of."""
    linears = _outputs_of_linears(flow)
    return {linears[storage] for storage in _upstream(flow, name) if storage in linears}


def _has_attention(flow: _Flow, between: set[int]) -> bool:
    return any(op.kind == "attention" or _is_softmax(op) for op in flow.ops if _made(op) & between and not op.is_view)


def _is_softmax(op: Op) -> bool:
    return op.name in ("_softmax", "_safe_softmax")


def _leak(flow: _Flow, row: str, between: set[int]) -> str:
    """Something else than the row reads what is cut."""
    inside = _cut_storages(flow, between) - set(flow.parameters)
    weights = _weights(flow, row)
    for op in flow.ops:
        read = {view.storage for view in op.inputs}
        if op.is_view or not read & inside or read & weights:
            continue
        aside = _made(op) - between
        if not _made(op) & between or any(view.storage in aside for other in flow.ops for view in other.inputs):
            return f"because {op.module or op.name} outside the pair reads it too"
    return ""


def _cut_storages(flow: _Flow, between: set[int]) -> set[int]:
    """Storages between columns and row that come from a column."""
    linears = {tap.output.storage for tap in flow.taps.values() if is_product(tap.module)}
    cut = linears & between
    for op in flow.ops:
        if not op.is_view and any(view.storage in cut for view in op.inputs):
            cut |= _made(op) & between
    return cut


def _weights(flow: _Flow, name: str) -> set[int]:
    tap = flow.taps[name]
    own = {id(p) for p in tap.module.parameters()}
    return {number for number, full in flow.parameters.items() if id(_parameter(flow, name, full)) in own}


def _parameter(flow: _Flow, name: str, full: str) -> Any:
    return next((p for n, p in flow.taps[name].module.named_parameters() if full.endswith("." + n) or full == n), None)


def _made(op: Op) -> set[int]:
    return {view.storage for view in op.outputs}


def _parts(flow: _Flow, column: str) -> tuple[int, ...] | str:
    """Widths that a fused column's output is split into; one width if it is used as a whole."""
    tap = flow.taps[column]
    width = _features(tap.module)[1]
    spans = set()
    for view in _readers(flow.ops, tap.output.storage):
        start = view.offset % width
        sizes = [(s, n) for s, n in zip(view.strides, view.shape, strict=True) if 0 < s < width and n > 1]
        reach = sum(stride * (size - 1) for stride, size in sizes) + 1
        leading = max(sizes, default=(1, 1))
        spans.add((start, width) if leading[0] * leading[1] == width else (start, reach))
    if all(length == width for _, length in spans):
        return (width,)
    ordered = sorted(spans)
    position = 0
    for start, length in ordered:
        if start != position:
            return f"because {column} is split into overlapping or interleaved pieces {ordered}"
        position = start + length
    if position != width:
        return f"because part of the output of {column} is not used"
    return tuple(length for _, length in ordered)


def _channels(flow: _Flow, column: str) -> tuple[int, ...] | str:
    """The width of a convolution's output, which must be read as a whole."""
    tap = flow.taps[column]
    size = math.prod(tap.output.shape)
    if any(math.prod(view.shape) != size for view in _readers(flow.ops, tap.output.storage)):
        return f"because {column} is read in parts"
    return (_features(tap.module)[1],)


def _group_norms(flow: _Flow, modules: dict[str, nn.Module], between: set[int]) -> dict[str, int]:
    """Group norms that lie between columns and row, with the number of their groups."""
    cut = _cut_storages(flow, between)
    found = {}
    for op in flow.ops:
        module = modules.get(op.module)
        if isinstance(module, nn.GroupNorm) and module.affine and {view.storage for view in op.inputs} & cut:
            found[op.module] = module.num_groups
    return found


def _readers(ops: Sequence[Op], storage: int) -> list[View]:
    """How operators (not views) read a storage."""
    return [view for op in ops if not op.is_view for view in op.inputs if view.storage == storage]


def _kind_and_units(
    flow: _Flow, row: str, columns: tuple[str, ...], parts: dict[str, tuple[int, ...]], between: set[int]
) -> tuple[Literal["attention", "mlp"], tuple[int, ...]]:
    widths = [w for c in columns for w in parts.get(c, (_features(flow.taps[c].module)[1],))]
    row_width = _features(flow.taps[row].module)[0]
    heads = next(
        (
            op.inputs[0].shape[-3]
            for op in flow.ops
            if (op.kind == "attention" or _is_softmax(op)) and _made(op) & between and len(op.inputs[0].shape) == 4
        ),
        None,
    )
    if heads is None:
        return "mlp", tuple(dict.fromkeys([row_width, *widths]))
    head_width = row_width // heads
    counts = [
        heads if width % heads == 0 and width >= row_width else width // head_width
        for width in widths
        if width % head_width == 0
    ]
    return "attention", tuple(dict.fromkeys([heads, *counts]))


def _head_cuts(probe: _Probe, flow: _Flow, cuts: Sequence[TensorCut]) -> list[tuple[str, TensorCut | str]]:
    """The projection to the vocabulary: the last linear of the model, whose output is gathered for the loss."""
    linears = [name for name, tap in flow.taps.items() if is_linear(tap.module)]
    used = {name for cut in cuts for name in (*cut.columns, *cut.rows)}
    if probe.index != len(probe.chain.layers) - 1 or not linears or linears[-1] in used:
        return []
    name = linears[-1]
    module = flow.taps[name].module
    width = _features(module)[1]
    if width == 1:
        return []
    sharded = probe.sharded(name, _output_dim(module), bias=True)
    inputs = {name: flow.taps[name].like}
    cut = TensorCut(kind="head", columns=(name,), inputs=inputs, units=(width,), sharded=sharded)
    return [(name, _tried(probe, cut, f"{width} output features"))]


def _embedding_cuts(probe: _Probe, flow: _Flow, shapes: Sequence[Shapes]) -> list[tuple[str, TensorCut | str]]:
    """Tables that the tokens of the batch are looked up in (positions do not grow with the batch)."""
    tables = [
        name
        for name, tap in flow.taps.items()
        if isinstance(tap.module, nn.Embedding) and tap.module.weight.shape[0] >= SMALLEST_VOCABULARY
    ]
    if not tables:
        return []
    larger = probe.flow(shapes[1], 2).taps
    outcomes: list[tuple[str, TensorCut | str]] = []
    for name in tables:
        rows = flow.taps[name].module.get_parameter("weight").shape[0]
        if math.prod(larger[name].input.shape) == math.prod(flow.taps[name].input.shape):
            continue
        cut = TensorCut(kind="embedding", columns=(name,), units=(rows,), sharded=probe.sharded(name, 0, bias=False))
        outcomes.append((name, _tried(probe, cut, f"{rows} rows")))
    return outcomes


def _table_cuts(probe: _Probe, flow: _Flow) -> list[tuple[str, TensorCut | str]]:
    """Bags of rows of a large table: features of a row are added up one by one, whatever the bag."""
    outcomes: list[tuple[str, TensorCut | str]] = []
    for name, tap in flow.taps.items():
        table = tap.module
        if not isinstance(table, nn.EmbeddingBag) or table.num_embeddings < SMALLEST_VOCABULARY:
            continue
        if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
            outcomes.append((name, "because it norms its rows, or its gradients are sparse"))
            continue
        width = table.embedding_dim
        cut = TensorCut(kind="table", columns=(name,), units=(width,), sharded=probe.sharded(name, 1, bias=False))
        outcomes.append((name, _tried(probe, cut, f"{width} features")))
    return outcomes


def _tried(probe: _Probe, cut: TensorCut, what: str) -> TensorCut | str:
    degree = common_degree([cut])
    if degree is None:
        return f"because no degree up to {_DEGREES[-1]} divides its {what}; padding to a multiple of 64 would help"
    return probe.problem(cut, degree) or cut


def _forward(seen: Observation) -> list[Op]:
    return [op for op in seen.ops if not op.backward]


_DIM_SECOND = {"topk", "kthvalue"}
"""Reductions whose first argument is a count, and whose dim comes second."""

_REDUCTIONS = {
    "mean",
    "sum",
    "var",
    "var_mean",
    "std",
    "amax",
    "amin",
    "max",
    "min",
    "prod",
    "norm",
    "linalg_vector_norm",
    "logsumexp",
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "cumsum",
    "topk",
    "sort",
    "argmax",
}
_WHOLE_SHAPE = {"convolution", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "batch_norm"}
_NORMS = {"native_layer_norm", "_fused_rms_norm"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}


def _reduction_problem(whole: Sequence[Op], cut: Sequence[Op], rows: set[str]) -> str:
    """An operator that would sum or normalise over a slice instead of the whole; rows: where that is wanted."""
    if [op.name for op in whole] != [op.name for op in cut]:
        return "because the layer runs other operators when its weights are cut"
    for a, b in zip(whole, cut, strict=True):
        changed = [u.shape != v.shape for u, v in zip(a.inputs, b.inputs, strict=True)]
        if not any(changed) or a.module in rows:
            continue
        where = f"because {a.name} in {a.module or 'the layer'} would work on a slice of what it reduces"
        if a.name in _REDUCTIONS and _reduced(a) != _reduced(b):
            return where
        if a.name in _NORMS and a.arguments[:1] != b.arguments[:1]:
            return where
        if a.name in _WHOLE_SHAPE and not _reduces_as_before(a, b):
            return where
        if a.name in _PRODUCTS and a.shape and b.shape and a.shape[1] != b.shape[1]:
            return where
        if a.kind == "attention" and (a.inputs[1].shape[-2:] != b.inputs[1].shape[-2:]):
            return where
    return ""


def _reduces_as_before(a: Op, b: Op) -> bool:
    """Whether a convolution still sums over all its inputs, or a group norm has groups of the size they had."""
    if a.name == "convolution":
        return a.shape is not None and b.shape is not None and a.shape[1] == b.shape[1]
    if a.name == "native_group_norm":
        (_, channels, _, groups, *_), (_, fewer, _, cut_groups, *_) = a.arguments, b.arguments
        return bool(channels * cut_groups == fewer * groups)
    return False


def _reduced(op: Op) -> tuple[int, ...]:
    """Sizes of the dims that a reduction runs over."""
    shape = op.inputs[0].shape
    dims = op.arguments[0] if op.arguments else None
    if op.name in _DIM_SECOND:
        dims = op.arguments[1] if len(op.arguments) > 1 else -1
    if type(dims) is int:
        return (shape[dims],) if -len(shape) <= dims < len(shape) else shape
    if isinstance(dims, list | tuple) and dims:
        return tuple(shape[dim] for dim in dims)
    return shape


def _leading_problem(probe: _Probe, whole: Sequence[Op], cut: Sequence[Op], trial: TensorCut) -> str:
    """A slice of a column's features must be a slice of the leading feature dim wherever it is read.

    Otherwise (features viewed as [3, heads, width] and heads divided) each rank would mix queries with keys.
    """
    width_of = {name: _features(probe.modules[name])[1] for name in trial.columns}
    made = {v.storage: op.module for op in whole if op.module in width_of and not op.is_view for v in op.outputs}
    for a, b in zip(whole, cut, strict=True):
        for u, v in zip(a.inputs, b.inputs, strict=True):
            if a.is_view or u.storage not in made or u.shape == v.shape:
                continue
            if is_convolution(probe.modules[made[u.storage]]):
                if _changed(u, v) != [1] or len(u.shape) < 3:
                    return f"because the channels of {made[u.storage]} are read in another order"
                continue
            width = width_of[made[u.storage]]
            leading = max((s, i) for i, s in enumerate(u.strides) if s < width and u.shape[i] > 1)[1]
            if _changed(u, v) != [leading]:
                return f"because {made[u.storage]} is read in an order that a contiguous slice does not keep"
    return ""


def _order_problem(probe: _Probe, whole: Sequence[Op], cut: Sequence[Op], trial: TensorCut) -> str:
    """A view that moves the cut features behind others: a contiguous slice before is none after."""
    fused = {v.storage for op in whole if op.module in trial.parts and not op.is_view for v in op.outputs}
    for a, b in zip(whole, cut, strict=True):
        if a.name not in ("view", "_unsafe_view") or a.inputs[0].storage in fused:
            continue
        before, after = _changed(a.inputs[0], b.inputs[0]), _changed(a.outputs[0], b.outputs[0])
        if len(before) != 1 or len(after) != 1:
            if before or after:
                return f"because a view in {a.module or 'the layer'} mixes the cut features with others"
        elif math.prod(a.inputs[0].shape[: before[0]]) != math.prod(a.outputs[0].shape[: after[0]]):
            return f"because a view in {a.module or 'the layer'} brings the cut features into another order"
    return ""


def _changed(whole: View, cut: View) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(whole.shape, cut.shape, strict=True)) if x != y]


class _Rank:
    """One tensor-parallel rank's version of a layer: cut parameters, divided attributes, collectives as copies."""

    def __init__(
        self,
        run: LayerRun,
        cuts: Sequence[TensorCut],
        degree: int,
        seq_len: int | None,
        sequence_dims: dict[Any, int] | None,
    ) -> None:
        self.collectives: list[Collective] = []
        self._run = run
        self._cuts = cuts
        self._degree = degree
        self._sequence_dims = sequence_dims
        self._sequence_dim = next(iter(sequence_dims.values())) if sequence_dims else None
        self._slice_length = (seq_len or 0) // degree
        self._modules = layer_modules(run.fake, run.chain, run.index)
        self._entered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def arrive(self, crossing: Crossing, tensor: torch.Tensor) -> torch.Tensor:
        """What arrives of a tensor: a slice of the sequence, in that mode."""
        dim = None if self._sequence_dims is None else self._sequence_dims.get(crossing.producer)
        if dim is None:
            return tensor
        shape = list(tensor.shape)
        shape[dim] //= self._degree
        return torch.empty(shape, dtype=tensor.dtype)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Cut the module in place, and restore it."""
        with ExitStack() as undo:
            for cut in self._cuts:
                self._cut_parameters(cut, undo)
                self._without_padding(cut, undo)
                for name, attributes in cut.attributes.items():
                    for attribute in attributes:
                        self._divide(self._modules[name], attribute, undo)
                self._hook(cut, undo)
            try:
                yield
            finally:
                self._entered.clear()

    def _cut_parameters(self, cut: TensorCut, undo: ExitStack) -> None:
        for name in (*cut.columns, *cut.rows, *cut.between):
            module = self._modules[name]
            for key, dim in self._dims_of(cut, name, module).items():
                whole = module._parameters[key]
                assert whole is not None
                shape = list(whole.shape)
                shape[dim] //= self._degree
                module._parameters[key] = nn.Parameter(torch.empty(shape, dtype=whole.dtype), whole.requires_grad)
                undo.callback(module._parameters.__setitem__, key, whole)

    def _without_padding(self, cut: TensorCut, undo: ExitStack) -> None:
        """A padding row may be on another rank."""
        for name in cut.columns:
            module = self._modules[name]
            if getattr(module, "padding_idx", None) is not None:
                undo.callback(setattr, module, "padding_idx", module.padding_idx)
                module.padding_idx = None

    def _dims_of(self, cut: TensorCut, name: str, module: nn.Module) -> dict[str, int]:
        prefix = name + "." if name else ""
        return {key: cut.sharded[prefix + key] for key in module._parameters if prefix + key in cut.sharded}

    def _divide(self, module: nn.Module, attribute: str, undo: ExitStack) -> None:
        value = getattr(module, attribute)
        setattr(module, attribute, value // self._degree)
        undo.callback(setattr, module, attribute, value)

    def _hook(self, cut: TensorCut, undo: ExitStack) -> None:
        gathered_outside = self._sequence_dim is not None and bool(cut.gather)
        if gathered_outside:
            door = self._modules[cut.gather]
            undo.callback(door.register_forward_pre_hook(self._module_input(cut.gather), with_kwargs=True).remove)
        for name in cut.columns:
            module = self._modules[name]
            if cut.kind == "embedding":
                undo.callback(module.register_forward_hook(self._reduce_output).remove)
                continue
            if cut.kind == "table":
                undo.callback(module.register_forward_hook(self._gather_output).remove)
                continue
            if not gathered_outside and cut.inputs.get(name, name):
                hook = self._column_input(cut.inputs.get(name, name))
                undo.callback(module.register_forward_pre_hook(hook).remove)
            if cut.kind == "head":
                undo.callback(module.register_forward_hook(self._gather_output).remove)
        for name in () if gathered_outside else cut.entries:
            hook = self._entry_output(name)
            undo.callback(self._modules[name].register_forward_hook(hook).remove)
        for name in cut.rows:
            undo.callback(self._modules[name].register_forward_hook(self._reduce_output).remove)

    def _column_input(self, entry: str) -> Callable[..., tuple[Any, ...]]:
        return lambda module, args: (self._entering(args[0], entry), *args[1:])

    def _entry_output(self, entry: str) -> Callable[..., torch.Tensor]:
        return lambda module, args, output: self._entering(output, entry)

    def _module_input(self, door: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tree_map(
                lambda leaf: self._entering(leaf, door) if self._has_length(leaf, self._slice_length) else leaf,
                (args, kwargs),
            )

        return hook

    def _entering(self, given: torch.Tensor, entry: str) -> torch.Tensor:
        """What columns get: each distinct input is gathered (sequence mode) and its gradient summed once."""
        if id(given) in self._entered:
            return self._entered[id(given)][1]
        dim = self._sequence_dim if self._has_length(given, self._slice_length) else None
        full = given if dim is None else _Gather.apply(given, dim, self._degree, self._run.recorder)
        self._entered[id(given)] = (given, full)
        size = self._run.storages.size(full)
        if dim is not None:
            self._forward("all_gather", size, entry)
        if given.requires_grad:
            kind = "all_reduce" if dim is None else "reduce_scatter"
            self.collectives.append(Collective(kind, "backward", size, entry=entry))
        return full

    def _reduce_output(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        size = self._run.storages.size(output)
        if self._sequence_dim is None or not self._has_length(output, self._slice_length * self._degree):
            self._forward("all_reduce", size)
            return None
        self._forward("reduce_scatter", size)
        self.collectives.append(Collective("all_gather", "backward", size))
        sliced: torch.Tensor = _Scatter.apply(output, self._sequence_dim, self._degree, self._run.recorder)
        return sliced

    def _forward(self, kind: str, size: Size, entry: str = "") -> None:
        """Note a collective of the forward."""
        self.collectives.append(Collective(kind, "forward", size, len(self._run.recorder.ops), entry))

    def _gather_output(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        full: torch.Tensor = _Gather.apply(output, output.dim() - 1, self._degree, self._run.recorder)
        self._forward("all_gather", self._run.storages.size(full))
        return full

    def _has_length(self, value: Any, length: int) -> bool:
        """Whether a trained tensor has that many positions where the layer's inputs have the sequence."""
        dim = self._sequence_dim
        return (
            dim is not None
            and isinstance(value, torch.Tensor)
            and value.requires_grad
            and value.dim() > dim
            and value.shape[dim] == length
        )


class _Gather(torch.autograd.Function):
    """A copy in place of an all-gather: its memory is real, its operators are the collective's own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, degree: int, recorder: Recorder) -> torch.Tensor:
        ctx.dim, ctx.degree, ctx.recorder = dim, degree, recorder
        return _repeated(tensor, dim, degree, recorder)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _slice(gradient, ctx.dim, ctx.degree, ctx.recorder), None, None, None


class _Scatter(torch.autograd.Function):
    """A slice in place of a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, degree: int, recorder: Recorder) -> torch.Tensor:
        ctx.dim, ctx.degree, ctx.recorder = dim, degree, recorder
        return _slice(tensor, dim, degree, recorder)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _repeated(gradient, ctx.dim, ctx.degree, ctx.recorder), None, None, None


def _repeated(tensor: torch.Tensor, dim: int, degree: int, recorder: Recorder) -> torch.Tensor:
    recorder.muted = True
    try:
        return torch.cat([tensor] * degree, dim)
    finally:
        recorder.muted = False


def _slice(tensor: torch.Tensor, dim: int, degree: int, recorder: Recorder) -> torch.Tensor:
    recorder.muted = True
    try:
        return tensor.narrow(dim, 0, tensor.shape[dim] // degree).clone()
    finally:
        recorder.muted = False


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:160]
