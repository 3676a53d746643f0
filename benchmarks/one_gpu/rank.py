"""One rank of a plan with real kernels and real memory in this process; collectives return at once and send nothing."""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_map

from benchmarks.accuracy import played
from meshwright.executor import parallelize
from meshwright.executor.measuring.one_rank import without_peers
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
    """A rank of the plan, built and stepped by the project's own executor, without its peers."""
    on_gpu = device == "cuda"
    with without_peers(rank, plan.degrees.num_devices):
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


def _repeated(sample: Any, size: int) -> Any:
    """A batch of so many copies of one sample, whose numbers are legal (tokens of the vocabulary)."""

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return leaf
        return leaf.expand(size, *leaf.shape[1:]).contiguous()

    return tree_map(repeated, sample)
