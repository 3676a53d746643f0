"""The command for a run that is under way: `plan replan`, a plan for the GPUs that are left."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from ..planner.pins import read_pins
from ..planner.plan import Plan, load_plan
from ..planner.strategy import shape_of
from ..profiler.cluster import ClusterSpec, cluster_of
from . import terminal
from .checkpoint_folder import latest_checkpoint, read_progress

replan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@replan_app.command()
def _replan_command(
    checkpoint: Annotated[
        Path,
        typer.Option("--checkpoint", metavar="DIR", help="a run's folder, or one checkpoint in it", show_default=False),
    ],
    gpus: Annotated[
        str | None, typer.Option("--gpus", "-g", metavar="N", help="number of GPUs now", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="a preset or a device TOML (default: as before)"),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", metavar="N", min=1, help="GPUs of one host", show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="TOML with hosts, links and devices", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="model or profile.json, if it is not where the plan says",
            show_default=False,
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="CHOICE", help="keep a choice, as in --pin tensor=4", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="where the plan goes")] = Path(
        "plan.json"
    ),
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", min=0.1, help="seconds the search may take")
    ] = 60.0,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="profile anew, even if nothing has changed; keep nothing")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no tables, no progress bar")] = False,
) -> None:
    """Plan again for a run that lost GPUs or got more: the job is that of the checkpoint, global batch included."""
    from . import cli

    folder = latest_checkpoint(checkpoint)
    if folder is None:
        raise ValueError(f"no checkpoint in {checkpoint}: give the folder that trainer.save() wrote to")
    progress, before = read_progress(folder), load_plan(folder / "plan.json")
    cli._check_output(output, "meshwright-plan")
    machine = _machine(before, gpus, device, gpus_per_node, cluster)
    pins = read_pins(pin or ())
    source = model or before.model.source
    cli._check_source(source, "--model says where the model is")
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet) as waiting:
        profile, _ = cli.read_model(source, before.training.seq_len, waiting, not no_cache)
        if profile.fingerprint != before.model.fingerprint:
            raise ValueError(
                f"{source} is not the model of the checkpoint ({before.model.name}, fingerprint "
                f"{before.model.fingerprint[:12]}; found {profile.fingerprint[:12]}): give --model"
            )
        result = cli._search(profile, machine, before.training, pins, time_limit, waiting)
    cli._check_result(result, profile, pins)
    result.plan.save(output)
    console = terminal.make_console()
    before_words = f"{before.degrees.num_devices} GPUs, {shape_of(before).label}"
    now_words = f"{result.plan.degrees.num_devices} GPUs, {shape_of(result.plan).label}"
    console.print(
        f"{before.model.name} after {progress.steps:,} steps: {before_words} -> {now_words}; global batch "
        f"{before.training.global_batch} as before",
        markup=False,
    )
    cli._print_plan(console, result, profile, [], output, quiet)
    console.print(f"then trainer.resume({str(checkpoint)!r}) goes on from {folder.name}", markup=False)


def _machine(
    before: Plan, gpus: str | None, device: str | None, gpus_per_node: int | None, cluster: Path | None
) -> ClusterSpec:
    """The cluster that the flags describe; devices are those of the plan before, if no others are named."""
    from . import cli

    if gpus is None and cluster is None:
        raise ValueError("say how many GPUs there are now, for example --gpus 6 (or give a --cluster file)")
    if device is not None or cluster is not None:
        return cli.read_cluster(gpus, device, gpus_per_node, cluster)
    count = cli._whole_number("--gpus", gpus or "", "6")
    links = {"link": before.cluster.hosts[0].link}
    machine = cluster_of(before.cluster.device, count, gpus_per_node)
    hosts = tuple(group.model_copy(update=links) for group in machine.hosts)
    return machine.model_copy(update={"hosts": hosts, "network": before.cluster.network})
