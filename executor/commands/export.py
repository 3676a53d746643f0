"""The commands `plan export` (a plan for another framework) and `plan check` (another framework's set-up, priced)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.text import Text

from ...planner.answers.verdict import FITS, THE_PLAN
from ...planner.cost.software import load_software
from ...planner.exchange.targets import NAMES, TARGETS
from ...planner.plan.training import Precision, TrainingSpec
from ...profiler.machine.units import format_bytes, format_seconds
from ...profiler.model.adapters import with_lora
from .. import api
from ..reporting import terminal
from ..reporting.documents import check_document
from . import inputs, options
from .answers import DOES_NOT_FIT, at_work
from .option_groups import grouped

if TYPE_CHECKING:
    from ...planner.answers.candidate import Candidate
    from ...planner.answers.search import SearchResult
    from ...planner.answers.verdict import Verdict
    from ...planner.exchange.given import Kind
    from ...planner.exchange.imports import Imported, Layout
    from ...profiler.machine.cluster import ClusterSpec
    from ...profiler.model.model_profile import ModelProfile

_PRECISIONS: tuple[Precision, ...] = get_args(Precision)

export_app, check_app = (options.new_app() for _ in range(2))


@export_app.command()
def _export_command(
    plan: options.PlanFile,
    to: Annotated[str, typer.Option("--to", metavar="TARGET", help=", ".join(TARGETS))],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="where it goes (default: printed)"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write PLAN as settings of another framework: Megatron-LM arguments, torchtitan flags, an Accelerate YAML (FSDP2)
    or a DeepSpeed JSON. What the target cannot do is refused with a reason; what its settings do not say is printed."""
    found = api.load(plan).export(to, output)
    if as_json:
        written = {"target": found.target, "words": list(found.words), "document": dict(found.document)}
        terminal.write_json(json.dumps({**written, "notes": list(found.notes), "text": found.text}))
        return
    if output is None:
        terminal.write_json(found.text.rstrip("\n"))
        return
    console = terminal.make_console()
    terminal.print_notes(console, [f"not said in {output}: {note}" for note in found.notes])
    terminal.print_next(console, [f"{output}: the layout for {NAMES[found.target]}"], [])


@check_app.command()
@grouped
def _check_command(
    model: options.Model,
    lora: options.Lora = None,
    gpus: options.Gpus = None,
    megatron: Annotated[
        str | None,
        typer.Option(
            "--megatron-args", metavar="ARGS", help="Megatron-LM arguments, or a file: the script that launches it, too"
        ),
    ] = None,
    torchtitan: Annotated[
        str | None,
        typer.Option(
            "--torchtitan-args",
            metavar="ARGS",
            help="torchtitan flags, or a file: its launch script, a TOML, or config_registry.py:function",
        ),
    ] = None,
    accelerate: Annotated[
        Path | None,
        typer.Option("--accelerate", metavar="FILE", help="an Accelerate configuration (YAML)"),
    ] = None,
    deepspeed: Annotated[
        Path | None,
        typer.Option("--deepspeed", metavar="FILE", help="a DeepSpeed configuration (JSON)"),
    ] = None,
    *,
    machine: options.MachineOptions,
    global_batch: options.GlobalBatch = None,
    nemo: Annotated[
        Path | None,
        typer.Option("--nemo", metavar="FILE", help="a recipe of NeMo or Megatron-Bridge (Python or YAML)"),
    ] = None,
    seq_len: options.SeqLen = None,
    micro_batch: options.MicroBatch = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="NAME", help=f"where the settings leave it open: {', '.join(_PRECISIONS)}"),
    ] = None,
    optimizer: Annotated[
        options.Optimizer | None, typer.Option("--optimizer", help="where the settings leave it open (default: adamw)")
    ] = None,
    memory_margin: options.Margin = None,
    memory_risk: options.Risk = None,
    software: Annotated[
        str | None,
        typer.Option("--software", metavar="NAME", help="training stack to predict (default: the target's)"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="the set-up as a plan.json"),
    ] = None,
    time_limit: options.TimeLimit = 60.0,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
) -> None:
    """Price a set-up that you run today: step time, memory, whether it fits, and the better plan beside it.

    Both are priced for the same training stack, global batch and precision. Exit code 3: the set-up does not fit.
    """
    from ...planner.exchange.given import read_given
    from ...planner.exchange.imports import Said, imported, with_flags

    settings: dict[Kind, str | Path | None] = {
        "megatron": megatron,
        "nemo": nemo,
        "torchtitan": torchtitan,
        "accelerate": accelerate,
        "deepspeed": deepspeed,
    }
    said = [(kind, str(value)) for kind, value in settings.items() if value is not None]
    if len(said) != 1:
        raise ValueError(
            "give one of --megatron-args, --nemo, --torchtitan-args, --accelerate and --deepspeed; for example "
            '--megatron-args "--tensor-model-parallel-size 8 --micro-batch-size 1"'
        )
    check_document(output, "meshwright-plan")
    if precision is not None and precision not in _PRECISIONS:
        raise ValueError(f"--precision {precision}: choose {', '.join(_PRECISIONS)}")
    given = read_given(*said[0])
    if machine.gpus is None and machine.cluster is None and given.num_devices is not None:
        machine = replace(machine, gpus=str(given.num_devices))
    devices = inputs.read_cluster(machine)
    flags = Said(
        precision=next((name for name in _PRECISIONS if name == precision), None),
        micro_batch=micro_batch,
        global_batch=global_batch,
        seq_len=seq_len,
        sgd=None if optimizer is None else optimizer is options.Optimizer.SGD,
    )
    model = with_lora(model, lora)
    with at_work(as_json) as waiting:
        profile, _ = inputs.read_model(model, seq_len, waiting, not no_cache)
        layout = with_flags(given.layout(devices.num_devices, profile), flags)
        if layout.seq_len is not None and layout.seq_len != profile.seq_len:
            waiting(f"the model at {layout.seq_len} tokens per sample")
            profile, _ = inputs.read_model(model, layout.seq_len, waiting, not no_cache)
        training, assumptions = _training(layout, profile, devices, software, memory_margin, memory_risk)
        found = imported(layout, profile, devices, training)
        if output is not None:
            found.plan.save(output)
        result = _better(layout, found, profile, devices, training, time_limit, waiting)
    candidates = _candidates(layout, found, result)
    if as_json:
        terminal.write_json(json.dumps(_document(layout, found, result, candidates, assumptions)))
    else:
        _print(terminal.make_console(), layout, found, result, candidates, assumptions, output)
    if not found.estimate.fits:
        raise SystemExit(DOES_NOT_FIT)


def _training(
    layout: "Layout",
    profile: "ModelProfile",
    machine: "ClusterSpec",
    software: str | None,
    memory_margin: float | None,
    memory_risk: float | None,
) -> tuple[TrainingSpec, list[str]]:
    """(the job that the settings say, what is assumed about the rest)."""
    stack = load_software(software or layout.software).name
    optimizer = options.Optimizer.SGD if layout.sgd else options.Optimizer.ADAMW
    computes = options.StackOptions(
        optimizer=optimizer, software=stack, memory_margin=memory_margin, memory_risk=memory_risk
    )
    training, assumptions = inputs.read_training(profile, machine, layout.global_batch, computes)
    if layout.precision is not None:
        training = training.model_copy(update={"precision": layout.precision})
    return training, [*assumptions, f"priced as {stack}; --software changes it"]


def _better(
    layout: "Layout",
    found: "Imported",
    profile: "ModelProfile",
    machine: "ClusterSpec",
    training: TrainingSpec,
    time_limit: float,
    waiting: terminal.Waiting,
) -> "SearchResult | str":
    """The best plan for the same job that the same framework runs, the set-up among them, or why there is none."""
    from ...planner.answers.search import InfeasibleError, SolverError, adopted, search
    from ...planner.plan.frameworks import FRAMEWORKS
    from ...planner.plan.pins import Pins

    framework = FRAMEWORKS[layout.target]
    pins = Pins(framework=framework if framework.cannot_run(profile, training) is None else None)
    waiting("searching")
    try:
        result = search(
            profile, machine, training, pins=pins, time_limit_s=time_limit, progress=waiting, beside_open=False
        )
    except (InfeasibleError, SolverError) as error:
        return str(error)
    return adopted(result, [_yours(layout, found, FITS)]) if found.estimate.fits else result


def _yours(layout: "Layout", found: "Imported", verdict: "Verdict") -> "Candidate":
    from ...planner.answers.candidate import Candidate

    step_s = found.estimate.step_time_s
    return Candidate(f"yours ({NAMES[layout.target]})", found.plan, found.estimate, verdict, step_s)


def _candidates(layout: "Layout", found: "Imported", result: "SearchResult | str") -> "list[Candidate]":
    """The planned layout, and the set-up beside it with its verdict."""
    from ...planner.answers.candidate import Candidate
    from ...planner.answers.explain import compared, does_not_fit

    if not found.estimate.fits:
        verdict = does_not_fit(found.plan, found.estimate)
    elif isinstance(result, str):
        verdict = FITS
    else:
        verdict = compared(found.estimate, result.estimate)
    yours = _yours(layout, found, verdict)
    if isinstance(result, str):
        return [yours]
    planned = Candidate("planned", result.plan, result.estimate, THE_PLAN, result.estimate.step_time_s)
    return [planned, yours]


def _document(
    layout: "Layout",
    found: "Imported",
    result: "SearchResult | str",
    candidates: "list[Candidate]",
    assumptions: list[str],
) -> dict[str, object]:
    from ..reporting.report import candidate_document

    return {
        "kind": "meshwright-check",
        "target": layout.target,
        "fits": found.estimate.fits,
        "setups": [candidate_document(candidate) for candidate in candidates],
        "ignored": list(layout.ignored),
        "notes": [*layout.notes, *assumptions, *([result] if isinstance(result, str) else [])],
    }


def _print(
    console: Console,
    layout: "Layout",
    found: "Imported",
    result: "SearchResult | str",
    candidates: "list[Candidate]",
    assumptions: list[str],
    output: Path | None,
) -> None:
    from ..reporting.report import choice_in_words

    terminal.print_assumptions(console, assumptions)
    if layout.ignored:
        terminal.print_notes(console, [f"ignored, no part of the layout: {', '.join(layout.ignored)}"])
    terminal.print_notes(console, list(layout.notes))
    terminal.print_job(console, found.plan)
    worst = max(found.estimate.memory, key=lambda stage: stage.over_bytes)
    room = f"{format_bytes(worst.device_bytes)} of {format_bytes(worst.budget_bytes)} on the fullest GPU"
    step = f"{format_seconds(found.estimate.step_time_s)} a step, MFU {found.estimate.mfu:.1%}, {room}"
    console.print(terminal.hanging("yours", Text(f"{choice_in_words(found.plan)}\n{step}"), "default"))
    if isinstance(result, str):
        planned = f"nothing: {result}"
    else:
        gain = found.estimate.step_time_s / result.estimate.step_time_s
        told = f", {gain:.2f} times as fast as yours" if found.estimate.fits else ""
        runs = "" if result.certificate.framework is None else f", on {NAMES[layout.target]}, too"
        planned = f"{choice_in_words(result.plan)}\n{format_seconds(result.estimate.step_time_s)} a step{told}{runs}"
        if result.estimate is found.estimate:
            planned = "yours: nothing faster was found"
    console.print(terminal.hanging("planned", Text(planned), "default"))
    reference = None if isinstance(result, str) else result.estimate.step_time_s
    terminal.print_comparison(console, candidates, reference)
    terminal.print_memory(console, found.plan, found.estimate.memory)
    terminal.print_losses(console, candidates, found.plan.cluster.price_per_hour)
    written = [] if output is None else [f"{output}: your set-up as a plan"]
    terminal.print_next(console, written, [])
