"""A rank's share of every global batch, of which it reads no other sample where samples can be asked for by number."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

Samples = Iterable[Any] | Callable[..., Iterable[Any]]


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
) -> Iterator[Any]:
    """Of every global batch of share * num_ranks samples the rank's share, collated; an incomplete last one is not.

    taken: samples of this epoch, over all ranks, that are not to come again. shuffle: seed of the order, which is
    another one in every epoch; None: as they are. workers: processes that read ahead. pinned: in memory from which a
    GPU copies beside its work. Raises ValueError where samples without numbers are to be shuffled or read by workers.
    """
    by_shard = callable(samples) and _num_arguments(samples) >= 2
    given: Any = samples
    if callable(samples) and not _is_indexed(samples):
        given = samples(rank, num_ranks) if by_shard else samples()
    collated = collate or default_collate
    if _is_indexed(given):
        order = _order(len(given), shuffle, epoch)
        total = share * num_ranks
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
        )
        return
    if shuffle is not None or workers:
        raise ValueError(
            f"{type(given).__name__} gives its samples one after the other: shuffle= and workers= need samples with "
            "numbers (__getitem__ and __len__); shuffle it yourself, by a seed, or read ahead in it"
        )
    first, each = (0, share) if by_shard else (rank * share, share * num_ranks)
    own: list[Any] = []
    for index, sample in enumerate(itertools.islice(given, taken // num_ranks if by_shard else taken, None)):
        place = index % each
        if first <= place < first + share:
            own.append(sample)
        if place == each - 1:
            yield collated(own)
            own = []


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
