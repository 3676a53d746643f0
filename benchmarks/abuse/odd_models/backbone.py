"""A frozen backbone that the file makes once: all models hold it, and the loss uses it, too."""

import torch
from torch import nn
from torch.nn import functional

BACKBONE = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).requires_grad_(False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.backbone = BACKBONE

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x, self.backbone(x)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output[0], batch[1]) + functional.mse_loss(output[1], BACKBONE(batch[1]))
