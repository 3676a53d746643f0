"""A loss whose classes are weighed, so that its mean is over the weights of the labels."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)), nn.Linear(32, 5))

    def forward(self, x):
        return self.layers(x)


criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 4.0, 1.0]), label_smoothing=0.1)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randint(5, (size,))


def loss(output, batch):
    return criterion(output, batch[1])
