"""A checkpoint that is not what was saved is found, named by file and tensor, and so is the last one that is whole."""

import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from meshwright.executor import parallelize
from meshwright.executor.state.checkpoint_folder import complete_checkpoints
from meshwright.executor.state.checksums import CHECKSUMS, DamagedError
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, TiedNet, adamw, loss, plan_of, samples, tied_profile


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with three checkpoints."""
    trainer = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss)
    for share in trainer.loader(samples()[: 3 * GLOBAL_BATCH]):
        trainer.step(share)
        trainer.save(tmp_path)
    trainer.close()
    return tmp_path


def resumed(run: Path) -> int:
    trainer = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss)
    try:
        return trainer.resume(run)
    finally:
        trainer.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_zeros_inside_of_a_tensor_are_told_by_file_and_name(run: Path) -> None:
    bad = complete_checkpoints(run)[-1]
    file = bad / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    place = content.find(_bytes_of(bad, "blocks.1.up.weight"))
    content[place + 16 : place + 80] = bytes(64)
    file.write_bytes(content)

    with pytest.raises(DamagedError) as caught:
        resumed(run)

    assert f"{file} is damaged" in str(caught.value)
    assert "bytes of blocks.1.up.weight from" in str(caught.value)
    assert f"The last good checkpoint is {run / 'step-00000002'}" in str(caught.value)


def _bytes_of(checkpoint: Path, name: str) -> bytes:
    found = torch.zeros(dict(TiedNet().named_parameters())[name].shape)
    state = {f"model.{name}": found}
    torch.distributed.checkpoint.load(state, checkpoint_id=checkpoint, no_dist=True)
    return found.numpy().tobytes()


def test_a_file_that_is_cut_off_is_told_with_what_is_lost(run: Path) -> None:
    file = complete_checkpoints(run)[-1] / "__0_0.distcp"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 100)

    with pytest.raises(DamagedError, match=rf"is cut off: it has {size - 100:,} bytes, {size:,} were saved, and \w+"):
        resumed(run)


def test_the_last_good_checkpoint_may_be_an_older_one(run: Path) -> None:
    for bad in complete_checkpoints(run)[1:]:
        (bad / ".metadata").write_bytes(b"")

    with pytest.raises(DamagedError, match=r"\.metadata is cut off: .* last good checkpoint is .*step-00000001"):
        resumed(run)


@pytest.mark.parametrize("name", ["plan.json", "state.json", ".metadata", CHECKSUMS, "__0_0.distcp"])
def test_a_missing_file_is_named(run: Path, name: str) -> None:
    (complete_checkpoints(run)[-1] / name).unlink()

    with pytest.raises(DamagedError, match=f"{name} is missing"):
        resumed(run)


def test_after_moving_the_damaged_one_the_run_goes_on(run: Path) -> None:
    bad = complete_checkpoints(run)[-1]
    (bad / "plan.json").write_text("{}")
    with pytest.raises(DamagedError):
        resumed(run)
    shutil.rmtree(bad)

    assert resumed(run) == 2


def _found(folder: Path, places: list[tuple[str, int, int]]) -> list[str]:
    """What resume says of each flipped byte."""
    trainer = parallelize(TiedNet, plan_of(tied_profile(), shard=2), adamw, loss=loss)
    messages = []
    for name, offset, value in places:
        if trainer.mesh.rank == 0:
            content = bytearray((folder / name).read_bytes())
            content[offset] ^= value
            (folder / name).write_bytes(content)
        torch.distributed.barrier()
        try:
            trainer.resume(folder)
            messages.append("")
        except DamagedError as error:
            messages.append(str(error))
        torch.distributed.barrier()
        if trainer.mesh.rank == 0:
            content[offset] ^= value
            (folder / name).write_bytes(content)
        torch.distributed.barrier()
    trainer.resume(folder)  # which is whole again
    return messages


@pytest.mark.slow
def test_every_flipped_byte_is_found_and_its_file_named(run: Path) -> None:
    folder = complete_checkpoints(run)[-1]
    count, draw = 500, random.Random(5)
    files = sorted(folder.iterdir())
    places = []
    for i in range(count):
        file = files[i % len(files)] if i % 2 else folder / "__0_0.distcp"
        places.append((file.name, draw.randrange(file.stat().st_size), draw.randrange(1, 256)))

    messages = run_ranks(_found, 2, folder, places)

    for rank in messages:
        for (name, *_), message in zip(places, rank, strict=True):
            assert f"{folder / name} is damaged" in message, (name, message)
            assert "The last good checkpoint is" in message
