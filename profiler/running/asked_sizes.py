"""Finds where a model asks for the size of a parameter. No operator runs for that, only a function of torch."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SIZES = ("size", "__len__", "numel", "nelement")


@contextmanager
def asked_sizes(module: nn.Module, dims: int) -> Iterator[set[tuple[str, str]]]:
    """Yields a set that fills, while it lasts, with pairs: a parameter of `dims` dims whose size is asked for, and the
    innermost running module of those that hold such parameters."""
    names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters() if p.dim() == dims}
    sizes = _AskedSizes(names)
    with ExitStack() as stack:
        for name, each in module.named_modules():
            if any(p in names for p in each.parameters()):
                begins = each.register_forward_pre_hook(partial(sizes.begin, name), prepend=True)
                ends = each.register_forward_hook(sizes.end, always_call=True)
                stack.callback(begins.remove)
                stack.callback(ends.remove)
        if names:
            stack.enter_context(sizes)
        yield sizes.asked


class _AskedSizes(TorchFunctionMode):
    def __init__(self, names: dict[torch.Tensor, str]) -> None:
        super().__init__()
        self.asked: set[tuple[str, str]] = set()
        self._names = names
        self._running = [""]

    def begin(self, name: str, *call: object) -> None:
        """A module of that name runs from now on."""
        self._running.append(name)

    def end(self, *call: object) -> None:
        """The last one that began has ended."""
        self._running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Notes, and runs, `func`."""
        is_shape = getattr(func, "__self__", None) is torch.Tensor.shape
        if (is_shape or getattr(func, "__name__", "") in _SIZES) and args[0] in self._names:
            self.asked.add((self._names[args[0]], self._running[-1]))
        return func(*args, **(kwargs or {}))
