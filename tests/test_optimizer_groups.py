"""Optimizers of ranks that have some parameters, or parts, have the groups of one process, or are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from meshwright.executor import parallelize
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, TiedNet, adamw, loss, plan_of, samples, tied_profile, what_is_said


def _by_shapes(named: Any) -> Optimizer:
    return SGD([{"params": [p], "lr": 0.1 / (p.shape[-1] if p.dim() > 1 else 1)} for _, p in named])


def _by_names(named: Any) -> Optimizer:
    return SGD([{"params": [p], "lr": 0.1 if "up" in name else 0.01} for name, p in named])


def _by_places(parameters: Any) -> Optimizer:
    return SGD([{"params": parameters[:-2]}, {"params": parameters[-2:], "lr": 0.1}], lr=0.01)


def _without_decay_of_tokens(named: Any) -> Optimizer:
    return SGD([{"params": [p], "weight_decay": 0.0 if "tokens" in name else 0.1} for name, p in named], lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "plan", "said"),
    [
        (_by_shapes, {"shard": 2}, "taken"),
        (_by_shapes, {"tensor": 2}, r"out.weight otherwise than where it is given all of it, and not a rank's part of"),
        (_by_names, {"tensor": 2}, "taken"),
        (adamw, {"tensor": 2}, "taken"),
        (_by_places, {"shard": 2}, "taken"),
        (_by_places, {"stages": (2, 2)}, "than where it is given all parameters of the model: it goes by how many"),
        (_by_names, {"stages": (2, 2)}, "taken"),
        (_without_decay_of_tokens, {"stages": (2, 2)}, "taken"),
    ],
)
def test_groups_by_the_shapes_of_parts_or_by_places_are_refused(make: Any, plan: dict[str, Any], said: str) -> None:
    assert all(said in found for found in run_ranks(what_is_said, 2, make, plan))


STEPS = 4


def _by_depth(named: Any) -> Optimizer:
    """A rate for each block, and no decay of embeddings: no group for what is not there."""
    rates = {"tokens": 0.02, "blocks.0": 0.01, "blocks.1": 0.005}
    groups = [{"params": [p for n, p in named if n.startswith(at)], "lr": lr} for at, lr in rates.items()]
    return AdamW([group for group in groups if group["params"]], weight_decay=0.1, eps=1e-4)


def _alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = TiedNet()
    optimizer = _by_depth(list(model.named_parameters()))
    scheduler, losses = StepLR(optimizer, 1, 0.7), []
    for step in range(STEPS):
        batch = torch.utils.data.default_collate(samples()[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        model.zero_grad()
        value = loss(model(batch[0]), batch)
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    return losses, dict(model.named_parameters())


def _in_two_plans(folder: Path) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Half of the steps in a pipeline whose ends are on one rank, the others in shards."""
    losses = []
    for stages, virtual, shard in (((1, 1, 1, 1), 2, 1), ((), 1, 2)):
        plan = plan_of(tied_profile(), stages=stages, virtual_stages=virtual, schedule="zb-v", shard=shard)
        trainer = parallelize(TiedNet, plan, _by_depth, loss=loss)
        scheduler = StepLR(trainer.optimizer, 1, 0.7)
        trainer.resume(folder, missing_ok=True, scheduler=scheduler)
        for _, batch in zip(range(STEPS // 2), trainer.loader(samples()), strict=False):
            losses.append(trainer.step(batch).loss)
            scheduler.step()
        trainer.save(folder, scheduler=scheduler)
        groups, state = len(trainer.optimizer.param_groups), trainer.full_state_dict()
        trainer.close()
    return losses, state, groups


@pytest.mark.slow
def test_groups_that_a_rank_has_nothing_of_are_there_and_follow_into_another_plan(tmp_path: Path) -> None:
    expected, parameters = _alone()

    found = run_ranks(_in_two_plans, 2, tmp_path / "run")

    assert [groups for _, _, groups in found] == [3, 3]
    assert found[0][0] == pytest.approx(expected, rel=1e-5)
    for name, value in parameters.items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-4, atol=1e-5, msg=name)
