"""A file that prints, warns and seeds, while it is imported and while it runs."""

import warnings

import torch
from torch import nn
from torch.nn import functional

print("imported")
warnings.warn("careful", stacklevel=1)
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        print("built")
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, x):
        print("runs", x.shape)
        return self.layers(x)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
