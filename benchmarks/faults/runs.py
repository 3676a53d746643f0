"""What is trained: a small GPT with fused and tied weights, its data, and plans of every kind for 1 to 8 ranks."""

import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.planner.plan import Plan
from meshwright.planner.strategy import LayerOption, Shape, make_plan
from meshwright.planner.training import TrainingSpec
from meshwright.profiler.cluster import cluster_of, load_device
from meshwright.profiler.load import load_model
from meshwright.profiler.model_profile import ModelProfile
from meshwright.profiler.trace import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import gpt

CONFIG = gpt.Config(num_layers=2, num_heads=4, width=32, vocabulary=60, context=16)
GLOBAL_BATCH = 16
SEED = 11
LOSS = 1e-5
"""Relative difference of losses that the order of sums explains."""

SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp 2": {"replicate": 2},
    "fsdp 2": {"shard": 2},
    "tp 2": {"tensor": 2},
    "pp 2": {"stages": 2},
    "hsdp 4": {"replicate": 2, "shard": 2},
    "tp x fsdp 4": {"tensor": 2, "shard": 2},
    "pp x ddp x tp 8": {"stages": 2, "replicate": 2, "tensor": 2},
    "fsdp 8": {"shard": 8},
}


def model() -> nn.Module:
    """Two blocks of 32 features."""
    return gpt.GPT(CONFIG)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch of any tokens."""
    tokens = torch.randint(CONFIG.vocabulary, (size, CONFIG.context + 1))
    return tokens[:, :-1], tokens[:, 1:]


loss = gpt.loss


@cache
def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first samples of the data, always the same."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(CONFIG.vocabulary, (count, CONFIG.context + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in tokens]


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW that takes no rounding for a gradient."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


@cache
def profile() -> ModelProfile:
    """The model's."""
    return trace(load_model(model, batch=batch, loss=loss))


def plan(name: str) -> Plan:
    """The plan of that name."""
    degrees = SHAPES[name]
    replicate, shard, tensor, stages = (degrees.get(axis, 1) for axis in ("replicate", "shard", "tensor", "stages"))
    shape = Shape(
        data_replicate=replicate,
        data_shard=shard,
        tensor=tensor,
        pipeline=stages,
        micro_batch=GLOBAL_BATCH // (replicate * shard) // 2,
        num_microbatches=2,
        schedule="1f1b" if stages > 1 else "none",
    )
    num_layers = len(profile().layers)
    sizes = [num_layers // stages] * (stages - 1) + [num_layers - num_layers // stages * (stages - 1)]
    return make_plan(
        profile(),
        cluster_of(load_device("cpu"), replicate * shard * tensor * stages),
        TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile().seq_len, precision="fp32"),
        shape,
        [[LayerOption()] * size for size in sizes],
    )
