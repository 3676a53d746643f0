"""How far predictions lay from published runs of the same kind: the band that 8 of 10 measurements fell in."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from .plan import Plan

Metric = Literal["allocated", "reserved", "device"]

_FILE = Path(__file__).with_name("bands.toml")

_LOW_PRECISIONS = ("fp8", "fp4")


@dataclass(frozen=True)
class Band:
    """The 10% and the 90% quantile of measured over predicted, and of how many runs."""

    low: float
    high: float
    runs: int

    def around(self, predicted: float) -> tuple[float, float]:
        """(low, high) around a prediction, in its unit."""
        return predicted * self.low, predicted * self.high


def time_kind(mixture: bool, precision: str, num_hosts: int) -> str:
    """Kind of a job whose step time is predicted. mixture: the model has experts, spread over ranks or not. (All runs
    of mixtures that were published spread them; what makes these hard to predict, routing and the products of few
    tokens with each expert, is there without that as well.)"""
    parts = (
        "experts" if mixture else "dense",
        "low precision" if precision in _LOW_PRECISIONS else "16 bit",
        "several hosts" if num_hosts > 1 else "one host",
    )
    return ", ".join(parts)


def time_band(plan: Plan) -> Band | None:
    """Band of a plan's step time; None on CPUs, of which nothing is published."""
    if _is_cpu(plan):
        return None
    mixture = plan.degrees.expert > 1 or bool(plan.model.expert_modules)
    return _bands()["time"][time_kind(mixture, plan.training.precision, plan.cluster.num_hosts)]


def memory_band(plan: Plan, metric: Metric = "device") -> Band | None:
    """Band of the peak memory of a plan's fullest device by a metric; None on CPUs."""
    return None if _is_cpu(plan) else _bands()["memory"][metric]


def _is_cpu(plan: Plan) -> bool:
    return plan.cluster.device.name.lower().startswith("cpu")


@cache
def _bands() -> dict[str, dict[str, Band]]:
    tables = tomllib.loads(_FILE.read_text())
    return {what: {kind: Band(**band) for kind, band in kinds.items()} for what, kinds in tables.items()}
