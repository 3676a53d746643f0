"""Dropout by a Bernoulli mask that is drawn once for all layers."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        mask = torch.bernoulli(torch.full_like(x, 0.9)) / 0.9
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
