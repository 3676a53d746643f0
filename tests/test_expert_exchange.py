"""Rows sent to their experts: the host waits for their numbers once the device has all that needs none."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from meshwright.executor.parallel import expert_exchange
from meshwright.executor.parallel.expert_exchange import Bank
from support.ranks import run_ranks

NUM_EXPERTS, NUM_TOKENS, SLOTS, WIDTH = 4, 6, 2, 3


class _Events(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _scaled(first: int, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Expert i multiplies by i + 1; `first` is the first that is here."""
    scales = (first + indices + 1) * weights
    return tokens * scales.sum(-1, keepdim=True)


def _run() -> tuple[list[str], torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    weights, indices = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(SLOTS)
    count_rows, events = expert_exchange.count_rows, _Events()

    def counted(*args: Any) -> expert_exchange.Rows:
        told = count_rows(*args)
        events.seen.append("counted")

        def read() -> list[list[int]]:
            events.seen.append("read")
            return told.read()

        return replace(told, read=read)

    with pytest.MonkeyPatch.context() as patch, events:
        patch.setattr(expert_exchange, "count_rows", counted)
        bank = Bank(partial(_scaled, rank * NUM_EXPERTS // 2), NUM_EXPERTS, dist.group.WORLD)
        made = bank(tokens, indices, weights)
    return events.seen, made, _scaled(0, tokens, indices, weights)


def test_rows_are_sorted_before_their_numbers_are_read() -> None:
    for events, made, expected in run_ranks(_run, 2):
        torch.testing.assert_close(made, expected)
        start, end = events.index("counted"), events.index("read")
        assert {"argsort", "__getitem__"} <= set(events[start:end])
