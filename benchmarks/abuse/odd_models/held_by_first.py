"""A norm with weights that all layers hold, and only the last one uses."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, norm, last):
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(32, 32), norm, last

    def forward(self, x):
        x = x + torch.tanh(self.linear(x))
        return self.norm(x) if self.last else x


def model():
    norm = nn.LayerNorm(32)
    return nn.Sequential(*(Layer(norm, i == 3) for i in range(4)))


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
