"""A StatefulDataLoader's place is saved by data rank, so that a run goes on with the next sample."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from meshwright.executor import parallelize
from support.ranks import RankError, run_ranks
from support.tied_net import GLOBAL_BATCH, TiedNet, adamw, loss, plan_of, samples, tied_profile

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata 0.11 calls


class Stream(IterableDataset[Any]):
    """Every num_ranks-th sample, which knows how many it has given; begins without reading those again."""

    def __init__(self, rank: int, num_ranks: int, odd: bool = False) -> None:
        self.rank, self.num_ranks, self.given, self.odd = rank, num_ranks, 0, odd
        self.read = list[int]()

    def __iter__(self) -> Iterator[Any]:
        data = samples()
        while (index := self.given * self.num_ranks + self.rank) < 6 * GLOBAL_BATCH:
            self.given += 1
            self.read.append(index)
            yield data[index]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "odd": self if self.odd else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def run(degrees: dict[str, Any], folder: Path, steps: int, odd: bool = False) -> tuple[list[float], list[int]]:
    """(losses, samples read) of so many steps, saved after half of them; steps = 0: of what is left."""
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **degrees), adamw, loss=loss)
    stream = Stream(trainer.data_rank, trainer.data_size, odd)
    loader = stateful_dataloader.StatefulDataLoader(stream, batch_size=trainer.samples_per_step)
    if not steps:
        trainer.resume(folder, data=loader)
    losses = []
    for number, batch in enumerate(loader, 1):
        losses.append(trainer.step(batch).loss)
        if number == steps // 2:
            trainer.save(folder, wait=False, data=loader)
        if number == steps:
            break
    trainer.close()
    return losses, stream.read


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        pytest.param({"replicate": 2}, {"shard": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"replicate": 2, "stages": (2, 2)}, {"replicate": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_the_next_sample(first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    def ranks(degrees: dict[str, Any], *given: Any) -> list[tuple[list[float], list[int]]]:
        count = plan_of(tied_profile(), **degrees).degrees.num_devices
        return run_ranks(run, count, degrees, *given) if count > 1 else [run(degrees, *given)]

    straight = ranks(first, tmp_path, 6)
    rest = ranks(second, tmp_path, 0)

    assert rest[0][0] == pytest.approx(straight[0][0][3:], rel=1e-5)
    for losses, read in rest:
        assert len(losses) == 3
        assert min(read) >= 3 * GLOBAL_BATCH
    assert sorted({i for _, read in rest for i in read}) == list(range(3 * GLOBAL_BATCH, 6 * GLOBAL_BATCH))


@pytest.mark.slow
def test_another_number_of_data_ranks_is_refused(tmp_path: Path) -> None:
    run_ranks(run, 2, {"replicate": 2}, tmp_path, 2)

    with pytest.raises(
        ValueError, match="on each of 2 data ranks, this plan has 1: what a StatefulDataLoader has read"
    ):
        run({}, tmp_path, 0)


def test_what_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data cannot be saved: its state holds more than numbers, texts and tensors"):
        run({}, tmp_path, 2, odd=True)


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="data cannot be saved"):
        run_ranks(run, 2, {"replicate": 2}, tmp_path, 2, True)


def test_a_checkpoint_without_it_is_told(tmp_path: Path) -> None:
    trainer = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss)
    trainer.step(torch.utils.data.default_collate(samples()[:GLOBAL_BATCH]))
    trainer.save(tmp_path)
    trainer.close()

    with pytest.raises(ValueError, match="holds no state of data: it was saved without"):
        run({}, tmp_path, 0)
