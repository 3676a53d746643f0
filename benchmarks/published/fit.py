"""Fits the free constants to published step times, and tells what the fit is worth on groups it has not seen.

    python -m benchmarks.published.fit [--out FOLDER] [--rounds N]

Minimises sum_i w_i rho(log predicted_i - log measured_i) + sum_k (log factor_k / spread_k)^2 over the logarithms of
factors on the constants' values before any fit, by Gauss-Newton with weights of a robust rho (Huber). Files count by
the root of their rows. fit.json in the folder says which factors are already in the project's files.

Groups out: one more move without the group's rows, from the derivatives at the common point, priced exactly; on the
largest sources a second move follows, and both are told. Derivatives are of the point before the last move.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.cost.bands import time_kind
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.model_profile import ModelProfile

from .clusters import place
from .constants import CONSTANTS, Constant, applies, factors_of, on_cluster, tried
from .fit_bands import time_bands
from .metrics import quantile, sweeps
from .pricing import Priced, Pricer
from .rows import DATA, Row, read_folders
from .settings import CannotPriceError, setting_of
from .single_modules import step_seconds_of

Floats = NDArray[np.float64]

STEP = 0.05
"""Change of a logarithm for its derivative."""

HUBER = 0.06
"""Residual (in logarithm) from which a row pulls no harder."""

GIVEN = 8
"""Rows of a source that are given back to a fit without it, spread evenly over the file; of small files half."""

GIVEN_WEIGHT = 6.0
"""Weight of each such row: they are of the cluster that is asked about."""

REPEATED = 1
"""Largest sources whose fold is moved once more."""


@dataclass(frozen=True)
class Case:
    """A row that can be fitted to: its plan, its profile, what was measured."""

    row: Row
    plan: Plan
    profile: ModelProfile
    measured_s: float
    weight: float
    repeated: tuple[str, ...] = ()
    """Single modules that run again, see single_modules.py."""


@dataclass(frozen=True)
class Point:
    """Logarithms of the factors, and what they predict: logarithms of seconds, and their derivatives [case, factor]."""

    logarithms: Floats
    predicted: Floats
    slopes: Floats


def cases_of(rows: Sequence[Row]) -> list[Case]:
    """Rows whose step time counts and that can be priced, with the plan of the present constants; models together."""
    pricer, found = Pricer(), []
    for row in rows:
        if row.step_s is None or not row.scores_time:
            continue
        try:
            setting = setting_of(row)
            _, plan = pricer.estimate(setting, place(row).cluster)
        except (CannotPriceError, ValueError):
            continue
        profile = pricer.profile(setting)
        found.append(Case(row, plan, profile, row.step_s, row.weight, setting.repeated))
    return sorted(found, key=lambda case: case.profile.fingerprint)


class Fit:
    """The rows, their weights, and the factors that the project's files already hold."""

    def __init__(self, cases: Sequence[Case], applied: Mapping[str, float]) -> None:
        self.cases = cases
        self.measured = np.log([case.measured_s for case in cases])
        self.weights = _weights(cases)
        self.applied = np.array([math.log(applied.get(constant.name, 1.0)) for constant in CONSTANTS])
        self.spreads = np.array([constant.spread for constant in CONSTANTS])

    def predict(self, logarithms: Floats, which: Sequence[int] | None = None) -> Floats:
        """Logarithms of the predicted step times of some cases (all, if not said)."""
        factors = self._factors(logarithms)
        chosen = range(len(self.cases)) if which is None else which
        with tried(factors):
            return np.array([_logarithm(self.cases[i], factors) for i in chosen])

    def at(self, logarithms: Floats) -> Point:
        """Predictions and derivatives; a constant is tried only on the rows that it applies to."""
        here = self.predict(logarithms)
        slopes = np.zeros((len(here), len(CONSTANTS)))
        for k, constant in enumerate(CONSTANTS):
            rows = [i for i, case in enumerate(self.cases) if applies(constant, case.plan)]
            if rows:
                moved = logarithms + STEP * (np.arange(len(CONSTANTS)) == k)
                slopes[rows, k] = (self.predict(moved, rows) - here[rows]) / STEP
        return Point(logarithms, here, slopes)

    def move(self, point: Point, weights: Floats) -> Floats:
        """Logarithms of least robust error under the model linearised at a point, by reweighted least squares; no
        further than 0.5 from there."""
        residuals, slopes = point.predicted - self.measured, point.slopes
        step = np.zeros(len(CONSTANTS))
        for _ in range(30):
            left = residuals + slopes @ step
            pull = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-9)) / HUBER**2
            matrix = slopes.T @ (pull[:, None] * slopes) + np.diag(1.0 / self.spreads**2)
            vector = slopes.T @ (pull * residuals) + (point.logarithms + self.applied) / self.spreads**2
            step = np.clip(-np.linalg.solve(matrix, vector), -0.5, 0.5)
        moved: Floats = point.logarithms + step
        return moved

    def fitted(self, rounds: int, weights: Floats, start: Floats | None = None) -> Point:
        """The point after so many moves. Its derivatives are those before the last, which change them little."""
        point = self.at(np.zeros(len(CONSTANTS)) if start is None else start)
        for left in range(rounds, 0, -1):
            moved = self.move(point, weights)
            point = self.at(moved) if left > 1 else Point(moved, self.predict(moved), point.slopes)
            error = quantile(np.abs(point.predicted - self.measured).tolist(), weights.tolist(), 0.5)
            print(f"round: median error {100 * error:.1f}%", file=sys.stderr)
        return point

    def groups_out(self, point: Point, groups: Sequence[str], given: int = 0) -> tuple[Floats, dict[str, Floats]]:
        """(residual of each case under the move without its group, group -> logarithms there). given: rows of the
        group that are given back; their residuals are NaN."""
        residuals, found = np.zeros(len(self.cases)), {}
        for group in sorted(set(groups)):
            members = [i for i, other in enumerate(groups) if other == group]
            back = _spread_evenly(members, min(given, len(members) // 2))
            weights = self.weights.copy()
            weights[members] = 0.0
            weights[back] = GIVEN_WEIGHT
            found[group] = self.move(point, weights)
            residuals[members] = self.predict(found[group], members) - self.measured[members]
            residuals[back] = np.nan
        return residuals, found

    def _factors(self, logarithms: Floats) -> dict[str, float]:
        return factors_of({c.name: float(x) for c, x in zip(CONSTANTS, logarithms, strict=True)})


def _logarithm(case: Case, factors: Mapping[str, float]) -> float:
    return math.log(step_seconds_of(on_cluster(case.plan, factors), case.profile, case.repeated))


def _spread_evenly(places: Sequence[int], count: int) -> list[int]:
    return [places[int((i + 0.5) * len(places) / count)] for i in range(count)]


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.fit", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fitted", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="moves; 0 tells of the present constants")
    given = parser.parse_args(arguments)
    page = given.out / "fit.json"
    applied = json.loads(page.read_text())["factors"] if page.exists() else {}
    document = _document(Fit(cases_of(read_folders([DATA])), applied), given.rounds)
    given.out.mkdir(parents=True, exist_ok=True)
    page.with_name("fit.new.json").write_text(json.dumps(document, indent=1) + "\n")
    page.with_name("fit.md").write_text(markdown(document))
    print(json.dumps(document["errors"], indent=1))
    return 0


def _document(fit: Fit, rounds: int) -> dict[str, object]:
    cases = fit.cases
    point = fit.fitted(rounds, fit.weights)
    inside = point.predicted - fit.measured
    errors = {"in-sample": _errors(cases, inside)}
    orders = {"in-sample": _orders(cases, inside)}
    models, _ = fit.groups_out(point, [f"{case.row.file} {case.row.model['name']}" for case in cases])
    errors["groups out"], orders["groups out"] = _errors(cases, models), _orders(cases, models)
    files = [case.row.file for case in cases]
    sources, found = fit.groups_out(point, files)
    errors["sources out"], orders["sources out"] = _errors(cases, sources), _orders(cases, sources)
    eight, _ = fit.groups_out(point, files, GIVEN)
    errors["sources out, 8 rows given"] = _errors(cases, eight)
    total = point.logarithms + fit.applied
    spans = np.array(list(found.values())) + fit.applied
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "rows": len(cases),
        "constants": len(CONSTANTS),
        "constants for dense 16 bit": sum(_for_dense_16_bit(constant, cases) for constant in CONSTANTS),
        "factors": {c.name: round(math.exp(x), 4) for c, x in zip(CONSTANTS, total, strict=True)},
        "folds": {
            c.name: [round(math.exp(low), 3), round(math.exp(high), 3)]
            for c, low, high in zip(CONSTANTS, spans.min(axis=0), spans.max(axis=0), strict=True)
        },
        "spreads": {c.name: c.spread for c in CONSTANTS},
        "errors": errors,
        "orders": orders,
        "bands": {kind: [b.low, b.high, b.runs] for kind, b in time_bands(_by_kind(cases, models)).items()},
        "second moves": _moved_twice(fit, files, sources, found),
    }


def _moved_twice(
    fit: Fit, files: Sequence[str], residuals: Floats, found: Mapping[str, Floats]
) -> dict[str, dict[str, dict[str, float]]]:
    """Largest sources -> error of their rows after one move without them, and after another from there."""
    told = {}
    for group in sorted(found, key=lambda group: -files.count(group))[:REPEATED]:
        members = [i for i, name in enumerate(files) if name == group]
        weights = fit.weights.copy()
        weights[members] = 0.0
        again = fit.predict(fit.move(fit.at(found[group]), weights), members) - fit.measured[members]
        rows = [fit.cases[i].weight for i in members]
        told[group] = {"one move": _summary(residuals[members], rows), "two moves": _summary(again, rows)}
    return told


def _by_kind(cases: Sequence[Case], residuals: Floats) -> dict[str, list[tuple[float, float]]]:
    """Kind of run, as bands have them -> (residual, weight) of its rows."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, residual in zip(cases, residuals.tolist(), strict=True):
        kind = time_kind(case.row.is_moe, case.plan.training.precision, case.plan.cluster.num_hosts)
        found[kind].append((residual, case.weight))
    return found


def _for_dense_16_bit(constant: Constant, cases: Sequence[Case]) -> bool:
    return any(applies(constant, case.plan) for case in cases if _kind(case.row) == "dense 16 bit")


def _weights(cases: Sequence[Case]) -> Floats:
    """Rows by their scoring weight; files by the root of their rows; in sum as many as there are rows."""
    by_file: dict[str, float] = defaultdict(float)
    for case in cases:
        by_file[case.row.file] += case.weight
    weights = np.array([case.weight / math.sqrt(by_file[case.row.file]) for case in cases])
    scaled: Floats = weights * (len(cases) / weights.sum())
    return scaled


def _errors(cases: Sequence[Case], residuals: Floats) -> dict[str, dict[str, float]]:
    """Kind of row -> weighted median and p90 of |log(predicted / measured)|, and the median of its sign."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        if not math.isnan(residuals[i]):
            kinds[_kind(case.row)].append(i)
            kinds[f"{_kind(case.row)}, {case.row.file}"].append(i)
    return {kind: _summary(residuals[kinds[kind]], [cases[i].weight for i in kinds[kind]]) for kind in sorted(kinds)}


def _orders(cases: Sequence[Case], residuals: Floats) -> dict[str, dict[str, float | None]]:
    """Sweep -> Kendall tau and regrets."""
    priced = [Priced(c.row, step_s=c.measured_s * math.exp(r)) for c, r in zip(cases, residuals, strict=True)]
    return {
        sweep.name: {
            "tau": None if sweep.tau is None else round(sweep.tau, 2),
            "mean regret": round(sweep.mean_regret, 4),
            "worst regret": round(sweep.worst_regret, 4),
        }
        for sweep in sweeps(priced)
    }


def _kind(row: Row) -> str:
    kind: Callable[[bool], str] = lambda low: "low precision" if low else "16 bit"  # noqa: E731
    return f"{'moe' if row.is_moe else 'dense'} {kind(row.is_low_precision)}"


def _summary(residuals: Floats, weights: Sequence[float]) -> dict[str, float]:
    sizes = np.abs(residuals).tolist()
    return {
        "n": len(residuals),
        "median": round(quantile(sizes, weights, 0.5), 4),
        "p90": round(quantile(sizes, weights, 0.9), 4),
        "bias": round(quantile(residuals.tolist(), weights, 0.5), 4),
    }


def markdown(document: dict[str, object]) -> str:
    """The page of a fit: errors by kind and file, sweeps, and every constant with its spread over the folds."""
    errors: dict[str, dict[str, dict[str, float]]] = document["errors"]  # type: ignore[assignment]
    orders: dict[str, dict[str, dict[str, float | None]]] = document["orders"]  # type: ignore[assignment]
    folds: dict[str, tuple[float, float]] = document["folds"]  # type: ignore[assignment]
    factors: dict[str, float] = document["factors"]  # type: ignore[assignment]
    spreads: dict[str, float] = document["spreads"]  # type: ignore[assignment]
    ends: dict[str, dict[str, dict[str, float]]] = document["second moves"]  # type: ignore[assignment]
    lines = [
        "# Fit to published step times",
        "",
        f"{document['date']}, {document['rows']} rows, {document['constants']} free constants, of which "
        f"{document['constants for dense 16 bit']} touch dense 16-bit rows. `python -m benchmarks.published.fit`.",
        "",
        "Weighted median / p90 of |ln(predicted / measured)|, and the bias in sample. Groups: model x source.",
        "",
        f"| rows | n | {' | '.join(errors)} | bias |",
        "|---|---|" + "---|" * (len(errors) + 1),
    ]
    for kind in sorted(errors["in-sample"], key=lambda name: ("," in name, name)):
        cells = [errors[way].get(kind) for way in errors]
        shown = ["" if c is None else f"{100 * c['median']:.1f}% / {100 * c['p90']:.0f}%" for c in cells]
        found = errors["in-sample"][kind]
        lines.append(f"| {kind} | {found['n']} | {' | '.join(shown)} | {100 * found['bias']:+.1f}% |")
    lines += ["", "| sweep | " + " | ".join(f"tau, {way}" for way in orders) + " | regret, mean | worst |"]
    lines.append("|---|" + "---|" * (len(orders) + 2))
    for name, found in orders["in-sample"].items():
        taus = ["" if (tau := orders[way][name]["tau"]) is None else f"{tau:.2f}" for way in orders]
        lines.append(
            f"| {name} | {' | '.join(taus)} | {100 * (found['mean regret'] or 0):.1f}% "
            f"| {100 * (found['worst regret'] or 0):.1f}% |"
        )
    lines += ["", "Sources out, by one move and by two:", ""]
    for name, ways in ends.items():
        one, end = ways["one move"], ways["two moves"]
        lines.append(
            f"- {name}: {100 * one['median']:.1f}% / {100 * one['p90']:.0f}% and "
            f"{100 * end['median']:.1f}% / {100 * end['p90']:.0f}%"
        )
    lines += ["", "Factors on the values before any fit; their range over the fits without one source; spread: of the"]
    lines += ["logarithm, as taken for likely before.", "", "| constant | factor | sources out | spread |"]
    lines += ["|---|---|---|---|"]
    for name, factor in factors.items():
        low, high = folds[name]
        lines.append(f"| {name} | {factor:.2f} | {low:.2f}-{high:.2f} | {spreads[name]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
