"""Gradients that are summed over a group of ranks together, in flat buffers."""

from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...planner.cost.traffic import BUCKET_ELEMENTS

SomeTensor = TypeVar("SomeTensor", bound=torch.Tensor)


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's shard of a parameter's gradient, in the same memory; None if there is no gradient."""
    found = local_gradients([parameter])
    return found[0] if found else None


@torch.no_grad()  # else what is local becomes a node for autograd
def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shards of the gradients, in the same memory; parameters without a gradient are left out."""
    grads = (p.grad for p in parameters)
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads if g is not None]


def in_buffers(tensors: Iterable[SomeTensor]) -> list[list[SomeTensor]]:
    """Lists of tensors, in their order, each of which fits into one flat buffer of one dtype."""
    buffers: list[list[SomeTensor]] = []
    filled = 0
    for tensor in tensors:
        if not buffers or tensor.dtype != buffers[-1][0].dtype or filled + tensor.numel() > BUCKET_ELEMENTS:
            buffers.append([])
            filled = 0
        buffers[-1].append(tensor)
        filled += tensor.numel()
    return buffers


def all_reduce(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, divide_by: int = 1) -> None:
    """Sum gradients over a group, in flat buffers, and divide them by `divide_by`. All ranks of the group must have
    gradients for the same parameters."""
    for grads in in_buffers(local_gradients(parameters)):
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=group)
        if divide_by != 1:
            flat /= divide_by
        for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))
