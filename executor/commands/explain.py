"""The command `plan explain`: why this plan, and why not another."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..reporting import terminal
from ..reporting.documents import json_kind
from ..reporting.explain_report import Explanation, explanation_document, print_explanation
from . import inputs, options
from .answers import at_work, searched
from .option_groups import grouped

if TYPE_CHECKING:
    from ...planner.answers.why_not import Answer
    from ...planner.cost.estimate import Estimate
    from ...planner.plan.document import Plan
    from ...profiler.model.model_profile import ModelProfile

explain_app = options.new_app()

_BYTES_PER_PARAMETER = 4
_WEIGHED_SECONDS = 8.0
"""For pricing rules of thumb, where the plan's document keeps nothing that was weighed beside it."""


@explain_app.command()
@grouped
def _explain_command(
    source: Annotated[
        str,
        typer.Argument(metavar="PLAN|MODEL", help="a plan.json, or a model that is planned first", show_default=False),
    ],
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            "--why-not",
            metavar="LAYOUT",
            help='a layout as in compare --setup: "tp=8", fsdp, "pp=4 zero=1", megatron, other.json; repeatable',
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="of a PLAN: its model, if it is not where it says", show_default=False
        ),
    ] = None,
    *,
    job: options.JobOptions,
    choices: options.PlanOptions,
    time_limit: options.TimeLimit = 60.0,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Say why the plan is what it is: the questions people are told to ask, answered with this model's numbers.

    With --why-not: why a layout is not the plan: illegal by which rule, over memory on which stage, or how much slower.
    """
    assumptions: list[str] = []
    with at_work(quiet or as_json) as waiting:
        if _is_plan(source):
            plan, found, profile = _of_plan(Path(source), model, waiting, no_cache)
        else:
            machine, pins = inputs.read_cluster(job.machine), choices.pins()
            profile, _ = inputs.read_model(source, job.seq_len, waiting, not no_cache)
            training, assumptions = inputs.read_training(profile, machine, job.global_batch, choices.stack(job.stack))
            result = searched(profile, machine, training, pins, time_limit, waiting)
            plan, found = result.plan, result.estimate
        waiting("asking")
        explanation = _explained(plan, found, profile, why_not or [], time_limit)
    if as_json:
        terminal.write_json(json.dumps(explanation_document(explanation)))
        return
    console = terminal.make_console()
    terminal.print_assumptions(console, assumptions)
    print_explanation(console, explanation)


def _is_plan(source: str) -> bool:
    path = Path(source)
    return path.suffix == ".json" and path.exists() and json_kind(path) == "meshwright-plan"


def _of_plan(
    path: Path, model: str | None, waiting: terminal.Waiting, no_cache: bool
) -> "tuple[Plan, Estimate, ModelProfile]":
    """A saved plan, priced, with its model's profile."""
    from ...planner.cost.estimate import estimate

    plan = inputs.read_plan(path)
    profile = inputs.profile_of(plan, path, model, waiting, no_cache)
    return plan, estimate(plan, profile), profile


def _explained(
    plan: "Plan", found: "Estimate", profile: "ModelProfile", why_not: list[str], seconds: float
) -> Explanation:
    """Why the plan is not each of these layouts; without any, all that people are told to ask."""
    from ...planner.answers.decision_path import walk
    from ...planner.answers.guidance import no_candidates
    from ...planner.answers.landscape import weighed
    from ...planner.answers.tutorial import lessons

    excluded = no_candidates(_BYTES_PER_PARAMETER * profile.num_parameters, plan.cluster.num_devices)
    if why_not:
        answers = _answers(why_not, plan, found, profile, seconds)
        return Explanation(plan, found, answers=answers, excluded=excluded)
    steps, taught = walk(plan, found, profile, seconds), lessons(plan, found, profile)
    listed = weighed(plan, found, profile, _WEIGHED_SECONDS)
    return Explanation(plan, found, steps=steps, lessons=taught, excluded=excluded, alternatives=listed)


def _answers(
    texts: list[str], plan: "Plan", found: "Estimate", profile: "ModelProfile", seconds: float
) -> "tuple[Answer, ...]":
    """Why the plan is not each of these layouts. Raises ValueError that says which word is wrong."""
    from ...planner.answers.guidance import named_rules
    from ...planner.answers.why_not import not_legal, why_not, why_not_plan, why_not_setup
    from ...planner.plan.document import load_plan
    from ...planner.plan.setups import IllegalSetupError, parse_setup
    from ...planner.solve.explore import Explorer

    explorer = Explorer(profile, plan.cluster, plan.training)
    frameworks = {rule.name: rule.attempts for rule in named_rules(plan.cluster, profile)}
    count, per_host = plan.cluster.num_devices, plan.cluster.devices_per_host

    def answer(text: str) -> "Answer":
        if text.strip().endswith(".json"):
            return why_not_plan(explorer, text, load_plan(Path(text.strip())), plan, found)
        attempts = frameworks.get(text.strip().lower())
        if attempts is not None:
            return why_not(explorer, text, attempts, plan, found, seconds)
        try:
            setup = parse_setup(text, count, per_host, "--why-not")
        except IllegalSetupError as error:
            return not_legal(text, error.rule)
        return why_not_setup(explorer, setup, plan, found, seconds)

    return tuple(answer(text) for text in texts)
