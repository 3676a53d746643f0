"""Inputs are cut to the longest sequence of the batch by a number that is read from its lengths."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(32, 5)

    def forward(self, tokens, lengths):
        most = lengths.max().item()
        x = self.layers(self.embed(tokens[:, :most]))
        here = torch.arange(most, device=x.device) < lengths[:, None]
        return self.head((x * here.unsqueeze(-1)).sum(1) / lengths[:, None])


def model():
    return Model()


def batch(size, seq_len=12):
    return torch.randint(50, (size, seq_len)), torch.randint(1, seq_len + 1, (size,)), torch.randint(5, (size,))


def loss(output, batch):
    return functional.cross_entropy(output, batch[2])
