"""A convolutional U-Net with instance norms and transposed convolutions."""

import torch
from torch import nn
from torch.nn import functional


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.InstanceNorm2d(b), nn.LeakyReLU(0.1, inplace=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([block(3, 8), block(8, 16), block(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.merge = nn.ModuleList([block(32, 16), block(16, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        kept = []
        for i, down in enumerate(self.down):
            x = down(x)
            if i < 2:
                kept.append(x)
                x = functional.max_pool2d(x, 2)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 3, 16, 16), torch.randn(size, 1, 16, 16)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
