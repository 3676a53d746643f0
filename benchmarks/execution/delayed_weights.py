"""What it buys, or costs, to compute weights' gradients while tensor ranks sum the gradient of what columns read.

    python -m benchmarks.execution.delayed_weights

Two trainers of one Llama on two gloo ranks, steps of both in turn: one puts weights' gradients off whatever the size,
the other never does. Losses are the same to the bit. By width, for that is what the tensors' size goes by.
"""

import argparse
import datetime
import statistics
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from meshwright.executor import parallelize
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.executor.parallel import delayed_weights
from meshwright.planner.plan.document import Plan

from . import by_hand
from .overhead import CASES, RESULTS, Model, config_of, loss_of_logits, plan_of, tokens_of

_CASE = next(case for case in CASES if case.name == "TP 2, own collectives")
_LEAST_BYTES = {"delayed": 0, "at once": sys.maxsize}
_WARM_UP = 3


def pairs_of_steps(config: LlamaConfig, plan: Plan, num_pairs: int) -> list[tuple[float, float]]:
    """[pair] -> what steps take with delayed gradients over what they take without: (wall time, CPU time) of this
    rank. Raises AssertionError if losses differ."""
    trainers = {
        name: parallelize(
            lambda: Model(config), plan, by_hand.adamw, loss=loss_of_logits, seed=0, device="cpu", telemetry=None
        )
        for name in _LEAST_BYTES
    }
    generator, found = torch.Generator().manual_seed(1), []
    for pair in range(_WARM_UP + num_pairs):
        tokens = tokens_of(trainers["delayed"].samples_per_step, generator)
        took, losses = {}, set()
        for name in sorted(trainers, reverse=bool(pair % 2)):
            with patch.object(delayed_weights, "LEAST_BYTES", _LEAST_BYTES[name]):
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                losses.add(trainers[name].step((tokens, tokens)).loss)
                took[name] = time.perf_counter() - wall, time.process_time() - cpu
        assert len(losses) == 1, losses
        if pair >= _WARM_UP:
            (wall, cpu), (wall_before, cpu_before) = took["delayed"], took["at once"]
            found.append((wall / wall_before, cpu / cpu_before))
    for trainer in trainers.values():
        trainer.close()
    return found


def line_of(width: int, num_layers: int, num_pairs: int) -> str:
    """A row of the table."""
    config = config_of(width, num_layers)
    plan = plan_of(_CASE, config)
    ranks = run_local_ranks(pairs_of_steps, _CASE.ranks, config, plan, num_pairs, timeout_s=900.0)
    wall, cpu = (statistics.median(pair[i] for rank in ranks for pair in rank) for i in (0, 1))
    kib = plan.micro_batch * plan.training.seq_len * width * 4 / 2**10
    return f"| {width} | {num_layers} | {kib:,.0f} | {wall:.3f} | {cpu:.3f} |"


def main() -> None:
    """Print a row for each width, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder (default: results beside this file)")
    arguments = parser.parse_args()
    lines = []
    for width in arguments.widths:
        lines.append(line_of(width, max(2, 2048 // width), arguments.pairs))
        print(lines[-1], flush=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = [
        f"`python -m benchmarks.execution.delayed_weights`, {date}, torch {torch.__version__}",
        "",
        f"Steps of two ranks with delayed gradients of weights over those without, medians of {arguments.pairs} pairs "
        "and both ranks; fp32, on gloo.",
        "",
        "| width | layers | KiB that are summed | wall time | CPU time |",
        "|---:|---:|---:|---:|---:|",
    ]
    (arguments.output / "delayed_weights.md").write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
