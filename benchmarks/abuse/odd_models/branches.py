"""Layers that choose between two branches by torch.cond."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.linear(self.norm(x))
        return torch.cond(y.mean() > 0, lambda x, y: x + torch.relu(y), lambda x, y: x - torch.relu(-y), (x, y))


def model():
    return nn.Sequential(*(Layer() for _ in range(4)))


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
