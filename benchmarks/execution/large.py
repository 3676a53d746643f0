"""One rank of plans for Llama 3.1 405B on 2,048 GPUs, built and stepped on fake tensors: how long, how much memory.

    python -m benchmarks.execution.large

Every plan has a process of its own; its seconds and memory hold everything from Python's start on: imports, the
profile, the plan, the build by the project's own executor, and one step with the optimizer's.
"""

import argparse
import datetime
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.accuracy import played
from benchmarks.accuracy.cases import MODELS
from meshwright.executor import parallelize
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.legality import can_recompute
from meshwright.planner.plan.making import make_plan, shape_of
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.trace import trace
from meshwright.profiler.running.fake_modes import fake_mode

RESULTS = Path(__file__).parent / "results"
MOST_S, MOST_BYTES = 60.0, 2 * 2**30

_SEQ_LEN = 8192


@dataclass(frozen=True)
class Case:
    """A plan of 2,048 ranks: shard x 8 x pipeline."""

    shard: int
    pipeline: int
    schedule: Schedule
    virtual: int
    num_microbatches: int


CASES = {
    "fsdp": Case(256, 1, "none", 1, 1),
    "1f1b": Case(16, 16, "1f1b", 1, 16),
    "interleaved": Case(16, 16, "interleaved", 4, 16),
}


def plan_of(case: Case, loaded: LoadedModel) -> Plan:
    """Equal cuts, everything recomputed."""
    profile = trace(loaded)
    shape = Shape(
        data_replicate=1,
        data_shard=case.shard,
        tensor=8,
        pipeline=case.pipeline,
        micro_batch=1,
        num_microbatches=case.num_microbatches,
        sequence=True,
        schedule=case.schedule,
        virtual_stages=case.virtual,
    )
    training = TrainingSpec(
        global_batch=case.num_microbatches * case.shard, seq_len=_SEQ_LEN, precision="bf16", optimizer="adamw"
    )
    options = [
        LayerOption("full" if can_recompute(profile, layer) else "none", reshard=case.pipeline == 1)
        for layer in profile.layers
    ]
    count = case.pipeline * case.virtual
    ends = [round(i * len(options) / count) for i in range(count + 1)]
    stages = [options[first:end] for first, end in pairwise(ends)]
    machines = cluster_of(load_device("h100-80gb"), shape.degrees.num_devices)
    return make_plan(profile, machines, training, shape, stages)


class _Shards(Sequence[torch.Tensor]):
    """A tensor in so many parts, each made when it is asked for: fully_shard asks for two of hundreds, and each
    fake one takes a tenth of a millisecond."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._size = -(-tensor.shape[dim] // count)

    def __len__(self) -> int:
        return self._count

    def joined(self, dim: int) -> torch.Tensor:
        """A tensor of the shape that all parts have one after the other."""
        shape = list(self._tensor.shape)
        shape[self._dim] = self._size
        shape[dim] *= self._count
        return self._tensor.new_empty(shape)

    def __getitem__(self, place: Any) -> Any:
        start = place * self._size
        left = self._tensor.shape[self._dim] - start
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, left))


class _Torch:
    """torch as fully_shard's collectives see it: what is cut into hundreds of parts only to be joined along another dim
    becomes one tensor of that shape, for a fake one has no numbers to move."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: torch.Tensor, count: int, dim: int = 0) -> _Shards:
        """Parts that nobody makes."""
        return _Shards(tensor, count, dim)

    def cat(self, parts: Any, dim: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        """The parts along another dim."""
        if not isinstance(parts, _Shards):
            return torch.cat(parts, dim=dim, out=out)
        return parts.joined(dim) if out is None else out


def run_one(name: str) -> dict[str, Any]:
    """What one plan takes in this process."""
    loaded = load_model(MODELS / "llama31_405b").with_seq_len(_SEQ_LEN)
    plan = plan_of(CASES[name], loaded)
    known = time.process_time()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.degrees.num_devices)
    fake = fake_mode()
    with (
        played.without_numbers(fake),
        mock.patch.object(_fsdp_param, "_chunk_with_empty", _Shards),
        mock.patch.object(_fsdp_collectives, "torch", _Torch()),
    ):
        ours = parallelize(loaded.build, plan, played.adamw, loss=loaded.loss, max_grad_norm=1.0, device="cpu")
        built = time.process_time()
        with fake, played.Ones():
            ours.step(played.batch_of(loaded, ours.samples_per_step))
    done = time.process_time()
    return {
        "name": name,
        "plan": shape_of(plan).label,
        "plan_s": known,
        "build_s": built - known,
        "step_s": done - built,
        "cpu_s": done,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "case": asdict(CASES[name]),
    }


def _markdown(rows: list[dict[str, Any]]) -> str:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"`python -m benchmarks.execution.large`, {date}, torch {torch.__version__}",
        "",
        f"Llama 3.1 405B, {_SEQ_LEN} tokens, bf16, rank 0 of 2,048 in one process, on fake tensors. Target: build and "
        f"step within {MOST_S:.0f} s and {MOST_BYTES / 2**30:.0f} GiB. Seconds are the process's CPU time (it has one "
        "thread); wall is with whatever else ran.",
        "",
        "| plan | micro-batches | start, profile and plan | build | step | in all | wall | peak memory |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['plan']} | {row['case']['num_microbatches']} | {row['plan_s']:.1f} s | {row['build_s']:.1f} s "
            f"| {row['step_s']:.1f} s | {row['cpu_s']:.1f} s | {row['wall_s']:.0f} s "
            f"| {row['peak_bytes'] / 2**30:.2f} GiB |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all plans, and write the table; 1 if one takes more than the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=CASES, help="run this one here, and print it as JSON")
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_one(arguments.one)))
        return 0
    file = RESULTS / "large.json"
    known = {row["name"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    for name in arguments.only:
        started = time.perf_counter()
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.execution.large", "--one", name]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        known[name] = json.loads(done.stdout.splitlines()[-1]) | {"wall_s": time.perf_counter() - started}
        print(_markdown([known[name]]).splitlines()[-1], flush=True)
    rows = [known[name] for name in CASES if name in known]
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "large.md").write_text(_markdown(rows))
    return int(any(row["cpu_s"] > MOST_S or row["peak_bytes"] > MOST_BYTES for row in rows))


if __name__ == "__main__":
    sys.exit(main())
