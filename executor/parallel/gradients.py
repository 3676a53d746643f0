"""Makes gradients equal to those of one device: sums over tensor ranks and stages, total norm, clipping."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from ...planner.plan.document import Axis, Plan
from ..apply import AppliedModel
from ..torch_compat import own_group
from .flat_gradients import all_reduce, local_gradient, local_gradients
from .mesh import RankMesh
from .norms import norms_of
from .stage_module import stages_in
from .stage_replicas import StageReplicas


class Gradients:
    """Brings a stage's gradients to what one device would have, after those of data ranks were averaged, or averages
    them, too, where nothing else does. Every rank must make one."""

    def __init__(self, model: AppliedModel, plan: Plan, mesh: RankMesh) -> None:
        self._mesh = mesh
        self._parameters = model.parameters
        self._layout = model.layout
        self.averaged_after = model.mechanism == "plain" and plan.degrees.data_replicate > 1
        """Whether gradients of data ranks are averaged only in `reduce`."""
        self._may_differ = plan.model.decides_by_values
        self._ties = _ties_across_stages(plan, mesh, self._parameters)
        copies = {id(p) for group, _ in self._ties for p in group}
        self.tied = next((name for name, p in self._parameters.items() if id(p) in copies), "")
        """Name of a parameter of this stage of which another stage holds a copy; '' if there is none."""
        self._trained_somewhere: dict[int, bool] = {}
        self._late: Sequence[nn.Parameter] = ()
        self.replicas: StageReplicas | None = None
        """Averages gradients of replicas of pipeline stages; None if there are none."""
        if self.averaged_after and plan.degrees.pipeline > 1:
            stages = [list(stage.parameters()) for stage in stages_in(model.module)]
            self.replicas = StageReplicas(self._parameters, stages, mesh.group("data_replicate"), mesh.data_size)
        elsewhere = _counted_elsewhere(plan, self._parameters)
        on_slices = "tensor" in plan.token_axes  # so that tensor ranks share the experts, too
        is_first_tensor_rank = mesh.coordinates["tensor"] == 0
        self._counted = [
            p
            for name, p in self._parameters.items()
            if id(p) not in elsewhere
            and mesh.coordinates["data_replicate"] == 0
            and (model.cut(name) is not None or is_first_tensor_rank or (name in model.experts and on_slices))
        ]

    def leave_to_reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let `reduce` average the gradients of these parameters from now on, for replicas do not wait for them."""
        self._late = parameters

    def reduce(self) -> None:
        """Bring gradients to what one device would have; sharded ones stay sharded."""
        if any(parameter.grad is not None for parameter in self._late):
            all_reduce(self._late, self._mesh.group("data_replicate"), self._mesh.data_size)
        if self.replicas is not None:
            self.replicas.finish()
        elif self.averaged_after:
            if self._may_differ:
                _fill_missing(self._parameters.values(), self._mesh.group("data_replicate"))
            all_reduce(self._parameters.values(), self._mesh.group("data_replicate"), self._mesh.data_size)
        partial = [p for n, p in self._parameters.items() if n in self._layout.partial]
        if partial:
            all_reduce(partial, self._mesh.group("tensor"))
        for number, (copies, group) in enumerate(self._ties):
            if group is not None:
                self._fill_copies(number, copies, group)
            _sum_copies(copies, group)

    def _fill_copies(self, number: int, copies: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Give copies of a tied parameter zeros as gradients if this stage has no gradient for them and another stage
        has one, as behind a detach(): all stages that share a parameter must join in its sum. The first step finds out
        whether any stage has one."""
        trained = any(local_gradient(copy) is not None for copy in copies)
        if number not in self._trained_somewhere:
            flag = torch.tensor(int(trained), dtype=torch.int32, device=self._mesh.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
            self._trained_somewhere[number] = bool(flag.item())
        if trained and not self._trained_somewhere[number]:
            name = next(name for name, p in self._parameters.items() if p is copies[0])
            raise RuntimeError(
                f"{name}, which several stages share, has its first gradient in a later step than the first; plan "
                "with --pin pipeline=1"
            )
        if self._trained_somewhere[number] and not trained:
            copies[0].grad = torch.zeros_like(copies[0])

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared norm of the whole gradient: a float64 scalar to be summed over all ranks.

        Every element counts once: on the first replica, on the first tensor rank unless tensor ranks have different
        parts of it, and on the first of the stages that share it.
        """
        return norms_of(local_gradients(self._counted), self._mesh.device).square().sum()

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale all gradients down so that their total norm, which is `norm`, becomes `max_norm`."""
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = local_gradients(self._parameters.values())
        for dtype in {grad.dtype for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))


def forget_gradients(parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
    """Set gradients to None, or to zero: what an optimizer's zero_grad does."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _fill_missing(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Give zeros as gradients to parameters that this replica did not use and another one did."""
    trainable = [p for p in parameters if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32, device=trainable[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    for parameter, somewhere in zip(trainable, used.tolist(), strict=True):
        if somewhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _sum_copies(copies: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Add up the gradients of copies of one parameter: those on this rank, and those on other ranks of the group, if
    there is one."""
    trained = [(copy, grad) for copy in copies if (grad := local_gradient(copy)) is not None]
    if not trained:
        return
    (first, total), *others = trained
    for _, grad in others:
        total += grad
    if group is not None:
        all_reduce([first], group)
    for _, grad in others:
        grad.copy_(total)


def _tied_stages(plan: Plan) -> Iterator[dict[int, list[str]]]:
    """For every parameter with copies on several stages: stage -> its names there, in the order of the stages."""
    stage_of = {n: i for i, stage in enumerate(plan.stages) for layer in stage.layers for n in layer.parameters}
    for names in plan.model.ties:
        stages = sorted({stage_of[name] for name in names if name in stage_of})
        if len(stages) > 1:
            yield {stage: [name for name in names if stage_of.get(name) == stage] for stage in stages}


def _counted_elsewhere(plan: Plan, parameters: dict[str, nn.Parameter]) -> set[int]:
    """Ids of this rank's copies of parameters that already count on an earlier stage."""
    later = (names for tie in _tied_stages(plan) for names in list(tie.values())[1:])
    return {id(parameters[name]) for names in later for name in names if name in parameters}


def _ties_across_stages(
    plan: Plan, mesh: RankMesh, parameters: dict[str, nn.Parameter]
) -> list[tuple[list[nn.Parameter], dist.ProcessGroup | None]]:
    """(this rank's copies, group of ranks with other copies of the same shard), for every parameter tied across stages.

    Creates the groups, so every rank must call it, and does so in the same order.
    """
    found = []
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for tie in _tied_stages(plan):
        positions = tuple(sorted({plan.position_of(stage) for stage in tie}))
        if positions not in groups:
            groups[positions] = _stage_group(plan, mesh, positions) if len(positions) > 1 else None
        read = next(iter(tie.values()))[0]
        every = next(names for names in plan.model.ties if read in names)  # a copy's first name may be one nobody reads
        copies = [parameters[name] for name in every if name in parameters]
        if copies and mesh.coordinates["pipeline"] in positions:
            found.append((copies, groups[positions]))
    return found


def _stage_group(plan: Plan, mesh: RankMesh, positions: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of this rank with its counterparts at these places of the pipeline; None if it is at none of them."""
    others: list[Axis] = [axis for axis in plan.mesh_axes if axis != "pipeline"]
    groups = []
    for position in product(*(range(plan.degrees.of(axis)) for axis in others)):
        offset = sum(i * plan.stride(axis) for i, axis in zip(position, others, strict=True))
        groups.append([mesh.processes[offset + place * plan.stride("pipeline")] for place in positions])
    return own_group(groups)
