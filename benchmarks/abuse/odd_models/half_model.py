"""A model in float16, with norms in float32."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)).half()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x).to(layer.weight.dtype)).to(x.dtype)
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
