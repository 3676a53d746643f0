"""Logits that stay cut by classes up to the loss, which the tensor-parallel ranks compute together."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...profiler.semantics.logit_shards import shard_logits
from .shared_gradients import unwatched
from .tensor_collectives import GatherAlike, call
from .tensor_forwards import SharedInput


class RanksOfGroup:
    """The ranks of a process group, as the loss needs them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self._group = group

    def max_(self, x: torch.Tensor) -> None:
        """Put the largest over all ranks into x."""
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self._group)

    def sum_(self, x: torch.Tensor) -> None:
        """Put the sum over all ranks into x."""
        dist.all_reduce(x, group=self._group)

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' parts along dim."""
        return call(GatherAlike, x, dim, self._group)

    def working(self) -> AbstractContextManager[Any]:
        """Nothing: operators are not told apart here."""
        return nullcontext()


_APART = "keeps_logits_apart"


def apart_forward(
    column: Callable[..., torch.Tensor], shared: SharedInput, group: dist.ProcessGroup
) -> Callable[..., torch.Tensor]:
    """A column's forward, whose result is marked as logits with this rank's share of the classes. For a watch over what
    differs between ranks it is alike on all of them, as the whole logits are."""
    ranks = RanksOfGroup(group)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = column(x)
        shared.done()
        return shard_logits(y, ranks)

    found = unwatched(forward, differs=False)
    found.__dict__[_APART] = True
    return found


def keeps_logits_apart(module: nn.Module) -> bool:
    """Whether such logits are made inside of a module, so that what the module does with them must be followed."""
    inside = (inner.__dict__.get("forward") for inner in module.modules() if inner is not module)
    return any(hasattr(forward, _APART) for forward in inside)
