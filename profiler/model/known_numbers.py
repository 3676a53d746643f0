"""Fake tensors whose numbers are known: those of a batch, and what is computed of nothing else. A model that splits its
batch by the sizes of the pictures in it, or looks for where they stand, does so on fake tensors as on real ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from .gpu_kernel_emulation import Mode

MOST_KNOWN = 1 << 24
"""Numbers of one tensor that are computed: 2,000 by 2,000 pixels of four samples."""


@contextmanager
def knowing_numbers(mode: FakeTensorMode) -> Iterator[None]:
    """The fake mode, in which operators on known numbers give known numbers."""
    limit = patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST_KNOWN)
    with limit, mode, _KnownRanges(mode), _KnownLists():
        yield


def known(mode: FakeTensorMode, real: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A fake tensor with the numbers of a real one; in that dtype, if it is given."""
    with no_dispatch():
        own = real.detach().to(dtype or real.dtype, copy=True)
    made: torch.Tensor = mode.fake_tensor_converter.from_real_tensor(mode, own, make_constant=True)
    return made


class _KnownLists(TorchFunctionMode):
    """torch.tensor of a list of tensors, whose numbers it reads where fake ones have none."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            numbers = tree_map(lambda x: x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x, args[0])
            args = (numbers, *args[1:])
        return func(*args, **(kwargs or {}))


class _KnownRanges(Mode):
    """Integers that operators make of no tensor (positions, zeros) are known, too."""

    _MAKE = ("arange", "zeros", "ones", "full", "scalar_tensor")

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        is_made = func.overloadpacket.__name__ in self._MAKE and made.device.type != "meta"
        if not is_made or made.is_floating_point() or made.numel() > MOST_KNOWN:
            return made
        with no_dispatch():
            real = func(*args, **(kwargs or {}))
        return known(self._mode, real)
