"""A tuple whose first entry is a dataclass of tensors."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class Inputs:
    tokens: torch.Tensor
    mask: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))

    def forward(self, inputs):
        return self.layers(self.embed(inputs.tokens) * inputs.mask.unsqueeze(-1))


def model():
    return Model()


def batch(size, seq_len=6):
    return Inputs(torch.randint(50, (size, seq_len)), torch.ones(size, seq_len)), torch.randn(size, seq_len, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
