"""The `plan` command: reads arguments, calls profiler, planner and executor, prints. No torch until a model is run."""

import difflib
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..planner.not_run import not_run
from ..planner.plan import Plan, load_plan
from ..planner.software import REFERENCE, load_software
from ..planner.training import SAMPLES_PER_GPU, Objective, TrainingSpec
from ..profiler.cache import ProfileCache
from ..profiler.cluster import ClusterSpec, cluster_of, device_names, load_cluster, load_device
from ..profiler.lengths import at_seq_len
from ..profiler.local import local_gpus, preset_of
from ..profiler.model_profile import ModelProfile, load_profile
from . import cli_options as options
from . import terminal
from .commands_explain import explain_app, sweep_app
from .commands_export import check_app, export_app
from .commands_report import diff_app, report_app
from .commands_run import replan_app
from .output_files import check_writable
from .report import candidate_document, json_document, launch_command, measured_document
from .terminal_profile import print_operators, print_profile

if TYPE_CHECKING:
    from ..planner.estimate import Estimate
    from ..planner.search import SearchResult
    from ..planner.strategy import Pins
    from ..profiler.load import LoadedModel

DEFAULT_DEVICE = "h100-80gb"
_BAD_INPUT = 2
_DOES_NOT_FIT = 3
_DIFFERENT_NUMBERS = 1


def _command(name: str) -> typer.Typer:
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


_plan, _profile, _devices, _compare, _verify, _show, _calibrate = (
    _command(name) for name in ("plan", "profile", "devices", "compare", "verify", "show", "calibrate")
)
_SUBCOMMANDS = {
    "profile": _profile,
    "export": export_app,
    "check": check_app,
    "devices": _devices,
    "compare": _compare,
    "verify": _verify,
    "show": _show,
    "calibrate": _calibrate,
    "report": report_app,
    "diff": diff_app,
    "replan": replan_app,
    "explain": explain_app,
    "sweep": sweep_app,
}
_EPILOG = (
    "Also: [bold]plan profile[/bold] MODEL -o profile.json · [bold]plan compare[/bold] MODEL --gpus 8 --setup ddp "
    "--setup 'tp=4 pp=2' · [bold]plan verify[/bold] plan.json · [bold]plan show[/bold] plan.json · "
    "[bold]plan explain[/bold] plan.json --why-not tp=8 · [bold]plan sweep[/bold] MODEL --gpus 8,16,32 · "
    "[bold]plan report[/bold] plan.json · [bold]plan diff[/bold] a.json b.json · [bold]plan devices[/bold] · "
    "[bold]plan calibrate[/bold] -o device.toml. Each has --help."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `plan` command. Exit codes: 0 done, 1 verify found a difference, 2 bad input, 3 no fit."""
    gc.set_threshold(200_000, 50, 100)  # a command is short, and imports and traces make millions of objects
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"meshwright {version('meshwright')}")
        return
    name, words = route(words)
    app = _SUBCOMMANDS.get(name, _plan)
    try:
        app(args=words or ["--help"] if app is _plan else words, prog_name=f"plan {name}".strip())
    except ValueError as error:
        if type(error) is not ValueError:  # a subclass is not one of our sentences: a bug, let it show
            raise
        terminal.print_error(str(error))
        raise SystemExit(_BAD_INPUT) from None


def route(words: Sequence[str]) -> tuple[str, list[str]]:
    """(subcommand, its arguments); the subcommand is "" for planning itself.

    The first word that is no option and no option's value decides. A file of a subcommand's name is the model where
    the subcommand would have nothing to work on: `plan compare --gpus 8` beside a file ./compare.
    """
    positions = _positional(words)
    if not positions or words[positions[0]] not in _SUBCOMMANDS:
        return "", list(words)
    name = words[positions[0]]
    rest = [*words[: positions[0]], *words[positions[0] + 1 :]]
    lacks_operand = {"devices": bool(rest), "calibrate": False, "replan": False}.get(name, len(positions) == 1)
    if lacks_operand and "--help" not in rest and Path(name).exists():
        return "", list(words)
    return name, rest


def _positional(words: Sequence[str]) -> list[int]:
    """Indices of the words that are neither options nor values of options."""
    with_value = {
        spelling
        for app in (_plan, *_SUBCOMMANDS.values())
        for option in typer.main.get_command(app).params
        if option.param_type_name == "option" and not getattr(option, "is_flag", False)
        for spelling in option.opts
    }
    positions: list[int] = []
    i = 0
    while i < len(words):
        word = words[i]
        if word == "--":
            return [*positions, *range(i + 1, len(words))]
        if word in with_value:
            i += 2
            continue
        if not word.startswith("-"):
            positions.append(i)
        i += 1
    return positions


@_plan.command(epilog=_EPILOG)
def _plan_command(
    model: options.Model,
    gpus: options.Gpus = None,
    device: options.Device = None,
    gpus_per_node: options.PerNode = None,
    cluster: options.ClusterFile = None,
    global_batch: options.GlobalBatch = None,
    seq_len: options.SeqLen = None,
    precision: options.PrecisionFlag = None,
    optimizer: options.OptimizerFlag = options.Optimizer.ADAMW,
    software: options.SoftwareFlag = REFERENCE,
    memory_margin: options.Margin = 0.05,
    pin: options.Pin = None,
    most: options.Most = None,
    forbid: options.Forbid = None,
    recompute: options.RecomputeFlag = None,
    micro_batch: options.MicroBatch = None,
    space: options.SpaceFlag = options.SpaceOf.RUN,
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
    from ..planner.pins import read_pins

    target = output or (None if as_json else Path("plan.json"))
    _check_output(target, "meshwright-plan")
    machine = read_cluster(gpus, device, gpus_per_node, cluster)
    everything = space is options.SpaceOf.FULL
    pins = read_pins(pin or (), most or (), forbid or (), recompute, micro_batch, everything)
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet or as_json) as waiting:
        profile, _ = read_model(model, seq_len, waiting, not no_cache)
        training, assumptions = read_training(
            profile, machine, global_batch, seq_len, precision, optimizer, software, memory_margin
        )
        if objective is not Objective.THROUGHPUT:
            from ..planner.sweep import cluster_for, objective_in_words

            waiting(f"looking for the number of GPUs ({objective.value})")
            part = cluster_for(objective, profile, machine, training, pins)
            assumptions.append(objective_in_words(objective, machine, part))
            machine = part
        result = _search(profile, machine, training, pins, time_limit, waiting)
    _check_result(result, profile, pins)
    if target is not None:
        result.plan.save(target)
    if as_json:
        terminal.write_json(json.dumps(json_document(result)))
        return
    console = terminal.make_console(record=svg is not None)
    _print_plan(console, result, profile, assumptions, target, quiet)
    if svg is not None:
        console.save_svg(str(svg), title=f"plan {model} --gpus {machine.num_devices}")


@_profile.command()
def _profile_command(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="where the profile goes")] = Path(
        "profile.json"
    ),
    seq_len: options.SeqLen = None,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="run it at two shorter lengths, too: then `plan -s N` works for any N")
    ] = False,
    operators: Annotated[bool, typer.Option("--operators", help="list the operators of every class")] = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Profile MODEL on fake tensors and save it: planning from the saved profile needs no torch and no model code."""
    _check_output(output, "meshwright-profile")
    if _json_kind(_check_source(model, _MODEL_RULE)) == "meshwright-profile":
        raise ValueError(f"{model} is a profile already: plan from it with `plan {model} --gpus 8`")
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet) as waiting:
        profile, _ = read_model(model, seq_len, waiting, not no_cache, lengths=lengths)
    profile.save(output)
    if quiet:
        return
    console = terminal.make_console()
    print_profile(console, profile)
    if operators:
        print_operators(console, profile)
    terminal.print_next(console, [str(output)], [(f"plan {output} --gpus 8", "needs no torch")])


@_devices.command()
def _devices_command() -> None:
    """List the device presets."""
    terminal.print_devices(terminal.make_console(), [load_device(name) for name in device_names()])


@_compare.command()
def _compare_command(
    model: options.Model,
    gpus: options.Gpus = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="LAYOUT",
            help='a manual layout: ddp, fsdp, hsdp:4, "tp=4 pp=2 zero=1 mb=2 recompute=full", megatron, torchtitan, '
            "deepspeed-zero3, or a plan.json; repeatable",
        ),
    ] = None,
    all_baselines: Annotated[
        bool, typer.Option("--all-baselines", help="also every rule of thumb and framework's usual set-up")
    ] = False,
    device: options.Device = None,
    gpus_per_node: options.PerNode = None,
    cluster: options.ClusterFile = None,
    global_batch: options.GlobalBatch = None,
    seq_len: options.SeqLen = None,
    precision: options.PrecisionFlag = None,
    optimizer: options.OptimizerFlag = options.Optimizer.ADAMW,
    software: options.SoftwareFlag = REFERENCE,
    memory_margin: options.Margin = 0.05,
    time_limit: options.TimeLimit = 60.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="also run each for a few steps on the devices here")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="steps of each measured run")] = 5,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="a picture of it: .html or .png", show_default=False),
    ] = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Set the plan beside manual set-ups: predicted time, memory and verdict; with --measure, measured times too."""
    from .compare import compare, measured, read_setups, save_picture

    if output is not None:
        check_writable(output, "-o", ".html", ".png")
    machine = read_cluster(gpus, device, gpus_per_node, cluster)
    setups = read_setups(setup or [], machine)
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet or as_json) as waiting:
        profile, loaded = read_model(model, seq_len, waiting, not no_cache, measure)
        if measure and loaded is None:
            raise ValueError(f"--measure runs the model, and {model} is only its profile: give the model itself")
        training, assumptions = read_training(
            profile, machine, global_batch, seq_len, precision, optimizer, software, memory_margin
        )
        with _named_outcomes():
            comparison = compare(
                profile,
                machine,
                training,
                setups,
                all_baselines=all_baselines,
                time_limit_s=time_limit,
                progress=waiting,
            )
        times = None
        if measure and loaded is not None:
            waiting("running each set-up on the local devices")
            times = measured(comparison, loaded, steps=steps)
    if output is not None and comparison.plans:
        save_picture(output, comparison)
    if as_json:
        rows = [{**candidate_document(c), "measured": measured_document(times, c.label)} for c in comparison.candidates]
        terminal.write_json(json.dumps({"setups": rows}))
        return
    console = terminal.make_console()
    terminal.print_assumptions(console, assumptions)
    planned = comparison.planned
    if planned is not None:
        terminal.print_job(console, planned.plan)
        terminal.print_choice(console, planned.plan, planned.estimate.step_time_s, comparison.candidates[1:])
    reference = planned.estimate.step_time_s if planned is not None else None
    terminal.print_comparison(console, comparison.candidates, times, reference)
    terminal.print_losses(console, comparison.candidates, machine.device.price_per_hour)
    if output is not None and comparison.plans:
        terminal.print_next(console, [str(output)], [])
    if not comparison.plans:
        raise SystemExit(_DOES_NOT_FIT)


@_calibrate.command()
def _calibrate_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="a model whose layers are timed, too, as a check", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="where the device goes")] = Path(
        "device.toml"
    ),
    device_kind: Annotated[str, typer.Option("--device-kind", metavar="KIND", help="auto, cpu or cuda")] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="measured at once (default: all GPUs, or cores)", show_default=False),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", metavar="DTYPE", help="bf16, fp16 or fp32; repeatable, activations have the first"),
    ] = None,
    micro_batch: Annotated[int, typer.Option("--micro-batch", metavar="N", min=1, help="samples for MODEL")] = 4,
    seq_len: options.SeqLen = None,
    quick: Annotated[bool, typer.Option("--quick", help="under a minute instead of two; coarser")] = False,
    steps: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help='fit the device of plans to measured steps: lines like {"plan": "plan.json", "step_time_s": 1.23}',
            show_default=False,
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure the devices here and write them as a device file for --device: matmuls, memory, attention, collectives.

    Every number says how it was measured. What a GPU run cannot tell stays as in the nearest preset, and says so.
    """
    from .calibrate import calibrate, check_device_output, print_calibration, save

    check_device_output(output)
    if steps is not None:
        _fit_to_steps(steps, output, quiet)
        return
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet) as waiting:
        profile, loaded = (None, None) if model is None else read_model(model, seq_len, waiting, needs_model=True)
        if model is not None and loaded is None:
            raise ValueError(f"calibrate runs the model, and {model} is only its profile: give the model itself")
        waiting("measuring")
        found = calibrate(device_kind, ranks, quick, dtype or (), loaded, profile, micro_batch)
    save(found.device, output)
    if not quiet:
        console = terminal.make_console()
        print_calibration(console, found)
        terminal.print_next(
            console,
            [str(output)],
            [(f"plan MODEL --gpus {found.num_ranks} --device {output}", "plans for what was measured")],
        )


def _fit_to_steps(steps: Path, output: Path, quiet: bool) -> None:
    """Write the device of the plans in `steps`, fitted to their measured step times."""
    from .calibrate import fitted_to, print_steps, save
    from .measured_steps import load_measured_steps

    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet) as waiting:
        runs = load_measured_steps(steps, lambda plan, source: read_model(source, plan.training.seq_len, waiting)[0])
        cluster = runs[0].plan.cluster
        links = {"link": cluster.link, "network": cluster.network}
        device, checks = fitted_to(cluster.device.model_copy(update=links), runs)
    save(device, output)
    if not quiet:
        console = terminal.make_console()
        print_steps(console, checks, f"{device.name}, fitted to {len(checks)} measured steps", "predicted before")
        terminal.print_next(console, [str(output)], [(f"plan MODEL --device {output}", "plans with what was learned")])


@_verify.command()
def _verify_command(
    plan: options.PlanFile,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="the model, if it is not where the plan says", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="optimizer steps to compare")] = 3,
    quiet: options.Quiet = False,
) -> None:
    """Run PLAN on processes of this machine beside one process: same loss, gradients and parameters, or the first
    tensor that differs. A small version of the model is used where there is one."""
    document = _read_plan(plan, to_run=True)
    source = model or document.model.source
    _check_source(source, "--model says where the model is")
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet) as waiting:
        from ..profiler.load import load_model
        from .verify import verify

        waiting("loading the model")
        loaded = load_model(source, document.training.seq_len)
        waiting("running the plan beside one process")
        report = verify(document, loaded, steps=steps)
    console = terminal.make_console()
    for line in report.lines:
        console.print(line, markup=False)
    if not report.ok:
        raise SystemExit(_DIFFERENT_NUMBERS)


@_show.command()
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
    document = _read_plan(plan)
    estimate = None
    profile = None
    if model is not None:
        from ..planner.estimate import estimate as estimate_plan

        with redirect_stdout(sys.stderr), terminal.Waiting(quiet=as_json) as waiting:
            profile, _ = read_model(model, document.training.seq_len, waiting, not no_cache)
        if profile.fingerprint != document.model.fingerprint:
            raise ValueError(
                f"{model} is not the model that {plan} was made for ({document.model.name}, "
                f"fingerprint {document.model.fingerprint}; found {profile.fingerprint}): plan again"
            )
        estimate = estimate_plan(document, profile)
    if as_json:
        terminal.write_json(document.model_dump_json())
        return
    console = terminal.make_console()
    terminal.print_job(console, document)
    terminal.print_choice(console, document, None)
    prediction = document.prediction
    if estimate is not None:
        _print_estimate(console, document, estimate)
    elif prediction is not None:
        rate = _rate_name(document)
        from ..planner.estimate import MFU_CONVENTION

        terminal.print_speed(
            console, prediction.step_time_s, prediction.tokens_per_s, prediction.mfu, rate, MFU_CONVENTION
        )
        terminal.print_memory_totals(console, document)
    terminal.print_placement(console, document)
    terminal.print_certificate(console, document)


def read_cluster(
    gpus_text: str | None, device: str | None, gpus_per_node: int | None, cluster_file: Path | None
) -> ClusterSpec:
    """The cluster that the flags describe; what they leave open is taken from this machine, or assumed and noted."""
    gpus = None if gpus_text is None else _whole_number("--gpus", gpus_text, "8")
    if cluster_file is not None:
        if device is not None or gpus_per_node is not None:
            extra = "--device" if device is not None else "--gpus-per-node"
            raise ValueError(f"--cluster {cluster_file} says which devices there are: leave out {extra}")
        cluster = load_cluster(cluster_file)
        if gpus is not None and gpus != cluster.num_devices:
            raise ValueError(f"--gpus {gpus}, but {cluster_file} has {cluster.num_devices} devices: leave out --gpus")
        return cluster
    if device is not None:
        if gpus is None:
            raise ValueError("say how many GPUs, for example --gpus 8 (or give a --cluster file)")
        return cluster_of(load_device(device), gpus, gpus_per_node)
    here = local_gpus()
    if gpus is None and not here:
        raise ValueError("no GPU here, so say how many to plan for: for example --gpus 8 (or give a --cluster file)")
    name, assumption = _assumed_device(here, gpus)
    cluster = cluster_of(load_device(name), gpus or len(here), gpus_per_node)
    return cluster.model_copy(update={"assumption": assumption})


def _whole_number(flag: str, text: str, example: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{flag} {text}: give a whole number of at least 1, for example {flag} {example}")
    return number


def _assumed_device(here: list[tuple[str, float]], gpus: int | None) -> tuple[str, str]:
    """(preset, what is assumed about it) when the user names no device."""
    if not here:
        return DEFAULT_DEVICE, f"{DEFAULT_DEVICE}: no GPU here; --device changes it (`plan devices` lists them)"
    found, memory_mib = here[0]
    preset = preset_of(found, memory_mib)
    if preset is None:
        return DEFAULT_DEVICE, f"{DEFAULT_DEVICE}: no preset for the {found} here; --device takes a preset or your TOML"
    if gpus is None or gpus <= len(here):
        return preset, f"{preset}: found {len(here)} x {found} here; --device changes it"
    return preset, f"{preset}: found {len(here)} x {found} here, the others taken as alike; --device changes it"


_MODEL_RULE = "MODEL is a model.py, file.py:function, config.json or profile.json"


def read_model(
    source: str,
    seq_len: int | None,
    waiting: terminal.Waiting,
    use_cache: bool = True,
    needs_model: bool = False,
    lengths: bool = False,
) -> tuple[ModelProfile, "LoadedModel | None"]:
    """(profile, the model itself or None). lengths: the profile is to hold at any sequence length.

    None where the source is a saved profile, or where its profile was kept from an earlier call and the model is not
    needed: neither needs torch.
    """
    path = _check_source(source, _MODEL_RULE)
    kind = _json_kind(path)
    if kind == "meshwright-plan":
        raise ValueError(f"{source} is a plan, not a model: look at it with `plan show {source}`")
    if kind == "meshwright-profile":
        profile = load_profile(path)
        return profile if seq_len is None else at_seq_len(profile, seq_len), None
    cache = ProfileCache(source, seq_len, lengths) if use_cache else None
    kept = None if cache is None else cache.look_up()
    if kept is not None:
        waiting.say(f"profile of {terminal.age(kept.age_s)} ago, nothing has changed since; --no-cache makes it anew")
        if not needs_model:
            return kept.profile, None
    waiting("loading torch and the model")
    from ..profiler.load import load_model
    from ..profiler.trace import trace

    if kept is not None:
        return kept.profile, load_model(source, seq_len)
    with nullcontext() if cache is None else cache.recording() as recording:
        loaded = load_model(source, seq_len)
        waiting("profiling the model on fake tensors")

        def progress(layer: str, done: int, total: int) -> None:
            waiting(f"profiling {layer}", done / total)

        profile = trace(loaded, lengths=lengths, progress=progress)
    reason = "" if cache is None or recording is None else cache.keep(profile, recording)
    if reason:
        waiting.say(f"the profile is not kept for the next call: {reason}")
    return profile, loaded


def read_training(
    profile: ModelProfile,
    cluster: ClusterSpec,
    global_batch: int | None,
    seq_len: int | None,
    precision: options.Precision | None,
    optimizer: options.Optimizer,
    software: str,
    memory_margin: float,
) -> tuple[TrainingSpec, list[str]]:
    """(the job, what was assumed about it and about the cluster, each with the flag that changes it)."""
    assumptions = [] if cluster.assumption is None else [cluster.assumption]
    batch = global_batch or profile.global_batch
    if batch is None:
        batch = SAMPLES_PER_GPU * cluster.num_devices
        assumptions.append(f"global batch {batch:,}: {SAMPLES_PER_GPU} samples per GPU; --global-batch changes it")
    elif global_batch is None:
        assumptions.append(f"global batch {batch:,}: the model file's own; --global-batch changes it")
    if precision is None:
        precision = options.Precision.BF16 if cluster.device.computes_bf16 else options.Precision.FP32
    training = TrainingSpec(
        global_batch=batch,
        seq_len=profile.seq_len,
        precision=precision.value,
        optimizer=optimizer.value,
        software=load_software(software).name,
        memory_margin=memory_margin,
    )
    return training, assumptions


@contextmanager
def _named_outcomes() -> Iterator[None]:
    """Exit codes and sentences for what a search can end with."""
    from ..planner.search import InfeasibleError, SolverError

    try:
        yield
    except InfeasibleError as error:
        terminal.print_infeasible(error)
        raise SystemExit(_DOES_NOT_FIT) from None
    except SolverError as error:
        terminal.print_error(str(error))
        raise SystemExit(_BAD_INPUT) from None


def _search(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    pins: Any,
    time_limit_s: float,
    waiting: terminal.Waiting,
) -> "SearchResult":
    from ..planner.search import search

    waiting("searching")
    with _named_outcomes():
        return search(profile, cluster, training, pins=pins, time_limit_s=time_limit_s, progress=waiting)


def _check_result(result: "SearchResult", profile: ModelProfile, pins: "Pins") -> None:
    """The independent check, before anything is written: a violation is a mistake of the planner, never the user's.
    That the executor does not run something yet is one, too, unless it was asked for."""
    from ..planner.check import check

    violations = check(result.plan, profile, to_run=not pins.may_go_beyond)
    if violations:
        raise AssertionError("the plan breaks its own limits: " + "; ".join(violations))


def _read_plan(path: Path, *, to_run: bool = False) -> Plan:
    """A plan that passes the independent check. to_run: also that the executor runs all of it."""
    from ..planner.check import check

    document = load_plan(path)
    violations = check(document, to_run=to_run)
    if violations:
        raise ValueError(f"{path} breaks a limit: {violations[0]}; make it again with: plan MODEL -o {path}")
    return document


def _check_source(source: str, rule: str) -> Path:
    """The file that `source` names. Raises ValueError with the nearest names if it is not there."""
    path = Path(source)
    if not path.exists() and ".py:" in source:
        path = Path(source.partition(".py:")[0] + ".py")
    if path.exists():
        return path
    folder = path.parent if path.parent.is_dir() else Path()
    names = [p.name for p in folder.iterdir() if p.suffix in (".py", ".json") or p.is_dir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    hint = f"did you mean {folder / near[0]}?" if near else rule
    raise ValueError(f"no such file: {path}; {hint}")


def _json_kind(path: Path) -> str | None:
    """The "kind" of a JSON document of ours; None for anything else."""
    if path.suffix not in (".json", "") or not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if path.suffix == "":
            return None
        raise ValueError(
            f"{path} is not JSON ({error}); MODEL is a model.py, a config.json or a profile.json"
        ) from None
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def _check_output(path: Path | None, kind: str) -> None:
    """Raises ValueError if writing `path` is impossible or would replace a file that is not of this kind."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else f"lies in no folder: {path.parent} does not exist"
        raise ValueError(f"-o {path} {found}; give a file name in a folder that exists")
    if path.exists():
        try:
            found_kind = _json_kind(path)
        except ValueError:
            found_kind = None
        if found_kind != kind:
            raise ValueError(f"{path} exists and is no {kind} document, so it is not replaced: choose another -o")


def _rate_name(plan: Plan) -> str:
    return "samples/s" if plan.training.seq_len is None else "tokens/s"


def _print_plan(
    console: Console,
    result: "SearchResult",
    profile: ModelProfile,
    assumptions: list[str],
    target: Path | None,
    quiet: bool,
) -> None:
    from ..planner.explain import batch_advice

    plan, estimate = result.plan, result.estimate
    terminal.print_assumptions(console, assumptions)
    terminal.print_job(console, plan)
    others = [*result.runners_up, *result.baselines]
    terminal.print_choice(console, plan, estimate.step_time_s, others)
    if not quiet:
        replicas = next((c.verdict for c in result.baselines if c.label == "DDP"), None)
        _print_estimate(console, plan, estimate, replicas)
        terminal.print_placement(console, plan)
        terminal.print_candidates(console, "Best alternatives", result.runners_up[:5])
        terminal.print_candidates(console, "What people usually try", result.baselines)
        terminal.print_notes(console, [*profile.notes, *batch_advice(plan)])
        terminal.print_certificate(console, plan)
    if target is not None:
        run = [
            (f"plan verify {target}", "same numbers as one device, on processes of this machine"),
            (launch_command(plan, "train.py"), "train.py as in the README, section Train"),
        ]
        terminal.print_next(console, [str(target)], [] if not_run(plan) else run)


def _print_estimate(console: Console, plan: Plan, estimate: "Estimate", replicas: str | None = None) -> None:
    from ..planner.bands import memory_band, time_band
    from ..planner.explain import reason

    rate, band = _rate_name(plan), time_band(plan)
    terminal.print_speed(
        console, estimate.step_time_s, estimate.tokens_per_s, estimate.mfu, rate, estimate.mfu_convention, band
    )
    terminal.print_breakdown(console, estimate)
    terminal.print_why(console, reason(plan, estimate, replicas))
    terminal.print_memory(console, estimate.memory, plan.training.memory_margin, memory_band(plan))
