"""Step times predicted from `plan calibrate` beside measured ones, calibrated and measured in turns on this machine.

python -m benchmarks.accuracy.calibrated [PAIRS]

Beside the wall time of a step, also the CPU time of the rank's own thread: what it computed, without waiting for others
(gloo works in threads of its own) and without the time that other processes had the core. On an idle machine a step of
one rank takes just that.
"""

import datetime
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from meshwright.executor import parallelize
from meshwright.executor.measuring.calibrate import calibrate
from meshwright.executor.measuring.compare import compare
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.executor.parallel.micro_batches import split_micro_batches
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import Device, cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.trace import trace

RESULT = Path(__file__).parent / "results" / "calibrated.md"
MODELS = Path(__file__).parent.parent / "models"
CASES = (
    ("train_gpt", 1, 16, ("ddp",)),
    ("train_gpt", 2, 16, ("ddp", "fsdp", "tp=2", "pp=2")),
    ("mlp", 1, 256, ("ddp",)),
    ("mlp", 2, 256, ("ddp", "fsdp", "pp=2")),
)
"""Model, ranks, global batch, set-ups."""

STEPS = 6
WARM_UPS = 2


def steps(loaded: LoadedModel, plan: Plan) -> list[tuple[float, float]]:
    """(wall seconds, CPU seconds of this thread) of each step on one rank."""
    trainer = parallelize(
        loaded.build, plan, lambda p: torch.optim.AdamW(p, lr=1e-4), loaded.loss, seed=0, device="cpu"
    )
    batch = plan.training.global_batch
    share = split_micro_batches(loaded.batch(batch), trainer.data_size, batch)[trainer.data_rank]
    times = []
    for _ in range(WARM_UPS + STEPS):
        wall, busy = time.perf_counter(), time.thread_time()
        trainer.step(share)
        times.append((time.perf_counter() - wall, time.thread_time() - busy))
    trainer.close()
    return times[WARM_UPS:]


def predictions(device: Device, name: str, ranks: int, batch: int, setups: tuple[str, ...]) -> dict[str, Any]:
    """Set-up -> its plan, priced on `device`."""
    loaded = load_model(MODELS / f"{name}.py")
    profile = trace(loaded)
    cluster = cluster_of(device, ranks)
    training = TrainingSpec(global_batch=batch, seq_len=profile.seq_len, precision="fp32")
    compared = compare(profile, cluster, training, [parse_setup(s, ranks, ranks) for s in setups])
    return {
        setup: candidate for setup, candidate in zip(setups, compared.candidates[1:], strict=True) if candidate.plan
    }


def pair(number: int) -> list[dict[str, Any]]:
    """Rows of one calibration and the measurements right after it."""
    rows: list[dict[str, Any]] = []
    for ranks in (1, 2):
        device = calibrate("cpu", ranks, quick=True).device
        for name, of_ranks, batch, setups in CASES:
            if of_ranks != ranks:
                continue
            loaded = load_model(MODELS / f"{name}.py")
            priced = predictions(device, name, ranks, batch, setups)
            assumed = predictions(load_device("cpu"), name, ranks, batch, setups)
            for setup, candidate in priced.items():
                took = run_local_ranks(steps, ranks, loaded, candidate.plan, timeout_s=300.0)
                parts = candidate.estimate.breakdown
                rows.append(
                    {
                        "pair": number,
                        "model": name,
                        "ranks": ranks,
                        "set-up": setup,
                        "preset_s": assumed[setup].estimate.step_time_s,
                        "predicted_s": candidate.estimate.step_time_s,
                        "measured_s": statistics.median(wall for wall, _ in took[0]),
                        "predicted_busy_s": parts["compute"] + parts["recompute"] + parts["optimizer"],
                        "busy_s": max(statistics.median(busy for _, busy in rank) for rank in took),
                        "load": os.getloadavg()[0],
                    }
                )
                print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per model, ranks and set-up, medians over the pairs."""
    lines = [
        f"`python -m benchmarks.accuracy.calibrated`, {datetime.date.today().isoformat()}, "
        f"torch {torch.__version__}, {os.cpu_count()} shared cores",
        "",
        "| model | ranks | set-up | step: preset (ms) | predicted (ms) | wall (ms) | error by pair "
        "| computing: predicted (ms) | CPU time (ms) | error by pair |",
        "|---|---:|---|---:|---:|---:|---|---:|---:|---|",
    ]
    for key in dict.fromkeys((row["model"], row["ranks"], row["set-up"]) for row in rows):
        same = [row for row in rows if (row["model"], row["ranks"], row["set-up"]) == key]

        def median(name: str, same: list[dict[str, Any]] = same) -> str:
            return f"{1e3 * statistics.median(row[name] for row in same):.1f}"

        def errors(predicted: str, measured: str, same: list[dict[str, Any]] = same) -> str:
            return " ".join(f"{row[predicted] / row[measured] - 1:+.0%}" for row in same)

        step = (*map(median, ("preset_s", "predicted_s", "measured_s")), errors("predicted_s", "measured_s"))
        busy = (*map(median, ("predicted_busy_s", "busy_s")), errors("predicted_busy_s", "busy_s"))
        lines.append(f"| {' | '.join([*map(str, key), *step, *busy])} |")
    loads = [row["load"] for row in rows]
    lines += ["", f"- load average {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores: not an idle machine"]
    return "\n".join(lines) + "\n"


def main(pairs: int) -> None:
    """Measure, print and write the table."""
    rows = [row for number in range(pairs) for row in pair(number)]
    RESULT.write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
