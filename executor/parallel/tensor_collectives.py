"""Collectives of tensor parallelism with their gradients; tensor.py says where each belongs.

Each class is named for what it does forward, and says what it does in both directions (forward / backward).
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import Function, once_differentiable

from ...profiler.semantics.token_marks import Held, Mark, divided, mark_of, set_mark
from ..torch_compat import all_gather_single, reduce_scatter_single


def call(function: type[Function], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """The result of a collective with a gradient; it gets the mark of the tokens that it holds."""
    mark = mark_of(x)
    if mark is None:
        plain: torch.Tensor = function.apply(x, *args)
        return plain
    with torch._C.DisableTorchFunction():
        result: torch.Tensor = function.apply(x, *args)
    return set_mark(result, _mark_after(function, mark, args))


def _mark_after(function: type[Function], mark: Mark, args: tuple[Any, ...]) -> Mark:
    """The mark of a tensor after a collective. args: the collective's dim, if it has one, and its group."""
    if not isinstance(mark, Held) or len(args) < 2 or args[0] != mark.dim:
        return mark
    group = args[1]
    if function in (Slice, SumSlice):
        return divided(mark, dist.get_rank(group), dist.get_world_size(group))
    return replace(mark, spans=mark.within, within=())


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenation along `dim` of all ranks' tensors."""
    degree = dist.get_world_size(group)
    gathered = x.new_empty(degree * x.shape[0], *x.shape[1:])
    all_gather_single(gathered, x.contiguous(), group=group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(degree), dim)


class PendingCollective:
    """A collective that may still be running while something else is computed; to be waited for before its result is
    read."""

    def __init__(self) -> None:
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None

    def begin(self, work: dist.Work | None, sent: torch.Tensor) -> None:
        """Note that a collective has begun. sent: its input, which is kept until it has ended."""
        self._under_way = None if work is None else (work, sent)

    def wait(self) -> None:
        """Wait for the collective: its result may be read afterwards."""
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None


def reduce_scatter(
    x: torch.Tensor, dim: int, group: dist.ProcessGroup, pending: PendingCollective | None = None
) -> torch.Tensor:
    """This rank's slice along `dim` of the sum of all ranks' tensors. With `pending` it may be read after
    `pending.wait()`."""
    degree = dist.get_world_size(group)
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(degree, dim))
    reduced = stacked.new_empty(stacked.shape[0] // degree, *stacked.shape[1:])
    work = reduce_scatter_single(reduced, stacked, group=group, async_op=pending is not None)
    if pending is not None:
        pending.begin(work, stacked)
    return reduced


def own_slice(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part along `dim`."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup, pending: PendingCollective | None = None) -> torch.Tensor:
    """The sum over ranks, as a new tensor. With `pending` it may be read after `pending.wait()`."""
    total = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, group=group, async_op=pending is not None)
    if pending is not None:
        pending.begin(work, total)
    return total


class Alike(Function):
    """Nothing / all-reduce, which may stay pending."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, pending: PendingCollective | None = None
    ) -> torch.Tensor:
        ctx.group, ctx.pending = group, pending
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_reduce(grad, ctx.group, ctx.pending), None, None


class SumAlike(Function):
    """All-reduce / nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class GatherSum(Function):
    """All-gather / reduce-scatter, which may stay pending."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup, pending: PendingCollective | None = None
    ) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.pending = dim, group, pending
        return all_gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group, ctx.pending), None, None, None


class Awaited(Function):
    """Nothing / a pending collective is waited for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending: PendingCollective) -> torch.Tensor:
        ctx.pending = pending
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.pending.wait()
        return grad, None


class SumSlice(Function):
    """Reduce-scatter / all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class Slice(Function):
    """Slice / all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return own_slice(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class GatherAlike(Function):
    """All-gather / slice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_slice(grad, ctx.dim, ctx.group), None, None
