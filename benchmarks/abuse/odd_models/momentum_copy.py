"""A copy of the encoder that follows it by a moving average, in the forward."""

import copy

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predict = nn.Linear(32, 32)

    def forward(self, x):
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                old.mul_(0.99).add_(new, alpha=0.01)
            aim = self.target(x)
        return self.predict(self.online(x)), aim


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(*output)
