"""`model` is the class itself, and forward is set on the object."""

import torch
from torch import nn
from torch.nn import functional


class model(nn.Module):  # noqa: N801
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.forward = self.run

    def run(self, x):
        return self.layers(x)


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
