"""Boxes: the parts of whole tensors that a rank holds."""

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor

from ...planner.cost.sharding import shard_dim
from ..parallel.tensor_layout import ParameterCut


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor. offsets: where it begins in the whole. tensor: this rank's memory of it."""

    key: str
    whole: torch.Size
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where the box lies in the whole tensor."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)

    @property
    def index(self) -> MetadataIndex:
        """The key of the box in a checkpoint."""
        return MetadataIndex(self.key, torch.Size(self.offsets))


def boxes(
    key: str, tensor: torch.Tensor, cut: ParameterCut | None, tensor_rank: int, shard_rank: int, num_shards: int
) -> list[Box]:
    """The boxes of a whole tensor that make up this rank's shard.

    tensor: what tensor parallelism has left on this tensor rank, or a DTensor of fully_shard, which divides that along
    one dim. A fused weight is cut part by part, so its shard has several boxes.
    """
    gathered = tuple(tensor.shape)
    offsets = [0] * len(gathered)
    local = tensor.detach()
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        if local.numel() == 0:
            return []
        divided = shard_dim(gathered, num_shards)
        offsets[divided] = shard_rank * -(-gathered[divided] // num_shards)
    if cut is None:
        return [Box(key, tensor.shape, tuple(offsets), local)]
    found = []
    whole = torch.Size(sum(cut.parts) if dim == cut.dim else size for dim, size in enumerate(gathered))
    here = whole_start = 0  # where the part begins, in what this tensor rank has and in the whole
    held = range(offsets[cut.dim], offsets[cut.dim] + local.shape[cut.dim])
    for part in cut.parts:
        width = part // cut.degree
        start, end = max(here, held.start), min(here + width, held.stop)
        if start < end:
            place = list(offsets)
            place[cut.dim] = whole_start + tensor_rank * width + start - here
            piece = local.narrow(cut.dim, start - held.start, end - start)
            found.append(Box(key, whole, tuple(place), piece))
        here, whole_start = here + width, whole_start + part
    return found
