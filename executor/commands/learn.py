"""The command `plan learn`: a device out of the telemetry of runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..reporting import terminal
from ..reporting.output_files import check_device_output
from . import inputs, options
from .answers import at_work

learn_app = options.new_app()


@learn_app.command()
def _learn_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="files of parallelize(..., telemetry=FILE)"),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="where the device goes")] = Path(
        "device.toml"
    ),
    model: options.ModelOfPlan = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Learn a device's constants from RUNs of any models and plans on it, and write them for --device.

    Warm-up and outliers are left out; drift and ranks that others wait for are told. Steps are fitted with priors at
    the device that the runs were planned for, so that few runs move little.
    """
    from ...profiler.machine.calibrate import save_device
    from ..measuring.calibrate import fitted_to, print_steps
    from ..measuring.learn import learn_runs

    check_device_output(output)
    with at_work(quiet or as_json) as waiting:
        found = learn_runs(
            runs,
            lambda plan: inputs.profile_of(plan, Path(plan.model.name), model, waiting, no_cache),
        )
        cluster = found[0].step.plan.cluster
        links = {"link": cluster.link, "network": cluster.between_hosts}
        device, checks = fitted_to(cluster.device.model_copy(update=links), [run.step for run in found])
    save_device(device, output)
    notes = [note for run in found for note in run.notes]
    if as_json:
        document = {"device": device.model_dump(mode="json"), "steps": [asdict(each) for each in checks]}
        terminal.write_json(json.dumps(document | {"notes": notes}))
        return
    console = terminal.make_console()
    if not quiet:
        runs_in_words = f"{len(found)} run{'s' if len(found) > 1 else ''}"
        print_steps(console, checks, f"{device.name}, learned from {runs_in_words}", "predicted before")
        terminal.print_notes(console, notes)
    terminal.print_next(console, [str(output)], [(f"plan MODEL --device {output}", "plans with what was learned")])
