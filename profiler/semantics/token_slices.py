"""Run a model on some tokens of its sequence, exactly: torch functions see whole shapes, and work on what is here.

A rank that holds a part of every sequence runs the model's own forward under a TokenSlices mode. Tensors are ordinary
ones; marks (token_marks.py) say which tokens they hold. Shapes are answered as if all were there, so that positions,
masks and rotary tables that a model makes of them are those of the whole sequence, and where such a whole tensor meets
one that holds some tokens, it is sliced. Functions that treat tokens alike run on what is here; attention is handed to
`attend`; sums over tokens become shares, whose mean over ranks is the sum. What mixes tokens otherwise is refused, and
so is every function whose way with tokens is not written down here.

Slicing begins by itself: where ids of a whole sequence are looked up in a table, or features of one meet a weight.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from .function_names import SIZES, UNCONCERNED, is_in_place, name_of
from .own_code import is_own
from .producers import is_wrapped, unwrapped
from .token_marks import (
    SHARE,
    Held,
    Mark,
    Share,
    Spans,
    clipped,
    mark_of,
    num_tokens,
    own_shape,
    reshaped,
    set_mark,
    taken,
    whole_shape,
)


class Attend(Protocol):
    """Attention of a rank's queries to the keys and values of all ranks, (batch, heads, tokens, width) each of which is
    given those of its own tokens. mask: for all tokens."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """The output for this rank's queries."""
        ...


class MixedTokensError(ValueError):
    """A function would mix tokens in a way that ranks with parts of a sequence cannot follow."""


class TokenSlices(TorchFunctionMode):
    """Lets a model run on the tokens `spans` of sequences of `length`.

    num_ranks: ranks that hold all tokens between them. started: whether any tensor was sliced since the mode was
    entered last.
    """

    def __init__(self, length: int, spans: Spans, num_ranks: int, attend: Attend) -> None:
        super().__init__()
        self.length = length
        self.spans = spans
        self.num_ranks = num_ranks
        self.attend = attend
        self.started = False

    def begun(self, dim: int) -> Held:
        """The mark of a tensor that is sliced along `dim` for the first time."""
        self.started = True
        return Held(dim, self.length, self.spans)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on what is here."""
        name = name_of(func)
        args, kwargs = _by_position(name, args, kwargs or {})
        marks = [mark for x in _tensors(args, kwargs) if (mark := mark_of(x)) is not None]
        if not marks:
            if any(is_wrapped(x) and mark_of(unwrapped(x)) is not None for x in _tensors(args, kwargs)):
                raise _refuse(
                    name, "is called within torch.func (vmap, grad), where it is not known which tokens are here"
                )
            if name not in ("embedding", "linear") or not args:
                return func(*args, **kwargs)
            whole = args[0]
            dim = whole.ndim - (1 if name == "embedding" else 2)
            if dim < 0 or whole.shape[dim] != self.length or not _begins(name, whole):
                return func(*args, **kwargs)
            held = self.begun(dim)
            args = (set_mark(taken(whole, held), held), *args[1:])
        elif name in _BLIND or (isinstance(func, OpOverload) and func.namespace == "prim"):
            return func(*args, **kwargs)
        elif all(isinstance(mark, Share) for mark in marks):
            return _of_shares(func, name, args, kwargs)
        rule = _RULES.get(name)
        if rule is None:
            raise MixedTokensError(f"{name} is not known to treat the tokens of a sequence alike")
        if rule is not _cast and any(isinstance(mark, Share) for mark in marks):
            raise _refuse(name, "joins tokens with a sum over tokens")
        return rule(self, func, name, args, kwargs)


def run_token_by_token(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a module that treats every token by itself (a bank of experts), whatever it calls: it is given the
    tokens that are here as if they were all."""
    held = next((mark for x in tree_leaves((args, kwargs)) if isinstance(mark := mark_of(x), Held)), None)
    if held is None:
        return forward(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        output = forward(*args, **kwargs)
    for x in tree_leaves(output):
        if isinstance(x, torch.Tensor):
            if _ndim(x) <= held.dim or own_shape(x)[held.dim] != held.own_size:
                raise MixedTokensError("a bank of experts returns something else beside a row for each of its tokens")
            set_mark(x, held)
    return output


Rule = Callable[[TokenSlices, Callable[..., Any], str, tuple[Any, ...], dict[str, Any]], Any]


def _begins(name: str, whole: torch.Tensor) -> bool:
    """Whether slicing begins at a function: an embedding is given ids, or a linear layer features of several tokens."""
    return whole.ndim > 2 if name == "linear" else not whole.is_floating_point()


def _by_position(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call, with its first arguments moved from kwargs to args, where the rules look for them."""
    first = _FIRST.get(name, ("input",))[len(args) :]
    if not kwargs or not first or first[0] not in kwargs:
        return args, kwargs
    given = [key for n, key in enumerate(first) if all(before in kwargs for before in first[: n + 1])]
    return (*args, *(kwargs[key] for key in given)), {k: v for k, v in kwargs.items() if k not in given}


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [x for x in value if isinstance(x, torch.Tensor)]
    return found


def _held(x: Any) -> Held | None:
    mark = mark_of(x)
    return mark if isinstance(mark, Held) else None


def _refuse(name: str, why: str) -> MixedTokensError:
    return MixedTokensError(f"{name} {why}")


def _ndim(x: torch.Tensor) -> int:
    return len(own_shape(x))


def _dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _of_shares(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a linear function of shares, which is a share; raises MixedTokensError for any other function."""
    if name in SIZES or name == "register_hook":
        return func(*args, **kwargs)
    plain = name.strip("_")
    if name.startswith("__") and plain[0] in "ir":
        plain = plain[1:]
    given = [isinstance(mark_of(x), Share) for x in args[:2]]
    if plain == "getitem" and any(isinstance(mark_of(x), Share) for x in _tensors(args[1:], kwargs)):
        raise _refuse("indexing", "goes by a sum over tokens of which each rank has a share")
    divisor = given[0] if name.startswith("__r") else given[-1] and len(given) > 1
    quotient = plain in ("div", "divide", "true_divide", "truediv") and not divisor
    product = plain in ("mul", "multiply") and not all(given)
    if not (plain in _LINEAR or quotient or product) or kwargs.get("rounding_mode"):
        raise _refuse(name, "is done to a sum over tokens of which each rank has a share")
    output = func(*args, **kwargs)
    for x in output if isinstance(output, tuple | list) else [output]:
        if isinstance(x, torch.Tensor):
            if name in ("to", "type", "type_as") and args[0].is_floating_point() and not x.is_floating_point():
                raise _refuse(name, "rounds a sum over tokens of which each rank has a share")
            set_mark(x, SHARE)
    return output


def _shape(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    shape = whole_shape(args[0])
    if name in ("numel", "nelement"):
        return shape.numel()
    if name == "__len__":
        return shape[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _pointwise(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A function that treats every element by itself, with broadcasting: all operands are sliced alike."""
    given = _tensors(args, kwargs)
    found = [(held, held.dim - _ndim(x)) for x in given if (held := _held(x)) is not None]
    held, behind = found[0]
    if any(place != behind or not other.same_tokens(held) for other, place in found):
        raise _refuse(name, "joins tensors that hold different tokens, or pairs tokens with each other")
    ndim = max(_ndim(x) for x in given)
    if is_in_place(name) and _held(args[0]) is None:
        raise _refuse(name, "writes tokens into a tensor that is whole")

    def own(x: Any) -> Any:
        return _like(x, held, behind, name) if isinstance(x, torch.Tensor) else x

    return _marked(func(*map(own, args), **{key: own(x) for key, x in kwargs.items()}), held.at(ndim + behind))


def _cast(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A cast to another dtype or device, or to those of the second argument, if that is a tensor: marks stay."""
    return set_mark(func(*args, **kwargs), mark_of(args[0]))


def _like(x: torch.Tensor, held: Held, behind: int, name: str) -> torch.Tensor:
    """x, or its slice if it is whole: what a broadcast needs beside a tensor that holds tokens along its dim `behind`,
    a number below zero."""
    dim = _ndim(x) + behind
    if _held(x) is not None or dim < 0 or own_shape(x)[dim] == 1:
        return x
    if own_shape(x)[dim] != held.whole_size:
        raise _refuse(name, f"joins {held.whole_size} tokens with {own_shape(x)[dim]} rows that are not tokens")
    return taken(x, held.at(dim))


def _by_itself(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A function along dims that do not hold tokens: softmax, norms, sorting. The result has the dims of the
    argument."""
    x, *rest = args
    held = _only(name, args, kwargs)
    ndim = _ndim(x)
    if name in ("layer_norm", "rms_norm"):
        over = rest[0] if rest else kwargs["normalized_shape"]
        dims = list(range(ndim - len(over), ndim))
    else:
        place = 1 if name in ("topk", "normalize") else 0
        given = rest[place] if len(rest) > place else kwargs.get("dim", 1 if name == "normalize" else -1)
        dims = [_dim(d, ndim) for d in (given if isinstance(given, tuple | list) else [given]) if isinstance(d, int)]
    if held.dim in dims or not dims:
        raise _refuse(name, "goes over the tokens of a sequence")
    return _marked(func(*args, **kwargs), held)


def _marked(output: Any, mark: Mark) -> Any:
    for x in output if isinstance(output, tuple | list) else [output]:
        if isinstance(x, torch.Tensor):
            set_mark(x, mark)
    return output


def _only(name: str, args: Any, kwargs: Any) -> Held:
    """The mark of the first argument; raises MixedTokensError if that has none, or if another argument has one, too."""
    held = _held(args[0]) if args else None
    if held is None or sum(mark_of(x) is not None for x in _tensors(args, kwargs)) > 1:
        raise _refuse(name, "takes tokens where only whole tensors are known to go")
    return held


def _reduction(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A reduction over dims without tokens does the same to each token; a sum or mean over tokens becomes a share."""
    x = args[0]
    held = _only(name, args, kwargs)
    ndim = _ndim(x)
    positional = name in ("sum", "mean") or (len(args) > 1 and not isinstance(args[1], torch.Tensor))
    given = args[1] if positional and len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if name == "norm":
        given = args[2] if len(args) > 2 else kwargs.get("dim")
    dims = None if given is None else [_dim(d, ndim) for d in (given if isinstance(given, tuple | list) else [given])]
    if dims is None or held.dim in dims:
        if name not in ("sum", "mean"):
            raise _refuse(name, "goes over the tokens of a sequence")
        if name == "mean" and not held.own_size:  # the mean of nothing would be NaN
            share = torch.sum(*args, **kwargs) * 0.0
        else:
            share = func(*args, **kwargs) * mode.num_ranks
        if name == "mean":
            share = share * (held.own_size / held.whole_size)
        return set_mark(share, SHARE)
    keeps = kwargs.get("keepdim", False) or any(a is True for a in args[2:])
    gone = 0 if keeps else sum(d < held.dim for d in dims)
    return _marked(func(*args, **kwargs), held.at(held.dim - gone))


def _product(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Rows, some of them tokens, times a matrix: linear, matmul, addmm."""
    bias, rows, matrix = args[:3] if name == "addmm" else (None, args[0], args[1])
    held, other = _held(rows), _held(matrix)
    ndim = _ndim(rows)
    if held is None or mark_of(bias) is not None:
        raise _refuse(name, "multiplies by tokens")
    if held.dim == ndim - 1:
        raise _refuse(name, "adds up over tokens")
    behind = held.dim - ndim
    if other is not None and (other.dim - _ndim(matrix) != behind or behind == -2 or not other.same_tokens(held)):
        raise _refuse(name, "pairs tokens with each other, as attention that is not fused does")
    if behind < -2:
        matrix = _like(matrix, held, behind, name)
        args = (bias, rows, matrix, *args[3:]) if name == "addmm" else (rows, matrix, *args[2:])
    if bias is not None and _ndim(bias) > 1:
        raise _refuse(name, "adds rows to tokens")
    vector = name != "linear" and _ndim(matrix) == 1
    output = func(*args, **kwargs)
    shift = max(0, _ndim(output) + vector - ndim)
    return set_mark(output, held.at(held.dim + shift))


def _embedding(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if kwargs.get("scale_grad_by_freq") or any(a is True for a in args[4:]):
        raise _refuse(name, "divides gradients by how often a word is in the batch (scale_grad_by_freq)")
    return set_mark(func(*args, **kwargs), _only(name, args, kwargs))


def _view(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    x = args[0]
    held = _only(name, args[:1], {})
    whole = whole_shape(x)
    if name in ("view_as", "reshape_as"):
        sizes = list(whole_shape(args[1]))
    elif name == "flatten":
        start = _dim(args[1] if len(args) > 1 else kwargs.get("start_dim", 0), len(whole))
        end = _dim(args[2] if len(args) > 2 else kwargs.get("end_dim", -1), len(whole))
        sizes = [*whole[:start], whole[start : end + 1].numel(), *whole[end + 1 :]]
    elif name == "unflatten":
        dim, parts = args[1] if len(args) > 1 else kwargs["dim"], args[2] if len(args) > 2 else kwargs["sizes"]
        dim = _dim(dim, len(whole))
        parts = _resolved(list(parts), whole[dim])
        sizes = [*whole[:dim], *parts, *whole[dim + 1 :]]
    else:
        given = args[1:] or (kwargs.get("shape", kwargs.get("size")),)
        if isinstance(given[0], torch.dtype):
            return _marked(func(*args, **kwargs), held)
        sizes = _resolved(list(given[0] if isinstance(given[0], tuple | list) else given), whole.numel())
    made = reshaped(whole, held, sizes)
    if made is None:
        raise _refuse(name, f"of {tuple(whole)} as {tuple(sizes)} spreads the tokens of a sequence over several dims")
    sizes[made.dim] = made.own_size
    return set_mark(x.reshape(sizes), made)


def _resolved(sizes: list[int], total: int) -> list[int]:
    if -1 not in sizes:
        return sizes
    known = 1
    for size in sizes:
        known *= 1 if size == -1 else size
    return [total // known if size == -1 else size for size in sizes]


def _moved(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Dims in another order. Where the tokens' dim goes is found with a tensor that has 2 there and 1 elsewhere."""
    x = args[0]
    held = _only(name, args, kwargs)
    with torch._C.DisableTorchFunction():
        probe = torch.empty([2 if d == held.dim else 1 for d in range(x.ndim)], device="meta")
        dim = list(func(probe, *args[1:], **kwargs).shape).index(2)
    return set_mark(func(*args, **kwargs), held.at(dim))


def _with_dims(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A dim of size 1 added or taken away."""
    x = args[0]
    held = _only(name, args, kwargs)
    whole = whole_shape(x)
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "unsqueeze":
        dim = _dim(given, len(whole) + 1)
        return set_mark(func(*args, **kwargs), held.at(held.dim + (dim <= held.dim)))
    dims = range(len(whole)) if given is None else given if isinstance(given, tuple | list) else [given]
    gone = sorted((_dim(d, len(whole)) for d in dims if whole[d] == 1), reverse=True)
    if held.dim in gone:
        raise _refuse(name, "picks a single token")
    for dim in gone:
        x = x.squeeze(dim)
    return set_mark(x if gone else x.view_as(x), held.at(held.dim - sum(d < held.dim for d in gone)))


def _pairs(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Pairs of real numbers along the last dim made complex numbers, or the other way round."""
    held = _only(name, args, kwargs)
    if name == "view_as_complex" and held.dim == _ndim(args[0]) - 1:
        raise _refuse(name, "goes over the tokens of a sequence")
    return set_mark(func(*args, **kwargs), held)


def _expand(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    x = args[0]
    held = _only(name, args[:1], {})
    whole = whole_shape(x)
    if name == "expand_as":
        sizes = list(whole_shape(args[1]))
    else:
        given = args[1:] or (kwargs.get("size", kwargs.get("sizes")),)
        sizes = list(given[0] if isinstance(given[0], tuple | list) else given)
    more = len(sizes) - len(whole)
    if sizes[held.dim + more] not in (-1, held.whole_size):
        raise _refuse(name, "repeats tokens")
    sizes[held.dim + more] = held.own_size
    return set_mark(x.expand(sizes), held.at(held.dim + more))


def _repeat(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    held = _only(name, args, kwargs)
    sizes = list(args[1] if isinstance(args[1], tuple | list) else args[1:])
    more = len(sizes) - _ndim(args[0])
    if sizes[held.dim + more] != 1:
        raise _refuse(name, "repeats tokens")
    return set_mark(func(*args, **kwargs), held.at(held.dim + more))


def _split(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    held = _only(name, args, kwargs)
    place = 1 if name == "unbind" else 2
    dim = _dim(args[place] if len(args) > place else kwargs.get("dim", 0), _ndim(args[0]))
    if dim == held.dim:
        raise _refuse(name, "takes the tokens of a sequence apart")
    return _marked(func(*args, **kwargs), held.at(held.dim - (name == "unbind" and dim < held.dim)))


def _interleaved(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Every number repeated several times, along a dim without tokens."""
    held = _only(name, args, kwargs)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is None or _dim(dim, _ndim(args[0])) == held.dim:
        raise _refuse(name, "lengthens the sequence")
    return _marked(func(*args, **kwargs), held)


def _join(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    parts = list(args[0] if args else kwargs["tensors"])
    held = next(h for x in parts if (h := _held(x)) is not None)
    ndim = _ndim(parts[0])
    dim = _dim(args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0)), ndim + (name == "stack"))
    if name != "stack" and dim == held.dim:
        raise _refuse(name, "lengthens the sequence")
    for x in parts:
        other = mark_of(x)
        if other is not None and other != held:
            raise _refuse(name, "joins tensors that hold different tokens")
    own = [_like(x, held, held.dim - ndim, name) for x in parts]
    rest = {key: value for key, value in kwargs.items() if key != "tensors"}
    return set_mark(func(own, *args[1:], **rest), held.at(held.dim + (name == "stack" and dim <= held.dim)))


def _narrow(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A part of the tensor along a dim without tokens."""
    held = _only(name, args, kwargs)
    dim = _dim(args[1] if len(args) > 1 else kwargs["dim"], _ndim(args[0]))
    if dim == held.dim:
        raise _refuse(name, "picks single tokens")
    return set_mark(func(*args, **kwargs), held.at(held.dim - (name == "select" and dim < held.dim)))


def _item(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """x[...] with whole dims, ranges of tokens, and anything along other dims; or rows of a table, looked up by
    tokens."""
    x, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    held = _held(x)
    if held is None:
        if len(items) == 1 and (rows := _held(items[0])) is not None and items[0].dtype != torch.bool:
            return set_mark(func(x, items[0]), rows)
        raise _refuse("indexing", "by tokens is known for rows of a table only")
    whole = whole_shape(x)
    if any(_held(i) is not None for i in items) or any(
        isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in items
    ):
        raise _refuse("indexing", "picks elements by the values of tokens")
    used = sum(i is not None and i is not Ellipsis for i in items)
    at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (len(whole) - used)
    lists = sum(isinstance(i, torch.Tensor | list) for i in items)
    if lists > 1 or (lists and any(isinstance(i, int) for i in items)):
        raise _refuse("indexing", "by several tensors rearranges tokens")
    dim, place, mark = 0, 0, None
    for n, i in enumerate(items):
        if i is None:
            place += 1
            continue
        if dim == held.dim:
            items[n], mark = _picked_range(i, held, whole[dim], place)
        place += i.ndim if isinstance(i, torch.Tensor) else 0 if isinstance(i, int) else 1
        dim += 1
    return set_mark(func(x, tuple(items)), mark)


def _picked_range(item: Any, held: Held, num_tokens: int, place: int) -> tuple[slice, Held]:
    """(where the picked tokens lie among those that are here, the mark of the result, which has them along dim
    `place`). item: an index along all tokens of the sequence. Raises MixedTokensError unless it is a range without
    gaps."""
    if not isinstance(item, slice):
        raise _refuse("indexing", "picks single tokens")
    start, end, step = item.indices(num_tokens)
    if (start, end, step) == (0, num_tokens, 1):
        return item, held.at(place)
    if step != 1 or not held.alone:
        raise _refuse("indexing", "picks single tokens")
    spans, first, last = clipped(held.spans, start, end)
    return slice(first, last), Held(place, max(0, end - start), spans)


def _factory(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """New tensors like one that holds tokens. Those of given sizes hold the same, if they have its dims up to that of
    the tokens: their elements are alike, or written later. All others are whole."""
    x, *given = args
    held = _held(x)
    if name.startswith("rand") and held is not None:  # drawn for all tokens, for all ranks draw the same
        whole = func(x.new_empty(1).expand(whole_shape(x)), *given, **kwargs)
        return set_mark(taken(whole, held).contiguous(), held)
    if name.endswith("_like"):
        return set_mark(func(*args, **kwargs), held)
    if held is None or name == "new_tensor":
        return func(*args, **kwargs)
    sizes = list(given[0] if given and isinstance(given[0], tuple | list) else given) or list(kwargs.get("size", ()))
    place = held.dim + 1
    if len(sizes) != _ndim(x) or sizes[:place] != list(whole_shape(x)[:place]):
        return func(*args, **kwargs)
    sizes[held.dim] = held.own_size
    rest = given[1:] if name == "new_full" else ()
    return set_mark(func(x, sizes, *rest, **{k: v for k, v in kwargs.items() if k != "size"}), held)


def _picked(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Elements picked along a dim without tokens; all tensors must hold the same tokens."""
    x = args[0]
    held = _held(x)
    dim = _dim(args[1] if len(args) > 1 else kwargs["dim"], _ndim(x))
    if held is None or dim == held.dim or any(mark_of(other) != held for other in _tensors(args, kwargs)):
        raise _refuse(name, "goes by places among the tokens, or joins tensors that hold different ones")
    return set_mark(func(*args, **kwargs), held)


def _loss(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The loss of tokens with their targets; a mean over all tokens becomes a share."""
    rest = dict(zip(("input", "target", *_LOSS_ARGUMENTS[name]), args, strict=False)) | kwargs
    given, target = rest.pop("input"), rest.pop("target")
    held = _held(given)
    if held is None or rest.get("weight") is not None or rest.get("pos_weight") is not None:
        raise _refuse(name, "of whole predictions with targets that hold tokens, or with weights of classes")
    if rest.get("size_average") is not None or rest.get("reduce") is not None:
        raise _refuse(name, "is given size_average or reduce, which are gone; give reduction")
    by_class = name in ("cross_entropy", "nll_loss") and not target.is_floating_point()
    if name in ("cross_entropy", "nll_loss") and held.dim == 1 and _ndim(given) > 1:
        raise _refuse(name, "goes over the tokens of a sequence")
    at = held.at(held.dim - (by_class and held.dim > 1))
    other = _held(target)
    if other is not None and other != at:
        raise _refuse(name, "joins tensors that hold different tokens")
    if name in ("cross_entropy", "nll_loss"):
        own = target if other is not None else taken(target, at)
    elif torch.broadcast_shapes(whole_shape(given), whole_shape(target)) != whole_shape(given):
        raise _refuse(name, "is given larger targets than predictions")
    else:
        own = _like(target, held, held.dim - _ndim(given), name)
    reduction = rest.pop("reduction", "mean")
    if reduction == "none":
        return set_mark(func(given, own, **rest, reduction="none"), at)
    total = func(given, own, **rest, reduction="sum") * mode.num_ranks
    if reduction == "mean":
        if by_class:
            if other is not None:
                raise _refuse(name, "is a mean over targets that are not whole")
            total = total / (target != rest.get("ignore_index", -100)).sum()
        elif name in ("cross_entropy", "nll_loss"):
            total = total / (target.numel() // target.shape[1])
        else:
            total = total / whole_shape(given).numel()
    return set_mark(total, SHARE)


def _hook(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Register a hook, which is called with the gradient of the tokens that are here, with their mark; for fake
    tensors, which get no gradient, it is called at once. Hooks of fully_shard and our own are registered as they
    are."""
    x, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    if not is_own(hook):
        return func(x, hook)
    held = _only(name, args, {})

    def called(grad: torch.Tensor) -> Any:
        with ExitStack() as stack:
            if mode not in _get_current_function_mode_stack():
                stack.enter_context(mode)
            found = hook(set_mark(grad, held))
        if found is not None and mark_of(found) != held:
            raise MixedTokensError("a hook on gradients (register_hook) makes something else of them than tokens")
        return found

    if isinstance(x, FakeTensor):
        with torch.no_grad():
            called(torch.zeros_like(x))
    return func(x, called)


def _attention(mode: TokenSlices, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    marks = [_held(x) for x in (query, key, value)]
    first = marks[0]
    if first is None or any(m is None or not m.same_tokens(first) for m in marks):
        raise _refuse("attention", "of one sequence to another (cross attention) has no parts that match")
    if any(m.dim != _ndim(x) - 2 for m, x in zip(marks, (query, key, value), strict=True) if m) or not first.alone:
        raise _refuse("attention", "goes over something else than the tokens of a sequence")
    if first.length != mode.length or num_tokens(first.spans) != num_tokens(mode.spans):
        raise _refuse("attention", f"goes over {first.length} of {mode.length} tokens")
    if given.get("dropout_p"):
        raise _refuse("attention", f"drops out {given['dropout_p']:g} of its weights; set attention dropout to 0")
    if _ndim(query) != 4:
        raise _refuse("attention", f"is of {_ndim(query)} dims; only (batch, heads, tokens, width) is known")
    if mask is not None:
        if mark_of(mask) is not None or mask.requires_grad:
            raise _refuse("attention", "adds a bias that is learned, or made of tokens, to its scores")
        if mask.shape[-1] != mode.length or mask.shape[-2] not in (1, mode.length):
            raise _refuse("attention", f"has a mask of {tuple(mask.shape)} for {mode.length} tokens")
        mask = mask.unsqueeze(0) if mask.dim() == 3 else mask
    output = mode.attend(query, key, value, mask, bool(given.get("is_causal", False)), given.get("scale"))
    return set_mark(output, first)


_BLIND = UNCONCERNED | {
    *("grad.__get__", "names.__get__", "requires_grad.__set__", "requires_grad_", "is_same_size", "__repr__"),
    "_set_grad_enabled",
}
"""Functions that tell nothing of tokens, and change nothing about them."""

_FIRST = {
    "linear": ("input", "weight"),
    "embedding": ("input", "weight"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "addmm": ("input", "mat1", "mat2"),
    "mul": ("input", "other"),
    "multiply": ("input", "other"),
    "div": ("input", "other"),
    "divide": ("input", "other"),
    "true_divide": ("input", "other"),
}
"""Names of the first arguments of functions, unless `input` is the only one."""

_LINEAR = frozenset(
    ("add", "sub", "subtract", "neg", "negative", "to", "float", "double", "bfloat16", "half", "type", "clone",
     "contiguous", "detach", "view", "reshape", "flatten", "squeeze", "unsqueeze", "sum", "mean", "stack", "cat",
     "type_as", "alias", "view_as", "positive", "pos", "expand", "permute", "transpose", "getitem")
)  # fmt: skip

_POINTWISE = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow neg negative positive abs
    absolute sign sqrt rsqrt square exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf
    erfc sigmoid logit reciprocal floor ceil round trunc frac clamp clamp_min clamp_max clip minimum maximum fmin fmax
    where masked_fill lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf isfinite nan_to_num atan2 hypot xlogy
    relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus softsign tanhshrink
    logsigmoid hardshrink softshrink threshold dropout
    float double half bfloat16 long int bool short char byte cpu cuda clone contiguous detach alias
    data.__get__ real.__get__ imag.__get__ polar complex conj angle fill zero copy truediv floordiv mod and or xor
    invert
    """

_LOSS_ARGUMENTS = {
    "cross_entropy": ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
    "nll_loss": ("weight", "size_average", "ignore_index", "reduce", "reduction"),
    "mse_loss": ("size_average", "reduce", "reduction"),
    "l1_loss": ("size_average", "reduce", "reduction"),
    "smooth_l1_loss": ("size_average", "reduce", "reduction", "beta"),
    "binary_cross_entropy_with_logits": ("weight", "size_average", "reduce", "reduction", "pos_weight"),
}


def _table() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for name in _POINTWISE.split():
        for form in (name, f"{name}_", f"__{name}__", f"__i{name}__", f"__r{name}__"):
            found[form] = _pointwise
    groups: dict[Rule, str] = {
        _shape: " ".join(SIZES),
        _cast: "to type type_as",
        _by_itself: "softmax log_softmax layer_norm rms_norm normalize cumsum topk sort argsort softmin glu",
        _reduction: "sum mean amax amin argmax argmin logsumexp all any prod var std norm max min",
        _product: "linear matmul __matmul__ mm addmm",
        _embedding: "embedding one_hot",
        _view: "view reshape flatten unflatten view_as reshape_as",
        _moved: "transpose permute swapaxes swapdims movedim moveaxis t T.__get__ mT.__get__ adjoint",
        _with_dims: "unsqueeze squeeze",
        _pairs: "view_as_complex view_as_real",
        _expand: "expand broadcast_to expand_as",
        _repeat: "repeat",
        _interleaved: "repeat_interleave",
        _split: "split chunk tensor_split unbind split_with_sizes",
        _join: "cat concat concatenate stack",
        _narrow: "narrow select index_select",
        _picked: "gather take_along_dim scatter scatter_ scatter_add scatter_add_",
        _item: "__getitem__",
        _factory: "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full"
        " new_tensor",
        _loss: " ".join(_LOSS_ARGUMENTS),
        _attention: "scaled_dot_product_attention",
        _hook: "register_hook",
    }
    for rule, names in groups.items():
        found |= dict.fromkeys(names.split(), rule)
    return found


_RULES = _table()
