"""One rank of a plan with real kernels and real memory in this process; collectives return at once and send nothing."""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_map

from benchmarks.accuracy import played
from meshwright.executor import Trainer, parallelize
from meshwright.executor.measuring.one_rank import without_peers
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.loaded import LoadedModel

WARM_UP_STEPS = 3
"""The first two steps allocate and make optimizer state; the third is the first of its kind."""

LIMITS = (1.5, 1.25, 1.12, 1.06, 1.03, 1.01)
"""Of the memory allocated at the peak, in the order in which they are tried, until one is too little."""


@dataclass(frozen=True)
class RankRun:
    """What one rank did. step_s: median seconds of a step without any communication. Of a GPU, None elsewhere:
    busy_s: seconds of a step in which kernels ran; peak_bytes, reserved_bytes: most that torch had allocated, and had
    taken from the driver, at once; limit_bytes: the smallest tried limit of what it may take under which a step ran."""

    rank: int
    stage: int
    step_s: float
    busy_s: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    limit_bytes: float | None


def run_rank(loaded: LoadedModel, plan: Plan, rank: int, device: str, steps: int) -> RankRun:
    """A rank of the plan, built and stepped by the project's own executor, without its peers."""
    on_gpu = device == "cuda"
    with without_peers(rank, plan.degrees.num_devices):
        ours = parallelize(loaded.build, plan, played.adamw, loss=loaded.loss, max_grad_norm=1.0, device=device)
        batch = repeated(loaded.batch(1), ours.samples_per_step)
        times = []
        for step in range(WARM_UP_STEPS + steps):
            if step == WARM_UP_STEPS and on_gpu:
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            ours.step(batch)  # ends by reading the loss, for which all kernels have to be done
            times.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        reserved = torch.cuda.max_memory_reserved() if on_gpu else None
        busy_s = _busy_s(ours, batch) if on_gpu else None
        limit = None if peak is None else _least_limit(ours, batch, peak)
        stage = ours.mesh.coordinates["pipeline"]
        return RankRun(rank, stage, median(times[WARM_UP_STEPS:]), busy_s, peak, reserved, limit)


def _busy_s(trainer: Trainer, batch: Any) -> float:
    """Seconds of one more step in which at least one kernel or copy ran."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        trainer.step(batch)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy_us, done_us = 0.0, 0.0
    for start_us, end_us in spans:
        busy_us += max(0.0, end_us - max(start_us, done_us))
        done_us = max(done_us, end_us)
    return 1e-6 * busy_us


def _least_limit(trainer: Trainer, batch: Any, peak: int) -> float | None:
    """Bytes that torch may take from the driver, as if the GPU had no more: the least of LIMITS times the peak with
    which steps run. With memory to spare it takes more than it needs, and keeps it."""
    least, total = None, torch.cuda.get_device_properties().total_memory
    for times in LIMITS:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, times * peak / total))
        try:
            trainer.step(batch)
        except torch.OutOfMemoryError:
            break
        least = times * peak
    torch.cuda.set_per_process_memory_fraction(1.0)
    return least


def repeated(sample: Any, size: int) -> Any:
    """A batch of so many copies of one sample, whose numbers are legal (tokens of the vocabulary)."""

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return leaf
        return leaf.expand(size, *leaf.shape[1:]).contiguous()

    return tree_map(repeated, sample)
