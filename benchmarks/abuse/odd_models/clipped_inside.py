"""A hook that clips the norm of a gradient between layers."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        x = x + torch.tanh(self.linear(x))
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (0.01 / (grad.norm() + 1e-6)).clamp(max=1.0))
        return x


def model():
    return nn.Sequential(*(Layer() for _ in range(4)))


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
