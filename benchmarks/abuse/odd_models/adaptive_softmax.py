"""A head by adaptive softmax, which goes by the words of the batch, and returns its own loss."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.AdaptiveLogSoftmaxWithLoss(32, 100, [20, 60])

    def forward(self, tokens, targets):
        x = self.words(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x.flatten(0, 1), targets.flatten()).loss


def model():
    return Model()


def batch(size, seq_len=8):
    tokens = torch.randint(100, (size, seq_len))
    return tokens, tokens
