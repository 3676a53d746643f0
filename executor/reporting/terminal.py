"""What people see: plans, alternatives, devices and progress, drawn with rich for terminals of 80 columns and up."""

import io
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ...planner.answers.verdict import VerdictKind
from ...planner.cost.bands import Band, memory_band, no_time_band, time_band
from ...planner.plan.document import Plan
from ...planner.plan.not_run import marked
from ...profiler.machine.cluster import Device
from ...profiler.machine.instances import Instance
from ...profiler.machine.units import GIB, counted, format_bytes, format_change, format_count, format_seconds
from .report import (
    against_others,
    axis_rows,
    certificate_line,
    choice_in_words,
    comparison_rows,
    gpus_of,
    layer_runs,
    loss_rows,
    splits_in_words,
    stacks_of,
    stage_names,
)

if TYPE_CHECKING:
    from ...planner.answers.candidate import Candidate
    from ...planner.answers.search import InfeasibleError
    from ...planner.cost.estimate import Estimate, StageMemory
    from .measured_report import MeasuredTable
    from .plan_diff import Cost, PlanDifference
    from .report_facts import Facts

_ITEMS = ("parameters", "gradients", "optimizer", "gathered", "activations", "transient")
_WIDE = 100
"""Columns of a terminal in which memory is shown beside device and budget of each stage, where they differ."""

_NARROWEST, _WIDEST = 80, 120
"""Columns that are drawn in."""

_HEADINGS = ("params", "grads", "optim", "gathered", "activ", "transient")
_BRIEF_CAUSES = {"recompute": "again", "optimizer": "optim", "pipeline": "pipe"}
"""Headings of causes in a terminal of 80 columns, where set-ups need room for their names."""

_QUIET_SECONDS = 1.0


def make_console(*, stderr: bool = False, record: bool = False) -> Console:
    """Console that is plain when piped, never wider than 120 columns, and for answers of at least 80: a narrower
    terminal breaks lines itself, where tables would lose digits. Words are what they are: names of a user's modules may
    look like markup."""
    console = Console(stderr=stderr, highlight=False, record=record, markup=False, emoji=False)
    narrowest = 1 if stderr else _NARROWEST  # of the bar, which is drawn over itself
    if not narrowest <= console.width <= _WIDEST:
        console.width = max(narrowest, min(console.width, _WIDEST))
    return console


def as_text(draw: Callable[[Console], None]) -> str:
    """What is drawn, as plain text of at most 100 columns: for str()."""
    console = Console(file=io.StringIO(), width=_WIDE, highlight=False, color_system=None)
    with console.capture() as capture:
        draw(console)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


class Waiting:
    """A progress bar on stderr that appears only when the work takes longer than a second, and then goes away."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = make_console(stderr=True)
        self._quiet = quiet
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._timer = threading.Timer(_QUIET_SECONDS, self._bar.start)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __call__(self, label: str, share_done: float | None = None) -> None:
        """Say what is being done; share_done between 0 and 1, or None where it is not known."""
        total = None if share_done is None else 1.0
        self._bar.update(self._task, description=label, total=total, completed=share_done or 0.0)

    def say(self, line: str) -> None:
        """A dim line on stderr, which stays; nothing when quiet."""
        if not self._quiet:
            self._bar.console.print(Text(line, style="dim"), soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bar.stop()


def age(seconds: float) -> str:
    """A time span in the largest unit of which there is one: "3 minutes"."""
    units = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))
    unit, length = next((unit for unit in units if seconds >= unit[1]), units[-1])
    count = int(seconds / length)
    return f"{count} {unit}{'' if count == 1 else 's'}"


def print_assumptions(console: Console, assumptions: Iterable[str]) -> None:
    """What was not said and therefore assumed, first of all."""
    for assumption in assumptions:
        console.print(hanging("assumes", Text(assumption), "yellow"))


def print_coupling(console: Console, coupling: str, micro_batch: int) -> None:
    """That the loss couples samples, which makes the micro-batch a part of what is trained."""
    if coupling:
        words = (
            f"the samples of a micro-batch see each other in the loss ({coupling}): here {micro_batch} do; another "
            "micro-batch trains something else"
        )
        console.print(hanging("couples", Text(words), "bold yellow"))


def print_job(console: Console, plan: Plan) -> None:
    """Model, machine and job in a line."""
    console.print(job_line(plan))


def job_line(plan: Plan) -> Text:
    """Model, machine and job."""
    training, cluster = plan.training, plan.cluster
    samples = f"global batch {training.global_batch:,}"
    if training.seq_len is not None:
        samples += f" x {training.seq_len:,} tokens"
    hosts = f"{cluster.num_hosts:,} host{'s' if cluster.num_hosts > 1 else ''}"
    parts = [
        f"{plan.model.name}, {format_count(plan.model.num_parameters)} parameters",
        f"{cluster.devices} on {hosts}",
        samples,
        f"{training.precision}, {training.optimizer}",
    ]
    return Text(" · ".join(parts), style="dim")


def print_choice(
    console: Console, plan: Plan, step_time_s: float | None, others: Sequence["Candidate"] | None = None
) -> None:
    """The choice in one sentence, with its reason where it was compared with others; what of it is not run yet; and
    how sequences and experts are split."""
    sentence = Text(choice_in_words(plan), style="bold green")
    if step_time_s is not None and others is not None:
        sentence.append(f": {against_others(plan, step_time_s, others).phrase}.", style="not bold default")
    console.print()
    console.print(sentence)
    if marked(plan):
        console.print(Text(f"  {marked(plan)}", style="bold yellow"), soft_wrap=True)
    for name, words in splits_in_words(plan).items():
        console.print(hanging(f"  {name}:", Text(words), "default"))


def print_speed(
    console: Console,
    step_time_s: float,
    tokens_per_s: float,
    mfu: float,
    rate: str,
    convention: str,
    band: Band | None = None,
) -> None:
    """Step time with its band, throughput, and MFU with its convention."""
    line = Text("  step time ")
    line.append(format_seconds(step_time_s), style="bold")
    if band is not None:
        low, high = band.around(step_time_s)
        line.append(f" ({format_seconds(low)} to {format_seconds(high)})", style="dim")
    line.append(f"   {rate} ")
    line.append(format_count(tokens_per_s), style="bold")
    line.append("   MFU ")
    line.append(f"{mfu:.1%}", style="bold")
    console.print(line)
    if convention:
        console.print(hanging("  MFU:", Text(convention, style="dim"), "dim"))


def print_no_band(console: Console, plan: Plan) -> None:
    """Where nothing published tells how far off a prediction of this kind is: that, and what does tell."""
    why = no_time_band(plan)
    if why:
        words = f"how far off this may be is not known: {why}. plan compare --measure tells, on your devices"
        console.print(hanging("  note:", Text(words, style="dim"), "dim"))


def print_why(console: Console, why: str) -> None:
    """The reasons for the main choices, in a clause each."""
    console.print(hanging("  why", Text(why), "default"))


def print_breakdown(console: Console, estimate: "Estimate") -> None:
    """Where the step's time goes, largest share first."""
    shares = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    parts = [f"{name} {seconds / estimate.step_time_s:.0%}" for name, seconds in shares if seconds > 0]
    if parts:
        console.print(hanging("  of which", Text(" · ".join(parts)), "default"))


def print_memory(console: Console, plan: Plan, stages: Sequence["StageMemory"], band: Band | None = None) -> None:
    """Peak memory of one GPU of each pipeline rank against the budget, itemised, and the band of the fullest."""
    budgets = list(dict.fromkeys(_gib(stage.budget_bytes) for stage in stages))
    unequal = len(budgets) > 1 and console.width >= _WIDE
    named = stages[0].device != "" and console.width >= _WIDE
    table = make_table()
    table.add_column(plan.degrees.rank_noun, no_wrap=True)
    if named:
        table.add_column("device", no_wrap=True)
    for heading in (*_HEADINGS, "other", "total", *(["budget"] if unequal else []), "free"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, stage in _collapsed(stages):
        shown = [stage.items.get(item, 0.0) for item in _ITEMS]
        free = stage.budget_bytes - stage.device_bytes
        table.add_row(
            name,
            *([stage.device] if named else []),
            *(_gib(num_bytes) for num_bytes in shown),
            _gib(stage.device_bytes - sum(shown)),
            Text(_gib(stage.device_bytes), style="bold"),
            *([_gib(stage.budget_bytes)] if unequal else []),
            Text(_gib(free), style="green" if free >= 0 else "bold red"),
        )
    budget = f"budget {' or '.join(budgets)}: {plan.training.memory_margin:.0%} of the device is left free"
    print_titled(console, f"Memory per GPU, GiB ({budget})", table)
    console.print(
        Text("  other: allocator reserve, CUDA context, communication buffers", style="dim"),
    )
    over = max(stages, key=lambda stage: stage.over_bytes)
    if over.over_bytes > 0:
        words = f"needs {format_bytes(over.device_bytes)} and may use {format_bytes(over.budget_bytes)}"
        console.print(Text(f"  does not fit: the fullest GPU {words}", style="bold red"))
    if band is not None:
        fullest = max(stages, key=lambda stage: stage.device_bytes / stage.budget_bytes).device_bytes
        low, high = band.around(fullest)
        line = f"  fullest GPU {_gib(fullest)} ({_gib(low)} to {_gib(high)}: where 8 of 10 published runs fell)"
        console.print(Text(line, style="dim"))


def print_memory_totals(console: Console, plan: Plan) -> None:
    """Peak memory per stage as a plan document states it, without items."""
    prediction = plan.prediction
    if prediction is None:
        return
    table = make_table()
    table.add_column("stage")
    table.add_column("total", justify="right")
    table.add_column("free", justify="right")
    rows: list[list[str]] = []
    for i, num_bytes in enumerate(prediction.stage_memory_bytes):
        cells = [_gib(num_bytes), _gib(prediction.budget_of(i) - num_bytes)]
        if rows and rows[-1][1:] == cells:
            rows[-1][0] = f"{rows[-1][0].split('-')[0]}-{i}"
        else:
            rows.append([str(i), *cells])
    for row in rows:
        table.add_row(*row)
    budget = "" if prediction.stage_budget_bytes else f" (budget {_gib(prediction.budget_bytes)})"
    print_titled(console, f"Memory per GPU, GiB{budget}", table)


def print_placement(console: Console, plan: Plan) -> None:
    """Which layers sit on which GPUs, how they are treated, and how the mesh axes lie on the hosts."""
    table = make_table()
    table.add_column("stage", no_wrap=True)
    table.add_column("layers", ratio=5, overflow="fold")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("treatment", ratio=3)
    table.add_column("where", ratio=4)
    for position in range(plan.degrees.pipeline):
        for i, run in enumerate(layer_runs(plan, position)):
            first = (stage_names(plan, position), gpus_of(plan, position)) if i == 0 else ("", "")
            table.add_row(first[0], run.names, str(run.num_layers), run.treatment, first[1])
    print_titled(console, "Layer -> GPU", table)
    rows = axis_rows(plan)
    if not rows:
        return
    axes = make_table()
    axes.add_column("axis", no_wrap=True)
    axes.add_column("ways", justify="right", no_wrap=True)
    axes.add_column("ranks of the first group")
    axes.add_column("each group sits")
    for row in rows:
        axes.add_row(row.axis, f"{row.degree:,}", row.first_group, row.where)
    print_titled(console, "Mesh, outermost axis first", axes)


def print_alternatives(console: Console, plan: Plan, found: "Estimate", listed: Sequence["Candidate"]) -> None:
    """Of what was weighed beside a plan the best of other families, each with what it would trade."""
    from ...planner.answers.alternatives import in_words, shown

    table = _candidates_table("what it would trade")
    for candidate in shown(listed, plan):
        table.add_row(*_candidate_cells(candidate)[:3], in_words(candidate, plan, found))
    if table.row_count:
        print_titled(console, "Alternatives", table)


def print_candidates(console: Console, title: str, candidates: Sequence["Candidate"]) -> None:
    """Set-ups with time, memory and why they lost."""
    if not candidates:
        return
    table = _candidates_table("verdict")
    for candidate in candidates:
        table.add_row(*_candidate_cells(candidate))
    print_titled(console, title, table)


def _candidates_table(last: str) -> Table:
    table = make_table()
    table.add_column("layout", ratio=4)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column(last, ratio=5)
    return table


def print_comparison(console: Console, candidates: Sequence["Candidate"], reference_s: float | None) -> None:
    """The plan beside manual set-ups, as predicted, all of them of one training stack."""
    table = make_table()
    table.add_column("set-up", ratio=3)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("to plan", justify="right", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("verdict", ratio=5)
    for candidate in candidates:
        label, step, gib, verdict = _candidate_cells(candidate)
        ratio = "-"
        if candidate.estimate is not None and reference_s is not None:
            ratio = f"{candidate.estimate.step_time_s / reference_s:.2f}x"
        table.add_row(label, step, ratio, gib, verdict)
    title = ", ".join(filter(None, ["Planned beside manual set-ups, equal global batch", stacks_of(candidates)]))
    print_titled(console, title, table)


def print_measured(console: Console, found: "MeasuredTable") -> None:
    """What set-ups really took, who was fastest, and why some were not run."""
    if found.rows:
        print_rows(console, "Measured", found.headings, found.rows)
    print_notes(console, found.sentences)


def print_measured_plan(console: Console, plan: Plan) -> None:
    """What the plan took where plan tune ran it; nothing where it did not."""
    found = plan.measured
    if found is not None:
        fitted = "" if plan.prediction is None else f", {format_seconds(plan.prediction.step_time_s)} after the fit"
        told = (
            f"{format_seconds(found.step_time_s)} ±{found.spread:.1%}, {counted(found.num_steps, 'step')} in "
            f"{counted(found.turns, 'turn')} "
            f"(predicted {format_seconds(found.predicted_before_s)} before{fitted})"
        )
        console.print(hanging("tuned", Text(told), "cyan"))


def print_losses(console: Console, candidates: Sequence["Candidate"], price_per_hour: float | None) -> None:
    """Throughput, MFU and, with a price per hour of a device, cost of every set-up; and where its step goes."""
    if any(candidate.estimate is not None for candidate in candidates):
        from ...planner.answers.explain import CAUSES

        headings, rows = comparison_rows(candidates, price_per_hour)
        print_rows(console, "Numbers", headings, rows)
        unit, headings, rows = loss_rows(candidates)
        shown = [_BRIEF_CAUSES.get(name, name) for name in headings]
        notes = [
            f"{brief}: {CAUSES[name]}"
            for brief, name in zip(shown, headings, strict=True)
            if CAUSES.get(name, brief) != brief
        ]
        print_rows(console, f"Where the step goes, {unit}", shown, rows, ["; ".join(notes)])


def comparison_tables(candidates: Sequence["Candidate"]) -> Group:
    """Set-ups side by side, and where the step of each goes, for rich's print."""
    headings, rows = comparison_rows(candidates, None)
    unit, causes, losses = loss_rows(candidates)
    verdicts = [(c.label, str(c.verdict)) for c in candidates]
    return Group(
        Text(stacks_of(candidates)),
        rows_table(headings, rows),
        Text(f"where the step goes, {unit}"),
        rows_table(causes, losses),
        rows_table(("set-up", "verdict"), verdicts, numeric_from=2),
    )


def print_certificate(console: Console, plan: Plan) -> None:
    """The certificate in a line."""
    console.print()
    console.print(hanging("proof", Text(certificate_line(plan)), "cyan"))


def print_next(console: Console, written: Sequence[str], commands: Sequence[tuple[str, str]]) -> None:
    """What was written, and what to type next: (command, what it does)."""
    for line in written:
        console.print(hanging("wrote", Text(line), "cyan"))
    for i, (command, purpose) in enumerate(commands):
        text = Text(command, style="bold")
        text.append(f"   {purpose}", style="dim not bold")
        console.print(hanging("next" if i == 0 else "", text, "cyan"))


def print_essentials(console: Console, facts: "Facts") -> None:
    """A report in short: the choice, its figures, what else there was, what it hangs on, and the proof."""
    plan, found = facts.plan, facts.estimate
    print_job(console, plan)
    print_choice(console, plan, found.step_time_s, facts.alternatives)
    rate = "samples/s" if plan.training.seq_len is None else "tokens/s"
    print_speed(console, found.step_time_s, found.tokens_per_s, found.mfu, rate, "", time_band(plan))
    print_no_band(console, plan)
    print_breakdown(console, found)
    print_memory(console, plan, found.memory, memory_band(plan))
    print_alternatives(console, plan, found, facts.alternatives)
    table = make_table()
    table.add_column("20% lower or higher")
    for heading in ("now", "-20%", "+20%"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("then faster")
    for shift in facts.shifts:
        changes = (format_change(seconds / found.step_time_s - 1) for seconds in (shift.lower_s, shift.higher_s))
        table.add_row(shift.name, shift.value, *changes, str(shift.overtaken_by or "this plan"))
    print_titled(console, "Step time, if the hardware is not what we think", table)
    console.print(Text(f"  {facts.spare_memory}", style="dim"))
    print_certificate(console, plan)


def print_rows(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Rows of words under their headings; all but the first column are numbers."""
    print_titled(console, title, rows_table(columns, rows))
    for note in notes:
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 2)))


def rows_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric_from: int = 1) -> Table:
    """A table of words; columns from `numeric_from` on are numbers."""
    table = make_table()
    for i, heading in enumerate(columns):
        numeric = i >= numeric_from
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_difference(console: Console, names: tuple[str, str], found: "PlanDifference") -> None:
    """What two plans decide differently, and what it costs."""
    if not found.changes:
        console.print(Text("The plans decide everything alike.", style="bold green"))
    else:
        table = make_table()
        for heading, ratio in (("decision", 2), (names[0], 4), (names[1], 4)):
            table.add_column(heading, ratio=ratio, overflow="fold")
        for change in found.changes:
            table.add_row(change.what, change.first, change.second)
        print_titled(console, "What differs", table)
    for title, costs, show in (
        ("Step time", found.times, _time),
        ("Memory of the fullest GPU, GiB", found.sizes, _gib),
    ):
        if costs:
            rows = [_cost_cells(cost, show) for cost in costs]
            print_rows(console, title, ("", *names, "difference", ""), rows)


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0"


def _cost_cells(cost: "Cost", show: Callable[[float], str]) -> tuple[str, ...]:
    change = cost.second - cost.first
    sign = "+" if change > 0 else "-" if change < 0 else ""
    ratio = cost.second / cost.first if cost.first else 0.0
    share = "" if not cost.first else f"{ratio:.1f}x" if ratio >= 2 else format_change(ratio - 1)
    return cost.name, show(cost.first), show(cost.second), sign + show(abs(change)), share


def print_devices(console: Console, devices: Sequence[Device]) -> None:
    """The presets, one line each; the files hold the source of every number."""
    table = make_table()
    table.add_column("name", no_wrap=True)
    headings = ("memory GiB", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB/s", "link GB/s", "per host", "network GB/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for device in devices:
        rates = (device.bandwidth, device.link.bandwidth, device.network.bandwidth)
        memory_speed, link_speed, network_speed = (_digits(rate / 1e9) for rate in rates)
        table.add_row(
            Text(device.name, style="bold"),
            _gib(device.memory),
            _digits(device.flops["bf16"] / 1e12),
            _digits(device.flops["fp32"] / 1e12),
            memory_speed,
            link_speed,
            str(device.devices_per_host),
            network_speed,
        )
    print_titled(console, "Device presets (--device)", table)
    console.print(
        Text(
            "FLOP/s are dense peaks. link and network are what large collectives really get in one direction, per "
            "device and per host. Every number's source stands in its file; --device takes a path to your own, too.",
            style="dim",
        )
    )


def print_instances(console: Console, instances: Sequence[Instance]) -> None:
    """The instance types of clouds, one line each."""
    rows = [
        (each.name, each.cloud, f"{each.gpus} x {each.device}", f"{each.network:,.0f}", _digits(each.bytes_per_s / 1e9))
        for each in instances
    ]
    headings = ("instance (--instance)", "cloud", "GPUs", "network Gbit/s", "of it used, GB/s")
    print_titled(console, "Cloud instance types (with --nodes N)", rows_table(headings, rows, numeric_from=3))
    said = "Prices differ by region, contract and day: --price-per-hour says yours. Numbers from "
    said += "; ".join(dict.fromkeys(each.source for each in instances))
    console.print(Text(said, style="dim"))


def print_infeasible(error: "InfeasibleError") -> None:
    """What does not fit, by how much, and what would: the error says it all."""
    console = make_console(stderr=True)
    message, _, _ = str(error).removeprefix("does not fit: ").partition("What would do: ")
    lines = message.strip().replace(". The closest", ".\nThe closest", 1)
    console.print(Text.assemble(("does not fit: ", "bold red"), lines), soft_wrap=True)
    if error.changes:
        console.print(Text("What would do:", style="bold"))
    for change in error.changes:
        console.print(Text(f"  {change}"), soft_wrap=True)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """What could not be cut or recognised."""
    if notes:
        console.print()
    for note in notes:
        console.print(hanging("note", Text(note), "yellow"))


def print_error(message: str) -> None:
    """One sentence on stderr; the terminal wraps it, a pipe gets it whole."""
    make_console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def write_json(document: str) -> None:
    """A JSON document on stdout, untouched by wrapping."""
    sys.stdout.write(document + "\n")


def hanging(word: str, text: Text, style: str, width: int = 7) -> Table:
    """`text` beside a word, its further lines indented under its first; width: columns of the word, at least."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=width)
    grid.add_column()
    grid.add_row(Text(word, style=style), text)
    return grid


def print_titled(console: Console, title: str, table: Table) -> None:
    """A table under its title, after an empty line."""
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def make_table() -> Table:
    """An empty table in the style of all."""
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        header_style="dim",
        pad_edge=True,
        padding=(0, 1, 0, 0),
    )


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gib(num_bytes: float) -> str:
    gib = num_bytes / GIB
    return f"{gib:.0f}" if abs(gib) >= 1000 else f"{gib:.1f}" if abs(gib) >= 0.05 or gib == 0 else f"{gib:.2f}"


def _collapsed(stages: Sequence["StageMemory"]) -> list[tuple[str, "StageMemory"]]:
    """Stages with equal figures (to the digit shown) joined: ("1-6", stage 1)."""
    rows: list[tuple[int, int, tuple[str, ...], StageMemory]] = []
    for i, stage in enumerate(stages):
        sizes = (*(_gib(stage.items.get(item, 0.0)) for item in _ITEMS), _gib(stage.device_bytes))
        figures = (*sizes, _gib(stage.budget_bytes), stage.device)
        if rows and rows[-1][2] == figures:
            rows[-1] = (rows[-1][0], i, figures, stage)
        else:
            rows.append((i, i, figures, stage))
    return [(str(first) if first == last else f"{first}-{last}", stage) for first, last, _, stage in rows]


def _candidate_cells(candidate: "Candidate") -> tuple[Text, str, str, Text]:
    chosen = candidate.verdict.kind is VerdictKind.PLAN
    lost = candidate.estimate is None
    step, gib = "-", "-"
    if candidate.estimate is not None:
        step = format_seconds(candidate.estimate.step_time_s)
        gib = _gib(candidate.estimate.peak_device_bytes)
    style = "green" if chosen else "dim" if lost else "default"
    return Text(candidate.name, style=style), step, gib, Text(str(candidate.verdict), style=style)
