"""An embedding whose gradient is divided by how often a word is in the batch."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 32, scale_grad_by_freq=True)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(32, 20)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def model():
    return Model()


def batch(size, seq_len=6):
    return torch.randint(20, (size, seq_len)), torch.randint(20, (size, seq_len))


def loss(output, batch):
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
