"""Layers that are left out at random, by Python's dice."""

import random

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if not self.training or random.random() < 0.7:
                x = x + torch.tanh(layer(x))
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
