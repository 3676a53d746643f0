"""Writes what the scorer found: a JSON document, a page of Markdown, and the points of a plot."""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.planner.cost.bands import Band, bands_of, time_kind

from .clusters import place
from .metrics import (
    OutOfMemory,
    Spread,
    Sweep,
    memory_error,
    out_of_memory,
    quantile,
    strata,
    summary,
    sweeps,
    time_error,
)
from .pricing import Priced
from .slopes import Slope, slopes


def _is_dense(priced: Priced) -> bool:
    return not priced.row.is_moe and not priced.row.is_low_precision


def _kind(priced: Priced) -> str:
    kind = "moe" if priced.row.is_moe else "dense"
    return f"{kind} fp8/fp4" if priced.row.is_low_precision else f"{kind} bf16/fp16"


_BY: dict[str, Callable[[Priced], str | Sequence[str]]] = {
    "kind": _kind,
    "file": lambda p: p.row.file,
    "gpu": lambda p: str(p.row.scoring["gpu"]),
    "size": lambda p: str(p.row.scoring["size"]),
    "strategy": lambda p: str(p.row.scoring["strategy"]),
    "quality": lambda p: p.row.quality,
    "expressed": lambda p: "approximated" if p.dropped else "exactly",
    "dropped": lambda p: p.dropped,
    "assumed": lambda p: p.assumed,
}


class Scores:
    """All figures of a run."""

    def __init__(self, rows: Sequence[Priced], without_score: int = 0) -> None:
        self.rows = rows
        self.without_score = without_score
        self.dense = summary([p for p in rows if _is_dense(p)], time_error)
        self.moe = summary([p for p in rows if p.row.is_moe], time_error)
        self.all = summary(rows, time_error)
        self.by = {name: strata(rows, key, time_error) for name, key in _BY.items()}
        self.memory = summary(rows, memory_error)
        self.memory_by = {
            "metric": strata(rows, lambda p: p.row.memory_metric, memory_error),
            "file": strata(rows, _BY["file"], memory_error),
            "expressed": strata(rows, _BY["expressed"], memory_error),
        }
        self.sweeps: list[Sweep] = sweeps(rows)
        self.oom: OutOfMemory = out_of_memory(rows)
        self.exact_oom: OutOfMemory = out_of_memory([p for p in rows if not p.dropped])
        self.inside = {"step time": _inside_time(rows), "memory": _inside_memory(rows)}
        self.slopes: list[Slope] = slopes(rows, _kind)
        self.unpriced = [p for p in rows if p.step_s is None]
        self.blocking = _blocking(rows)

    def document(self) -> dict[str, Any]:
        """The JSON document. Errors are |ln(predicted / measured)|; `dense` is bf16 and fp16, `moe` all precisions."""
        taus = [(sweep.tau, sweep.pairs) for sweep in self.sweeps if sweep.tau is not None]
        regrets = [sweep.mean_regret for sweep in self.sweeps]
        return {
            "time": {
                "dense": _brief(self.dense),
                "moe": _brief(self.moe),
                "by": {name: {key: asdict(value) for key, value in part.items()} for name, part in self.by.items()},
            },
            "memory": _brief(self.memory),
            "tau": {
                "median": quantile([tau for tau, _ in taus], [pairs for _, pairs in taus], 0.5) if taus else None,
                "worst": min((tau for tau, _ in taus), default=None),
            },
            "regret": {
                "median": _median(regrets),
                "worst": max((sweep.worst_regret for sweep in self.sweeps), default=None),
            },
            "oom": {"recall": self.oom.recall, "false_alarms": self.oom.false_alarm_rate},
            "inside the bands": {
                what: {kind: {"rows": count, "share": share} for kind, (count, share) in kinds.items()}
                for what, kinds in self.inside.items()
            },
            "slopes": [asdict(slope) for slope in self.slopes],
            "unpriced": [
                {"id": p.row.id, "file": p.row.file, "line": p.row.line, "reason": p.reason} for p in self.unpriced
            ],
        }

    def markdown(self) -> str:
        """The page."""
        lines = ["# Predictions beside published measurements", ""]
        lines += [
            f"{len(self.rows)} rows that count, {len(self.rows) - len(self.unpriced)} priced; {self.without_score} "
            "more have nothing to score. Errors: |ln(predicted / measured)|, weighted by 1 / repeats; bias: median of "
            "ln(predicted / measured)."
        ]
        lines += ["", "## Step time", ""]
        total = {"all": self.all, "dense bf16 and fp16": self.dense, "moe": self.moe}
        lines += _table("", {name: value for name, value in total.items() if value is not None})
        for name, part in self.by.items():
            lines += ["", *_table(name, part)]
        lines += ["", "## Error by doublings of a size, within families", ""]
        lines += [
            "How much ln(predicted / measured) changes with each doubling, all other sizes held, between rows of one "
            "source, model, device, precision and software; t: over its standard error, families clustered.",
            "",
        ]
        lines += ["| kind | size | rows | families | a doubling | t |", "|---|---|---|---|---|---|"]
        for slope in self.slopes:
            shown = f"{100 * slope.slope:+.1f}% | {slope.t:+.1f}"
            lines.append(f"| {slope.kind} | {slope.size} | {slope.rows} | {slope.families} | {shown} |")
        lines += ["", "## Share of rows inside the 80% bands", ""]
        lines += ["Rows that the constants were fitted with; bands are of fits without them.", ""]
        lines += ["| of | kind | rows | inside |", "|---|---|---|---|"]
        for what, kinds in self.inside.items():
            lines += [f"| {what} | {kind} | {count} | {share:.0%} |" for kind, (count, share) in kinds.items()]
        lines += ["", "## Order inside sweeps", ""]
        lines += ["| sweep | rows | groups | pairs | tau | regret, mean | worst |", "|---|---|---|---|---|---|---|"]
        for sweep in sorted(self.sweeps, key=lambda s: -s.pairs):
            tau = "" if sweep.tau is None else f"{sweep.tau:.2f}"
            lines.append(
                f"| {sweep.name} | {sweep.rows} | {sweep.groups} | {sweep.pairs} | {tau} | "
                f"{100 * sweep.mean_regret:.1f}% | {100 * sweep.worst_regret:.1f}% |"
            )
        lines += ["", "## Peak memory", ""]
        for name, part in self.memory_by.items():
            lines += [*_table(name, part), ""]
        lines += ["## Out of memory, fragmentation aside", ""]
        lines += ["| rows | found | of | false alarms | of |", "|---|---|---|---|---|"]
        for name, oom in {"all": self.oom, "expressed exactly": self.exact_oom}.items():
            lines.append(f"| {name} | {oom.found} | {oom.failures} | {oom.false_alarms} | {oom.ran} |")
        lines += ["", "## What the planner cannot express, by scored rows", ""]
        lines += ["| feature | rows approximated | rows not priced |", "|---|---|---|"]
        lines += [f"| {name} | {near} | {none} |" for name, near, none in self.blocking]
        lines += ["", "## Largest errors of rows expressed exactly", ""]
        lines += ["| row | measured s | predicted s | ln |", "|---|---|---|---|"]
        exact = [(error, p) for p in self.rows if not p.dropped and (error := time_error(p)) is not None]
        for error, p in sorted(exact, key=lambda item: -abs(item[0]))[:20]:
            lines.append(f"| {p.row.id} | {p.row.step_s:.4g} | {p.step_s:.4g} | {error:+.2f} |")
        return "\n".join(lines) + "\n"

    def points(self) -> str:
        """The JSON of benchmarks.pictures: (file, measured and predicted seconds, whether expressed exactly), a line
        each."""
        scored = [p for p in self.rows if time_error(p) is not None]
        rows = [(p.row.file, p.row.step_s, float(f"{p.step_s:.4g}"), not p.dropped) for p in scored]
        return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def _inside_time(rows: Sequence[Priced]) -> dict[str, tuple[int, float]]:
    """Kind of run -> (rows, share of them whose measured step is inside the band)."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for priced in rows:
        error = time_error(priced)
        if error is not None and priced.setting is not None:
            hosts = place(priced.row).cluster.num_hosts
            errors[time_kind(priced.row.is_moe, priced.setting.precision, hosts)].append((error, priced.row.weight))
    return _inside(errors, bands_of("time"))


def _inside_memory(rows: Sequence[Priced]) -> dict[str, tuple[int, float]]:
    """Metric -> (rows, share of them whose measured peak is inside the band)."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for priced in rows:
        error = memory_error(priced)
        if error is not None:
            errors[priced.row.memory_metric].append((error, priced.row.weight))
    return _inside(errors, bands_of("memory"))


def _inside(
    errors: Mapping[str, Sequence[tuple[float, float]]], bands: Mapping[str, Band]
) -> dict[str, tuple[int, float]]:
    found = {}
    for kind, part in sorted(errors.items()):
        held = sum(weight for error, weight in part if bands[kind].low <= math.exp(-error) <= bands[kind].high)
        found[kind] = len(part), held / sum(weight for _, weight in part)
    return found


def _blocking(rows: Sequence[Priced]) -> list[tuple[str, int, int]]:
    """(feature, scored rows approximated without it, scored rows not priced for it), most rows first."""
    near = Counter(name for p in rows for name in p.dropped)
    none = Counter(p.reason for p in rows if p.step_s is None)
    return sorted(((name, near[name], none[name]) for name in near | none), key=lambda item: -(item[1] + item[2]))


def _brief(value: Spread | None) -> dict[str, float | int | None]:
    if value is None:
        return {"median": None, "p90": None, "n": 0}
    return {"median": value.median, "p90": value.p90, "n": value.n}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _table(name: str, part: dict[str, Spread]) -> list[str]:
    lines = [f"| {name} | n | median | mean | p90 | bias |", "|---|---|---|---|---|---|"]
    for key, value in part.items():
        numbers = " | ".join(f"{100 * number:.1f}%" for number in (value.median, value.mean, value.p90))
        lines.append(f"| {key} | {value.n} | {numbers} | {100 * value.bias:+.1f}% |")
    return lines
