"""Losses that couple samples, count their calls, read or train what is not the model's, or are no number."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.profiler.model.trace import trace
from support.habits import WIDTH, habit, linear, pairs, planned, run


class Towers(nn.Module):
    """Two views of a sample are to be nearer to each other than to those of other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(linear(), nn.Tanh(), linear(8))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.tower(a)) @ functional.normalize(self.tower(b)).T * 4


def _own_pairs(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(output, torch.arange(len(output)))


def test_a_loss_that_reads_a_model_by_itself_is_refused() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Sequential(linear(), nn.Tanh(), linear()))
        return made[-1]

    def penalised(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return functional.mse_loss(output, batch[1]) + made[-1][0].weight.square().sum()  # type: ignore[index]

    with pytest.raises(ValueError, match=r"reads 0\.\w+, which is not in the output, from a model that it holds"):
        trace(habit(build, loss=penalised))


def test_what_a_loss_would_train_by_itself_is_told() -> None:
    centre = nn.Parameter(torch.zeros(WIDTH))
    loaded = habit(linear, loss=lambda output, batch: (output - batch[1] - centre).square().mean())

    assert any("the loss would train a tensor of [32] of its own" in note for note in trace(loaded).told)
    assert not any("the loss would train" in note for note in trace(habit(linear)).told)


class WarmingUp:
    """A loss that counts its calls and grows with them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        self.calls += 1
        return functional.mse_loss(output, batch[1]) * min(1.0, self.calls / 100)


_CALLS = [0]


def warming_up(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """The same, which counts them in its file."""
    _CALLS[0] += 1
    return functional.mse_loss(output, batch[1]) * min(1.0, _CALLS[0] / 100)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [WarmingUp(), warming_up])
def test_a_loss_that_counts_its_calls_couples_no_samples_and_counts_on_each_rank(loss: Any) -> None:
    loaded = habit(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), loss=loss)

    assert not trace(loaded).coupling
    assert _CALLS == [0]
    report = run(loaded, data_replicate=2, micro_batch=2)
    assert report.ok, report.lines


def test_a_loss_over_pairs_of_samples_is_not_split_unless_the_user_says_so() -> None:
    loaded = habit(Towers, loss=_own_pairs)

    with pytest.raises(ValueError, match=r"legal: micro_batch: the loss couples the samples .*--pin micro_batch"):
        planned(loaded)

    plan = planned(loaded, micro_batch=4)

    assert (plan.micro_batch, plan.degrees.data) == (4, 2)


def test_verify_tells_what_splitting_changes_from_what_the_plan_does() -> None:
    report = run(habit(Towers, loss=_own_pairs), micro_batch=2)

    assert report.ok
    assert report.splitting is not None
    assert report.splitting.what == "loss of step 1"
    assert report.splitting.relative > 0.1
    assert "that splits its batch alike" in report.lines[-1]


def test_batch_norms_are_no_coupling_that_a_plan_has_to_keep() -> None:
    norm = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())

    assert trace(habit(lambda: norm)).coupling == ""


def test_a_loss_that_adds_up_its_samples_is_told_from_one_that_couples_them() -> None:
    def added(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return functional.mse_loss(output, batch[1], reduction="sum")

    said = trace(habit(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), loss=added)).coupling

    assert "is the sum of its halves' and not their mean; let the loss be a mean over samples" in said


def test_a_mean_over_the_batch_couples() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            out: torch.Tensor = self.second(h - h.mean(0))
            return out

    assert "the loss of 4 samples is" in trace(habit(Centred)).coupling


class Hiding(nn.Module):
    """Draws which values are hidden, and returns the mean of what it makes of those."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.rand_like(x) < 0.3
        return self.linear(x.masked_fill(hidden, 0.0))[hidden.nonzero(as_tuple=True)].square().mean()


def test_a_loss_that_is_no_number_in_one_process_is_told_and_not_laid_to_the_plan() -> None:
    loaded = habit(Hiding, batch=lambda size: pairs(size)[0], loss=None)

    report = run(loaded, data_replicate=2)

    assert report.failure is not None
    assert re.match("the loss of step 1 is nan in one process, where all that the model draws is one", report.failure)
