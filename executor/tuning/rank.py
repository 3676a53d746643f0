"""What every rank of a candidate's job runs: build the plan's trainer, warm up, then take steps as it is told.

`python -m meshwright.executor.tuning.rank --plan FILE --model MODEL`, under torchrun. The first rank reads how many
steps to take from its standard input, a line for each lap, and prints what they took; at the end of the input the job
ends, so that no job outlives who began it. With --laps it takes so many laps of --steps and reads nothing. --without
leaves blocks of the model out, of which the plan knows nothing. --alone N is rank N of the plan in one process: the
others are not there, and collectives send nothing. --probe only says what this rank sees.
"""

import argparse
import ctypes
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...planner.plan.document import Plan
    from ...profiler.model.loaded import LoadedModel

MARK = "@meshwright-tune "
"""What a line for `plan tune` begins with."""

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main(arguments: list[str] | None = None) -> None:
    """One rank, until its input ends."""
    _die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m meshwright.executor.tuning.rank", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default=None, help="cpu; default: this rank's GPU, or the CPU without one")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a step is a hang")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--laps", type=int, default=None)
    parser.add_argument("--without", nargs="+", default=(), help="blocks of the model, as in h.3")
    parser.add_argument("--alone", type=int, default=None, metavar="RANK")
    parser.add_argument("--probe", action="store_true")
    given = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    if given.probe:
        _say(_seen(given.plan, given.model, rank))
        return
    if rank == 0:
        _say({"event": "began"})
    if given.device == "cpu":
        _be_a_cpu_rank()
    _run(given, rank)


def _run(given: argparse.Namespace, rank: int) -> None:
    from ...planner.plan.document import load_plan
    from ...profiler.model.load import load_model
    from ..measuring.one_rank import without_peers
    from .fewer_layers import without_blocks

    plan = load_plan(given.plan)
    loaded = without_blocks(load_model(given.model, plan.training.seq_len), given.without)
    if given.alone is None:
        _laps(given, rank, plan, loaded)
    else:
        with without_peers(given.alone, plan.degrees.num_devices):
            _laps(given, rank, plan, loaded)


def _laps(given: argparse.Namespace, rank: int, plan: "Plan", loaded: "LoadedModel") -> None:
    import torch
    import torch.distributed as dist

    from ..measuring.exchange_times import exchange_times
    from ..measuring.measure import trainer_and_share
    from ..measuring.measurement import WARM_UP_STEPS, quantile
    from ..telemetry import peak_memory_bytes, restart_peak_memory
    from ..trainer import computed_seconds

    trainer, share = trainer_and_share(loaded, plan, given.device, given.timeout)
    computed = None if given.alone is not None else computed_seconds(trainer)
    device = trainer.mesh.device
    several = plan.degrees.num_devices > 1 and given.alone is None
    words = dist.new_group(backend="gloo") if several else None  # who waits in NCCL's would use the GPU
    on_gpu = device.type == "cuda"
    warm_up_s = [trainer.step(share).step_time_s for _ in range(WARM_UP_STEPS)]
    exchanged = exchange_times(plan, trainer.mesh.processes, device, words) if several else None
    if rank == 0:
        seen = None if exchanged is None else exchanged.model_dump(mode="json")
        _say({"event": "ready", "warm_up_s": warm_up_s, "exchanged": seen})
    for count in _orders(given, rank, words):
        restart_peak_memory(device)
        if computed is not None:
            computed.taken()  # of the warm-up, or of nothing
        times = [_timed(trainer, share) for _ in range(count)]
        peak, reserved = peak_memory_bytes(device), torch.cuda.max_memory_reserved(device) if on_gpu else None
        seconds = [each for each in (computed.taken() if computed else ()) if each is not None]
        own = (times, peak, reserved, quantile(tuple(seconds), 0.5) if len(seconds) == count else None)
        found: list[Any] = [own]
        if several:
            found = [None] * plan.degrees.num_devices
            dist.all_gather_object(found, own, group=words)
        if rank == 0:
            told = [found[process] for process in trainer.mesh.processes] if several else found
            _say(
                {
                    "event": "lap",
                    "steps_s": [max(taken) for taken in zip(*(times for times, *_ in found), strict=True)],
                    "peak_memory_bytes": [peak for _, peak, _, _ in told],
                    "peak_reserved_bytes": [held for _, _, held, _ in told if held is not None],
                    "rank_compute_s": [taken for *_, taken in told if taken is not None],
                    "memory_kind": "allocated" if on_gpu else "resident",
                }
            )
    trainer.close()


def _timed(trainer: Any, share: Any) -> float:
    started = time.perf_counter()
    trainer.step(share)
    return time.perf_counter() - started


def _orders(given: argparse.Namespace, rank: int, words: Any) -> Iterator[int]:
    """Steps of one lap after the other, the same on every rank."""
    import torch.distributed as dist

    if given.laps is not None:
        yield from (given.steps for _ in range(given.laps))
        return
    while True:
        told = [int(sys.stdin.readline() or 0) if rank == 0 else 0]
        if words is not None:
            dist.broadcast_object_list(told, src=0, group=words)
        if not told[0]:
            return
        yield told[0]


def _seen(plan: Path, model: str, rank: int) -> dict[str, Any]:
    """Where this rank is, and which files it sees: each as a digest, "" for what is not there."""
    from ... import executor
    from ...profiler.model.source import file_of

    source = file_of(model)
    source = source / "config.json" if source.is_dir() else source
    return {
        "event": "probe",
        "rank": rank,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "host": socket.gethostname(),
        "plan": _digest(plan),
        "model": _digest(source),
        "meshwright": _digest_of_package(Path(executor.__file__).parents[1]),
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""


def _digest_of_package(root: Path) -> str:
    """Of the code itself: hosts with other versions of it would run other jobs."""
    files = sorted(file for part in ("planner", "executor", "profiler") for file in (root / part).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _say(words: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(words)}", flush=True)


def _die_with_parent() -> None:
    """On Linux: this rank is killed when what began it (torchrun) is, which would leave it behind."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _be_a_cpu_rank() -> None:
    """One thread, as a CPU rank is predicted; and if memory runs out, Linux should kill it and nobody else."""
    import torch

    torch.set_num_threads(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
