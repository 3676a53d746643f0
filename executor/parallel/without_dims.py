"""Parameters without dims (CLIP's logit_scale) under fully_shard, which takes none such.

Their module holds them as tensors of one element, which are sharded, reduced and stepped as any others are, and is of
a class of the same name in which they are read without dims, as its forward expects. What goes out of a run has no dims
either: AppliedModel.without_dims names them.
"""

from collections.abc import Collection
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class _ReadWithoutDims:
    """Lets a module read a parameter of one element without dims. A shard is returned as it is: fully_shard looks for
    it under the parameter's name, and nobody can compute with it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        held = nn.Module.__getattr__(module, self._name)
        return held.view(()) if isinstance(held, Tensor) and not isinstance(held, DTensor) else held


def read_without_dims(module: nn.Module, names: Collection[str]) -> None:
    """Let a module read these parameters without dims. Raises ValueError if its class cannot be extended."""
    own: type = type(module)
    module.__class__ = _reading(own, tuple(names))


@cache
def _reading(own: type, names: tuple[str, ...]) -> type:
    body = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    try:
        return type(own)(own.__name__, (own,), {**body, **{name: _ReadWithoutDims(name) for name in names}})
    except TypeError as error:
        raise ValueError(
            f"{own.__name__} holds {names[0]}, which has no dims: fully_shard takes none such, and no class "
            f"that reads one of them without can be made of it ({error}); make {names[0]} a tensor of one element"
        ) from error
