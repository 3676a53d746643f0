"""The command `plan compare`: the plan beside manual set-ups."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ...profiler.model.adapters import with_lora
from ..reporting import terminal
from ..reporting.documents import check_document
from ..reporting.output_files import check_writable
from ..reporting.report import candidate_document
from . import inputs, options
from .answers import DOES_NOT_FIT, at_work, named_outcomes
from .option_groups import grouped

if TYPE_CHECKING:
    from ..measuring.compare import Comparison
    from ..measuring.measurement import Measurement

compare_app = options.new_app()


@compare_app.command()
@grouped
def _compare_command(
    model: options.Model,
    lora: options.Lora = None,
    gpus: options.Gpus = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="LAYOUT",
            help='a manual layout: ddp, fsdp, hsdp:4, "tp=4 pp=2 zero=1 mb=2 recompute=full", megatron, torchtitan, '
            "deepspeed-zero3, or a plan.json; repeatable",
        ),
    ] = None,
    all_baselines: Annotated[
        bool, typer.Option("--all-baselines", help="also every rule of thumb and framework's usual set-up")
    ] = False,
    *,
    job: options.JobOptions,
    time_limit: options.TimeLimit = 60.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="also run each for a few steps on the devices here")
    ] = False,
    steps: Annotated[
        int | None, options.number_option("--steps", help="with --measure: steps of each run (default: 5)")
    ] = None,
    repetitions: Annotated[
        int | None,
        options.number_option(
            "--repetitions", help="with --measure: runs of each set-up, in turns (A B C, A B C; default: 5)"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="a picture of it: .html or .png; or the plan of the one --setup: .json",
        ),
    ] = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.QuietBar = False,
) -> None:
    """Set the plan beside manual set-ups: predicted time, memory and verdict; with --measure, measured times too.

    Set-ups that the noise does not tell apart are called a tie."""
    from ..measuring.compare import PLANNED, compare, measured, read_setups, save_picture
    from ..reporting.measured_report import measured_document, standing_document

    runs = {name: n for name, n in (("steps", steps), ("repetitions", repetitions)) if n is not None}
    for name, count in () if measure else runs.items():
        raise ValueError(f"--{name} {count} is of measured runs: add --measure, or leave it out")
    if output is not None:
        check_writable(output, "-o", ".html", ".png", ".json")
    machine = inputs.read_cluster(job.machine)
    setups = read_setups(setup or [], machine)
    if output is not None and output.suffix == ".json":
        check_document(output, "meshwright-plan")
        if len(setups) != 1:
            raise ValueError(f"-o {output} takes the plan of one --setup; there are {len(setups)}: give one")
    with at_work(quiet or as_json) as waiting:
        profile, loaded = inputs.read_model(with_lora(model, lora), job.seq_len, waiting, not no_cache, measure)
        if measure and loaded is None:
            raise ValueError(f"--measure runs the model, and {model} is only its profile: give the model itself")
        training, assumptions = inputs.read_training(profile, machine, job.global_batch, job.stack)
        with named_outcomes():
            comparison = compare(
                profile,
                machine,
                training,
                setups,
                all_baselines=all_baselines,
                time_limit_s=time_limit,
                progress=waiting,
            )
        times = None
        if measure and loaded is not None:
            waiting("running each set-up on the local devices")
            times = measured(comparison, loaded, **runs)
    asked = comparison.candidates[1].plan if output is not None and output.suffix == ".json" else None
    if asked is not None and output is not None:
        asked.save(output)
    elif output is not None and output.suffix != ".json" and comparison.plans:
        save_picture(output, comparison, times)
    if as_json:
        rows = [{**candidate_document(c), "measured": measured_document(times, c.label)} for c in comparison.candidates]
        ranking = {} if times is None else {"standing": standing_document(times, PLANNED)}
        terminal.write_json(json.dumps({"setups": rows, **ranking}))
    else:
        console = terminal.make_console()
        terminal.print_assumptions(console, assumptions)
        _print_comparison(console, comparison, times, machine.device.price_per_hour)
        if output is not None and (asked is not None or (output.suffix != ".json" and comparison.plans)):
            terminal.print_next(console, [str(output)], [])
    if not comparison.plans or (output is not None and output.suffix == ".json" and asked is None):
        raise SystemExit(DOES_NOT_FIT)


def _print_comparison(
    console: Console,
    comparison: "Comparison",
    times: "dict[str, Measurement | str] | None",
    price_per_hour: float | None,
) -> None:
    """The plan in a sentence, every set-up with its verdict, what was measured, and where the step of each goes."""
    from ..measuring.compare import PLANNED
    from ..reporting.measured_report import measured_table

    planned, reference_s = comparison.planned, None
    if planned is not None:
        reference_s = planned.estimate.step_time_s
        terminal.print_job(console, planned.plan)
        terminal.print_choice(console, planned.plan, reference_s, comparison.candidates[1:])
    terminal.print_comparison(console, comparison.candidates, reference_s)
    if times is not None:
        terminal.print_measured(console, measured_table(comparison.candidates, times, PLANNED))
    terminal.print_losses(console, comparison.candidates, price_per_hour)
