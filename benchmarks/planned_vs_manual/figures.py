"""What was predicted and measured of every set-up of a model, and the figures that sum it up."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One set-up of one model: predicted and measured seconds of a step; or why it was not run. work: the most that a
    rank really worked, relative to the declared time that was to hide it. same_as: the set-up with the same plan, which
    was run for both."""

    label: str
    layout: str
    predicted_s: float | None
    measured_s: float | None
    spread: float | None
    work: float | None
    note: str
    same_as: str | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Result:
    """All set-ups of one model on one topology, the plan first."""

    case: str
    topology: str
    rows: tuple[Row, ...]

    @property
    def run(self) -> list[Row]:
        """Rows that were run."""
        return [row for row in self.rows if row.measured_s is not None]

    @property
    def distinct(self) -> list[Row]:
        """One row for each plan that was run."""
        return [row for row in self.run if row.same_as is None]

    @property
    def ratio(self) -> float | None:
        """Measured step of the plan over that of the best manual set-up; None where the plan was not run."""
        planned, *manual = self.rows
        times = [row.measured_s for row in manual if row.measured_s is not None]
        return planned.measured_s / min(times) if planned.measured_s is not None and times else None

    @property
    def tau(self) -> float | None:
        """Kendall's tau of predicted against measured, over pairs whose measured times are more than 1% apart; of those
        that are predicted equal neither order is right or wrong."""
        agree = total = 0
        for a, b in itertools.combinations(self.distinct, 2):
            measured, predicted = _ratio(a.measured_s, b.measured_s), _ratio(a.predicted_s, b.predicted_s)
            if abs(measured) > 0.01:
                total += 1
                if abs(predicted) > 1e-6:
                    agree += 1 if measured * predicted > 0 else -1
        return agree / total if total else None


def _ratio(a: float | None, b: float | None) -> float:
    assert a is not None
    assert b is not None
    return math.log(a / b)


def figures(results: Sequence[Result]) -> dict[str, float]:
    """Planned over best manual, errors of predictions, tau, and how often the plan is best; {} without results."""
    ratios = [ratio for result in results if (ratio := result.ratio) is not None]
    errors = sorted(abs(row.error) for result in results for row in result.distinct if row.error is not None)
    taus = [tau for result in results if (tau := result.tau) is not None]
    if not ratios or not errors or not taus:
        return {}
    return {
        "planned over best manual, median": statistics.median(ratios),
        "planned over best manual, worst": max(ratios),
        "plan is best or within 1%": sum(ratio <= 1.01 for ratio in ratios) / len(ratios),
        "predicted over measured, median error": statistics.median(errors),
        "predicted over measured, 90th percentile": errors[math.ceil(0.9 * len(errors)) - 1],
        "predicted over measured, worst error": errors[-1],
        "Kendall tau, median": statistics.median(taus),
        "Kendall tau, worst": min(taus),
        "models x clusters": float(len(results)),
        "distinct plans run": float(len(errors)),
    }
