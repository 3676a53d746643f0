"""Plans and estimates as tables for notebooks and rich's print; rich is imported only when something is printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ...profiler.machine.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from ..cost.estimate import Estimate
    from .document import Plan


@dataclass(frozen=True)
class Shown:
    """A titled table of words; the first row holds the headings."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric_from: int = 1

    def rich(self) -> "Table":
        """For rich's print."""
        from rich import box
        from rich.table import Table

        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if i >= self.numeric_from else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def html(self) -> str:
        """For a notebook's cell."""
        head = self._cells("th", self.headings)
        body = "".join(f"<tr>{self._cells('td', row)}</tr>" for row in self.rows)
        caption = f'<caption style="text-align:left;font-weight:600">{escape(self.title)}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cells(self, kind: str, words: Sequence[str]) -> str:
        sides = ("right" if i >= self.numeric_from else "left" for i in range(len(words)))
        return "".join(
            f'<{kind} style="text-align:{side}">{escape(word)}</{kind}>'
            for side, word in zip(sides, words, strict=True)
        )


def show_plan(plan: "Plan") -> Shown:
    """The layout of a plan, a row for each stage."""
    from .making import shape_of

    title = (
        f"{plan.model.name} on {plan.cluster.devices}: {shape_of(plan).label}, "
        f"micro-batch {plan.micro_batch} x {plan.num_microbatches}"
    )
    predicted = plan.prediction
    if predicted is not None:
        title += f", {format_seconds(predicted.step_time_s)} a step, MFU {predicted.mfu:.1%}"
    rows = []
    for index, stage in enumerate(plan.stages):
        rank = plan.position_of(index)
        layers = stage.layers
        span = layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}"
        peak = "" if predicted is None else format_bytes(predicted.stage_memory_bytes[rank])
        recomputed = sum(layer.recompute != "none" for layer in layers)
        rows.append((str(index), span, str(len(layers)), str(recomputed), str(rank), peak))
    return Shown(title, ("stage", "layers", "count", "recomputed", "rank", "memory"), tuple(rows), 2)


def show_estimate(found: "Estimate") -> Shown:
    """Where a step goes, and the memory of the fullest rank."""
    title = (
        f"{format_seconds(found.step_time_s)} a step, {format_count(found.tokens_per_s)} tokens/s, MFU {found.mfu:.1%}"
    )
    fullest = max(found.memory, key=lambda stage: stage.device_bytes / stage.budget_bytes)
    times = [
        (f"time: {name}", format_seconds(seconds), f"{seconds / found.step_time_s:.1%}")
        for name, seconds in found.breakdown.items()
        if seconds > 0
    ]
    sizes = [
        (f"memory: {name}", format_bytes(size), f"{size / fullest.budget_bytes:.1%}")
        for name, size in fullest.items.items()
    ]
    total = (
        "memory: fullest GPU",
        format_bytes(fullest.device_bytes),
        f"{fullest.device_bytes / fullest.budget_bytes:.1%}",
    )
    return Shown(title, ("", "", "of step or budget"), (*times, *sizes, total))
