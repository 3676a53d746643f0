"""An object beside the activations whose attributes each layer changes, and the next one reads."""

import torch
from torch import nn
from torch.nn import functional


class Progress:
    def __init__(self):
        self.depth = 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, progress):
        progress.depth += 1
        return x + torch.tanh(self.linear(x)) / progress.depth**0.5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x, progress = self.embed(x), Progress()
        for layer in self.layers:
            x = layer(x, progress)
        return self.head(x)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 16), torch.randint(5, (size,))


def loss(output, batch):
    return functional.cross_entropy(output, batch[1])
