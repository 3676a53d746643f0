"""A rank's share of every global batch, of which it reads no other sample where samples can be asked for by number."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

Samples = Iterable[Any] | Callable[..., Iterable[Any]]

Padding = Mapping[str, float] | Mapping[int, float]
"""Key of a sample (number, in a tuple) -> what its sequence is filled up with."""


def shares(
    samples: Samples,
    *,
    share: int,
    rank: int,
    num_ranks: int,
    taken: int,
    epoch: int,
    collate: Callable[[list[Any]], Any] | None,
    shuffle: int | None,
    workers: int,
    pinned: bool,
    pad: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Of every global batch of share * num_ranks samples the rank's share, collated; an incomplete last one is not.

    taken: samples of this epoch, over all ranks, that are not to come again. shuffle: seed of the order, which is
    another one in every epoch; None: as they are. workers: processes that read ahead. pinned: in memory from which a
    GPU copies beside its work. pad: makes a sample as long as all others. Raises ValueError where samples without
    numbers are to be shuffled or read by workers.
    """
    by_shard = callable(samples) and _num_arguments(samples) >= 2
    given: Any = samples
    if isinstance(samples, DataLoader):
        raise ValueError(
            f"trainer.loader was given a DataLoader, whose items are batches: give it the samples, its dataset of "
            f"{type(samples.dataset).__name__}, with collate=, shuffle= and workers= as the DataLoader has them"
        )
    if callable(samples) and not _is_indexed(samples):
        given = samples(rank, num_ranks) if by_shard else samples()
    collated = collate or default_collate
    if pad is not None:
        collated = partial(_collated_alike, collated, pad)
    if _is_indexed(given):
        order = _order(len(given), shuffle, epoch)
        total = share * num_ranks
        if len(order) < total:
            raise ValueError(_too_few(f"{len(order)} samples", total))
        batches = [
            order[start + rank * share : start + (rank + 1) * share]
            for start in range(taken, len(order) - total + 1, total)
        ]
        yield from DataLoader(
            given,
            batch_sampler=batches,
            collate_fn=collated,
            num_workers=workers,
            pin_memory=pinned,
            generator=_of_workers(rank, epoch, taken),
        )
        return
    if shuffle is not None or workers:
        raise ValueError(
            f"{type(given).__name__} gives its samples one after the other: shuffle= and workers= need samples with "
            "numbers (__getitem__ and __len__); shuffle it yourself, by a seed, or read ahead in it"
        )
    first, each = (0, share) if by_shard else (rank * share, share * num_ranks)
    own: list[Any] = []
    index, place = -1, 0
    for index, sample in enumerate(itertools.islice(given, taken // num_ranks if by_shard else taken, None)):
        place = index % each
        if first <= place < first + share:
            own.append(sample)
        if place == each - 1:
            yield collated(own)
            own = []
    if index + 1 < each and not taken:
        used_up = " (an iterator is used up after one epoch: give a function that makes one)" if index < 0 else ""
        raise ValueError(_too_few(f"{index + 1} samples{used_up}", each))


def _too_few(found: str, needed: int) -> str:
    return (
        f"trainer.loader found {found}, a global batch has {needed}: give more, or plan with a smaller --global-batch"
    )


class Padded:
    """Fills up the sequences of a sample to one length. Raises ValueError if one is longer, or there is none."""

    def __init__(self, length: int, values: Padding) -> None:
        self._length, self._values = length, values

    def __call__(self, sample: Any) -> Any:
        """The sample, padded."""
        if isinstance(sample, Mapping):
            made: Any = dict(sample)
        else:
            made = list(sample) if isinstance(sample, tuple | list) else [sample]
        for key, value in self._values.items():
            made[key] = self._padded(key, made, value)
        if isinstance(sample, Mapping):
            return made
        return tuple(made) if isinstance(sample, tuple | list) else made[0]

    def _padded(self, key: Any, sample: Any, value: float) -> torch.Tensor:
        try:
            given = torch.as_tensor(sample[key])
        except (KeyError, IndexError, TypeError):
            known = list(sample) if isinstance(sample, dict) else list(range(len(sample)))
            raise ValueError(f"pad has {key!r}, but a sample has only {known}: name what is to be padded") from None
        missing = self._length - (given.shape[0] if given.dim() else 0)
        if missing < 0:
            raise ValueError(
                f"a sample has {given.shape[0]} tokens in {key!r}, the plan's sequences have {self._length}: cut it, "
                f"or plan with --seq-len {given.shape[0]}"
            )
        return torch.cat([given, given.new_full((missing, *given.shape[1:]), value)])


def _collated_alike(collate: Callable[[list[Any]], Any], pad: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate([pad(sample) for sample in samples])


def _of_workers(rank: int, epoch: int, taken: int) -> torch.Generator:
    """What seeds the workers of a rank, who may draw in reading samples: else DataLoader takes a number of the
    script's own, and would give all ranks the same."""
    return torch.Generator().manual_seed((torch.initial_seed() + hash((rank, epoch, taken))) % 2**63)


def _order(length: int, shuffle: int | None, epoch: int) -> Any:
    if shuffle is None:
        return range(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(shuffle * 1_000_003 + epoch)).tolist()


def _is_indexed(samples: Any) -> bool:
    return hasattr(samples, "__getitem__") and hasattr(samples, "__len__") and not isinstance(samples, IterableDataset)


def _num_arguments(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
