"""The command for a run that is under way: `plan replan`, a plan for the GPUs that are left, or have become slower."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ...planner.plan.document import Plan, load_plan
from ...planner.plan.pin_texts import read_pins
from ...profiler.machine.cluster import ClusterSpec, cluster_of
from ...profiler.machine.units import counted, format_seconds, gpus_in_words
from ...profiler.model.model_profile import ModelProfile
from .. import planning
from ..planned import Planned
from ..reporting import terminal
from ..reporting.documents import check_document
from ..reporting.switching import switching, whether_it_pays
from ..state.checkpoint_folder import latest_checkpoint, read_progress
from . import inputs, options
from .answers import at_work, named_outcomes, plan_document, print_plan, searched
from .option_groups import grouped

if TYPE_CHECKING:
    from ..measuring.slow_hosts import HostSpeeds
    from ..measuring.slower_cluster import WaysOn

replan_app = options.new_app()


@replan_app.command()
@grouped
def _replan_command(
    checkpoint: Annotated[
        Path,
        typer.Option("--checkpoint", metavar="DIR", help="a run's folder, or one checkpoint in it"),
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
            help="the run's telemetry: what a restart of it took, its steps, and how many are behind the checkpoint; "
            "without --gpus also which hosts compute slower than the others, and the plan is for those",
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
    """Plan again for a run that lost GPUs, got more, or has a host that became slower: the job is that of the
    checkpoint, global batch included.

    With --run and without --gpus, hosts whose ranks compute slower than the others get slower devices: the best plan
    with them and the best without, each searched for --time-limit, stand beside going on as it is. What switching costs
    is measured: by the run itself where it was resumed before (--run), else by reading its checkpoint here for two
    seconds.
    """
    from ..measuring.slower_cluster import ways_on

    folder = latest_checkpoint(checkpoint)
    if folder is None:
        raise ValueError(f"no checkpoint in {checkpoint}: give the folder that trainer.save() wrote to")
    progress, before = read_progress(folder), load_plan(folder / "plan.json")
    check_document(output, "meshwright-plan")
    cost = switching(folder, progress.steps, run)
    by_run = None if run is None or devices != options.MachineOptions() else run
    machine = before.cluster if by_run is not None else _machine(before, devices)
    pins = read_pins(pin or ())
    source = inputs.model_of(before, model)
    inputs.check_source(source, "--model says where the model is")
    speeds, ways = None, None
    with at_work(quiet or as_json) as waiting:
        profile, _ = inputs.read_model(source, before.training.seq_len, waiting, not no_cache)
        if profile.fingerprint != before.model.fingerprint:
            raise ValueError(
                f"{source} is not the model of the checkpoint ({before.model.name}, fingerprint "
                f"{before.model.fingerprint[:12]}; found {profile.fingerprint[:12]}): give --model"
            )
        if by_run is None:
            result = searched(profile, machine, before.training, pins, time_limit, waiting)
        else:
            speeds = _slow_hosts(before, profile, by_run)
            with named_outcomes():
                ways = ways_on(
                    before,
                    profile,
                    speeds,
                    cost,
                    lambda cluster: planning.searched(profile, cluster, before.training, pins, time_limit, waiting),
                    may_stay=not pin,
                )
            result = ways.best
    result.plan.save(output)
    found = Planned(result.plan, lambda: profile, result=result)
    pays = whether_it_pays(before, result.plan, cost) if ways is None else ways.chosen.pays
    if as_json:
        told = {**asdict(cost), "seconds": cost.seconds, "pays": pays}
        document = {**plan_document(found), "switching": told}
        if speeds is not None and ways is not None:
            slow = [asdict(each) for each in speeds.slow]
            document |= {"slow_hosts": slow, "ways": [asdict(each) for each in ways.rows]}
        terminal.write_json(json.dumps(document))
        return
    console = terminal.make_console()
    before_words = f"{gpus_in_words(before.degrees.num_devices)}, {before.label}"
    now_words = f"{gpus_in_words(result.plan.degrees.num_devices)}, {result.plan.label}"
    console.print(
        f"{before.model.name} after {counted(progress.steps, 'step')}: {before_words} -> {now_words}; global batch "
        f"{before.training.global_batch} as before",
        markup=False,
    )
    print_plan(console, found, output, quiet, verbose)
    if speeds is not None and ways is not None:
        _print_ways(console, speeds, ways)
    console.print(f"{cost}; {pays}", markup=False)
    console.print(f"then trainer.resume({str(checkpoint)!r}) goes on from {folder.name}", markup=False)


def _slow_hosts(before: Plan, profile: ModelProfile, run: Path) -> "HostSpeeds":
    """The hosts that a run shows as slow. Raises ValueError if there are none."""
    from ..measuring.slow_hosts import SpeedsUnknownError, host_speeds

    way_out = "say how many GPUs there are now, for example --gpus 6 (or give a --cluster file)"
    try:
        speeds = host_speeds(before, profile, run)
    except SpeedsUnknownError as error:
        raise ValueError(f"{error}; give the telemetry of the run that the checkpoint is of, or {way_out}") from None
    if not speeds.slow:
        raise ValueError(f"{speeds}. There is nothing to plan around: {way_out}")
    return speeds


def _print_ways(console: Console, speeds: "HostSpeeds", ways: "WaysOn") -> None:
    """Which hosts are slow, and what can be done about it."""
    stay, *others = ways.rows
    rows = [(stay.what, stay.layout, str(stay.num_devices), format_seconds(speeds.step_s), "")]
    for way in others:
        step = "no plan" if way.step_s is None else format_seconds(way.step_s)
        after = "never" if way.pays_after is None else counted(round(way.pays_after), "step")
        rows.append((way.what, way.layout, str(way.num_devices), step, after))
    notes = [
        "steps: measured of the plan as it is, of the others as long beside it as they are predicted to be",
        *(f"{way.what}: {way.pays}" for way in others if way.step_s is None),
        ways.launch,
    ]
    columns = ("", "layout", "GPUs", "step", "pays after")
    terminal.print_titled(console, str(speeds), terminal.rows_table(columns, rows, numeric_from=2))
    terminal.print_notes(console, notes)


def _machine(before: Plan, now: options.MachineOptions) -> ClusterSpec:
    """The cluster that the flags describe; devices, links and, of several, the size of hosts are those of the plan
    before, if no others are named."""
    if now.gpus is None and now.cluster is None and now.instance is None:
        raise ValueError("say how many GPUs there are now, for example --gpus 6 (or give a --cluster file)")
    if now.device is not None or now.cluster is not None or now.instance is not None or now.nodes is not None:
        return inputs.read_cluster(now)
    count = inputs.whole_number("--gpus", now.gpus or "", "6")
    if len(before.cluster.kinds) > 1:
        raise ValueError(
            f"--gpus {count}: the plan before is for {before.cluster.devices}, on hosts that differ, so which of them "
            "are left is open: say it by --device, or in a --cluster file"
        )
    first = before.cluster.hosts[0]
    usual = {"devices_per_host": before.cluster.devices_per_host} if before.cluster.num_hosts > 1 else {}
    machine = cluster_of(first.device.model_copy(update=usual), count, now.gpus_per_node)
    alike = {"device": first.device, "link": first.link}
    hosts = tuple(group.model_copy(update=alike) for group in machine.hosts)
    found = machine.model_copy(update={"hosts": hosts, "network": before.cluster.between_hosts})
    return inputs.with_price(found, now.price_per_hour)
