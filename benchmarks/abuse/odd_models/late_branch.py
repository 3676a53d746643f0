"""A branch that opens with the third forward."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for layer in self.layers[: 4 if self.calls > 2 else 2]:
            x = torch.relu(layer(x))
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
