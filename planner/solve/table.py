"""A schedule for so many ranks, micro-batches and stages, and the paths through it that are known beforehand."""

from dataclasses import dataclass

import numpy as np

from ..cost.simulate import CriticalPath
from ..plan.schedules import ZERO_BUBBLE, Schedule, stage_of
from ..plan.shape import Shape


@dataclass(frozen=True)
class Table:
    """A schedule with its numbers of ranks, micro-batches, and stages on each rank."""

    schedule: Schedule
    num_ranks: int
    num_microbatches: int
    virtual: int

    @classmethod
    def of(cls, shape: Shape) -> "Table":
        """The table of a shape's schedule."""
        return cls(shape.schedule, shape.pipeline, shape.num_microbatches, shape.virtual_stages)

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return self.num_ranks * self.virtual

    @property
    def rank_of(self) -> list[int]:
        """[stage] -> its rank."""
        found = [0] * self.num_stages
        for rank in range(self.num_ranks):
            for chunk in range(self.virtual):
                found[stage_of(self.schedule, rank, chunk, self.num_ranks)] = rank
        return found


def paths_of_ranks(table: Table) -> list[CriticalPath]:
    """For every rank a path on which the first micro-batch passes all ranks before it, then the rank has all its
    passes, and then, without zero bubbles, the last backward passes the ranks before it."""
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
