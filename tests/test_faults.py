"""Faults: whatever happens to one rank, all end soon, and one message names it; and what is refused or explained."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.faults import kill
from benchmarks.faults.launched import Ending, launch
from meshwright.executor import faults, parallelize, watch
from meshwright.executor.faults import DeviceMemory, NonFiniteError, out_of_memory_message
from meshwright.planner.cost.software import load_software
from meshwright.planner.cost.stage_cost import outside_bytes
from meshwright.planner.plan.document import Plan, Prediction
from meshwright.planner.plan.making import shape_of
from meshwright.profiler.machine.units import GIB
from meshwright.profiler.model.model_profile import ModelProfile
from support.cli import some_plan
from support.ranks import RankError, run_ranks
from support.tied_net import TiedNet, adamw, loss, plan_of, samples, tied_profile

HANG_S = 3.0
SOON_S = 150.0
"""Half as long as ranks wait for each other when nobody ends them."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come often enough for a test."""
    monkeypatch.setattr(watch, "BEAT_S", 0.3)
    monkeypatch.setattr(watch, "GRACE_S", 1.0)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return tied_profile()


class Fragile(TiedNet):
    """Does something on a rank in the fifth forward, which is the third step's."""

    def __init__(self, happens: Callable[[], None] = lambda: None, rank: int = 0) -> None:
        super().__init__()
        self.happens, self.rank, self.forwards = happens, str(rank), 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards += not tokens.is_meta and not type(tokens).__name__.startswith("Fake")
        if self.forwards >= 6 and os.environ.get("RANK") == self.rank:
            self.happens()
        return super().forward(tokens)


def raises() -> None:
    raise KeyError("no such token")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_in_forward() -> None:
    while True:
        signal.pause()


def nothing() -> None:
    pass


def _train(plan: Plan, happens: Callable[[], None], rank: int, quick_at: int = -1, hangs_at: int = -1) -> None:
    """Train; HANG_S is a hang in the step `quick_at` (counted from 0), where there is one, and behind it; the steps
    before may take as long as a busy machine needs."""
    trainer = parallelize(lambda: Fragile(happens, rank), plan, adamw, loss=loss, timeout_s=300.0)
    for index, share in enumerate(trainer.loader(samples)):
        if index == quick_at and trainer._watch is not None:
            trainer._watch.hang_s = HANG_S
        if index == hangs_at and os.environ["RANK"] == str(rank):
            wait_for_data()
        trainer.step(share)
    trainer.close()


def wait_for_data() -> None:
    while True:
        signal.pause()


def messages(endings: list[Ending]) -> list[str]:
    return [line for ending in endings for line in ending.stderr.splitlines() if line.startswith("meshwright: ")]


def test_a_rank_that_raises_ends_all_with_its_name_and_error(
    profile: ModelProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    endings = launch(_train, 4, tmp_path, plan_of(profile, replicate=2, stages=(2, 2)), raises, 1)

    assert [ending.exit_code for ending in endings] == [1] * 4
    assert messages(endings) == ["meshwright: rank 1 of 4 failed in step 3: KeyError: 'no such token'"]
    assert "Traceback" in endings[1].stderr
    assert "no such token" in (tmp_path / "error.json").read_text()  # torchrun shows it in its own summary
    assert max(ending.seconds for ending in endings) < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_all_with_its_name(profile: ModelProfile, tmp_path: Path, rank: int) -> None:
    endings = launch(_train, 2, tmp_path, plan_of(profile, shard=2), is_killed, rank)

    assert endings[rank].exit_code == -signal.SIGKILL
    assert endings[1 - rank].exit_code == 1
    assert len(messages(endings)) == 1
    assert f"rank {rank} of 2" in messages(endings)[0]
    assert "killed" in messages(endings)[0]
    assert max(ending.seconds for ending in endings) < SOON_S


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_model_is_named_with_the_line(profile: ModelProfile, tmp_path: Path) -> None:
    endings = launch(_train, 2, tmp_path, plan_of(profile, shard=2), hangs_in_forward, 1, 2)

    assert [ending.exit_code for ending in endings] == [1, 1]
    assert len(messages(endings)) == 1
    assert "rank 1 of 2 hangs: for" in messages(endings)[0]
    assert "in step 3" in messages(endings)[0]
    assert "test_faults.py" in messages(endings)[0]
    assert "in hangs_in_forward" in messages(endings)[0]
    assert max(ending.seconds for ending in endings) < SOON_S


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_data_is_named_with_the_line(profile: ModelProfile, tmp_path: Path) -> None:
    endings = launch(_train, 2, tmp_path, plan_of(profile, replicate=2), nothing, 0, 4, 4)

    assert [ending.exit_code for ending in endings] == [1, 1]
    assert len(messages(endings)) == 1
    assert "rank 0 of 2 hangs: for" in messages(endings)[0]
    assert "after step 4" in messages(endings)[0]
    assert "in wait_for_data" in messages(endings)[0]


def test_a_run_without_faults_says_nothing(profile: ModelProfile, tmp_path: Path) -> None:
    endings = launch(_train, 2, tmp_path, plan_of(profile, replicate=2), nothing, 0)

    assert [ending.exit_code for ending in endings] == [0, 0]
    assert messages(endings) == []


class Spoiled(TiedNet):
    """The second block's output is no number."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = self.blocks[1](self.blocks[0](x)) * float("nan")
        return self.head(x + 0 * self.norm(x.detach()))


def _not_finite(plan: Plan, model_fn: Any, spoil: bool) -> str:
    trainer = parallelize(model_fn, plan, adamw, loss=loss, max_grad_norm=1.0)
    share = next(trainer.loader(samples))
    trainer.step(share)
    if spoil and trainer.mesh.coordinates["pipeline"] == 0:
        weight = next(p for n, p in trainer._applied.parameters.items() if n == "blocks.0.up.weight")
        weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError) as caught:
        trainer.step(share)
    return str(caught.value)


@pytest.mark.slow
def test_gradients_that_are_no_numbers_are_named_with_step_and_stage(profile: ModelProfile) -> None:
    first, second = run_ranks(_not_finite, 2, plan_of(profile, stages=(2, 2)), TiedNet, True)

    assert first == second
    assert "step 2: 1 gradients on rank 0, stage 0 are not finite, the first of blocks.0.up.weight." in first


def test_a_loss_that_is_no_number_is_named_with_step_and_stage(profile: ModelProfile) -> None:
    def spoiled(plan: Plan) -> str:
        trainer = parallelize(Spoiled, plan, adamw, loss=loss)
        with pytest.raises(NonFiniteError) as caught:
            trainer.step(next(trainer.loader(samples)))
        return str(caught.value)

    first, second = run_ranks(spoiled, 2, plan_of(profile, stages=(2, 2)))

    assert first == second
    assert "step 1: " in first
    assert "the loss of micro-batch 0 on rank 1, stage 1 is not finite" in first


def _spoiled(plan: Plan, folder: Path | None) -> tuple[str, str]:
    """Messages of the next step and of a save, behind a step in which the optimizer of one stage overflowed."""
    found = []
    for follow in ("step", "save"):
        trainer = parallelize(TiedNet, plan, adamw, loss=loss)
        share = next(trainer.loader(samples))
        trainer.step(share)
        if trainer.mesh.coordinates["pipeline"] == 0:
            trainer.optimizer.param_groups[0]["lr"] = float("inf")
        trainer.step(share)
        with pytest.raises(NonFiniteError) as caught:
            trainer.step(share) if follow == "step" else trainer.save(folder or ".")
        found.append(str(caught.value))
        trainer.close()
    return found[0], found[1]


def test_parameters_that_the_optimizer_spoils_are_named_with_step_and_stage(
    profile: ModelProfile, tmp_path: Path
) -> None:
    first, second = run_ranks(_spoiled, 2, plan_of(profile, stages=(2, 2)), tmp_path)

    assert first == second
    for message in first:
        assert "step 2: loss and gradients are finite, but the optimizer left" in message
        assert "parameters on rank 0, stage 0, the first of them tokens.weight not finite" in message
    assert list(tmp_path.iterdir()) == []


def predicted(plan: Plan, num_bytes: float) -> Plan:
    prediction = Prediction(
        step_time_s=1.0, tokens_per_s=1.0, mfu=0.5, stage_memory_bytes=(num_bytes,) * 2, budget_bytes=2 * num_bytes
    )
    return plan.model_copy(update={"prediction": prediction})


@pytest.mark.parametrize(
    ("excess", "item", "advice"),
    [
        ({"optimizer": 3.0, "allocated": 3.0, "reserved": 3.0}, "optimizer exceed", "one with less state"),
        ({"allocated": 2.0, "reserved": 2.0}, "activations and gathered copies exceed", "recompute=full"),
        ({"reserved": 4.0}, "fragmentation exceed", "expandable_segments"),
        ({"others": 6.0}, "outside of torch exceed", "Another process"),
    ],
)
def test_out_of_memory_names_the_item_that_was_exceeded(excess: dict[str, float], item: str, advice: str) -> None:
    """A gibi of parameters, as many gradients, two of optimizer, three of activations; then more of one of them."""
    plan = some_plan(shard=1, pipeline=2)
    device = plan.cluster.device
    outside = outside_bytes(shape_of(plan), device)
    plan = predicted(plan, 7 * GIB * (1 + device.fragmentation) + outside)
    found = {
        "parameters": 1.0,
        "gradients": 1.0,
        "optimizer": 2.0,
        "allocated": 7.0,
        "reserved": 7 * (1 + device.fragmentation),
        "others": outside / GIB,
        "total": 80.0,
    }

    held = DeviceMemory(**{name: (value + excess.get(name, 0.0)) * GIB for name, value in found.items()})
    message = out_of_memory_message(plan, 1, 2**28, held)

    assert "out of memory on rank 1, stage 1 on a device of 80.00 GiB" in message
    assert item in message
    assert f"by {max(excess.values()):.2f} GiB" in message
    assert advice in message


def test_out_of_memory_is_told_by_the_memory_of_the_plans_software() -> None:
    plan = some_plan(shard=2)
    training = plan.training.model_copy(update={"software": "megatron-2021+deepspeed"})
    device = load_software(training.software).on(plan.cluster.device, 2)
    held = DeviceMemory(0.0, 0.0, 0.0, 0.0, 0.0, others=outside_bytes(shape_of(plan), device), total=80.0 * GIB)

    message = out_of_memory_message(plan.model_copy(update={"training": training}), 0, 0, held)

    assert device.context != plan.cluster.device.context
    assert f"outside of torch {held.others / GIB:.2f} ({held.others / GIB:.2f})" in message


class TooLarge(TiedNet):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")


class TooLargeForTheHost(TiedNet):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.empty(2**60, device=tokens.device)


def test_a_step_that_runs_out_of_memory_says_so_in_the_plans_words(
    profile: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(model: TooLarge, tokens: torch.Tensor) -> torch.Tensor:
        trainer.mesh = replace(trainer.mesh, device=torch.device("cuda"))
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")

    monkeypatch.setattr(TooLarge, "forward", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 19 * GIB)
    trainer = parallelize(TooLarge, predicted(plan_of(profile), GIB), adamw, loss=loss)

    with pytest.raises(torch.OutOfMemoryError, match=r"outside of torch exceed what was predicted by 5\d\.\d\d GiB"):
        trainer.step(next(trainer.loader(samples)))


@pytest.mark.parametrize(("model", "words"), [(TooLarge, "20 GiB"), (TooLargeForTheHost, "allocate memory")])
def test_a_step_for_which_the_hosts_memory_does_not_do_says_on_which_rank(
    profile: ModelProfile, model: type[TiedNet], words: str
) -> None:
    trainer = parallelize(model, predicted(plan_of(profile), GIB), adamw, loss=loss)

    with pytest.raises(torch.OutOfMemoryError, match=f"on rank 0 in the memory of its host.*{words}.*recompute=full"):
        trainer.step(next(trainer.loader(samples)))


def test_a_plan_for_larger_or_more_gpus_is_refused(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 40 * GIB

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Small GPU")
    cuda = torch.device("cuda", 0)

    with pytest.raises(ValueError, match=r"needs 60.0 GiB on its fullest stage; the Small GPU here has 40.0 GiB"):
        faults.check_devices(predicted(plan_of(profile), 60 * GIB), cuda)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 ranks were started on this host, which has 2 GPUs"):
        faults.check_devices(plan_of(profile), cuda)


def test_local_ranks_name_the_rank_that_failed(profile: ModelProfile) -> None:
    def fails() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("bad")
        torch.distributed.barrier()

    with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError: bad"):
        run_ranks(fails, 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "mixtral"])
def test_a_run_that_is_killed_again_and_again_loses_no_checkpoint(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BEAT_S", 0.1)
    monkeypatch.setattr(watch, "GRACE_S", 0.5)

    outcome = kill.kill_again_and_again(model, 5, tmp_path)

    assert outcome.problems == []
    assert outcome.kills == 5
    assert outcome.steps > 5
