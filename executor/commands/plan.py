"""The commands `plan` (the way to train a model), `plan profile`, `plan show` and `plan devices`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...planner.plan.training import Objective
from ...profiler.machine.cluster import device_names, load_device
from ..reporting import terminal
from ..reporting.documents import check_document, json_kind
from ..reporting.output_files import check_writable
from ..reporting.report import json_document
from ..reporting.terminal_profile import print_operators, print_profile
from . import inputs, options
from .answers import at_work, of_setup, print_estimate, print_plan, print_prediction, searched
from .option_groups import grouped

if TYPE_CHECKING:
    from ...planner.plan.pins import Pins
    from ...planner.plan.training import TrainingSpec
    from ...profiler.machine.cluster import ClusterSpec
    from ...profiler.model.model_profile import ModelProfile

plan_app, profile_app, show_app, devices_app = (options.new_app() for _ in range(4))

_EPILOG = (
    "Also: [bold]plan profile[/bold] MODEL -o profile.json · [bold]plan compare[/bold] MODEL --gpus 8 --setup ddp "
    "--setup 'tp=4 pp=2' · [bold]plan verify[/bold] plan.json · [bold]plan show[/bold] plan.json · "
    "[bold]plan explain[/bold] plan.json --why-not tp=8 · [bold]plan sweep[/bold] MODEL --gpus 8,16,32 · "
    "[bold]plan report[/bold] plan.json · [bold]plan diff[/bold] a.json b.json · [bold]plan devices[/bold] · "
    "[bold]plan calibrate[/bold] -o device.toml. Each has --help."
)


@plan_app.command(epilog=_EPILOG)
@grouped
def _plan_command(
    model: options.Model,
    *,
    job: options.JobOptions,
    choices: options.PlanOptions,
    pad_vocab: Annotated[
        int | None,
        typer.Option(
            "--pad-vocab",
            metavar="N",
            min=1,
            help="of a config.json: add words until N divides their number, as Megatron-LM does (128), so that tensor "
            "ranks can share them",
            show_default=False,
        ),
    ] = None,
    setup: Annotated[
        str | None,
        typer.Option(
            "--setup",
            metavar="LAYOUT",
            help='the plan of a layout of yours, as in plan compare: "tp=2 pp=4 zero=1", hsdp:4, megatron, ...',
            show_default=False,
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
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="also draw what is printed", show_default=False)
    ] = None,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Plan how to train MODEL on GPUs: degrees, micro-batch, recompute, and which layer lives on which GPU.

    Needs no GPU: the model runs on fake tensors, the machine is a preset or a cluster file.
    """
    from ...planner.answers.fewer import fewer_gpus

    if pad_vocab is not None:
        model = f"{model}@vocab%{pad_vocab}"
    target = output or (None if as_json else Path("plan.json"))
    check_document(target, "meshwright-plan")
    machine, pins = inputs.read_cluster(job.machine), choices.pins()
    with at_work(quiet or as_json) as waiting:
        profile, _ = inputs.read_model(model, job.seq_len, waiting, not no_cache)
        training, assumptions = inputs.read_training(profile, machine, job.global_batch, choices.stack(job.stack))
        if objective is not Objective.THROUGHPUT:
            machine, choice = _part_for(objective, profile, machine, training, pins, waiting)
            assumptions.append(choice)
        if choices.made_for == "megatron" and pad_vocab is None and any("padding to" in n for n in profile.notes):
            assumptions.append("the vocabulary as it is, though Megatron-LM pads it; --pad-vocab 128 prices that")
        if setup is not None:
            pins = of_setup(setup, profile, machine, training, pins)
        result = searched(profile, machine, training, pins, time_limit, waiting)
        fewer = None if quiet else fewer_gpus(result.plan, result.estimate, profile, pins)
    if target is not None:
        result.plan.save(target)
    if as_json:
        terminal.write_json(json.dumps(json_document(result, fewer)))
        return
    console = terminal.make_console(record=svg is not None)
    print_plan(console, result, profile, assumptions, target, quiet, fewer)
    if svg is not None:
        console.save_svg(str(svg), title=f"plan {model} --gpus {machine.num_devices}")


def _part_for(
    objective: Objective,
    profile: "ModelProfile",
    machine: "ClusterSpec",
    training: "TrainingSpec",
    pins: "Pins",
    waiting: terminal.Waiting,
) -> "tuple[ClusterSpec, str]":
    """(the part of the machine that the objective asks for, a sentence that says so)."""
    from ...planner.answers.sweep import cluster_for, objective_in_words

    waiting(f"looking for the number of GPUs ({objective.value})")
    part = cluster_for(objective, profile, machine, training, pins)
    return part, objective_in_words(objective, machine, part)


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
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            metavar="FILE",
            help="also layers, tensors and shared weights as a graph: .graphml or .dot",
            show_default=False,
        ),
    ] = None,
    operators: Annotated[bool, typer.Option("--operators", help="list the operators of every class")] = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Profile MODEL on fake tensors and save it: planning from the saved profile needs no torch and no model code."""
    check_document(output, "meshwright-profile")
    if graph is not None:
        check_writable(graph, "--graph", ".graphml", ".dot")
    if json_kind(inputs.check_source(model, inputs.MODEL_RULE)) == "meshwright-profile":
        raise ValueError(f"{model} is a profile already: plan from it with `plan {model} --gpus 8`")
    with at_work(quiet) as waiting:
        profile, _ = inputs.read_model(model, seq_len, waiting, not no_cache, lengths=lengths)
    profile.save(output)
    if graph is not None:
        from ...profiler.model.layer_graph import graph_of
        from ..reporting.graph_files import write_graph

        write_graph(graph_of(profile), graph)
    if quiet:
        return
    console = terminal.make_console()
    print_profile(console, profile)
    if operators:
        print_operators(console, profile)
    written = [str(output), *([] if graph is None else [str(graph)])]
    terminal.print_next(console, written, [(f"plan {output} --gpus 8", "needs no torch")])


@devices_app.command()
def _devices_command() -> None:
    """List the device presets."""
    terminal.print_devices(terminal.make_console(), [load_device(name) for name in device_names()])


@show_app.command()
def _show_command(
    plan: options.PlanFile,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="model or profile.json: adds itemised memory and the time's parts"
        ),
    ] = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
) -> None:
    """Print the tables of a saved PLAN again."""
    document = inputs.read_plan(plan)
    estimate = None
    if model is not None:
        from ...planner.cost.estimate import estimate as estimate_plan

        with at_work(as_json) as waiting:
            profile = inputs.profile_of(document, plan, model, waiting, no_cache)
        estimate = estimate_plan(document, profile)
    if as_json:
        terminal.write_json(document.model_dump_json())
        return
    console = terminal.make_console()
    terminal.print_job(console, document)
    terminal.print_choice(console, document, None)
    if estimate is not None:
        print_estimate(console, document, estimate)
    else:
        print_prediction(console, document)
    terminal.print_placement(console, document)
    terminal.print_certificate(console, document)
