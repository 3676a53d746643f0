"""The loader: a rank reads its own samples and no other, in an order that no plan changes, and goes on where it was."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.executor import parallelize
from meshwright.executor.sample_loader import Padded, shares
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, TiedNet, adamw, loss, plan_of, samples, tied_profile


class Counted:
    """Numbers that know which of them were read."""

    def __init__(self, count: int = 26) -> None:
        self.count, self.read = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def drawn(data: Any, rank: int = 0, num_ranks: int = 1, **more: Any) -> list[list[int]]:
    given = {"taken": 0, "epoch": 0, "collate": None, "shuffle": None, "workers": 0, "pinned": False, **more}
    return [batch.tolist() for batch in shares(data, share=8 // num_ranks, rank=rank, num_ranks=num_ranks, **given)]


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_together_read_every_sample_once_and_in_order(shuffle: int | None, workers: int) -> None:
    whole = drawn(Counted(), shuffle=shuffle)
    sources = [Counted() for _ in range(4)]

    parts = [drawn(source, rank, 4, shuffle=shuffle, workers=workers) for rank, source in enumerate(sources)]

    assert [list(chain(*batch)) for batch in zip(*parts, strict=True)] == whole
    assert len({x for batch in whole for x in batch}) == 24
    if not workers:
        assert sorted(x for source in sources for x in source.read) == sorted(x for batch in whole for x in batch)


def test_an_order_is_of_its_epoch_and_goes_on_within_it() -> None:
    first, second = drawn(Counted(), shuffle=3), drawn(Counted(), shuffle=3, epoch=1)

    assert first != second
    assert drawn(Counted(), shuffle=3, epoch=1, taken=8) == second[1:]
    assert drawn(Counted(), shuffle=None) == [list(range(start, start + 8)) for start in (0, 8, 16)]


def test_reading_draws_none_of_the_scripts_own_numbers() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)

    assert drawn(Counted(), shuffle=3)

    assert torch.equal(torch.rand(3), expected)


class Drawn(Counted):
    """Samples with a random number each."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 62, ()))


@pytest.mark.slow
def test_workers_of_other_ranks_and_epochs_draw_other_numbers() -> None:
    found = [drawn(Drawn(), r, 2, workers=1, epoch=epoch) for r in (0, 1) for epoch in (0, 1)]

    assert len({x for batches in found for batch in batches for x in batch}) == 4 * 12
    assert found[3] == drawn(Drawn(), 1, 2, workers=1, epoch=1)


def stream(shard: int, num_shards: int) -> Iterator[int]:
    for i in range(26 // num_shards):
        yield 100 * shard + i


def test_an_iterable_is_read_by_shard() -> None:
    assert drawn(stream, 1, 2) == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, 111]]
    assert drawn(stream, 1, 2, taken=8) == [[104, 105, 106, 107], [108, 109, 110, 111]]
    assert drawn(lambda: iter(range(20)), 1, 2) == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert drawn(iter(range(20)), 1, 2, taken=8) == [[12, 13, 14, 15]]


def test_samples_without_numbers_are_not_shuffled() -> None:
    with pytest.raises(ValueError, match="gives its samples one after the other: shuffle=, lengths= and workers= need"):
        drawn(iter(range(20)), shuffle=1)


class Texts:
    """Sequences of different lengths."""

    def __len__(self) -> int:
        return 5 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return samples()[index][0][: 2 + index % 5]


def padded(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    whole = torch.nn.functional.pad(whole, (0, 9 - whole.shape[1]))
    return whole[:, :-1], whole[:, 1:]


def _losses(folder: Path, degrees: dict[str, int], steps: int, resume: bool) -> list[float]:
    trainer = parallelize(TiedNet, plan_of(tied_profile(), **degrees), adamw, loss=loss)  # type: ignore[arg-type]
    if resume:
        trainer.resume(folder)
    found: list[float] = []
    while len(found) < steps:
        for batch in trainer.loader(Texts(), shuffle=True, collate=padded):
            found.append(trainer.step(batch).loss)
            assert len(list(trainer.loader(Texts(), training=False, collate=padded))) == 5
            if len(found) == steps:
                break
    trainer.save(folder)
    trainer.close()
    return found


@pytest.mark.slow
def test_a_shuffled_epoch_of_other_lengths_goes_on_under_another_plan(tmp_path: Path) -> None:
    expected = _losses(tmp_path / "alone", {}, 8, resume=False)
    first = run_ranks(_losses, 2, tmp_path / "run", {"replicate": 2}, 3, False)[0]

    rest = run_ranks(_losses, 2, tmp_path / "run", {"tensor": 2}, 5, True)[0]

    assert first + rest == pytest.approx(expected, rel=1e-5)


def test_samples_of_all_lengths_are_filled_up_to_the_plans() -> None:
    ragged = [{"input_ids": torch.arange(1, n + 1), "labels": torch.arange(n), "id": n} for n in (3, 5, 1, 4)]
    given: dict[str, Any] = {"taken": 0, "epoch": 0, "collate": None, "shuffle": None, "workers": 0, "pinned": False}

    (batch,) = shares(ragged, share=4, rank=0, num_ranks=1, pad=Padded(5, {"input_ids": 0, "labels": -100}), **given)

    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5], [1, 0, 0, 0, 0], [1, 2, 3, 4, 0]]
    assert batch["labels"][2].tolist() == [0, -100, -100, -100, -100]
    assert batch["id"].tolist() == [3, 5, 1, 4]


def test_tuples_and_single_tensors_are_padded_by_number() -> None:
    assert [part.tolist() for part in Padded(3, {1: -100})((7, torch.tensor([1, 2])))[1:]] == [[1, 2, -100]]
    assert Padded(3, {0: 0})(torch.tensor([4])).tolist() == [4, 0, 0]


@pytest.mark.parametrize(
    ("pad", "told"),
    [
        ({"labels": -100}, "a sample has 5 tokens in 'labels', the plan's sequences have 4: cut it, or plan with"),
        ({"label": 0}, r"pad has 'label', but a sample has only \['labels'\]: name what is to be padded"),
    ],
)
def test_what_cannot_be_padded_is_told(pad: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Padded(4, pad)({"labels": torch.zeros(5)})


def test_a_model_without_sequences_is_not_padded() -> None:
    trainer = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss)

    with pytest.raises(ValueError, match="the plan's model has none: pad in collate="):
        next(iter(trainer.loader(samples(), pad={0: 0})))
