"""A race as one HTML page: who ran when, predictions before and after the fit, and what each minute bought."""

import math
from collections.abc import Sequence
from html import escape

from ...profiler.machine.units import format_seconds
from ..measuring.measurement import quantile
from ..measuring.significance import paired
from ..tuning.outcome import Contender, StandIn, Tuned
from ..tuning.race import leader_of
from ..tuning.record import FallLine, LapLine, Record, RefitLine
from .drawing import WIDTH, colour_of, cut, figure, legend, line, rect, table, tag, text, ticks
from .html_page import job_in_words, page, section, wide
from .tune_report import MEMORY_HEADINGS, headings_of, memory_rows, rows_of, sentences

_MOST_ROWS = 15
_SLOWEST = 3.0
"""Laps that take so many times the fastest one's step are drawn at the top edge."""


def tune_page(found: Tuned, record: Record) -> str:
    """The race on a page that needs no network."""
    plan = found.plan
    title = f"{plan.model.name} on {plan.cluster.devices.replace(' x ', ' × ')}"
    head = f'<p class="kicker">Tuned on the cluster itself</p><h1>{escape(title)}</h1>'
    head += tag("p", escape(job_in_words(plan)), class_="sub")
    head += tag("ul", "".join(tag("li", escape(sentence)) for sentence in sentences(found)), class_="sub")
    headings = headings_of(found)
    sections = [
        section(
            "candidates", "Candidates", "The fastest first.", table(headings, rows_of(found), 1, "", len(headings) - 1)
        ),
    ]
    if record.laps():
        named = legend([(label, _colour(label, record)) for label in record.laps()])
        sections += [
            section(
                "race",
                "The race",
                "A mark for each lap: when it was run, and the median of its steps. A lap is a few steps of one "
                "candidate, alone; crosses are jobs that ended.",
                named + wide(_race(record)),
            ),
            section(
                "fit",
                "Predicted over measured, before and after the fit",
                "Hollow: by the constants that the race began with; full: by those fitted to these same laps.",
                wide(_before_and_after(found)),
            ),
        ]
        if found.smaller:
            told = [(each.term, format_seconds(each.seconds)) for each in found.standings[0].unseen]
            sections.append(
                section(
                    "unseen",
                    "Not seen so small",
                    f"What {found.standings[0].label} waits for that no smaller job shows: these terms stay predicted.",
                    table(("term", "predicted"), told or [("none", "")]),
                )
            )
        if found.memory:
            words = (
                "The fullest process of each pipeline coordinate, and what is predicted of it before and after the fit."
            )
            sections.append(section("memory", "Peak memory", words, table(MEMORY_HEADINGS, memory_rows(found))))
        if not found.smaller:
            words = "What each minute bought"
            sections.append(section("minutes", words, "", table(*_minutes(record), words_from=4)))
    if found.factors:
        moved = [(name, f"{factor:.3f}") for name, factor in sorted(found.factors.items())]
        sections.append(section("constants", "Constants", "Factors of the fit.", table(("constant", "factor"), moved)))
    return page(f"Tuned: {title}", head, [], sections)


def _colour(label: str, record: Record) -> str:
    return colour_of(label, {}, list(record.stand_ins() or record.entrants()))


def _race(record: Record) -> str:
    """Step time of every lap over the minutes of the race."""
    left, right, top, base = 76.0, WIDTH - 24, 26.0, 340.0
    laps = [lap for one in record.laps().values() for lap in one]
    end_s = max(record.elapsed_s, 1e-9)
    most_s = min(max(lap.step_s for lap in laps), _SLOWEST * min(lap.step_s for lap in laps))
    grid = ticks(most_s, 6)

    def place(lap: LapLine) -> tuple[float, float]:
        return across(lap.at_s), base - min(1.0, lap.step_s / grid[-1]) * (base - top)

    def across(at_s: float) -> float:
        return left + at_s / end_s * (right - left)

    marks = [line(left, base, right, base, class_="grid")]
    for value in grid:
        y = base - value / grid[-1] * (base - top)
        marks += [
            line(left, y, right, y, class_="grid"),
            text(left - 8, y + 4, format_seconds(value) if value else "0", class_="tick end"),
        ]
    for minutes in ticks(end_s / 60, 8):
        if minutes * 60 <= end_s:
            marks.append(text(across(minutes * 60), base + 16, f"{minutes:g}", class_="tick mid"))
    for each in record.refits():
        x = across(each.at_s)
        marks += [line(x, top, x, base, class_="limit"), text(x - 4, top - 6, f"fit {each.round}", class_="tick end")]
    for label, own in record.laps().items():
        colour, points = _colour(label, record), [place(lap) for lap in own]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        marks.append(tag("path", d=path, fill="none", style=f"stroke:{colour};stroke-width:1.2;opacity:.5"))
        for lap, (x, y) in zip(own, points, strict=True):
            tip = f"{label}|{format_seconds(lap.step_s)}, turn {lap.turn}"
            marks.append(tag("circle", cx=x, cy=y, r=4.0, style=f"fill:{colour}", data_t=tip))
    for fall in record.falls().values():
        marks.append(_cross(fall, across(fall.at_s), top + 8))
    marks.append(text(left, base + 36, "minutes", class_="note"))
    marks.append(text(left, top - 12, "step time", class_="note"))
    description = f"{len(laps)} laps of {len(record.laps())} candidates in {end_s / 60:.1f} minutes"
    return figure("race-picture", "The race", description, WIDTH, base + 42, marks)


def _cross(fall: FallLine, x: float, y: float) -> str:
    return text(x, y, "×", class_="tick mid limit-t", data_t=f"{fall.label}|{fall.cause}: {cut(fall.message, 120)}")


def _before_and_after(found: Tuned) -> str:
    """A row for each measured candidate: how far the prediction was off, on a logarithmic axis."""
    ran: list[Contender | StandIn] = [one for each in found.standings for one in each.stand_ins]
    rows = [each for each in ran or found.standings if each.measured is not None and each.fitted_s is not None]
    ratios = []
    for each in rows:
        assert each.measured is not None
        assert each.fitted_s is not None
        step_s = each.measured.step_time_s
        ratios.append((math.log(each.predicted_s / step_s), math.log(each.fitted_s / step_s)))
    far = max(0.05, *(abs(value) for pair in ratios for value in pair)) * 1.1
    left, right, top, height = 320.0, WIDTH - 24, 24.0, 24.0
    base = top + height * len(rows)

    def across(value: float) -> float:
        return left + (value + far) / (2 * far) * (right - left)

    marks = [line(across(0.0), top - 4, across(0.0), base, class_="limit")]
    for share in (-far / 1.1, 0.0, far / 1.1):
        marks.append(text(across(share), base + 16, f"{math.expm1(share):+.0%}", class_="tick mid"))
    for i, (each, (before, after)) in enumerate(zip(rows, ratios, strict=True)):
        y = top + height * (i + 0.5)
        low, high = sorted((across(before), across(after)))
        marks += [
            text(left - 10, y + 4, cut(each.label, 44), class_="tick end"),
            rect(low, y - 1, high - low, 2, style="fill:var(--slate)"),
            tag("circle", cx=across(before), cy=y, r=5.0, style="fill:var(--bg, #fff);stroke:var(--slate)"),
            tag("circle", cx=across(after), cy=y, r=5.0, style="fill:var(--blue)"),
        ]
    description = "predicted over measured step, before the fit and after it"
    return figure("fit-picture", "Before and after the fit", description, WIDTH, base + 26, marks)


def _minutes(record: Record) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """(headings, a row for every stretch of the race): the leader at its end, and what that is worth."""
    end_s = record.elapsed_s
    count = max(1, min(_MOST_ROWS, math.ceil(end_s / 60)))
    first = min(record.entrants().values(), key=lambda line: line.predicted_s).label
    rows: list[tuple[str, ...]] = []
    for i in range(count):
        until_s = end_s * (i + 1) / count
        before = [line for line in record.lines if line.at_s <= until_s]
        own = [line for line in before if line.at_s > end_s * i / count]
        medians: dict[str, dict[int, float]] = {}
        for lap in before:
            if isinstance(lap, LapLine):
                medians.setdefault(lap.label, {})[lap.turn] = lap.step_s
        leader = leader_of(medians)
        steps_s = [s for lap in before if isinstance(lap, LapLine) and lap.label == leader for s in lap.steps_s]
        step_s = format_seconds(quantile(tuple(steps_s), 0.5)) if steps_s else ""
        gain = ""
        apart = {} if leader is None else paired(medians, leader)
        if first in apart:
            gain = f"{apart[first].ratio:.2f}x"
        laps = sum(isinstance(line, LapLine) for line in own)
        happened = [f"{laps} lap{'s' if laps != 1 else ''}"]
        happened += [f"{line.label} ended: {line.cause}" for line in own if isinstance(line, FallLine)]
        happened += [f"fit {line.round}" for line in own if isinstance(line, RefitLine)]
        measured = f"{len(medians)} of {len(record.entrants())}"
        rows.append((f"{until_s / 60:.1f}", measured, step_s, gain, leader or "", ", ".join(happened)))
    headings = ("minute", "measured", "best step", f"faster than {cut(first, 40)}", "leader", "what happened")
    return headings, rows
