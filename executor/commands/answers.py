"""What commands that plan have in common: a search with its outcomes and exit codes, and a plan printed in full."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ...planner.plan.document import Plan
from ...planner.plan.not_run import not_run
from ...planner.plan.training import TrainingSpec
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..reporting import terminal
from ..reporting.report import joined_notes, launch_command

if TYPE_CHECKING:
    from ...planner.answers.fewer import Fewer
    from ...planner.answers.search import SearchResult
    from ...planner.answers.verdict import Verdict
    from ...planner.cost.estimate import Estimate
    from ...planner.plan.pins import Pins

DIFFERENT_NUMBERS = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3


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
    from ...planner.answers.search import search

    waiting("searching")
    with named_outcomes():
        result = search(profile, cluster, training, pins=pins, time_limit_s=time_limit_s, progress=waiting)
    _check_result(result, profile, pins)
    return result


def of_setup(text: str, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, pins: "Pins") -> "Pins":
    """What a set-up in words decides, or the first set-up of a framework's usual ones that fits. pins: of the other
    flags, of which only --for goes with it."""
    from ...planner.answers.guidance import named_rules
    from ...planner.answers.infeasible import closest_plan
    from ...planner.answers.search import pins_of
    from ...planner.plan.pin_texts import in_words
    from ...planner.plan.setups import IllegalSetupError, parse_setup
    from ...planner.solve.explore import Explorer

    said = [words for words in in_words(pins) if not words.startswith("--for")]
    if said or pins.everything or pins.parts:
        words = ", ".join(said) or "--space full or --recompute parts"
        raise ValueError(f"--setup {text!r} says the layout, and other flags {words}: say all of it in --setup")
    rules = {rule.name: rule for rule in named_rules(cluster, profile)}
    if text.strip().lower() not in rules:
        try:
            decided = pins_of(parse_setup(text, cluster.num_devices, cluster.devices_per_host))
        except IllegalSetupError as error:
            raise ValueError(str(error)) from None
        return replace(decided, framework=pins.framework)
    explorer = Explorer(profile, cluster, training)
    attempts = rules[text.strip().lower()].attempts
    fitting = (each for each in attempts if (c := closest_plan(explorer, each)) is not None and c.over_bytes <= 0)
    return replace(next(fitting, attempts[-1]), framework=pins.framework)


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


def _check_result(result: "SearchResult", profile: ModelProfile, pins: "Pins") -> None:
    """The independent check, before anything is written: a violation is a mistake of the planner, never the user's.
    That the executor does not run something yet is one, too, unless it was asked for."""
    from ...planner.answers.check import check

    violations = check(result.plan, profile, to_run=not pins.may_go_beyond)
    if violations:
        raise AssertionError("the plan breaks its own limits: " + "; ".join(violations))


def print_plan(
    console: Console,
    result: "SearchResult",
    profile: ModelProfile,
    assumptions: list[str],
    target: Path | None,
    quiet: bool,
    fewer: "Fewer | None" = None,
) -> None:
    """A plan that was just made, with all that was weighed; quiet: the choice only. target: the file it went to; fewer:
    GPUs that would nearly do."""
    from ...planner.answers.explain import batch_advice

    plan, estimate = result.plan, result.estimate
    terminal.print_coupling(console, profile.coupling, plan.micro_batch)
    terminal.print_assumptions(console, assumptions)
    terminal.print_job(console, plan)
    terminal.print_choice(console, plan, estimate.step_time_s, result.alternatives)
    if not quiet:
        replicas = next((c.verdict for c in result.baselines if c.label == "DDP"), None)
        print_estimate(console, plan, estimate, replicas)
        terminal.print_placement(console, plan)
        terminal.print_alternatives(console, plan, estimate, result.alternatives)
        terminal.print_candidates(console, "What people usually try", result.baselines)
        less = [] if fewer is None else [str(fewer)]
        terminal.print_notes(console, [*joined_notes(profile.notes), *batch_advice(plan), *less])
        terminal.print_certificate(console, plan)
    if target is not None:
        run = [
            (f"plan verify {target}", "same numbers as one device, on processes of this machine"),
            (launch_command(plan, "train.py"), "train.py as in the README, section Train"),
        ]
        goes_to = None if plan.certificate is None else plan.certificate.framework
        exported = [(f"plan export {target} --to {goes_to}", "the layout in its own settings")] if goes_to else []
        terminal.print_next(console, [str(target)], exported + ([] if not_run(plan) else run))


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
    terminal.print_memory(console, estimate.memory, plan.training.memory_margin, memory_band(plan))


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
