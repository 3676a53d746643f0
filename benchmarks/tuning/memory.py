"""Peak memory of real processes beside its prediction, before and after the refit of plan tune, on CPU ranks.

    python -m benchmarks.tuning.memory                 # two models, seven set-ups each, two ranks: about eight minutes

Each set-up is a job of its own, as plan tune launches it; its peak is that of the whole process over a lap after the
warm-up, of the fullest rank of each pipeline coordinate. Constants are fitted to all processes of a model; to those of
the other set-ups, for each set-up in turn (left out); and to those of the other model.

Blocks of 128 KiB and more go back to the system when they are freed (HEAP). Left to itself, glibc keeps what tensors of
up to 32 MiB have freed, in a heap for each of gloo's threads, too, and what lies there unused depends on the order in
which threads freed it: --keep-heap measures that.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from meshwright.executor.tuning.jobs import Fallen, LaunchedTrack, read_launcher
from meshwright.planner.answers.search import price_setup
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.refit import on_device
from meshwright.planner.cost.refit_memory import MeasuredMemory, refit_memory
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import Device, cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace

RESULTS = Path(__file__).with_name("results")
ZOO = Path(__file__).parent.parent / "models"
RANKS, GLOBAL_BATCH, SEQ_LEN = 2, 8, 256
CLOSE = 0.03
HEAP = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Environment of jobs in which glibc takes tensors from the system, and gives them back."""

LIMIT_S = 240.0

MODELS = {
    "gpt2": {
        "n_layer": 6,
        "n_embd": 384,
        "n_head": 6,
        "n_inner": 1536,
        "vocab_size": 8192,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "llama3_8b": {
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
}
"""Models of the zoo, and what of their configurations is smaller here. Without dropout: the profile counts GPU kernels,
and those of the CPU keep T x T matrices of attention for it, and masks in fp32."""

SETUPS = (
    "ddp mb=1",
    "ddp mb=4",
    "fsdp mb=1",
    "fsdp mb=4 recompute=full",
    "zero=1 mb=2",
    "tp=2 mb=4",
    "pp=2 schedule=1f1b mb=2",
)


@dataclass(frozen=True)
class Row:
    """The fullest process of a pipeline coordinate; bytes, predicted by the preset, after the fit to all of its model,
    to the other set-ups, and to the other models (None where there are none)."""

    model: str
    setup: str
    layout: str
    position: int
    measured: float
    preset: float
    fitted: float
    left_out: float
    other_model: float | None


def seen(name: str, device: Device, folder: Path) -> list[tuple[str, MeasuredMemory]]:
    """(set-up, what its processes held) of one model."""
    config = json.loads((ZOO / name / "config.json").read_text()) | MODELS[name]
    source = folder / name / "config.json"
    source.parent.mkdir()
    source.write_text(json.dumps(config))
    profile = trace(load_model(source, SEQ_LEN))
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, precision="fp32")
    machine = cluster_of(device, RANKS)
    track = LaunchedTrack(
        read_launcher(None, RANKS), str(source), source.parent, on_cpu=True, keeps=False, budget_bytes=device.memory
    )
    found = []
    for words in SETUPS:
        plan = price_setup(parse_setup(words, RANKS, RANKS), profile, machine, training).plan
        if plan is None:
            print(f"{name}, {words}: not run, it is not legal or does not fit", flush=True)
            continue
        lap = track.lap(words, plan, 2, LIMIT_S)
        if isinstance(lap, Fallen):
            print(f"{name}, {words}: not run: {lap.message}", flush=True)
            continue
        peaks: dict[int, int] = {}
        for rank, peak in enumerate(lap.peak_memory_bytes):
            position = plan.coordinates(rank)["pipeline"]
            peaks[position] = max(peak, peaks.get(position, 0))
        found += [(words, MeasuredMemory(name, plan, profile, p, "resident", peak)) for p, peak in peaks.items()]
        print(f"{name}, {words}: {max(peaks.values()) / 2**20:.0f} MiB", flush=True)
    return found


def rows_of(found: Sequence[tuple[str, MeasuredMemory]], device: Device) -> list[Row]:
    """Every process with its predictions."""

    def predicted(each: MeasuredMemory, others: Sequence[MeasuredMemory]) -> float:
        fitted = refit_memory(device, others).of(device, len(others)) if others else device
        return estimate(on_device(each.plan, fitted), each.profile).memory[each.position].device_bytes

    rows = []
    for words, each in found:
        others = [other for _, other in found if other.label != each.label]
        own = [other for _, other in found if other.label == each.label]
        rows.append(
            Row(
                each.label,
                words,
                each.plan.label,
                each.position,
                each.bytes,
                predicted(each, []),
                predicted(each, own),
                predicted(each, [o for setup, o in found if o.label == each.label and setup != words]),
                predicted(each, others) if others else None,
            )
        )
    return rows


def markdown(rows: Sequence[Row], where: str) -> str:
    """Figures, then every process."""
    lines = [f"`python -m benchmarks.tuning.memory`, {datetime.now(UTC).date().isoformat()}, {where}", ""]
    lines += [
        f"Peaks of {len(rows)} processes (the fullest of each pipeline coordinate), {RANKS} CPU ranks, fp32.",
        "",
        f"| constants | off in the median | at worst | within {CLOSE:.0%} |",
        "|---|---:|---:|---:|",
    ]
    for words, field in (
        ("the preset's", "preset"),
        ("fitted to all processes of the model", "fitted"),
        ("fitted to its other set-ups", "left_out"),
        ("fitted to the other models", "other_model"),
    ):
        off = [abs(getattr(row, field) / row.measured - 1) for row in rows if getattr(row, field) is not None]
        if not off:
            continue
        close = sum(each <= CLOSE for each in off)
        lines.append(
            f"| {words} | {statistics.median(off):.1%} | {max(off):.1%} | {close} of {len(off)}, "
            f"{close / len(off):.0%} |"
        )
    lines += ["", "| model | set-up | layout | coordinate | measured, MiB | preset | fitted | set-up left out |"]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        sizes = (f"{size / 2**20:.0f}" for size in (row.measured, row.preset, row.fitted, row.left_out))
        lines.append(f"| {row.model} | {row.setup} | {row.layout} | {row.position} | {' | '.join(sizes)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run every set-up, fit, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--keep-heap", action="store_true", help="let glibc keep what is freed, as it does by itself")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.keep_heap:
        os.environ.update(HEAP)
    file = arguments.output / f"memory{'_keep_heap' if arguments.keep_heap else ''}.md"
    device = load_device("cpu")
    found: list[tuple[str, MeasuredMemory]] = []
    rows: list[Row] = []
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            found += seen(name, device, Path(folder))
            rows = rows_of(found, device)
            load = Path("/proc/loadavg").read_text().split()[0]
            heap = "glibc's heap kept" if arguments.keep_heap else "freed blocks given back"
            where = f"two CPU cores that others used, too, load {load}, torch {torch.__version__}, {heap}"
            table = markdown(rows, where)
            file.write_text(table)
            print(table, flush=True)
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
