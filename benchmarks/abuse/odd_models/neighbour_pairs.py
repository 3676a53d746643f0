"""A reward model whose samples are pairs: those at even places of the batch are to get more than those behind them."""

import torch
from torch import nn
from torch.nn import functional


def model():
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(size):
    return (torch.randn(size, 32),)


def loss(output, batch):
    return -functional.logsigmoid(output[0::2] - output[1::2]).mean()
