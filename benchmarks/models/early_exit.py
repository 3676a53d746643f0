"""A classifier of sentences that stops early once it is sure: its way depends on the numbers, not on shapes alone.

A transformer encoder with an exit in its middle, after Teerapittayanon et al., "BranchyNet", 2016.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes, and how sure the exit must be: the mean over a micro-batch of the largest class probability."""

    num_layers: int = 8
    num_heads: int = 8
    width: int = 512
    vocabulary: int = 30_522
    context: int = 128
    num_classes: int = 20
    sure: float = 0.9


SMALL = Config(num_layers=4, num_heads=4, width=32, vocabulary=64, context=16, num_classes=4)

seq_len = 128
global_batch = 64


class Block(nn.Module):
    """Pre-norm transformer block in which all tokens see all."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Logits of the classes from the mean over the tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.classes = nn.Linear(config.width, config.num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.norm(x).mean(1))


class EarlyExit(nn.Module):
    """Half of the blocks, an exit, and the other half for those who are not yet sure."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sure = config.sure
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.first = nn.ModuleList(Block(config) for _ in range(config.num_layers // 2))
        self.exit = Head(config)
        self.second = nn.ModuleList(Block(config) for _ in range(config.num_layers - config.num_layers // 2))
        self.head = Head(config)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.first:
            x = block(x)
        early = self.exit(x)
        if early.softmax(-1).amax(-1).mean() > self.sure:
            return (early,)
        for block in self.second:
            x = block(x)
        return early, self.head(x)


def model() -> nn.Module:
    """The model to plan for."""
    return EarlyExit(Config())


def batch(size: int, seq_len: int = seq_len) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, class) for `size` samples."""
    return torch.randint(Config.vocabulary, (size, seq_len)), torch.randint(Config.num_classes, (size,))


def loss(exits: tuple[torch.Tensor, ...], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Sum over the exits taken of the mean cross entropy of the class."""
    return torch.stack([functional.cross_entropy(logits.float(), batch[1]) for logits in exits]).sum()


def small() -> nn.Module:
    """A small model with early exits, built like the one to plan for."""
    return EarlyExit(SMALL)


def small_batch(size: int, seq_len: int = SMALL.context) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch for `small`."""
    return torch.randint(SMALL.vocabulary, (size, seq_len)), torch.randint(SMALL.num_classes, (size,))
