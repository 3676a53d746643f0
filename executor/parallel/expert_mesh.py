"""Process groups of the ranks that share experts, and of those that hold the same ones and shard them."""

import math

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...planner.plan.document import AXES, Plan


def expert_mesh(plan: Plan, device_type: str, processes: tuple[int, ...]) -> DeviceMesh | None:
    """A mesh of all ranks with the axes (rest, data_replicate, expert_shard, expert); None without expert parallelism.
    Makes process groups, so every rank must call it.

    expert: ranks that hold different experts, and send tokens to each other. expert_shard: ranks that hold the same
    experts and other tokens, over which fully_shard shards them. data_replicate: ranks that replicate such shards.
    """
    degrees = plan.degrees
    if degrees.expert == 1:
        return None
    tokens = plan.token_axes
    rest = [axis for axis in AXES if axis not in (*tokens, "data_replicate")]
    ranks = torch.tensor(processes).view([degrees.of(axis) for axis in plan.mesh_axes])
    ranks = ranks.permute([plan.mesh_axes.index(axis) for axis in (*rest, "data_replicate", *tokens)])
    sizes = (math.prod(degrees.of(axis) for axis in rest), degrees.data_replicate, -1, degrees.expert)
    return DeviceMesh(
        device_type, ranks.reshape(sizes), mesh_dim_names=("rest", "data_replicate", "expert_shard", "expert")
    )
