"""A model without parameters."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
