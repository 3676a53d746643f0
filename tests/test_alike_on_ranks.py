"""What ranks do not agree on, and a loss that is none, is told on every rank before it trains something else."""

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, default_collate

from meshwright.executor import parallelize
from meshwright.executor.parallel.tensor_forwards import embedding_forward
from meshwright.executor.parallel.tensor_loss import RanksOfGroup
from meshwright.profiler.semantics.logit_shards import shard_logits
from support import slow
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, TiedNet, adamw, loss, plan_of, samples, tied_profile

PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"replicate": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"stages": (2, 2)},
    "interleaved": {"stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved"},
    "shards": {"shard": 2},
}

ONE = TiedNet()

Act = Callable[[str], Any]


def trainer_of(plan: str, **given: Any) -> Any:
    named = {"optimizer": adamw, "loss": loss} | given
    return parallelize(named.pop("model", TiedNet), plan_of(tied_profile(), **PLANS[plan]), **named)


def whole(seed: int = 0) -> Any:
    """A share for those that take the whole batch."""
    return default_collate(samples()[seed * GLOBAL_BATCH : (seed + 1) * GLOBAL_BATCH])


def told(plan: str, acts: list[Act]) -> list[str]:
    """What each of them raises."""
    found = []
    for act in acts:
        try:
            act(plan)
        except (ValueError, RuntimeError, TypeError) as error:
            found.append(str(error))
        else:
            found.append("nothing")
    dist.barrier()  # rank 0 holds the store that the other may still read
    return found


def other_rates(plan: str) -> None:
    rate = 1e-3 * (1 + dist.get_rank())
    trainer_of(plan, optimizer=lambda p: torch.optim.AdamW(p, lr=rate))


def shuffled_on_one_rank(plan: str) -> None:
    trainer = trainer_of(plan)
    trainer.step(next(trainer.loader(samples(), shuffle=dist.get_rank() == 1)))


def own_part_of_the_samples(plan: str) -> None:
    trainer = trainer_of(plan)
    trainer.step(next(trainer.loader(samples()[dist.get_rank() * 20 :])))


def other_rates_later(plan: str) -> None:
    trainer = trainer_of(plan)
    shares = trainer.loader(samples)
    trainer.step(next(shares))
    for group in trainer.optimizer.param_groups:
        group["lr"] /= 1 + dist.get_rank()  # as ReduceLROnPlateau, which was given this rank's own loss
    trainer.step(next(shares))


def doubled_on_one_rank(plan: str) -> None:
    trainer = trainer_of(plan)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1 + dist.get_rank())
    trainer.step(next(trainer.loader(samples)))


def another_head(plan: str) -> None:
    trainer = trainer_of(plan)
    trainer.model.head.weight = nn.Parameter(torch.zeros_like(trainer.model.head.weight))
    trainer.step(next(trainer.loader(samples)))


def own_samples(plan: str) -> None:
    trainer_of(plan).step(whole(dist.get_rank()))


def own_samples_later(plan: str) -> None:
    trainer = trainer_of(plan)
    trainer.step(whole())
    trainer.step(whole(dist.get_rank()))


def own_scale(plan: str) -> None:
    trainer = trainer_of(plan)
    trainer.forward_backward(whole(), scale=1.0 + dist.get_rank())
    trainer.optimizer_step()


def own_length(plan: str) -> None:
    trainer_of(plan).step(tuple(x[:, : 8 - dist.get_rank()] for x in whole()))


def clipped_by_hand(plan: str) -> None:
    trainer = trainer_of(plan)
    trainer.forward_backward(whole())
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3)
    trainer.optimizer_step()


def by_hand(plan: str) -> None:
    trainer = trainer_of(plan)
    loss(trainer.model(whole()[0]), whole()).backward()
    trainer.optimizer.step()


def whole_weights(plan: str, strict: bool = False) -> None:
    trainer_of(plan).model.load_state_dict(TiedNet().state_dict(), strict=strict)


def own_weights(plan: str) -> None:
    model = trainer_of(plan).model
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def weights_of_the_first_rank(plan: str) -> None:
    trainer = trainer_of(plan)
    found = trainer.full_state_dict()
    if trainer.mesh.rank == 0:
        raise ValueError("rank 0 has them")
    trainer.model.load_state_dict(found, strict=False)


def copied(plan: str) -> None:
    """Averages of weights begin with a copy of the model."""
    trainer = trainer_of(plan)
    shares = trainer.loader(samples())
    trainer.step(next(shares))
    average = AveragedModel(trainer.model)
    trainer.step(next(shares))
    average.update_parameters(trainer.model)
    now, kept = (_parts(module.state_dict()) for module in (trainer.model, average.module))
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {name: t.tolist() for name, t in now.items()}
    assert not any(kept[name].data_ptr() == tensor.data_ptr() for name, tensor in now.items())


def _parts(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}


def hooked_late(plan: str) -> None:
    trainer = trainer_of(plan)
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    trainer.step(next(trainer.loader(samples)))


def hooked(plan: str) -> None:
    trainer = trainer_of(plan)
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    trainer.step(next(trainer.loader(samples)))


EVERY: dict[str, list[tuple[Act, str]]] = {
    "ddp": [
        (lambda plan: trainer_of(plan, seed=dist.get_rank()), r"rank 1 was given seed=1, rank 0 seed=0"),
        (other_rates, r"lr=0.002 on rank 1 and with lr=0.001 on rank 0"),
        (shuffled_on_one_rank, r"rank 1 called loader with 160 samples, shuffle=True, rank 0 with 160 samples, shuff"),
        (own_part_of_the_samples, r"rank 1 called loader with 140 samples"),
        (other_rates_later, r"step 2: the optimizer's options"),
        (doubled_on_one_rank, r"hold copies of it"),
        (another_head, r"would not be trained"),
        (by_hand, r"optimizer.step\(\) was called by hand"),
        (lambda plan: whole_weights(plan, strict=True), r"nothing"),
        (weights_of_the_first_rank, r"given nothing on this rank|rank 0 has them"),
    ],
    "tensor": [
        (own_samples, r"ranks 0 and 1 work on the same samples, but batch\[0\] holds other numbers"),
        (own_samples_later, r"step 2: ranks that work on the same samples"),
        (own_scale, r"step 1: ranks that work on the same samples .* or another scale="),
        (own_length, r"batch\[0\] is torch.int64 of \(8, 8\) on rank 0 and batch\[0\] torch.int64 of \(8, 7\)"),
        (clipped_by_hand, r"max_grad_norm"),
        (whole_weights, r"given blocks.0.attention.qkv.weight of \[48, 16\], but this rank holds a part"),
    ],
    "pipeline": [
        (own_samples, r"holds other numbers"),
        (own_scale, r"another scale="),
        (by_hand, r"trainer.step"),
        (whole_weights, r"given tokens.weight of \[30, 16\], but .* parallelize\(weights=...\)"),
        (own_weights, r"nothing"),
        (copied, r"nothing"),
    ],
    "interleaved": [
        (whole_weights, r"given .* but this rank holds a part .* copies of trainer.model.state_dict\(\) go back"),
        (own_weights, r"nothing"),
        (copied, r"nothing"),
        (lambda plan: trainer_of(plan).model(whole()[0]), r"a stage of a pipeline, which cannot be called by itself"),
    ],
    "shards": [
        (hooked, r"tokens.weight was given a hook .* which sharded gradients never call"),
        (copied, r"nothing"),
    ],
}


@pytest.mark.parametrize("plan", slow.but_these(EVERY, {"ddp"}))
def test_ranks_that_do_not_agree_are_told(plan: str) -> None:
    acts, words = zip(*EVERY[plan], strict=True)

    found = run_ranks(told, 2, plan, acts)

    for rank in found:
        for said, expected in zip(rank, words, strict=True):
            assert re.search(expected, said), (expected, said)


def out_of_range() -> list[str]:
    """What a loss and an embedding say of targets and tokens that no rank has."""
    ranks: Any = RanksOfGroup(dist.group.WORLD)  # type: ignore[arg-type]
    logits, table = shard_logits(torch.zeros(2, 4), ranks), nn.Embedding(4, 2)
    embed: Any = embedding_forward(table, dist.group.WORLD)  # type: ignore[arg-type]

    def both(numbers: tuple[int, int]) -> list[Act]:
        return [
            lambda plan: nn.functional.cross_entropy(logits, torch.tensor(numbers)),
            lambda plan: embed(torch.tensor(numbers)),
        ]

    return told("", [*both((1, -100)), *both((7, 0)), *both((1, 8))])


def test_numbers_that_no_rank_has_are_refused_as_on_one_device() -> None:
    for loss_ignored, token_ignored, *inside, target, token in run_ranks(out_of_range, 2):
        assert loss_ignored == "nothing"
        assert inside == ["nothing", "nothing"]
        assert "targets of the loss are out of range: there are 0 .. 7" in target
        assert "tokens that the embedding is asked for are out of range" in token
        assert "out of range" in token_ignored


def thawed(plan: str) -> list[float]:
    """Losses of a model whose embedding is trained from the second step on, and whose head no more."""

    def frozen() -> nn.Module:
        model = TiedNet()
        model.blocks[0].requires_grad_(False)
        return model

    trainer = trainer_of(plan, model=frozen)
    losses = []
    for share, _ in zip(trainer.loader(samples), range(3), strict=False):
        losses.append(trainer.step(share).loss)
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad_("blocks.1" not in name)
    return losses


@pytest.mark.slow
def test_replicas_follow_what_is_frozen_between_steps() -> None:
    assert run_ranks(thawed, 2, "ddp")[1] == pytest.approx(thawed("one"), rel=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": lambda output, batch: (loss(output, batch), output)}, "returned a tuple, the first a Tensor"),
        ({"loss": lambda output, batch: loss(output, batch).item()}, "returned a float"),
        ({"loss": lambda output, batch: output.sum(-1)}, r"returned a tensor of shape \(4, 8\)"),
        ({"loss": lambda output, batch: loss(output, batch).detach()}, "depends on no trained parameter"),
        ({"weight": lambda batch: torch.ones(3)}, r"weight=... returned a tensor of shape \(3,\)"),
        ({"weight": lambda batch: -1}, "at least 0"),
        ({"optimizer": torch.optim.LBFGS}, "asks for the loss again"),
        ({"optimizer": adamw(TiedNet().parameters())}, "is made already"),
        ({"optimizer": None}, "optimizer=None: give the function that makes it"),
        ({"model": TiedNet()}, "is built already"),
        ({"model": lambda: ONE}, "returned the same TiedNet twice"),
        ({"model": lambda: None}, "returned None"),
        ({"max_grad_norm": 0.0}, "above 0"),
        ({"seed": None}, "whole number"),
    ],
)
def test_what_cannot_train_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer_of("one", **given).step(whole())


def test_groups_that_an_optimizer_gets_later_are_stepped_or_refused() -> None:
    trainer = trainer_of("one", optimizer=lambda p: [SGD(p[:1], lr=0.1), SGD(p[1:-1], lr=0.1)])
    last = list(trainer.model.parameters())[-1]
    before = last.detach().clone()

    with pytest.raises(ValueError, match=r"say which of them .*optimizers\[0\]"):
        trainer.optimizer.add_param_group({"params": [last]})
    trainer.optimizer.optimizers[1].add_param_group({"params": [last]})
    trainer.step(whole())
    assert len(trainer.optimizer.param_groups) == 3
    assert not torch.equal(last, before)

    trainer.optimizer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match=r"shape \[3\] was added to the optimizer that is none of the model's"):
        trainer.step(whole())


def test_a_group_that_an_optimizer_got_later_is_there_before_its_state_is_resumed(tmp_path: Path) -> None:
    def begun() -> tuple[Any, dict[str, Any]]:
        trainer = trainer_of("one", optimizer=lambda p: SGD(p[:-1], lr=0.1, momentum=0.9))
        return trainer, {"params": list(trainer.model.parameters())[-1:]}

    trainer, group = begun()
    trainer.optimizer.add_param_group(group)
    trainer.step(whole())
    trainer.save(tmp_path)
    trainer.close()
    expected = trainer.optimizer.state[group["params"][0]]["momentum_buffer"]

    trainer, group = begun()
    with pytest.raises(ValueError, match=r"has a state for .* in no parameter group here.* before resume\(\)"):
        trainer.resume(tmp_path)
    trainer.optimizer.add_param_group(group)
    trainer.resume(tmp_path)
    trainer.close()

    torch.testing.assert_close(trainer.optimizer.state[group["params"][0]]["momentum_buffer"], expected)


def test_no_group_is_added_where_the_optimizer_steps_copies() -> None:
    plan = plan_of(tied_profile(), on_host=True)
    trainer = parallelize(TiedNet, plan, lambda p: SGD(p[:-1], lr=0.1), loss=loss)
    trainer.optimizer.add_param_group({"params": list(trainer.model.parameters())[-1:]})

    with pytest.raises(ValueError, match=r"blocks.1.down.bias was added .* copies on the host"):
        trainer.step(whole())


def test_a_step_needs_gradients() -> None:
    trainer = trainer_of("one")

    with torch.inference_mode(), pytest.raises(ValueError, match="no_grad"):
        trainer.step(whole())


def splits_itself(plan: str) -> list[int]:
    """How often it is said that an iterable leaves out the other rank's samples: of one that does, and one that does
    not."""
    told: list[str] = []
    logging.getLogger("meshwright").addFilter(lambda record: told.append(record.getMessage()) or True)
    found = []
    for own in (slice(dist.get_rank(), None, 2), slice(None)):
        trainer = trainer_of(plan)
        trainer.step(next(trainer.loader(partial(iter, samples()[own]))))
        found.append(sum("begins with another sample on rank 1 than on rank 0" in each for each in told))
        told.clear()
    dist.barrier()
    return found


@pytest.mark.slow
def test_an_iterable_that_splits_itself_by_rank_is_told() -> None:
    assert run_ranks(splits_itself, 2, "ddp")[0] == [1, 0]


def test_a_sum_over_samples_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of("one", loss=lambda output, batch: loss(output, batch) * len(batch[0]))

    with caplog.at_level(logging.WARNING, logger="meshwright"):
        trainer.step(whole())
        trainer.step(whole())

    assert [record.message for record in caplog.records if "1/2 of what one device" in record.message] != []
    assert sum("twice the loss" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (hooked, "with the gradient of one micro-batch of one rank"),
        (hooked_late, "after each micro-batch with what this rank has of the gradient"),
    ],
)
def test_a_hook_that_is_given_a_part_of_a_gradient_is_told(
    act: Act, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        act("one")

    assert any(words in record.message for record in caplog.records)


def test_loaders_that_give_nothing_are_told() -> None:
    trainer = trainer_of("one")
    used_up = iter(samples()[:GLOBAL_BATCH])

    with pytest.raises(ValueError, match="whose items are batches"):
        next(trainer.loader(DataLoader(samples(), batch_size=2)))
    with pytest.raises(ValueError, match="found 3 samples, a global batch has 8"):
        next(trainer.loader(samples()[:3]))
    with pytest.raises(ValueError, match="used up"):
        [list(trainer.loader(used_up)) for _ in range(2)]
    with pytest.raises(ValueError, match="no batches"):
        trainer.evaluate([])


def test_submodules_that_are_built_in_evaluation_mode_stay_so() -> None:
    def partly() -> nn.Module:
        model = TiedNet()
        model.norm.eval()
        return model

    trainer = trainer_of("one", model=partly)

    assert not trainer.model.norm.training
    assert trainer.model.head.training
    assert trainer_of("one", model=lambda: TiedNet().eval()).model.norm.training
