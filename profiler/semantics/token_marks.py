"""Marks on ordinary tensors that say which tokens of a sequence they hold, if ranks hold parts of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod

import torch

from .logit_shards import LogitShards, as_before, with_all_classes

Spans = tuple[tuple[int, int], ...]
"""Ranges of places, in ascending order: (first, the one after the last)."""


@dataclass(frozen=True)
class Held:
    """The mark of a tensor that holds only the tokens `spans` of `length` along its dim `dim`, and tells shapes as if
    it held all.

    The dim may be several joined ones: `before` times tokens times `after` (a batch of sequences, flattened). within:
    the tokens that these are in turn a part of (sequence parallelism); () if none.
    """

    dim: int
    length: int
    spans: Spans
    before: int = 1
    after: int = 1
    within: Spans = ()

    @property
    def whole_size(self) -> int:
        """Size of the dim if all tokens were here."""
        return self.before * self.length * self.after

    @property
    def own_size(self) -> int:
        """Its size as it is."""
        return self.before * num_tokens(self.spans) * self.after

    @property
    def alone(self) -> bool:
        """Whether the dim counts tokens and nothing else."""
        return self.before == self.after == 1

    def at(self, dim: int) -> "Held":
        """The mark of a tensor that holds these tokens along another dim."""
        if dim == self.dim:
            return self
        return Held(dim, self.length, self.spans, self.before, self.after, self.within)

    def same_tokens(self, other: "Held") -> bool:
        """Whether two tensors hold the same, wherever their dims are."""
        return self == other.at(self.dim)


@dataclass(frozen=True)
class Share:
    """The mark of a tensor that has another value on every rank, and stands for the mean of these values."""


SHARE = Share()

Mark = Held | Share

_MARK = "_held_tokens"
"""Attribute of marked tensors; results of functions do not inherit it."""


def mark_of(tensor: object) -> Mark | None:
    """What is known of a tensor; None: it is whole, and the same on every rank."""
    return getattr(tensor, _MARK, None) if isinstance(tensor, torch.Tensor) else None  # compilers follow getattr


def set_mark(tensor: torch.Tensor, mark: Mark | None) -> torch.Tensor:
    """Mark a tensor and return it; None removes its mark."""
    if mark is not None:
        tensor.__dict__[_MARK] = mark
    else:
        tensor.__dict__.pop(_MARK, None)
    return tensor


def unseen(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """function(tensor), out of sight of modes that follow tokens: a function that does nothing to tokens. The result
    keeps the tensor's mark."""
    mark = mark_of(tensor)
    if mark is None and not isinstance(tensor, LogitShards):
        return function(tensor)
    with torch._C.DisableTorchFunction():
        made = as_before(function(tensor), tensor)
    return set_mark(made, mark)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape it would have with all tokens."""
    shape = list(own_shape(tensor))
    mark = mark_of(tensor)
    if isinstance(mark, Held):
        shape[mark.dim] = mark.whole_size
    return torch.Size(shape)


def own_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape with the tokens that are here."""
    with torch._C.DisableTorchFunction():
        return with_all_classes(tensor, tensor.shape)


def num_tokens(spans: Spans) -> int:
    """How many tokens these are."""
    return sum(end - start for start, end in spans)


def clipped(spans: Spans, start: int, end: int) -> tuple[Spans, int, int]:
    """(those of the tokens that lie from `start` to before `end`, counted from `start`; first; last), where the tensor
    holds these tokens at its places from first to before last."""
    kept = [(max(a, start), min(b, end)) for a, b in spans if max(a, start) < min(b, end)]
    first = sum(min(b, start) - a for a, b in spans if a < start)
    count = num_tokens(tuple(kept))
    return tuple((a - start, b - start) for a, b in kept), first, first + count


def part_of(spans: Spans, index: int, count: int) -> Spans:
    """The `index`-th of `count` equal parts of the held tokens, in the order in which they are held."""
    size = num_tokens(spans) // count
    found, behind = [], 0
    for a, b in spans:
        first, last = max(index * size, behind), min((index + 1) * size, behind + b - a)
        if first < last:
            found.append((a + first - behind, a + last - behind))
        behind += b - a
    return tuple(found)


def divided(held: Held, index: int, count: int) -> Held:
    """The mark of the `index`-th of `count` equal parts of the tokens that a tensor holds."""
    return replace(held, spans=part_of(held.spans, index, count), within=held.spans)


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """The same tokens, with adjoining ranges merged."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)


def taken(whole: torch.Tensor, held: Held) -> torch.Tensor:
    """The part of a whole tensor, along held.dim, that holds the tokens of the mark."""
    if not held.alone:
        sizes = (held.before, held.length, held.after)
        inner = taken(whole.unflatten(held.dim, sizes), Held(held.dim + 1, held.length, held.spans))
        return inner.flatten(held.dim, held.dim + 2)
    pieces = [whole.narrow(held.dim, start, end - start) for start, end in held.spans]
    if not pieces:
        return whole.narrow(held.dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, held.dim)


def reshaped(shape: torch.Size, held: Held, sizes: list[int]) -> Held | None:
    """The mark after a view of the whole shape as `sizes`; None if that would spread the tokens over several dims."""
    ahead = prod(shape[: held.dim]) * held.before
    tokens = ahead * held.length
    for dim, size in enumerate(sizes):
        outside = prod(sizes[:dim])
        if ahead % outside == 0 and (outside * size) % tokens == 0:
            return replace(held, dim=dim, before=ahead // outside, after=outside * size // tokens)
    return None
