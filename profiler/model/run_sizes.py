"""Shapes of a model's tensors at several batch sizes and lengths, which tell what each dim of a tensor grows with."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from ..running.fake import FakeModel
from ..running.positions import longest
from ..running.run_shapes import Shapes
from .chain import Crossing, LayerChain
from .other_runs import shapes_at

Dim = Literal["batch", "sequence", "other"]


class RunSizes:
    """Shapes at two batch sizes (at a third when asked) and, for models with a sequence, at a second length."""

    def __init__(
        self, fake: FakeModel, chain: LayerChain, seq_len: int | None, two: Shapes, like: "RunSizes | None" = None
    ) -> None:
        self.seq_len = seq_len
        self.one = shapes_at(fake, chain, 1, seq_len)
        self.two = two
        self._fake, self._chain = fake, chain
        self._longer = None if like is not None else _at_other_length(fake, chain, seq_len)
        self._other = other_length(seq_len)
        self._like = like or self

    @property
    def takes_other_lengths(self) -> bool:
        """Whether the model ran at a second length."""
        return self._like._longer is not None

    @property
    def longest(self) -> int | None:
        """The largest number of tokens per sample for which every table of positions has rows; None if no table is
        known to end."""
        if self._like is not self:
            return self._like.longest
        if self._longer is None or self.seq_len is None or self._other is None:
            return None
        return longest(self.one.furthest, self.seq_len, self._longer.furthest, self._other)

    def at(self, size: int) -> Shapes:
        """Shapes at one, two or three samples."""
        return {1: self.one, 2: self.two}.get(size) or self._three

    @cached_property
    def _three(self) -> Shapes:
        if self._fake.mode is None or not self.two.is_like(self.one):
            return shapes_at(self._fake, self._chain, 3, self.seq_len)
        return self.two.one_more(self.one)

    def dims(self, crossing: Crossing) -> tuple[Dim, ...]:
        """What makes each dim of a crossing tensor larger."""
        if self._like is not self:
            return self._like.dims(crossing)
        if any(crossing.producer not in shapes.tensors for shapes in (self.one, self.two)):
            raise ValueError(
                f"the forward of {self._fake.loaded.source} runs other operations for one sample than for two: "
                f"{crossing.producer.name}, which crosses between layers, is not called as often; make it the same for "
                "every batch size"
            )
        one, two = (shapes.tensors[crossing.producer].shape for shapes in (self.one, self.two))
        longer = None if self._longer is None else self._longer.tensors.get(crossing.producer)
        return dims_of(one, two, None if longer is None else longer.shape)

    def sequence_dim(self, crossing: Crossing) -> int | None:
        """The one dim of a crossing tensor that grows with the sequence; None if there is none or more than one."""
        dims = self.dims(crossing)
        return dims.index("sequence") if dims.count("sequence") == 1 else None


def _at_other_length(fake: FakeModel, chain: LayerChain, seq_len: int | None) -> Shapes | None:
    """Shapes of one sample at another length; None if there is no other, or the model does not take it."""
    other = other_length(seq_len)
    if other is None:
        return None
    try:
        return shapes_at(fake, chain, 1, other)
    except ValueError:
        return None


def other_length(seq_len: int | None) -> int | None:
    """Half the length, None if it is below 1: models with learned positions take no longer sequence than their own."""
    return seq_len // 2 if seq_len is not None and seq_len >= 2 else None


def dims_of(one: Sequence[int], two: Sequence[int], longer: Sequence[int] | None) -> tuple[Dim, ...]:
    """What makes each dim larger; a dim that both do (tokens of all samples in one) counts as batch."""
    dims: list[Dim] = []
    for i, size in enumerate(one):
        if two[i] != size:
            dims.append("batch")
        elif longer is not None and longer[i] != size:
            dims.append("sequence")
        else:
            dims.append("other")
    return tuple(dims)
