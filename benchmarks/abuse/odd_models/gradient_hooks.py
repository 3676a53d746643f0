"""Gradients are halved on their way back: by hooks on tensors inside of layers, and by hooks on modules."""

import torch
from torch import nn
from torch.nn import functional


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / 2)
        return x + torch.tanh(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Half() for _ in range(6))
        self.layers[2].register_full_backward_hook(lambda module, given, of: tuple(g / 2 for g in given))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
