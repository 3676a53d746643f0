"""An input that is one number for the whole batch, and one that is a Python number."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, temperature, power):
        for layer in self.layers:
            x = x + torch.tanh(layer(x) / temperature) ** power
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.tensor(2.0), 3, torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[3])
