"""Buffers lie whole on every rank that holds a stage, and are part of what must fit."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.planner.answers.search import InfeasibleError, search
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.trace import trace

LARGE = 2**28


def holding(num_bytes: int) -> LoadedModel:
    """A small model with a buffer of so many bytes."""

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.register_buffer("table", torch.zeros(num_bytes // 64, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(self.first(x) + self.table[0])
            return found

    return load_model(Holding, batch=lambda n: (torch.randn(n, 16),) * 2, loss=lambda out, batch: out.square().mean())


def peak_of(num_bytes: int, memory: float = 40e9, **pins: Any) -> float:
    """Allocated bytes of the stage that holds most, on GPUs with so much memory."""
    training = TrainingSpec(global_batch=16, seq_len=None, precision="bf16")
    cluster = cluster_of(load_device("a100-40gb").model_copy(update={"memory": memory}), 2)
    found = search(trace(holding(num_bytes)), cluster, training, pins=Pins(**pins))
    return max(stage.allocated_bytes for stage in found.estimate.memory)


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"data_replicate": 2},
        {"data_shard": 2},
        {"pipeline": 2, "schedule": "1f1b"},
        {"pipeline": 2, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_buffers_are_held_whole(pins: dict[str, Any]) -> None:
    assert peak_of(LARGE, **pins) - peak_of(64, **pins) == pytest.approx(LARGE, rel=1e-6)


def test_buffers_that_are_too_large_fit_nowhere() -> None:
    room = 1.5e9  # of which a process takes 1 GiB by itself

    assert peak_of(64, room) < room
    with pytest.raises(InfeasibleError, match=r"parameters 512 MiB"):
        peak_of(2 * LARGE, room)
