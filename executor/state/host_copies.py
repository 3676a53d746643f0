"""Copies of a GPU's numbers that are written beside the steps that follow."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from .boxes import Box


class HostCopies:
    """Copies of boxes in the memory of the host: of a GPU in pinned pages, which stay for the next save, because it
    fills them beside its work, and because to pin them takes long."""

    def __init__(self) -> None:
        self._pages: dict[MetadataIndex, torch.Tensor] = {}

    def take(self, found: list[Box]) -> tuple[list[Box], Callable[[], None]]:
        """(copies, what returns once they are made); what is launched afterwards does not change them.

        Those of the time before are written over.
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
    """Whether a copy of it can be made beside what the host does."""
    return tensor.is_cuda


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host that a GPU writes to by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
