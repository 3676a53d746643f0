"""Data flow of a layer's forward: from which modules' outputs an input is made, and how these outputs are read."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import networkx as nx
from torch import nn

from ..running.meters import Op, View
from .tensor_modules import features, is_product


@dataclass(frozen=True)
class Tap:
    """The call of a linear or embedding module that is called once. input, output: its tensors."""

    module: nn.Module
    input: View
    output: View
    like: str
    """Name of the first module that was given the same tensor."""
    plain: bool = True
    """It does what its class of torch does (is_plain)."""


@dataclass
class Flow:
    """Data flow of a layer's forward. storages: a graph with an edge from each storage to those that are made from
    it."""

    taps: dict[str, Tap]
    ops: list[Op]
    parameters: dict[int, str]
    arriving: dict[int, bool]
    doors: dict[str, "Door"] = field(default_factory=dict)
    storages: nx.DiGraph = field(default_factory=nx.DiGraph)
    calls: dict[str, int] = field(default_factory=dict)
    """Module -> number of its calls."""


@dataclass(frozen=True)
class Door:
    """The call of a module that is called once. given, returned: place among the leaves of its arguments, or of its
    output -> the tensor."""

    given: dict[int, View]
    returned: dict[int, View]


@dataclass(frozen=True)
class ByHeads:
    """Tensors with a row for each head that enter attention, and do not come from its linears. storages: numbers of all
    of them. tables: names of embeddings that make one. given, returned: place among what the module `door` is given or
    returns -> the dim of the heads."""

    storages: frozenset[int] = frozenset()
    tables: tuple[str, ...] = ()
    door: str = ""
    given: dict[int, int] = field(default_factory=dict)
    returned: dict[int, int] = field(default_factory=dict)


def by_heads_of(flow: Flow, row: str) -> ByHeads:
    """Tensors with a row for each head that the attention before a row reads. Their heads are in the third dim from the
    end; those of a table (relative biases: Raffel et al. 2020, arXiv:1910.10683, section 2.1) in the last one."""
    between, columns = _between_columns_and(flow, row)
    heads = heads_in(flow, between)
    parents = [name.split(".")[:-1] for name in (*columns, row)]
    door = ".".join(part[0] for part in itertools.takewhile(lambda p: len(set(p)) == 1, zip(*parents, strict=False)))
    if heads is None or not columns or door not in flow.doors:
        return ByHeads()
    call = flow.doors[door]
    tables = {
        tap.output.storage: name
        for name, tap in flow.taps.items()
        if isinstance(tap.module, nn.Embedding) and name.startswith(f"{door}.") and tap.output.shape[-1] == heads
    }
    tables = {storage: name for storage, name in tables.items() if storage in between}
    given, returned = (
        {
            i: dim
            for i, view in views.items()
            if view.storage in between and (dim := _dim_of_heads(view, heads)) is not None
        }
        for views in (call.given, call.returned)
    )
    returned = {i: dim for i, dim in returned.items() if dim}
    return ByHeads(
        frozenset({call.given[i].storage for i in given} | set(tables)),
        tuple(tables.values()),
        door if given or returned else "",
        given,
        returned,
    )


def _between_columns_and(flow: Flow, row: str) -> tuple[set[int], set[str]]:
    """(storages on the way from the nearest linears to a row's input, names of these linears)."""
    linears = _outputs_of_linears(flow, besides=row)
    reached = _made_of(flow, row, linears)
    return reached - linears.keys(), {linears[storage] for storage in reached & linears.keys()}


def _dim_of_heads(view: View, heads: int) -> int | None:
    """The dim of a tensor that holds heads; None if there is none. For one sample only, as bmm joins samples and
    heads."""
    dim = len(view.shape) - 3
    return dim if dim in (0, 1) and view.shape[dim] == heads else None


def is_plain(module: nn.Module, given: View, weights: Sequence[int], ops: Sequence[Op]) -> bool:
    """Whether a module that ran these operators did no more than its class of torch does, in a forward of its own or
    not: a product of what it is given with its weight, and its bias; or rows of a table by the numbers that it is
    given, of which it may make something element by element. weights: storages of all parameters, its own first."""
    read, work = {given.storage}, list[Op]()
    for op in ops:
        if op.name == "clone" and op.inputs[0].storage in read:
            read |= made_by(op)
        elif not op.is_view and (work or op.inputs or op.draws):  # not the offsets that a bag of equal rows makes
            work.append(op)
    if not work or weights[0] not in {view.storage for view in work[0].inputs}:
        return False
    first, rest = work[0], work[1:]
    if is_product(module):
        by_weight = first.kind == "matmul" and any(view.storage in read for view in first.inputs)
        biases = [op.name in ("add", "add_") and any(view.storage in weights for view in op.inputs) for op in rest]
        return by_weight and len(rest) <= 1 and all(biases)
    made, apart = made_by(first), read.union(weights)
    for op in rest:
        reads = {view.storage for view in op.inputs}
        goes_on = op.kind == "elementwise" and op.outputs[0].shape == first.outputs[0].shape
        if op.draws or reads & apart or (reads & made and not goes_on):
            return False
        made |= made_by(op) if reads & made else set()
    return first.name == "_embedding_bag" or (first.name == "embedding" and given in first.inputs)


def columns_of(
    flow: Flow, row: str, by_heads: frozenset[int] = frozenset()
) -> tuple[tuple[str, ...], set[int], tuple[str, ...]] | str:
    """(columns, storages between them and the row, entries); or why the row's input does not come from linears alone.
    An entry is a linear that both the row's input and a column's input come from. by_heads: storages of which each rank
    takes its heads, wherever they come from.

    The reason is empty if the row reads the layer's input, as columns do.
    """
    linears = _outputs_of_linears(flow, besides=row)
    tables = {tap.output.storage: name for name, tap in flow.taps.items() if isinstance(tap.module, nn.Embedding)}
    trained = {storage for storage, requires_grad in flow.arriving.items() if requires_grad}
    between = _made_of(flow, row, {*by_heads, *linears, *tables, *trained})
    columns = {linears[storage] for storage in (between - by_heads) & linears.keys()}
    mixed = between - by_heads - linears.keys()
    reason = "because a trained input of the layer is mixed in between" if mixed & trained else ""
    if table := next((name for storage, name in tables.items() if storage in mixed), None):
        reason = f"because {table} (an embedding) is mixed in between"
    if reason:
        return reason if _has_attention(flow, between) and columns else ""
    entries = {entry for column in columns for entry in sources(flow, column) & columns}
    columns -= entries
    for column in columns:
        if sources(flow, column) & entries:
            between |= _upstream(flow, column)
    for other in rows_of(flow, row, columns, between)[1:]:
        between |= _made_of(flow, other, {*by_heads, *linears})
    if columns and (leak := _leak(flow, row, columns, between)):
        return leak
    return tuple(n for n in flow.taps if n in columns), between, tuple(n for n in flow.taps if n in entries)


def rows_of(flow: Flow, row: str, columns: Collection[str], between: set[int]) -> tuple[str, ...]:
    """The row, and other products that read only what is cut for it, as in a low-rank adapter beside it: each of them
    gives a partial sum."""
    linears = _outputs_of_linears(flow)
    cut = cut_storages(flow, between)
    read_by = nx.DiGraph(
        (storage, made) for storage, made in flow.storages.edges if storage in cut or storage not in linears
    )
    reached = set().union(*(nx.descendants(read_by, storage) for storage in cut if storage in read_by))
    others = {linears[storage] for storage in reached & linears.keys()} - {row, *columns}
    allowed = {storage for storage, name in linears.items() if name in columns}

    def reads_only_them(name: str) -> bool:
        sources = _made_of(flow, name, linears.keys())
        return bool(sources & allowed) and sources & linears.keys() <= allowed

    return row, *(name for name in flow.taps if name in others and reads_only_them(name))


def read_directly(flow: Flow, name: str) -> set[str]:
    """The product whose output a module is given as it is, if there is one. The two are factors of one matrix, as in
    low-rank adapters. To cut them as a pair saves little, so other pairs come first (the second factor is a column of a
    larger one)."""
    read = flow.taps[name].input.storage
    return {found for storage, found in _outputs_of_linears(flow, besides=name).items() if storage == read}


def _outputs_of_linears(flow: Flow, besides: str | None = None) -> dict[int, str]:
    return {tap.output.storage: name for name, tap in flow.taps.items() if is_product(tap.module) and name != besides}


def _made_of(flow: Flow, name: str, stops: Collection[int]) -> set[int]:
    """Storages that a module's input is made from, itself included, back to the stops, which are included, too."""

    def sources(storage: int) -> Iterator[int]:
        return iter(()) if storage in stops else flow.storages.predecessors(storage)

    start = flow.taps[name].input.storage
    return {start, *(source for _, source in nx.generic_bfs_edges(flow.storages, start, sources))}


def _upstream(flow: Flow, name: str) -> set[int]:
    """Storages that a module's input is made from, back to the outputs of linears."""
    return _made_of(flow, name, _outputs_of_linears(flow))


def sources(flow: Flow, name: str) -> set[str]:
    """Names of the linears whose outputs a module's input is made from."""
    linears = _outputs_of_linears(flow)
    return {linears[storage] for storage in _upstream(flow, name) if storage in linears}


def _has_attention(flow: Flow, between: set[int]) -> bool:
    return any(op.kind == "attention" or _is_softmax(op) for op in flow.ops if made_by(op) & between and not op.is_view)


def is_attention(op: Op) -> bool:
    """Whether an operator is attention, or a softmax over scores of several heads."""
    return op.kind == "attention" or (_is_softmax(op) and len(op.inputs[0].shape) == 4)


def _is_softmax(op: Op) -> bool:
    return op.name in ("_softmax", "_safe_softmax")


def _leak(flow: Flow, row: str, columns: Collection[str], between: set[int]) -> str:
    """Why a cut fails: something other than the rows reads what is cut; "" if nothing does."""
    inside = cut_storages(flow, between) - set(flow.parameters)
    weights = set().union(*(_weights(flow, name) for name in rows_of(flow, row, columns, between)))
    used = {view.storage for op in flow.ops for view in op.inputs}
    used |= {view.storage for door in flow.doors.values() for view in door.returned.values()}
    for op in flow.ops:
        read = {view.storage for view in op.inputs}
        unused = (op.module or "" in flow.doors) and not made_by(op) & used
        if op.is_view or not read & inside or read & weights or unused:
            continue
        aside = made_by(op) - between
        if not made_by(op) & between or any(view.storage in aside for other in flow.ops for view in other.inputs):
            return f"because {op.module or op.name} outside the pair reads it too"
    return ""


def cut_storages(flow: Flow, between: set[int]) -> set[int]:
    """Of the storages between columns and row, those that are made from the output of a column."""
    linears = {tap.output.storage for tap in flow.taps.values() if is_product(tap.module)}
    cut = linears & between
    for op in flow.ops:
        if not op.is_view and any(view.storage in cut for view in op.inputs):
            cut |= made_by(op) & between
    return cut


def _weights(flow: Flow, name: str) -> set[int]:
    tap = flow.taps[name]
    own = {id(p) for p in tap.module.parameters()}
    return {number for number, full in flow.parameters.items() if id(_parameter(flow, name, full)) in own}


def _parameter(flow: Flow, name: str, full: str) -> Any:
    return next((p for n, p in flow.taps[name].module.named_parameters() if full.endswith("." + n) or full == n), None)


def made_by(op: Op) -> set[int]:
    """Storages that an operator writes."""
    return {view.storage for view in op.outputs}


def parts_of(flow: Flow, column: str) -> tuple[int, ...] | str:
    """Widths of the parts that a fused column's output is split into; one width if it is not split; or why the column
    cannot be cut."""
    tap = flow.taps[column]
    width = features(tap.module)[1]
    reads = {_Read.of(view, width) for view in _readers(flow.ops, tap.output) if math.prod(view.shape)}
    if all(read.block == width for read in reads):
        return (width,)
    parts: list[int] = []
    while sum(parts) < width:
        start = sum(parts)
        block = max((read.block for read in reads if read.start == start), default=0)
        inside = {read for read in reads if start <= read.start < start + block}
        if not inside:
            break
        if any(read.block != block or read.end > start + block for read in inside):
            break
        parts.append(block)
    if sum(parts) == width:
        return tuple(parts)
    if sum(parts) == max(read.end for read in reads):
        return f"because part of the output of {column} is not used"
    pieces = sorted((read.start, read.end - read.start) for read in reads)
    return f"because {column} is split into overlapping or interleaved pieces {pieces}"


@dataclass(frozen=True)
class _Read:
    """The features that one view reads. block: number of neighbouring features that its units (heads) take up together;
    of each unit it may read only a half, as rotary embeddings do."""

    start: int
    end: int
    block: int
    count: int

    @classmethod
    def of(cls, view: View, width: int) -> "_Read":
        view = view.in_reals
        start = view.offset % width
        sizes = [(s, n) for s, n in zip(view.strides, view.shape, strict=True) if 0 < s < width and n > 1]
        stride, count = max(sizes, default=(1, 1))
        return cls(start, start + sum(s * (n - 1) for s, n in sizes) + 1, stride * count, count)


def channels_of(flow: Flow, column: str) -> tuple[int, ...] | str:
    """(width,) of a convolution's output; or, if it is not read as a whole, why it cannot be cut."""
    tap = flow.taps[column]
    size = math.prod(tap.output.shape)
    if any(math.prod(view.shape) != size for view in _readers(flow.ops, tap.output)):
        return f"because {column} is read in parts"
    return (features(tap.module)[1],)


def group_norms(flow: Flow, modules: dict[str, nn.Module], between: set[int]) -> dict[str, int]:
    """Group norm between columns and row -> the number of its groups."""
    cut = cut_storages(flow, between)
    found = {}
    for op in flow.ops:
        module = modules.get(op.module)
        if isinstance(module, nn.GroupNorm) and module.affine and {view.storage for view in op.inputs} & cut:
            found[op.module] = module.num_groups
    return found


def batch_norm(flow: Flow, modules: dict[str, nn.Module], between: set[int]) -> str:
    """Name of a batch norm that keeps statistics of what is cut, which would differ between ranks; '' if there is
    none."""
    cut = cut_storages(flow, between)
    for op in flow.ops:
        module = modules.get(op.module)
        keeps = isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
        if keeps and {view.storage for view in op.inputs} & cut:
            return op.module
    return ""


def _readers(ops: Sequence[Op], made: View) -> list[View]:
    """The views by which operators read a tensor, or what was made from all of it element by element. Where an operator
    goes on with the whole, only what else it reads counts (x * x[..., :1])."""
    alike, size = made_alike(ops, made), math.prod(made.shape)
    found: list[View] = []
    for op in ops:
        if not op.is_view:
            whole = {(v.shape, v.strides) for v in op.outputs} if _goes_on(op, alike, size) else set()
            found += [v for v in op.inputs if v.storage in alike and (v.shape, v.strides) not in whole]
    return found


def made_alike(ops: Sequence[Op], made: View) -> set[int]:
    """The storage of a tensor, and those made from all of it element by element: if one is cut, all are, in the same
    place."""
    alike = {made.storage}
    for op in ops:
        if not op.is_view and _goes_on(op, alike, math.prod(made.shape)):
            alike |= made_by(op)
    return alike


def _goes_on(op: Op, alike: Collection[int], size: int) -> bool:
    """Whether an operator reads all of one of these storages, and writes each element to the same place."""
    if op.kind not in ("elementwise", "copy"):
        return False
    given = {(view.shape, view.strides) for view in op.outputs}
    whole = (view for view in op.inputs if view.storage in alike and math.prod(view.shape) == size)
    return any(given == {(view.shape, view.strides)} for view in whole)


def heads_in(flow: Flow, between: set[int]) -> int | None:
    """Number of heads of the attention that makes one of these storages; None if none does."""
    scores = [
        op.inputs[0].shape for op in flow.ops if (op.kind == "attention" or _is_softmax(op)) and made_by(op) & between
    ]
    if heads := next((shape[-3] for shape in scores if len(shape) == 4), None):
        return heads
    batched = next((shape[0] for shape in scores if len(shape) == 3), 1)  # samples times heads, as bmm takes them
    units = (n for tap in flow.taps.values() if is_product(tap.module) for n in _units_read(flow, tap, between))
    return max((n for n in units if n > 1 and batched % n == 0), default=None)


def _units_read(flow: Flow, tap: Tap, between: set[int]) -> set[int]:
    """Numbers of units in which the output of a linear is read; single features do not count as units."""
    width = features(tap.module)[1]
    if tap.output.storage not in between:
        return set()
    reads = {_Read.of(view, width) for view in _readers(flow.ops, tap.output) if math.prod(view.shape)}
    return {read.count for read in reads if read.block > read.count}


def one_head_for_all(flow: Flow, row: str, columns: tuple[str, ...], between: set[int]) -> tuple[str, ...]:
    """Those of the columns that give a single head, of keys or values, which all heads of queries read."""
    heads = heads_in(flow, between) or 1
    head_width, rest = divmod(features(flow.taps[row].module)[0], heads)
    if heads == 1 or rest:
        return ()
    found = tuple(name for name in columns if features(flow.taps[name].module)[1] == head_width)
    return found if len(found) < len(columns) else ()


def kind_and_units(
    flow: Flow, row: str, columns: tuple[str, ...], parts: dict[str, tuple[int, ...]], between: set[int]
) -> tuple[Literal["attention", "mlp"], tuple[int, ...]]:
    """(what lies between columns and row, the numbers that a degree must divide: heads, or widths)."""
    widths = [w for c in columns for w in parts.get(c, (features(flow.taps[c].module)[1],))]
    row_width = features(flow.taps[row].module)[0]
    heads = heads_in(flow, between)
    if heads is None or row_width % heads:  # softmax over scores in another order, as Longformer's by places
        return "mlp", tuple(dict.fromkeys([row_width, *widths]))
    head_width = row_width // heads
    counts = [
        heads if width % heads == 0 and width >= row_width else width // head_width
        for width in widths
        if width % head_width == 0
    ]
    taps = (flow.taps[column] for column in columns if column not in parts)
    groups = [n for tap in taps for n in _units_read(flow, tap, between) if n > 1 and heads % n == 0]
    return "attention", tuple(dict.fromkeys([heads, *counts, *groups]))
