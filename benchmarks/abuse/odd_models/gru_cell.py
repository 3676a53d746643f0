"""A recurrent cell in a loop over tokens."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.cell = nn.GRUCell(32, 32)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = x.new_zeros(len(x), 32)
        states = []
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
            states.append(h)
        return self.head(torch.stack(states, 1))


def model():
    return Model()


def batch(size, seq_len=12):
    return torch.randint(50, (size, seq_len)), torch.randint(50, (size, seq_len))


def loss(output, batch):
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
