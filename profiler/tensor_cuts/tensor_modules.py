"""Modules that tensor parallelism knows how to cut, and which dim of their weights holds what."""

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or Hugging Face's Conv1D (a linear layer with its weight transposed)."""
    return has_weight(module) and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")


def has_weight(module: nn.Module) -> bool:
    """Whether the weight is a parameter of its own, not computed from others (spectral norm, weight norm)."""
    return module._parameters.get("weight") is not None


def is_convolution(module: nn.Module) -> bool:
    """A convolution whose output channels each read all input channels."""
    return has_weight(module) and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1


def is_product(module: nn.Module) -> bool:
    """A module that may be cut by its output features, or by its input features."""
    return is_linear(module) or is_convolution(module)


def features(module: nn.Module) -> tuple[int, int]:
    """(input, output) features of a linear module or channels of a convolution, from its weight."""
    first, second = module.get_parameter("weight").shape[:2]
    return (second, first) if output_dim(module) == 0 else (first, second)


def output_dim(module: nn.Module) -> int:
    """The dim of its weight that holds output features."""
    return 0 if isinstance(module, nn.Linear) or is_convolution(module) else 1
