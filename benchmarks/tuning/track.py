"""Candidates on the emulated cluster: one set of ranks, in which each plan's trainer is built at its first lap."""

import faulthandler
import gc
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.planned_vs_manual.jobs import STEP_LIMIT_S, Task, before_others, join_hosts, padded_trainer
from benchmarks.planned_vs_manual.padded import Clock
from meshwright.executor.measuring.exchange_times import exchange_times
from meshwright.executor.measuring.exchanges import TimedExchanges
from meshwright.executor.trainer import computed_seconds
from meshwright.executor.tuning.jobs import Fallen, Lap
from meshwright.planner.plan.document import Plan

_WARM_UPS = 1

_NOT_KNOWN = (0,)
"""Bytes of a rank: its process has the trainers of all candidates, and a device's memory is declared, so that what the
process holds says nothing of it (else no plan would fit after the first fit, and none join the race)."""


class EmulatedTrack:
    """Ranks that are forked once and wait for what to run next. A candidate that fails or hangs ends all of them; the
    others are built again in new ones."""

    keeps = True

    def __init__(self, task: Task, ranks: int) -> None:
        self._task, self._ranks = task, ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def lap(self, label: str, plan: Plan, steps: int, limit_s: float, more: Sequence[str] = ()) -> Lap | Fallen:
        """Steps of a candidate, alone."""
        began = time.monotonic()
        if not self._processes:
            self._fork()
        for pipe in self._pipes:
            pipe.send((label, plan, steps))
        answers: list[Any] = [None] * self._ranks
        open_ones = dict(enumerate(self._pipes))
        end = began + min(limit_s, 3 * STEP_LIMIT_S)
        while open_ones:
            ready = wait(list(open_ones.values()), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                over = time.monotonic() - began >= limit_s
                return Fallen("budget" if over else "hang", f"no answer after {time.monotonic() - began:.0f} s")
            for rank in [rank for rank, pipe in open_ones.items() if pipe in ready]:
                try:
                    worked, answers[rank] = open_ones.pop(rank).recv()
                except EOFError:
                    worked, answers[rank] = False, "it ended without a word"
                if not worked:
                    self.close()
                    return Fallen("crash", f"rank {rank}: {answers[rank]}")
        taken = tuple(max(step) for step in zip(*(own[1] for own in answers), strict=True))
        computed_s = tuple(own[2] for own in answers)
        return Lap(
            taken,
            max(own[0] for own in answers),
            _NOT_KNOWN * len(answers),
            "allocated",
            rank_compute_s=computed_s,
            exchanged=answers[0][3],
        )

    def leave(self, label: str) -> None:
        """Its trainer waits, which costs no time."""

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _fork(self) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(self._ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._ranks, self._task, theirs), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, ranks: int, task: Task, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29612")
    torch.set_num_threads(1)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    try:
        join_hosts(task.hosts)
        clock, trainers, computed = Clock(), {}, {}
        gc.disable()  # what Python's collector does in the middle of a step would be waited for by all ranks
        has_exchanged = False
        while True:
            label, plan, steps = pipe.recv()
            faulthandler.dump_traceback_later(STEP_LIMIT_S * 2, exit=True, file=sys.__stderr__)
            began = time.monotonic()
            started_s, exchanged = 0.0, TimedExchanges() if has_exchanged else None
            if exchanged is None:
                exchanged, has_exchanged = exchange_times(plan, range(ranks), torch.device("cpu")), True
            if label not in trainers:
                trainers[label] = padded_trainer(plan, task, clock)
                computed[label] = computed_seconds(trainers[label][0])
                for _ in range(_WARM_UPS):
                    trainers[label][0].step(trainers[label][1])
                before_others()
                gc.collect()
                gc.freeze()  # else collections of ranks that are done with a step take time from those that are not
                started_s = time.monotonic() - began
            trainer, share = trainers[label]
            taken = []
            computed[label].taken()
            for _ in range(steps):
                gc.collect()
                dist.barrier()
                before = time.perf_counter()
                clock.begin()
                trainer.step(share)
                taken.append(time.perf_counter() - before)
            faulthandler.cancel_dump_traceback_later()
            own_s = statistics.median(each for each in computed[label].taken() if each is not None)
            pipe.send((True, (started_s, taken, own_s, exchanged)))
    except EOFError:
        pass
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
    os._exit(0)
