"""A list beside the activations into which each layer puts a penalty, and which the loss adds up."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, penalties):
        y = self.linear(x)
        penalties.append(y.float().square().mean())
        return x + torch.tanh(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x, penalties = self.embed(x), []
        for layer in self.layers:
            x = layer(x, penalties)
        return self.head(x), torch.stack(penalties).mean()


def model():
    return Model()


def batch(size):
    return torch.randn(size, 16), torch.randint(5, (size,))


def loss(output, batch):
    logits, penalty = output
    return functional.cross_entropy(logits, batch[1]) + 0.1 * penalty
