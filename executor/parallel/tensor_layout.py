"""How parameters of a stage are divided over tensor ranks, and which of their gradients are shares."""

from dataclasses import dataclass, field
from itertools import accumulate

import torch


@dataclass(frozen=True)
class ParameterCut:
    """How a parameter is divided over tensor ranks.

    parts: sizes along `dim` that are divided one by one (a fused qkv); a rank's shard is the concatenation of its
    slices of them. One part: the usual contiguous division.
    """

    dim: int
    parts: tuple[int, ...]
    degree: int

    def local(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of one rank, contiguous."""
        pieces = [
            part.narrow(self.dim, rank * (part.shape[self.dim] // self.degree), part.shape[self.dim] // self.degree)
            for part in full.split(self.parts, self.dim)
        ]
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].contiguous()

    def rows(self, rank: int) -> list[range]:
        """Ranges along `dim` of the whole parameter that one rank holds, in the order of its shard."""
        ends = accumulate(self.parts)
        starts = [end - part + rank * (part // self.degree) for end, part in zip(ends, self.parts, strict=True)]
        return [range(start, start + part // self.degree) for start, part in zip(starts, self.parts, strict=True)]

    def full(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """The whole parameter from the shards of all ranks, in rank order."""
        widths = [part // self.degree for part in self.parts]
        split = [shard.split(widths, self.dim) for shard in shards]
        return torch.cat([piece for part in zip(*split, strict=True) for piece in part], self.dim)


@dataclass
class TensorLayout:
    """What tensor parallelism did to a stage.

    cuts: parameter -> how it is divided. partial: whole parameters of which every tensor rank sees a share of the
    uses (a slice of the sequence, some of the heads), so that their gradients must be summed over tensor ranks.
    """

    cuts: dict[str, ParameterCut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
