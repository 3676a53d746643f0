"""The command `plan tune`: candidates raced on the real cluster."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ...profiler.model.adapters import with_lora
from ..planning import Request
from ..reporting import terminal
from ..reporting.documents import check_document
from ..reporting.output_files import check_device_output, check_writable
from ..tuning.tuned import tuned
from . import options
from .answers import INTERRUPTED, NOTHING_MEASURED, at_work, named_outcomes
from .option_groups import grouped

tune_app = options.new_app()


@tune_app.command()
@grouped
def _tune_command(
    model: options.Model,
    *,
    job: options.JobOptions,
    choices: options.PlanOptions,
    lora: options.Lora = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="of the cluster's time: 90s, 10m, 1h")
    ] = "10m",
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="LAYOUT",
            help='a layout of yours that takes part: ddp, fsdp, "tp=4 pp=2 zero=1", a plan.json; repeatable',
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="COMMAND",
            help="how a job is started, {args} for its program: 'srun -N4 --ntasks-per-node=1 torchrun --nnodes 4 ... "
            "{args}' (default: torchrun on this machine)",
        ),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(
            "--hosts",
            metavar="COUNT",
            help="measure on so many hosts only: candidates are cut down to them, each rank with the work it had "
            "(default: all)",
        ),
    ] = None,
    one_gpu: Annotated[
        bool,
        typer.Option(
            "--one-gpu", help="measure compute and memory alone: one rank of each stage runs, without its peers"
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the race that -o has a record of")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            parser=options.NumberFlag("--timeout", 1.0, "120").read,
            help="a step that takes longer is a hang (default: 20 times its prediction, at least 60)",
        ),
    ] = None,
    output: options.PlanOutput = Path("plan.json"),
    device_output: Annotated[
        Path | None,
        typer.Option(
            "--device-output",
            metavar="FILE",
            help="where the fitted device goes (default: device.toml beside the plan)",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="where the page goes (default: tune.html beside it)"),
    ] = None,
    time_limit: options.TimeLimit = 20.0,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Race the plans that could be the best for MODEL on the real cluster, learn its constants from what they take, and
    write the fastest: plan.json with its measured step, device.toml for the next model, tune.html.

    Every candidate runs in its own job, a few steps in turn. It ends when no plan that was not tried is predicted to
    come near the fastest one, or the budget is spent; Ctrl-C keeps what was measured, and --resume goes on.

    With --hosts or --one-gpu smaller jobs run in the place of the candidates, and the plan is the one that is predicted
    to be the fastest after the fit; what no smaller job shows stays predicted, and is named.
    """
    from ...profiler.machine.calibrate import save_device
    from ..reporting.tune_page import tune_page
    from ..reporting.tune_report import print_tuned, tuned_document
    from ..tuning.sitting import Venue, read_budget

    budget_s = read_budget(budget)
    device_file = device_output or output.with_name("device.toml")
    page_file = report or output.with_name("tune.html")
    check_document(output, "meshwright-plan")
    check_device_output(device_file, "--device-output")
    if job.machine.device is not None and Path(job.machine.device).resolve() == device_file.resolve():
        raise ValueError(f"--device {job.machine.device} would be written over: give --device-output another name")
    check_writable(page_file, "--report", ".html")
    request = Request(with_lora(model, lora), job, choices, time_limit_s=time_limit, use_cache=not no_cache)
    place = Venue(output, launcher, resume, timeout, hosts, one_gpu)
    with at_work(quiet or as_json) as waiting, named_outcomes():
        found, record, notes = tuned(request, setup or (), budget_s, place, waiting)
    written = [str(output)]
    found.plan.save(output)
    if record.laps():
        save_device(found.device, device_file)
        written.append(f"{device_file}: the device, fitted to what was measured, for --device")
    page_file.write_text(tune_page(found, record))
    written.append(f"{page_file}: open it in a browser")
    if as_json:
        terminal.write_json(json.dumps(tuned_document(found, notes)))
    else:
        console = terminal.make_console()
        print_tuned(console, found, notes, quiet)
        terminal.print_next(console, written, [])
    if found.interrupted:
        raise SystemExit(INTERRUPTED)
    if not record.laps():
        raise SystemExit(NOTHING_MEASURED)
