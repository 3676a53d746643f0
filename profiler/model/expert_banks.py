"""Which banks of experts can be run on a part of their experts, by how their module is called, and how."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..running.meters import Op

_JOINING = ("_to_copy", "_unsafe_view", "add", "add_", "cat", "clone", "copy_", "mean", "sub", "sum")
_MOVING = ("gather", "index", "index_add", "index_add_", "index_put", "index_put_", "index_select", "masked_fill")
_LINEAR = frozenset((*_JOINING, *_MOVING, "scatter_add", "scatter_add_", "zeros_like", "empty_like"))
"""Operators that are linear in all of their tensors together. Those at the end give fixed values, and nothing of their
input."""

_BILINEAR = frozenset(("mul", "mul_", "mm", "bmm", "baddbmm", "addmm", "_grouped_mm"))
"""Operators that are linear in each of their tensors, so in one that depends on the weights if no other does."""

_COPYING = ("_to_copy", "clone", "copy_", "zeros_like", "ones_like", "empty_like", "empty", "_unsafe_view")


@dataclass(frozen=True)
class BankCall:
    """A call of a module with parameters stacked over experts. rows: rows that go through all of the experts together.
    weights, output: numbers of the storages of the experts' weights and of the returned tensor; -1 for stacked
    calls."""

    kind: Literal["routed", "stacked"]
    rows: int
    weights: int = -1
    output: int = -1


def stacked_of(args: Any, kwargs: Any, output: Any) -> torch.Tensor | None:
    """The one tensor [experts, tokens, width] that a module is given, if it returns a tensor with the same first two
    dims; else None."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if len(given) != 1 or not isinstance(output, torch.Tensor) or given[0].dim() != 3:
        return None
    return given[0] if output.dim() == 3 and output.shape[:2] == given[0].shape[:2] else None


def routing_of(args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(tokens [N, width], experts of each token [N, k], their weights [N, k]), if a module is given these three tensors
    and no others, in whatever order; else None."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    indices = [x for x in given if not x.is_floating_point() and x.dtype != torch.bool]
    floats = [x for x in given if x.is_floating_point()]
    if len(given) != 3 or len(indices) != 1 or any(x.dim() != 2 for x in given):
        return None
    tokens, weights = floats
    if weights.shape != indices[0].shape:
        tokens, weights = weights, tokens
    if weights.shape != indices[0].shape or tokens.shape[0] != weights.shape[0]:
        return None
    return tokens, indices[0], weights


def is_linear_in(weights: int, output: int, operators: Iterable[Op]) -> bool:
    """Whether what a module returns is a sum of terms, each with one of its weights as a factor, as far as can be told
    from the operators that it ran. weights, output: numbers of their storages."""
    follows = {weights}
    for op in operators:
        read = [view.storage for view in op.inputs if view.storage in follows]
        if not read:
            continue
        fresh = {view.storage for view in op.outputs} - follows
        if op.is_view or op.name in _LINEAR or (op.name in _BILINEAR and len(read) == 1):
            follows |= fresh
        else:
            return False
    return output in follows


def keeps_apart(count: int, operators: Iterable[Op]) -> bool:
    """Whether a module keeps its experts apart, by its operators: each of them is a batched product with `count`
    experts as its first dim, works element by element, or only copies."""
    for op in operators:
        shapes = [view.shape for view in (*op.inputs, *op.outputs)]
        batched = op.name in ("bmm", "baddbmm") and all(shape[0] == count for shape in shapes)
        if not (op.is_view or batched or op.kind == "elementwise" or op.name in _COPYING):
            return False
    return True


def stacked_over(module: nn.Module) -> int:
    """Number of experts that all parameters of a module are stacked over; 0 if they are not."""
    sizes = {p.shape[0] if p.dim() > 1 else 0 for p in module.parameters()}
    return min(sizes) if len(sizes) == 1 else 0


def counts_of(module: nn.Module, count: int) -> tuple[str, ...]:
    """Names of a module's own attributes that hold its number of experts: integers equal to `count`, and of these only
    those with "expert" in their names, if there are any."""
    found = [name for name, value in vars(module).items() if type(value) is int and value == count]
    named: Sequence[str] = [name for name in found if "expert" in name]
    return tuple(named or found)


def groups_of(count: int, operators: Iterable[Op]) -> tuple[int, int]:
    """(groups of a router's `count` experts, how many groups it chooses for a token before it chooses experts), for
    routers like DeepSeek-V3's: a top-k over one score for each group, then one over the scores of all experts. (1, 1)
    if the operators show no such choice."""
    scored: tuple[int, int, int] | None = None
    for op in operators:
        if op.name != "topk" or len(op.inputs[0].shape) != 2:
            continue
        tokens, choices = op.inputs[0].shape
        if choices == count:
            return scored[1:] if scored is not None and scored[0] == tokens else (1, 1)
        if 1 < choices < count and count % choices == 0:
            scored = tokens, choices, op.outputs[0].shape[-1]
    return 1, 1
