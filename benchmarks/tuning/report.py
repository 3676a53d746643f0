"""The tables of the races: chosen over best, time, and errors of predictions before and after."""

import statistics
from collections.abc import Sequence
from typing import Any

Found = dict[str, Any]


def markdown(found: Sequence[Found]) -> str:
    """A row for every race, and the figures over all."""
    lines = ["# Tuned against everything measured", "", *_figures(found), "", *_rows(found)]
    return "\n".join(lines) + "\n"


def untried(found: Found, when: str) -> list[float]:
    """|predicted / measured - 1| of plans that the race did not try; when: before or after the fit."""
    return sorted(abs(error[when]) for error in found["errors"].values() if not error["tried"])


def _figures(found: Sequence[Found]) -> list[str]:
    tuned = [each["tuned_over_best"] for each in found if each["tuned_over_best"] is not None]
    alone = [each["predicted_over_best"] for each in found if each["predicted_over_best"] is not None]
    before = sorted(error for each in found for error in untried(each, "before"))
    after = sorted(error for each in found for error in untried(each, "after"))
    shares = [each["tune_laps_s"] / each["all_laps_s"] for each in found]
    if not tuned:
        return []
    lines = ["| figure | found | target |", "|---|---|---|"]
    lines.append(
        f"| chosen over the true best, after tune ({len(tuned)} races) | median {statistics.median(tuned):.3f}, worst "
        f"{max(tuned):.3f} | median 1.00, worst 1.01 |"
    )
    lines.append(
        f"| the same, prediction alone | median {statistics.median(alone):.3f}, worst {max(alone):.3f} | reported |"
    )
    lines.append(f"| time over measuring everything as long | median {statistics.median(shares):.0%} | 25% |")
    if after:
        lines.append(
            f"| error on {len(after)} plans not tried, before -> after | median {statistics.median(before):.1%} -> "
            f"{statistics.median(after):.1%}, worst {before[-1]:.1%} -> {after[-1]:.1%} | 3%, worst 10% |"
        )
    ended = sum(bool(each["agreed"]) for each in found)
    lines.append(f"| no other is predicted near the best measured one at the end | {ended} of {len(found)} | |")
    return lines


def _rows(found: Sequence[Found]) -> list[str]:
    lines = [
        "| cluster | model | prediction alone / best | tuned / best | tried of plans | rounds | time of race, s | of "
        "measuring all | error of untried before | after | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        before, after = untried(each, "before"), untried(each, "after")
        cells = [
            each["cluster"],
            each["case"],
            _ratio(each["predicted_over_best"]),
            _ratio(each["tuned_over_best"]),
            f"{each['tried']} of {each['plans']}",
            str(each["rounds"]),
            f"{each['tune_s']:.0f}",
            f"{each['tune_laps_s'] / each['all_laps_s']:.0%}",
            f"{statistics.median(before):.1%}" if before else "",
            f"{statistics.median(after):.1%}" if after else "",
            each["load"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
