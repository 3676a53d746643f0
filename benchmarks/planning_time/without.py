"""What each bound of the search buys: CPU seconds and the gap that is left, without it, beside those with all.

Run as `python -m benchmarks.planning_time --without BOUND [BOUND ...]`, or `--without each` for all in turn. Every
search is a process of its own, so that nothing is kept from the one before, and its time limit counts CPU seconds.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.answers.search import search
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve import bounds, nodes
from meshwright.planner.solve.bounds import Bounds
from meshwright.planner.solve.memory_bounds import MemoryBounds
from meshwright.planner.solve.solver import SolverError
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile, load_profile
from meshwright.profiler.model.trace import trace

from .cases import CASES, Case

NAMES = ("DeepSeek-V3, 2,048 GPUs", "Llama-3.1-405B, 16,384 GPUs, sequence 8k", "Llama-3-70B, 512 GPUs")
"""Of the cases: large spaces, where bounds count."""

TIME_LIMIT_S = 60.0


def _zeros(bounds: object, of: Sequence[object], *rest: object) -> list[float]:
    return [0.0] * len(of)


def _nothing(*asked: object) -> float:
    return 0.0


def _of_some(bounds: object, family: object, space: object, some: Sequence[int], *rest: object) -> NDArray[np.float64]:
    return np.zeros(len(some))


def _in_memory(
    bounds: object, family: object, leaves: object, some: Sequence[int], *rest: object
) -> NDArray[np.float64]:
    return np.zeros(len(some))


def _no_program(*asked: object, **more: object) -> tuple[float, None]:
    return 0.0, None


def _as_known(node: nodes.ShapeNode, cutoff_s: float) -> float:
    return 0.0


def _no_turns(*asked: object) -> Iterator[object]:
    return iter(())


BOUNDS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "splits": (Bounds, "of_splits", _zeros),
    "anywhere": (Bounds, "anywhere_s", _nothing),
    "held": (Bounds, "held_s", _nothing),
    "whole-ranks": (Bounds, "of_whole_ranks", _of_some),
    "memory": (MemoryBounds, "seconds", _in_memory),
    "prices": (Bounds, "by_prices_s", _of_some),
    "walk": (nodes.ShapeNode, "by_ranks_s", _as_known),
    "turns": (bounds, "_turns", _no_turns),
    "whole-layers": (Bounds, "of_whole_layers", _no_program),
}
"""Bounds that may be left out: where they stand, and what stands in their place. `anywhere`: of a micro-batch, groups
where they are fastest; `held`: of a chunked family, by its memory; `whole-ranks`: rank_bounds.py; `memory`: of
shapes, layers divisible; `prices`: duals of other shapes; `walk`: one stage on each rank; `turns`: of whole layers on
ranks of several stages; `whole-layers`: the integer program.
Without the fluid program itself (fluid_program.py) there are neither prices nor cuts near its solution: it is not among
them."""


def told(without: Sequence[str]) -> str:
    """A table: per case, what the search takes with all bounds, and without each of these."""
    each = list(BOUNDS) if list(without) == ["each"] else list(without)
    unknown = [name for name in each if name not in BOUNDS]
    if unknown:
        raise SystemExit(f"no bound {unknown[0]}; there are {', '.join(BOUNDS)} (or each)")
    lines = ["| work | without | CPU s | gap | step s |", "|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for case in (case for case in CASES if case.name in NAMES):
        profile = trace(load_model(case.path), seq_len=case.seq_len)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "profile.json"
            profile.save(saved)
            for name in ("", *each):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found = pool.apply(partial(_searched, saved, case, name))
                lines.append(f"| {case.name} | {name or 'nothing'} | {found} |")
                print(lines[-1], flush=True)
    return "\n".join(lines)


def _searched(saved: Path, case: Case, without: str) -> str:
    """CPU seconds, gap and step of a search without a bound, as cells of the table."""
    profile: ModelProfile = load_profile(saved)
    training = TrainingSpec(global_batch=case.global_batch or 8 * case.gpus)
    cluster = cluster_of(load_device(case.device), case.gpus)
    with ExitStack() as stack:
        stack.enter_context(patch.object(time, "monotonic", time.process_time))
        if without:
            owner, name, instead = BOUNDS[without]
            stack.enter_context(patch.object(owner, name, instead))
        started_s = time.process_time()
        try:
            certificate = search(profile, cluster, training, time_limit_s=TIME_LIMIT_S).certificate
        except SolverError as error:
            return f"{time.process_time() - started_s:.1f} | {error} | "
        return f"{time.process_time() - started_s:.1f} | {certificate.gap:.2%} | {certificate.step_s:.3f}"
