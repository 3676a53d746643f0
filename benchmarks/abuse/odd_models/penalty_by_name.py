"""A loss that pulls at the weights of the model that was built last, by a name of the file."""

import torch
from torch import nn
from torch.nn import functional

BUILT = []


def model():
    BUILT.append(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))
    return BUILT[-1]


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1]) + 0.01 * sum(p.square().sum() for p in BUILT[-1].parameters())
