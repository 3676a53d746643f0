"""A dict that goes from layer to layer, with what each makes under two names."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, state):
        x = torch.relu(self.linear(state["x"]))
        return {**state, "x": x, "all": [*state["all"], x], "step": state["step"] + 1}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        state = {"x": x, "all": [], "step": 0}
        for layer in self.layers:
            state = layer(state)
        return sum(state["all"]) / state["step"]


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
