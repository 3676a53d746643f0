"""Logits whose classes are divided between ranks, and stay so: the cross-entropy is computed on what each rank has.

A rank's share of the logits is an ordinary tensor of another class: it answers for its shape as if all classes were
there, goes through what treats the classes alike (views, casts, scaling), and F.cross_entropy of it exchanges three
numbers per token in place of all logits. Any other function is given the logits of all ranks, gathered. So a model's
own forward and the user's own loss run unchanged, on real tensors as on fake ones.

The loss over sharded classes is Megatron-LM's (Shoeybi et al., arXiv:1909.08053, section 3).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch._subclasses import FakeTensor
from torch.autograd.function import Function, once_differentiable
from torch.utils._pytree import tree_map

from .function_names import SIZES, UNCONCERNED, is_in_place, name_of


class Ranks(Protocol):
    """The ranks that the classes are divided between, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...

    @property
    def count(self) -> int:
        """How many they are."""
        ...

    def max_(self, x: torch.Tensor) -> None:
        """Replace x by the maximum over all ranks, in place."""
        ...

    def sum_(self, x: torch.Tensor) -> None:
        """Replace x by the sum over all ranks, in place."""
        ...

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' parts along dim; of its gradient each rank takes its part."""
        ...

    def working(self) -> AbstractContextManager[Any]:
        """A context in which the operators of the loss run."""
        ...


@dataclass(frozen=True)
class _Classes:
    """The dim of a tensor that holds classes, and the ranks that hold the others."""

    dim: int
    ranks: Ranks


_CLASSES = "_divided_classes"
_WHOLE = "_gathered_classes"


class LogitShards(torch.Tensor):
    """A rank's share of logits; made by shard_logits."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on this rank's classes, if the result is the same; else on the logits of all ranks."""
        return _followed(func, args, kwargs or {})


def shard_logits(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The tensor x, marked as this rank's classes along its last dim."""
    return _marked(x, _Classes(x.dim() - 1, ranks))


def as_before(made: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`made`, with the mark of x if x holds some of the classes: whoever reads x gets `made` instead."""
    return _marked(made, x.__dict__[_CLASSES]) if isinstance(x, LogitShards) else made


def with_all_classes(x: torch.Tensor, shape: torch.Size) -> torch.Size:
    """The shape of a tensor as if it held the classes of all ranks. shape: that of the part that is here."""
    if not isinstance(x, LogitShards):
        return shape
    classes: _Classes = x.__dict__[_CLASSES]
    sizes = list(shape)
    sizes[classes.dim] *= classes.ranks.count
    return torch.Size(sizes)


@cache
def _class_of(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of marked tensors for tensors of this kind; fake tensors stay fake."""
    if kind is torch.Tensor:
        return LogitShards
    return cast(type[torch.Tensor], type(f"{kind.__name__}LogitShards", (LogitShards, kind), {}))


def _marked(x: torch.Tensor, classes: _Classes) -> torch.Tensor:
    if not isinstance(x, LogitShards):
        x.__class__ = _class_of(type(x))
    x.__dict__[_CLASSES] = classes
    return x


def _plain(x: torch.Tensor) -> torch.Tensor:
    """The part that is here, as an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.view_as(x)


def _whole(leaf: Any) -> Any:
    """Logits with all classes, gathered only once; anything else as it is."""
    if not isinstance(leaf, LogitShards):
        return leaf
    key = torch.is_grad_enabled()
    known: dict[bool, torch.Tensor] = leaf.__dict__.setdefault(_WHOLE, {})
    if key not in known:
        classes: _Classes = leaf.__dict__[_CLASSES]
        known[key] = classes.ranks.gather(_plain(leaf), classes.dim)
    return known[key]


def _followed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, LogitShards):
        if name in SIZES:
            return _shape_answer(x, name, args, kwargs)
        if name == "cross_entropy":
            loss = _cross_entropy(x, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
            if loss is not None:
                return loss
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ANSWERS:
                return func(*args, **kwargs)
            dim = _dim_after(func, name, x, args, kwargs)
            if dim is not None:
                return _run_here(func, name, x, dim, args, kwargs)
    if name.endswith("__set__") or name == "__setitem__" or kwargs.get("out") is not None or is_in_place(name):
        raise ValueError(
            f"{name} writes into logits whose classes are divided between tensor-parallel ranks, which the loss that "
            "was planned does not do; plan again with this loss"
        )
    args, kwargs = tree_map(_whole, (args, kwargs))
    return func(*args, **kwargs)


def _run_here(
    func: Callable[..., Any], name: str, x: torch.Tensor, dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a function on this rank's classes. Sizes among its arguments count the classes of all ranks."""
    classes: _Classes = x.__dict__[_CLASSES]
    if name in _VIEWS:
        sizes = _sizes(name, with_all_classes(x, x.shape), args, kwargs)
        sizes[dim] //= classes.ranks.count
        made = x.reshape(sizes)
    else:
        made = func(*args, **kwargs)
    return _marked(made, _Classes(dim, classes.ranks))


def _dim_after(
    func: Callable[..., Any], name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """The dim that holds the classes after a function that treats all classes alike; None if it may not."""
    dim = x.__dict__[_CLASSES].dim
    if name in _VIEWS:
        given = args[1] if len(args) > 1 else None
        if isinstance(given, torch.dtype) or "dtype" in kwargs:
            return None
        shape = with_all_classes(x, x.shape)
        return _dim_in_view(shape, dim, _sizes(name, shape, args, kwargs))
    if name in _MOVES:
        probe = torch.empty([2 if d == dim else 1 for d in range(x.ndim)], device="meta")
        return list(func(probe, *args[1:], **kwargs).shape).index(2)
    if name == "__getitem__":
        return _dim_after_index(x, dim, args[1])
    if name.removeprefix("__i").removeprefix("__r").strip("_") in _ONE_BY_ONE:
        others = [leaf for leaf in (*args[1:], *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        return None if any(other.ndim or other.requires_grad for other in others) else dim
    return None


def _sizes(name: str, shape: torch.Size, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The sizes that a view gives the tensor with all classes."""
    if name == "flatten":
        start = (args[1] if len(args) > 1 else kwargs.get("start_dim", 0)) % len(shape)
        end = (args[2] if len(args) > 2 else kwargs.get("end_dim", -1)) % len(shape)
        return [*shape[:start], shape[start : end + 1].numel(), *shape[end + 1 :]]
    given = args[1:] or (kwargs.get("shape", kwargs.get("size")),)
    sizes = list(given[0] if isinstance(given[0], tuple | list) else given)
    if -1 in sizes:
        known = -torch.Size(sizes).numel()
        sizes[sizes.index(-1)] = shape.numel() // known
    return sizes


def _dim_in_view(shape: torch.Size, dim: int, sizes: list[int]) -> int | None:
    """The dim of a view that holds dim `dim` of a tensor alone; None if it is joined with others or divided."""
    ahead = shape[:dim].numel()
    for place, size in enumerate(sizes):
        if torch.Size(sizes[:place]).numel() == ahead and size == shape[dim]:
            return place
    return None


def _dim_after_index(x: torch.Tensor, dim: int, index: Any) -> int | None:
    """The dim of x[index] that was dim `dim` of x, if the index takes all of that dim; else None."""
    items = list(index) if isinstance(index, tuple) else [index]
    taken = [_dims_taken(item) for item in items]
    if None in taken or sum(isinstance(item, torch.Tensor) for item in items) > 1:
        return None
    at = next((n for n, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (x.ndim - sum(count for count in taken if count))
    place = seen = 0
    for item in items:
        count = _dims_taken(item) or 0
        if seen <= dim < seen + count:
            return place if isinstance(item, slice) and item == slice(None) else None
        place += 1 if item is None or isinstance(item, slice) else item.ndim if _is_list_of_rows(item) else 0
        place += isinstance(item, torch.Tensor) and item.dtype == torch.bool
        seen += count
    return None


def _dims_taken(item: Any) -> int | None:
    """How many dims of a tensor one item of an index takes up; None for unusual items."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor):
        return item.ndim if item.dtype == torch.bool else 1
    return 1 if isinstance(item, int | slice) and not isinstance(item, bool) else None


def _is_list_of_rows(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype != torch.bool


def _shape_answer(x: torch.Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        shape = with_all_classes(x, x.shape)
    if name in ("numel", "nelement"):
        return shape.numel()
    if name == "__len__":
        return shape[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """F.cross_entropy; None if its arguments are such that shards are not enough."""
    classes: _Classes = x.__dict__[_CLASSES]
    plain = _plain(x)
    known = weight is None and size_average is None and reduce is None and not target.is_floating_point()
    if not known or classes.dim != min(1, plain.ndim - 1) or isinstance(target, LogitShards):
        return None
    rows = plain.movedim(classes.dim, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    losses = _CrossEntropy.apply(rows, target.reshape(-1), ignore_index, label_smoothing, classes.ranks)
    dtype = torch.float32 if torch.is_autocast_enabled(plain.device.type) else plain.dtype
    if reduction == "none":
        found: torch.Tensor = losses.view(target.shape)
    elif reduction == "sum":
        found = losses.sum()
    else:
        found = losses.sum() / (target != ignore_index).sum()
    return found.to(dtype)


class _CrossEntropy(Function):
    """Cross-entropy of each row, in fp32 at least, between ranks with some of the classes each."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, ranks: Ranks
    ) -> torch.Tensor:
        with ranks.working():
            check_range(target, ignore_index, x.shape[1] * ranks.count, "targets of the loss")
            highest = x.amax(1).to(torch.promote_types(x.dtype, torch.float32))
            ranks.max_(highest)
            shifted = x - highest.unsqueeze(1)
            own, elsewhere = _own_classes(x, target, ranks)
            sums = [shifted.gather(1, own).squeeze(1).masked_fill(elsewhere, 0.0)]
            if smoothing:
                sums.append(shifted.sum(1))
            sums.append(shifted.exp_().sum(1))
            del shifted
            total = torch.stack(sums)
            ranks.sum_(total)
            log_sum = total[-1].log()
            losses = log_sum - (1.0 - smoothing) * total[0]
            if smoothing:
                losses -= smoothing / (x.shape[1] * ranks.count) * total[1]
            ctx.save_for_backward(x, target, log_sum + highest)
            ctx.ignore_index, ctx.smoothing, ctx.ranks = ignore_index, smoothing, ranks
            return losses.masked_fill(target == ignore_index, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x, target, log_sum = ctx.saved_tensors
        ranks: Ranks = ctx.ranks
        with ranks.working():
            own, elsewhere = _own_classes(x, target, ranks)
            gradient = (x - log_sum.unsqueeze(1)).exp_()
            here = (ctx.smoothing - 1.0) * (~elsewhere).to(gradient.dtype)
            gradient.scatter_add_(1, own, here.unsqueeze(1))
            if ctx.smoothing:
                gradient -= ctx.smoothing / (x.shape[1] * ranks.count)
            gradient *= grad.masked_fill(target == ctx.ignore_index, 0.0).unsqueeze(1)
            return gradient.to(x.dtype), None, None, None, None


def check_range(numbers: torch.Tensor, ignored: int | None, size: int, what: str) -> None:
    """Raise RuntimeError if numbers are outside of 0 .. size - 1, as torch does on one device: where ranks hold some of
    the rows or classes each, nobody else would notice. Nothing waits for a GPU, whose kernel stops."""
    if numbers.is_meta or isinstance(numbers, FakeTensor):
        return
    inside = (numbers >= 0) & (numbers < size)
    if ignored is not None:
        inside |= numbers == ignored
    torch._assert_async(inside.all(), f"{what} are out of range: there are 0 .. {size - 1}")


def _own_classes(x: torch.Tensor, target: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """(place of each target among this rank's classes, as a column; whether it is not among them)."""
    own = target - ranks.rank * x.shape[1]
    elsewhere = (own < 0) | (own >= x.shape[1])
    return own.masked_fill(elsewhere, 0).unsqueeze(1), elsewhere


_ANSWERS = UNCONCERNED | {"register_hook"}
"""Functions whose result does not depend on the number of classes."""

_VIEWS = frozenset(("view", "reshape", "flatten"))

_MOVES = frozenset(("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "mT.__get__", "t"))

_ONE_BY_ONE = frozenset(
    ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "neg", "tanh", "to",
     "float", "double", "half", "bfloat16", "type", "contiguous", "clone", "detach", "alias")
)  # fmt: skip
"""Functions of every element by itself."""
