"""The commands `plan report` (one HTML file, a trace) and `plan diff` (two plans)."""

import json
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...profiler.model.source import file_of
from .. import api
from ..planned import check_report
from ..reporting import terminal
from . import inputs, options
from .answers import at_work

if TYPE_CHECKING:
    from ..reporting.run_report import RunTable

report_app, diff_app = (options.new_app() for _ in range(2))


@report_app.command()
def _report_command(
    plan: options.PlanFile,
    model: options.ModelOfPlan = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="where the report goes")] = Path(
        "report.html"
    ),
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="also one step as a trace for ui.perfetto.dev"),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="FILE", help="a run's telemetry, set beside the prediction"),
    ] = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw PLAN as one HTML file that needs no network: who holds what, memory, a step's timeline, where its time goes,
    alternatives, sensitivity and proof."""
    from ...planner.cost.axis_seconds import axis_seconds
    from ..measuring.replanning import replanning
    from ..reporting.report_facts import facts_document
    from ..reporting.run_report import run_table

    check_report(output, trace)
    with at_work(quiet or as_json) as waiting:
        planned = api.load(plan, model=model, cache=not no_cache, waiting=waiting)
        document, profile = planned.document, planned.profile
        found_run = None if run is None else run_table(document, run, axis_seconds(document, profile))
        if found_run is not None and run is not None:
            found_run = replace(found_run, notes=(*found_run.notes, *replanning(document, profile, run)))
        markup = "" if found_run is None else _run_markup(found_run)
        facts, count = planned.draw(output, trace, markup, waiting)
    if as_json:
        terminal.write_json(
            json.dumps(facts_document(facts) | {"run": None if found_run is None else asdict(found_run)})
        )
        return
    written = [f"{output}, {output.stat().st_size / 1e3:,.0f} kB: open it in a browser"]
    if trace is not None:
        written.append(f"{trace}, {count:,} events: open it at ui.perfetto.dev, which keeps it on your machine")
    console = terminal.make_console()
    if not quiet:
        terminal.print_essentials(console, facts)
        if found_run is not None:
            terminal.print_rows(console, found_run.title, found_run.columns, found_run.rows, found_run.notes)
    terminal.print_next(console, written, [])


@diff_app.command()
def _diff_command(
    first: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan.json")],
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="another")],
    model: options.ModelOfPlan = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
) -> None:
    """Say what OTHER decides differently from PLAN, and what that costs in time and memory, by cause.

    Each plan is priced for its own cluster and job. Where the model is not found, only what the plans say of themselves
    is compared.
    """
    from ...planner.cost.estimate import estimate
    from ..reporting.plan_diff import difference

    plans = inputs.read_plan(first), inputs.read_plan(second)
    priced, notes = None, []
    with at_work(as_json) as waiting:
        if plans[0].model.fingerprint != plans[1].model.fingerprint:
            notes.append("the plans are for different models, so only their own predictions are compared")
        elif model is None and not file_of(plans[0].model.source).exists():
            notes.append(f"causes are not known: {plans[0].model.source} is not here; --model says where it is")
        elif model is None and inputs.runs_foreign_code(plans[0], first):
            notes.append(
                f"causes are not known: {plans[0].model.source}, which the plan names, lies outside of its folder, so "
                "it is not run; --model says that it may be"
            )
        else:
            profile = inputs.profile_of(plans[0], first, model, waiting, no_cache)
            priced = estimate(plans[0], profile), estimate(plans[1], profile)
    found = difference(*plans, priced)
    if as_json:
        terminal.write_json(json.dumps(asdict(found) | {"notes": notes}))
        return
    terminal.print_difference(terminal.make_console(), (str(first), str(second)), found)
    terminal.print_notes(terminal.make_console(), notes)


def _run_markup(found: "RunTable") -> str:
    from ..reporting.drawing import table, tag

    notes = "".join(tag("p", escape(note), class_="sub") for note in found.notes)
    return tag("p", escape(found.title), class_="sub") + table(found.columns, found.rows) + notes
