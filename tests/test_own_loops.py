"""Loops that call forward_backward() and optimizer_step() themselves train as loss.backward() and a step would."""

from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.executor import parallelize
from support import slow
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, PLANS, TiedNet, adamw, loss, plan_of, samples, tied_profile

MORE: dict[str, dict[str, Any]] = {
    **PLANS,
    "ddp": {"replicate": 2},
    "tensor": {"tensor": 2},
    "shards": {"shard": 2},
    "zb-v": {"stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "zb-v"},
}


def smooth(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Another loss of the same output."""
    return output.square().mean()


def batches() -> list[Any]:
    return [torch.utils.data.default_collate(samples()[i * GLOBAL_BATCH : (i + 1) * GLOBAL_BATCH]) for i in range(4)]


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = TiedNet()
    optimizer = adamw(model.parameters())
    found = []
    for first in (0, 2):
        optimizer.zero_grad()
        for batch in batches()[first : first + 2]:
            value = loss(model(batch[0]), batch)
            (0.5 * value).backward()
            extra = smooth(model(batch[0]), batch)
            (0.1 * extra).backward()
            found += [value.item(), extra.item()]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found, {n: p.detach() for n, p in model.named_parameters()}


def by_plan(name: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **MORE[name]), adamw, loss=loss, max_grad_norm=1.0)
    shares = trainer.loader(samples)
    found = []
    for _ in range(2):
        for _ in range(2):
            share = next(shares)
            found.append(trainer.forward_backward(share, scale=0.5))
            found.append(trainer.forward_backward(share, scale=0.1, loss=smooth))
        metrics = trainer.optimizer_step()
    assert trainer.progress.steps == 2
    assert trainer.progress.samples == 4 * GLOBAL_BATCH
    return found, metrics.loss, trainer.full_state_dict()


@pytest.mark.parametrize("name", slow.but_these(MORE, ["ddp"]))
def test_gradients_add_up_as_in_one_process(name: str) -> None:
    losses, parameters = alone()
    ranks = plan_of(tied_profile(), **MORE[name]).degrees.num_devices

    found = run_ranks(by_plan, ranks, name) if ranks > 1 else [by_plan(name)]

    for own, total, _ in found:
        assert own == pytest.approx(losses, rel=1e-5)
        assert total == pytest.approx(0.5 * losses[4] + 0.1 * losses[5] + 0.5 * losses[6] + 0.1 * losses[7], rel=1e-5)
    for key, value in parameters.items():
        torch.testing.assert_close(found[0][2][key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_calls_in_the_wrong_order_are_refused() -> None:
    trainer = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss)
    share = next(trainer.loader(samples))

    with pytest.raises(ValueError, match=r"optimizer_step\(\) without gradients"):
        trainer.optimizer_step()
    trainer.forward_backward(share)
    with pytest.raises(ValueError, match=r"step\(\) after forward_backward\(\)"):
        trainer.step(share)


def ascending(name: str) -> list[float] | str:
    """Losses of a loop that goes up the gradient before each step's own (sharpness-aware minimization); or why not."""
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **MORE[name]), adamw, loss=loss)
    share = next(trainer.loader(samples))
    found = []
    for _ in range(2):
        found.append(trainer.forward_backward(share).item())
        trained = [p for p in trainer.model.parameters() if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
            before = [p.clone() for p in trained]
            for p in trained:
                p.add_(0.5 * p.grad / norm)
        trainer.optimizer.zero_grad()
        found.append(trainer.forward_backward(share).item())
        with torch.no_grad():
            for p, value in zip(trained, before, strict=True):
                p.copy_(value)
        try:
            trainer.optimizer_step()
        except ValueError as error:
            return str(error)
    return found


@pytest.mark.slow
def test_an_ascent_by_the_norm_of_all_gradients_is_that_of_one_process_or_refused() -> None:
    sharded, tensor = (run_ranks(ascending, 2, name) for name in ("shards", "tensor"))

    assert sharded[0] == pytest.approx(ascending("one"), rel=1e-5)
    assert all(str(said).startswith("parameters were written to between forward_backward()") for said in tensor)


def under_autocast(name: str) -> list[float]:
    """Gradients of two micro-batches, all under one autocast of the loop's own."""
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **MORE[name]), adamw, loss=loss)
    with torch.autocast("cpu", torch.bfloat16):
        trainer.step(next(trainer.loader(samples)))
    return [grad.norm().item() for grad in trainer.named_gradients().values()]


def test_an_autocast_around_the_loop_keeps_no_weights_of_earlier_steps_nor_of_evaluations() -> None:
    def trained(loop: Any, step: Any) -> list[float]:
        trainer = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss)
        losses = []
        with loop():
            for batch in islice(trainer.loader(samples), 2):
                with step():
                    trainer.evaluate([batch])
                with step():
                    losses.append(trainer.step(batch).loss)
        return losses + [grad.norm().item() for grad in trainer.named_gradients().values()]

    in_bf16 = partial(torch.autocast, "cpu", torch.bfloat16)

    assert trained(in_bf16, nullcontext) == trained(nullcontext, in_bf16)


@pytest.mark.slow
def test_a_step_under_an_autocast_has_the_gradients_of_all_micro_batches() -> None:
    assert run_ranks(under_autocast, 2, "shards")[0] == pytest.approx(under_autocast("one"), rel=0.02, abs=1e-4)
