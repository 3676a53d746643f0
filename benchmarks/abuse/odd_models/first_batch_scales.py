"""Scales that the first batch gives a layer (ActNorm), through .data, of which autograd does not hear."""

import torch
from torch import nn
from torch.nn import functional


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(32)), nn.Parameter(torch.zeros(32))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.shift.data.copy_(-x.mean(0))
            self.scale.data.copy_(-x.std(0).log())
            self.ready = True
        return (x + self.shift) * self.scale.exp()


def model():
    return nn.Sequential(nn.Linear(32, 32), ActNorm(), nn.ReLU(), nn.Linear(32, 32), ActNorm())


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
