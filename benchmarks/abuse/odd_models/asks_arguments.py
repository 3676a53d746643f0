"""A file that reads the command line."""

import argparse

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
WIDTH = parser.parse_args().width


def model():
    return nn.Linear(WIDTH, 32)


def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)


def loss(output, batch):
    return functional.mse_loss(output, batch[1])
