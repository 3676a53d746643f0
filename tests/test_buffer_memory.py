"""Buffers, and what a model holds beside them, lie whole on every rank, and are part of what must fit."""

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


def holding(num_bytes: int, registered: bool = True) -> LoadedModel:
    """A small model with a table of so many bytes. registered: as a buffer, not as a weight that is in a list."""

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.register_buffer("table", torch.zeros(num_bytes // 64, 16) if registered else None)
            self.held = [] if registered else [nn.Embedding(num_bytes // 64, 16)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            row = self.table[0] if self.table is not None else self.held[0].weight[0].detach().to(x.dtype)
            found: torch.Tensor = self.second(self.first(x) + row)
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
        pytest.param({"data_replicate": 2}, marks=pytest.mark.slow),
        pytest.param({"data_shard": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "schedule": "1f1b"}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "schedule": "zb-h1"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_buffers_are_held_whole(pins: dict[str, Any]) -> None:
    assert peak_of(LARGE, **pins) - peak_of(64, **pins) == pytest.approx(LARGE, rel=1e-6)


@pytest.mark.slow
def test_what_is_held_elsewhere_counts_as_much() -> None:
    profile = trace(holding(LARGE, registered=False))

    assert [(b.name, b.shape) for b in profile.buffers] == [("held[0].weight", (LARGE // 64, 16))]


@pytest.mark.slow
def test_buffers_that_are_too_large_fit_nowhere() -> None:
    room = 1.5e9  # of which a process takes 1 GiB by itself

    assert peak_of(64, room) < room
    with pytest.raises(InfeasibleError, match=r"parameters 512 MiB"):
        peak_of(2 * LARGE, room)
