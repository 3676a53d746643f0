"""SyncBatchNorm over the data ranks of a stage, on CPUs, too."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ..torch_compat import joined_axes
from .mesh import RankMesh


def synced_norms(model: nn.Module) -> list[nn.SyncBatchNorm]:
    """The batch norms of a model whose statistics run over several ranks."""
    return [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]


def data_group(mesh: RankMesh) -> dist.ProcessGroup | None:
    """Ranks of this stage with other samples; None if there are none. Makes a group, so all ranks must call it."""
    degrees = mesh.plan.degrees
    if mesh.device_mesh is None or degrees.data == 1:
        return None
    if degrees.data_replicate > 1 and degrees.data_shard > 1:
        return joined_axes(mesh.device_mesh, ("data_replicate", "data_shard")).get_group()
    return mesh.group("data_replicate") or mesh.group("data_shard")


def sync_norms(model: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Let every SyncBatchNorm normalise over the ranks of a group; None: over this rank's samples alone. (Torch's own
    goes over all ranks of the job, whatever part of the model they hold.)"""
    for module in synced_norms(model):
        if group is None:
            normalise_here(module)
        elif device.type == "cpu":  # torch has no such norm there, and DDP accepts none
            reduce, num_ranks = partial(all_reduce, group=group), dist.get_world_size(group)
            normalise_here(module).forward = partial(normalised, module, reduce, num_ranks)
        else:
            module.process_group = group


def normalise_here(module: Any) -> Any:
    """Let a SyncBatchNorm normalise over the samples that are here; returns it."""
    module.__class__ = _BatchNorm
    module._check_input_dim = lambda input: None
    return module


def normalised(
    module: nn.SyncBatchNorm, reduce: Callable[[torch.Tensor], torch.Tensor], num_ranks: int, x: torch.Tensor
) -> torch.Tensor:
    """The output of a batch norm whose statistics run over several ranks. reduce: sums a tensor over these ranks;
    gradients go through it."""
    if not (module.training or module.running_mean is None):
        return functional.batch_norm(
            x, module.running_mean, module.running_var, module.weight, module.bias, False, 0.0, module.eps
        )
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = x.numel() // x.shape[1] * num_ranks
    mean = reduce(x.sum(dims)) / count
    centred = x - mean.view(shape)
    variance = reduce(centred.square().sum(dims)) / count
    if module.training and module.running_mean is not None:
        _follow(module, mean.detach(), variance.detach() * count / max(1, count - 1))
    made: torch.Tensor = centred * (variance + module.eps).rsqrt().view(shape)
    return made if module.weight is None else made * module.weight.view(shape) + module.bias.view(shape)


@torch.no_grad()
def _follow(module: nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update the running statistics, as torch's batch norms do."""
    assert module.num_batches_tracked is not None
    assert module.running_mean is not None
    assert module.running_var is not None
    module.num_batches_tracked.add_(1)
    share = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean, share)
    module.running_var.lerp_(variance, share)
