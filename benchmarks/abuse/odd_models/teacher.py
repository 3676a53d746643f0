"""A frozen teacher whose output the loss is held against."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.teacher = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(*output)
