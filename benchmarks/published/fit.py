"""Fits the free constants to published step times, and tells what the fit is worth on groups it has not seen.

    python -m benchmarks.published.fit [--out FOLDER] [--rounds N]

Minimises sum_i w_i rho(log predicted_i - log measured_i) + sum_k (log factor_k / spread_k)^2 over the logarithms of
factors on the constants' present values, by Gauss-Newton with weights of a robust rho (Huber). Files count by the root
of their rows. Whole groups out: the folds' own factors come from the same derivatives, and are priced exactly.
"""

import argparse
import json
import math
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.estimate import estimate
from meshwright.planner.plan import Plan
from meshwright.profiler.model_profile import ModelProfile

from .clusters import place
from .constants import CONSTANTS, factors_of, on_cluster, tried
from .metrics import quantile
from .pricing import Pricer
from .rows import DATA, Row, read_folders
from .settings import CannotPriceError, setting_of

Floats = NDArray[np.float64]

STEP = 0.05
"""Change of a logarithm for its derivative."""

HUBER = 0.06
"""Residual (in logarithm) from which a row pulls no harder."""

PRIOR_WEIGHT = 1.0
"""Of the spreads, in rows: the sum of all rows' weights is their number."""


@dataclass(frozen=True)
class Case:
    """A row that can be fitted to: its plan, its profile, what was measured."""

    row: Row
    plan: Plan
    profile: ModelProfile
    measured_s: float
    weight: float


def cases_of(rows: Sequence[Row]) -> list[Case]:
    """Rows whose step time counts and that can be priced, with the plan of the present constants."""
    pricer, found = Pricer(), []
    for row in rows:
        if row.step_s is None or not row.scores_time:
            continue
        try:
            setting = setting_of(row)
            _, plan = pricer.estimate(setting, place(row).cluster)
        except (CannotPriceError, ValueError):
            continue
        found.append(Case(row, plan, pricer.profile(setting.sizes, setting.name), row.step_s, row.weight))
    return found


def predicted(cases: Sequence[Case], factors: Mapping[str, float]) -> Floats:
    """Logarithms of the predicted step times, in seconds."""
    with tried(factors):
        return np.array([math.log(estimate(on_cluster(c.plan, factors), c.profile).step_time_s) for c in cases])


_cases: list[Case] = []


def _load(cases: Sequence[Case]) -> None:
    _cases[:] = cases


def _predicted_here(factors: Mapping[str, float]) -> Floats:
    return predicted(_cases, factors)


Price = Callable[[Sequence[Mapping[str, float]]], list[Floats]]


def fit(price: Price, measured: Floats, weights: Floats, rounds: int) -> tuple[dict[str, float], Floats, Floats]:
    """(logarithms of the factors, predictions there, derivatives there)."""
    names = [constant.name for constant in CONSTANTS]
    spreads = np.array([constant.spread for constant in CONSTANTS])
    point = np.zeros(len(names))
    for _ in range(rounds):
        tries = [point, *(point + STEP * np.eye(len(names))[k] for k in range(len(names)))]
        found = price([factors_of(dict(zip(names, x, strict=True))) for x in tries])
        here = found[0]
        slopes = np.stack([(there - here) / STEP for there in found[1:]], axis=1)
        point = point + _best_move(here - measured, slopes, weights, point, spreads)
        error = quantile(np.abs(here - measured).tolist(), weights.tolist(), 0.5)
        print(f"round: median error {100 * error:.1f}%", file=sys.stderr)
    final = price([factors_of(dict(zip(names, point, strict=True)))])[0]
    return dict(zip(names, point.tolist(), strict=True)), final, slopes


def _best_move(residuals: Floats, slopes: Floats, weights: Floats, point: Floats, spreads: Floats) -> Floats:
    """The move of least robust error under the linearised model, by reweighted least squares; at most 0.5 each."""
    move = np.zeros(len(point))
    for _ in range(30):
        left = residuals + slopes @ move
        pull = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-9)) / HUBER**2
        matrix = slopes.T @ (pull[:, None] * slopes) + np.diag(PRIOR_WEIGHT / spreads**2)
        vector = slopes.T @ (pull * (residuals)) + PRIOR_WEIGHT * point / spreads**2
        move = np.clip(-np.linalg.solve(matrix, vector), -0.5, 0.5)
    return move


def groups_out(
    residuals: Floats, slopes: Floats, weights: Floats, point: Floats, groups: Sequence[str]
) -> list[tuple[Floats, Floats]]:
    """Per group (which rows, the point that the others alone lead to), from the derivatives at the common point."""
    spreads = np.array([constant.spread for constant in CONSTANTS])
    labels = np.array(groups)
    moves = []
    for group in sorted(set(groups)):
        kept = np.where(labels == group, 0.0, weights)
        moves.append((labels == group, point + _best_move(residuals, slopes, kept, point, spreads)))
    return moves


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.fit", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fitted", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    given = parser.parse_args(arguments)
    rows = read_folders([DATA])
    cases = cases_of(rows)
    measured = np.log([case.measured_s for case in cases])
    weights = _weights(cases)
    with ProcessPoolExecutor(None, multiprocessing.get_context("spawn"), _load, (cases,)) as pool:
        price: Price = lambda tries: list(pool.map(_predicted_here, tries))  # noqa: E731
        logarithms, here, slopes = fit(price, measured, weights, given.rounds)
        point = np.array(list(logarithms.values()))
        report = {"in-sample": _errors(cases, here - measured)}
        for label, key in (("models out", _model_group), ("sources out", lambda case: case.row.file)):
            folds = groups_out(here - measured, slopes, weights, point, [key(case) for case in cases])
            tries = [factors_of(dict(zip(logarithms, x, strict=True))) for _, x in folds]
            residuals = np.zeros(len(cases))
            for (rows_out, _), found in zip(folds, price(tries), strict=True):
                residuals[rows_out] = (found - measured)[rows_out]
            report[label] = _errors(cases, residuals)
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "rows": len(cases),
        "constants": len(CONSTANTS),
        "factors": {name: round(factor, 4) for name, factor in factors_of(logarithms).items()},
        "errors": report,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "fit.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    return 0


def _model_group(case: Case) -> str:
    return f"{case.row.file} {case.row.model['name']}"


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
        kinds[_kind(case.row)].append(i)
        kinds[f"file {case.row.file}"].append(i)
    return {kind: _summary(residuals[places], [cases[i].weight for i in places]) for kind, places in kinds.items()}


def _kind(row: Row) -> str:
    return f"{'moe' if row.is_moe else 'dense'} {'low precision' if row.is_low_precision else '16 bit'}"


def _summary(residuals: Floats, weights: Sequence[float]) -> dict[str, float]:
    sizes = np.abs(residuals).tolist()
    return {
        "n": len(residuals),
        "median": round(quantile(sizes, weights, 0.5), 4),
        "p90": round(quantile(sizes, weights, 0.9), 4),
        "bias": round(quantile(residuals.tolist(), weights, 0.5), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
