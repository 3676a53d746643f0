"""Parameters are divided along a dim that the degree divides where dim 0 would be mostly padding; numbers are equal."""

import functools
import os
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from meshwright.executor import parallelize
from meshwright.planner.cost.sharding import padded_elements, shard_dim
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.ranks import run_ranks
from support.synthetic import cluster

os.environ.setdefault("OMP_NUM_THREADS", "1")

WIDTH, BANK, INNER = 3, 3, 8
GLOBAL_BATCH = 4
NUM_STEPS = 2


@pytest.mark.parametrize(
    ("shape", "degree", "dim"),
    [
        ((4096, 4096), 64, 0),
        ((50257, 768), 8, 0),
        ((8, 14336, 4096), 64, 1),
        ((1, 1, 1024), 16, 2),
        ((1, 197, 1024), 8, 2),
        ((3, 5), 2, 0),
        ((10,), 64, 0),
        ((7, 9), 1, 0),
    ],
)
def test_dim_zero_is_divided_unless_padding_wastes_a_tenth(shape: tuple[int, ...], degree: int, dim: int) -> None:
    assert shard_dim(shape, degree) == dim


@pytest.mark.parametrize(
    ("shape", "degree", "elements"),
    [
        ((4096, 4096), 64, 4096 * 4096),
        ((50257, 768), 8, 50264 * 768),
        ((8, 14336, 4096), 64, 8 * 14336 * 4096),
        ((10,), 64, 64),
        ((3, 5), 2, 4 * 5),
        ((3, 5), 1, 15),
        ((), 1, 1),
    ],
)
def test_padding_is_to_a_multiple_of_the_degree(shape: tuple[int, ...], degree: int, elements: int) -> None:
    assert padded_elements(shape, degree) == elements


class Block(nn.Module):
    """A bank of three matrices and an MLP, three wide: two ranks divide neither along dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.randn(BANK, WIDTH, INNER) / 4)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, around a residual."""
        x = x + torch.einsum("bsw,kwi->bsi", x, self.bank)[..., :WIDTH]
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _build() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 6, WIDTH), torch.randn(size, 6, 1)


def _loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (output - batch[1]).square().mean()


@functools.cache
def _loaded() -> LoadedModel:
    return load_model(_build, batch=_batch, loss=_loss)


@dataclass(frozen=True)
class Numbers:
    """Final parameters, and the shapes of what this rank held of them."""

    state: dict[str, torch.Tensor]
    held: dict[str, tuple[int, ...]]


@functools.cache
def _profile() -> ModelProfile:
    return trace(_loaded())


def _plan(tensor: int, reshard: bool) -> Plan:
    profile = _profile()
    shape = Shape(1, 2, tensor, 1, 1, 2)
    training = TrainingSpec(global_batch=GLOBAL_BATCH, precision="fp32")
    options = [LayerOption(reshard=reshard) for _ in profile.layers]
    return make_plan(profile, cluster(1, 2 * tensor), training, shape, [options])


def _whole_batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return _batch(GLOBAL_BATCH)


def _train(plan: Plan) -> Numbers:
    trainer = parallelize(_build, plan, lambda ps: torch.optim.SGD(ps, lr=0.1), loss=_loss, seed=0)
    share = slice(trainer.data_rank * 2, trainer.data_rank * 2 + 2)
    own = tuple(t[share] for t in _whole_batch())
    for _ in range(NUM_STEPS):
        trainer.step(own)
    held = {name: tuple(p.to_local().shape) for name, p in trainer.model.named_parameters()}
    return Numbers(trainer.full_state_dict(), held)


@functools.cache
def _reference() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = _build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = _whole_batch()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        _loss(model(batch[0]), batch).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("tensor", "reshard"), slow.but_first([(1, True), (1, False), (2, True)], 1))
def test_parameters_divided_along_other_dims_train_to_the_numbers_of_one_process(tensor: int, reshard: bool) -> None:
    ranks = run_ranks(_train, 2 * tensor, _plan(tensor, reshard))

    torch.testing.assert_close(ranks[0].state, dict(_reference()), rtol=1e-5, atol=1e-6)
    assert all(rank.held["0.bank"] == (BANK, WIDTH, INNER // 2) for rank in ranks)
    assert all(rank.held["0.down.weight"] == (WIDTH, INNER // (2 * tensor)) for rank in ranks)
