"""Layers that return named tuples and dataclasses, with None in them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class State(NamedTuple):
    """What layers hand on."""

    hidden: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class Output:
    """What the model returns."""

    prediction: torch.Tensor
    extra: torch.Tensor | None = None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, state):
        return State(state.hidden + torch.tanh(self.linear(state.hidden)), None)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        state = State(x, None)
        for layer in self.layers:
            state = layer(state)
        return Output(state.hidden)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output.prediction, batch[1])
