"""A rank without its peers leaves nothing of its process groups in the process."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.executor.measuring.one_rank import without_peers


def _norm_of_shards() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return DTensor.from_local(torch.ones(2), mesh["data"], [Shard(0)]).norm().full_tensor()


def test_another_job_of_the_same_mesh_has_its_own_groups() -> None:
    for rank in (0, 3):
        with without_peers(rank, 4):
            assert _norm_of_shards().shape == ()
