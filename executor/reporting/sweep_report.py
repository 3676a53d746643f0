"""A sweep as a table, a JSON document, and a picture: throughput of one GPU against their number."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ...planner.answers.sweep import LeftOut, Point, Price, changes_of_kind
from ...profiler.document import write_file
from ...profiler.machine.units import GIB, format_change, format_count, format_seconds, gpus_in_words
from . import terminal
from .drawing import figure, legend, line, table, tag, text, ticks
from .output_files import check_replaceable, check_writable

_KIND = "meshwright-sweep"
_COLOURS = ("blue", "rose", "green", "gold", "violet", "orange", "cyan", "slate")
_PLAN_WIDTH, _GAP, _UNBOUNDED = 16, 2, 10_000
"""Letters of a plan that a line has room for, at least, if plans are beside their numbers; spaces between columns; and
more than any screen has."""
_HEX = ("#3f6fd1", "#c43e5b", "#1b7d65", "#8d6c0a", "#8158c9", "#b45d0e", "#17798f", "#6c7688")


@dataclass(frozen=True)
class Worth:
    """What more of each resource would be worth at a point, and how robust the choice is there."""

    prices: tuple[Price, ...]
    robustness: str


def check_target(path: Path) -> None:
    """Raises ValueError if a sweep cannot be written there."""
    check_writable(path, "-o", ".png", ".html", ".json")
    if path.suffix == ".json":
        check_replaceable(path, "-o", "sweep", f'"{_KIND}"')


def sweep_rows(points: Sequence[Point], price_per_hour: float | None) -> tuple[list[str], list[tuple[str, ...]]]:
    """(headings, rows): the best plan of every point with step, throughput, MFU, memory, and cost where it has one."""
    sequences = any(point.profile.seq_len is not None for point in points)
    unit = "tokens" if sequences else "samples"
    headings = ["GPUs", *(["tokens"] if sequences else []), "batch", "step", f"{unit}/s", "per GPU", "MFU", "GiB"]
    headings += [f"$/M {unit}"] if price_per_hour is not None else []
    rows: list[tuple[str, ...]] = []
    for point in points:
        cells = [f"{point.num_devices:,}", *([f"{point.profile.seq_len or 0:,}"] if sequences else [])]
        cells.append(f"{point.training.global_batch:,}")
        if point.result is None:
            rows.append((*cells, *["-"] * (len(headings) - len(cells)), point.kind))
            continue
        found = point.result.estimate
        cells += [
            format_seconds(found.step_time_s),
            format_count(found.tokens_per_s),
            format_count(found.tokens_per_s / point.num_devices),
            f"{found.mfu:.1%}",
            f"{found.peak_device_bytes / GIB:.1f}",
        ]
        if price_per_hour is not None:
            cells.append(f"{point.cost_per_million(price_per_hour):,.3g}")
        rows.append((*cells, point.result.plan.label))
    return [*headings, "plan"], rows


def sweep_document(
    points: Sequence[Point],
    worth: Sequence[Worth],
    notes: Sequence[str],
    price_per_hour: float | None,
    left_out: Sequence[LeftOut] = (),
) -> dict[str, Any]:
    """A sweep as plain data; worth: of every point, or of none."""
    return {
        "kind": _KIND,
        "price_per_hour": price_per_hour,
        "points": [_point_document(point, price_per_hour) for point in points],
        "worth": [asdict(each) for each in worth],
        "changes": changes_of_kind(points),
        "notes": list(notes),
        "left_out": [asdict(each) for each in left_out],
    }


def _point_document(point: Point, price_per_hour: float | None) -> dict[str, Any]:
    found = {
        "gpus": point.num_devices,
        "seq_len": point.profile.seq_len,
        "global_batch": point.training.global_batch,
        "kind": point.kind,
        "why": point.why,
    }
    if point.result is None:
        return found | {"layout": None}
    estimate, certificate = point.result.estimate, point.result.certificate
    return found | {
        "layout": point.result.plan.label,
        "micro_batch": point.result.plan.micro_batch,
        "step_time_s": estimate.step_time_s,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "device_bytes": estimate.peak_device_bytes,
        "dollars_per_million": None if price_per_hour is None else point.cost_per_million(price_per_hour),
        "status": certificate.status,
    }


def print_sweep(
    console: Console,
    points: Sequence[Point],
    worth: Sequence[Worth],
    notes: Sequence[str],
    price_per_hour: float | None,
) -> None:
    """The table of a sweep, where the kind of plan changes, why points have no plan, and what more would be worth."""
    headings, rows = sweep_rows(points, price_per_hour)
    title, labels = f"Best plan of {points[0].profile.name} at every point", [row[-1] for row in rows]
    numbers = terminal.rows_table(headings[:-1], [row[:-1] for row in rows], numeric_from=0)
    taken = console.measure(numbers, options=console.options.update(max_width=_UNBOUNDED)).maximum
    needed = max(len(word) for label in labels for word in (label[:_PLAN_WIDTH].rstrip(), *label.split()))
    if taken + _GAP + needed <= console.width:
        grid = terminal.rows_table(headings, rows, numeric_from=0)
        grid.columns[-1].justify, grid.columns[-1].no_wrap = "left", False
        terminal.print_titled(console, title, grid)
        console.print()
    else:
        terminal.print_titled(console, title, numbers)
        console.print()
        for point, label in zip(points, labels, strict=True):
            if point.result is not None:
                console.print(terminal.hanging("plan", Text(f"{_named(point)}: {label}"), "cyan"))
    for sentence in changes_of_kind(points):
        console.print(terminal.hanging("kind", Text(sentence), "cyan"))
    for point in points:
        if point.why:
            console.print(terminal.hanging("no plan", Text(f"{_named(point)}: {point.why}"), "yellow"))
    if any(each.prices for each in worth):
        columns, priced = worth_rows(points, worth)
        grid = terminal.make_table()
        for i, heading in enumerate(columns):
            grid.add_column(heading, justify="right" if i else "left")
        for row in priced:
            grid.add_row(*row)
        terminal.print_titled(console, "What more would be worth: change of the step time, planned anew", grid)
        for sentence in robustness_in_words(points, worth):
            console.print(terminal.hanging("", Text(sentence, style="dim"), "cyan"))
    for note in notes:
        console.print(terminal.hanging("note", Text(note), "yellow"))


def worth_rows(points: Sequence[Point], worth: Sequence[Worth]) -> tuple[list[str], list[tuple[str, ...]]]:
    """(headings, rows): by how much more of each resource changes the step, a row for each point that has a plan."""
    names = list(dict.fromkeys(price.name for each in worth for price in each.prices))
    rows = []
    for point, each in zip(points, worth, strict=True):
        shares = {price.name: format_change(price.share) for price in each.prices}
        if shares:
            rows.append((_named(point), *(shares.get(name, "-") for name in names)))
    return ["point", *names], rows


def robustness_in_words(points: Sequence[Point], worth: Sequence[Worth]) -> list[str]:
    """How robust the choices are, a sentence for all points of which the same is true."""
    found: dict[str, list[str]] = {}
    for point, each in zip(points, worth, strict=True):
        if each.robustness:
            found.setdefault(each.robustness, []).append(_named(point))
    return [f"{'; '.join(names)}: {words}" for words, names in found.items()]


def _named(point: Point) -> str:
    length = "" if point.profile.seq_len is None else f", {point.profile.seq_len:,} tokens"
    return f"{gpus_in_words(point.num_devices)}{length}"


def write(
    path: Path,
    points: Sequence[Point],
    worth: Sequence[Worth],
    document: dict[str, Any],
    price_per_hour: float | None,
) -> None:
    """Write a sweep as its file's name says. Raises ValueError where a picture would be empty."""
    if path.suffix == ".json":
        write_file(path, json.dumps(document, indent=1) + "\n")
        return
    if all(point.result is None for point in points):
        raise ValueError(f"-o {path}: nothing fits at any point, so there is nothing to draw: {points[0].why}")
    if path.suffix == ".html":
        write_file(path, _page(points, worth, document, price_per_hour))
    else:
        _draw(path, points)


def _lines(points: Sequence[Point]) -> list[tuple[str, list[tuple[int, float, str]]]]:
    """Per sequence length (name, [(GPUs, tokens/s of one GPU, plan)]) of what fits."""
    found = []
    for length in dict.fromkeys(point.profile.seq_len for point in points):
        here = sorted(
            (point.num_devices, point.result.estimate.tokens_per_s / point.num_devices, point.kind)
            for point in points
            if point.profile.seq_len == length and point.result is not None
        )
        if here:
            found.append(("samples" if length is None else f"{length:,} tokens", here))
    return found


def _page(
    points: Sequence[Point], worth: Sequence[Worth], document: dict[str, Any], price_per_hour: float | None
) -> str:
    from .html_page import page, wide

    lines = _lines(points)
    title = f"{points[0].profile.name} on {points[0].cluster.device.name}"
    names = legend([(name, f"var(--{_COLOURS[i % len(_COLOURS)]})") for i, (name, _) in enumerate(lines)])
    sentences = [*document["changes"], *document["notes"]]
    headings, rows = sweep_rows(points, price_per_hour)
    sections = [
        tag("section", tag("h2", "Throughput of one GPU") + names + wide(_chart(lines)), id="chart"),
        tag(
            "section",
            tag("h2", "Best plan at every point") + table(headings, rows, 0, words_from=len(headings) - 1),
            id="points",
        ),
    ]
    links = [("chart", "Chart"), ("points", "Plans")]
    if any(each.prices for each in worth):
        columns, priced = worth_rows(points, worth)
        more = table(columns, priced) + "".join(tag("p", escape(words)) for words in robustness_in_words(points, worth))
        what = tag("p", "Change of the step time, planned anew with more of one resource.", class_="sub")
        sections.append(tag("section", tag("h2", "What more would be worth") + what + more, id="worth"))
        links.append(("worth", "What more would be worth"))
    head = f'<p class="kicker">Sweep</p><h1>{escape(title)}</h1>'
    head += "".join(tag("p", escape(sentence), class_="sub") for sentence in sentences)
    return page(title, head, links, sections)


_WIDTH, _HEIGHT, _LEFT, _BASE = 1000.0, 380.0, 80.0, 330.0


def _chart(lines: Sequence[tuple[str, list[tuple[int, float, str]]]]) -> str:
    """Tokens/s of one GPU against the number of GPUs, one line for each length; equal steps between the numbers."""
    counts = sorted({count for _, points in lines for count, _, _ in points})
    marks_at = ticks(max(rate for _, points in lines for _, rate, _ in points))
    step = (_WIDTH - _LEFT - 160) / max(1, len(counts) - 1)

    def x(count: int) -> float:
        return _LEFT + 70 + step * counts.index(count)  # room for half a label on both sides

    def y(rate: float) -> float:
        return _BASE - (_BASE - 20) * rate / marks_at[-1]

    marks = []
    for rate in marks_at:
        marks.append(line(_LEFT - 10, y(rate), _WIDTH - 20, y(rate), class_="grid"))
        marks.append(text(_LEFT - 16, y(rate) + 4, format_count(rate), class_="tick end"))
    marks += [text(x(count), _BASE + 22, gpus_in_words(count), class_="tick mid") for count in counts]
    taken = [(x(count), y(rate)) for _, points in lines for count, rate, _ in points]
    labels = []
    for i, (name, points) in enumerate(lines):
        colour = f"var(--{_COLOURS[i % len(_COLOURS)]})"
        for (a, rate_a, _), (b, rate_b, _) in pairwise(points):
            marks.append(line(x(a), y(rate_a), x(b), y(rate_b), stroke=colour, stroke_width=2))
        before = ""
        for count, rate, kind in points:
            if kind != before:
                place = _free(x(count), y(rate), len(kind), taken)
                labels.append(text(x(count), place + 4, kind, class_="label halo mid", fill=colour))
                taken += [(x(count) + part * 7.0 * len(kind), place) for part in (-0.5, -0.25, 0.0, 0.25, 0.5)]
            before = kind
            tip = f"{name}, {gpus_in_words(count)}|{kind}|{format_count(rate)} a second"
            marks.append(tag("circle", cx=x(count), cy=y(rate), r=5.0, fill=colour, data_t=tip))
    marks += labels
    said = "; ".join(f"{name}: {', '.join(f'{kind} on {count:,}' for count, _, kind in pts)}" for name, pts in lines)
    return figure("sweep", "Throughput of one GPU against the number of GPUs", said, _WIDTH, _HEIGHT, marks)


def _free(x: float, y: float, letters: int, taken: Sequence[tuple[float, float]]) -> float:
    """Where a label of a point stands: below it, above it, or farther off, where nothing else is."""
    reach = 3.5 * letters + 8
    for off in (20.0, -18.0, 36.0, -34.0, 52.0, -50.0):
        if 10 < y + off < _BASE - 6 and all(abs(a - x) > reach or abs(b - y - off) > 14 for a, b in taken):
            return y + off
    return y + 20.0


def _draw(path: Path, points: Sequence[Point]) -> None:
    """The chart as a PNG, each point named by the kind of its plan where that changes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 5), layout="constrained", dpi=150)
    FigureCanvasAgg(drawing)
    axes = drawing.add_subplot()
    counts = sorted({point.num_devices for point in points})
    for i, (name, found) in enumerate(_lines(points)):
        places = [counts.index(count) for count, _, _ in found]
        axes.plot(places, [rate for _, rate, _ in found], marker="o", color=_HEX[i % len(_HEX)], label=name)
        before = ""
        for place, (_, rate, kind) in zip(places, found, strict=True):
            if kind != before:
                axes.annotate(kind, (place, rate), textcoords="offset points", xytext=(4, 7), fontsize=8)
            before = kind
    axes.set_xticks(range(len(counts)), [f"{count:,}" for count in counts])
    axes.set_xlabel("GPUs")
    unit = "tokens/s" if points[0].profile.seq_len is not None else "samples/s"
    axes.set_ylabel(f"predicted {unit} of one GPU")
    axes.set_ylim(0, 1.15 * axes.dataLim.y1)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{points[0].profile.name} on {points[0].cluster.device.name}", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    picture = io.BytesIO()
    drawing.savefig(picture, format="png")
    write_file(path, picture.getvalue())
