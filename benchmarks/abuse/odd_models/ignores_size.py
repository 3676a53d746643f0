"""A batch function that ignores its size."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x):
        return self.layers(x)


def model():
    return Model()


def batch(size):
    return torch.randn(8, 32), torch.randn(8, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
