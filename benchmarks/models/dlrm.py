"""DLRM, a recommender whose embedding tables hold nearly all of its 24 G parameters, and its towers nearly none.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019. Sizes of
MLPerf training on Criteo Terabyte: 26 tables of at most 40 M rows, 128 features, global batch 65,536.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are those of MLPerf. The bottom tower ends in as many features as a table row has."""

    rows: tuple[int, ...] = (
        *(39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346, 10),
        *(2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36),
    )
    num_dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)


SMALL = Config(rows=(500, 400, 300, 3), bottom=(128, 64, 32), top=(256, 128, 1))

global_batch = 65_536


class DLRM(nn.Module):
    """A tower over numbers, a table per category, dot products of all pairs, and a tower over those."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.bottom[-1]
        vectors = len(config.rows) + 1
        self.bottom = _tower((config.num_dense, *config.bottom))
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in config.rows)
        self.top = _tower((width + vectors * (vectors - 1) // 2, *config.top))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        found = [table(categories[:, i : i + 1]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([x, *found], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)


def _tower(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def model() -> nn.Module:
    """The model to plan for."""
    return DLRM(Config())


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(numbers, categories, clicked or not) for `size` samples."""
    return _random(Config(), size)


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean binary cross entropy of a click."""
    return functional.binary_cross_entropy_with_logits(logits.float(), batch[2].float())


def small() -> nn.Module:
    """A small DLRM, built like the model to plan for, with four short tables."""
    return DLRM(SMALL)


def small_batch(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A micro-batch for `small`."""
    return _random(SMALL, size)


def _random(config: Config, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    categories = torch.stack([torch.randint(rows, (size,)) for rows in config.rows], dim=1)
    return torch.randn(size, config.num_dense), categories, torch.randint(2, (size,)).float()
