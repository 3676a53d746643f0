"""A head behind every layer while it trains, only the last in evaluation; learned numbers weigh their losses."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(32, 5) for _ in range(4))
        self.weights = nn.ParameterDict({f"head{i}": torch.zeros(1) for i in range(4)})

    def forward(self, x, labels):
        total = 0.0
        for i, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            x = x + layer(x)
            if self.training or i == 3:
                weight = self.weights[f"head{i}"]
                total = total + (-weight).exp() * functional.cross_entropy(head(x), labels) + weight
        return total.squeeze()


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randint(5, (size,))
