"""Tables of predicted against real numbers: printed, and written to results/ as Markdown."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

_WIDTH = 150


@dataclass(frozen=True)
class Check:
    """One table.

    columns: heading -> unit of its numbers ("", "B", "FLOP", "%", "s"); rows: heading -> value; verdict: how the
    numbers stand to the target, in a sentence.
    """

    name: str
    title: str
    target: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    verdict: str
    passed: bool
    notes: Sequence[str] = ()


def publish(checks: Sequence[Check]) -> int:
    """Print the tables and write them down, one file per name; 1 if one misses its target, else 0."""
    console = Console(width=max(_WIDTH, Console().width))
    for check in checks:
        console.print(_rich(check))
        console.print(f"target: {check.target}\n{check.verdict}", style="green" if check.passed else "red")
        for note in check.notes:
            console.print(f"note: {note}", highlight=False)
    name = checks[0].name
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(_markdown(name, checks))
    return 0 if all(check.passed for check in checks) else 1


def off(predicted: float, real: float) -> float:
    """How far a prediction is off, as a share of what is real."""
    return predicted / real - 1.0 if real else float(predicted != real)


def spread(errors: Sequence[float], most: float, share: float, limit: float) -> tuple[str, bool]:
    """Sentence on how many errors are within `most`, and whether `share` of them are and none is beyond `limit`."""
    within = sum(abs(error) <= most for error in errors)
    worst = max((abs(error) for error in errors), default=0.0)
    passed = within >= share * len(errors) and worst <= limit
    return f"{within} of {len(errors)} within {most:.1%}, the worst {worst:.2%} off", passed


def _text(value: Any, unit: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if unit == "%":
        return f"{value:+.2%}"
    if unit == "B":
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    if unit == "FLOP":
        return _scaled(value, 1000, ("", "k", "M", "G", "T", "P"))
    return f"{value:.2f}" if unit == "s" else f"{value:,.0f}"


def _scaled(value: float, step: int, prefixes: Sequence[str]) -> str:
    """Four significant digits and a prefix."""
    scale = 0
    while abs(value) >= step and scale < len(prefixes) - 1:
        value, scale = value / step, scale + 1
    return f"{value:.4g} {prefixes[scale]}".rstrip()


def _rich(check: Check) -> Table:
    table = Table(title=check.title)
    for heading, unit in check.columns.items():
        table.add_column(_heading(heading, unit), justify="left" if heading in ("model", "note") else "right")
    for row in check.rows:
        table.add_row(*(_text(row.get(heading), unit) for heading, unit in check.columns.items()))
    return table


def _heading(heading: str, unit: str) -> str:
    return f"{heading} ({unit})" if unit in ("FLOP", "s") else heading


def _markdown(name: str, checks: Sequence[Check]) -> str:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [f"`python -m benchmarks.accuracy.{name}`, {date}, torch {torch.__version__}"]
    for check in checks:
        lines += ["", f"## {check.title}", "", f"Target: {check.target}. {check.verdict}.", ""]
        lines.append("| " + " | ".join(_heading(h, unit) for h, unit in check.columns.items()) + " |")
        lines.append("|" + "|".join("---" if h in ("model", "note") else "---:" for h in check.columns) + "|")
        for row in check.rows:
            cells = (_text(row.get(heading), unit) for heading, unit in check.columns.items())
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", *(f"- {note}" for note in check.notes)] if check.notes else []
    return "\n".join(lines).rstrip() + "\n"
