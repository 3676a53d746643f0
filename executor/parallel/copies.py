"""Copies of this rank's part of a model, as averages of weights hold them (torch.optim.swa_utils.AveragedModel)."""

import copy
from typing import Any

from torch import nn


def numbers_of(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A module's parameters and buffers under their names, for copy.deepcopy; it runs nothing."""
    if id(module) not in memo:
        memo[id(module)] = found = nn.Module()
        for name, parameter in module._parameters.items():
            found.register_parameter(name, None if parameter is None else _numbers_of_one(parameter, memo))
        for name, buffer in module._buffers.items():
            is_saved = name not in module._non_persistent_buffers_set
            found.register_buffer(name, copy.deepcopy(buffer, memo), persistent=is_saved)
        for name, child in module._modules.items():
            found.add_module(name, None if child is None else numbers_of(child, memo))
        found.train(module.training)
    copied: nn.Module = memo[id(module)]
    return copied


def _numbers_of_one(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A copy of a parameter without its gradient: a DTensor's own copy would copy that, too, and fail."""
    if id(parameter) not in memo:
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    copied: nn.Parameter = memo[id(parameter)]
    return copied
