"""Keyword-only inputs and a nested dict of a batch, with text and numbers in it."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))

    def forward(self, *, images, scale=1.0):
        return self.layers(images["left"] + images["right"]) * scale


def model():
    return Model()


def batch(size):
    left, right = torch.randn(size, 32), torch.randn(size, 32)
    return {"images": {"left": left, "right": right}, "scale": 0.5, "target": torch.randn(size, 32), "id": "a"}


def loss(output, batch):
    return functional.mse_loss(output, batch["target"])
