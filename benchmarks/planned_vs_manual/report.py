"""Table and plot of planned against manual set-ups."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planned_vs_manual.bench import Result


def markdown(results: Sequence[Result], document: Mapping[str, Any]) -> str:
    """The outcome as a Markdown page."""
    lines = [
        "# Planned against manual set-ups on an emulated cluster",
        "",
        f"Taken {document['taken']}, {document['seconds'] / 60:.0f} minutes, by "
        "`python -m benchmarks.planned_vs_manual`. "
        + (
            "Hosts are network namespaces behind shaped links; "
            if document["shaped_links"]
            else "Links are not shaped; "
        )
        + "collectives, schedules and numbers are real, the compute time of every layer is a declared one (padded). So "
        "search, schedules and communication are validated here, not the times of kernels.",
        "",
        "| figure | found |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in document["figures"].items()),
        "",
        "| model | cluster | plan | step, s | best manual | step, s | planned / best manual | tau | set-ups run |",
        "|---|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for result in results:
        planned, *manual = result.run
        best = min(manual, key=lambda row: row.measured_s or 0.0)
        tau = "" if result.tau is None else f"{result.tau:.2f}"
        lines.append(
            f"| {result.case} | {result.topology} | {planned.layout} | {planned.measured_s:.3f} | {best.label}: "
            f"{best.layout} | {best.measured_s:.3f} | {result.ratio:.3f} | {tau} | {len(result.run)} |"
        )
    for result in results:
        lines += ["", f"## {result.case}, {result.topology}", ""]
        lines += [
            "| set-up | layout | predicted, s | measured, s | spread | error | |",
            "|---|---|---:|---:|---:|---:|---|",
        ]
        for row in result.rows:
            predicted = "" if row.predicted_s is None else f"{row.predicted_s:.3f}"
            measured = "" if row.measured_s is None else f"{row.measured_s:.3f}"
            spread = "" if row.spread is None else f"{row.spread:.1%}"
            error = "" if row.error is None else f"{row.error:+.1%}"
            note = row.note.replace("|", "/")
            lines.append(f"| {row.label} | {row.layout} | {predicted} | {measured} | {spread} | {error} | {note} |")
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], path: Path) -> None:
    """Predicted against measured of all set-ups, and every set-up's step relative to the plan's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5))
    for index, result in enumerate(results):
        rows = result.run
        colour = f"C{index % 10}"
        left.scatter([r.measured_s for r in rows], [r.predicted_s for r in rows], s=14, color=colour)
        planned, *manual = rows
        assert planned.measured_s is not None
        ratios = [row.measured_s / planned.measured_s for row in manual if row.measured_s is not None]
        right.scatter(ratios, [index] * len(ratios), s=16, color=colour, alpha=0.8)
    largest = max(row.measured_s or 0.0 for result in results for row in result.run)
    smallest = min(row.measured_s or largest for result in results for row in result.run)
    left.plot([smallest, largest], [smallest, largest], color="0.6", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="measured step, s", ylabel="predicted step, s")
    left.set_title("Predicted against measured")
    right.axvline(1.0, color="0.3", linewidth=1)
    right.set_yticks(range(len(results)), [f"{r.case}\n{r.topology}" for r in results], fontsize=7)
    right.invert_yaxis()
    right.set(xscale="log", xlabel="measured step of a manual set-up over the plan's (right of the line: slower)")
    right.set_title("Manual set-ups against the plan")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
