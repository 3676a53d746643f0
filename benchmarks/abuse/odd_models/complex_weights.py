"""Complex parameters, as in Fourier operators."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17, dtype=torch.cfloat) / 4)
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x) + torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=32).to(x.dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def model():
    return Model()


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
