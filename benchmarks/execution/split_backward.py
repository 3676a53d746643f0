"""What the host takes for a backward in two parts, as zero-bubble schedules want it: SPLIT of host_cost.py.

    python -m benchmarks.execution.split_backward

The second of four stages of a small model, without its peers, on one CPU thread: eight micro-batches under ZB-H1 and
under 1F1B, in turn, with layers whose kernels take next to nothing. What one takes longer than the other, in operators
of the layers (a step of 1F1B is taken for theirs), is divided by their parameters.
"""

import argparse
import datetime
import statistics
import time
from pathlib import Path

import torch

from benchmarks.accuracy import played
from benchmarks.one_gpu.prepared import loaded_model, profile_of
from benchmarks.one_gpu.rank import WARM_UP_STEPS, repeated
from meshwright.executor import parallelize
from meshwright.executor.measuring.one_rank import without_peers
from meshwright.planner.answers.search import price_setup
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.loaded import LoadedModel

RESULTS = Path(__file__).with_name("results")
MODELS = ("gpt", "gpt2", "llama3_8b", "vit_large", "dit_xl2", "mlp")
_STAGES, _MICRO_BATCHES = 4, 8
_SCHEDULES = ("1f1b", "zb-h1")


def plan_of(name: str, schedule: str) -> Plan:
    """The small version of a model of the zoo in four stages."""
    profile, machine = profile_of(name, True), cluster_of(load_device("h100-80gb"), _STAGES)
    training = TrainingSpec(global_batch=_MICRO_BATCHES, seq_len=profile.seq_len or 1, precision="fp32")
    words = f"pp={_STAGES} schedule={schedule} mb=1"
    found = price_setup(parse_setup(words, _STAGES, _STAGES), profile, machine, training)
    if found.plan is None:
        raise ValueError(f"{name} does not go into {words}: {found.verdict}")
    return found.plan


def step_s(loaded: LoadedModel, plan: Plan, steps: int) -> float:
    """Seconds of the fastest step of the second stage's rank."""
    taken = []
    with without_peers(plan.stride("pipeline"), _STAGES):
        trainer = parallelize(loaded.build, plan, played.adamw, loss=loaded.loss, max_grad_norm=1.0, device="cpu")
        batch = repeated(loaded.batch(1), trainer.samples_per_step)
        for _ in range(WARM_UP_STEPS + steps):
            started = time.perf_counter()
            trainer.step(batch)
            taken.append(time.perf_counter() - started)
    return min(taken[WARM_UP_STEPS:])


def row_of(name: str, steps: int) -> tuple[str, float]:
    """A line of the table, and operators' worth for each parameter."""
    loaded, profile = loaded_model(name, True), profile_of(name, True)
    plans = {schedule: plan_of(name, schedule) for schedule in _SCHEDULES}
    taken = {schedule: step_s(loaded, plan, steps) for schedule, plan in plans.items()}
    names = {layer.name for layer in plans["1f1b"].stages[1].layers}
    held = [profile.classes[layer.layer_class] for layer in profile.layers if layer.name in names]
    operators = sum(op.kernels for each in held for op in each.whole.operators)
    parameters = sum(parameter.trainable for each in held for parameter in each.parameters)
    worth = (taken["zb-h1"] / taken["1f1b"] - 1) * operators / parameters
    times = " | ".join(f"{1e3 * taken[schedule] / _MICRO_BATCHES:.2f} ms" for schedule in _SCHEDULES)
    return f"| {name} | {operators:.0f} | {parameters} | {times} | {worth:.1f} |", worth


def main() -> None:
    """Print a row for each model, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder (default: results beside this file)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        rows.append(row_of(name, arguments.steps))
        print(rows[-1][0], flush=True)
    worth = [each for _, each in rows]
    lines = [
        f"`python -m benchmarks.execution.split_backward`, {datetime.datetime.now(datetime.UTC).date().isoformat()}, "
        f"torch {torch.__version__}, one CPU thread",
        "",
        "The stage's layers: operators of both passes and parameters; the fastest step, for a micro-batch; and what "
        "the split takes, in operators for each parameter.",
        "",
        "| model | operators | parameters | 1F1B | ZB-H1 | operators each |",
        "|---|---:|---:|---:|---:|---:|",
        *(line for line, _ in rows),
        "",
        f"Median {statistics.median(worth):.1f}, from {min(worth):.1f} to {max(worth):.1f}.",
    ]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "split_backward.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
