"""Two views of each sample, one after the other along the batch: 2 x size rows."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)), nn.Linear(32, 8))

    def forward(self, views):
        return self.layers(torch.cat(list(views), 0))


def model():
    return Model()


def batch(size):
    x = torch.randn(size, 32)
    return {"views": [x + 0.1 * torch.randn_like(x) for _ in range(2)]}


def loss(output, batch):
    a, b = functional.normalize(output, dim=-1).chunk(2)
    return (2 - 2 * (a * b).sum(-1)).mean()
