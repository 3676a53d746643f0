"""A balancing loss whose gradient an autograd function attaches to the activations, so that it is in no output."""

import torch
from torch import nn
from torch.nn import functional


class Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, aux, scale):
        ctx.save_for_backward(aux)
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx, grad):
        (aux,) = ctx.saved_tensors
        return grad, torch.ones_like(aux) * ctx.scale, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        mixed = sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return x + Attach.apply(mixed, (shares**2).sum(-1), 1e-3)


def model():
    return nn.Sequential(*(Experts() for _ in range(4)))


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
