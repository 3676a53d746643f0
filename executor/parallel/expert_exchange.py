"""Tokens sent to the ranks that hold their experts, run there, and brought back.

    a rank's tokens x experts of each -> rows, sorted by expert -> all-to-all -> rows of this rank's experts, from all
    ranks -> the module's own forward on its part of the experts -> all-to-all -> rows as they were -> sum over the
    experts of each token, times their weights

Ranks may send any number of rows, none included. What each will get is told by a small all-to-all before, and read on
the host, which makes room for it, while the device sorts the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import Function, once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from ...profiler.model.expert_banks import routing_of
from ...profiler.model.model_profile import Experts


class _RowExchange(Function):
    """Rows sent to the other ranks of a group; their gradients are sent back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


@dataclass(frozen=True)
class Rows:
    """Numbers of rows that go between the ranks of a group. arriving: [rank and expert] -> rows that this rank gets for
    each of its own experts. read: returns how many rows it sends to each rank, and gets from each; the host waits for
    that."""

    arriving: torch.Tensor
    read: Callable[[], list[list[int]]]


def count_rows(experts: torch.Tensor, count: int, group: dist.ProcessGroup) -> Rows:
    """Tell all ranks how many rows go where, and return what this rank learns. experts: the expert of each row, a
    number below `count`."""
    leaving = torch.zeros(count, dtype=torch.int64, device=experts.device)
    leaving.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int64))
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    of_ranks = torch.stack([leaving, arriving]).view(2, dist.get_world_size(group), -1).sum(-1)
    return Rows(arriving, _read_later(of_ranks))


def _read_later(numbers: torch.Tensor) -> Callable[[], list[list[int]]]:
    """A function that returns these numbers. A GPU copies them to the host at once, and the function waits for that
    copy alone, not for later work."""
    if not numbers.is_cuda:
        return numbers.tolist
    page = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[list[int]]:
        copied.synchronize()
        return page.tolist()

    return read


@dataclass(frozen=True)
class Bank:
    """A bank of experts that is spread over a group. forward: that of the module, which by now holds `count` / group
    size experts."""

    forward: Callable[..., torch.Tensor]
    count: int
    group: dist.ProcessGroup

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The output of the whole bank for this rank's tokens."""
        routing = routing_of(args, kwargs)
        if routing is None:
            raise ValueError(
                "a bank of experts was called with other tensors than (tokens [N, width], experts [N, k], weights "
                "[N, k]), as it was when the model was profiled; plan with expert=1"
            )
        tokens, indices, weights = routing
        num_ranks, slots = dist.get_world_size(self.group), indices.shape[1]
        of_rows = indices.flatten()
        told = count_rows(of_rows, self.count, self.group)
        order = of_rows.argsort(stable=True)
        leaving = tokens[order // slots]
        sent, received = told.read()
        rows = _RowExchange.apply(leaving, sent, received, self.group)
        own = torch.arange(self.count // num_ranks, device=tokens.device).repeat(num_ranks)
        experts = own.repeat_interleave(told.arriving, output_size=rows.shape[0])
        made = self._own(rows, experts.to(indices.dtype), tokens, indices, weights, args, kwargs)
        back = _RowExchange.apply(made, received, sent, self.group)
        placed = torch.empty_like(order)
        placed[order] = torch.arange(order.shape[0], device=order.device)
        terms = back[placed].view(-1, slots, back.shape[-1]) * weights.unsqueeze(-1)
        total: torch.Tensor = terms.sum(1).to(back.dtype)
        return total

    def _own(
        self,
        rows: torch.Tensor,
        experts: torch.Tensor,
        tokens: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        args: Any,
        kwargs: Any,
    ) -> torch.Tensor:
        """The module's own forward on rows that each go to one of its experts. If there are no rows it gets one whose
        result is not used, so that its parameters have gradients on every rank."""
        count = rows.shape[0]
        if count == 0:
            rows, experts = rows.new_zeros((1, *rows.shape[1:])) + rows.sum(), experts.new_zeros(1)
        ones = weights.new_ones((rows.shape[0], 1))
        instead = {id(tokens): rows, id(indices): experts.unsqueeze(1), id(weights): ones}
        given_args, given_kwargs = tree_map(lambda leaf: instead.get(id(leaf), leaf), (args, kwargs))
        return self.forward(*given_args, **given_kwargs)[:count]


@dataclass(frozen=True)
class StackedBank:
    """A bank of experts that is spread over a group, and is called with equally many tokens for each expert, [experts,
    tokens, width]. forward: that of the module."""

    forward: Callable[..., torch.Tensor]
    group: dist.ProcessGroup

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The output of the whole bank for this rank's tokens."""
        (tokens,) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        num_ranks = dist.get_world_size(self.group)
        each = [tokens.shape[0] // num_ranks] * num_ranks
        arrived = _RowExchange.apply(tokens, each, each, self.group)
        own = arrived.unflatten(0, (num_ranks, -1)).transpose(0, 1).flatten(1, 2)
        given_args, given_kwargs = tree_map(lambda leaf: own if leaf is tokens else leaf, (args, kwargs))
        made = self.forward(*given_args, **given_kwargs).unflatten(1, (num_ranks, -1)).transpose(0, 1).flatten(0, 1)
        returned: torch.Tensor = _RowExchange.apply(made, each, each, self.group)
        return returned


def run_spread(module: Any, bank: Experts, group: dist.ProcessGroup) -> None:
    """From now on a module that held a bank of experts runs its share of them, and is called as before. Whoever reads
    its number of experts, a router or a loss, still finds that of the whole bank."""
    forward = _counting_share(module, bank.attributes, dist.get_world_size(group))
    module.forward = StackedBank(forward, group) if bank.called == "stacked" else Bank(forward, bank.count, group)


def _counting_share(module: Any, attributes: Sequence[str], num_ranks: int) -> Callable[..., torch.Tensor]:
    """The module's forward; while it runs, the attributes that hold the number of experts hold that of one rank."""
    whole_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        counts = {name: getattr(module, name) for name in attributes}
        for name, count in counts.items():
            setattr(module, name, count // num_ranks)
        try:
            made: torch.Tensor = whole_forward(*args, **kwargs)
        finally:
            for name, count in counts.items():
                setattr(module, name, count)
        return made

    return forward
