"""A file that ends the process when it is imported."""

import sys

import torch
from torch import nn
from torch.nn import functional

sys.exit(0)


def model():
    return nn.Linear(32, 32)


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
