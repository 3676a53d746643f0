"""The command for a run that is under way: `plan replan`, a plan for the GPUs that are left."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...planner.plan.document import Plan, load_plan
from ...planner.plan.pin_texts import read_pins
from ...profiler.machine.cluster import ClusterSpec, cluster_of
from .. import api
from ..reporting import terminal
from ..reporting.documents import check_document
from ..reporting.switching import switching, whether_it_pays
from ..state.checkpoint_folder import latest_checkpoint, read_progress
from . import inputs, options
from .answers import at_work, plan_document, print_plan, searched
from .option_groups import grouped

replan_app = options.new_app()


@replan_app.command()
@grouped
def _replan_command(
    checkpoint: Annotated[
        Path,
        typer.Option("--checkpoint", metavar="DIR", help="a run's folder, or one checkpoint in it", show_default=False),
    ],
    gpus: options.Gpus = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="a preset or a device TOML (default: as before)"),
    ] = None,
    *,
    devices: options.MachineOptions,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="FILE",
            help="the run's telemetry: what a restart of it took, its steps, and how many are behind the checkpoint",
            show_default=False,
        ),
    ] = None,
    model: options.ModelOfPlan = None,
    pin: options.Pin = None,
    output: options.PlanOutput = Path("plan.json"),
    time_limit: options.TimeLimit = 60.0,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
) -> None:
    """Plan again for a run that lost GPUs or got more: the job is that of the checkpoint, global batch included.

    What switching costs is measured: by the run itself where it was resumed before (--run), else by reading its
    checkpoint here for two seconds.
    """
    folder = latest_checkpoint(checkpoint)
    if folder is None:
        raise ValueError(f"no checkpoint in {checkpoint}: give the folder that trainer.save() wrote to")
    progress, before = read_progress(folder), load_plan(folder / "plan.json")
    check_document(output, "meshwright-plan")
    cost = switching(folder, progress.steps, run)
    machine = _machine(before, devices)
    pins = read_pins(pin or ())
    source = inputs.model_of(before, model)
    inputs.check_source(source, "--model says where the model is")
    with at_work(quiet or as_json) as waiting:
        profile, _ = inputs.read_model(source, before.training.seq_len, waiting, not no_cache)
        if profile.fingerprint != before.model.fingerprint:
            raise ValueError(
                f"{source} is not the model of the checkpoint ({before.model.name}, fingerprint "
                f"{before.model.fingerprint[:12]}; found {profile.fingerprint[:12]}): give --model"
            )
        result = searched(profile, machine, before.training, pins, time_limit, waiting)
    result.plan.save(output)
    found = api.Planned(result.plan, lambda: profile, result=result)
    pays = whether_it_pays(before, result.plan, cost)
    if as_json:
        told = {**asdict(cost), "seconds": cost.seconds, "pays": pays}
        terminal.write_json(json.dumps({**plan_document(found), "switching": told}))
        return
    console = terminal.make_console()
    before_words = f"{before.degrees.num_devices} GPUs, {before.label}"
    now_words = f"{result.plan.degrees.num_devices} GPUs, {result.plan.label}"
    console.print(
        f"{before.model.name} after {progress.steps:,} steps: {before_words} -> {now_words}; global batch "
        f"{before.training.global_batch} as before",
        markup=False,
    )
    print_plan(console, found, output, quiet, verbose)
    console.print(f"{cost}; {pays}", markup=False)
    console.print(f"then trainer.resume({str(checkpoint)!r}) goes on from {folder.name}", markup=False)


def _machine(before: Plan, now: options.MachineOptions) -> ClusterSpec:
    """The cluster that the flags describe; devices are those of the plan before, if no others are named."""
    if now.gpus is None and now.cluster is None:
        raise ValueError("say how many GPUs there are now, for example --gpus 6 (or give a --cluster file)")
    if now.device is not None or now.cluster is not None:
        return inputs.read_cluster(now)
    count = inputs.whole_number("--gpus", now.gpus or "", "6")
    links = {"link": before.cluster.hosts[0].link}
    machine = cluster_of(before.cluster.device, count, now.gpus_per_node)
    hosts = tuple(group.model_copy(update=links) for group in machine.hosts)
    return machine.model_copy(update={"hosts": hosts, "network": before.cluster.network})
