"""The figures: weighted quantiles of errors, Kendall tau and regret inside sweeps, out-of-memory counts."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .pricing import Priced
from .rows import Row

CLOSE = 0.01
"""Measurements this near each other are not put in order."""

MIN_PAIRS = 5
"""A sweep with fewer pairs to order has no tau: one swapped pair would decide it."""


@dataclass(frozen=True)
class Spread:
    """Errors |log(predicted / measured)| of some rows, weighted. bias: median of the signed ones."""

    median: float
    mean: float
    p90: float
    bias: float
    n: int


@dataclass(frozen=True)
class Sweep:
    """Rows of one file, GPU and precision; compared where model, software, GPUs and global batch agree as well.

    tau: (pairs in the right order - pairs that are not) / pairs; a tie in the prediction is neither. None: too few.
    regret: how much slower than the fastest the planner's picks ran, at worst and on average over the groups.
    """

    name: str
    rows: int
    groups: int
    pairs: int
    tau: float | None
    mean_regret: float
    worst_regret: float


@dataclass(frozen=True)
class OutOfMemory:
    """How runs that ran out of memory, and runs that did not, were predicted. Shares are None where there is none."""

    found: int
    failures: int
    false_alarms: int
    ran: int

    @property
    def recall(self) -> float | None:
        """Share of the failures that were predicted."""
        return self.found / self.failures if self.failures else None

    @property
    def precision(self) -> float | None:
        """Share of the predicted failures that were."""
        told = self.found + self.false_alarms
        return self.found / told if told else None

    @property
    def false_alarm_rate(self) -> float | None:
        """Share of the runs that were said not to fit."""
        return self.false_alarms / self.ran if self.ran else None


def quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """Weighted quantile: each value stands at the middle of its weight, straight lines between."""
    order = np.argsort(values)
    sorted_values, sorted_weights = np.asarray(values)[order], np.asarray(weights)[order]
    middle = (np.cumsum(sorted_weights) - sorted_weights / 2) / sorted_weights.sum()
    return float(np.interp(share, middle, sorted_values))


def spread(signed: Sequence[float], weights: Sequence[float]) -> Spread | None:
    """Summary of signed log errors; None where there are none."""
    if not signed:
        return None
    sizes = [abs(error) for error in signed]
    return Spread(
        median=quantile(sizes, weights, 0.5),
        mean=float(np.average(sizes, weights=weights)),
        p90=quantile(sizes, weights, 0.9),
        bias=quantile(signed, weights, 0.5),
        n=len(signed),
    )


def time_error(priced: Priced) -> float | None:
    """log(predicted / measured) of the step time; None where a row does not count or has no prediction."""
    measured = priced.row.step_s
    if not priced.row.scores_time or priced.step_s is None or measured is None:
        return None
    return math.log(priced.step_s / measured)


def memory_error(priced: Priced) -> float | None:
    """log(predicted / measured) of the peak, by the metric that was measured."""
    measured = priced.row.memory_bytes
    if not priced.row.scoring["score_memory"] or measured is None or not priced.memory_bytes:
        return None
    return math.log(priced.memory_bytes[priced.row.memory_metric] / measured)


def summary(rows: Iterable[Priced], error: Callable[[Priced], float | None]) -> Spread | None:
    """Spread of an error over the rows that have it."""
    found = [(value, priced.row.weight) for priced in rows if (value := error(priced)) is not None]
    return spread([value for value, _ in found], [weight for _, weight in found])


def strata(
    rows: Sequence[Priced], key: Callable[[Priced], str | Iterable[str]], error: Callable[[Priced], float | None]
) -> dict[str, Spread]:
    """Spread by stratum; a row with several keys counts under each."""
    parts: dict[str, list[Priced]] = {}
    for priced in rows:
        keys = key(priced)
        for name in (keys,) if isinstance(keys, str) else keys:
            parts.setdefault(name, []).append(priced)
    found = {name: summary(part, error) for name, part in sorted(parts.items())}
    return {name: value for name, value in found.items() if value is not None}


def sweeps(rows: Sequence[Priced]) -> list[Sweep]:
    """Every sweep that has something to order."""
    parts: dict[tuple[str, ...], dict[tuple[object, ...], list[Priced]]] = {}
    for priced in rows:
        if time_error(priced) is not None:
            sweep, group = _keys(priced.row)
            parts.setdefault(sweep, {}).setdefault(group, []).append(priced)
    found = [_sweep(" ".join(name), [g for g in groups.values() if len(g) > 1]) for name, groups in parts.items()]
    return [sweep for sweep in found if sweep.pairs]


def _keys(row: Row) -> tuple[tuple[str, ...], tuple[object, ...]]:
    """(sweep, group): layouts of one group do the same work on the same machine."""
    model = row.model
    sizes = tuple(str(model[key]) for key in ("n_layers", "hidden", "n_heads", "seq_len"))
    precision = str(row.config["precision"]).split(" (")[0]
    return (
        (row.file, str(row.scoring["gpu"]), precision),
        (model["name"], *sizes, row.software, row.cluster["n_gpus"], row.config["global_batch"], row.config["task"]),
    )


def _sweep(name: str, groups: Sequence[Sequence[Priced]]) -> Sweep:
    score = pairs = 0
    regrets = []
    for group in groups:
        rows = [(float(p.step_s or 0), float(p.row.step_s or 0), p.row.config) for p in group]
        for (one, measured, config), (other, beside, also) in itertools.combinations(rows, 2):
            far_apart = abs(math.log(measured / beside)) > math.log1p(CLOSE)
            if far_apart and config != also:
                pairs += 1
                score += int(np.sign(one - other) * np.sign(measured - beside))
        regrets.append(regret([row[:2] for row in rows]))
    return Sweep(
        name=name,
        rows=sum(map(len, groups)),
        groups=len(groups),
        pairs=pairs,
        tau=score / pairs if pairs >= MIN_PAIRS else None,
        mean_regret=float(np.mean(regrets)) if regrets else 0.0,
        worst_regret=max(regrets, default=0.0),
    )


def regret(predicted_measured: Sequence[tuple[float, float]]) -> float:
    """How much slower than the fastest run the one predicted fastest was; of ties the average."""
    least = min(predicted for predicted, _ in predicted_measured)
    picks = [measured for predicted, measured in predicted_measured if predicted <= least * (1 + 1e-9)]
    return float(np.mean(picks)) / min(measured for _, measured in predicted_measured) - 1


def out_of_memory(rows: Sequence[Priced]) -> OutOfMemory:
    """Failures found and false alarms; fragmentation aside."""
    priced = [p for p in rows if p.fits is not None and not p.row.is_fragmentation]
    failed = [p for p in priced if p.row.scoring["score_oom"] and p.row.measured["oom"]]
    ran = [p for p in priced if not p.row.measured["oom"] and (p.row.scores_time or p.row.scoring["score_memory"])]
    return OutOfMemory(sum(not p.fits for p in failed), len(failed), sum(not p.fits for p in ran), len(ran))
