"""The command `plan sweep`: the best plan at several numbers of GPUs and sequence lengths."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ...profiler.model.adapters import with_lora
from ..reporting import terminal
from ..swept import swept
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
        ),
    ] = None,
    scale_batch: Annotated[
        bool,
        typer.Option("--scale-batch", help="--global-batch is that of the fewest GPUs, and grows with them"),
    ] = False,
    prices: Annotated[
        bool, typer.Option("--prices", help="also what more memory, bandwidth and compute would be worth at each point")
    ] = False,
    *,
    machine: options.MachineOptions,
    stack: options.StackOptions,
    choices: options.PlanOptions,
    time_limit: options.TimeLimit = 60.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="also write it: .png, .html or .json"),
    ] = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.QuietBar = False,
) -> None:
    """Plan MODEL at every number of GPUs and sequence length: step time, cost, and where the kind of plan changes.

    The global batch is the same at all points unless you give one for each number of GPUs, or --scale-batch.
    """
    from ..reporting.sweep_report import check_target
    from .sweep_grid import numbers_of

    if output is not None:
        check_target(output)
    lengths: list[int | None] = [*numbers_of("--seq-len", seq_len)] if seq_len else [None]
    with at_work(quiet or as_json) as waiting:
        found = swept(
            with_lora(model, lora),
            machine,
            lengths,
            stack,
            choices,
            global_batch=global_batch,
            scale_batch=scale_batch,
            prices=prices,
            time_limit_s=time_limit,
            use_cache=not no_cache,
            waiting=waiting,
        )
    if output is not None:
        found.write(output)
    if as_json:
        terminal.write_json(json.dumps(found.document))
        return
    first = found.points[0].cluster
    console = terminal.make_console()
    if first.assumption is not None:
        terminal.print_assumptions(console, [first.assumption])
    found.show(console)
    if output is not None:
        terminal.print_next(console, [str(output)], [])
