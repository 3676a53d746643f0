"""A race in words and rows, for terminals and JSON: who was tried, measured beside predicted, and how it ended."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from ...profiler.machine.units import format_bytes, format_change, format_seconds
from ..measuring.measurement import quantile
from ..tuning.outcome import NOT_MEASURED, Contender, StandIn, Tuned
from .terminal import hanging, print_job, print_notes, print_rows

HEADINGS = ("candidate", "predicted", "fitted", "measured", "spread", "turns", "outcome")


SMALL_HEADINGS = ("candidate", "predicted", "fitted", "ran as", "predicted", "fitted", "measured", "outcome")
"""Where smaller jobs ran: the whole job's step, then that of what ran in its place."""

MEMORY_HEADINGS = ("process of", "predicted", "fitted", "measured", "off")

CLOSE = 0.03
"""What is predicted of memory is close where it is off by no more."""


def headings_of(found: Tuned) -> tuple[str, ...]:
    """What the columns of rows_of are."""
    return SMALL_HEADINGS if found.smaller else HEADINGS


def rows_of(found: Tuned) -> list[tuple[str, ...]]:
    """A row of words for every candidate, the fastest first; for everything that ran in its place."""
    if found.smaller:
        return [row for each in found.standings for row in _small_rows(each)]
    return [_row(each) for each in found.standings]


def _small_rows(each: Contender) -> list[tuple[str, ...]]:
    fitted = "" if each.fitted_s is None else format_seconds(each.fitted_s)
    whole = (each.label, format_seconds(each.predicted_s), fitted)
    rows = [
        (
            one.plan.label if one.rank is None else f"rank {one.rank}",
            format_seconds(one.predicted_s),
            format_seconds(one.fitted_s),
            "" if one.measured is None else format_seconds(one.measured.step_time_s),
        )
        for one in each.stand_ins
    ] or [("", "", "", "")]
    first = (*whole, *rows[0], each.outcome)
    return [first, *(("", "", "", *row, "") for row in rows[1:])]


def memory_rows(found: Tuned) -> list[tuple[str, ...]]:
    """A row for the fullest process of every pipeline coordinate of all that ran."""
    rows = []
    for each in found.memory:
        sizes = (each.predicted_bytes, each.fitted_bytes, each.measured_bytes)
        several = sum(other.label == each.label and other.kind == each.kind for other in found.memory) > 1
        name = f"{each.label}, coordinate {each.position}" if several else each.label
        name += "" if each.kind == "resident" else f" ({each.kind})"
        rows.append((name, *map(format_bytes, sizes), format_change(each.fitted_bytes / each.measured_bytes - 1)))
    return rows


def memory_sentences(found: Tuned) -> list[str]:
    """How far predictions of memory were off, before the fit and after it."""
    if not found.memory:
        return []
    pairs = [(each.predicted_bytes, each.fitted_bytes, each.measured_bytes) for each in found.memory]
    before = sorted(abs(first / size - 1) for first, _, size in pairs)
    after = sorted(abs(last / size - 1) for _, last, size in pairs)
    close = sum(off <= CLOSE for off in after)
    if len(pairs) == 1:
        return [f"memory of the one process was off by {before[0]:.1%}, after the fit by {after[0]:.1%}"]
    return [
        f"memory of {len(pairs)} processes was off by {_median(before):.1%} in the median and {before[-1]:.1%} at "
        f"worst, after the fit by {_median(after):.1%} and {after[-1]:.1%}; {close} of {len(pairs)} are within "
        f"{CLOSE:.0%}"
    ]


def _row(each: Contender) -> tuple[str, ...]:
    measured = each.measured
    return (
        each.label,
        format_seconds(each.predicted_s),
        "" if each.fitted_s is None else format_seconds(each.fitted_s),
        "" if measured is None else format_seconds(measured.step_time_s),
        "" if measured is None else f"±{measured.spread:.1%}",
        "" if measured is None else str(measured.turns),
        each.outcome,
    )


def errors_of(found: Tuned) -> tuple[list[float], list[float]]:
    """|measured over predicted - 1| of every measured candidate, before the fit and after it."""
    measured = [each for each in found.standings if each.measured is not None]
    before = [_error(each.predicted_s, each) for each in measured]
    after = [_error(each.fitted_s, each) for each in measured if each.fitted_s is not None]
    return before, after


def _error(predicted_s: float, each: Contender) -> float:
    assert each.measured is not None
    return abs(predicted_s / each.measured.step_time_s - 1)


def sentences(found: Tuned) -> list[str]:
    """What came of it: the plan, how it ended, and what the fit made of the predictions."""
    before, after = errors_of(found)
    lines = [f"ended: {found.reason}"]
    if found.smaller:
        return [*lines, *_small_sentences(found), *memory_sentences(found)]
    first = next((each for each in found.standings if each.measured is not None), None)
    if first is None or first.measured is None or first.fitted_s is None:
        lines.append(f"the plan is the predicted one, {found.label}: nothing was measured")
        return lines
    lines.append(
        f"{first.label}: measured {format_seconds(first.measured.step_time_s)}, predicted "
        f"{format_seconds(first.predicted_s)} before and {format_seconds(first.fitted_s)} after the fit"
    )
    chosen = min((each for each in found.standings), key=lambda each: each.predicted_s)
    if chosen.ratio is not None:
        lines.append(f"prediction alone would have chosen {chosen.label}, which takes {chosen.ratio:.2f} times as long")
    left = [(each.fitted_s, each.label) for each in found.standings if each.outcome == NOT_MEASURED and each.fitted_s]
    for seconds, label in sorted(left)[:1]:
        if seconds < first.measured.step_time_s:
            lines.append(f"{label} is predicted to take {format_seconds(seconds)}, and the race ended before it ran")
    if len(before) == 1:
        lines.append(f"its prediction was off by {before[0]:.1%}, after the fit by {after[0]:.1%} (of this same plan)")
    else:
        lines.append(
            f"predictions of {len(before)} measured plans were off by {_median(before):.1%} in the median and "
            f"{max(before):.1%} at worst, after the fit by {_median(after):.1%} and {max(after):.1%} (of these same "
            "plans)"
        )
    lines += [f"{each}; the plan is for hosts that differ so" for each in (*found.slow, *found.slow_links)]
    if found.factors:
        told = sorted(found.factors.items(), key=lambda item: -abs(math.log(item[1])))
        lines.append("what moved most: " + ", ".join(f"{name} x {factor:.2f}" for name, factor in told[:4]))
    return [*lines, *memory_sentences(found)]


def _small_sentences(found: Tuned) -> list[str]:
    """The same where smaller jobs ran, with what they do not show."""
    ran = [one for each in found.standings for one in each.stand_ins if one.measured is not None]
    first = next((each for each in found.standings if each.label == found.label), None)
    if not ran or first is None or first.fitted_s is None:
        return [f"the plan is the predicted one, {found.label}: nothing was measured"]
    before, after = zip(*((_off(one.predicted_s, one), _off(one.fitted_s, one)) for one in ran), strict=True)
    lines = [
        f"{first.label}: predicted {format_seconds(first.predicted_s)} before and {format_seconds(first.fitted_s)} "
        f"after the fit to {len(ran)} {found.smaller}",
        f"predictions of what ran were off by {_median(list(before)):.1%} in the median and {max(before):.1%} at "
        f"worst, after the fit by {_median(list(after)):.1%} and {max(after):.1%} (of these same runs)",
    ]
    if first.unseen:
        told = (f"{each.term}, {each.seconds / first.fitted_s:.1%} of the step" for each in first.unseen)
        lines.append(f"not seen so, and therefore still predicted: {'; '.join(told)}")
    else:
        lines.append("every term of its step was seen in the smaller job")
    faster = [each for each in found.standings if not each.stand_ins and (each.fitted_s or math.inf) < first.fitted_s]
    lines += [
        f"{each.label} is predicted to take {format_seconds(each.fitted_s or 0.0)}, and could not be measured so small"
        for each in faster[:1]
    ]
    if found.factors:
        moved = sorted(found.factors.items(), key=lambda item: -abs(math.log(item[1])))
        lines.append("what moved most: " + ", ".join(f"{name} x {factor:.2f}" for name, factor in moved[:4]))
    return lines


def _off(predicted_s: float, one: StandIn) -> float:
    assert one.measured is not None
    return abs(predicted_s / one.measured.step_time_s - 1)


def _median(values: list[float]) -> float:
    return quantile(tuple(values), 0.5)


def print_tuned(console: Console, found: Tuned, notes: list[str], quiet: bool) -> None:
    """The race on a screen. quiet: the outcome only."""
    if not quiet:
        print_job(console, found.plan)
        rows = [row[:-1] for row in rows_of(found)]
        title = f"Measured: {found.smaller}, for" if found.smaller else "Raced for"
        print_rows(console, f"{title} {found.elapsed_s / 60:.1f} min", headings_of(found)[:-1], rows)
        if found.memory:
            print_rows(console, "Peak memory", MEMORY_HEADINGS, memory_rows(found))
        print_notes(console, [f"{each.label}: {each.outcome}" for each in found.standings] + notes)
    for sentence in sentences(found):
        console.print(hanging("tuned", Text(sentence), "cyan"))


def tuned_document(found: Tuned, notes: list[str]) -> dict[str, Any]:
    """What --json prints."""
    before, after = errors_of(found)
    return {
        "plan": found.plan.model_dump(mode="json"),
        "label": found.label,
        "agreed": found.agreed,
        "reason": found.reason,
        "rounds": found.rounds,
        "elapsed_s": found.elapsed_s,
        "factors": found.factors,
        "errors": {"before": before, "after": after},
        "candidates": [
            {
                "label": each.label,
                "by": each.by,
                "layout": each.plan.label,
                "predicted_s": each.predicted_s,
                "fitted_s": each.fitted_s,
                "measured": None if each.measured is None else each.measured.model_dump(mode="json"),
                "outcome": each.outcome,
                "stand_ins": [
                    {
                        "label": one.label,
                        "layout": one.plan.label,
                        "ranks": one.plan.degrees.num_devices,
                        "rank": one.rank,
                        "predicted_s": one.predicted_s,
                        "fitted_s": one.fitted_s,
                        "measured": None if one.measured is None else one.measured.model_dump(mode="json"),
                        "outcome": one.outcome,
                    }
                    for one in each.stand_ins
                ],
                "still_predicted": [{"term": term.term, "predicted_s": term.seconds} for term in each.unseen],
            }
            for each in found.standings
        ],
        "memory": [asdict(each) for each in found.memory],
        "slow_hosts": [asdict(each) for each in found.slow],
        "slow_links": [asdict(each) for each in found.slow_links],
        "notes": notes,
    }
