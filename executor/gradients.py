"""Gradients made equal to one device's after backward: sums over tensor ranks and stages, total norm, clipping."""

from collections.abc import Iterable, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..planner.plan import Axis, Plan
from .apply import AppliedModel
from .mesh import RankMesh

BUCKET_ELEMENTS = 16 * 2**20
"""Gradients that are reduced together in one flat buffer (64 MiB in fp32)."""


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's shard of a gradient; shares its memory."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


class Gradients:
    """What is left to do with a stage's gradients once data ranks have averaged theirs. Every rank must make one."""

    def __init__(self, model: AppliedModel, plan: Plan, mesh: RankMesh) -> None:
        self._mesh = mesh
        self._parameters = model.parameters()
        self._layout = model.layout
        self._average_after = model.mechanism == "plain" and plan.degrees.data_replicate > 1
        self._may_differ = plan.model.decides_by_values
        self._ties = _ties_across_stages(plan, mesh, self._parameters)
        elsewhere = {id(p) for p, _, is_first in self._ties if not is_first}
        is_first_tensor_rank = mesh.coordinates["tensor"] == 0
        self._counted = [
            p
            for name, p in self._parameters.items()
            if id(p) not in elsewhere
            and mesh.coordinates["data_replicate"] == 0
            and (model.cut(name) is not None or is_first_tensor_rank)
        ]

    def reduce(self) -> None:
        """Bring gradients to what one device would have, apart from sharding."""
        if self._average_after:
            if self._may_differ:
                _fill_missing(self._parameters.values(), self._mesh.group("data_replicate"))
            _all_reduce(self._parameters.values(), self._mesh.group("data_replicate"), self._mesh.data_size)
        partial = [p for n, p in self._parameters.items() if n in self._layout.partial]
        if partial:
            _all_reduce(partial, self._mesh.group("tensor"))
        for parameter, group, _ in self._ties:
            _all_reduce([parameter], group)

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared norm of the whole gradient: a float64 scalar to be summed over all ranks.

        Every element counts once: on the first replica, on the first tensor rank unless it is cut, and on the first
        of the stages that share it.
        """
        grads = [g for p in self._counted if (g := local_gradient(p)) is not None and g.numel()]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return torch.stack([norm.double() for norm in torch._foreach_norm(grads)]).square().sum()

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale all gradients down so that their total norm, which is `norm`, becomes `max_norm`."""
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = [grad for p in self._parameters.values() if (grad := local_gradient(p)) is not None]
        for dtype in {grad.dtype for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))


def _fill_missing(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Zeros for parameters that this replica did not use and another one did; without use there is no gradient."""
    trainable = [p for p in parameters if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32, device=trainable[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    for parameter, somewhere in zip(trainable, used.tolist(), strict=True):
        if somewhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _all_reduce(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, divide_by: int = 1) -> None:
    """Sum gradients over a group, in flat buffers; all its ranks have the same parameters with gradients."""
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        grad = local_gradient(parameter)
        if grad is None:
            continue
        if bucket and (
            grad.dtype != bucket[0].dtype or sum(g.numel() for g in bucket) + grad.numel() > BUCKET_ELEMENTS
        ):
            _all_reduce_flat(bucket, group, divide_by)
            bucket = []
        bucket.append(grad)
    if bucket:
        _all_reduce_flat(bucket, group, divide_by)


def _all_reduce_flat(grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None, divide_by: int) -> None:
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    if divide_by != 1:
        flat /= divide_by
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def _ties_across_stages(
    plan: Plan, mesh: RankMesh, parameters: dict[str, nn.Parameter]
) -> list[tuple[nn.Parameter, dist.ProcessGroup, bool]]:
    """(parameter, ranks that hold a copy of the same shard of it, whether this is the first such stage) of this rank.

    Creates the groups, so every rank must call it, and does so in the same order.
    """
    stage_of = {n: i for i, stage in enumerate(plan.stages) for layer in stage.layers for n in layer.parameters}
    found = []
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for names in plan.model.ties:
        stages = tuple(sorted({stage_of[n] for n in names if n in stage_of}))
        if len(stages) < 2:
            continue
        if stages not in groups:
            groups[stages] = _stage_group(plan, mesh, stages)
        group = groups[stages]
        mine = next((parameters[n] for n in names if n in parameters), None)
        if group is not None and mine is not None:
            found.append((mine, group, mesh.coordinates["pipeline"] == stages[0]))
    return found


def _stage_group(plan: Plan, mesh: RankMesh, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of this rank's counterparts on these stages; None if it is on none of them."""
    others: list[Axis] = [axis for axis in plan.mesh_axes if axis != "pipeline"]
    own = None
    for position in product(*(range(plan.degrees.of(axis)) for axis in others)):
        offset = sum(i * plan.stride(axis) for i, axis in zip(position, others, strict=True))
        ranks = [offset + stage * plan.stride("pipeline") for stage in stages]
        group = dist.new_group([mesh.processes[rank] for rank in ranks])
        if mesh.rank in ranks:
            own = group
    return own
