"""Runs plans on an emulated cluster, a step of each in turn, and returns how long the steps took."""

import faulthandler
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.planned_vs_manual.hosts import Host
from benchmarks.planned_vs_manual.padded import Clock, optimizer_pad_s, pad_trainer, padded_optimizer
from meshwright.executor import parallelize
from meshwright.executor.measuring.local_ranks import RankError, run_local_ranks
from meshwright.executor.parallel.micro_batches import split_micro_batches
from meshwright.executor.trainer import Trainer
from meshwright.planner.plan.document import Plan
from meshwright.profiler.machine.cluster import Device
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile

STEP_LIMIT_S = 60.0
"""A set-up whose start, or one of whose steps, takes longer is given up, and the others are run without it."""

_SESSION_LIMIT_S = 1800.0
_PORT = 29611


@dataclass(frozen=True)
class Job:
    """Steps of one plan: seconds until the slowest rank had ended, in the order in which they were taken; and the most
    that any rank really worked in a step, relative to the declared time that was to hide it."""

    steps_s: tuple[float, ...]
    work: float

    @property
    def step_s(self) -> float:
        """Their median."""
        return statistics.median(self.steps_s)

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, relative to the median."""
        if len(self.steps_s) == 1:
            return 0.0
        low, _, high = statistics.quantiles(self.steps_s, n=4, method="inclusive")
        return (high - low) / 2 / self.step_s


@dataclass(frozen=True)
class Task:
    """A model with its profile, the devices it runs on, and where ranks are: evenly on the hosts, or if there are none
    all on this one. speeds: of each host's devices, relative to the device; () where all are alike."""

    loaded: LoadedModel
    profile: ModelProfile
    device: Device
    hosts: Sequence[Host]
    speeds: tuple[float, ...] = ()

    def device_of(self, rank: int, ranks: int) -> Device:
        """The device of a rank."""
        speed = self.speeds[rank * len(self.speeds) // ranks] if self.speeds else 1.0
        return self.device if speed == 1.0 else at_speed(self.device, speed)


def at_speed(device: Device, speed: float) -> Device:
    """A device that takes 1 / speed times as long for everything that it computes."""
    return device.model_copy(
        update={
            "flops": {dtype: flops * speed for dtype, flops in device.flops.items()},
            "bandwidth": device.bandwidth * speed,
            "launch": device.launch / speed,
        }
    )


def run(plans: Mapping[str, Plan], task: Task, steps: int, say: Callable[[str], None]) -> dict[str, Job | str]:
    """Label -> its steps on devices of the declared speed, or why it could not be run. All plans have equally many
    ranks. The trainers of all plans live side by side in every rank and take a step in turn, so that a slow moment of
    this machine hits all alike; a plan that fails or hangs is left out, and the others are run again."""
    failed: dict[str, Job | str] = {}
    left = dict(plans)
    found: dict[str, Job] = {}
    while left and not found:
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder) / "at"
            try:
                found = _together(left, task, steps, at)
            except RankError as error:
                culprit = json.loads(at.read_text()) if at.exists() else next(iter(left))
                failed[culprit] = f"it did not run: {error}"
                say(f"    {culprit}: {failed[culprit]}")
                left.pop(culprit)
    return {**failed, **found}


def _together(plans: Mapping[str, Plan], task: Task, steps: int, at: Path) -> dict[str, Job]:
    """at: a file that names the plan whose turn it is."""
    ranks = next(iter(plans.values())).degrees.num_devices
    times: list[dict[str, list[tuple[float, float]]]] = run_local_ranks(
        _rank, ranks, plans, task, steps, at, timeout_s=_SESSION_LIMIT_S, device_type="emulated"
    )
    found = {}
    for label in plans:
        by_step = list(zip(*(own[label] for own in times), strict=True))
        taken = tuple(max(seconds for seconds, _ in step) for step in by_step)
        found[label] = Job(taken, statistics.median(max(work for _, work in step) for step in by_step))
    return found


def _rank(plans: Mapping[str, Plan], task: Task, steps: int, at: Path) -> dict[str, list[tuple[float, float]]]:
    """(seconds, work over declared time) of this rank's steps after the first one of every plan, which warms up."""
    join_hosts(task.hosts)
    clock = Clock()
    jobs = {}
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in plans}
    for label, plan in plans.items():
        _turn_of(label, at)
        jobs[label] = padded_trainer(plan, task, clock)
        jobs[label][0].step(jobs[label][1])
    before_others()
    gc.freeze()
    gc.disable()  # what Python's collector does in the middle of a step would be waited for by all ranks
    for _ in range(steps):
        for label, (trainer, share) in jobs.items():
            _turn_of(label, at)
            gc.collect()
            dist.barrier()
            started = time.perf_counter()
            clock.begin()
            trainer.step(share)
            times[label].append((time.perf_counter() - started, clock.worked_s / clock.declared_s))
    faulthandler.cancel_dump_traceback_later()
    return times


def before_others() -> None:
    """Let this rank's threads, gloo's included, run as soon as they can, whatever else this machine does; they mostly
    sleep. Without the right to do so they wait with the others. (All with one priority: with a higher one gloo's
    threads were seen to turn in a circle, waiting for ours.)"""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def _turn_of(label: str, at: Path) -> None:
    """End this process, with a trace of where it hangs, if the plan does not come to its next turn."""
    if dist.get_rank() == 0:
        at.write_text(json.dumps(label))
    faulthandler.dump_traceback_later(STEP_LIMIT_S, exit=True, file=sys.__stderr__)


def join_hosts(hosts: Sequence[Host]) -> None:
    """Go to this rank's host and meet the others."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if hosts:
        host = hosts[rank * len(hosts) // ranks]
        host.enter()
        os.environ.update(MASTER_ADDR=hosts[0].address, MASTER_PORT=str(_PORT), GLOO_SOCKET_IFNAME=host.interface)
    os.environ.update(LOCAL_RANK=str(rank % max(1, ranks // max(1, len(hosts)))))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=_SESSION_LIMIT_S))


def padded_trainer(plan: Plan, task: Task, clock: Clock, telemetry: Path | None = None) -> tuple[Trainer, Any]:
    """(this rank's trainer of a plan, whose layers take their declared time; its share of a batch). telemetry: a file,
    if it is to write some."""
    warnings.simplefilter("ignore")
    loaded, profile = task.loaded, task.profile
    device = task.device_of(dist.get_rank(), dist.get_world_size())
    position = _position(plan)
    trainer = parallelize(
        loaded.build,
        plan,
        padded_optimizer(_adamw, optimizer_pad_s(plan, profile, device, position), clock),
        loaded.loss,
        weight=loaded.weight,
        device="cpu",
        telemetry=telemetry,
    )
    assert trainer.mesh.coordinates["pipeline"] == position
    pad_trainer(trainer, plan, profile, device, clock)
    torch.manual_seed(0)
    batch = loaded.batch(plan.training.global_batch)
    return trainer, split_micro_batches(batch, trainer.data_size, plan.training.global_batch)[trainer.data_rank]


def _adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _position(plan: Plan) -> int:
    """This rank's place in the pipeline."""
    return dist.get_rank() // plan.stride("pipeline") % plan.degrees.pipeline
