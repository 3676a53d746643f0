"""A GPT in one page, and how a model file talks to Meshwright: model, batch, loss, small.

plan benchmarks/models/gpt.py --gpus 8
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are those of GPT-2 small (124 M parameters)."""

    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    vocabulary: int = 50257
    context: int = 1024


SMALL = Config(num_layers=4, num_heads=4, width=64, vocabulary=256, context=64)

seq_len = 1024
global_batch = 64


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_width = config.width // config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.num_heads, self.head_width).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embeddings, blocks, and a head that shares the token embedding's weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def model() -> nn.Module:
    """The model to plan for."""
    return GPT(Config())


def batch(size: int, seq_len: int = seq_len) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets) for `size` samples; only shapes and dtypes matter to the planner."""
    tokens = torch.randint(Config.vocabulary, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def small() -> nn.Module:
    """A GPT built like the one to plan for, small enough to train on a laptop while a plan is verified."""
    return GPT(SMALL)


def small_batch(size: int, seq_len: int = SMALL.context) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch for `small`."""
    tokens = torch.randint(SMALL.vocabulary, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]
