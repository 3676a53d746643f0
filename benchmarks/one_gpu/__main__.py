"""One rank of every set-up on one GPU: real kernels and memory, no peers, communication from the model.

    python -m benchmarks.one_gpu                      # needs a GPU
    python -m benchmarks.one_gpu --cpu --small        # the same road without one: times only, on small models

The process group is a fake one; each rank has a process of its own. Measured kernels stand beside predicted ones,
measured memory (what torch has allocated at most) beside predicted; the composed step is the predicted one with
measured kernels in it.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.accuracy import cases
from benchmarks.accuracy.played import ranks_to_play
from benchmarks.one_gpu.rank import RankRun, run_rank
from meshwright.planner.answers.search import InfeasibleError, price_setup, search
from meshwright.planner.cost.alone import composed_step_s, kernels_s
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.plan.document import Plan, load_plan
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.machine.local import local_gpus, preset_of
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile

RESULTS = Path(__file__).with_name("results")
MODELS = ("gpt", "bert_large", "llama3_8b")
PER_GPU = 4
"""Samples of the global batch for each GPU."""

SETUPS = (
    "ddp",
    "fsdp",
    "hsdp:4",
    "zero=1",
    "fsdp recompute=full",
    "tp=2 sp=on fsdp",
    "tp=4 sp=on zero=1",
    "pp=2 schedule=1f1b",
    "pp=4 schedule=interleaved v=2",
    "cp=2 fsdp",
)
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Row:
    """One rank of one set-up of a model; None where the device does not say."""

    model: str
    setup: str
    layout: str
    rank: int
    stage: int
    measured_s: float
    predicted_s: float
    measured_bytes: int | None
    predicted_bytes: float
    composed_step_s: float | None
    predicted_step_s: float


@dataclass(frozen=True)
class Failure:
    """A set-up that was not run, and why."""

    model: str
    setup: str
    reason: str


def loaded_model(name: str, small: bool) -> LoadedModel:
    """A model of the zoo, or its small version."""
    source = next(source for source in cases.sources() if cases.name_of(source) == name)
    return cases.small(source) if small else cases.whole(source)


def measured(
    name: str, setups: Sequence[str], num_gpus: int, preset: str, device: str, steps: int, small: bool
) -> tuple[list[Row], list[Failure]]:
    """Every set-up of one model, the planned one first."""
    profile = cases.profile_of(loaded_model(name, small))
    machine = cluster_of(load_device(preset), num_gpus)
    training = TrainingSpec(global_batch=PER_GPU * num_gpus, seq_len=profile.seq_len)
    plans: dict[str, tuple[Plan, Estimate] | str] = {}
    try:
        found = search(profile, machine, training)
        plans["planned"] = found.plan, found.estimate
    except InfeasibleError as error:
        plans["planned"] = str(error)
    for words in setups:
        candidate = price_setup(parse_setup(words, num_gpus, machine.devices_per_host), profile, machine, training)
        priced = candidate.plan is not None and candidate.estimate is not None
        plans[words] = (candidate.plan, candidate.estimate) if priced else str(candidate.verdict)  # type: ignore[assignment]
    rows: list[Row] = []
    failures: list[Failure] = []
    for words, made in plans.items():
        if isinstance(made, str):
            failures.append(Failure(name, words, made))
            continue
        runs = [_in_a_process(name, made[0], rank, device, steps, small) for rank in ranks_to_play(made[0])]
        failures += [Failure(name, words, run) for run in runs if isinstance(run, str)]
        rows += rows_of(name, words, *made, profile, [run for run in runs if isinstance(run, RankRun)])
    return rows, failures


def _in_a_process(name: str, plan: Plan, rank: int, device: str, steps: int, small: bool) -> RankRun | str:
    """What a rank did in a process of its own, or why it did not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.one_gpu", "--one", str(path), "--rank", str(rank)]
        words += ["--models", name, "--steps", str(steps), *["--cpu"] * (device == "cpu"), *["--small"] * small]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"rank {rank} took more than {_TIMEOUT_S:.0f} s"
    if done.returncode:
        return f"rank {rank} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    return RankRun(**json.loads(done.stdout.splitlines()[-1]))


def rows_of(
    name: str, setup: str, plan: Plan, found: Estimate, profile: ModelProfile, runs: Sequence[RankRun]
) -> list[Row]:
    """Measured beside predicted, for the ranks of one set-up that ran."""
    predicted = {run.stage: kernels_s(plan, profile, found, run.stage) for run in runs}
    ratios = {run.stage: run.step_s / predicted[run.stage] for run in runs}
    composed = composed_step_s(plan, profile, found, ratios)
    return [
        Row(
            model=name,
            setup=setup,
            layout=shape_of(plan).label,
            rank=run.rank,
            stage=run.stage,
            measured_s=run.step_s,
            predicted_s=predicted[run.stage],
            measured_bytes=run.peak_bytes,
            predicted_bytes=found.memory[run.stage].allocated_bytes,
            composed_step_s=composed,
            predicted_step_s=found.step_time_s,
        )
        for run in runs
    ]


def markdown(rows: Sequence[Row], failures: Sequence[Failure], where: str, num_gpus: int) -> str:
    """The table, then what did not run."""
    lines = [
        f"`python -m benchmarks.one_gpu`, {datetime.datetime.now(datetime.UTC).date().isoformat()}, {where}",
        "",
        f"One rank of jobs of {num_gpus} GPUs, {PER_GPU} samples for each, with real kernels under a fake process "
        "group: collectives return at once. Memory: most that torch had allocated. Composed: the predicted step with "
        "measured kernels in it.",
        "",
        "| model | set-up | layout | rank | kernels | predicted | ratio | GiB | predicted | ratio | composed step "
        "| predicted |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        known, composed = row.measured_bytes, row.composed_step_s
        memory = "- | " if known is None else f"{known / 2**30:.2f} | "
        memory += f"{row.predicted_bytes / 2**30:.2f} | "
        memory += "-" if known is None else f"{row.predicted_bytes / known:.2f}"
        lines.append(
            f"| {row.model} | {row.setup} | {row.layout} | {row.rank} | {1e3 * row.measured_s:.1f} ms "
            f"| {1e3 * row.predicted_s:.1f} ms | {row.predicted_s / row.measured_s:.2f} | {memory} "
            f"| {'-' if composed is None else f'{1e3 * composed:.1f} ms'} | {1e3 * row.predicted_step_s:.1f} ms |"
        )
    lines += ["", *(f"- {each.model}, {each.setup}: {each.reason}" for each in failures)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run every set-up of every model, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--setup", action="append", help="default: ten usual ones")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", help="preset or device TOML to predict with (default: that of the GPU here)")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--small", action="store_true", help="the models' small versions")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cpu" if arguments.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --cpu --small takes the same road without one")
    if arguments.one:
        loaded = loaded_model(arguments.models[0], arguments.small)
        run = run_rank(loaded, load_plan(arguments.one), arguments.rank, device, arguments.steps)
        print(json.dumps(asdict(run)))
        return 0
    preset = arguments.device or ("cpu" if arguments.cpu else preset_of(*local_gpus()[0]))
    if preset is None:
        parser.error(f"no preset for {local_gpus()[0][0]}: give --device")
    rows: list[Row] = []
    failures: list[Failure] = []
    for name in arguments.models:
        more, failed = measured(
            name, arguments.setup or SETUPS, arguments.gpus, preset, device, arguments.steps, arguments.small
        )
        rows, failures = rows + more, failures + failed
        print(f"{name}: {len(more)} ranks, {len(failed)} not run", flush=True)
    where = "CPU" if arguments.cpu else torch.cuda.get_device_name()
    arguments.output.mkdir(parents=True, exist_ok=True)
    table = markdown(rows, failures, f"{where}, torch {torch.__version__}", arguments.gpus)
    (arguments.output / "one_gpu.md").write_text(table)
    (arguments.output / "one_gpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table)
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
