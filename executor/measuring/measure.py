"""Run plans for a few steps on this machine's devices, in turns, and time them."""

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...planner.cost.bands import is_cpu
from ...planner.plan.document import Plan
from ...profiler.model.loaded import Batch, LoadedModel
from ..parallel.micro_batches import split_micro_batches
from ..start_up import parallelize
from ..trainer import Trainer
from ..watch import HANG_S
from .local_ranks import RankError, run_local_ranks
from .measurement import MAX_CPU_RANKS, WARM_UP_STEPS, Measurement

_TIMEOUT_S = 600.0
_SEED = 0


@dataclass(frozen=True)
class _RankTimes:
    """What one rank measured in one repetition."""

    steps_s: tuple[float, ...]
    peak_memory_bytes: int


def measure(
    plans: Mapping[str, Plan], loaded: LoadedModel, steps: int = 5, repetitions: int = 5
) -> dict[str, Measurement | str]:
    """Label -> what the plan's steps took, or in a sentence why it could not be run.

    Every plan runs with its own global batch, and in its own precision, on the local GPUs if there are enough for all
    plans, else on CPU processes that talk over gloo. Repetitions are interleaved (A B C, A B C, ...), each with new
    processes, so that a slow minute of the machine hits all plans alike.
    """
    failures = {label: reason for label, plan in plans.items() if (reason := _cannot_run(plan, steps)) is not None}
    runnable = {label: plan for label, plan in plans.items() if label not in failures}
    ranks = max((plan.degrees.num_devices for plan in runnable.values()), default=1)
    device_type = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    found: dict[str, list[list[_RankTimes]]] = {label: [] for label in runnable}
    for _ in range(repetitions):
        for label, plan in runnable.items():
            if label in failures:
                continue
            try:
                times = run_local_ranks(
                    _timed_steps,
                    plan.degrees.num_devices,
                    loaded,
                    plan,
                    steps,
                    device_type,
                    timeout_s=_TIMEOUT_S,
                    device_type=device_type,
                )
            except RankError as error:
                failures[label] = f"it did not run: {error}"
            else:
                found[label].append(times)
    return {
        label: failures[label] if label in failures else _measurement(label, plan, found[label], device_type)
        for label, plan in plans.items()
    }


def _cannot_run(plan: Plan, steps: int) -> str | None:
    ranks = plan.degrees.num_devices
    gpus = torch.cuda.device_count()  # leaves CUDA alone, so that ranks can be forked
    if ranks > MAX_CPU_RANKS and gpus < ranks:
        return f"it takes {ranks} ranks: more than the {gpus} GPUs here, and than {MAX_CPU_RANKS} CPU processes"
    on_cpu = is_cpu(plan.cluster.device.name) and gpus < ranks
    if on_cpu and plan.prediction is not None:
        count, step_s = WARM_UP_STEPS + steps, plan.prediction.step_time_s
        if count * step_s > _TIMEOUT_S:
            return (
                f"{count} steps of about {step_s:.0f} s each would take more than {_TIMEOUT_S:.0f} s: give a smaller "
                "--global-batch or --seq-len"
            )
    return None


def _measurement(label: str, plan: Plan, repetitions: list[list[_RankTimes]], device_type: str) -> Measurement:
    ranks = plan.degrees.num_devices
    return Measurement(
        label=label,
        model=plan.model.name,
        layout=plan.label,
        num_ranks=ranks,
        device=_device_words(ranks, device_type),
        torch_version=torch.__version__,
        steps_s=tuple(
            tuple(max(step) for step in zip(*(rank.steps_s for rank in run), strict=True)) for run in repetitions
        ),
        tokens_per_step=plan.training.global_batch * (plan.training.seq_len or 1),
        peak_memory_bytes=tuple(max(run[rank].peak_memory_bytes for run in repetitions) for rank in range(ranks)),
        memory_kind="resident" if device_type == "cpu" else "allocated",
    )


def _device_words(ranks: int, device_type: str) -> str:
    if ranks == 1:
        return "one CPU process" if device_type == "cpu" else "one GPU"
    return f"{ranks} CPU processes over gloo" if device_type == "cpu" else f"{ranks} GPUs over nccl"


def _timed_steps(loaded: LoadedModel, plan: Plan, steps: int, device_type: str) -> _RankTimes:
    """Times of a plan's steps on this rank. Every step ends with the loss, for which all ranks wait."""
    trainer, share = trainer_and_share(loaded, plan, device_type)
    times = []
    for _ in range(WARM_UP_STEPS + steps):
        started = time.perf_counter()
        trainer.step(share)
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device_type == "cuda" else _peak_resident_bytes()
    trainer.close()
    return _RankTimes(tuple(times[WARM_UP_STEPS:]), peak)


def trainer_and_share(
    loaded: LoadedModel, plan: Plan, device: str | None, timeout_s: float = HANG_S
) -> tuple[Trainer, Batch]:
    """(this rank's trainer for a plan, its share of a global batch made by the model's `batch`). device: None for this
    rank's GPU, or the CPU if it has none."""
    kind = torch.optim.AdamW if plan.training.optimizer == "adamw" else torch.optim.SGD
    trainer = parallelize(
        loaded.build,
        plan,
        lambda parameters: kind(parameters, lr=1e-4),
        loaded.loss,
        weight=loaded.weight,
        seed=_SEED,
        device=device,
        timeout_s=timeout_s,
    )
    return trainer, _share(loaded.batch(plan.training.global_batch), plan, trainer.data_rank, trainer.data_size)


def _share(batch: Batch, plan: Plan, data_rank: int, data_size: int) -> Batch:
    samples, planned = plan.training.global_batch, plan.model.batch
    share: Batch = split_micro_batches(batch, data_size, samples, planned)[data_rank]
    return share


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
