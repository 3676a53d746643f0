"""A rank's share of every global batch, of which it reads no other sample where samples can be asked for by number."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

Samples = Iterable[Any] | Callable[..., Iterable[Any]]

Padding = Mapping[str, float] | Mapping[int, float]
"""Key of a sample (number, in a tuple) -> what its sequence is filled up with."""

MOST_SORTED = 50
"""Global batches whose samples are sorted by length together; where they are shuffled a quarter of an epoch at most, so
that epochs stay different: as many as Hugging Face's group_by_length sorts."""

MOST_LENGTHS = 64
"""Different lengths that batches of buckets are filled up to, at most: a pipeline looks at its stages anew for each."""


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
    pad: "Padded | None" = None,
    lengths: Sequence[int] | None = None,
    share_of: Callable[[int], int] | None = None,
    begins: Callable[[Any], None] | None = None,
) -> Iterator[Any]:
    """Of every global batch of share * num_ranks samples the rank's share, collated; an incomplete last one is not.

    taken: samples of this epoch, over all ranks, that are not to come again. shuffle: seed of the order, which is
    another one in every epoch; None: as they are. workers: processes that read ahead. pinned: in memory from which a
    GPU copies beside its work. pad: makes a sample as long as all others, or as the others of its batch. lengths: of
    every sample, those of similar length are put in one batch; None: they are not. share_of: the share in the k-th
    batch from here on, where batches are not alike. begins: told the first sample of what every rank reads all of.
    Raises ValueError where samples without numbers are to be shuffled, sorted by length or read by workers, or
    `lengths` is not one number for each.
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
    if pad is not None and lengths is None:
        collated = partial(_collated_alike, collated, pad)
    sizes = map(share_of, itertools.count()) if share_of is not None else itertools.repeat(share)
    if _is_indexed(given):
        order = _order(len(given), shuffle, epoch)
        if lengths is not None:
            order = _in_buckets(order, lengths, share * num_ranks, shuffle, epoch)
        starts = _starts(sizes, num_ranks, taken, len(order))
        if not starts and (not taken or len(order) < share * num_ranks):
            raise ValueError(_too_few(f"{len(order)} samples", share * num_ranks))
        batches = [order[start + rank * own : start + (rank + 1) * own] for start, own in starts]
        if pad is not None and lengths is not None:
            longest = [max(lengths[i] for i in order[start : start + own * num_ranks]) for start, own in starts]
            batches = [[(i, most) for i in batch] for batch, most in zip(batches, longest, strict=True)]
            given = _FilledUp(given, pad)
        yield from DataLoader(
            given,
            batch_sampler=batches,
            collate_fn=collated,
            num_workers=workers,
            pin_memory=pinned,
            generator=_of_workers(rank, epoch, taken),
        )
        return
    if shuffle is not None or workers or lengths is not None:
        raise ValueError(
            f"{type(given).__name__} gives its samples one after the other: shuffle=, lengths= and workers= need "
            "samples with numbers (__getitem__ and __len__); shuffle it yourself, by a seed, or read ahead in it"
        )
    if by_shard:
        rank, num_ranks, taken, begins = 0, 1, taken // num_ranks, None
    yield from map(collated, _in_turn(given, sizes, rank, num_ranks, taken, begins))


def _in_turn(
    samples: Iterable[Any],
    sizes: Iterable[int],
    rank: int,
    num_ranks: int,
    taken: int,
    begins: Callable[[Any], None] | None,
) -> Iterator[list[Any]]:
    """The rank's samples of every global batch, of samples that come one after the other. sizes: of its shares."""
    rest = itertools.islice(samples, taken, None)
    for number, own in enumerate(sizes):
        found, mine = 0, list[Any]()
        for sample in itertools.islice(rest, own * num_ranks):
            if begins is not None and number == found == 0:
                begins(sample)
            if found // own == rank:
                mine.append(sample)
            found += 1
        if found < own * num_ranks:
            if not number and not taken:
                used_up = "" if found else " (an iterator is used up after one epoch: give a function that makes one)"
                raise ValueError(_too_few(f"{found} samples{used_up}", own * num_ranks))
            return
        yield mine


def _starts(sizes: Iterable[int], num_ranks: int, taken: int, length: int) -> list[tuple[int, int]]:
    """(where a global batch begins, a rank's share in it) of all that are complete."""
    found: list[tuple[int, int]] = []
    for own in sizes:
        if taken + own * num_ranks > length:
            return found
        found.append((taken, own))
        taken += own * num_ranks
    return found


def _in_buckets(order: Any, lengths: Sequence[int], total: int, shuffle: int | None, epoch: int) -> list[int]:
    """The numbers of whole global batches of `total` samples, each of similar lengths; within one they are in the order
    given, and where samples are shuffled so are the batches."""
    if len(lengths) != len(order):
        raise ValueError(f"lengths= has {len(lengths)} numbers for {len(order)} samples: give the length of every one")
    count = len(order) // total
    window = total * (MOST_SORTED if shuffle is None else min(MOST_SORTED, max(1, count // 4)))
    batches = []
    for first in range(0, count * total, window):
        places = range(first, min(first + window, count * total))
        by_length = sorted(places, key=lambda place: lengths[order[place]])
        batches += [sorted(by_length[i : i + total]) for i in range(0, len(by_length), total)]
    if shuffle is not None:
        batches = [batches[i] for i in _order(count, shuffle + 1, epoch)]
    return [order[place] for batch in batches for place in batch]


class _FilledUp(Dataset[Any]):
    """Samples by number and length of the longest that comes with it."""

    def __init__(self, samples: Any, pad: "Padded") -> None:
        self._samples, self._pad = samples, pad

    def __getitem__(self, place: tuple[int, int]) -> Any:
        number, longest = place
        return self._pad(self._samples[number], longest)


def _too_few(found: str, needed: int) -> str:
    return (
        f"trainer.loader found {found}, a global batch has {needed}: give more, or plan with a smaller --global-batch"
    )


class Padded:
    """Fills up the sequences of a sample: to the plan's length, or, unless that is `always` to be, to that of the
    longest of its batch, if that is told, which is then one of MOST_LENGTHS. Raises ValueError if one is longer, or
    there is none.
    """

    def __init__(self, length: int, values: Padding, always: bool = False) -> None:
        self._length, self._values = length, values
        self._step = length if always else -(-length // MOST_LENGTHS)

    def __call__(self, sample: Any, longest: int | None = None) -> Any:
        """The sample, padded."""
        length = self._length
        if longest is not None and longest <= length:
            length = min(length, max(1, -(-longest // self._step)) * self._step)
        if isinstance(sample, Mapping):
            made: Any = dict(sample)
        else:
            made = list(sample) if isinstance(sample, tuple | list) else [sample]
        for key, value in self._values.items():
            made[key] = self._padded(key, made, value, length)
        if isinstance(sample, Mapping):
            return made
        return tuple(made) if isinstance(sample, tuple | list) else made[0]

    def _padded(self, key: Any, sample: Any, value: float, length: int) -> torch.Tensor:
        try:
            given = torch.as_tensor(sample[key])
        except (KeyError, IndexError, TypeError):
            known = list(sample) if isinstance(sample, dict) else list(range(len(sample)))
            raise ValueError(f"pad has {key!r}, but a sample has only {known}: name what is to be padded") from None
        found = given.shape[0] if given.dim() else 0
        if found > self._length:
            raise ValueError(
                f"a sample has {found} tokens in {key!r}, the plan's sequences have {self._length}: cut it, or plan "
                f"with --seq-len {found}"
            )
        if found > length:
            raise ValueError(
                f"a sample has {found} tokens in {key!r}, but no more than {length} in its batch by lengths=: give "
                "the length of the longest sequence of each sample"
            )
        return torch.cat([given, given.new_full((length - found, *given.shape[1:]), value)])


def _collated_alike(collate: Callable[[list[Any]], Any], pad: Padded, samples: list[Any]) -> Any:
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
