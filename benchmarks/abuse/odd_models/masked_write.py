"""Writes one value into all places of a mask, as SpecAugment does: x[mask] = embedding."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x.clone()
        x[x.sum(-1) > 4.0] = self.hidden
        return x + self.down(torch.relu(self.up(x)))


def model():
    return nn.Sequential(nn.Linear(16, 32), *(Block(32) for _ in range(4)), nn.Linear(32, 10))


def batch(size, seq_len=12):
    return torch.randn(size, seq_len, 16), torch.randint(10, (size, seq_len))


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
