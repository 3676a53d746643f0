"""The commands that run on the devices here: `plan calibrate` measures them, `plan verify` runs a plan on them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...profiler.model.adapters import with_lora
from .. import api
from ..reporting import terminal
from ..reporting.output_files import check_device_output
from . import inputs, options
from .answers import DIFFERENT_NUMBERS, at_work

calibrate_app, verify_app = (options.new_app() for _ in range(2))


@calibrate_app.command()
def _calibrate_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="a model whose layers are timed, too, as a check"),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="where the device goes")] = Path(
        "device.toml"
    ),
    device_kind: Annotated[str, typer.Option("--device-kind", metavar="KIND", help="auto, cpu or cuda")] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="measured at once (default: all GPUs, or cores)"),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", metavar="DTYPE", help="bf16, fp16 or fp32; repeatable, activations have the first"),
    ] = None,
    micro_batch: Annotated[int, options.number_option("--micro-batch", help="samples for MODEL")] = 4,
    seq_len: options.SeqLen = None,
    lora: options.Lora = None,
    quick: Annotated[bool, typer.Option("--quick", help="measure less: coarser, and quicker")] = False,
    steps: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help='fit the device of plans to measured steps: lines like {"plan": "plan.json", "step_time_s": 1.23}',
        ),
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the devices here and write them as a device file for --device: matmuls, memory, attention, collectives.

    Every number says how it was measured. What a GPU run cannot tell stays as in the nearest preset, and says so.
    """
    from ...profiler.machine.calibrate import save_device
    from ..measuring.calibrate import calibrate, print_calibration

    check_device_output(output)
    if steps is not None:
        _fit_to_steps(steps, output, quiet, as_json)
        return
    with at_work(quiet or as_json) as waiting:
        profile, loaded = None, None
        if model is not None:
            profile, loaded = inputs.read_model(with_lora(model, lora), seq_len, waiting, needs_model=True)
            if loaded is None:
                raise ValueError(f"calibrate runs the model, and {model} is only its profile: give the model itself")
        waiting("measuring")
        found = calibrate(device_kind, ranks, quick, dtype or (), loaded, profile, micro_batch)
    save_device(found.device, output)
    if as_json:
        checks = {"steps": [asdict(each) for each in found.steps], "layers": [asdict(each) for each in found.layers]}
        terminal.write_json(json.dumps({"device": found.device.model_dump(mode="json"), **checks}))
    elif not quiet:
        console = terminal.make_console()
        print_calibration(console, found)
        terminal.print_next(
            console,
            [str(output)],
            [(f"plan MODEL --gpus {found.num_ranks} --device {output}", "plans for what was measured")],
        )


def _fit_to_steps(steps: Path, output: Path, quiet: bool, as_json: bool) -> None:
    """Write the device of the plans in `steps`, fitted to their measured step times."""
    from ...profiler.machine.calibrate import save_device
    from ..measuring.calibrate import fitted_to, print_steps
    from ..measuring.measured_steps import load_measured_steps

    with at_work(quiet or as_json) as waiting:
        runs = load_measured_steps(
            steps, lambda plan, source: inputs.read_model(source, plan.training.seq_len, waiting)[0]
        )
        cluster = runs[0].plan.cluster
        links = {"link": cluster.link, "network": cluster.between_hosts}
        device, checks = fitted_to(cluster.device.model_copy(update=links), runs)
    save_device(device, output)
    if as_json:
        document = {"device": device.model_dump(mode="json"), "steps": [asdict(each) for each in checks]}
        terminal.write_json(json.dumps(document))
    elif not quiet:
        console = terminal.make_console()
        print_steps(console, checks, f"{device.name}, fitted to {len(checks)} measured steps", "predicted before")
        terminal.print_next(console, [str(output)], [(f"plan MODEL --device {output}", "plans with what was learned")])


@verify_app.command()
def _verify_command(
    plan: options.PlanFile,
    model: options.ModelToRun = None,
    steps: Annotated[int, options.number_option("--steps", help="optimizer steps to compare")] = 3,
    as_json: options.Json = False,
    quiet: options.QuietBar = False,
) -> None:
    """Run PLAN on processes of this machine beside one process: same loss, gradients and parameters, or the first
    tensor that differs. A small version of the model is used where there is one."""
    planned = api.load(plan, model=model, to_run=True)
    with at_work(quiet or as_json) as waiting:
        waiting("running the plan beside one process")
        report = planned.verify(steps)
    if as_json:
        terminal.write_json(json.dumps({"ok": report.ok, **asdict(report)}))
    else:
        console = terminal.make_console()
        for line in report.lines:
            console.print(line, markup=False)
    if not report.ok:
        raise SystemExit(DIFFERENT_NUMBERS)
