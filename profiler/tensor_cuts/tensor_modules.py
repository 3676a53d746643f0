"""Modules that tensor parallelism can cut, and which dims of their weights hold input and output features."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or Hugging Face's Conv1D (a linear layer with its weight transposed)."""
    return has_weight(module) and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")


def has_weight(module: nn.Module) -> bool:
    """Whether its weight is a parameter, and not computed from others (spectral norm, weight norm)."""
    return module._parameters.get("weight") is not None


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is a convolution in which every output channel reads all input channels."""
    return has_weight(module) and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1


def is_product(module: nn.Module) -> bool:
    """Whether a module may be cut by its output features or by its input features."""
    return is_linear(module) or is_convolution(module)


def features(module: nn.Module) -> tuple[int, int]:
    """(input, output) features of a linear module or channels of a convolution, from its weight."""
    first, second = module.get_parameter("weight").shape[:2]
    return (second, first) if output_dim(module) == 0 else (first, second)


def output_dim(module: nn.Module) -> int:
    """The dim of its weight that holds output features."""
    return 0 if isinstance(module, nn.Linear) or is_convolution(module) else 1


def counts_of(module: nn.Module) -> dict[str, int]:
    """Whole numbers among a module's attributes: its own, and then those of plain objects in its attributes, as
    "config.num_heads"."""
    own = vars(module)
    found = {name: value for name, value in own.items() if type(value) is int}
    for name, value in own.items():
        if _is_plain(name, value):
            found |= {f"{name}.{key}": number for key, number in vars(value).items() if type(number) is int}
    return found


def _is_plain(name: str, value: Any) -> bool:
    return (
        not name.startswith("_") and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | Callable)
    )


def divide_count(module: nn.Module, attribute: str, degree: int) -> Callable[[], None]:
    """Divide one of these numbers, for this module alone. Returns what undoes it. If the number belongs to an object
    that other modules hold, too, the module gets a copy of the object."""
    name, _, key = attribute.partition(".")
    before = getattr(module, name)
    if key:
        own = copy.copy(before)
        vars(own)[key] //= degree
        setattr(module, name, own)
    else:
        setattr(module, name, before // degree)
    return lambda: setattr(module, name, before)
