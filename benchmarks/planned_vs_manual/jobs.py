"""Runs plans on an emulated cluster, a step of each in turn, and returns how long the steps took."""

import os
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.planned_vs_manual.hosts import Host
from benchmarks.planned_vs_manual.padded import padded, pads
from meshwright.executor import parallelize
from meshwright.executor.measuring.local_ranks import RankError, run_local_ranks
from meshwright.executor.parallel.micro_batches import split_micro_batches
from meshwright.executor.trainer import Trainer
from meshwright.planner.plan import Plan
from meshwright.profiler.cluster import Device
from meshwright.profiler.load import LoadedModel
from meshwright.profiler.model_profile import ModelProfile

WARM_UP_STEPS = 2
TIMEOUT_S = 900.0
_PORT = 29611


@dataclass(frozen=True)
class Job:
    """Steps of one plan: seconds until the slowest rank had ended, in the order in which they were taken."""

    steps_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Their median."""
        return statistics.median(self.steps_s)

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.steps_s, n=4)
        return (high - low) / 2 / self.step_s


def run(
    plans: Mapping[str, Plan],
    loaded: LoadedModel,
    profile: ModelProfile,
    device: Device,
    hosts: Sequence[Host],
    steps: int,
) -> dict[str, Job | str]:
    """Label -> its steps on devices of the declared speed, or why it could not be run. All plans have equally many
    ranks. The trainers of all plans live side by side in every rank and take a step in turn, so that a slow moment of
    this machine hits all alike. hosts: where ranks are, evenly; none: all on this one."""
    try:
        return _together(plans, loaded, profile, device, hosts, steps)
    except RankError as error:
        if len(plans) == 1:
            return dict.fromkeys(plans, f"it did not run: {error}")
    alone: dict[str, Job | str] = {}
    for label, plan in plans.items():
        alone |= run({label: plan}, loaded, profile, device, hosts, steps)
    return alone


def _together(
    plans: Mapping[str, Plan],
    loaded: LoadedModel,
    profile: ModelProfile,
    device: Device,
    hosts: Sequence[Host],
    steps: int,
) -> dict[str, Job | str]:
    ranks = next(iter(plans.values())).degrees.num_devices
    times: list[dict[str, list[float]]] = run_local_ranks(
        _rank,
        ranks,
        plans,
        loaded,
        profile,
        device,
        hosts,
        steps,
        timeout_s=TIMEOUT_S,
        device_type="emulated",
    )
    return {label: Job(tuple(max(step) for step in zip(*(t[label] for t in times), strict=True))) for label in plans}


def _rank(
    plans: Mapping[str, Plan],
    loaded: LoadedModel,
    profile: ModelProfile,
    device: Device,
    hosts: Sequence[Host],
    steps: int,
) -> dict[str, list[float]]:
    """Seconds of this rank's steps after the warm-up."""
    _join(hosts)
    trainers = {label: _trainer(plan, loaded, profile, device) for label, plan in plans.items()}
    times: dict[str, list[float]] = {label: [] for label in plans}
    for number in range(WARM_UP_STEPS + steps):
        for label, (trainer, share) in trainers.items():
            dist.barrier()
            started = time.perf_counter()
            trainer.step(share)
            if number >= WARM_UP_STEPS:
                times[label].append(time.perf_counter() - started)
    return times


def _join(hosts: Sequence[Host]) -> None:
    """Go to this rank's host and meet the others."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if hosts:
        host = hosts[rank * len(hosts) // ranks]
        host.enter()
        os.environ.update(MASTER_ADDR=hosts[0].address, MASTER_PORT=str(_PORT), GLOO_SOCKET_IFNAME=host.interface)
    os.environ.update(LOCAL_RANK=str(rank % max(1, ranks // max(1, len(hosts)))))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S))


def _trainer(plan: Plan, loaded: LoadedModel, profile: ModelProfile, device: Device) -> tuple[Trainer, Any]:
    warnings.simplefilter("ignore")
    trainer = parallelize(
        padded(loaded.build, pads(plan, profile, device)),
        plan,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        loaded.loss,
        weight=loaded.weight,
        device="cpu",
    )
    torch.manual_seed(0)
    batch = loaded.batch(plan.training.global_batch)
    return trainer, split_micro_batches(batch, trainer.data_size, plan.training.global_batch)[trainer.data_rank]
