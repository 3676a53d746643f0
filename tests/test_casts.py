"""Tensor parallelism in bf16 on one data rank gives the numbers of fully_shard's mixed precision, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_random_numbers import VOCABULARY, DropNet, profile_of
from test_whole_matrices import muon
from torch import nn

from meshwright.executor import apply, parallelize
from meshwright.executor.parallel import mesh
from meshwright.executor.parallel.casts import Casts
from meshwright.executor.parallel.optimizers import MakeOptimizer
from meshwright.planner.plan.document import Plan
from support import slow
from support.ranks import run_ranks
from support.same_numbers import Case, Numbers, numbers_of, samples, trainer_of
from support.same_numbers import plan_of as plan_of_case
from support.tied_net import TiedNet, adamw, loss, plan_of, tied_profile
from support.tied_net import samples as tied_samples

CASES: dict[str, Case | MakeOptimizer] = {
    "tied": adamw,
    "tied, Muon": muon,
    "dropout, selective": Case("drop", tensor=2, num_microbatches=4, recompute="selective", precision="bf16"),
    "sequence, full": Case("drop", tensor=2, more={"sequence": True}, recompute="full", precision="bf16"),
    "reduced in every": Case("drop", tensor=2, more={"gradient_sync": "every"}, precision="bf16"),
}


def in_bf16(**degrees: Any) -> Plan:
    """A plan of the net whose embedding is its head, too."""
    plan = plan_of(tied_profile(), **degrees)
    return plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "bf16"})})


def frozen() -> nn.Module:
    model = TiedNet()
    model.blocks[0].attention.qkv.weight.requires_grad_(False)
    return model


def train(case: Case | MakeOptimizer, wrapped: bool) -> tuple[str, Numbers, float]:
    """(mechanism, numbers of three steps, loss of an evaluation). wrapped: by fully_shard."""
    if wrapped:
        mesh.mechanism = apply.mechanism = lambda plan: "fsdp"
    if not isinstance(case, Case):
        trainer = parallelize(frozen, in_bf16(tensor=2), case, loss=loss, max_grad_norm=0.5)
        given = tied_samples()[:24]
    else:
        trainer = trainer_of(DropNet, plan_of_case(case, profile_of("drop")))
        given = samples(VOCABULARY, 3)
    found = numbers_of(trainer, given)
    evaluated = trainer.evaluate(trainer.loader(given, training=False))["loss"]
    return trainer._applied.mechanism, found, evaluated


@pytest.mark.parametrize("name", slow.but_first(CASES, 1))
def test_numbers_are_those_of_fully_shard(name: str) -> None:
    mechanism, found, evaluated = run_ranks(train, 2, CASES[name], False)[0]
    wrapped, expected, evaluated_there = run_ranks(train, 2, CASES[name], True)[0]

    assert (mechanism, wrapped) == ("cast", "fsdp")
    assert (found.losses, found.norms, evaluated) == (expected.losses, expected.norms, evaluated_there)
    for kind in ("gradients", "state"):
        own, theirs = getattr(found, kind), getattr(expected, kind)
        assert own.keys() == theirs.keys()
        assert [name for name, value in own.items() if not torch.equal(value, theirs[name])] == []


def goes_on(degrees: dict[str, int], folder: Path, steps: int) -> list[float]:
    """Losses of so many steps from where a checkpoint left off, if there is one; saved at the end."""
    trainer = parallelize(TiedNet, in_bf16(**degrees), adamw, loss=loss)
    trainer.resume(folder, missing_ok=True)
    found = [trainer.step(batch).loss for _, batch in zip(range(steps), trainer.loader(tied_samples), strict=False)]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    trainer.save(folder)
    trainer.close()
    return found


@pytest.mark.slow
def test_a_run_goes_on_under_fully_shard_and_back(tmp_path: Path) -> None:
    (expected, _) = run_ranks(goes_on, 2, {"tensor": 2}, tmp_path / "straight", 6)

    found = [
        loss for degrees in ({"tensor": 2}, {"shard": 2}, {"tensor": 2})
        for loss in run_ranks(goes_on, 2, degrees, tmp_path / "run", 2)[0]
    ]  # fmt: skip

    assert found == pytest.approx(expected, rel=2**-7)  # losses of bf16 logits


def test_what_recurs_computes_with_the_copies() -> None:
    torch.manual_seed(0)
    module, given = nn.LSTM(4, 4), torch.randn(3, 2, 4, dtype=torch.bfloat16)
    alone = nn.LSTM(4, 4)
    alone.load_state_dict(module.state_dict())
    alone.bfloat16()

    with Casts(module, torch.bfloat16).in_place():
        found = module(given)[0]
        found.sum().backward()

    expected = alone(given)[0]
    expected.sum().backward()
    assert torch.equal(found, expected)
    for own, other in zip(module.parameters(), alone.parameters(), strict=True):
        assert own.dtype == torch.float32 == own.grad.dtype  # type: ignore[union-attr]
        assert torch.equal(own.grad, other.grad.float())  # type: ignore[arg-type, union-attr]
    assert module(torch.randn(3, 2, 4))[0].dtype == torch.float32
