"""One encoder for two inputs, and a distance."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, a, b):
        return self.head((self.encoder(a) - self.encoder(b)).abs()).squeeze(-1)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32), torch.rand(size)


def loss(output, batch):
    return functional.binary_cross_entropy_with_logits(output, batch[2])
