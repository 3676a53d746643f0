"""A layer of submodules that can be recomputed one by one."""

import torch
from torch import nn
from torch.nn import functional

from meshwright.planner.plan.document import LayerPlan, Recompute

SAMPLES, LENGTH, WIDTH, HEADS = 3, 16, 32, 4


class Heads(nn.Module):
    """Unfused attention that is called by keywords and returns two things; counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        y = functional.dropout(weights, dropout) @ v
        return self.out(y.transpose(1, 2).flatten(2)), weights


class Parted(nn.Module):
    """A layer of submodules."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Heads()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.items = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.attention(self.norm(x), dropout=self.dropout)
        x = x + y * weights.square().mean()
        return x + functional.dropout(self.net(self.items[0](x)), self.dropout)


def one_layer(recompute: Recompute) -> LayerPlan:
    """The plan of a layer that is the module `0` of a model."""
    return LayerPlan(
        name="layer",
        layer_class="Parted",
        root="0",
        modules=("0",),
        parameters=(),
        recompute=recompute,
        reshard=False,
    )
