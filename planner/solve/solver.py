"""The only module that calls solve(): by HiGHS, or by CBC if HiGHS is missing or fails. Every outcome has a name."""

import importlib.util
import os
import time
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pulp

GAP = 1e-6
"""Relative gap at which a solution counts as optimal."""


class SolverError(RuntimeError):
    """The solver is missing, failed, or found nothing in time. The message says which, and gives a way out."""


class OutOfTimeError(SolverError):
    """The solver found nothing in the time it was given."""


class FailedSolverError(SolverError):
    """The solver broke down."""


@dataclass(frozen=True)
class Solution:
    """What the solver has proven. bound: no solution has a smaller objective."""

    status: Literal["optimal", "feasible", "infeasible"]
    objective: float
    bound: float
    solver: str
    seconds: float


def solve(problem: pulp.LpProblem, time_limit_s: float, solver: str | None = None) -> Solution:
    """Minimise. Afterwards the variables of `problem` hold the solution, unless it is infeasible.

    solver: "HiGHS" or "CBC"; by default the first that is installed, and CBC in the time that is left if HiGHS fails.
    Raises SolverError if neither is installed, if the solver fails, and if it finds no solution in time. After a time
    limit PuLP's `status` says Optimal with both solvers; only `sol_status` tells the difference.
    """
    name = solver or available_solver()
    if name is None:
        raise SolverError("no solver: neither highspy nor CBC is installed; run: pip install highspy")
    start = time.monotonic()
    try:
        return _solved(problem, time_limit_s, name)
    except FailedSolverError:
        if solver is not None or name == "CBC" or not _bundled_cbc().available():
            raise
    return _solved(problem, time_limit_s - (time.monotonic() - start), "CBC")


def _solved(problem: pulp.LpProblem, time_limit_s: float, name: str) -> Solution:
    if time_limit_s <= 0:
        raise OutOfTimeError(_late(name, time_limit_s))
    start = time.monotonic()
    try:
        problem.solve(_engine(name, time_limit_s))
    except Exception as error:  # whatever C++ throws, and PuLP's own
        raise FailedSolverError(_failed(name, str(error))) from error
    if name == "HiGHS" and problem.status == pulp.LpStatusNotSolved:  # of CBC this says that time is over
        raise FailedSolverError(_failed(name, "it ended in an error of its own"))
    seconds = time.monotonic() - start
    if problem.status == pulp.LpStatusInfeasible:
        return Solution("infeasible", float("inf"), float("inf"), name, seconds)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise OutOfTimeError(_late(name, time_limit_s))
    objective = float(pulp.value(problem.objective) or 0.0)
    if problem.sol_status == pulp.LpSolutionOptimal and name == "CBC":
        return Solution("optimal", objective, objective - GAP * abs(objective), name, seconds)
    bound = float(problem.solverModel.getInfo().mip_dual_bound) if name == "HiGHS" else float("-inf")
    optimal = objective - bound <= 2 * GAP * max(1.0, abs(objective))
    return Solution("optimal" if optimal else "feasible", objective, min(bound, objective), name, seconds)


def available_solver() -> str | None:
    """Name of the solver that would be used; None if there is none."""
    if importlib.util.find_spec("highspy") is not None:
        return "HiGHS"
    return "CBC" if _bundled_cbc().available() else None


@cache
def silence_highs() -> None:
    """Create the first HiGHS of this process with nowhere to write to. From 1.16 on that one writes its version to the
    standard output before it can be told not to, and that would stand in front of a document on its way to a pipe."""
    import highspy

    try:
        standard = os.dup(1)
    except OSError:  # there is none
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        highspy.Highs()
    finally:
        os.dup2(standard, 1)
        os.close(standard)
        os.close(nowhere)


def _engine(name: str, time_limit_s: float) -> pulp.LpSolver:
    if name == "HiGHS":
        silence_highs()
        return pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=GAP, threads=1)
    return _bundled_cbc(timeLimit=max(1, round(time_limit_s)), gapRel=GAP, threads=1)


def _bundled_cbc(**options: float) -> pulp.LpSolver:
    """The CBC that PuLP 3 ships. Its warning that PuLP 4 will not is silenced, because our dependency excludes PuLP
    4."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(msg=False, **options)


def _failed(name: str, why: str) -> str:
    return f"{name} failed: {why}; try again, or reinstall it with: pip install highspy"


def _late(name: str, time_limit_s: float) -> str:
    return f"{name} found no plan within {time_limit_s:.1f} s; give it longer with --time-limit"
