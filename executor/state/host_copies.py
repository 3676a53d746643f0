"""Copies of a GPU's numbers in the host's memory, which are written to disk beside the steps that follow."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from .boxes import Box


class HostCopies:
    """Copies of boxes in the host's memory. Those of a GPU's boxes are in pinned pages, which the GPU fills beside its
    other work, and which are kept for the next save, because pinning takes long."""

    def __init__(self) -> None:
        self._pages: dict[MetadataIndex, torch.Tensor] = {}

    def take(self, found: list[Box]) -> tuple[list[Box], Callable[[], None]]:
        """(copies, a function that returns once they are made). What is launched afterwards does not change them.

        The copies of the last call are overwritten.
        """
        copies = [replace(box, tensor=self._copy(box)) for box in found]
        if not any(is_on_gpu(box.tensor) for box in found):
            return copies, lambda: None
        made = torch.cuda.Event()
        made.record()
        return copies, made.synchronize

    def _copy(self, box: Box) -> torch.Tensor:
        given = box.tensor
        if not is_on_gpu(given):
            return given.to("cpu", copy=True)
        page = self._pages.get(box.index)
        if page is None or page.shape != given.shape or page.dtype != given.dtype:
            page = self._pages[box.index] = pinned_like(given)
        return page.copy_(given, non_blocking=True)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, which can copy it while the host does something else."""
    return tensor.is_cuda


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned tensor in the host's memory, which a GPU can write to by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
