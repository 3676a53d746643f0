"""Gradients of columns' weights beside the sum of their input's gradient: the order, and the same numbers."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.executor.parallel import delayed_weights, tensor_collectives
from meshwright.executor.parallel.delayed_weights import DelayedWeights
from meshwright.executor.parallel.tensor_collectives import Alike, PendingCollective, call


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights' gradients are put off in small models, too."""
    monkeypatch.setattr(delayed_weights, "LEAST_BYTES", 0)


class Conv1D(nn.Module):
    """As transformers has it: the weight is [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x times the weight."""
        return x @ self.weight


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on a lone rank, whose sum over ranks brings what it is given."""
    events: list[str] = []

    class Work:
        def wait(self) -> None:
            events.append("waited")

    def all_reduce(x: torch.Tensor, group: None, async_op: bool = False) -> Work | None:
        events.append("sum begins" if async_op else "sum")
        return Work() if async_op else None

    monkeypatch.setattr(tensor_collectives.dist, "all_reduce", all_reduce)
    return events


def _columns() -> tuple[nn.Linear, Conv1D]:
    torch.manual_seed(0)
    return nn.Linear(4, 6, bias=False), Conv1D()


def _sum(x: torch.Tensor, pending: PendingCollective | None) -> torch.Tensor:
    return call(Alike, x, None, pending)


def _forward(columns: tuple[nn.Module, ...], x: torch.Tensor, delayed: DelayedWeights) -> torch.Tensor:
    entered = delayed.enter(x, _sum)
    products = []
    for column in columns:
        y = entered.product(column)
        products.append(column(entered.tensor) if y is None else y)
    return torch.stack([(y**2).sum() for y in products]).sum()


def _gradients(columns: tuple[nn.Module, ...], delayed: DelayedWeights) -> list[torch.Tensor]:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    parameters: list[Any] = [c.weight for c in columns]
    return list(torch.autograd.grad(_forward(columns, x * 2, delayed), [x, *parameters]))


def test_weight_gradients_are_computed_while_the_sum_is_under_way(events: list[str]) -> None:
    columns = linear, transposed = _columns()
    linear.weight.register_post_accumulate_grad_hook(lambda _: events.append("weight of linear"))
    transposed.weight.register_post_accumulate_grad_hook(lambda _: events.append("weight of Conv1D"))
    x = torch.randn(2, 4, requires_grad=True)

    _forward(columns, x * 2, DelayedWeights(columns)).backward()

    assert [events[0], *sorted(events[1:-1]), events[-1]] == [
        "sum begins",
        "weight of Conv1D",
        "weight of linear",
        "waited",
    ]


def test_gradients_are_the_same_to_the_bit(events: list[str]) -> None:
    columns = _columns()

    for own, other in zip(
        _gradients(columns, DelayedWeights(columns)), _gradients(columns, DelayedWeights([])), strict=True
    ):
        assert torch.equal(own, other)
    assert events == ["sum begins", "waited", "sum"]


def test_a_gradient_of_something_else_before_does_not_count_twice(events: list[str]) -> None:
    columns = _columns()
    x = torch.randn(2, 4, requires_grad=True)
    loss = _forward(columns, x * 2, DelayedWeights(columns))
    (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)

    loss.backward()

    (expected,) = torch.autograd.grad(_forward(columns, x * 2, DelayedWeights([])), columns[0].weight)
    torch.testing.assert_close(x.grad, of_x, rtol=0.0, atol=0.0)
    torch.testing.assert_close(columns[0].weight.grad, expected, rtol=0.0, atol=0.0)


def test_a_column_that_runs_twice_has_both_gradients(events: list[str]) -> None:
    columns = _columns()[:1] * 2

    for own, other in zip(
        _gradients(columns, DelayedWeights(columns)), _gradients(columns, DelayedWeights([])), strict=True
    ):
        torch.testing.assert_close(own, other)


def test_nothing_is_put_off_where_it_would_be_another_product(events: list[str]) -> None:
    linear, _ = _columns()
    delayed, x = DelayedWeights([linear, nn.Conv2d(4, 4, 1)]), torch.randn(2, 4, requires_grad=True)

    with torch.no_grad():
        assert not delayed.enter(x, _sum).weights
    with torch.autocast("cpu", torch.bfloat16):
        assert not delayed.enter(x, _sum).weights
    assert not delayed.enter(x.detach(), _sum).weights
    delayed_weights.LEAST_BYTES = x.nbytes + 1
    assert not delayed.enter(x, _sum).weights
    delayed_weights.LEAST_BYTES = x.nbytes
    linear.weight.requires_grad_(False)
    assert not delayed.enter(x, _sum).weights
    linear.weight.requires_grad_(True)
    assert list(delayed.enter(x, _sum).weights) == [linear]
