"""How far predictions lay from published runs of the same kind: the band that 8 of 10 measurements fell in."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ..plan.document import Plan

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
    """Band of a plan's step time; None where no published run is of the kind, as `no_band` says."""
    if no_band(plan):
        return None
    mixture = plan.degrees.expert > 1 or bool(plan.model.expert_modules)
    return _bands()["time"][time_kind(mixture, plan.training.precision, plan.cluster.num_hosts)]


def memory_band(plan: Plan, metric: Metric = "device") -> Band | None:
    """Band of the peak memory of a plan's fullest device by a metric; None where no published run is of the kind."""
    return None if no_band(plan) else _bands()["memory"][metric]


def no_band(plan: Plan) -> str:
    """Why a plan's predictions have no band, as a sentence, or "": the published runs are of transformers that train on
    sequences of tokens, on GPUs, and say nothing of how far predictions of convolutions, images or CPUs are off."""
    if plan.cluster.device.name.lower().startswith("cpu"):
        return "no published run is of a CPU"
    if plan.training.seq_len is None or not plan.model.attention_modules:
        return "published runs are of language models, none of a model of this kind"
    return ""


@cache
def _bands() -> dict[str, dict[str, Band]]:
    tables = tomllib.loads(_FILE.read_text())
    return {what: {kind: Band(**band) for kind, band in kinds.items()} for what, kinds in tables.items()}
