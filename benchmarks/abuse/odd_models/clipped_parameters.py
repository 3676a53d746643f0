"""Hooks on parameters that clip each gradient by its size."""

import torch
from torch import nn
from torch.nn import functional


def model():
    made = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    for parameter in made.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.002, 0.002))
    return made


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
