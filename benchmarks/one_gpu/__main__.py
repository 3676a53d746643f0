"""One rank of every set-up on one GPU: real kernels and memory, no peers, communication from the model.

    python -m benchmarks.one_gpu                      # needs a GPU
    python -m benchmarks.one_gpu --cpu --small        # the same road without one: times only, on small models

A GPU that is lent by the minute does nothing but run ranks; plans are made before, and tables after:

    python -m benchmarks.one_gpu --folder jobs --only prepare --device h100-80gb
    python -m benchmarks.one_gpu --folder jobs --only run        # goes on where it was stopped
    python -m benchmarks.one_gpu --folder jobs --only report

The process group is a fake one; each rank has a process of its own. Measured kernels stand beside predicted ones,
measured memory (what torch has allocated at most) beside predicted; the composed step is the predicted one with
measured kernels in it.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.accuracy.played import ranks_to_play
from benchmarks.one_gpu.prepared import Folder, Prepared, is_prepared, loaded_model, prepare
from benchmarks.one_gpu.rank import RankRun, run_rank
from benchmarks.one_gpu.table import markdown, table_of
from meshwright.executor.measuring.local_ranks import RankError, run_local_ranks
from meshwright.profiler.machine.local import local_gpus, preset_of

RESULTS = Path(__file__).with_name("results")
MODELS = ("gpt", "bert_large", "llama3_8b")

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


def run(folder: Folder, device: str, steps: int) -> None:
    """Run the first rank of every stage of all set-ups of the folder that has not run yet."""
    jobs = []
    for of in folder.prepared:
        done = {rank for rank, _ in folder.runs(of)}
        ranks = ranks_to_play(of.plan)[: None if of.plan.degrees.pipeline > 1 else 1]
        jobs += [(of, rank) for rank in ranks if rank not in done]
    for of, rank in jobs:
        found = _in_a_process(of, rank, folder.small, device, steps)
        folder.add(of, rank, found)
        told = found if isinstance(found, str) else f"{1e3 * found.step_s:.1f} ms"
        print(f"{of.model}, {of.setup}, rank {rank}: {told}", flush=True)


def _in_a_process(of: Prepared, rank: int, small: bool, device: str, steps: int) -> RankRun | str:
    """What a rank did in a process of its own, or why it did not."""
    try:
        found: list[RankRun] = run_local_ranks(
            _on_rank, 1, of, rank, small, device, steps, timeout_s=_TIMEOUT_S, device_type=device
        )
    except RankError as error:
        return f"rank {rank}: {error}"
    return found[0]


def _on_rank(of: Prepared, rank: int, small: bool, device: str, steps: int) -> RankRun:
    """Beside a GPU no process may be forked from one that has run a backward, as loading a model may."""
    return run_rank(loaded_model(of.model, small), of.plan, rank, device, steps)


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
    parser.add_argument("--folder", type=Path, help="where plans and runs are kept (default: nowhere)")
    parser.add_argument("--only", choices=("prepare", "run", "report"))
    parser.add_argument("--where", help="the device and torch that the report names (default: those here)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = "cpu" if arguments.cpu else "cuda"
    if device == "cuda" and arguments.only in (None, "run") and not torch.cuda.device_count():
        parser.error("no GPU here; --cpu --small takes the same road without one")
    if arguments.only and not arguments.folder:
        parser.error("--only needs the --folder that plans and runs are kept in")
    if arguments.only in ("run", "report") and not is_prepared(arguments.folder):
        parser.error(f"nothing was prepared in {arguments.folder}: run --only prepare first")
    if arguments.only == "report" and not arguments.cpu and not arguments.where and not torch.cuda.device_count():
        parser.error("no GPU here to name: give --where, as in --where 'NVIDIA H100, torch 2.11'")
    with tempfile.TemporaryDirectory() as temporary:
        path = arguments.folder or Path(temporary)
        if arguments.only in (None, "prepare"):
            preset = arguments.device or ("cpu" if arguments.cpu else _preset_here(parser))
            prepare(path, arguments.models, arguments.setup or SETUPS, arguments.gpus, preset, arguments.small)
        folder = Folder(path)
        if arguments.only in (None, "run"):
            run(folder, device, arguments.steps)
        if arguments.only in (None, "report"):
            here = "CPU" if arguments.cpu or arguments.where else torch.cuda.get_device_name()
            return _report(folder, arguments.where or f"{here}, torch {torch.__version__}", arguments.output)
    return 0


def _preset_here(parser: argparse.ArgumentParser) -> str:
    gpus = local_gpus()
    if not gpus:
        parser.error("no GPU here: give --device")
    preset = preset_of(*gpus[0])
    if preset is None:
        parser.error(f"no preset for {gpus[0][0]}: give --device")
    return preset


def _report(folder: Folder, where: str, output: Path) -> int:
    rows, failures = table_of(folder)
    output.mkdir(parents=True, exist_ok=True)
    table = markdown(rows, failures, where, folder.num_gpus)
    (output / "one_gpu.md").write_text(table)
    (output / "one_gpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table)
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
