"""A run on an emulated cluster, one of whose hosts is slower by a third: it is found, and planned around for real."""

import os
import socket
import statistics
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.planned_vs_manual.bench import job_of
from benchmarks.planned_vs_manual.jobs import Task, before_others
from benchmarks.planned_vs_manual.models import CASES
from benchmarks.planned_vs_manual.padded import Clock, optimizer_pad_s, pad_trainer, padded_optimizer
from benchmarks.tuning.bench import true_device
from meshwright.executor import parallelize
from meshwright.executor.measuring.slow_hosts import host_speeds
from meshwright.executor.measuring.slower_cluster import ways_on
from meshwright.executor.parallel.mesh import plan_ranks
from meshwright.executor.parallel.micro_batches import split_micro_batches
from meshwright.executor.reporting.switching import Switching
from meshwright.executor.run_document import load_run
from meshwright.planner.answers.search import SearchResult, search
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

SPEEDS = (1.0, 2 / 3)
STEPS = 14


def _train(plan: Plan, task: Task, path: Path) -> None:
    """Steps of two hosts of two ranks; on the second host everything that is computed takes 1.5 times as long."""
    process = dist.get_rank()
    socket.gethostname = lambda: f"host{process // 2}"
    os.environ["LOCAL_RANK"] = str(process % 2)
    torch.set_num_threads(1)
    seats = [(f"host{i // 2}", i % 2) for i in range(4)]
    position = plan.coordinates(plan_ranks(plan, seats)[process])["pipeline"]
    device, clock = task.device_of(process, 4), Clock()
    seconds = optimizer_pad_s(plan, task.profile, device, position)
    loaded = task.loaded
    trainer = parallelize(
        loaded.build,
        plan,
        padded_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-4), seconds, clock),
        loaded.loss,
        weight=loaded.weight,
        device="cpu",
        telemetry=path,
    )
    assert trainer.mesh.coordinates["pipeline"] == position
    pad_trainer(trainer, plan, task.profile, device, clock)
    torch.manual_seed(0)
    batch = loaded.batch(plan.training.global_batch)
    share = split_micro_batches(batch, trainer.data_size, plan.training.global_batch)[trainer.data_rank]
    trainer.step(share)
    before_others()
    for _ in range(STEPS):
        dist.barrier()
        clock.begin()
        trainer.step(share)
    trainer.close()


@pytest.fixture(scope="module")
def job() -> tuple[Task, TrainingSpec]:
    """Ten blocks and what is before and behind them, on devices of a known speed."""
    case = next(case for case in CASES if case.name == "deep and narrow")
    loaded, profile, training = job_of(case)
    device = true_device()
    device = device.model_copy(update={"memory": 4 * case.memory, "network": device.link})
    return Task(loaded, profile, device, (), SPEEDS), training


def test_a_slow_host_is_found_beside_replicas(tmp_path: Path, job: tuple[Task, TrainingSpec]) -> None:
    task, training = job
    cluster = cluster_of(task.device, 4, 2)
    plan = search(task.profile, cluster, training, pins=Pins(pipeline=1), time_limit_s=10.0).plan
    run_ranks(_train, 4, plan, task, tmp_path / "run.jsonl")

    speeds = host_speeds(plan, task.profile, tmp_path / "run.jsonl")

    assert [(host.host, host.ranks, host.beside) for host in speeds.slow] == [(1, (2, 3), True)]
    assert speeds.slow[0].ratio == pytest.approx(1.5, rel=0.1)


def test_a_pipeline_with_less_on_the_slow_host_is_as_much_faster_as_is_told(
    tmp_path: Path, job: tuple[Task, TrainingSpec]
) -> None:
    task, training = job
    pins = Pins(pipeline=2, schedule="1f1b")

    def searched(cluster: ClusterSpec) -> SearchResult:
        return search(task.profile, cluster, training, pins=pins, time_limit_s=10.0)

    plan = searched(cluster_of(task.device, 4, 2)).plan
    run_ranks(_train, 4, plan, task, tmp_path / "before.jsonl")
    speeds = host_speeds(plan, task.profile, tmp_path / "before.jsonl")
    cost = Switching(1.0, 1.0, 0, speeds.step_s, "assumed")

    ways = ways_on(plan, task.profile, speeds, cost, searched, may_stay=True)
    run_ranks(_train, 4, ways.best.plan, task, tmp_path / "after.jsonl")

    assert [(host.host, host.ranks, host.beside) for host in speeds.slow] == [(1, (2, 3), False)]
    assert speeds.slow[0].ratio == pytest.approx(1.5, rel=0.1)
    assert ways.chosen.what == "with host 1"
    step_s = statistics.median(step.step_time_s for step in load_run(tmp_path / "after.jsonl")[1][2:])
    assert ways.chosen.step_s == pytest.approx(step_s, rel=0.1)
    assert step_s < 0.95 * speeds.step_s
    assert host_speeds(ways.best.plan, task.profile, tmp_path / "after.jsonl").slow == ()
