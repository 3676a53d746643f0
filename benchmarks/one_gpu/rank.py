"""One rank of a plan with real kernels and real memory in this process; collectives return at once and send nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from benchmarks.accuracy import played
from meshwright.executor import parallelize, trainer
from meshwright.executor.parallel import expert_exchange
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.loaded import LoadedModel

WARM_UP_STEPS = 3
"""The first two steps allocate and make optimizer state; the third is the first of its kind."""


@dataclass(frozen=True)
class RankRun:
    """What one rank did. step_s: median seconds of a step without any communication. peak_bytes: most that torch had
    allocated at once, None where the device does not say."""

    rank: int
    stage: int
    step_s: float
    peak_bytes: int | None


def run_rank(loaded: LoadedModel, plan: Plan, rank: int, device: str, steps: int) -> RankRun:
    """A rank of the plan, built and stepped by the project's own executor. No process group may be running; none is
    afterwards. What other ranks would send is whatever the memory held, so numbers mean nothing; sizes do."""
    count = plan.degrees.num_devices
    if count > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    on_gpu = device == "cuda"
    try:
        with _numbers_do_not_matter():
            ours = parallelize(loaded.build, plan, played.adamw, loss=loaded.loss, max_grad_norm=1.0, device=device)
            batch = _repeated(loaded.batch(1), ours.samples_per_step)
            times = []
            for step in range(WARM_UP_STEPS + steps):
                if step == WARM_UP_STEPS and on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                started = time.perf_counter()
                ours.step(batch)  # ends by reading the loss, for which all kernels have to be done
                times.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        return RankRun(rank, ours.mesh.coordinates["pipeline"], median(times[WARM_UP_STEPS:]), peak)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _numbers_do_not_matter() -> Iterator[None]:
    """A loss or gradient that is not finite ends nothing, DDP's buckets come back as they went, as many tokens go to
    every expert, and stages take each other's shapes for known."""
    with (
        mock.patch.object(trainer, "check_finite"),
        mock.patch.object(trainer, "raise_spoiled"),
        mock.patch.object(trainer, "data_parallel", played.replicas),
        mock.patch.object(expert_exchange, "count_rows", played.equal_rows),
        mock.patch.object(PipelineStage, "_warmup_backward_result", _agreed, create=True),
    ):
        yield


def _agreed(*_: Any, **__: Any) -> torch.Tensor:
    """The vote of all stages (torch 2.13) that each knows its shapes already, which no other stage is here to cast."""
    return torch.ones(1, dtype=torch.int32)


def _repeated(sample: Any, size: int) -> Any:
    """A batch of so many copies of one sample, whose numbers are legal (tokens of the vocabulary)."""

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return leaf
        return leaf.expand(size, *leaf.shape[1:]).contiguous()

    return tree_map(repeated, sample)
