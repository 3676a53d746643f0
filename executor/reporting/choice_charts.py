"""A plan among others, as SVG: time against memory, what it hangs on, where each set-up loses."""

from collections.abc import Iterator, Sequence
from math import cos, pi, sin

from ...planner.answers.candidate import Candidate
from ...planner.answers.explain import CAUSES
from ...planner.answers.sensitivity import Shift
from ...planner.answers.verdict import VerdictKind
from ...profiler.machine.units import GIB, counted, format_bytes, format_change, format_seconds
from .drawing import CAUSE_COLOURS, WIDTH, colour_of, cut, figure, legend, line, nice_step, rect, tag, text, ticks
from .report_facts import Facts, front

_Point = tuple[float, float]
_Named = tuple[float, float, str]
_Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in units of the view box."""


def scatter(facts: Facts) -> str:
    """Step time against memory of the fullest GPU: the plan, what people usually try, and other layouts."""
    found = facts.estimate
    priced = [c for c in (*facts.alternatives, *facts.others) if c.estimate is not None and c.plan is not None]
    mine = (found.peak_device_bytes, found.step_time_s)
    points = [mine, *((c.estimate.peak_device_bytes, c.seconds) for c in priced if c.estimate is not None)]
    slowest = 4 * found.step_time_s
    shown = [i for i, (_, seconds) in enumerate(points) if seconds <= slowest]
    budget = max(stage.budget_bytes for stage in found.memory)
    left, right, top, base = 76.0, WIDTH - 24, 16.0, 340.0
    far = max(budget, *(points[i][0] for i in shown)) * 1.03
    least = min(points[i][0] for i in shown)
    near = 0.0 if least < 0.5 * far else least - 0.25 * (far - least)
    longest = max(points[i][1] for i in shown)
    shortest = min(points[i][1] for i in shown)
    low = max(0.0, shortest - 0.18 * max(longest - shortest, 0.2 * shortest))
    high = longest + 0.12 * max(longest - shortest, 0.2 * shortest)

    def across(memory: float) -> float:
        return left + (memory - near) / (far - near) * (right - left)

    def place(i: int) -> tuple[float, float]:
        memory, seconds = points[i]
        return across(memory), base - (seconds - low) / (high - low) * (base - top)

    marks: list[str] = []
    step = nice_step((far - near) / GIB, 8)
    for i in range(int(near / GIB / step), int(far / GIB / step) + 1):
        value, x = i * step, across(i * step * GIB)
        if left <= x <= right:
            marks += [line(x, top, x, base, class_="grid"), text(x, base + 16, f"{value:g}", class_="tick mid")]
    for value in ticks(high, 8):
        y = base - (value - low) / (high - low) * (base - top)
        if top <= y <= base:
            marks += [
                line(left, y, right, y, class_="grid"),
                text(left - 8, y + 4, format_seconds(value) if value else "0", class_="tick end"),
            ]
    edge = across(budget)
    marks += [
        line(edge, top, edge, base, class_="limit"),
        text(edge - 6, top + 10, "budget", class_="tick end limit-t"),
    ]
    best = front([points[i] for i in shown])
    corners = [place(shown[i]) for i in best]
    steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners[1:])
    marks.append(tag("path", d=f"M{corners[0][0]:.1f} {corners[0][1]:.1f}{steps}H{edge:.1f}", class_="front"))
    circles: dict[str, list[str]] = {"other": [], "rule": []}
    for i in reversed(shown[1:]):
        style, radius = ("rule", 6.0) if priced[i - 1].by_rule else ("other", 4.5)
        x, y = place(i)
        circles[style].append(tag("circle", cx=x, cy=y, r=radius, class_=style, data_t=_tip(priced[i - 1])))
    named = [(*place(i), priced[i - 1].name) for i in shown[1:] if priced[i - 1].by_rule]
    x, y = place(0)
    marks += [
        *circles["other"],
        *_labels([(x, y, "the plan"), *named], [place(i) for i in shown], (left, top + 14, right, base)),
        *circles["rule"],
    ]
    tip = f"the plan|{format_seconds(found.step_time_s)}, {format_bytes(mine[0])}"
    marks.append(tag("path", d=_star(x, y, 11.0), class_="chosen", data_t=tip))
    marks.append(text(left, base + 36, "GiB on the fullest GPU", class_="note"))
    marks.append(text(left, top - 5, "step time", class_="note"))
    others = sum(priced[i - 1].verdict.kind is not VerdictKind.PLAN for i in shown[1:])
    description = f"the plan and {counted(others, 'alternative')}; {len(best)} of them on the Pareto front"
    return figure("scatter", "Time against memory", description, WIDTH, base + 42, marks)


def _tip(candidate: Candidate) -> str:
    assert candidate.estimate is not None
    figures = f"{format_seconds(candidate.seconds)}, {format_bytes(candidate.estimate.peak_device_bytes)}"
    return f"{candidate.name}|{figures}|{candidate.verdict}"


def _labels(points: Sequence[_Named], others: Sequence[_Point], room: _Box) -> list[str]:
    """Names of points, each at the nearest place where it covers neither a point nor another name, joined to its point
    by a line. others: all points; room: where names may stand."""
    marks: list[str] = []
    taken = [(x - 9.0, y - 8.0, x + 9.0, y + 8.0) for x, y in others]
    for x, y, words in points:
        end, at_x, at_y, box = min(_places(x, y, 7.4 * len(words)), key=lambda place: _crowded(place[-1], taken, room))
        taken.append(box)
        style = ("label halo strong" if words == "the plan" else "label halo") + (" end" if end else "")
        marks += [
            line(x + (-9 if end else 9), y, at_x + (3 if end else -3), at_y, class_="leader"),
            text(at_x, at_y + 4, words, class_=style),
        ]
    return marks


def _places(x: float, y: float, wide: float) -> Iterator[tuple[bool, float, float, _Box]]:
    """(whether it ends there, where, box) of a name beside a point, the nearest first."""
    for down in (0, 17, -17, 34, -34, 51, -51, 68, -68, 85, -85):
        for end in (False, True):
            at = x - 24 if end else x + 24
            start = at - wide if end else at
            yield end, at, y + down, (start, y + down - 8, start + wide, y + down + 8)


def _crowded(box: _Box, taken: Sequence[_Box], room: _Box) -> tuple[bool, int]:
    """(whether a box leaves its room, how many others it covers)."""
    leaves = box[0] < room[0] or box[1] < room[1] or box[2] > room[2] or box[3] > room[3]
    covers = sum(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)
    return leaves, covers


def _star(x: float, y: float, radius: float) -> str:
    corners = []
    for i in range(10):
        r, angle = radius * (1.0 if i % 2 == 0 else 0.45), pi * (i / 5 - 0.5)
        corners.append(f"{x + r * cos(angle):.1f} {y + r * sin(angle):.1f}")
    return "M" + "L".join(corners) + "z"


def tornado(facts: Facts) -> str:
    """Step time with each number of the cluster 20% lower and higher, the plan unchanged."""
    shifts, base_s = facts.shifts, facts.estimate.step_time_s
    left, right, step = 250.0, WIDTH - 20, 40.0
    changes = [abs(s / base_s - 1) for shift in shifts for s in (shift.lower_s, shift.higher_s)]
    most = max(0.02, *changes) * 1.25
    middle, scale = (left + right) / 2, (right - left) / 2 / most
    height = 8 + len(shifts) * step
    marks = [line(middle, 4, middle, height, class_="axis")]
    for i, shift in enumerate(shifts):
        y = 8 + i * step
        marks += [
            text(left - 96, y + 15, shift.name, class_="label end"),
            text(left - 88, y + 15, shift.value, class_="note"),
        ]
        for sign, seconds in (("−20%", shift.lower_s), ("+20%", shift.higher_s)):
            change = seconds / base_s - 1
            x = middle + min(0.0, change) * scale
            colour = "rose" if change > 0 else "green"
            tip = f"{shift.name} {sign}|{format_seconds(seconds)}, {_change(change)}"
            down = 0.0 if sign.startswith("−") else 12.0
            marks.append(rect(x, y + down, abs(change) * scale, 11, fill=f"var(--{colour})", data_t=tip))
            end = change < 0
            at = middle + change * scale + (-6 if end else 6)
            marks.append(text(at, y + down + 9.5, f"{sign}: {_change(change)}", class_="tiny end" if end else "tiny"))
    marks += [
        text(middle - 8, height + 16, "faster", class_="note end"),
        text(middle + 8, height + 16, "slower", class_="note"),
    ]
    description = "; ".join(_shift_words(shift, base_s) for shift in shifts)
    return figure("sensitivity", "Sensitivity of the step time", description, WIDTH, height + 22, marks)


def _change(share: float) -> str:
    """A change of the step, with a sign where there is one to see."""
    return format_change(share).replace("-", "−")


def _shift_words(shift: Shift, base_s: float) -> str:
    lower, higher = (_change(seconds / base_s - 1) for seconds in (shift.lower_s, shift.higher_s))
    return f"{shift.name} 20% lower {lower}, 20% higher {higher}"


def loss_bars(candidates: Sequence[Candidate]) -> tuple[str, str]:
    """(figure, legend): the step of every set-up, stacked by cause; those without a plan say why."""
    priced = [c.estimate for c in candidates if c.estimate is not None]
    names = list(dict.fromkeys(name for found in priced for name in found.breakdown))
    names = [
        name for name in names if any(found.breakdown.get(name, 0.0) > 5e-4 * found.step_time_s for found in priced)
    ]
    longest = max((found.step_time_s for found in priced), default=1.0)
    left, step, bar = 12.0, 52.0, 24.0
    scale = (WIDTH - left - 86) / longest
    height = 10 + len(candidates) * step
    marks: list[str] = []
    for value in ticks(longest):
        x = left + value * scale
        if value <= longest * 1.0001:
            shown = format_seconds(value) if value else "0"
            marks += [line(x, 4, x, height, class_="grid"), text(x, height + 14, shown, class_="tick mid")]
    for i, candidate in enumerate(candidates):
        y, x, found = 10 + i * step, left, candidate.estimate
        chosen = candidate.verdict.kind is VerdictKind.PLAN
        marks.append(
            text(left, y + 12, cut(candidate.label, 110), class_="label strong" if chosen else "label")  # above its bar
        )
        y += 17
        if found is None:
            marks.append(text(left, y + 16, cut(str(candidate.verdict), 140), class_="note"))
            continue
        for name in names:
            seconds = found.breakdown.get(name, 0.0)
            tip = f"{candidate.label}: {CAUSES.get(name, name)}|"
            tip += f"{format_seconds(seconds)}, {seconds / found.step_time_s:.1%} of its step"
            marks.append(rect(x, y, seconds * scale, bar, fill=colour_of(name, CAUSE_COLOURS, names), data_t=tip))
            x += seconds * scale
        marks.append(text(x + 8, y + 17, format_seconds(found.step_time_s), class_="value"))
    description = "; ".join(
        f"{c.label}: {format_seconds(c.estimate.step_time_s) if c.estimate else c.verdict}" for c in candidates
    )
    picture = figure("losses", "One step of every set-up by cause", description, WIDTH, height + 20, marks)
    return picture, legend([(CAUSES.get(name, name), colour_of(name, CAUSE_COLOURS, names)) for name in names])
