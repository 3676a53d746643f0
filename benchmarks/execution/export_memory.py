"""What one of 2,048 ranks that train Llama 3.1 405B holds while `save_pretrained` writes the weights.

    python -m benchmarks.execution.export_memory

Played on fake tensors in a fake process group: parameters are gathered by the executor's own code, in the pieces that
they are written in, and each piece is converted for its file, as on the rank that writes. They are gathered one after
the other, so of those that are alike (126 layers) one is. Nothing is written. Peaks are of live storages, on whatever
device they would be.
"""

import argparse
import datetime
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.accuracy import played
from benchmarks.accuracy.cases import MODELS
from benchmarks.accuracy.counters import PeakMeter
from meshwright.executor import export_weights, parallelize
from meshwright.executor.parallel.whole_matrices import whole_rows, whole_size
from meshwright.planner.plan.making import shape_of
from meshwright.profiler.model.load import load_model
from meshwright.profiler.running.fake_modes import fake_mode

from . import large

RESULTS = Path(__file__).parent / "results"
ALLOWED_BYTES = 2 * 2**30
"""Beyond the rank's own shards."""


def run(name: str) -> dict[str, Any]:
    """What the first rank of a plan of large.py holds. No process group may be running."""
    loaded = load_model(MODELS / "llama31_405b").with_seq_len(8192)
    plan = large.plan_of(large.CASES[name], loaded)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.degrees.num_devices)
    fake = fake_mode()
    try:
        with PeakMeter(fake) as memory, played.without_numbers(fake):
            with mock.patch.object(_fsdp_param, "_chunk_with_empty", large._Shards):
                ours = parallelize(loaded.build, plan, played.adamw, loss=loaded.loss, device="cpu")
            model = ours._applied
            shards = ours.mesh.shard_mesh  # reads numbers of the mesh, which fake tensors have not
            seen = SimpleNamespace(mesh=shards.mesh.numpy(), get_group=shards.get_group)
            known = mock.patch.dict(vars(ours.mesh), shard_mesh=seen)
            with known, fake, played.Ones(), torch.no_grad():
                memory.begin()
                before = memory.peak
                pieces, largest = 0, 0
                alike = {
                    (parameter.shape, parameter.placements, repr(model.cut(own))): own
                    for own, parameter in model.parameters.items()
                }
                for own in alike.values():
                    parameter = model.parameters[own]
                    for _, rows in whole_rows(model, ours.mesh, own, parameter.detach(), export_weights.PIECE_BYTES):
                        rows.to("cpu", torch.bfloat16).contiguous()
                        pieces += 1
                    size = whole_size(model, own, parameter)
                    largest = max(largest, size.numel() * parameter.element_size())
            return {
                "name": name,
                "plan": shape_of(plan).label,
                "shard_bytes": before,
                "peak_bytes": memory.peak,
                "largest_parameter_bytes": largest,
                "pieces": pieces,
                "cpu_s": time.process_time(),
            }
    finally:
        dist.destroy_process_group()


def _markdown(rows: list[dict[str, Any]]) -> str:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"`python -m benchmarks.execution.export_memory`, {date}, torch {torch.__version__}",
        "",
        "Llama 3.1 405B, fp32 weights written as bf16, rank 0 of 2,048 on fake tensors. Target: no more than "
        f"{ALLOWED_BYTES / 2**30:.0f} GiB beyond what the rank holds of parameters.",
        "",
        "| plan | held before | peak | beyond | largest parameter, whole | pieces |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        held, peak = row["shard_bytes"] / 2**30, row["peak_bytes"] / 2**30
        lines.append(
            f"| {row['plan']} | {held:.2f} GiB | {peak:.2f} GiB | {peak - held:.2f} GiB "
            f"| {row['largest_parameter_bytes'] / 2**30:.2f} GiB | {row['pieces']:,} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the plans, and write the table; 1 if one takes more than the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=large.CASES, nargs="+", default=["fsdp"])
    rows = []
    for name in parser.parse_args().only:
        rows.append(run(name))
        print(_markdown(rows[-1:]).splitlines()[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "export_memory.md").write_text(_markdown(rows))
    return int(any(row["peak_bytes"] - row["shard_bytes"] > ALLOWED_BYTES for row in rows))


if __name__ == "__main__":
    sys.exit(main())
