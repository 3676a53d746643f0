"""Gradients of columns' weights, computed while the gradient of what the columns read is summed over tensor ranks.

Backward of a column is two products. Only the gradient of its input is needed to go on, once it is summed over the
ranks; that of its weight may be computed meanwhile, as Megatron-LM does it:

    input gradients of all columns that read a tensor -> their sum begins -> weight gradients -> the sum is waited for

Of what is ready autograd runs first what the forward made last. So the forward makes, in this order, what waits for the
sum, what computes the weights' gradients, the sum, and the products. Any other order would only wait longer.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import Function, once_differentiable
from torch.distributed.tensor import DTensor

from ...profiler.semantics.token_marks import mark_of, set_mark
from .tensor_collectives import Awaited, PendingCollective, call

LEAST_BYTES = 2**19
"""A tensor that is summed over ranks has at least so many: the sum of a smaller one takes no longer than the host needs
for what is made here. A step of two CPU ranks took 1.03 and 1.04 times as long with it at 128 and 256 KiB, 0.96 and
0.98 times at 512 and 1,024 (`python -m benchmarks.execution.delayed_weights`, torch 2.13)."""


class _Slot:
    """What a product leaves for the gradient of its weight: its input [..., in], and the gradient of its output [...,
    out]. If there are several backwards through one forward, that of the last one."""

    def __init__(self, is_transposed: bool) -> None:
        self.is_transposed = is_transposed
        self.left: tuple[torch.Tensor, torch.Tensor] | None = None


class _Weight(Function):
    """The weight that a product reads / its gradient, from what the product has left in the slot."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, slot: _Slot) -> torch.Tensor:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: None) -> tuple[torch.Tensor | None, None]:
        left, ctx.slot.left = ctx.slot.left, None
        if left is None:
            return None, None
        x, of_y = (each.flatten(0, -2) for each in left)
        return (x.t() @ of_y if ctx.slot.is_transposed else of_y.t() @ x), None


class _Product(Function):
    """x times a weight / the gradient of x. The gradient of the weight is left to `_Weight`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, slot: _Slot) -> torch.Tensor:
        ctx.slot = slot
        ctx.save_for_backward(x, weight)
        return multiplied(x, weight, slot.is_transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.slot.left = x, grad
        return grad @ (weight.t() if ctx.slot.is_transposed else weight), None, None


class Entered(NamedTuple):
    """A tensor as columns read it, and those of their weights whose gradients are put off."""

    tensor: torch.Tensor
    weights: dict[nn.Module, tuple[torch.Tensor, _Slot]]

    def product(self, column: nn.Module) -> torch.Tensor | None:
        """The tensor times the column's weight; None if that is not put off, or was computed before."""
        found = self.weights.pop(column, None)
        if found is None:
            return None
        with torch._C.DisableTorchFunction():
            y: torch.Tensor = _Product.apply(self.tensor, *found)
        return set_mark(y, mark_of(self.tensor))


class DelayedWeights:
    """Weights of columns that read one tensor. columns: modules; of those that are no linear layers nothing is put
    off."""

    def __init__(self, columns: Iterable[nn.Module]) -> None:
        self._columns = [column for column in columns if is_linear(column)]

    def enter(
        self, x: torch.Tensor, collective: Callable[[torch.Tensor, PendingCollective | None], torch.Tensor]
    ) -> Entered:
        """x after a collective that sums in backward: which stays pending if anything is to be
        computed meanwhile."""
        trained = []
        if torch.is_grad_enabled() and x.requires_grad and _is_large(x):
            trained = [column for column in self._columns if _is_put_off(column, x)]
        if not trained:
            return Entered(collective(x, None), {})
        pending = PendingCollective()
        awaited = call(Awaited, x, pending)
        slots = {column: _Slot(is_transposed(column)) for column in trained}
        weights = {column: (_Weight.apply(column.weight, slot), slot) for column, slot in slots.items()}
        return Entered(collective(awaited, pending), weights)


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a Conv1D of transformers, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D"


def multiplied(x: torch.Tensor, weight: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """x times the weight of a linear layer."""
    return x @ weight if is_transposed else F.linear(x, weight)


def _is_large(x: torch.Tensor) -> bool:
    """Whether this rank's part of a tensor has LEAST_BYTES or more. Modes that follow tokens would tell the size of the
    whole."""
    with torch._C.DisableTorchFunction():
        return x.nbytes >= LEAST_BYTES


def _is_put_off(column: nn.Module, x: torch.Tensor) -> bool:
    """Whether the gradient of a column's weight is put off: not under autocast, which would make another product of it,
    nor while the weight is not gathered, for it will be another tensor then."""
    weight: torch.Tensor = column.weight  # type: ignore[assignment]
    is_here = weight.requires_grad and not isinstance(weight, DTensor)
    return is_here and x.ndim > 1 and not torch.is_autocast_enabled(x.device.type)
