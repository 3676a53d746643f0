"""Runs one rank of a plan in this process, without its peers: kernels and memory are real, collectives send nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from .. import passes, trainer
from ..parallel import expert_exchange
from ..parallel.expert_exchange import Rows, count_rows
from ..torch_compat import data_parallel, forget_groups


@contextmanager
def without_peers(rank: int, num_ranks: int) -> Iterator[None]:
    """While it lasts, this process is a rank of a job whose other ranks are not there. What they would send is whatever
    the memory holds, so numbers mean nothing; sizes do. No process group may be running before, and none is afterwards.

    Losses and gradients that are not finite raise nothing, DDP's buckets come back as they were sent, all experts get
    equally many tokens, and stages take each other's shapes to be known.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if num_ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with (
            mock.patch.object(trainer, "check_finite", _unseen),
            mock.patch.object(trainer, "raise_spoiled", _unseen),
            mock.patch.object(passes, "data_parallel", replicas),
            mock.patch.object(expert_exchange, "count_rows", equal_rows),
            mock.patch.object(PipelineStage, "_warmup_backward_result", _agreed, create=True),
        ):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_groups()


def _unseen(*_: Any, **__: Any) -> None:
    """Replaces a check, and finds nothing. (A Mock would keep what it was called with: the gradients of every step.)"""


def _agreed(*_: Any, **__: Any) -> torch.Tensor:
    """Replaces the vote of all stages (torch 2.13) on whether each knows its shapes already; no other stage is here to
    vote."""
    return torch.ones(1, dtype=torch.int32)


def equal_rows(experts: torch.Tensor, count: int, group: dist.ProcessGroup) -> Rows:
    """Replaces the count of rows between ranks: all get equally many."""
    arriving = count_rows(experts, count, group).arriving
    num_ranks = dist.get_world_size(group)
    each, more = divmod(experts.numel(), num_ranks)
    rows = [each + (rank < more) for rank in range(num_ranks)]
    return Rows(arriving, lambda: [rows, rows])


def replicas(*args: Any) -> DistributedDataParallel:
    """DDP whose reduction is done by a hook, because its own reads the result from the process group, and the fake one
    has none. It has from the start the buckets that it would make after its first step."""
    with mock.patch.object(dist, "_compute_bucket_assignment_by_size", _buckets_of_backward):
        replicas = data_parallel(*args)
    replicas.register_comm_hook(replicas.process_group, _reduced)
    untyped: Any = replicas
    untyped.reducer = _Reducer(untyped.reducer)
    return replicas


def _buckets_of_backward(
    parameters: list[torch.Tensor], limits: list[int], sparse: list[bool]
) -> tuple[list[list[int]], list[int]]:
    """The buckets that torch makes if gradients come in the order of the parameters, from the last to the first; in the
    order in which DDP expects them, the last bucket first."""
    last = len(parameters) - 1
    limits = [_untyped_dist._DEFAULT_FIRST_BUCKET_BYTES, _DDP_BUCKET_BYTES]
    buckets, sizes = _compute_buckets(parameters[::-1], limits, sparse[::-1])
    return [[last - place for place in reversed(bucket)] for bucket in reversed(buckets)], sizes[::-1]


_untyped_dist: Any = dist
_compute_buckets = _untyped_dist._compute_bucket_assignment_by_size
_DDP_BUCKET_BYTES = 25 * 2**20


class _Reducer:
    """DDP's reducer, which does not order its buckets anew by when gradients came, for it would read a tensor's numbers
    for that."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _reduced(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
