"""The commands `plan explain` (why this plan, and why not another) and `plan sweep` (what if)."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..planner.software import REFERENCE
from ..planner.training import SAMPLES_PER_GPU
from . import cli_options as options
from . import terminal

if TYPE_CHECKING:
    from ..planner.asked import Answer
    from ..planner.estimate import Estimate
    from ..planner.guidance import NoCandidate
    from ..planner.plan import Plan
    from ..planner.tutorial import Lesson
    from ..planner.walk import Step
    from ..profiler.cluster import ClusterSpec
    from ..profiler.model_profile import ModelProfile

explain_app, sweep_app = (
    typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich") for _ in range(2)
)

_BYTES_PER_PARAMETER = 4


@explain_app.command()
def _explain_command(
    source: Annotated[
        str,
        typer.Argument(metavar="PLAN|MODEL", help="a plan.json, or a model that is planned first", show_default=False),
    ],
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            "--why-not",
            metavar="LAYOUT",
            help='a layout as in compare --setup: "tp=8", fsdp, "pp=4 zero=1", megatron, other.json; repeatable',
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="of a PLAN: its model, if it is not where it says", show_default=False
        ),
    ] = None,
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
    space: options.SpaceFlag = options.SpaceOf.RUN,
    time_limit: options.TimeLimit = 60.0,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Say why the plan is what it is: the questions people are told to ask, answered with this model's numbers.

    With --why-not: why a layout is not the plan: illegal by which rule, over memory on which stage, or how much slower.
    """
    from ..planner.guidance import no_candidates
    from ..planner.pins import read_pins
    from ..planner.tutorial import lessons
    from ..planner.walk import walk
    from . import cli

    assumptions: list[str] = []
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet or as_json) as waiting:
        if _is_plan(source):
            plan, found, profile = _of_plan(Path(source), model, waiting, no_cache)
        else:
            machine = cli.read_cluster(gpus, device, gpus_per_node, cluster)
            pins = read_pins(pin or (), everything=space is options.SpaceOf.FULL)
            profile, _ = cli.read_model(source, seq_len, waiting, not no_cache)
            training, assumptions = cli.read_training(
                profile, machine, global_batch, seq_len, precision, optimizer, software, memory_margin
            )
            result = cli._search(profile, machine, training, pins, time_limit, waiting)
            plan, found = result.plan, result.estimate
        waiting("asking")
        answers = _answers(why_not or [], plan, found, profile, time_limit)
        steps = () if why_not else walk(plan, found, profile, time_limit)
        taught = () if why_not else lessons(plan, found, profile)
    excluded = no_candidates(_BYTES_PER_PARAMETER * profile.num_parameters, plan.cluster.num_devices)
    if as_json:
        terminal.write_json(json.dumps(_explained(plan, found, answers, steps, taught, excluded)))
        return
    console = terminal.make_console()
    terminal.print_assumptions(console, assumptions)
    terminal.print_job(console, plan)
    terminal.print_choice(console, plan, None)
    if answers:
        for answer in answers:
            console.print()
            console.print(terminal.hanging(answer.kind, Text(answer.sentence), _STYLES[answer.kind]))
        return
    _print_steps(console, steps)
    for lesson in taught:
        console.print()
        console.print(terminal.hanging("lesson", Text(lesson.sentence), "cyan"))
    _print_rejected(console, plan)
    console.print()
    for each in excluded:
        console.print(terminal.hanging("never", Text(f"{each.name}: {each.reason}"), "dim"))


_STYLES = {
    "illegal": "red",
    "does not fit": "red",
    "not found": "yellow",
    "slower": "yellow",
    "as fast": "green",
    "faster": "green",
    "the plan": "green",
}


def _is_plan(source: str) -> bool:
    from . import cli

    path = Path(source)
    return path.suffix == ".json" and path.exists() and cli._json_kind(path) == "meshwright-plan"


def _of_plan(
    path: Path, model: str | None, waiting: terminal.Waiting, no_cache: bool
) -> "tuple[Plan, Estimate, ModelProfile]":
    """A saved plan, priced, with its model's profile."""
    from ..planner.estimate import estimate
    from . import cli
    from .commands_report import _profile_of

    plan = cli._read_plan(path)
    profile = _profile_of(plan, path, model, waiting, no_cache)
    return plan, estimate(plan, profile), profile


def _answers(
    texts: list[str], plan: "Plan", found: "Estimate", profile: "ModelProfile", seconds: float
) -> "list[Answer]":
    """Why the plan is not each of these layouts. Raises ValueError that says which word is wrong."""
    from ..planner.asked import why_not, why_not_plan
    from ..planner.explore import Explorer
    from ..planner.guidance import named_rules
    from ..planner.plan import load_plan
    from ..planner.search import pins_of
    from ..planner.setups import parse_setup

    explorer = Explorer(profile, plan.cluster, plan.training)
    frameworks = {rule.name: rule.attempts for rule in named_rules(plan.cluster, profile)}
    count, per_host = plan.cluster.num_devices, plan.cluster.devices_per_host

    def answer(text: str) -> "Answer":
        if text.strip().endswith(".json"):
            return why_not_plan(explorer, text, load_plan(Path(text.strip())), plan, found)
        attempts = frameworks.get(text.strip().lower()) or (pins_of(parse_setup(text, count, per_host, "--why-not")),)
        return why_not(explorer, text, attempts, plan, found, seconds)

    return [answer(text) for text in texts]


def _explained(
    plan: "Plan",
    found: "Estimate",
    answers: "list[Answer]",
    steps: "tuple[Step, ...]",
    taught: "tuple[Lesson, ...]",
    excluded: "tuple[NoCandidate, ...]",
) -> dict[str, Any]:
    from ..planner.strategy import shape_of

    return {
        "plan": {"layout": shape_of(plan).label, "step_time_s": found.step_time_s},
        "why_not": [
            {
                "asked": answer.asked,
                "kind": answer.kind,
                "sentence": answer.sentence,
                "step_time_s": None if answer.estimate is None else answer.estimate.step_time_s,
                "breakdown": None if answer.estimate is None else answer.estimate.breakdown,
            }
            for answer in answers
        ],
        "questions": [asdict(step) for step in steps],
        "lessons": [
            {"split": lesson.name, "sentence": lesson.sentence, "step_time_s": lesson.estimate.step_time_s}
            for lesson in taught
        ],
        "rejected": {} if plan.certificate is None else plan.certificate.rejected,
        "no_candidates": [asdict(each) for each in excluded],
    }


def _print_steps(console: Console, steps: "tuple[Step, ...]") -> None:
    for step in steps:
        console.print()
        console.print(terminal.hanging("ask", Text(step.question.asks, style="bold"), "cyan"))
        console.print(terminal.hanging("yes" if step.yes else "no", Text(step.numbers), "cyan"))
        if not step.yes:
            continue
        console.print(terminal.hanging("advice", Text(step.question.advice), "dim"))
        style = "green" if step.agrees else "yellow"
        console.print(terminal.hanging("plan", Text(step.verdict, style=style), "cyan"))


def _print_rejected(console: Console, plan: "Plan") -> None:
    """What the search excluded by rule, most shapes first."""
    rejected = {} if plan.certificate is None else plan.certificate.rejected
    if rejected:
        ranked = sorted(rejected.items(), key=lambda item: -item[1])[:8]
        rows = [(rule, f"{count:,}") for rule, count in ranked]
        terminal.print_rows(console, "Excluded by rule", ("rule", "shapes"), rows)


@sweep_app.command()
def _sweep_command(
    model: options.Model,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "-g",
            metavar="N,N,...",
            help="numbers of GPUs (default with --cluster: 1, 2, 4, ... of its hosts)",
            show_default=False,
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
            show_default=False,
        ),
    ] = None,
    scale_batch: Annotated[
        bool,
        typer.Option("--scale-batch", help="--global-batch is that of the fewest GPUs, and grows with them"),
    ] = False,
    prices: Annotated[
        bool, typer.Option("--prices", help="also what more memory, bandwidth and compute would be worth at each point")
    ] = False,
    price_per_hour: Annotated[
        float | None,
        typer.Option("--price-per-hour", metavar="USD", min=0.0, help="of one GPU (default: the device file's)"),
    ] = None,
    device: options.Device = None,
    gpus_per_node: options.PerNode = None,
    cluster: options.ClusterFile = None,
    precision: options.PrecisionFlag = None,
    optimizer: options.OptimizerFlag = options.Optimizer.ADAMW,
    software: options.SoftwareFlag = REFERENCE,
    memory_margin: options.Margin = 0.05,
    pin: options.Pin = None,
    most: options.Most = None,
    forbid: options.Forbid = None,
    space: options.SpaceFlag = options.SpaceOf.RUN,
    time_limit: options.TimeLimit = 60.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="also write it: .png, .html or .json", show_default=False),
    ] = None,
    as_json: options.Json = False,
    no_cache: options.NoCache = False,
    quiet: options.Quiet = False,
) -> None:
    """Plan MODEL at every number of GPUs and sequence length: step time, cost, and where the kind of plan changes.

    The global batch is the same at all points unless you give one for each number of GPUs, or --scale-batch.
    """
    from ..planner.pins import read_pins
    from ..planner.sweep import marginal_prices, robustness, sweep
    from . import cli
    from .sweep_report import Worth, check_target, print_sweep, sweep_document, write

    if output is not None:
        check_target(output)
    machines = _machines(gpus, device, gpus_per_node, cluster)
    counts = [machine.num_devices for machine in machines]
    lengths: list[int | None] = [*_numbers("--seq-len", seq_len)] if seq_len else [None]
    pins = read_pins(pin or (), most or (), forbid or (), everything=space is options.SpaceOf.FULL)
    with redirect_stdout(sys.stderr), terminal.Waiting(quiet=quiet or as_json) as waiting:
        profiles = [cli.read_model(model, length, waiting, not no_cache)[0] for length in lengths]
        batches, notes = _batches(global_batch, counts, profiles[0].global_batch, scale_batch)
        jobs = []
        for profile in profiles:
            for machine, batch in zip(machines, batches, strict=True):
                training, _ = cli.read_training(
                    profile, machine, batch, profile.seq_len, precision, optimizer, software, memory_margin
                )
                jobs.append((profile, machine, training))
        points = sweep(jobs, pins, time_limit, waiting)
        worth = []
        for point in points if prices else ():
            waiting(f"pricing what more of each resource is worth on {point.num_devices:,} GPUs")
            worth.append(Worth(marginal_prices(point, pins), robustness(point)))
    price = price_per_hour if price_per_hour is not None else machines[0].device.price_per_hour
    document = sweep_document(points, worth, notes, price)
    if output is not None:
        write(output, points, document, price)
    if as_json:
        terminal.write_json(json.dumps(document))
        return
    console = terminal.make_console()
    if machines[0].assumption is not None:
        terminal.print_assumptions(console, [machines[0].assumption])
    print_sweep(console, points, worth, notes, price)
    if output is not None:
        terminal.print_next(console, [str(output)], [])


def _numbers(flag: str, text: str) -> list[int]:
    """Whole numbers between commas. Raises ValueError that names the wrong one."""
    from . import cli

    return [cli._whole_number(flag, word.strip(), "8,16,32") for word in text.split(",")]


def _machines(
    gpus: str | None, device: str | None, gpus_per_node: int | None, file: Path | None
) -> "list[ClusterSpec]":
    """The cluster of every point: as many GPUs as said, or parts of a cluster file. Raises ValueError."""
    from ..planner.infeasible import grown
    from . import cli

    if file is None:
        if gpus is None:
            raise ValueError("say for how many GPUs, for example --gpus 8,16,32 (or give a --cluster file)")
        return [cli.read_cluster(str(count), device, gpus_per_node, None) for count in _numbers("--gpus", gpus)]
    whole = cli.read_cluster(None, device, gpus_per_node, file)
    per_host, most = whole.devices_per_host, whole.num_devices
    alike = len({(group.device.name, group.devices_per_host, group.link) for group in whole.hosts}) == 1
    if gpus is None:
        doublings = [per_host << power for power in range(most.bit_length()) if per_host << power < most]
        counts = [*doublings, most] if alike else [most]
    else:
        counts = _numbers("--gpus", gpus)
    for count in counts:
        if count > most:
            raise ValueError(f"--gpus {count}, but {file} has {most} devices: ask for no more of them")
        if count != most and not alike:
            raise ValueError(
                f"--gpus {count}: the hosts of {file} differ, so which of its {most} devices are meant is open; leave "
                "out --gpus, or write a file for each part"
            )
        if count != most and count > per_host and count % per_host:
            raise ValueError(f"--gpus {count}: hosts of {file} have {per_host} devices each; give a multiple of that")
    return [whole if count == most else grown(whole, count) for count in counts]


def _batches(text: str | None, counts: list[int], own: int | None, scale: bool = False) -> tuple[list[int], list[str]]:
    """(global batch at each number of GPUs, what was assumed or must be said about it).

    own: the model file's. scale: the batch is that of the fewest GPUs, and grows with them. Raises ValueError where
    the numbers do not match those of GPUs.
    """
    if scale:
        return _scaled(text, counts, own)
    if text is None:
        batch = own or SAMPLES_PER_GPU * max(counts)
        whose = "the model file's own" if own else f"{SAMPLES_PER_GPU} samples per GPU of the largest"
        return [batch] * len(counts), [f"global batch {batch:,} at every point: {whose}; --global-batch changes it"]
    batches = _numbers("--global-batch", text)
    if len(batches) == 1:
        return batches * len(counts), []
    if len(batches) != len(counts):
        raise ValueError(
            f"--global-batch {text} has {len(batches)} numbers, --gpus has {len(counts)}: give one, or as many"
        )
    return batches, _convergence(batches, counts)


def _scaled(text: str | None, counts: list[int], own: int | None) -> tuple[list[int], list[str]]:
    """The same for a batch that grows in proportion to the GPUs."""
    fewest = min(counts)
    numbers = _numbers("--global-batch", text) if text else [own or SAMPLES_PER_GPU * fewest]
    if len(numbers) > 1:
        raise ValueError(f"--scale-batch takes the batch of the fewest GPUs; --global-batch {text} has several numbers")
    uneven = [count for count in counts if numbers[0] * count % fewest]
    if uneven:
        raise ValueError(
            f"--scale-batch: {numbers[0]} samples on {fewest} GPUs are {numbers[0] * uneven[0] / fewest:g} on "
            f"{uneven[0]}, no whole number; give --global-batch as a multiple of {fewest}"
        )
    batches = [numbers[0] * count // fewest for count in counts]
    return batches, _convergence(batches, counts)


def _convergence(batches: list[int], counts: list[int]) -> list[str]:
    """What must be said where the batch is not the same at all points."""
    if len(set(batches)) == 1:
        return []
    pairs = ", ".join(f"{batch:,} on {count:,}" for batch, count in zip(batches, counts, strict=True))
    return [
        f"the global batch changes with the GPUs ({pairs}): "
        "that changes convergence, so learning rate and number of steps must be tuned again, and tokens/s of different "
        "points do not compare as time to the same loss"
    ]
