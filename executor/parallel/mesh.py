"""The place of this rank: the DeviceMesh of a plan, the process groups of its axes, and the rank's coordinates."""

import hashlib
import itertools
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...planner.cost.expert_place import ExpertPlace, expert_place
from ...planner.cost.memory_cost import uses_fully_shard
from ...planner.plan.document import AXES, Axis, Plan
from ...planner.plan.making import shape_of
from ...profiler.machine.local import preset_of
from ..torch_compat import accelerator, default_store, end_after_gloo, grow_segments, joined_axes, side_by_side
from .expert_mesh import expert_mesh

Mechanism = Literal["plain", "cast", "ddp", "fsdp"]

Seat = tuple[str, int]
"""(host, local rank) of a process."""


def mechanism(plan: Plan) -> Mechanism:
    """What averages gradients over data ranks, and over context ranks, which see other tokens of the same samples.

    fsdp: `fully_shard`, whenever parameters are sharded, and where the planner says that it is needed without that
    (uses_fully_shard; over a one-wide axis then). cast: only what fully_shard casts, for tensor-parallel layers on one
    data rank (not in pipelines, whose zero-bubble schedules look for gradients on the parameters of a stage). ddp:
    DistributedDataParallel, for whole replicas. plain: one data rank, or replicas of pipeline stages (see
    stage_replicas.py), or of a model that decides by values, whose gradients are averaged after backward (DDP would
    wait for those that a replica does not have).
    """
    degrees = plan.degrees
    if uses_fully_shard(shape_of(plan), plan.training):
        only_casts = degrees.sharded_over == degrees.data_replicate == degrees.expert == degrees.pipeline == 1
        return "cast" if only_casts else "fsdp"
    replicas = degrees.data_replicate > 1 and degrees.pipeline == 1 and not plan.model.decides_by_values
    return "ddp" if replicas else "plain"


@dataclass(frozen=True)
class RankMesh:
    """A rank of a plan: its coordinates, and the groups it talks to.

    rank: of the plan; the process may have another number in torch.distributed (see plan_ranks), which `processes`
    gives for every rank of the plan.
    device_mesh: axes in the order of AXES whatever plan.mesh_axes says (that order is in the rank numbers), without
    axes of one rank, but with data_shard wherever fully_shard needs it. None if the job is one rank.
    spread: see expert_mesh.py; None without expert parallelism.
    """

    plan: Plan
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None
    processes: tuple[int, ...] = (0,)
    spread: DeviceMesh | None = None

    @cached_property
    def coordinates(self) -> dict[Axis, int]:
        """Position on every axis."""
        return self.plan.coordinates(self.rank)

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Ranks that differ from this one only on `axis`; None if there are no others."""
        if self.device_mesh is None or self.plan.degrees.of(axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank takes."""
        return self.coordinates["data_replicate"] * self.plan.degrees.data_shard + self.coordinates["data_shard"]

    @property
    def data_size(self) -> int:
        """Number of shares of the global batch."""
        return self.plan.degrees.data

    @cached_property
    def is_first_of_stage(self) -> bool:
        """Whether no other rank of this stage comes before this one."""
        return all(at == 0 for axis, at in self.coordinates.items() if axis != "pipeline")

    def on_all(self, value: Any) -> list[Any]:
        """[process] -> its value, on all ranks. Every rank must call it."""
        if self.device_mesh is None:
            return [value]
        values: list[Any] = [None] * self.plan.degrees.num_devices
        dist.all_gather_object(values, value)
        return values

    @property
    def is_first_of_share(self) -> bool:
        """Whether no other rank of this stage with the same samples comes before this one."""
        return self.coordinates["tensor"] == 0 == self.coordinates["context"]

    @cached_property
    def data_mesh(self) -> DeviceMesh:
        """What fully_shard runs over: the axis of shard_mesh, and data_replicate before it for HSDP."""
        assert self.device_mesh is not None
        if self.plan.degrees.data_replicate > 1:
            return side_by_side(self.device_mesh["data_replicate"], self.shard_mesh)
        return self.shard_mesh

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The one axis that parameters are sharded over: data_shard, with the context ranks of its samples."""
        assert self.device_mesh is not None
        if self.plan.degrees.context > 1:
            return joined_axes(self.device_mesh, ("data_shard", "context"))
        return self.device_mesh["data_shard"]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """Ranks that share experts, and those that hold the same ones."""
        assert self.spread is not None
        return self.spread

    @cached_property
    def expert_place(self) -> ExpertPlace:
        """Which experts this rank holds."""
        return expert_place(self.plan, self.coordinates)

    @cached_property
    def tensor_mesh(self) -> DeviceMesh:
        """The tensor-parallel axis."""
        assert self.device_mesh is not None
        return self.device_mesh["tensor"]


def world_size() -> int:
    """Number of ranks in this job: in the running process group, else as the launcher says, else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def check_world_size(plan: Plan) -> None:
    """Raise ValueError, before anything is sent, if the job has not as many ranks as the plan."""
    found, wanted = world_size(), plan.degrees.num_devices
    if found != wanted:
        raise ValueError(
            f"the plan is for {wanted} ranks, this job has {found}: start it with "
            f"torchrun --nproc-per-node {wanted} ..., or make a plan with --gpus {found}"
        )


def connect(
    plan: Plan,
    device: torch.device | str | None = None,
    timeout_s: float = 0.0,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> RankMesh:
    """This rank of the plan, with torch.distributed running (gloo on CPU, nccl on CUDA) where there are others.

    device: default is the local rank's GPU, or the CPU without one. timeout_s: how long ranks may have to wait for each
    other, if that is more than torch's 30 minutes of gloo (NCCL's are 10). settings: what must be alike on all ranks,
    as the plan must. Every rank must call it. Raises ValueError if the number of ranks is not the plan's, or ranks were
    called with different settings.
    """
    check_world_size(plan)
    device = torch.device(device) if device is not None else accelerator()
    if device.type == "cuda":
        grow_segments()
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if plan.degrees.num_devices == 1:
        return RankMesh(plan, 0, device, None)
    if not dist.is_initialized():
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            **_meeting_place(),
            timeout=timedelta(seconds=max(timeout_s, default_pg_timeout.total_seconds())),
            device_id=device if on_gpu else None,  # else NCCL guesses the device, and connects only when it first sends
        )
        _keep_store()
    end_after_gloo()
    found: list[tuple[Seat, str, dict[str, Any]]] = [(("", 0), "", {})] * plan.degrees.num_devices
    seat = socket.gethostname(), int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    document = hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:16]
    dist.all_gather_object(found, (seat, _device_name(device), {"a plan of checksum": document, **settings}))
    _check_settings([settings for _, _, settings in found])
    ranks = plan_ranks(plan, [seat for seat, _, _ in found], [name for _, name, _ in found])
    processes = tuple(ranks.index(rank) for rank in range(len(ranks)))
    axes, spread = _device_mesh(plan, device.type, processes), expert_mesh(plan, device.type, processes)
    return RankMesh(plan, ranks[dist.get_rank()], device, axes, processes, spread)


def _check_settings(found: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if ranks were called with different settings. found: [rank] -> name -> value."""
    for rank, settings in enumerate(found):
        for name, value in settings.items():
            if value != found[0].get(name):
                raise ValueError(
                    f"rank {rank} was given {name}={value}, rank 0 {name}={found[0].get(name)}: all ranks must call "
                    "parallelize with the same"
                )


_kept: tuple[int, Store, int, int] | None = None
"""(id of this process, the store through which it first met the others, its rank, number of ranks)."""

_meetings = itertools.count(1)


def _keep_store() -> None:
    global _kept
    if _kept is None or _kept[0] != os.getpid():
        _kept = os.getpid(), default_store(), dist.get_rank(), dist.get_world_size()


def _meeting_place() -> dict[str, Any]:
    """Arguments of init_process_group that say where the ranks meet. They must not find addresses from earlier
    meetings: those of a trainer of this process that has ended (torch 2.13 waits for them until it gives up), or, under
    torchrun, whose store may outlive its --max-restarts, those of ranks of the attempt before (seen with
    --master-port)."""
    if _kept is not None and _kept[0] == os.getpid():
        _, store, rank, num_ranks = _kept
        return {"store": PrefixStore(f"meshwright/{next(_meetings)}", store), "rank": rank, "world_size": num_ranks}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    attempt = f"meshwright/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return {
        "store": PrefixStore(attempt, store),
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
    }


def plan_ranks(plan: Plan, seats: list[Seat], devices: Sequence[str] = ()) -> list[int]:
    """[process rank] -> rank of the plan that it plays.

    Launchers do not promise an order, and a plan counts its ranks host by host. So hosts are taken in the order in
    which they first appear for those of the cluster file, each for one with as many devices and, where its devices are
    known, of the same name; on each host processes by their local rank. Where the hosts are not those of the plan (all
    processes on one machine, say) there is nothing to match, and every process plays its own rank. So it does, with a
    warning, in orders in which ranks of some group other than the pipeline's would not ascend: torch sorts them.

    devices: [process rank] -> preset of its device, "" where that is not known.
    """
    hosts = _matched_hosts(plan, seats, devices)
    if hosts is None or len(set(seats)) != len(seats):
        return list(range(len(seats)))
    order = sorted(range(len(seats)), key=lambda process: (hosts.index(seats[process][0]), seats[process][1]))
    grid = torch.tensor(order).view([plan.degrees.of(axis) for axis in plan.mesh_axes])
    sorted_dims = [dim for dim, axis in enumerate(plan.mesh_axes) if axis != "pipeline"]
    if any(bool((grid.diff(dim=dim) <= 0).any()) for dim in sorted_dims):
        if max(grid.shape) < grid.numel():  # one group of all ranks is the same group in any order
            warnings.warn(
                "the launcher's order of ranks cannot be matched to the plan's hosts, so its traffic may cross hosts "
                "more than planned; start ranks host by host, as torchrun does",
                stacklevel=2,
            )
        return list(range(len(seats)))
    return [order.index(process) for process in range(len(seats))]


def _matched_hosts(plan: Plan, seats: list[Seat], devices: Sequence[str]) -> list[str] | None:
    """The job's hosts in the order in which the plan counts its ranks; None if they are not the hosts of the plan."""
    names = dict.fromkeys(host for host, _ in seats)
    kinds = {host: {d for (h, _), d in zip(seats, devices, strict=False) if h == host} for host in names}
    planned: list[tuple[int, int, str]] = []
    first = 0
    for group in plan.cluster.hosts:
        for _ in range(group.count):
            planned.append((plan.cluster.host_of(first)[0], group.devices_per_host, group.device.name))
            first += group.devices_per_host
    known = {name for _, _, name in planned}
    by_name = bool(devices) and all(len(kind) == 1 and kind <= known for kind in kinds.values())
    left, found = list(names), {}
    for number, size, name in sorted(planned):
        fitting = (
            host for host in left if sum(host == h for h, _ in seats) == size and (not by_name or kinds[host] == {name})
        )
        host = next(fitting, None)
        if host is None:
            return None
        left.remove(host)
        found[number] = host
    return None if left else [found[number] for number, _, _ in planned]


def _device_name(device: torch.device) -> str:
    """The preset's name for a GPU; "" if there is no preset for it, and for a CPU."""
    if device.type != "cuda":
        return ""
    memory_mib = torch.cuda.get_device_properties(device).total_memory / 2**20
    return preset_of(torch.cuda.get_device_name(device), memory_mib) or ""


def _device_mesh(plan: Plan, device_type: str, processes: tuple[int, ...]) -> DeviceMesh:
    degrees = plan.degrees
    ranks = torch.tensor(processes).view([degrees.of(axis) for axis in plan.mesh_axes])
    ranks = ranks.permute([plan.mesh_axes.index(axis) for axis in AXES])
    sharded = mechanism(plan) == "fsdp"
    used = [axis for axis in AXES if degrees.of(axis) > 1 or (axis == "data_shard" and sharded)]
    mesh = DeviceMesh(device_type, ranks.reshape([degrees.of(axis) for axis in used]), mesh_dim_names=tuple(used))
    if degrees.context > 1:
        joined_axes(mesh, ("data_shard", "context"))  # makes a process group, which all ranks have to do now
    return mesh
