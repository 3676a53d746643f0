"""Batches of similar lengths, and batches that grow, train every plan as one process: same samples, same lengths."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from test_random_numbers import VOCABULARY, DropNet, profile_of
from test_sample_loader import Counted, drawn
from torch import nn

from meshwright.executor import Trainer, parallelize
from meshwright.executor.agreement import check_lengths
from meshwright.executor.sample_loader import Padded, shares
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace
from support import slow
from support.ranks import RankError, run_ranks
from support.same_numbers import (
    GLOBAL_BATCH,
    MAX_NORM,
    SEED,
    SEQ_LEN,
    Case,
    adamw,
    loss,
    next_tokens,
    plan_of,
    trainer_of,
)

LENGTHS = [2 + 2 * (i * 5 % 8) for i in range(6 * GLOBAL_BATCH + 3)]
FILL = {0: 0, 1: -100}

CASES = {
    "ddp": Case("drop", replicate=2),
    "zero-3": Case("drop", shard=2, reshard=True, num_microbatches=4),
    "tensor 2": Case("drop", tensor=2, num_microbatches=4),
    "tensor 2 + sequence": Case("drop", tensor=2, more={"sequence": True}, recompute="full"),
    "1f1b": Case("drop", stages=(2, 2), num_microbatches=4),
    "gpipe": Case("drop", stages=(2, 2), num_microbatches=2, more={"schedule": "gpipe"}),
    "interleaved": Case("drop", stages=(1, 1, 1, 1), virtual=2, num_microbatches=4, more={"schedule": "interleaved"}),
    "zb-v": Case("drop", stages=(1, 1, 1, 1), virtual=2, num_microbatches=4, more={"schedule": "zb-v"}),
    "zb-h2 x fsdp": Case("drop", shard=2, stages=(2, 2), num_microbatches=4, more={"schedule": "zb-h2"}),
    "pipeline x tensor + sequence": Case("drop", tensor=2, stages=(2, 2), num_microbatches=4, more={"sequence": True}),
    "ddp x fsdp x tensor": Case("drop", replicate=2, shard=2, tensor=2),
}  # fmt: skip


class Lines:
    """Sequences of all lengths, and which of them were read."""

    def __init__(self, filled: bool = False) -> None:
        draw = torch.Generator().manual_seed(2)
        self.rows = [torch.randint(VOCABULARY, (n + 1,), generator=draw) for n in LENGTHS]
        self.filled = Padded(SEQ_LEN, FILL) if filled else tuple
        self.read = list[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return self.filled((self.rows[index][:-1], self.rows[index][1:]))


def size_of(steps: int) -> int:
    """Batches of half the size in the first steps."""
    return GLOBAL_BATCH // 2 if steps < 3 else GLOBAL_BATCH


def tokens_in(batch: Any) -> torch.Tensor:
    return (batch[1] != -100).sum()


def batches(trainer: Trainer, lines: Lines) -> Iterator[Any]:
    pad = FILL if lines.filled is tuple else None
    return trainer.loader(lines, shuffle=True, pad=pad, lengths=LENGTHS, global_batch=size_of)


def train(
    case: Case, steps: int = 0, folder: Path | None = None, filled: bool = False
) -> tuple[list[float], list[int], list[int], Any]:
    """(losses, lengths, samples read, means of an evaluation) of the steps of an epoch, or the first. filled: the
    samples have the plan's length already."""
    plan, lines = plan_of(case, profile_of("drop")), Lines(filled)
    trainer = parallelize(DropNet, plan, adamw, loss=loss, seed=SEED, weight=tokens_in, max_grad_norm=MAX_NORM)
    if folder is not None and not steps:
        trainer.resume(folder)
    losses, lengths = [], []
    for batch in batches(trainer, lines):
        losses.append(trainer.step(batch).loss)
        lengths.append(batch[0].shape[1])
        if steps and len(losses) == steps:
            break
    if steps and folder is not None:
        trainer.save(folder)
    evaluated = trainer.evaluate(trainer.loader(Lines(), training=False, pad=FILL, lengths=LENGTHS))
    trainer.close()
    return losses, lengths, lines.read, evaluated


@pytest.mark.parametrize("name", slow.but_these(CASES, ["ddp"]))
def test_every_plan_trains_on_buckets_and_growing_batches_as_one_process(name: str) -> None:
    case = CASES[name]
    expected, lengths, read, evaluated = train(Case("drop"), filled=bool(case.more.get("sequence")))

    found = run_ranks(train, case.num_ranks, case)

    assert set(lengths) == {8, 12, 14, 16} or "sequence" in name
    for losses, own_lengths, _, means in found:
        assert losses == pytest.approx(expected, rel=2e-5)
        assert own_lengths == lengths
        assert means == pytest.approx(evaluated, rel=2e-5)
    if name == "ddp":
        assert sorted(chain(*(own for _, _, own, _ in found))) == sorted(read)
    assert len(set(read)) == len(read) == 3 * GLOBAL_BATCH // 2 + 4 * GLOBAL_BATCH


class StillNet(DropNet):
    """Without dropout, so that plain PyTorch trains the same."""

    def __init__(self) -> None:
        super().__init__(attention_dropout=0.0)
        for module in self.modules():
            if isinstance(module, nn.Dropout | nn.Dropout1d):
                module.p = 0.0


@pytest.mark.slow
def test_losses_are_those_of_plain_pytorch() -> None:
    lines = Lines()
    torch.manual_seed(SEED)
    model = StillNet()
    optimizer = adamw(model.parameters())
    plan = plan_of(Case("drop"), trace(load_model(StillNet, batch=next_tokens(VOCABULARY), loss=loss)))
    trainer = parallelize(StillNet, plan, adamw, loss=loss, seed=SEED, weight=tokens_in, max_grad_norm=MAX_NORM)

    for number, batch in zip(range(5), batches(trainer, lines), strict=False):
        own = lines.read[-size_of(number) :]
        tokens, targets = (
            nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
            for rows, fill in zip(zip(*(lines[i] for i in own), strict=True), FILL.values(), strict=True)
        )
        optimizer.zero_grad()
        value = loss(model(tokens), (tokens, targets))
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        metrics = trainer.step(batch)

        assert metrics.loss == pytest.approx(value.item(), rel=1e-5)
        assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.slow
def test_a_run_of_growing_batches_goes_on_under_another_plan(tmp_path: Path) -> None:
    expected = train(Case("drop"))[0]
    first = run_ranks(train, 2, CASES["ddp"], 2, tmp_path)[0][0]

    rest = run_ranks(train, 2, CASES["1f1b"], 0, tmp_path)[0][0]

    assert first + rest == pytest.approx(expected, rel=2e-5)


def lengths_in(batches: list[list[int]], lengths: list[int]) -> list[tuple[int, int]]:
    return [(min(lengths[i] for i in batch), max(lengths[i] for i in batch)) for batch in batches]


@pytest.mark.parametrize("shuffle", [None, 3])
def test_samples_of_similar_length_come_in_one_batch(shuffle: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 1000, (803,), generator=draw).tolist()
    epochs = [drawn(Counted(803), shuffle=shuffle, lengths=lengths, epoch=epoch) for epoch in (0, 1)]

    padded = sum(8 * longest for _, longest in lengths_in(epochs[0], lengths))
    in_order = sum(8 * longest for _, longest in lengths_in(drawn(Counted(803), shuffle=shuffle), lengths))

    assert len({i for batch in epochs[0] for i in batch}) == 800
    assert padded < 1.25 * sum(lengths) < in_order
    assert (epochs[0] == epochs[1]) == (shuffle is None)
    parts = [drawn(Counted(803), rank, 4, shuffle=shuffle, lengths=lengths) for rank in range(4)]
    assert [list(chain(*batch)) for batch in zip(*parts, strict=True)] == epochs[0]
    assert drawn(Counted(803), shuffle=shuffle, lengths=lengths, taken=80) == epochs[0][10:]


def test_batches_are_filled_up_to_one_of_64_lengths() -> None:
    given: dict[str, Any] = {"taken": 0, "epoch": 0, "collate": None, "shuffle": None, "workers": 0, "pinned": False}
    texts = [torch.ones(n) for n in (100, 129, 640, 3, 7, 2)]

    def filled(pad: Padded) -> list[tuple[int, ...]]:
        found = shares(texts, share=2, rank=0, num_ranks=1, pad=pad, lengths=[len(t) for t in texts], **given)
        return [tuple(batch.shape) for batch in found]

    assert filled(Padded(640, {0: 0})) == [(2, 10), (2, 100), (2, 640)]
    assert filled(Padded(640, {0: 0}, always=True)) == [(2, 640)] * 3


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"lengths": [4] * 50}, "lengths= has 50 numbers for 51 samples: give the length of every one"),
        ({"lengths": [4] * 51}, "a sample has 12 tokens in 0, but no more than 4 in its batch by lengths="),
        ({"global_batch": lambda steps: 6}, r"global_batch=... of 0 steps is 6: give a multiple of 4 \(micro-batches"),
        ({"global_batch": lambda steps: 16}, "give a multiple of 4 .* up to the plan's 8"),
    ],
)
def test_what_cannot_be_batched_so_is_told(more: dict[str, Any], told: str) -> None:
    trainer = trainer_of(DropNet, plan_of(Case("drop"), profile_of("drop")))

    with pytest.raises(ValueError, match=told):
        next(trainer.loader(Lines(), pad=FILL, **more))


def test_a_stream_is_not_put_in_buckets() -> None:
    with pytest.raises(ValueError, match="gives its samples one after the other: shuffle=, lengths= and workers= need"):
        drawn(iter(range(20)), lengths=[1] * 20)


def _refused(fault: str) -> str:
    degrees: dict[str, Any] = {"schedule": {"stages": (2, 2)}, "slices": {"tensor": 2, "more": {"sequence": True}}}
    case = Case("drop", num_microbatches=4, **degrees.get(fault, {"replicate": 2}))
    trainer = trainer_of(DropNet, plan_of(case, profile_of("drop")))
    size = trainer.plan.micro_batch
    if fault == "lengths":
        check_lengths(trainer.mesh, [1, 2 + trainer.mesh.rank])
    count = 1 + trainer.mesh.rank if fault == "counts" else 1
    tokens = torch.zeros(count * size, SEQ_LEN // 2 if fault == "slices" else SEQ_LEN, dtype=torch.int64)
    trainer.step((tokens, tokens))
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("schedule", "are 1 micro-batches of 2 .* cannot run: 1F1B needs at least as many micro-batches as stages"),
        ("counts", "step 1: data ranks were given different numbers of samples"),
        ("slices", "0 of the batch has 8 tokens, but the plan gives ranks slices of sequences of 16"),
        ("lengths", r"lengths= is another one on process 1 \(2 numbers\)"),
    ],
)
def test_what_ranks_cannot_run_is_told(fault: str, told: str) -> None:
    with pytest.raises(RankError, match=told):
        run_ranks(_refused, 2, fault)
