"""Where learned tables of positions end, by looking positions up with real numbers, which fake tensors do not have."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from .gpu_kernel_emulation import Mode, device_of, tensors_in

_MOST_ELEMENTS = 1_000_000


class Positions(Mode):
    """Follows integers that come from no batch and no parameter (arange, and what is made of it) beside their fakes.

    furthest: table (full name of the parameter) -> (its rows, highest row that is read).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.furthest: dict[str, tuple[int, int]] = {}
        self._names = {p.untyped_storage()._cdata: name for name, p in module.named_parameters()}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it; follow what it returns."""
        if (device := device_of(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        out = self.run(func, args, kwargs)
        if func is torch.ops.aten.embedding.default:
            self._look_up(args[0], args[1])
        given = tensors_in((args, kwargs))
        if func._schema.is_mutable:
            for tensor in given:
                self._known.pop(id(tensor), None)
        elif _is_small_integer(out) and _follows(func) and all(id(tensor) in self._known for tensor in given):
            self._known[id(out)] = (out, self._really(func, args, kwargs))  # holds the fake one: ids are used again
        return out

    def _really(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        def real(leaf: Any) -> Any:
            return self._known[id(leaf)][1] if isinstance(leaf, torch.Tensor) else leaf

        with _disable_current_modes():
            result: torch.Tensor = func(*tree_map(real, args), **tree_map(real, kwargs))
            return result

    def _look_up(self, table: torch.Tensor, rows: torch.Tensor) -> None:
        name = self._names.get(table.untyped_storage()._cdata)
        if name is not None and id(rows) in self._known:
            with _disable_current_modes():
                last = int(self._known[id(rows)][1].max())
            highest = max(last, self.furthest.get(name, (0, -1))[1])
            self.furthest[name] = (table.shape[0], highest)


def _is_small_integer(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    return not tensor.is_floating_point() and not tensor.is_complex() and 0 < tensor.numel() <= _MOST_ELEMENTS


def _follows(func: Any) -> bool:
    """Whether an operator's result follows from its arguments: it neither draws nor leaves memory as it is."""
    return torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in func._overloadpacket.__name__


def longest(at: dict[str, tuple[int, int]], tokens: int, before: dict[str, tuple[int, int]], fewer: int) -> int | None:
    """Most tokens per sample for which every table has a row; None if no table is read by position. at: what was read
    with `tokens` tokens; before: with `fewer`."""
    found = []
    for name, (rows, highest) in at.items():
        _, lower = before.get(name, (rows, highest))
        if highest > lower:
            found.append(tokens + (rows - 1 - highest) * (tokens - fewer) // (highest - lower))
    return min(found, default=None)
