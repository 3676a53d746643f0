"""Mixed precision where nothing is sharded: copies of parameters stand in their place while a step computes.

The numbers are those of fully_shard's mixed precision: layers get their inputs and parameters in bf16, a gradient of
each micro-batch is cast and added up in fp32. Copies are made once per step, which no one but autograd knows: the
parameters, and their gradients, are fp32 for whoever looks between steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


class Casts:
    """Copies of all parameters of a module in another dtype; the parameters stay the same objects."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
        self._places = [
            (own._parameters, name, parameter)
            for own in module.modules()
            for name, parameter in own._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts modules hold copies. Backward, which may repeat forwards, belongs inside."""
        copies = {p: p.to(self._dtype) for p in dict.fromkeys(p for *_, p in self._places)}
        try:
            for held, name, parameter in self._places:
                held[name] = copies[parameter]  # type: ignore[assignment]
            self._tell_recurrent()
            yield
        finally:
            for held, name, parameter in self._places:
                held[name] = parameter
            self._tell_recurrent()

    def _tell_recurrent(self) -> None:
        for module in self._recurrent:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def cast_inputs(self, module: nn.Module) -> None:
        """Let a module cast floating-point inputs to the dtype of the copies."""
        module.register_forward_pre_hook(self._cast, prepend=True, with_kwargs=True)

    def _cast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def cast(x: Any) -> Any:
            return x.to(self._dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        return tree_map(cast, args), tree_map(cast, kwargs)
