"""Samples are mixed by shares that numpy draws in the forward, which returns a bare loss."""

import numpy
import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, y):
        share = numpy.random.beta(0.4, 0.4)
        x = share * x + (1 - share) * x.flip(1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return share * functional.mse_loss(x, y) + (1 - share) * functional.mse_loss(x, y.flip(1))


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)
