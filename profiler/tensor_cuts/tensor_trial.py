"""Whether a layer with cut weights still computes the same, by comparing its operators with those of the whole
layer."""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from ..model.layer_run import Observation
from ..model.model_profile import TensorCut
from ..running.meters import Op, View
from .tensor_flow import made_alike
from .tensor_modules import features, is_convolution


def sequence_problem(
    whole: Observation,
    unsliced: Observation,
    cut: Observation,
    cuts: Sequence[TensorCut],
    degree: int,
    output_dims: Sequence[int | None],
) -> str:
    """Why a layer cannot run on a slice of the sequence; "" if it can. whole: a run of it with nothing cut. unsliced:
    with the cuts, on the whole sequence. cut: with the cuts, on a slice."""
    for spec, sliced, dim in zip(whole.outputs, cut.outputs, output_dims, strict=True):
        expected = list(spec.shape)
        if dim is not None:
            expected[dim] //= degree
        if tuple(expected) != sliced.shape:
            return f"because an output is {sliced.shape}, where a slice of it is {tuple(expected)}"
    rows = {row for group in cuts for row in group.rows}
    banks = tuple(
        f"{name}." for name, bank in whole.experts.items() if bank.called == "routed"
    )  # each token goes through alone

    def outside_banks(seen: Observation) -> list[Op]:
        return [op for op in ops_of_model(seen) if not f"{op.module}.".startswith(banks)]

    runs = aligned(outside_banks(whole), outside_banks(cut))
    columns = {column for group in cuts if group.rows for column in group.columns}
    return (
        reduction_problem(*runs, rows)
        or _gathering_problem(*runs, columns)
        or _slicing_problem(*aligned(outside_banks(unsliced), outside_banks(cut)))
    )


def _slicing_problem(whole: Sequence[Op], sliced: Sequence[Op]) -> str:
    """Why slices of the sequence fail: an operator does not treat all tokens alike, wherever they are. It numbers or
    counts them, moves them, takes some or joins them in pairs. "" if no operator does. The two runs must differ in
    nothing but the slices."""
    if [op.name for op in whole] != [op.name for op in sliced]:
        return OTHER_OPERATORS
    for a, b in zip(whole, sliced, strict=True):
        if any(len(_changed(u, v)) > 1 for u, v in zip(a.outputs, b.outputs, strict=True)):
            return f"because {a.name} in {a.module or 'the layer'} joins tokens in pairs"
    return number_problem(whole, sliced, set()) or _moving_problem(whole, sliced, set(), set())


def _gathering_problem(whole: Sequence[Op], cut: Sequence[Op], columns: set[str]) -> str:
    """Why slices of the sequence fail: a column multiplies fewer rows than in the whole layer. Its input holds tokens
    in another form than the sequence (all of a batch in one dim), so they are not gathered. "" if no column does."""
    for a, b in zip(whole, cut, strict=True):
        if a.module in columns and a.shape and b.shape and a.shape[0] != b.shape[0]:
            return f"because {a.module} reads tokens that are not gathered"
    return ""


def forward_ops(seen: Observation) -> list[Op]:
    """Operators of the forward."""
    return [op for op in seen.ops if not op.backward]


def ops_of_model(seen: Observation) -> list[Op]:
    """The operators that run the model's own code: those of the forward, and in the backward those of its own functions
    and hooks."""
    return [op for op in seen.ops if not op.backward or op.own]


def aligned(whole: Sequence[Op], cut: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """The operators of both runs, in pairs. A reshape that copies in one run and is a view in the other counts as a
    view in both: keys whose heads are repeated for several heads of queries are a view on a rank with a single head."""
    found: tuple[list[Op], list[Op]] = [], []
    places = [0, 0]
    while places[0] < len(whole) and places[1] < len(cut):
        pair = [ops[place] for ops, place in zip((whole, cut), places, strict=True)]
        for own, (ops, other) in enumerate(((whole, pair[1]), (cut, pair[0]))):
            if pair[own].name != other.name == "view" and _copies_to_reshape(ops, places[own]):
                pair[own] = replace(ops[places[own] + 1], name="view", inputs=pair[own].inputs)
                places[own] += 1
        for own in range(2):
            found[own].append(pair[own])
            places[own] += 1
    return [*found[0], *whole[places[0] :]], [*found[1], *cut[places[1] :]]


def _copies_to_reshape(ops: Sequence[Op], place: int) -> bool:
    """Whether an operator copies a tensor that the next one views in another shape, as torch.reshape does."""
    names = [op.name for op in ops[place : place + 2]]
    return names == ["clone", "_unsafe_view"] and ops[place].outputs[0].storage == ops[place + 1].inputs[0].storage


def working(ops: Sequence[Op]) -> tuple[str, ...]:
    """Names of the operators that are not views, in order."""
    return tuple(op.name for op in ops if not op.is_view)


OTHER_OPERATORS = "because the layer runs other operators when it is cut"

_DIM_SECOND = {"topk": -1, "kthvalue": -1, "norm": None, "linalg_vector_norm": None}
"""Reductions whose first argument is a count or an exponent and whose second is the dim -> the dim if none is given;
None stands for all dims."""

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
    "cumprod",
    "logcumsumexp",
    "topk",
    "sort",
    "argmax",
    "argmin",
    "all",
    "any",
}
_WHOLE_SHAPE = {"convolution", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "batch_norm"}
_NORMS = {"native_layer_norm", "_fused_rms_norm"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}


def reduction_problem(whole: Sequence[Op], cut: Sequence[Op], rows: set[str]) -> str:
    """Why a cut fails: an operator would sum or normalise over a slice of what it reduces; "" if none would. rows:
    modules that may do so."""
    if [op.name for op in whole] != [op.name for op in cut]:
        return OTHER_OPERATORS
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
    """Whether a convolution still sums over all of its inputs, or a group norm's groups still have their number of
    channels and places."""
    if a.name == "convolution":
        return a.shape is not None and b.shape is not None and a.shape[1] == b.shape[1]
    if a.name == "native_group_norm":
        (_, channels, places, groups, _), (_, fewer, own_places, cut_groups, _) = map(_numbers, (a, b))
        return places == own_places and channels * cut_groups == fewer * groups
    return False


def _reduced(op: Op) -> tuple[int, ...]:
    """Sizes of the dims that a reduction runs over."""
    shape = op.inputs[0].shape
    dims = op.arguments[0] if op.arguments else None
    if op.name in _DIM_SECOND:
        dims = op.arguments[1] if len(op.arguments) > 1 else _DIM_SECOND[op.name]
    if type(dims) is int:
        return (shape[dims],) if -len(shape) <= dims < len(shape) else shape
    if isinstance(dims, list | tuple) and dims:
        return tuple(shape[dim] for dim in dims)
    return shape


_ONE_NUMBER = {"empty", "empty_strided", "zeros", "ones", "full", "scalar_tensor"}
"""Operators that make a tensor whose elements are all one number, or are not read before they are written."""

_AS_LARGE = {"empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"}
"""Operators that make such a tensor, of the size of another one."""

_DROPS = {"native_dropout", "bernoulli_"}
"""Operators inside of torch's dropouts; each rank takes its own part of their masks."""

_DRAWS = {*_DROPS, "bernoulli", "rand_like", "randn_like", "normal_", "uniform_", "exponential_"}
"""Operators that draw the same on every rank, unless they are inside of torch's dropouts."""

_EACH_ALONE = _DROPS | {
    *("complex", "polar", "floor_divide", "embedding", "index", "repeat", "roll", "flip", "constant_pad_nd"),
    "_prelu_kernel",
}
"""Operators that do the same to every feature wherever it is, besides those that work element by element. Some are here
because order_problem looks at them."""

_LISTS_SIZES = _ONE_NUMBER | _AS_LARGE | {"_unsafe_view", "native_layer_norm", "view", "expand"}
"""Operators whose lists of numbers are sizes, which may count what is cut."""

_COUNTS_CHANNELS = {"native_group_norm", "convolution"}
"""Operators whose numbers count channels or groups of channels; reduction_problem looks at them."""


def number_problem(whole: Sequence[Op], cut: Sequence[Op], rows: set[str]) -> str:
    """Why a cut fails: an operator is given another number because there is less of what it counts, or numbers what is
    cut, or is not known to treat all features alike. Its result would not be a slice of the whole. "" if there is
    none."""
    for a, b in zip(whole, cut, strict=True):
        where = f"in {a.module or 'the layer'}"
        made = any(u.shape != v.shape for u, v in zip(a.outputs, b.outputs, strict=True))
        if not a.inputs and made and a.name not in _ONE_NUMBER:
            return f"because {a.name} {where} numbers what is cut, from its beginning on every rank"
        if made and a.name in _DRAWS and not a.dropout:
            return f"because {a.name} {where} draws for what is cut, and every rank would draw the same"
        read = [_changed(u, v) for u, v in zip(a.inputs, b.inputs, strict=True)]
        if _counts(a, b, read):
            name = "torch.tensor" if a.name == "lift_fresh" else a.name
            return f"because {name} {where} takes a number that counts what is cut, or changes from call to call"
        if any(read) and a.module not in rows and not (a.is_view or _treats_alike(a, read)):
            return f"because {a.name} {where} is not known to treat all of what is cut alike"
    return ""


def _counts(whole: Op, cut: Op, changed: Sequence[Sequence[int]]) -> bool:
    """Whether an operator is given another number than in the whole layer, which is not due to its input being smaller.
    changed: [input] -> the dims of it that are cut."""
    if whole.name == "repeat":  # of one row as many as there are, be it of keys for all heads
        each = zip(*map(reversed, (whole.arguments[0], cut.arguments[0], whole.inputs[0].shape)), strict=False)
        return any(times != others and size > 1 for times, others, size in each)
    if not whole.is_view:
        return whole.name not in _COUNTS_CHANNELS and _numbers(whole) != _numbers(cut)
    if whole.name in ("slice", "select"):
        dim = (whole.arguments or (0,))[0] % len(whole.inputs[0].shape)
        sizes = ([v.shape[dim] for v in op.outputs if op.name == "slice"] for op in (whole, cut))
        return dim not in changed[0] and (whole.arguments[1:2] != cut.arguments[1:2] or operator.ne(*sizes))
    shapes = ([v.shape for v in op.outputs] for op in (whole, cut))
    return whole.name not in _LISTS_SIZES and not any(changed) and operator.ne(*shapes)


def _numbers(op: Op) -> list[float]:
    """The numbers that an operator is given, also those in lists, unless these are sizes."""
    found = [a for a in op.arguments if isinstance(a, int | float)]
    lists = (a for a in op.arguments if isinstance(a, list | tuple) and op.name not in _LISTS_SIZES)
    return found + [a for each in lists for a in each if isinstance(a, int | float)]


_OF_NEIGHBOURS = re.compile(r"(?:max_pool|avg_pool|_?adaptive_|upsample_|reflection_pad|replication_pad).*?(\d)d")
"""Operators that read neighbours along their last dims; the number in the name says along how many."""

_ALONG_ONE_DIM = {"gather", "scatter", "scatter_add", "index_select", "index_add", "glu"}
"""Operators that move or join values along the dim that is their first argument."""


def _treats_alike(op: Op, changed: Sequence[Sequence[int]]) -> bool:
    """Whether an operator does the same to every feature. Reductions are left to reduction_problem. changed: [input] ->
    the dims of it that are cut."""
    last, pooled = max(changed[0], default=-1), _OF_NEIGHBOURS.match(op.name)
    if op.name == "convolution":
        return last < 2
    if pooled is not None:
        return last < len(op.inputs[0].shape) - int(pooled[1])
    if op.name.removesuffix("_") in _ALONG_ONE_DIM:
        dim = op.arguments[0] if op.arguments else -1  # glu's
        return dim % len(op.inputs[0].shape) not in changed[0]
    if op.name in ("tril", "triu"):
        return last < len(op.inputs[0].shape) - 2
    known = _AS_LARGE | _EACH_ALONE | _REDUCTIONS | _NORMS | _WHOLE_SHAPE | _PRODUCTS
    return op.kind in ("attention", "copy", "norm") or _is_of_one_element(op.name) or op.name in known


@cache
def _is_of_one_element(name: str) -> bool:
    """Whether an operator works element by element, by torch's tags. (gelu_ has no such tag, but gelu has.)"""
    forms = (getattr(torch.ops.aten, each, None) for each in (name, name.removesuffix("_")))
    return any(torch.Tag.pointwise in getattr(form, o).tags for form in forms if form for o in form.overloads())


def may_join(op: Op, size: int) -> bool:
    """Whether an operator may join values along a dim of this size. A plain product does so only if it sums over such a
    dim, as for the gradient of a weight."""
    plain = _ONE_NUMBER | _AS_LARGE | {"mm", "addmm"}
    if op.is_view or op.kind == "copy" or op.name in plain or _is_of_one_element(op.name):
        return False
    return op.name not in _REDUCTIONS or size in _reduced(op)


def leading_problem(modules: Mapping[str, nn.Module], whole: Sequence[Op], cut: Sequence[Op], trial: TensorCut) -> str:
    """Why a cut fails: a slice of a column's features is not a slice of the leading feature dim wherever it is read; ""
    if it is.

    Otherwise (features viewed as [3, heads, width] and heads divided) each rank would mix queries with keys.
    """
    width_of = {name: features(modules[name])[1] for name in trial.columns}
    columns = [(v, op.module) for op in whole if op.module in width_of and not op.is_view for v in op.outputs]
    made = {
        storage: column
        for view, column in columns
        for storage in ([view.storage] if is_convolution(modules[column]) else made_alike(whole, view))
    }
    for a, b in zip(whole, cut, strict=True):
        for u, v in ((u.in_reals, v.in_reals) for u, v in zip(a.inputs, b.inputs, strict=True)):
            if a.is_view or u.storage not in made or u.shape == v.shape:
                continue
            if is_convolution(modules[made[u.storage]]):
                if _changed(u, v) != [1] or len(u.shape) < 3:
                    return f"because the channels of {made[u.storage]} are read in another order"
                continue
            width = width_of[made[u.storage]]
            leading = max((s, i) for i, s in enumerate(u.strides) if s < width and u.shape[i] > 1)[1]
            if _changed(u, v) != [leading]:
                return f"because {made[u.storage]} is read in an order that a contiguous slice does not keep"
    return ""


def order_problem(whole: Sequence[Op], cut: Sequence[Op], trial: TensorCut) -> str:
    """Why a cut fails: an operator mixes cut features with others, takes some of them, or moves them, so that a rank's
    slice would no longer be a contiguous slice; "" if none does."""
    columns = {
        name: [v for op in whole if op.module == name and not op.is_view for v in op.outputs] for name in trial.columns
    }
    made = {name: {s for view in views for s in made_alike(whole, view)} for name, views in columns.items()}
    fused = set().union(*(made[name] for name in trial.parts))
    return _moving_problem(whole, cut, set().union(*made.values()), fused)


def _moving_problem(whole: Sequence[Op], cut: Sequence[Op], own: set[int], fused: set[int]) -> str:
    """The same for operators that need not follow columns. own: storages that columns write, where `_moves` is not
    asked. fused: those of them with several parts."""
    folded: dict[View, int] = {}
    for a, b in zip(whole, cut, strict=True):
        where = f"in {a.module or 'the layer'}"
        if a.name not in ("view", "_unsafe_view"):
            if any(_moves(a, b, place, own) for place in range(len(a.inputs))):
                return f"because {a.name} {where} takes some of what is cut, or joins it with the rest"
            if not _keeps_folded(a, b, folded):
                return f"because {a.name} {where} reads what is cut in another order"
            continue
        if a.inputs[0].storage in fused:
            continue
        before, after = _changed(a.inputs[0], b.inputs[0]), _changed(a.outputs[0], b.outputs[0])
        if len(before) != 1 or len(after) != 1:
            if before or after:
                return f"because a view {where} mixes what is cut with the rest"
        elif not _keeps_order(a.inputs[0], before[0], a.outputs[0], after[0], folded):
            return f"because a view {where} brings what is cut into another order"
    return ""


def _keeps_order(given: View, dim: int, made: View, made_dim: int, folded: dict[View, int]) -> bool:
    """Whether a view keeps the order of what is cut: along `dim` of its input, and along `made_dim` of its result.
    folded: view -> how often the cut features start anew along the cut dim, if dims before it were joined with it, as
    bmm joins windows and heads. It gets an entry for `made`, which may join such dims or take them apart again."""
    outside, made_outside = math.prod(given.shape[:dim]), math.prod(made.shape[:made_dim])
    times = folded.get(given, 1)
    if outside * times == made_outside:
        return True
    if made.shape[made_dim] * made_outside != given.shape[dim] * outside:
        return False
    folded[made] = outside * times // made_outside
    return outside * times % made_outside == 0


def _keeps_folded(whole: Op, cut: Op, folded: dict[View, int]) -> bool:
    """Whether an operator on joined dims treats everything along them alike, and no other cut input is joined
    otherwise. Dropouts do not, for a rank takes one piece of their mask."""
    pairs = list(zip(whole.inputs, cut.inputs, strict=True))
    times = {folded.get(u, 1) for u, v in pairs if _changed(u, v)}
    if not times - {1}:
        return True
    known = whole.is_view or whole.name in _REDUCTIONS | _NORMS | _PRODUCTS
    known |= whole.kind in ("copy", "norm") or _is_of_one_element(whole.name)
    if len(times) > 1 or not known or whole.name in _DROPS:
        return False
    sizes = {u.shape[dim] for u, v in pairs for dim in _changed(u, v)}
    for u, v in zip(whole.outputs, cut.outputs, strict=True):
        if changed := _changed(u, v):
            if len(changed) > 1 or {u.shape[changed[0]]} != sizes:
                return False
            folded[u] = min(times)
    return True


_ADDS_PLACES = {"cat", "repeat"}
_CHANGES_PLACES = {"roll", "flip"}
_PICKS_ANYWHERE = {"diagonal", "as_strided", "unfold"}


def _moves(whole: Op, cut: Op, place: int, columns: set[int]) -> bool:
    """Whether an operator moves the cut features of its input number `place`, takes some of them, or joins them with
    others. columns: storages that columns write; if they have several parts, parts_of has made sure that a rank has its
    share of each."""
    given = whole.inputs[place]
    dims = _changed(given, cut.inputs[place])
    if not dims:
        return False
    if whole.name in _PICKS_ANYWHERE:
        return True
    if whole.name in _CHANGES_PLACES:
        moved = whole.arguments[-1] or range(len(given.shape))
        return any(dim % len(given.shape) in dims for dim in moved)
    if whole.name == "constant_pad_nd" and any(_padded(whole, dim) for dim in dims):
        return True
    if whole.name == "index" and not any(map(_changed, whole.outputs, cut.outputs)):
        return True
    if whole.name in _ADDS_PLACES:
        added = len(whole.outputs[0].shape) - len(given.shape)
        return added >= 0 and any(whole.outputs[0].shape[dim + added] != given.shape[dim] for dim in dims)
    if not whole.is_view or given.storage in columns:
        return False
    for made, part in zip(whole.outputs, cut.outputs, strict=True):
        if math.prod(made.shape) < math.prod(given.shape):
            same = len(made.shape) == len(given.shape)
            if any(made.shape[dim] != given.shape[dim] for dim in dims) if same else not _changed(made, part):
                return True
    return False


def _padded(pad: Op, dim: int) -> bool:
    """Whether a pad adds or removes elements along a dim of its input. (Its numbers begin with the last dim.)"""
    first = 2 * (len(pad.inputs[0].shape) - 1 - dim)
    return any(pad.arguments[0][first : first + 2])


def _changed(whole: View, cut: View) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(whole.shape, cut.shape, strict=True)) if x != y]
