"""Weights in a list of their own, which a penalty pulls at; functions that close over a weight, and over a constant."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.pulled = [self.layers[0].weight]
        weight, scale = self.layers[1].weight, torch.linspace(0.5, 1.5, 32)
        self.mix = lambda x: functional.linear(x, weight)
        self.scaled = partial(torch.mul, scale)

    def forward(self, x):
        x = torch.tanh(self.layers[0](x)) + 0.01 * sum(weight.square().sum() for weight in self.pulled)
        x = self.mix(torch.tanh(self.layers[1](x)))
        for layer in self.layers[2:]:
            x = x + torch.tanh(layer(self.scaled(x)))
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
