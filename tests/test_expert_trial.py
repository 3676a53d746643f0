"""Banks of experts that are no sum of their parts are found and not spread; those that are spread say how many experts
they have to whoever asks."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.executor.parallel.expert_exchange import run_spread
from meshwright.planner.plan.legality import expert_rule
from meshwright.profiler.model.expert_trial import problem_of
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import Experts
from meshwright.profiler.model.trace import trace
from support.same_numbers import loss, next_tokens

COUNT, WIDTH, VOCABULARY = 4, 8, 32

Routed = Callable[["RoutedBank", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(bank, rows, expert of each, weight of each as a column) -> rows made."""


class RoutedBank(nn.Module):
    """Rows each through one expert, added up by token. make: what is done with them."""

    def __init__(self, make: Routed) -> None:
        super().__init__()
        self.num_experts, self.make = COUNT, make
        self.weight = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH))
        self.register_buffer("scale", torch.arange(1.0, COUNT + 1))
        self.register_buffer("seen", torch.zeros(COUNT))

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = tokens.repeat_interleave(experts.shape[1], 0)
        return self.make(self, rows, experts.flatten(), weights.flatten()[:, None]).view(*experts.shape, -1).sum(1)

    def through(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows[:, None], self.weight[experts])[:, 0].relu()


class MixtureNet(nn.Module):
    """One mixture. beside: what is made of its weights outside of the bank."""

    def __init__(self, make: Routed, beside: Callable[[torch.Tensor], torch.Tensor | int] | None = None) -> None:
        super().__init__()
        self.tokens, self.gate = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, COUNT)
        self.experts, self.head = RoutedBank(make), nn.Linear(WIDTH, VOCABULARY)
        self.beside = beside

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        weights, chosen = self.gate(x).flatten(0, 1).softmax(-1).topk(2)
        y = self.experts(x.flatten(0, 1), chosen, weights).view_as(x)
        return self.head(y if self.beside is None else y * self.beside(self.experts.weight))


def plain(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return bank.through(rows, experts) * weights


def sorted_first(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    order = experts.argsort(stable=True)
    return (bank.through(rows[order], experts[order]) * weights[order])[order.argsort()]


def numbered(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return plain(bank, rows, experts, weights) * (1 + experts[:, None])


def looked_up(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return plain(bank, rows, experts, weights) * bank.scale[experts, None]


def placed(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return plain(bank, rows, experts, weights) * (1 + torch.arange(len(rows), device=rows.device)[:, None] % 2)


def neighbours(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return plain(bank, rows, (experts + 1) % bank.num_experts, weights)


def mixed(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return plain(bank, rows - rows.mean(0), experts, weights)


def odd_and_even(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    y = plain(bank, rows, experts, weights)
    return torch.cat([y[:, :1] * (1 + experts[:, None] % 2), y[:, 1:]], 1)


def first_three(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    chosen = experts[:, None] == torch.arange(bank.num_experts)
    place = (chosen.cumsum(0) * chosen).sum(1, keepdim=True)
    return plain(bank, rows, experts, weights) * (place <= 3)


def detached(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return bank.through(rows, experts).detach() * weights + plain(bank, rows, experts, weights.detach())


def dropped(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return plain(bank, nn.functional.dropout(rows), experts, weights)


def counted(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        bank.seen.index_add_(0, experts, torch.ones_like(weights[:, 0]))
    return plain(bank, rows, experts, weights)


def counted_by_all(bank: RoutedBank, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return plain(bank, rows, experts, weights) * bank.weight.view(COUNT, WIDTH, WIDTH).shape[0]


BANK = Experts(
    module="experts", count=COUNT, parameters=("experts.weight",), routed=(0.0,) * 4, called="routed",
    attributes=("num_experts",),
)  # fmt: skip


def problem(make: Routed, first: int = 0) -> str:
    """first: number of the first expert that is chosen."""
    chosen = first + torch.arange(12).view(6, 2) % COUNT
    return problem_of(RoutedBank(make), BANK, ((torch.randn(6, WIDTH), chosen), {"weights": torch.rand(6, 2)}))


@pytest.mark.parametrize("make", [plain, sorted_first])
def test_banks_whose_parts_make_what_the_whole_makes_have_no_problem(make: Routed) -> None:
    assert problem(make) == ""


@pytest.mark.parametrize("make", [numbered, looked_up, placed, neighbours, mixed, odd_and_even, first_three, detached])
def test_banks_whose_parts_make_other_numbers_are_found(make: Routed) -> None:
    assert problem(make).startswith("makes other numbers in parts")


def test_banks_that_count_what_each_expert_gets_are_found() -> None:
    assert problem(counted).startswith("leaves something behind in its module")


def test_banks_that_do_not_run_with_fewer_experts_are_found() -> None:
    assert problem(counted_by_all).startswith("does not run with a part of its experts (RuntimeError")


def test_banks_that_are_given_numbers_of_no_expert_are_found() -> None:
    assert problem(plain, first=-1).startswith("is given numbers of experts outside of 0 .. 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "beside", "told"),
    [
        (plain, None, "None"),
        (numbered, None, "RoutedBank makes other"),
        (dropped, None, "RoutedBank draws random numbers (dropout)"),
        (plain, torch.Tensor.mean, "that are read outside"),
        (plain, len, "whose size is asked for outside"),
    ],
)
def test_a_profile_says_why_experts_are_not_spread(
    make: Routed, beside: Callable[[torch.Tensor], torch.Tensor | int] | None, told: str
) -> None:
    profile = trace(load_model(partial(MixtureNet, make, beside), batch=next_tokens(VOCABULARY), loss=loss))

    assert told in str(expert_rule(profile, 2))


def test_a_spread_bank_tells_all_but_itself_how_many_experts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    module = RoutedBank(lambda bank, rows, *_: told.append(bank.num_experts) or rows)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    run_spread(module, BANK, None)  # type: ignore[arg-type]

    module.forward.forward(torch.ones(3, WIDTH), torch.zeros(3, 1), torch.ones(3, 1))

    assert (told, module.num_experts) == ([2], COUNT)
