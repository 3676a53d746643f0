"""Expert parallelism of one stage: which experts a rank holds, and how they are sharded, averaged and stored."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from ...planner.cost.expert_place import ExpertPlace
from ...planner.cost.sharding import shard_dim
from ...planner.plan.document import LayerPlan, Plan
from ...profiler.model.model_profile import Experts
from ..torch_compat import hide_from_selective_recompute, in_backward, set_gradient_divisor
from .expert_exchange import run_spread
from .mesh import RankMesh


@dataclass(frozen=True)
class HeldExperts:
    """How a rank holds part of a parameter that is stacked over experts.

    count: number of experts in all. parts: number of equal parts that they are divided into. num_shards: number of
    ranks that hold the same part.
    """

    count: int
    parts: int
    num_shards: int
    place: ExpertPlace

    @property
    def first(self) -> int:
        """Number of the first expert that is here."""
        return self.place.expert * (self.count // self.parts)

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """The rank's experts, before they are sharded."""
        return whole.narrow(0, self.first, self.count // self.parts)

    def whole(self, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The whole tensor, from the experts on each rank of a group. All of these ranks must call it."""
        parts = [torch.empty_like(local) for _ in range(self.parts)]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)


def spread_experts(stage: nn.Module, plan: Plan, layers: Iterable[LayerPlan], mesh: RankMesh) -> dict[str, HeldExperts]:
    """Make the banks of experts in these layers run on this rank's experts only. Returns parameter -> the part of it
    that this rank holds.

    stage: holds the layers under their original names. The parameters themselves are not changed yet.
    """
    held: dict[str, HeldExperts] = {}
    names = {id(p): n for n, p in stage.named_parameters()}
    num_shards = plan.experts_over // plan.degrees.expert
    for module, bank in _banks(stage, plan, layers):
        run_spread(module, bank, mesh.expert_mesh.get_group("expert"))
        part = HeldExperts(bank.count, plan.degrees.expert, num_shards, mesh.expert_place)
        held |= {names[id(p)]: part for p in module.parameters()}
    return held


def shard_experts(
    stage: nn.Module,
    plan: Plan,
    layer: LayerPlan,
    mesh: RankMesh,
    policy: MixedPrecisionPolicy,
    materialise: Callable[[list[nn.Module], DeviceMesh], None],
) -> list[nn.Module]:
    """fully_shard the layer's banks over the ranks that hold the same experts; the units. materialise: gives a module
    its numbers, those that a rank of this mesh keeps, which this does one bank after another.

    Each of those has tokens of all ranks that it shares experts with, so that the sum over them is the sum over all
    tokens. Like other gradients it is divided by the ranks that have samples, or parts of samples, of their own.
    """
    units: list[nn.Module] = []
    if plan.degrees.expert == 1:
        return units
    replicated = plan.degrees.data_replicate > 1
    of = mesh.expert_mesh["data_replicate", "expert_shard"] if replicated else mesh.expert_mesh["expert_shard"]
    num_shards = plan.experts_over // plan.degrees.expert
    for module, _ in _banks(stage, plan, [layer]):
        if isinstance(module, FSDPModule):  # the layer runs twice
            continue
        materialise([module], of)
        unit = fully_shard(
            module,
            mesh=of,
            mp_policy=replace(policy, cast_forward_inputs=False),
            reshard_after_forward=layer.reshard,
            shard_placement_fn=lambda parameter: Shard(shard_dim(tuple(parameter.shape), num_shards)),
        )
        if layer.reshard:
            module.register_forward_pre_hook(partial(_stay_in_backward, unit))
        if layer.recompute == "selective":
            hide_from_selective_recompute(unit)
        set_gradient_divisor(unit, plan.degrees.sharded_over * plan.degrees.data_replicate, num_shards)
        units.append(module)
    return units


def _stay_in_backward(unit: FSDPModule, *call: object) -> None:
    """Hook: keep parameters gathered after a forward that recompute runs in backward, for the backward that follows
    needs them."""
    unit.set_reshard_after_forward(not in_backward(), recurse=False)


def _banks(stage: nn.Module, plan: Plan, layers: Iterable[LayerPlan]) -> Iterator[tuple[nn.Module, Experts]]:
    seen: set[str] = set()
    for layer in layers:
        for bank in plan.class_plan(layer.layer_class).experts:
            name = ".".join(part for part in (layer.root, bank.module) if part)
            if name not in seen:
                seen.add(name)
                yield stage.get_submodule(name), bank
