"""A race in words and rows, for terminals and JSON: who was tried, measured beside predicted, and how it ended."""

import math
from typing import Any

from rich.console import Console
from rich.text import Text

from ...profiler.machine.units import format_seconds
from ..measuring.measurement import quantile
from ..tuning.rounds import Contender, Tuned
from .terminal import hanging, print_job, print_notes, print_rows

HEADINGS = ("candidate", "predicted", "fitted", "measured", "spread", "turns", "outcome")


def rows_of(found: Tuned) -> list[tuple[str, ...]]:
    """A row of words for every candidate, the fastest first."""
    return [_row(each) for each in found.standings]


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
    first = next((each for each in found.standings if each.measured is not None), None)
    if first is None or first.measured is None or first.fitted_s is None:
        lines.append(f"the plan is the predicted one, {found.label}: nothing was measured")
        return lines
    lines.append(
        f"{first.label}: measured {format_seconds(first.measured.step_time_s)}, predicted "
        f"{format_seconds(first.predicted_s)} before and {format_seconds(first.fitted_s)} after the fit"
    )
    chosen = min((each for each in found.standings), key=lambda each: each.predicted_s)
    if chosen.measured is not None and chosen.label != first.label:
        ratio = chosen.measured.step_time_s / first.measured.step_time_s
        lines.append(f"prediction alone would have chosen {chosen.label}, which takes {ratio:.2f} times as long")
    if len(before) == 1:
        lines.append(f"its prediction was off by {before[0]:.1%}, after the fit by {after[0]:.1%} (of this same plan)")
    else:
        lines.append(
            f"predictions of {len(before)} measured plans were off by {_median(before):.1%} in the median and "
            f"{max(before):.1%} at worst, after the fit by {_median(after):.1%} and {max(after):.1%} (of these same "
            "plans)"
        )
    if found.factors:
        told = sorted(found.factors.items(), key=lambda item: -abs(math.log(item[1])))
        lines.append("what moved most: " + ", ".join(f"{name} x {factor:.2f}" for name, factor in told[:4]))
    return lines


def _median(values: list[float]) -> float:
    return quantile(tuple(values), 0.5)


def print_tuned(console: Console, found: Tuned, notes: list[str], quiet: bool) -> None:
    """The race on a screen. quiet: the outcome only."""
    if not quiet:
        print_job(console, found.plan)
        rows = [row[:-1] for row in rows_of(found)]
        print_rows(console, f"Raced for {found.elapsed_s / 60:.1f} min", HEADINGS[:-1], rows)
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
            }
            for each in found.standings
        ],
        "notes": notes,
    }
