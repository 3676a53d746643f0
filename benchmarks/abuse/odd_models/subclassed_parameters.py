"""Parameters of a class of their own, which carry attributes, and a bias that is a buffer that is trained by hand."""

import torch
from torch import nn
from torch.nn import functional


class Named(nn.Parameter):
    pass


class Layer(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.weight = Named(torch.randn(32, 32) / 6)
        self.weight.no_decay = True
        self.weight.place = i

    def forward(self, x):
        return x + torch.tanh(x @ self.weight) / (1 + self.weight.place)


def model():
    return nn.Sequential(*(Layer(i) for i in range(4)))


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
