"""Measured set-ups in words and rows: beside their predictions, who is fastest, what ties, what was not run and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...profiler.machine.units import format_seconds
from ..measuring.measurement import Measurement
from ..measuring.significance import CONFIDENCE, Apart, Standing, standing

if TYPE_CHECKING:
    from ...planner.answers.candidate import Candidate

Times = Mapping[str, Measurement | str]
"""Label -> what a set-up really took, or why it was not run."""


@dataclass(frozen=True)
class MeasuredTable:
    """A row for every measured set-up, and the sentences that go with it."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...]


def measured_table(candidates: Sequence["Candidate"], times: Times, reference: str) -> MeasuredTable:
    """Every measured set-up beside its prediction and the set-up `reference`."""
    runs = _runs(times)
    found = standing(runs, reference)
    against = {} if found is None else {apart.label: apart for apart in found.against}
    headings = ["set-up", "predicted", "measured", "spread", "ratio"]
    headings += [] if found is None else [f"to {found.reference}"]
    rows = []
    for candidate in candidates:
        run, priced = runs.get(candidate.label), candidate.estimate
        if run is None or priced is None:
            continue
        cells = [
            candidate.label,
            format_seconds(priced.step_time_s),
            format_seconds(run.step_time_s),
            f"±{run.spread:.1%}",
            f"{priced.step_time_s / run.step_time_s:.2f}",
        ]
        cells += [] if found is None else [_apart_in_words(against.get(candidate.label))]
        rows.append(tuple(cells))
    return MeasuredTable(tuple(headings), tuple(rows), tuple(_sentences(times, found)))


def _apart_in_words(apart: Apart | None) -> str:
    if apart is None:
        return ""
    interval = "" if apart.low == 0.0 else f" ({apart.low:.2f}-{apart.high:.2f})"
    return f"{apart.ratio:.2f}x{interval} {'tie' if apart.tie else 'slower' if apart.ratio > 1 else 'faster'}"


def _sentences(times: Times, found: Standing | None) -> list[str]:
    """How it was measured, who is fastest by which rule, and why some were not run."""
    runs = _runs(times)
    if not runs:
        return _failures(times)
    first = next(iter(runs.values()))
    turns = len(first.steps_s)
    sentences = [
        f"measured: median of {turns} x {len(first.steps_s[0])} steps, the set-ups in turns, {first.device}; spread: "
        "half the distance between the quartiles; ratio: predicted / measured"
    ]
    if found is not None:
        who = ", ".join((found.fastest, *found.ties))
        sentences.append(f"fastest: a tie of {who}" if found.ties else f"fastest: {who}, beyond the noise")
        rule = (
            f"the {CONFIDENCE:.0%} interval (in brackets) holds 1 (Student's, over the ratios of {turns} turns, wide "
            "enough for all pairs together)"
        )
        alone = "one turn tells nothing of the noise, so nothing is called faster; give --repetitions 3 or more"
        sentences.append(f"tie: {rule if turns > 1 else alone}")
    return sentences + _failures(times)


def _failures(times: Times) -> list[str]:
    return [f"{label} was not measured: {why}" for label, why in times.items() if isinstance(why, str)]


def measured_document(times: Times | None, label: str) -> dict[str, Any] | None:
    """What a candidate really took, or why it was not run; None if it was not asked for, or has no plan to run."""
    found = None if times is None else times.get(label)
    if found is None:
        return None
    return {"not_run": found} if isinstance(found, str) else found.model_dump(mode="json")


def standing_document(times: Times, reference: str) -> dict[str, Any] | None:
    """Who was fastest, which set-ups tie, and every ratio; None where fewer than two were measured."""
    found = standing(_runs(times), reference)
    if found is None:
        return None
    against = [
        {
            "label": apart.label,
            "ratio": apart.ratio,
            "interval": None if apart.low == 0.0 else [apart.low, apart.high],
            "tie": apart.tie,
        }
        for apart in found.against
    ]
    return {"fastest": found.fastest, "ties": list(found.ties), "reference": found.reference, "against": against}


def _runs(times: Times) -> dict[str, Measurement]:
    return {label: run for label, run in times.items() if not isinstance(run, str)}
