"""The command `plan sweep`: the best plan at several numbers of GPUs and sequence lengths."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ...profiler.machine.units import gpus_in_words
from ...profiler.model.adapters import with_lora
from .. import api
from ..reporting import terminal
from . import options
from .answers import at_work
from .option_groups import grouped

sweep_app = options.new_app()


@sweep_app.command()
@grouped
def _sweep_command(
    model: options.Model,
    lora: options.Lora = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "-g",
            metavar="N,N,...",
            help="numbers of GPUs (default with --cluster: 1, 2, 4, ... of its hosts)",
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[
        str | None,
        typer.Option("--seq-len", "-s", metavar="N,N,...", help="tokens per sample (default: the model's)"),
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            "--global-batch",
            "-b",
            metavar="N[,N,...]",
            help="samples per step: one for all points, or one for each of --gpus",
            show_default=False,
        ),
    ] = None,
    scale_batch: Annotated[
        bool,
        typer.Option("--scale-batch", help="--global-batch is that of the fewest GPUs, and grows with them"),
    ] = False,
    prices: Annotated[
        bool, typer.Option("--prices", help="also what more memory, bandwidth and compute would be worth at each point")
    ] = False,
    price_per_hour: options.Price = None,
    *,
    machine: options.MachineOptions,
    stack: options.StackOptions,
    choices: options.PlanOptions,
    time_limit: options.TimeLimit = 60.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="also write it: .png, .html or .json", show_default=False),
    ] = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.QuietBar = False,
) -> None:
    """Plan MODEL at every number of GPUs and sequence length: step time, cost, and where the kind of plan changes.

    The global batch is the same at all points unless you give one for each number of GPUs, or --scale-batch.
    """
    from ...planner.answers.sweep import left_out_in_words, marginal_prices, robustness
    from ..reporting.sweep_report import Worth, check_target, print_sweep, sweep_document, write
    from .sweep_grid import numbers_of

    if output is not None:
        check_target(output)
    lengths: list[int | None] = [*numbers_of("--seq-len", seq_len)] if seq_len else [None]
    pins = choices.pins()
    with at_work(quiet or as_json) as waiting:
        found = api.swept(
            with_lora(model, lora),
            machine,
            lengths,
            choices.stack(stack),
            pins,
            global_batch=global_batch,
            scale_batch=scale_batch,
            time_limit_s=time_limit,
            use_cache=not no_cache,
            waiting=waiting,
        )
        points, first = found.points, found.points[0].cluster
        notes = [*found.notes, *left_out_in_words(found.left_out)]
        worth = []
        for point in points if prices else ():
            waiting(f"pricing what more of each resource is worth on {gpus_in_words(point.num_devices)}")
            worth.append(Worth(marginal_prices(point, pins), robustness(point)))
    price = price_per_hour if price_per_hour is not None else first.device.price_per_hour
    document = sweep_document(points, worth, found.notes, price, found.left_out)
    if output is not None:
        write(output, points, worth, document, price)
    if as_json:
        terminal.write_json(json.dumps(document))
        return
    console = terminal.make_console()
    if first.assumption is not None:
        terminal.print_assumptions(console, [first.assumption])
    print_sweep(console, points, worth, notes, price)
    if output is not None:
        terminal.print_next(console, [str(output)], [])
