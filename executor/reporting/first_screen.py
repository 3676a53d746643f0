"""A plan on one screen: what it is and takes, what else there was, what was assumed and proven, how it is run."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ...planner.answers.alternatives import in_words, shown
from ...planner.answers.explain import reason
from ...planner.cost.bands import memory_risk, time_band
from ...planner.plan.document import CONTEXT_NAMES, Plan
from ...planner.plan.layer_counts import blocks_at
from ...planner.plan.not_run import marked, not_run
from ...profiler.machine.units import GIB, format_count, format_dollars, format_seconds
from .glossary import Term, term
from .report import choice_in_words, hosts_in_order, launch_command, proof_sentence, stack_of
from .terminal import hanging, job_line

if TYPE_CHECKING:
    from ...planner.answers.search import Candidate
    from ...planner.cost.estimate import Estimate

MOST_LINES = 40
"""Lines of a terminal of 100 columns that the screen takes at most."""

_MOST_GROUPS = 6
_FEWEST_GROUPS = 2
_ALIKE = 0.05
"""Stages whose memory differs by no more of the budget are one row."""

_BAR, _SHORTEST_BAR = 30, 5
_BESIDE_BAR = 67
"""Characters of a line of 80 for a bar, the name before it and the figures behind it, which are never cut."""

_STALLING = ("ZB-V", "ZB-H1", "interleaved", "CP", "EP", "HSDP", "gathered", "ZeRO-1", "ZeRO-2", "sequence parallel")
"""Words that a reader of blog posts may not know, the hardest first."""

_MOST_WORDS = 2

_SHARDED = {
    1: "optimizer state sharded (ZeRO-1)",
    2: "gradients and optimizer state sharded (ZeRO-2)",
    3: "parameters, gradients and optimizer state sharded",
}
"""ZeRO stage -> what is sharded."""

_TOLD_RISK = 0.005
"""Of running out of memory, from which it is said."""


@dataclass(frozen=True)
class StageGroup:
    """Neighbouring pipeline ranks whose GPUs are about equally full."""

    first: int
    last: int
    least_bytes: float
    most_bytes: float
    budget_bytes: float

    def spread_with(self, other: "StageGroup") -> float:
        """Share of the budget by which the fullest and the emptiest of both differ; infinite for other devices."""
        if self.budget_bytes != other.budget_bytes:
            return math.inf
        most, least = max(self.most_bytes, other.most_bytes), min(self.least_bytes, other.least_bytes)
        return (most - least) / self.budget_bytes

    def joined(self, other: "StageGroup") -> "StageGroup":
        """Both as one."""
        least, most = min(self.least_bytes, other.least_bytes), max(self.most_bytes, other.most_bytes)
        return StageGroup(self.first, other.last, least, most, self.budget_bytes)


def stage_groups(plan: Plan, most: int = _MOST_GROUPS) -> list[StageGroup]:
    """The plan's memory by pipeline rank: neighbours within 5% of the budget are one group, and more are joined, the
    most alike first, until there are no more than `most` (of different devices, as many as it takes)."""
    found = plan.prediction
    if found is None:
        return []
    groups: list[StageGroup] = []
    for i, size in enumerate(found.stage_memory_bytes):
        one = StageGroup(i, i, size, size, found.budget_of(i))
        if groups and groups[-1].spread_with(one) <= _ALIKE:
            groups[-1] = groups[-1].joined(one)
        else:
            groups.append(one)
    while len(groups) > most:
        pairs = [groups[i].spread_with(groups[i + 1]) for i in range(len(groups) - 1)]
        at = pairs.index(min(pairs))
        if math.isinf(pairs[at]):
            break
        groups[at : at + 2] = [groups[at].joined(groups[at + 1])]
    return groups


def work_in_words(plan: Plan) -> str:
    """How the plan splits the work, for who does not know its abbreviations: "4 pipeline stages of 20 layers; ..."."""
    degrees, parts = plan.degrees, []
    if degrees.pipeline > 1:
        sizes = [blocks_at(plan, position) for position in range(degrees.pipeline)]
        layers = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        layers = f"{sizes[0]} and {sizes[1]}" if len(sizes) == 2 and sizes[0] != sizes[1] else layers
        chunks = f", in {degrees.virtual_stages} pieces each" if degrees.virtual_stages > 1 else ""
        noun = "layer" if max(sizes) == 1 else "layers"
        parts.append(f"{degrees.pipeline} pipeline stages of {layers} {noun}{chunks}")
    if degrees.tensor > 1:
        parts.append(f"each layer cut over {degrees.tensor} GPUs")
    if degrees.context > 1:
        kind = CONTEXT_NAMES[plan.context_kind]
        parts.append(f"each sequence spread over {degrees.context} GPUs ({kind})")
    if degrees.expert > 1:
        parts.append(f"experts spread over {degrees.expert} GPUs")
    samples = plan.micro_batch * plan.num_microbatches
    who = f"each of {degrees.data:,} data ranks trains" if degrees.data > 1 else "all GPUs train together"
    who = "the GPU trains" if degrees.num_devices == 1 else who
    rounds = "at once" if plan.num_microbatches == 1 else f"in {plan.num_microbatches:,} micro-batches"
    rounds += f" of {plan.micro_batch:,}" if plan.num_microbatches > 1 else ""
    parts.append(f"{who} on {samples:,} sample{'s' if samples > 1 else ''} a step, {rounds}")
    if degrees.sharded_over > 1:
        parts.append(f"{_SHARDED[plan.zero_stage]} over {degrees.sharded_over:,} GPUs")
    return "; ".join(parts)


def print_first_screen(
    console: Console,
    plan: Plan,
    found: "Estimate | None" = None,
    alternatives: Sequence["Candidate"] = (),
    assumptions: Sequence[str] = (),
    written: str | None = None,
    notes: Sequence[str] = (),
) -> None:
    """The screen. found: the plan's estimate, for reasons and parts. alternatives: what else there was; the best of
    three other families are shown. written: the file that the plan is in. notes: what must be said beside it. Where it
    would be longer than MOST_LINES, the explained words, some reasons and the parts of the step are left out, stages'
    memory is joined to two rows, and the slowest alternatives are left out, in this order."""
    others = shown(alternatives, plan)
    replicas = next((c.verdict for c in alternatives if c.label == "DDP"), None)
    reasons = [] if found is None else reason(plan, found, replicas).split("; ")
    said = " ".join([choice_in_words(plan), *(f"{c.name} {c.verdict}" for c in others)])
    words = [each for each in map(term, _STALLING) if each.pattern().search(said)][:_MOST_WORDS]
    parts, rows = found is not None, _MOST_GROUPS
    while True:
        lines: list[RenderableType] = [job_line(plan), "", Text(choice_in_words(plan), style="bold green")]
        if marked(plan):
            lines.append(Text(f"  {marked(plan)}", style="bold yellow"))
        lines += [hanging("that is", Text(work_in_words(plan)), "cyan"), "", *_figures(plan)]
        if found is not None and parts:
            lines.append(hanging("goes to", Text(_parts_of_step(found)), "cyan"))
        if reasons:
            lines.append(hanging("why", Text("; ".join(reasons)), "cyan"))
        if plan.prediction is not None:
            lines.append(_memory(plan, rows))
        risk = memory_risk(plan)
        if risk is not None and risk >= _TOLD_RISK:
            lines.append(hanging("", Text(f"of published runs with such predictions {risk:.0%} would run out"), "cyan"))
        lines += ["", _instead(others, plan, found), ""] if others else [""]
        if assumptions:
            lines.append(hanging("assumed", Text("; ".join(assumptions)), "yellow"))
        lines += [hanging("note", Text(note), "yellow") for note in notes]
        lines += [hanging("proof", Text(proof_sentence(plan)), "cyan"), hanging("words", _explained(words), "cyan")]
        lines += _next(plan, written) if written is not None else []
        if sum(len(console.render_lines(line, pad=False)) for line in lines) <= MOST_LINES:
            break
        if words:
            words = words[:-1]
        elif len(reasons) > 1:
            reasons = reasons[:-1]
        elif parts:
            parts = False
        elif rows > _FEWEST_GROUPS:
            rows -= 1
        elif len(others) > 1:
            others = others[:-1]
        else:
            break
    for line in lines:
        console.print(line)


def _parts_of_step(found: "Estimate") -> str:
    """Where the step goes, in parts of at least half a percent."""
    shares = sorted(found.breakdown.items(), key=lambda item: -item[1])
    least = 0.005 * found.step_time_s
    return " · ".join(f"{name} {seconds / found.step_time_s:.0%}" for name, seconds in shares if seconds >= least)


def _figures(plan: Plan) -> Iterator[RenderableType]:
    """Step time with its band, throughput, MFU, and cost where a price is known."""
    found = plan.prediction
    if found is None:
        return
    sequences = plan.training.seq_len is not None
    line = Text(format_seconds(found.step_time_s), style="bold")
    line.append(f" with {stack_of(plan)}", style="not bold")
    band = time_band(plan)
    if band is not None:
        low, high = band.around(found.step_time_s)
        words = f" ({format_seconds(low)} to {format_seconds(high)} in 8 of 10 published runs)"
        line.append(words, style="not bold dim")
    yield hanging("step", line, "cyan")
    rate = Text(f"{format_count(found.tokens_per_s)} {'tokens' if sequences else 'samples'}/s", style="bold")
    rate.append(f" · MFU {found.mfu:.1%}, the share of the GPUs' peak that the model's own FLOPs take", "not bold")
    yield hanging("speed", rate, "cyan")
    price = plan.cluster.price_per_hour
    if price is not None:
        hourly = price * plan.degrees.num_devices
        per = 1e9 if sequences else 1e6
        amount = "billion tokens" if sequences else "million samples"
        each = f"{format_dollars(hourly / 3600 / found.tokens_per_s * per)} for a {amount}"
        yield hanging("cost", Text(f"${hourly:,.2f} an hour · {each}"), "cyan")


def _memory(plan: Plan, most: int) -> Table:
    """A bar for each group of stages, of which there are `most`: the fullest GPU of it against what it may use."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=7)
    for _ in range(3):
        grid.add_column(no_wrap=True)
    single, kinds = plan.degrees.pipeline == 1, len(plan.cluster.kinds) > 1
    noun, groups = plan.degrees.rank_noun, stage_groups(plan, most)
    names, figures = list[str](), list[str]()
    for group in groups:
        name = "every GPU" if single else f"{noun} {group.first}"
        name = name if group.first == group.last else f"{noun}s {group.first}-{group.last}"
        if kinds and not single:
            rank = group.first * plan.stride("pipeline")
            name += f" ({plan.cluster.device_of(rank).name})"
        low, high = f"{group.least_bytes / GIB:.1f}", f"{group.most_bytes / GIB:.1f}"
        names.append(name)
        figures.append(f"{high if low == high else f'{low} to {high}'} of {group.budget_bytes / GIB:.1f} GiB")
    words = max(len(name) + len(figure) for name, figure in zip(names, figures, strict=True)) if names else 0
    length = max(_SHORTEST_BAR, min(_BAR, _BESIDE_BAR - words))
    for i, (group, name, figure) in enumerate(zip(groups, names, figures, strict=True)):
        share = group.most_bytes / group.budget_bytes
        full = min(length, round(length * share))
        bar = Text("█" * full, style="green" if share <= 0.9 else "yellow" if share <= 1 else "red")
        bar.append("░" * (length - full), style="dim")
        grid.add_row(Text("memory" if i == 0 else "", style="cyan"), name, bar, figure)
    return grid


def _instead(others: Sequence["Candidate"], plan: Plan, found: "Estimate | None") -> Table:
    """Other layouts: what they are, their step, and what they would trade."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=7)
    grid.add_column(ratio=4)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(ratio=5)
    for i, candidate in enumerate(others):
        assert candidate.estimate is not None
        step = format_seconds(candidate.estimate.step_time_s)
        heading = Text("instead" if i == 0 else "", style="cyan")
        traded = str(candidate.verdict) if found is None else in_words(candidate, plan, found)
        grid.add_row(heading, candidate.name, step, Text(traded, style="dim"))
    return grid


def _explained(words: Sequence[Term]) -> Text:
    """Words in a clause each, and where the others are."""
    text = Text()
    for each in words:
        clause = re.split(r"[.;(]", each.says, maxsplit=1)[0].strip()
        text.append(each.name, style="bold")
        text.append(f": {clause if clause[1].isupper() else clause[0].lower() + clause[1:]}. ")
    text.append("plan glossary", style="bold")
    text.append(" has the others" if words else " explains every word")
    return text


def _next(plan: Plan, written: str) -> Iterator[RenderableType]:
    """Where the plan is, how it is run, and how more is asked."""
    yield hanging("wrote", Text(written), "cyan")
    if not not_run(plan):
        run = Text(launch_command(plan), style="bold")
        run.append(f'   with mw.parallelize(MyModel, "{written}", ...) in it', style="not bold dim")
        yield hanging("run", run, "cyan")
        if hosts_in_order(plan):
            yield hanging("", Text(hosts_in_order(plan)), "cyan")
    if plan.certificate is not None and plan.certificate.framework is not None:
        told = Text(f"plan export {written} --to {plan.certificate.framework}", style="bold")
        told.append("   the layout in its own settings", style="not bold dim")
        yield hanging("export", told, "cyan")
    more = Text()
    for command, purpose in ((f"plan explain {written}", "why"), (f"plan report {written}", "as a page")):
        more.append(command, style="bold")
        more.append(f" {purpose} · ", style="dim")
    more.append("-v", style="bold")
    more.append(" everything here", style="dim")
    yield hanging("more", more, "cyan")
