"""A small transformer with tied weights and buffers, plans for it, and how it is trained."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from meshwright.executor import parallelize
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.synthetic import cluster

WIDTH, VOCABULARY, LENGTH, GLOBAL_BATCH = 16, 30, 8, 8


class Attention(nn.Module):
    """One fused weight for queries, keys and values, which tensor parallelism divides part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_width = 4, WIDTH // 4
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        q, k, v = (
            part.view(size, length, self.num_heads, self.head_width).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(size, length, self.num_heads * self.head_width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class TiedNet(nn.Module):
    """Embedding and head share a weight whose rows nothing divides; the norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(LENGTH, affine=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + 0 * self.norm(x.detach()))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, and the ones that follow."""
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples of twenty steps, the same in every process."""
    tokens = torch.randint(VOCABULARY, (20 * GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return [(row[:-1], row[1:]) for row in tokens]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, as most training scripts make."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


@cache
def tied_profile() -> ModelProfile:
    """The profile of TiedNet."""
    return trace(load_model(TiedNet, batch=batch_of, loss=loss))


def plan_of(
    profile: ModelProfile,
    replicate: int = 1,
    shard: int = 1,
    tensor: int = 1,
    stages: tuple[int, ...] = (),
    virtual_stages: int = 1,
    schedule: Schedule = "1f1b",
    on_host: bool = False,
    context: int = 1,
) -> Plan:
    """A plan of TiedNet with these degrees; stages: layers of each. on_host: the optimizer is there."""
    shape = Shape(
        data_replicate=replicate,
        data_shard=shard,
        tensor=tensor,
        context=context,
        pipeline=max(1, len(stages) // virtual_stages),
        virtual_stages=virtual_stages,
        micro_batch=GLOBAL_BATCH // (replicate * shard) // 2,
        num_microbatches=2,
        schedule=schedule if stages else "none",
        offload_optimizer=on_host,
    )
    sizes = stages or (len(profile.layers),)
    ranks = replicate * shard * tensor * context * shape.pipeline
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision="fp32")
    return make_plan(profile, cluster(1, ranks), training, shape, [[LayerOption()] * n for n in sizes])


PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "hsdp": {"replicate": 2, "shard": 2},
    "fsdp and tensor": {"shard": 2, "tensor": 2},
    "fsdp, optimizer on the host": {"shard": 2, "on_host": True},
    "ddp in stages": {"replicate": 2, "stages": (2, 2)},
    "tensor in stages": {"tensor": 2, "stages": (2, 2)},
}


def what_is_said(optimizer: Callable[[Any], Any], degrees: dict[str, Any]) -> str:
    """What a rank of such a plan says of an optimizer that it refuses; "taken" of others."""
    try:
        parallelize(TiedNet, plan_of(tied_profile(), **degrees), optimizer, loss=loss)
    except ValueError as error:
        return str(error)
    return "taken"
