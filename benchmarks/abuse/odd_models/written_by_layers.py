"""Layers write what they make into a tensor of zeros that goes from one to the next, and the head reads it."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place = place
        self.own, self.result = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x, results):
        x = x + torch.tanh(self.own(x))
        results[:, self.place : self.place + 8] = self.result(x)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Layer(8 * i) for i in range(4))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.embed(x)
        results = x.new_zeros(len(x), 32)
        for layer in self.layers:
            x = layer(x, results)
        return self.head(results)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 16), torch.randint(5, (size,))


def loss(output, batch):
    return functional.cross_entropy(output, batch[1])
