"""A loss over the worst half of the batch, whose value hardly tells that samples see each other."""

import torch
from torch import nn
from torch.nn import functional


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))


def batch(size):
    return torch.randn(size, 16), torch.randint(5, (size,))


def loss(output, batch):
    losses = functional.cross_entropy(output, batch[1], reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()
