"""Every outcome of a solver by its name: optimal, infeasible, late, missing; HiGHS and CBC agree."""

import os
import subprocess
import sys

import pulp
import pytest

from meshwright.planner.solve import solver
from meshwright.planner.solve.solver import SolverError, solve


def knapsack(room: float) -> pulp.LpProblem:
    problem = pulp.LpProblem("knapsack", pulp.LpMaximize)
    take = [problem.add_variable(f"x{i}", cat="Binary") for i in range(4)]
    problem.setObjective(pulp.lpSum(-v * x for v, x in zip((3, 4, 5, 6), take, strict=True)))
    problem.sense = pulp.LpMinimize
    problem += pulp.lpSum(w * x for w, x in zip((2, 3, 4, 5), take, strict=True)) <= room
    return problem


@pytest.mark.parametrize("name", ["HiGHS", "CBC"])
def test_solvers_agree_on_the_optimum(name: str) -> None:
    found = solve(knapsack(5), 300, name)

    assert found.status == "optimal"
    assert found.objective == pytest.approx(-7)
    assert found.bound <= found.objective


@pytest.mark.parametrize("name", ["HiGHS", "CBC"])
def test_infeasible_is_an_outcome(name: str) -> None:
    assert solve(knapsack(-1), 10, name).status == "infeasible"


def test_no_time_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(SolverError, match="--time-limit"):
        solve(knapsack(5), 0.0)


def test_no_incumbent_in_time_is_not_taken_for_an_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(problem: pulp.LpProblem, _engine: object) -> None:
        problem.status = pulp.LpStatusOptimal
        problem.sol_status = pulp.LpSolutionNoSolutionFound

    monkeypatch.setattr(pulp.LpProblem, "solve", late)

    with pytest.raises(SolverError, match="no plan within"):
        solve(knapsack(5), 1.0)


def test_missing_solvers_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "available_solver", lambda: None)

    with pytest.raises(SolverError, match="pip install highspy"):
        solve(knapsack(5), 1.0)


def test_cbc_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver.importlib.util, "find_spec", lambda _name: None)

    assert solver.available_solver() == "CBC"


@pytest.mark.parametrize("error", [pulp.PulpSolverError("broken"), RuntimeError("std::bad_alloc"), None])
def test_cbc_takes_over_where_highs_breaks_down(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def breaks(_self: pulp.HiGHS, problem: pulp.LpProblem) -> None:
        if error is not None:
            raise error
        problem.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)

    monkeypatch.setattr(pulp.HiGHS, "actualSolve", breaks)

    found = solve(knapsack(5), 300)

    assert (found.status, found.solver) == ("optimal", "CBC")
    assert found.objective == pytest.approx(-7)


def test_a_solver_that_was_asked_for_and_breaks_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_self: pulp.HiGHS, _problem: pulp.LpProblem) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(pulp.HiGHS, "actualSolve", breaks)

    with pytest.raises(SolverError, match="HiGHS failed: broken"):
        solve(knapsack(5), 300, "HiGHS")


PROGRAM = """
import pulp
from meshwright.planner.solve.solver import solve
problem = pulp.LpProblem("small", pulp.LpMinimize)
problem.setObjective(problem.add_variable("x", lowBound=1, upBound=3, cat="Integer"))
solve(problem, 10.0, "HiGHS")
"""


@pytest.mark.parametrize(
    "program", [PROGRAM, "from meshwright.planner.solve.solver import silence_highs\nsilence_highs()"]
)
def test_the_first_solver_of_a_process_writes_nothing_to_the_standard_output(program: str) -> None:
    """HiGHS 1.16 writes its version there, which made `plan --json` no document."""
    said = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport highspy\nhighspy.Highs()\nprint('done')"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )

    assert said.stdout == "done\n"


def test_where_there_is_no_standard_output_the_solver_answers_all_the_same() -> None:
    program = f"import os, sys\nos.close(1)\n{PROGRAM}\nprint(problem.objective.value(), file=sys.stderr)"

    said = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True)

    assert said.stderr == "1.0\n"
