"""Checkpoints: any plan resumes what another one saved, and what is not complete is never taken for a checkpoint."""

import atexit
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.faults.launched import launch
from meshwright.executor import parallelize
from meshwright.executor.state import checkpoint
from meshwright.executor.state.boxes import Box
from meshwright.executor.state.checkpoint_folder import complete_checkpoints, latest_checkpoint, read_progress
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.model_profile import ModelProfile
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, PLANS, WIDTH, TiedNet, adamw, loss, plan_of, samples, tied_profile


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return tied_profile()


def train(
    plan: Plan, steps: int, folder: Path | None = None, resume: Path | None = None, **options: Any
) -> list[float]:
    """Losses of some steps with a falling learning rate, from a checkpoint if there is one, and saved at the end."""
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, max_grad_norm=1.0)
    scheduler = LambdaLR(trainer.optimizer, lambda step: 0.9**step)
    if resume is not None:
        trainer.resume(resume, scheduler=scheduler)
    losses = []
    for _, share in zip(range(steps), trainer.loader(samples), strict=False):
        losses.append(trainer.step(share).loss)
        scheduler.step()
    if folder is not None:
        trainer.save(folder, scheduler=scheduler, **options)
        trainer.close()
    return losses


LOSS = 1e-5
"""Relative difference of losses that the order of sums explains."""


@pytest.fixture(scope="module")
def expected(profile: ModelProfile) -> list[float]:
    """Losses of one process that was never stopped."""
    return train(plan_of(profile), 8)


@pytest.fixture(scope="module")
def saved_by_one(profile: ModelProfile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one process that was saved after three steps."""
    return _saved(plan_of(profile), tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def saved(profile: ModelProfile, saved_by_one: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs that were saved after three steps, one by each plan."""
    return {
        name: _saved(plan_of(profile, **degrees), tmp_path_factory.mktemp("run")) if degrees else saved_by_one
        for name, degrees in PLANS.items()
    }


def _saved(plan: Plan, folder: Path) -> Path:
    run_ranks(train, plan.degrees.num_devices, plan, 3, folder)
    return folder


def _resumed(plan: Plan, folders: list[Path]) -> list[list[float]]:
    return [train(plan, 5, resume=folder) for folder in folders]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_goes_on_where_any_other_was_saved(
    profile: ModelProfile, saved: dict[str, Path], expected: list[float], name: str
) -> None:
    plan = plan_of(profile, **PLANS[name])

    found = run_ranks(_resumed, plan.degrees.num_devices, plan, list(saved.values()))

    for losses in found:
        assert losses == [pytest.approx(expected[3:], rel=LOSS)] * len(saved)


@pytest.mark.slow
def test_a_tied_weight_that_one_rank_holds_twice_goes_on(
    profile: ModelProfile, saved: dict[str, Path], expected: list[float]
) -> None:
    plan = plan_of(profile, stages=(1, 1, 1, 1), virtual_stages=2, schedule="zb-v")

    losses = run_ranks(train, 2, plan, 5, None, saved["one"])[0]

    assert losses == pytest.approx(expected[3:], rel=LOSS)


def test_going_on_is_not_beginning_anew(expected: list[float]) -> None:
    assert expected[3:] != pytest.approx(expected[:5], rel=1e-2)


@pytest.mark.slow
def test_every_plan_saves_the_same_whole_tensors(saved: dict[str, Path]) -> None:
    contents = {}
    for name, folder in saved.items():
        found = dcp.FileSystemReader(complete_checkpoints(folder)[0]).read_metadata().state_dict_metadata
        contents[name] = {key: entry.size for key, entry in found.items() if hasattr(entry, "size")}
    names = {n for n, _ in TiedNet().named_parameters()} | {n for n, _ in TiedNet().named_buffers()}
    tensors = {key.removeprefix("model.") for key in contents["one"] if key.startswith("model.")}

    assert all(found == contents["one"] for found in contents.values())
    assert tensors == names
    assert contents["one"]["optimizer.blocks.0.attention.qkv.weight.exp_avg"] == (3 * WIDTH, WIDTH)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_reads_what_is_saved(saved: dict[str, Path], profile: ModelProfile) -> None:
    parameters = {name: torch.zeros_like(p) for name, p in TiedNet().state_dict().items() if name != "head.weight"}

    found = {}
    for name, folder in saved.items():
        state = {f"model.{n}": tensor.clone() for n, tensor in parameters.items()}
        dcp.load(state, checkpoint_id=complete_checkpoints(folder)[0], no_dist=True)
        found[name] = {n: tensor for n, tensor in state.items() if "running" not in n}

    for name in PLANS:
        torch.testing.assert_close(found[name], found["one"], rtol=1e-4, atol=1e-5)


class Dropping(TiedNet):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + nn.functional.dropout(self.tokens(tokens), 0.5).sum()


def _interrupted(plan: Plan, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of steps 3 and 4 without and with a stop between."""
    trainer = parallelize(Dropping, plan, adamw, loss=loss)
    shares = trainer.loader(samples)
    for _ in range(2):
        trainer.step(next(shares))
    trainer.save(folder)
    straight = [trainer.step(next(shares)).loss + random.random() + np.random.rand() for _ in range(2)]
    trainer = parallelize(Dropping, plan, adamw, loss=loss)
    trainer.resume(folder)
    shares = trainer.loader(samples)
    return straight, [trainer.step(next(shares)).loss + random.random() + np.random.rand() for _ in range(2)]


def test_the_same_plan_goes_on_bit_for_bit_with_dropout(profile: ModelProfile, tmp_path: Path) -> None:
    for straight, resumed in run_ranks(_interrupted, 2, plan_of(profile, shard=2), tmp_path):
        assert straight == resumed


def _beside(plan: Plan, folder: Path) -> tuple[list[float], list[float]]:
    trainer = parallelize(TiedNet, plan, adamw, loss=loss)
    shares = trainer.loader(samples)
    for _ in range(2):
        trainer.step(next(shares))
    trainer.save(folder, wait=False)
    straight = [trainer.step(next(shares)).loss for _ in range(3)]
    trainer.save(folder, wait=False)
    trainer.close()
    trainer = parallelize(TiedNet, plan, adamw, loss=loss)
    trainer.resume(complete_checkpoints(folder)[0])
    shares = trainer.loader(samples)
    return straight, [trainer.step(next(shares)).loss for _ in range(3)]


def test_what_is_written_beside_later_steps_is_of_the_moment_of_the_call(profile: ModelProfile, tmp_path: Path) -> None:
    for straight, resumed in run_ranks(_beside, 2, plan_of(profile, replicate=2), tmp_path):
        assert straight == resumed
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000005"]


def _disk_fills(plan: Plan, folder: Path) -> tuple[str, int]:
    """What the second save says when one rank cannot write, and which checkpoint is left then."""
    trainer = parallelize(TiedNet, plan, adamw, loss=loss)
    shares = trainer.loader(samples)
    trainer.step(next(shares))
    trainer.save(folder)
    trainer.step(next(shares))
    if trainer.mesh.rank == 1:

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        dcp.FileSystemWriter.write_data = full  # type: ignore[method-assign]
    try:
        trainer.save(folder, wait=False)
        trainer.close()
    except RuntimeError as error:
        return str(error), trainer.resume(folder)
    return "", -1


def _ends_without_close(plan: Plan, folder: Path, fails: bool) -> None:
    """A script whose last save is being written when it ends. fails: one rank cannot write."""
    trainer = parallelize(TiedNet, plan, adamw, loss=loss)
    trainer.step(next(trainer.loader(samples)))
    write = dcp.FileSystemWriter.write_data

    def slowly(*args: Any) -> Any:
        threading.Event().wait(0.5)
        if fails and trainer.mesh.rank == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    dcp.FileSystemWriter.write_data = slowly  # type: ignore[method-assign]
    trainer.save(folder, wait=False)
    atexit._run_exitfuncs()  # as where a script ends; a process that is forked runs them not


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_ends_without_close_ends_with_its_checkpoint_or_fails(
    profile: ModelProfile, tmp_path: Path, fails: bool
) -> None:
    endings = launch(_ends_without_close, 2, tmp_path, plan_of(profile, shard=2), tmp_path / "run", fails)

    assert [ending.exit_code for ending in endings] == [int(fails)] * 2
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ([] if fails else ["step-00000001"])
    assert ("No space left" in endings[1].stderr) == fails


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(profile: ModelProfile, tmp_path: Path) -> None:
    for message, steps in run_ranks(_disk_fills, 2, plan_of(profile, shard=2), tmp_path):
        assert "no checkpoint of step 2" in message
        assert "rank 1: OSError" in message
        assert "No space left" in message
        assert steps == 1


def test_what_is_not_complete_is_no_checkpoint_and_is_cleared_away(profile: ModelProfile, tmp_path: Path) -> None:
    trainer = parallelize(TiedNet, plan_of(profile), adamw, loss=loss)
    trainer.save(tmp_path)
    for name in (".partial-step-00000007", ".discarded-step-00000006"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")

    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000000"

    trainer.save(tmp_path)

    trainer.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000000", "step-00000000.1"]


def test_only_the_last_ones_are_kept(profile: ModelProfile, tmp_path: Path) -> None:
    trainer = parallelize(TiedNet, plan_of(profile), adamw, loss=loss)
    for _, share in zip(range(4), trainer.loader(samples), strict=False):
        trainer.step(share)
        trainer.save(tmp_path, keep=2)
    trainer.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_where_there_is_no_checkpoint_yet_training_begins(profile: ModelProfile, tmp_path: Path) -> None:
    trainer = parallelize(TiedNet, plan_of(profile), adamw, loss=loss)

    assert trainer.resume(tmp_path / "run", missing_ok=True) == 0
    with pytest.raises(ValueError, match="no checkpoint in"):
        trainer.resume(tmp_path / "run")


def test_a_checkpoint_of_another_model_is_refused_by_name(saved_by_one: Path, profile: ModelProfile) -> None:
    trainer = parallelize(TiedNet, plan_of(profile), adamw, loss=loss)
    folder = complete_checkpoints(saved_by_one)[0]
    found = dcp.FileSystemReader(folder).read_metadata()
    wrong = Box("model.tokens.weight", torch.Size((31, WIDTH)), (0, 0), torch.zeros(31, WIDTH))
    missing = Box("model.nothing", torch.Size((1,)), (0,), torch.zeros(1))

    with pytest.raises(ValueError, match=r"tokens.weight of shape \[30, 16\], the model's is \[31, 16\]"):
        checkpoint._check_saved([wrong], found, folder)
    with pytest.raises(ValueError, match="holds no nothing"):
        checkpoint._check_saved([missing], found, folder)
    with pytest.raises(ValueError, match="holds no state of sampler"):
        trainer.resume(folder, sampler=LambdaLR(trainer.optimizer, lambda step: 1.0))


def _unreadable(plan: Plan, folder: Path) -> str:
    trainer = parallelize(TiedNet, plan, adamw, loss=loss)
    if trainer.mesh.rank == 1:
        dcp.FileSystemReader.read_metadata = None  # type: ignore[method-assign, assignment]
    with pytest.raises((RuntimeError, TypeError)) as caught:
        trainer.resume(folder)
    return str(caught.value)


def test_a_rank_that_cannot_read_ends_the_others_too(profile: ModelProfile, saved_by_one: Path) -> None:
    first, second = run_ranks(_unreadable, 2, plan_of(profile, shard=2), saved_by_one)

    assert "rank 1 could not read" in first
    assert "not callable" in second


def _statistics(plan: Plan, folder: Path) -> dict[str, torch.Tensor]:
    trainer = parallelize(TiedNet, plan, adamw, loss=loss)
    trainer.step(next(trainer.loader(samples)))
    trainer.save(folder)
    trainer.close()
    return {name: value for name, value in trainer.full_state_dict().items() if name.startswith("norm.")}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(2, 2), (3, 1)])
def test_running_statistics_are_those_of_the_stage_that_counts(
    profile: ModelProfile, tmp_path: Path, stages: tuple[int, int]
) -> None:
    expected = _statistics(plan_of(profile), tmp_path / "alone")

    found = run_ranks(_statistics, 2, plan_of(profile, stages=stages), tmp_path / "run")[0]

    trainer = parallelize(TiedNet, plan_of(profile), adamw, loss=loss)
    trainer.resume(tmp_path / "run")
    saved = trainer.full_state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)


class Watched:
    """Samples that remember which of them were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 3 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return samples()[index]


def test_the_loader_goes_on_without_reading_what_was_taken(profile: ModelProfile, tmp_path: Path) -> None:
    trainer = parallelize(TiedNet, plan_of(profile), adamw, loss=loss)
    for index, share in enumerate(trainer.loader(Watched())):
        if index == 1:
            trainer.save(tmp_path)  # the second share is loaded, but no step has taken it
        trainer.step(share)
    trainer = parallelize(TiedNet, plan_of(profile), adamw, loss=loss)
    steps, data = trainer.resume(tmp_path), Watched()
    progress = [trainer.progress]
    for _ in range(2):
        for share in trainer.loader(data):
            trainer.step(share)
            progress.append(trainer.progress)

    assert steps == 1
    assert data.read == [*range(GLOBAL_BATCH, 3 * GLOBAL_BATCH), *range(3 * GLOBAL_BATCH)]
    assert [p.samples // GLOBAL_BATCH for p in progress] == [1, 2, 3, 1, 2, 3]
    assert [p.epoch for p in progress] == [0, 0, 0, 1, 1, 1]


def test_a_file_that_is_no_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"kind": "else"}))

    with pytest.raises(ValueError, match="no checkpoint that this version reads"):
        read_progress(tmp_path)
