"""The command `plan explain`: why this plan, and why not another."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .. import api, planning
from ..reporting import terminal
from ..reporting.documents import json_kind
from ..reporting.explain_report import explanation_document, print_explanation
from . import options
from .answers import at_work, named_outcomes
from .option_groups import flags_given, grouped

explain_app = options.new_app()


@explain_app.command()
@grouped
def _explain_command(
    source: Annotated[
        str,
        typer.Argument(metavar="PLAN|MODEL", help="a plan.json, or a model that is planned first"),
    ],
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            "--why-not",
            metavar="LAYOUT",
            help='a layout as in compare --setup: "tp=8", fsdp, "pp=4 zero=1", megatron, other.json; repeatable',
        ),
    ] = None,
    model: options.ModelOfPlan = None,
    *,
    job: options.JobOptions,
    choices: options.PlanOptions,
    lora: options.Lora = None,
    time_limit: options.TimeLimit = 60.0,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.QuietBar = False,
) -> None:
    """Say why the plan is what it is: the questions people are told to ask, answered with this model's numbers.

    With --why-not: why a layout is not the plan: illegal by which rule, over memory on which stage, or how much slower.
    """
    is_plan = _is_plan(source)
    given = [*flags_given(job), *flags_given(choices), *([] if lora is None else ["--lora"])]
    if is_plan and given:
        raise ValueError(
            f"{source} is a plan, which says its GPUs, job and choices: leave out {' and '.join(given)}, or give the "
            "model, which is then planned with them"
        )
    if not is_plan and model is not None:
        raise ValueError(f"--model {model} says where the model of a plan is, and {source} is a model: leave it out")
    with at_work(quiet or as_json) as waiting:
        if is_plan:
            planned = api.load(source, model=model, cache=not no_cache, waiting=waiting)
        else:
            with named_outcomes():
                request = planning.Request(
                    source, job, choices, time_limit_s=time_limit, use_cache=not no_cache, lora=lora
                )
                planned = planning.planned(request, waiting)
        waiting("asking")
        explanation = planned.explain(*(why_not or ()), time_limit=time_limit)
    if as_json:
        terminal.write_json(json.dumps(explanation_document(explanation)))
        return
    console = terminal.make_console()
    terminal.print_assumptions(console, planned.assumptions)
    print_explanation(console, explanation)


def _is_plan(source: str) -> bool:
    path = Path(source)
    return path.suffix == ".json" and path.exists() and json_kind(path) == "meshwright-plan"
