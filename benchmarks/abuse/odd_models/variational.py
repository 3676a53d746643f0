"""A variational autoencoder by torch.distributions, which look at the numbers that they are given."""

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.scale = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x):
        h = torch.relu(self.encoder(x))
        found = torch.distributions.Normal(self.mean(h), functional.softplus(self.scale(h)) + 1e-4)
        return {"made": self.decoder(found.rsample()), "found": found}


def model():
    return Model()


def batch(size):
    return {"x": torch.randn(size, 32)}


def loss(output, batch):
    prior = torch.distributions.Normal(0.0, 1.0)
    apart = torch.distributions.kl_divergence(output["found"], prior).mean()
    return functional.mse_loss(output["made"], batch["x"]) + apart
