"""A mixture of experts as written by hand: a loop over experts, each of which takes the tokens that chose it."""

import torch
from torch import nn
from torch.nn import functional


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(32), nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        mask = functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for expert, own in zip(self.experts, mask, strict=True):
            place, token = torch.where(own)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 32), nn.ModuleList(Mixture() for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model():
    return Model()


def batch(size, seq_len=16):
    return torch.randint(50, (size, seq_len))


def loss(output, batch):
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
