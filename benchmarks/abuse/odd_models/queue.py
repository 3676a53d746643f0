"""A queue of past keys, in a buffer (momentum contrast)."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
        self.register_buffer("queue", functional.normalize(torch.randn(16, 64), dim=0))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        z = functional.normalize(self.encoder(x), dim=-1)
        logits = z @ self.queue.clone()
        places = (self.pointer + torch.arange(len(z))) % 64
        self.queue[:, places] = z.detach().T
        self.pointer.add_(len(z)).remainder_(64)
        return logits


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randint(64, (size,))


def loss(output, batch):
    return functional.cross_entropy(output, batch[1])
