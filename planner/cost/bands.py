"""How far predictions lay from published runs of the same kind: the band that 8 of 10 measurements fell in."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from ...profiler.model.model_profile import ModelProfile
from ..plan.document import Plan
from ..plan.training import LOW_PRECISIONS

_FILE = Path(__file__).with_name("bands.toml")


@dataclass(frozen=True)
class Band:
    """Quantiles (10% and 90%) of measured over predicted, and the number of runs they come from."""

    low: float
    high: float
    runs: int

    def around(self, predicted: float) -> tuple[float, float]:
        """(low, high) around a prediction, in its unit."""
        return predicted * self.low, predicted * self.high

    @property
    def _errors(self) -> NormalDist:
        """Normal distribution of the logarithm of measured over predicted that has the two quantiles of the band."""
        low, high = math.log(self.low), math.log(self.high)
        return NormalDist((low + high) / 2, (high - low) / 2 / NormalDist().inv_cdf(0.9))

    def risk(self, predicted: float, limit: float) -> float:
        """Probability that the true value of what is predicted lies above a limit."""
        return 1.0 - self._errors.cdf(math.log(limit / predicted))

    def room(self, risk: float) -> float:
        """Ratio of limit to prediction at which the true value lies above the limit with probability `risk` (between 0
        and 1, both excluded)."""
        return math.exp(self._errors.inv_cdf(1.0 - risk))


def time_kind(mixture: bool, precision: str, num_hosts: int) -> str:
    """Kind of a job whose step time is predicted. mixture: the model has experts, spread over ranks or not. (All runs
    of mixtures that were published spread them; what makes these hard to predict, routing and the products of few
    tokens with each expert, is there without that as well.)"""
    parts = (
        "experts" if mixture else "dense",
        "low precision" if precision in LOW_PRECISIONS else "16 bit",
        "several hosts" if num_hosts > 1 else "one host",
    )
    return ", ".join(parts)


def time_band(plan: Plan) -> Band | None:
    """Band of a plan's step time; None where no published run is of the kind, as `no_time_band` says."""
    if no_time_band(plan):
        return None
    mixture = plan.degrees.expert > 1 or bool(plan.model.expert_modules)
    return _bands()["time"][time_kind(mixture, plan.training.precision, plan.cluster.num_hosts)]


def memory_band(plan: Plan) -> Band | None:
    """Band of the peak memory of a plan's fullest device; None where no published run is of the kind."""
    return None if no_band(plan) else _bands()["memory"]["device"]


def bands_of(what: Literal["time", "memory"]) -> dict[str, Band]:
    """Every band of step time by kind of run, or of peak memory by metric."""
    return _bands()[what]


def published_devices() -> frozenset[str]:
    """Names of the device presets for which there are published runs."""
    return frozenset(_file()["runs"]["devices"])


def fewest_parameters() -> int:
    """Number of parameters of the smallest model for which there are published runs."""
    return int(_file()["runs"]["fewest_parameters"])


MOST_LAUNCH = 0.05
"""Largest share of a step spent waiting for the CPU at which published runs still tell how far a prediction may be off:
steps of small models on an H100 were 38% off at the 90th percentile (benchmarks/one_gpu/results/host.md)."""

USUAL_RISK = 0.05
"""Probability of running out of memory that plans are made for if the user gives none."""

CPU_MARGIN = 0.05
"""Share of memory left free on a CPU, for which there are no published runs."""


def memory_risk(plan: Plan) -> float | None:
    """Probability that a plan's fullest device runs out of memory, judged by what published runs used; None if no
    published run is of the kind, or the plan has no prediction."""
    band, found = memory_band(plan), plan.prediction
    if band is None or found is None or not found.stage_memory_bytes:
        return None
    share = max(size / found.budget_of(i) for i, size in enumerate(found.stage_memory_bytes))
    return band.risk(share * (1.0 - plan.training.memory_margin), 1.0)


def margin_at(risk: float, profile: ModelProfile, device: str) -> float | None:
    """Share of memory to leave free so that a plan which uses all the rest runs out with probability `risk`; None if no
    published run is of the kind."""
    if _no_band(device, profile.seq_len, profile.attention_modules, profile.num_parameters):
        return None
    return _margin(risk)


def usual_margin(device: str) -> float:
    """Share of memory to leave free for a model of a kind without published runs. On a GPU it is what other kinds need
    for the usual risk, as nothing says that less would do."""
    return CPU_MARGIN if is_cpu(device) else _margin(USUAL_RISK)


def _margin(risk: float) -> float:
    return min(0.9, max(0.0, 1.0 - 1.0 / _bands()["memory"]["device"].room(risk)))


def is_cpu(device: str) -> bool:
    """Whether a preset or a device of that name is a CPU."""
    return device.lower().startswith("cpu")


def no_time_band(plan: Plan) -> str:
    """Reason, as a clause, why a plan's step time has no band; "" if it has one. Beside the reasons of `no_band`: one
    of its devices has no published runs, or GPUs wait too long for their CPUs (MOST_LAUNCH)."""
    devices = [host.device.name for host in plan.cluster.hosts]
    others = [device for device in devices if device not in published_devices()]
    waits = 0.0 if plan.prediction is None else plan.prediction.launch_share
    if why := no_band(plan) or (f"no published run is of {others[0]}" if others else ""):
        return why
    if waits > MOST_LAUNCH:
        return f"GPUs wait for CPUs to launch kernels for {waits:.0%} of a step, which in published runs they hardly do"
    return ""


def no_band(plan: Plan) -> str:
    """Reason, as a clause, why a plan's predictions have no band; "" if they have one. Published runs are of
    transformers on GPUs that train on sequences of tokens. They do not tell how far predictions are off for CPUs, for
    convolutions and images, or for models that are much smaller, whose steps consist of other things."""
    model = plan.model
    return _no_band(plan.cluster.device.name, plan.training.seq_len, model.attention_modules, model.num_parameters)


def _no_band(device: str, seq_len: int | None, attention_modules: tuple[str, ...], num_parameters: int) -> str:
    if is_cpu(device):
        return "no published run is of a CPU"
    if seq_len is None or not attention_modules:
        return "published runs are of language models, none of a model of this kind"
    if num_parameters < fewest_parameters():
        return f"no published run is of a model of fewer than {fewest_parameters() / 1e6:.0f} M parameters"
    return ""


@cache
def _bands() -> dict[str, dict[str, Band]]:
    tables = _file()
    return {what: {kind: Band(**band) for kind, band in tables[what].items()} for what in ("time", "memory")}


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text())
