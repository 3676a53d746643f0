"""Constants learned from the telemetry of some models' runs, on plans of another.

    python -m benchmarks.tuning.learning                      # about ten minutes

Seven models train on the emulated 1 host x 4, of which the planner is told as wrongly as in the races, each by six
set-ups, with telemetry as any trainer writes it. `plan learn` fits the device to the files of all models but one, and
what that predicts for the one left out is set beside its steps. Writes results/learning.md.
"""

import argparse
import gc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

import torch.distributed as dist

from benchmarks.planned_vs_manual.bench import job_of
from benchmarks.planned_vs_manual.jobs import Task, before_others, join_hosts, padded_trainer
from benchmarks.planned_vs_manual.models import CASES
from benchmarks.planned_vs_manual.padded import Clock
from benchmarks.tuning.bench import CLUSTERS, announced, true_device
from meshwright.executor.measuring.calibrate import fitted_to
from meshwright.executor.measuring.learn import LearnedRun, learn_runs
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.executor.tuning.entrants import on_cluster, priced_layouts
from meshwright.planner.plan.document import Plan
from meshwright.profiler.machine.cluster import ClusterSpec, Device
from meshwright.profiler.model.model_profile import ModelProfile

SETUPS = ("ddp", "fsdp", "zero=2", "tp=2", "pp=2 schedule=1f1b", "pp=2 schedule=zb-h1")
CLUSTER = CLUSTERS[3]
RESULT = Path(__file__).with_name("results") / "learning.md"
_LONGEST_S = 1200.0


@dataclass(frozen=True)
class LeftOut:
    """A model that the constants were not learned from: (predicted over measured step, less 1) of each of its plans,
    before and after."""

    name: str
    before: tuple[float, ...]
    after: tuple[float, ...]


def train(plans: Sequence[Plan], task: Task, steps: int, folder: Path) -> None:
    """On each rank: the plans a step in turn, with a file of telemetry for each."""
    join_hosts(task.hosts)
    clock = Clock()
    jobs = [padded_trainer(plan, task, clock, folder / f"{i}.jsonl") for i, plan in enumerate(plans)]
    for trainer, share in jobs:
        trainer.step(share)
    before_others()
    gc.freeze()
    gc.disable()
    for _ in range(steps):
        for trainer, share in jobs:
            gc.collect()
            dist.barrier()
            clock.begin()
            trainer.step(share)
    for trainer, _ in jobs:
        trainer.close()


def left_out(runs: Mapping[str, Sequence[LearnedRun]], name: str, told: ClusterSpec) -> LeftOut:
    """What constants that the other models teach predict for this one."""
    others = [run.step for model, own in runs.items() if model != name for run in own]
    learned, _ = fitted_to(told.device, others)
    steps = [run.step for run in runs[name]]
    errors = (
        tuple(on_cluster(s.plan, on, s.profile)[1].step_time_s / s.step_s - 1 for s in steps)
        for on in (told, _with(told, learned))
    )
    return LeftOut(name, *errors)


def _with(told: ClusterSpec, device: Device) -> ClusterSpec:
    """The cluster of such devices."""
    hosts = tuple(group.model_copy(update={"device": device, "link": device.link}) for group in told.hosts)
    return told.model_copy(update={"hosts": hosts, "network": device.network})


def markdown(found: Sequence[LeftOut], steps: int) -> str:
    """The table."""
    everything = [
        tuple(chain.from_iterable(errors)) for errors in zip(*((f.before, f.after) for f in found), strict=True)
    ]
    together = LeftOut("**all** (target: 4%)", *everything)
    lines = [
        "# Constants learned from the other models' runs",
        "",
        f"{len(found)} models on {CLUSTER.name}, {len(together.after)} runs of {steps} steps. Error: predicted over "
        "measured step, less 1; before: as the planner was told; after: with what `plan learn` makes of the others' "
        "runs.",
        "",
        "| model left out | plans | before, median | after, median | after, worst |",
        "|---|---|---|---|---|",
    ]
    for each in (*found, together):
        before, after = ([abs(error) for error in errors] for errors in (each.before, each.after))
        cells = each.name, len(after), *(f"{x:.1%}" for x in (median(before), median(after), max(after)))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Train, learn and tell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning.learning", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each run (default 10)")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    given = parser.parse_args()
    runs: dict[str, list[LearnedRun]] = {}
    profiles: dict[str, ModelProfile] = {}
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            loaded, profile, training = job_of(case)
            profiles[profile.fingerprint] = profile
            told = announced(CLUSTER, case.memory)
            plans = [plan for _, plan in priced_layouts(SETUPS, profile, told, training)]
            folder = Path(name) / case.name
            folder.mkdir()
            task = Task(loaded, profile, true_device(), [], CLUSTER.speeds)
            run_local_ranks(
                train, CLUSTER.ranks, plans, task, given.steps, folder, timeout_s=_LONGEST_S, device_type="emulated"
            )
            runs[case.name] = learn_runs(sorted(folder.iterdir()), lambda plan: profiles[plan.model.fingerprint])
            print(f"{case.name}: {', '.join(f'{run.step.step_s:.3f} s' for run in runs[case.name])}", flush=True)
    told = announced(CLUSTER, CASES[0].memory)
    found = [left_out(runs, name, told) for name in runs]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(markdown(found, given.steps))
    print(markdown(found, given.steps))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
