"""A layer that runs until it has converged."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.step = nn.Linear(32, 32)
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        x = self.embed(x)
        z = torch.zeros_like(x)
        for _ in range(30):
            new = torch.tanh(0.1 * self.step(z) + x)
            if (new - z).abs().max() < 1e-4:
                break
            z = new
        return self.head(z)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
