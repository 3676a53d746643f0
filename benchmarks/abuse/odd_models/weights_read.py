"""Weights of submodules that are read without calling them."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(32)) for _ in range(4))

    def forward(self, x):
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x + torch.tanh(x @ layer.weight.T + layer.bias) * gain
        return x + 1e-3 * sum(layer.weight.square().mean() for layer in self.layers)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
