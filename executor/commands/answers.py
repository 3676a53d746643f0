"""What commands that plan have in common: a search with its outcomes and exit codes, and a plan printed in full."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ...planner.plan.document import Plan
from ...planner.plan.not_run import not_run
from ...planner.plan.training import TrainingSpec
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from .. import planning
from ..planned import Planned
from ..reporting import terminal
from ..reporting.report import hosts_in_order, json_document, launch_command

if TYPE_CHECKING:
    from ...planner.answers.search import SearchResult
    from ...planner.answers.verdict import Verdict
    from ...planner.cost.estimate import Estimate
    from ...planner.plan.pins import Pins

DIFFERENT_NUMBERS = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3
NOTHING_MEASURED = 4
INTERRUPTED = 130

EXIT_CODES = {
    0: "done",
    DIFFERENT_NUMBERS: "`plan verify` found a difference",
    BAD_INPUT: "bad input (one sentence says what)",
    DOES_NOT_FIT: "it does not fit (the message says on which stage, by how much, how many GPUs would do, and the "
    "cheapest change)",
    NOTHING_MEASURED: "`plan tune` measured nothing",
    INTERRUPTED: "interrupted",
}
"""Exit code -> what it says."""


@contextmanager
def at_work(quiet: bool) -> Iterator[terminal.Waiting]:
    """A progress bar while work lasts. What a model's code prints goes to stderr: stdout is for the answer."""
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet) as waiting:
        yield waiting


def searched(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    pins: "Pins",
    time_limit_s: float,
    waiting: terminal.Waiting,
) -> "SearchResult":
    """The plan that a search finds, checked. Exits with a sentence where there is none."""
    with named_outcomes():
        return planning.searched(profile, cluster, training, pins, time_limit_s, waiting)


@contextmanager
def named_outcomes() -> Iterator[None]:
    """Exit codes and sentences for what a search can end with."""
    from ...planner.answers.search import InfeasibleError, SolverError

    try:
        yield
    except InfeasibleError as error:
        terminal.print_infeasible(error)
        raise SystemExit(DOES_NOT_FIT) from None
    except SolverError as error:
        terminal.print_error(str(error))
        raise SystemExit(BAD_INPUT) from None


def print_plan(console: Console, found: Planned, target: Path | None, quiet: bool, verbose: bool = False) -> None:
    """A plan that was just made, on one screen. quiet: the choice only; verbose: all that was weighed. target: the file
    it went to."""
    result = found.result
    assert result is not None, "it was searched for"
    if not quiet and not verbose:
        found.print(console, None if target is None else str(target))
        return
    plan = found.document
    terminal.print_coupling(console, found.profile.coupling, plan.micro_batch)
    terminal.print_assumptions(console, found.assumptions)
    terminal.print_job(console, plan)
    terminal.print_choice(console, plan, found.step_time_s, result.alternatives)
    if verbose:
        replicas = next((c.verdict for c in result.baselines if c.label == "DDP"), None)
        print_estimate(console, plan, result.estimate, replicas)
        terminal.print_placement(console, plan)
        terminal.print_alternatives(console, plan, result.estimate, result.alternatives)
        terminal.print_candidates(console, "What people usually try", result.baselines)
        terminal.print_notes(console, found.notes)
        terminal.print_certificate(console, plan)
    if target is not None:
        run = [
            (f"plan verify {target}", "same numbers as one device, on processes of this machine"),
            (launch_command(plan), hosts_in_order(plan) or "train.py as in the README, section Train"),
        ]
        goes_to = None if plan.certificate is None else plan.certificate.framework
        exported = [(f"plan export {target} --to {goes_to}", "the layout in its own settings")] if goes_to else []
        terminal.print_next(console, [str(target)], exported + ([] if not_run(plan) else run))


def plan_document(found: Planned) -> dict[str, Any]:
    """What `plan --json` prints: the plan and all that was weighed, and what was assumed."""
    assert found.result is not None, "it was searched for"
    return {**json_document(found.result, found.fewer), "assumed": list(found.assumptions)}


def print_estimate(console: Console, plan: Plan, estimate: "Estimate", replicas: "Verdict | None" = None) -> None:
    """Time with its parts and reasons, and memory by item. replicas: the verdict on a copy of the model per GPU."""
    from ...planner.answers.explain import reason
    from ...planner.cost.bands import memory_band, time_band

    rate, band = _rate_name(plan), time_band(plan)
    terminal.print_speed(
        console, estimate.step_time_s, estimate.tokens_per_s, estimate.mfu, rate, estimate.mfu_convention, band
    )
    terminal.print_no_band(console, plan)
    terminal.print_breakdown(console, estimate)
    terminal.print_why(console, reason(plan, estimate, replicas))
    terminal.print_memory(console, plan, estimate.memory, memory_band(plan))


def print_prediction(console: Console, plan: Plan) -> None:
    """What a plan document says of itself: time, and memory in sum."""
    from ...planner.cost.estimate import MFU_CONVENTION

    prediction = plan.prediction
    if prediction is not None:
        step_s, rate = prediction.step_time_s, _rate_name(plan)
        terminal.print_speed(console, step_s, prediction.tokens_per_s, prediction.mfu, rate, MFU_CONVENTION)
        terminal.print_memory_totals(console, plan)


def _rate_name(plan: Plan) -> str:
    return "samples/s" if plan.training.seq_len is None else "tokens/s"
