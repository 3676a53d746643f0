"""Plays one rank of a job of any size in this process: fake process group, fake tensors, the project's own executor."""

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  # teaches fake tensors the collectives
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from meshwright.executor import Trainer, apply, parallelize, passes
from meshwright.executor.measuring.one_rank import equal_rows, replicas
from meshwright.executor.parallel import expert_exchange
from meshwright.executor.state.initialise import Values
from meshwright.planner.cost.comm_cost import CollectiveKind
from meshwright.planner.plan.document import AXES, GroupAxis, Plan
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.running.fake_modes import fake_mode

from .counters import Passed, PeakMeter, Traffic

SMALLEST_BYTES = 64
"""Collectives below this (losses, norms) are not counted."""


@dataclass(frozen=True)
class Played:
    """What one rank does in its second step: bytes and calls by axis and collective, and its peak of live storages."""

    rank: int
    stage: int
    passed: dict[tuple[GroupAxis, CollectiveKind], Passed]
    peak_bytes: int


def ranks_to_play(plan: Plan) -> list[int]:
    """The first rank of every stage (of long pipelines: the first two, the middle one, the last two), and of a job
    without stages the very last, whose shards are the smallest where parameters do not divide evenly."""
    degree, stride = plan.degrees.pipeline, plan.stride("pipeline")
    if degree == 1:
        return sorted({0, plan.degrees.num_devices - 1} if plan.degrees.data_shard > 1 else {0})
    stages = range(degree) if degree <= _LONG else sorted({0, 1, degree // 2, degree - 2, degree - 1})
    return [stage * stride for stage in stages]


_LONG = 4


def play(loaded: LoadedModel, plan: Plan, rank: int, meter: type[PeakMeter] = PeakMeter) -> Played:
    """One rank of the plan. No process group may be running; none is afterwards.

    Parallelised outside of the fake mode, where torch may look at the mesh's numbers, and run inside. Every number that
    the executor asks for (a loss, a vote) is one.
    """
    if plan.degrees.num_devices > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.degrees.num_devices)
    fake = fake_mode()
    try:
        with meter(fake) as memory, without_numbers(fake):
            ours = parallelize(loaded.build, plan, adamw, loss=loaded.loss, max_grad_norm=1.0, device="cpu")
            with fake, Ones():
                batch = batch_of(loaded, ours.samples_per_step)
                ours.step(batch)  # makes optimizer state
                memory.begin()
                with Traffic(SMALLEST_BYTES) as traffic:
                    ours.step(batch)
        return Played(rank, ours.mesh.coordinates["pipeline"], by_axis(ours, traffic), memory.peak)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def by_axis(ours: Trainer, traffic: Traffic) -> dict[tuple[GroupAxis, CollectiveKind], Passed]:
    """What a rank has passed by axis and collective."""
    found: dict[tuple[GroupAxis, CollectiveKind], Passed] = defaultdict(Passed)
    for (ranks, kind), passed in traffic.passed.items():
        total = found[axis_of(ours, ranks, kind), kind]
        total.bytes += passed.bytes
        total.calls += passed.calls
    return dict(found)


def axis_of(ours: Trainer, ranks: tuple[int, ...], kind: CollectiveKind) -> GroupAxis:
    """The axis that ranks lie on; those that hold tied weights, or the same experts, are a part of their axis.
    Parameters that are sharded over context ranks, too, pass along data_shard, as the planner says it."""
    mesh, of_shards = ours.mesh, kind in ("all_gather", "reduce_scatter")
    groups: list[tuple[dist.ProcessGroup, GroupAxis]] = []
    if of_shards and ours.plan.degrees.context > 1:
        groups.append((mesh.shard_mesh.get_group(), "data_shard"))
    if of_shards and mesh.spread is not None:
        groups.append((mesh.spread.get_group("expert_shard"), "data_shard"))
    if kind == "all_to_all" and mesh.spread is not None:
        groups.append((mesh.spread.get_group("expert"), "expert"))
    for group, axis in groups:
        if set(ranks) == set(dist.get_process_group_ranks(group)):
            return axis
    for axis in AXES:
        along = mesh.group(axis)
        if along is not None and set(ranks) <= set(dist.get_process_group_ranks(along)):
            return axis
    raise AssertionError(f"ranks {ranks} are on no axis of the mesh")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """As on a GPU, where foreach is the default."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def batch_of(loaded: LoadedModel, size: int) -> Any:
    """A batch of so many samples; made from one sample, so under fake tensors without its numbers."""
    return tree_map(lambda leaf: _of_size(leaf, size), loaded.batch(1))


def _of_size(leaf: Any, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        return leaf
    return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype)


def without_numbers(fake: FakeTensorMode) -> ExitStack:
    """Where the executor makes initial values, and where DDP hands a reduced bucket back, it gets fake tensors; and as
    many tokens go to every expert."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(apply, "initial_values", lambda *args: _values(fake, *args)))
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is not None:  # from fake positions it cannot see that no sample is packed, and would build T x T masks
        stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", return_value=None))
    stack.enter_context(mock.patch.object(passes, "data_parallel", replicas))
    stack.enter_context(mock.patch.object(expert_exchange, "count_rows", equal_rows))
    return stack


def _values(fake: FakeTensorMode, model_fn: Callable[[], nn.Module], is_large: bool, seed: int) -> Values:
    with torch.device("meta"):
        model = model_fn()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))

    def made(like: torch.Tensor) -> torch.Tensor:
        with fake:
            return torch.empty(like.shape, dtype=like.dtype)

    return Values(lambda name: made(parameters[name]), lambda name: made(buffers[name]))


class Ones(TorchDispatchMode):
    """Answers 1 where a program asks a fake tensor for its number."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, or answer."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))
