"""The same by copy_, into a view of that tensor."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4 * 32, 5)

    def forward(self, x):
        x = self.embed(x)
        results = torch.empty(len(x), 4, 32, device=x.device)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            results[:, i].copy_(x)
        return self.head(results.flatten(1))


def model():
    return Model()


def batch(size):
    return torch.randn(size, 16), torch.randint(5, (size,))


def loss(output, batch):
    return functional.cross_entropy(output, batch[1])
