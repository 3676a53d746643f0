"""Layers that the forward never uses, and one that gets no gradient."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.unused = nn.Linear(32, 32)
        self.aside = nn.Linear(32, 32)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.aside(x)
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
