"""A loss over triplets of neighbours: anchor, one like it, one unlike it."""

import torch
from torch import nn
from torch.nn import functional


def model():
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def batch(size):
    return (torch.randn(size, 32),)


def loss(output, batch):
    return functional.triplet_margin_loss(*output.view(-1, 3, 8).unbind(1))
