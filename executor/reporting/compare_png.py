"""A comparison as a PNG: one step of every set-up, stacked by cause. Needs matplotlib."""

import io
from collections.abc import Sequence
from pathlib import Path

from ...planner.answers.candidate import Candidate
from ...planner.answers.explain import CAUSES
from ...profiler.document import write_file
from ...profiler.machine.units import format_seconds
from .report import loss_rows

_COLOURS = {
    "compute": "#3f6fd1",
    "recompute": "#8158c9",
    "tensor": "#b45d0e",
    "context": "#8d6c0a",
    "expert": "#17798f",
    "data": "#c43e5b",
    "pipeline": "#6c7688",
    "optimizer": "#1b7d65",
}


def draw(path: Path, candidates: Sequence[Candidate]) -> None:
    """Write the picture; set-ups without a plan say why in place of a bar."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit, headings, _ = loss_rows(candidates)
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    figure = Figure(figsize=(10, 1.6 + 0.42 * len(candidates)), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, candidate in enumerate(candidates):
        found, left = candidate.estimate, 0.0
        if found is None:
            axes.text(0, row, f" {str(candidate.verdict)[:90]}", va="center", fontsize=8, color="#5a6275")
            continue
        for name in headings[2:]:
            width = scale * found.breakdown.get(name, 0.0)
            axes.barh(row, width, 0.66, left, color=_COLOURS.get(name, "#17798f"), linewidth=0)
            left += width
        axes.text(left, row, f"  {format_seconds(found.step_time_s)}", va="center", fontsize=9)
    for name in headings[2:]:
        axes.bar(0, 0, color=_COLOURS.get(name, "#17798f"), label=CAUSES.get(name, name))
    axes.set_yticks(range(len(candidates)), [candidate.label for candidate in candidates], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * axes.dataLim.x1)
    axes.set_xlabel(f"predicted time of one step, {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())
