"""Small models with habits that eager PyTorch trains, and what becomes of their plans."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.accuracy.cases import profile_of
from meshwright.executor.measuring.verify import VerifyReport, verify
from meshwright.planner.answers.search import search
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile

WIDTH = 32
GLOBAL_BATCH = 8


def linear(width: int = WIDTH) -> nn.Linear:
    """A layer of that width."""
    return nn.Linear(WIDTH, width)


def pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) of a regression."""
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def squared(output: Any, batch: Any) -> torch.Tensor:
    """Mean squared error to the batch's last element."""
    return functional.mse_loss(output, batch[-1])


def habit(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any] = pairs,
    loss: Callable[[Any, Any], torch.Tensor] | None = squared,
) -> LoadedModel:
    """A model of these functions."""
    return load_model(build, batch=batch, loss=loss)


def planned(loaded: LoadedModel, ranks: int = 2, **pins: Any) -> Plan:
    """The plan of a model for CPUs, with these pins."""
    return _planned(profile_of(loaded), ranks, pins)


def run(loaded: LoadedModel, ranks: int = 2, **pins: Any) -> VerifyReport:
    """A plan of the model beside one process."""
    profile = profile_of(loaded)
    return verify(_planned(profile, ranks, pins), loaded, steps=2, profile=profile)


def _planned(profile: ModelProfile, ranks: int, pins: dict[str, Any]) -> Plan:
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision="fp32")
    return search(profile, cluster_of(load_device("cpu"), ranks), training, pins=Pins(**pins), time_limit_s=10).plan
