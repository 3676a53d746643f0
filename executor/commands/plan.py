"""The commands `plan` (the way to train a model), `plan profile`, `plan show` and `plan devices`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ...planner.plan.training import Objective
from ...profiler.document import write_file
from ...profiler.machine.instances import instances
from .. import api, planning
from ..reporting import terminal
from ..reporting.documents import check_document, json_kind
from ..reporting.output_files import check_writable
from ..reporting.terminal_profile import print_operators, print_profile
from . import inputs, options
from .answers import at_work, named_outcomes, plan_document, print_estimate, print_plan, print_prediction
from .option_groups import grouped

plan_app, profile_app, show_app, devices_app = (options.new_app() for _ in range(4))


@plan_app.command()
@grouped
def _plan_command(
    model: options.Model,
    *,
    job: options.JobOptions,
    choices: options.PlanOptions,
    lora: options.Lora = None,
    pad_vocab: Annotated[
        int | None,
        options.number_option(
            "--pad-vocab",
            help="of a config.json: add words until N divides their number, as Megatron-LM does (128), so that tensor "
            "ranks can share them",
        ),
    ] = None,
    setup: Annotated[
        str | None,
        typer.Option(
            "--setup",
            metavar="LAYOUT",
            help='the plan of a layout of yours, as in plan compare: "tp=2 pp=4 zero=1", hsdp:4, megatron, ...',
        ),
    ] = None,
    objective: options.ObjectiveFlag = Objective.THROUGHPUT,
    time_limit: options.TimeLimit = 60.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="where the plan goes (default: plan.json; none with --json)"
        ),
    ] = None,
    as_json: options.Json = False,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="also draw what is printed")] = None,
    no_cache: options.NoCache = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
) -> None:
    """Plan how to train MODEL on GPUs: degrees, micro-batch, recompute, and which layer lives on which GPU.

    Needs no GPU: the model runs on fake tensors, the machine is a preset or a cluster file.
    """
    target = output or (None if as_json else Path("plan.json"))
    check_document(target, "meshwright-plan")
    if svg is not None:
        check_writable(svg, "--svg", ".svg")
        if as_json:
            raise ValueError(f"--svg {svg} draws what is printed, which with --json is no picture: leave out either")
    request = planning.Request(
        model, job, choices, objective, time_limit, not no_cache, setup=setup, pad_vocab=pad_vocab, lora=lora
    )
    with at_work(quiet or as_json) as waiting, named_outcomes():
        found = planning.planned(request, waiting)
    if target is not None:
        found.save(target)
    if as_json:
        terminal.write_json(json.dumps(plan_document(found)))
        return
    console = terminal.make_console(record=svg is not None)
    print_plan(console, found, target, quiet, verbose)
    if svg is not None:
        write_file(svg, console.export_svg(title=f"plan {model} --gpus {found.document.degrees.num_devices}"))


@profile_app.command()
def _profile_command(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="where the profile goes")] = Path(
        "profile.json"
    ),
    seq_len: options.SeqLen = None,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="run it at two shorter lengths, too: then `plan -s N` works for any N")
    ] = False,
    lora: options.Lora = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph", metavar="FILE", help="also layers, tensors and shared weights as a graph: .graphml or .dot"
        ),
    ] = None,
    operators: Annotated[bool, typer.Option("--operators", help="list the operators of every class")] = False,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Profile MODEL on fake tensors and save it: planning from the saved profile needs no torch and no model code."""
    check_document(output, "meshwright-profile")
    if graph is not None:
        check_writable(graph, "--graph", ".graphml", ".dot")
    if json_kind(inputs.check_source(model, inputs.MODEL_RULE)) == "meshwright-profile":
        raise ValueError(f"{model} is a profile already: plan from it with `plan {model} --gpus 8`")
    with at_work(quiet or as_json) as waiting:
        request = planning.Request(model, options.JobOptions(seq_len=seq_len), use_cache=not no_cache, lora=lora)
        profile, _ = planning.profiled(request, waiting, lengths=lengths)
    profile.save(output)
    if graph is not None:
        from ...profiler.model.layer_graph import graph_of
        from ..reporting.graph_files import write_graph

        write_graph(graph_of(profile), graph)
    if as_json:
        terminal.write_json(profile.model_dump_json())
        return
    if quiet:
        return
    console = terminal.make_console()
    print_profile(console, profile)
    if operators:
        print_operators(console, profile)
    written = [str(output), *([] if graph is None else [str(graph)])]
    terminal.print_next(console, written, [(f"plan {output} --gpus 8", "needs no torch")])


@devices_app.command()
def _devices_command(
    cloud: Annotated[bool, typer.Option("--cloud", help="list the cloud instance types instead")] = False,
    as_json: options.Json = False,
) -> None:
    """List the device presets, or with --cloud the instance types of clouds."""
    if cloud:
        found = list(instances().values())
        if as_json:
            terminal.write_json(json.dumps([each.model_dump(mode="json") for each in found]))
        else:
            terminal.print_instances(terminal.make_console(), found)
        return
    if as_json:
        terminal.write_json(json.dumps([each.model_dump(mode="json") for each in api.devices().values()]))
        return
    terminal.print_devices(terminal.make_console(), list(api.devices().values()))


@show_app.command()
def _show_command(
    plan: options.PlanFile,
    model: options.ModelForTables = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
) -> None:
    """Print the tables of a saved PLAN again."""
    with at_work(as_json) as waiting:
        found = api.load(plan, model=model, cache=not no_cache, waiting=waiting)
        document, estimate = found.document, None if model is None else found.estimate
    if as_json:
        terminal.write_json(document.model_dump_json())
        return
    console = terminal.make_console()
    terminal.print_job(console, document)
    terminal.print_choice(console, document, None)
    terminal.print_measured_plan(console, document)
    if estimate is not None:
        print_estimate(console, document, estimate)
    else:
        print_prediction(console, document)
    terminal.print_placement(console, document)
    terminal.print_certificate(console, document)
