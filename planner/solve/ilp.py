"""The ILP over columns: which shape, and which interval of the chain each of its stages holds.

    minimise    sum_k [ (m_k - 1) T_k + sum_c time_c z_c + U_k ]
    subject to  (choose)   sum_k y_k = 1
                (stage)    sum_{c on stage j of k} z_c = y_k                    each shape k, stage j
                (cover)    sum_{c of k} count_{c,r} z_c = n_r y_k               each shape k, run r of equal layers
                (order)    sum_{c on j: last_c > r} z_c
                             + sum_{c on j+1: first_c <= r} z_c <= y_k          each k, j, run r
                (slowest)  T_k >= sum_{c on j} time_c z_c                       each k, j
                (end)      U_k >= sum_{c on j} once_c z_c                       each k, j

y and z are binary. A column c is a composition (columns.py) on one stage: how many layers of each run it holds.
(cover) and (order) make the stages' intervals join end to end: every layer is on one stage, and no stage begins in a
run before the one where its predecessor ends. Times are in ms, so the solver's 1e-6 tolerances mean a nanosecond.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pulp

from .columns import Prices
from .scan import Assignment
from .solver import Solution, solve

MS = 1e3


@dataclass(frozen=True)
class _Column:
    stage: int
    composition: int
    seconds: float
    once_s: float
    variable: pulp.LpVariable


def solve_master(
    shapes: Sequence[Prices], cutoff_s: float = float("inf"), time_limit_s: float = 60.0, solver: str | None = None
) -> tuple[Solution, int, Assignment] | None:
    """(solution, index of the chosen shape, its plan) with the least closed-form step; None if nothing fits.

    cutoff_s: columns that alone make a step longer than this are left out. time_limit_s: seconds for making columns and
    for the solver. Raises SolverError.
    """
    start = time.monotonic()
    problem = pulp.LpProblem("stages", pulp.LpMinimize)
    chosen = [problem.add_variable(f"y_{k}", cat="Binary") for k in range(len(shapes))]
    columns = [
        _add_shape(problem, k, prices, y, cutoff_s) for k, (prices, y) in enumerate(zip(shapes, chosen, strict=True))
    ]
    problem += pulp.lpSum(chosen) == 1, "choose"
    problem.setObjective(pulp.lpSum(objective for _, objective in columns))
    solution = solve(problem, time_limit_s - (time.monotonic() - start), solver)
    if solution.status == "infeasible":
        return None
    solution = Solution(
        solution.status, solution.objective / MS, solution.bound / MS, solution.solver, solution.seconds
    )
    k = max(range(len(shapes)), key=lambda i: float(chosen[i].varValue or 0.0))
    return solution, k, _read_back(shapes[k], columns[k][0], solution.objective)


def _add_shape(
    problem: pulp.LpProblem, k: int, prices: Prices, y: pulp.LpVariable, cutoff_s: float
) -> tuple[list[_Column], pulp.LpAffineExpression]:
    """Add the columns of shape k with their constraints; returns the columns, and the shape's part of the objective in
    ms."""
    shape, chain = prices.shape, prices.chain
    more = shape.num_microbatches - 1
    slowest = problem.add_variable(f"T_{k}", lowBound=0)
    end = problem.add_variable(f"U_{k}", lowBound=0)
    stages = [_add_stage(problem, k, stage, prices, cutoff_s) for stage in range(shape.pipeline)]
    for stage, columns in enumerate(stages):
        problem += pulp.lpSum(c.variable for c in columns) == y, f"stage_{k}_{stage}"
        problem += slowest >= pulp.lpSum(MS * c.seconds * c.variable for c in columns), f"slowest_{k}_{stage}"
        problem += end >= pulp.lpSum(MS * c.once_s * c.variable for c in columns), f"end_{k}_{stage}"
    everything = [c for columns in stages for c in columns]
    for r, run in enumerate(chain.runs):
        held = pulp.lpSum(int(chain.counts[c.composition, r]) * c.variable for c in everything)
        problem += held == run.length * y, f"cover_{k}_{r}"
        for stage in range(shape.pipeline - 1):
            beyond = [c.variable for c in stages[stage] if chain.compositions[c.composition].last_run > r]
            before = [c.variable for c in stages[stage + 1] if chain.compositions[c.composition].first_run <= r]
            if beyond and before:
                problem += pulp.lpSum(beyond + before) <= y, f"order_{k}_{stage}_{r}"
    objective = more * slowest + end + pulp.lpSum(MS * c.seconds * c.variable for c in everything)
    return everything, objective


def _add_stage(problem: pulp.LpProblem, k: int, stage: int, prices: Prices, cutoff_s: float) -> list[_Column]:
    """Columns of one stage: every composition that fits, may be on that stage, and alone stays below the cut-off."""
    shape = prices.shape
    seconds, once = prices.on(stage).price(stage, cutoff_s)
    columns = []
    for c in np.flatnonzero(np.isfinite(seconds)):
        if shape.num_microbatches * seconds[c] + once[c] > cutoff_s:
            continue
        variable = problem.add_variable(f"z_{k}_{stage}_{c}", cat="Binary")
        columns.append(_Column(stage, int(c), float(seconds[c]), float(once[c]), variable))
    return columns


def _read_back(prices: Prices, columns: list[_Column], seconds: float) -> Assignment:
    taken = sorted((c for c in columns if (c.variable.varValue or 0.0) > 0.5), key=lambda c: c.stage)
    compositions = tuple(c.composition for c in taken)
    choices = tuple(prices.on(c.stage).choice(c.composition, prices.shape.flights(c.stage)) for c in taken)
    return Assignment(seconds, compositions, choices)
