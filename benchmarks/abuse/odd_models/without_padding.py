"""Only tokens that are no padding go through the layers: x[mask], and back into their places."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(32, 5)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        rows = self.layers(x[mask])
        whole = torch.zeros_like(x)
        whole[mask] = rows
        return self.head(whole.sum(1) / mask.sum(1, keepdim=True))


def model():
    return Model()


def batch(size, seq_len=12):
    lengths = torch.randint(1, seq_len + 1, (size, 1))
    return torch.randint(50, (size, seq_len)), torch.arange(seq_len) < lengths, torch.randint(5, (size,))


def loss(output, batch):
    return functional.cross_entropy(output, batch[2])
