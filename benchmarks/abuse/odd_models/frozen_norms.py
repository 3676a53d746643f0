"""A train() that keeps batch norms in evaluation mode."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(8, 7)

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


def model():
    return Model()


def batch(size):
    return torch.randn(size, 8, 6, 6), torch.randint(7, (size,))


def loss(output, batch):
    return functional.cross_entropy(output, batch[1])
