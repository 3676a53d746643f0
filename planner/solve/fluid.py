"""The least step of a pipeline if its layers could be divided: a linear program over all cuts and all options.

    minimise    T
    subject to  (cover)    sum_{s,o} n[s,r,o] = N_r                                        each run r of equal layers
                (order)    A[r,s] >= A[r+1,s],  A[r,s] = sum_{t<=s,o} n[t,r,o] / N_r       each run but the last, stage
                (holds)    sum_{r,o} n[s,r,o] >= 1                                         each stage s
                (memory)   sum_{s on q, r, o} bytes[s,r,o] n[s,r,o] <= room[q]             each rank q
                (path)     T >= sum_{s,r,o} seconds of P [s,r,o] n[s,r,o] + waits of P     each path P found so far

n[s,r,o] >= 0 is how many layers of run r stage s holds with option o (recompute and the like). A path P goes through the
schedule's table (simulate.CriticalPath): its passes take at least that long in any step of that schedule, so T is below
the simulated step of every plan of the shape, for all cuts and all options, as long as bytes, seconds and waits are no
more than the plan's and rooms no less. Paths are added until the step of the solution is no longer than T, or T has
reached what is asked for. Paths belong to schedule, ranks and micro-batches alone and are kept for later programs.

The program has no integers: layers are fluid. What that gives away is what program.py closes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from ..cost.simulate import CriticalPath, critical_paths
from ..plan.schedules import ZERO_BUBBLE, Schedule, stage_of

Floats = NDArray[np.float64]

TIGHT = 3e-4
"""Relative: a step that is no longer than that beyond T needs no further path."""

MOST_ROUNDS = 60
"""Times that paths are looked for in one program."""

MOST_PATHS = 400
"""Paths that are kept of one schedule, the latest ones."""


@dataclass(frozen=True)
class Layers:
    """What layers of one run cost at least, [option]: seconds of forward, backward and, as a part of that, gradients of
    weights, for one micro-batch; [stage][option]: bytes that a layer there holds. count: of them. once_s: seconds of
    each at the end of a step."""

    count: float
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    bytes: Floats
    once_s: float


@dataclass(frozen=True)
class Table:
    """A schedule for so many ranks, micro-batches and stages of each rank."""

    schedule: Schedule
    num_ranks: int
    num_microbatches: int
    virtual: int

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.num_ranks * self.virtual

    @property
    def rank_of(self) -> list[int]:
        """[stage] -> its rank."""
        found = [0] * self.num_stages
        for rank in range(self.num_ranks):
            for chunk in range(self.virtual):
                found[stage_of(self.schedule, rank, chunk, self.num_ranks)] = rank
        return found


class FluidPipelines:
    """Solves such programs; keeps the paths of every table."""

    def __init__(self) -> None:
        self._paths: dict[Table, dict[bytes, CriticalPath]] = {}

    def least_s(
        self,
        table: Table,
        runs: Sequence[Layers],
        rooms: Sequence[float],
        wait_s: float,
        least_end_s: float = 0.0,
        enough_s: float = float("inf"),
    ) -> float:
        """Seconds that no step beats, or `enough_s` as soon as that is known to be less; infinite if the layers cannot
        be held. rooms: [rank] -> bytes; wait_s: that a stage waits at least for the transfer on each of its sides;
        least_end_s: seconds that a step takes after the last pass of any rank, beyond those of layers (negative where
        they count weights twice)."""
        program = _Program(table, runs, rooms, wait_s, least_end_s)
        known = self._paths.setdefault(table, {})
        for path in [*_of_ranks(table), *known.values()]:
            program.add(path)
        least_s = 0.0
        for _ in range(MOST_ROUNDS):
            found_s = program.solve()
            if found_s is None:
                return float("inf")
            least_s = max(least_s, found_s)
            if least_s >= enough_s:
                break
            fresh = program.longer_paths(least_s * (1 + TIGHT))
            if not fresh:
                break
            for path in fresh:
                key = path.passes.tobytes() + bytes([path.rank % 256])
                if key not in known:
                    known[key] = path
                program.add(path)
            while len(known) > MOST_PATHS:
                del known[next(iter(known))]
        return least_s


def _of_ranks(table: Table) -> list[CriticalPath]:
    """For every rank: the first micro-batch passes all ranks before it, then it has all its passes to do, and, without
    zero bubbles, the last backward has those ranks before it."""
    found, count, split = [], table.num_microbatches, table.schedule in ZERO_BUBBLE
    for rank in range(table.num_ranks):
        passes = np.zeros((3, table.num_stages))
        own = [stage_of(table.schedule, rank, chunk, table.num_ranks) for chunk in range(table.virtual)]
        passes[: 3 if split else 2, own] = count
        passes[0, :rank] += 1
        if not split:
            passes[1, :rank] += 1
        found.append(CriticalPath(passes, rank if split else 0))
        if not split and rank:
            ending = passes.copy()
            ending[1, :rank] -= 1
            found.append(CriticalPath(ending, rank))
    return found


class _Program:
    """The program with what HiGHS has of it."""

    def __init__(
        self, table: Table, runs: Sequence[Layers], rooms: Sequence[float], wait_s: float, least_end_s: float
    ) -> None:
        self.table, self.runs, self.wait_s, self.least_end_s = table, runs, wait_s, least_end_s
        num_stages, split = table.num_stages, table.schedule in ZERO_BUBBLE
        rank_of = np.array(table.rank_of)
        stage: list[int] = []
        run: list[int] = []
        option: list[int] = []
        for r, layers in enumerate(runs):
            first = r == 0 and layers.count == 1
            last = r == len(runs) - 1 and layers.count == 1
            for s in [0] if first else [num_stages - 1] if last else range(num_stages):
                for o in range(len(layers.forward_s)):
                    stage.append(s)
                    run.append(r)
                    option.append(o)
        self.stage, self.run = np.array(stage), np.array(run)
        pairs = list(zip(run, option, strict=True))
        back = [runs[r].backward_s[o] - (runs[r].weight_s[o] if split else 0.0) for r, o in pairs]
        self.seconds = np.array([
            [runs[r].forward_s[o] for r, o in pairs],
            back,
            [runs[r].weight_s[o] if split else 0.0 for r, o in pairs],
        ])  # fmt: skip
        self.once_s = np.array([runs[r].once_s for r in run])
        self.unit_s = sum(layers.count * float((layers.forward_s + layers.backward_s).min()) for layers in runs)
        self.unit_s = self.unit_s * table.num_microbatches / table.num_ranks or 1.0
        self.rank = rank_of[self.stage]
        self._model = highspy.Highs()
        self._model.setOptionValue("output_flag", False)
        self._model.setOptionValue("threads", 1)
        num = len(stage)
        everything = np.arange(num, dtype=np.int32)
        for _ in range(num):
            self._model.addVar(0.0, highspy.kHighsInf)
        self._model.addVar(0.0, highspy.kHighsInf)
        self._model.changeColCost(num, 1.0)
        inf = highspy.kHighsInf
        for r, layers in enumerate(runs):
            here = everything[self.run == r]
            self._model.addRow(layers.count, layers.count, len(here), here, np.ones(len(here)))
        for s in range(num_stages):
            here = everything[self.stage == s]
            self._model.addRow(1.0, inf, len(here), here, np.ones(len(here)))
        for r in range(len(runs) - 1):
            for s in range(num_stages - 1):
                here = everything[((self.run == r) | (self.run == r + 1)) & (self.stage <= s)]
                share = np.where(self.run[here] == r, 1 / runs[r].count, -1 / runs[r + 1].count)
                if (share < 0).any():
                    self._model.addRow(0.0, inf, len(here), here, share)
        held = np.array([runs[r].bytes[s, o] for s, (r, o) in zip(stage, pairs, strict=True)])
        for q, room in enumerate(rooms):
            here = everything[(self.rank == q) & (held > 0)]
            scale = 1.0 / max(1.0, abs(room))
            self._model.addRow(-inf, room * scale, len(here), here, held[here] * scale)
        self.num = num
        self.amounts: Floats = np.zeros(num)

    def add(self, path: CriticalPath) -> None:
        """One more path that the step is no shorter than."""
        passes = path.passes
        each = (passes[:, self.stage] * self.seconds).sum(axis=0) + np.where(self.rank == path.rank, self.once_s, 0.0)
        waits = self.wait_s * float(passes[0, 1:].sum() + passes[1, :-1].sum()) + self.least_end_s
        where = np.append(np.flatnonzero(each), self.num).astype(np.int32)
        values = np.append(-each[where[:-1]], self.unit_s) / self.unit_s
        self._model.addRow(waits / self.unit_s, highspy.kHighsInf, len(where), where, values)

    def solve(self) -> float | None:
        """Least T; None if the layers cannot be held."""
        self._model.run()
        status = self._model.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            return 0.0
        values = np.array(self._model.getSolution().col_value)
        self.amounts = values[: self.num]
        return float(values[self.num] * self.unit_s)

    def longer_paths(self, seconds: float) -> list[CriticalPath]:
        """Paths that are longer with the solution's layers."""
        table, num_stages = self.table, self.table.num_stages
        forward, backward, weight = (
            np.bincount(self.stage, self.amounts * each, num_stages) for each in self.seconds
        )
        forward[1:] += self.wait_s
        backward[:-1] += self.wait_s
        once = np.bincount(self.rank, self.amounts * self.once_s, table.num_ranks) + self.least_end_s
        split = table.schedule in ZERO_BUBBLE
        both = (backward + weight).tolist()
        return critical_paths(
            table.schedule, forward.tolist(), both, once.tolist(), table.num_microbatches,
            weight.tolist() if split else None, longer_than_s=seconds,
        )  # fmt: skip
