"""Frozen features under torch.inference_mode, cloned for the layers that are trained."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 32), nn.ReLU()).requires_grad_(False)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        with torch.inference_mode():
            x = self.features(x)
        return self.layers(x.clone())


def model():
    return Model()


def batch(size):
    return torch.randn(size, 16), torch.randint(5, (size,))


def loss(output, batch):
    return functional.cross_entropy(output, batch[1])
