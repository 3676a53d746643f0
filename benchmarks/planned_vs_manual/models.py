"""Small models of different kinds, whose parameters are large enough for a slow network and whose arithmetic is not."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel


def _loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def _image_loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output, batch[1])


def _tokens(vocabulary: int, size: int, seq_len: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocabulary, (size, seq_len))
    return tokens, tokens


def _features(width: int, classes: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, width), torch.randint(classes, (size,))


def _images(side: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(size, 3, side, side)
    return images, images


@dataclass(frozen=True)
class Case:
    """A model with its batch, and the bytes that a device has for it."""

    name: str
    why: str
    build: Callable[[], nn.Module]
    batch: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    samples: int
    memory: int
    seq_len: int | None = None
    loss: Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor] = _loss

    def loaded(self) -> LoadedModel:
        """The model, ready to be profiled and run."""
        return load_model(self.build, batch=self.batch, loss=self.loss, seq_len=self.seq_len)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (m(y).view(size, length, -1, width // self.heads).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, -1))
        y = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    """Embedding, blocks and a head of its own."""

    def __init__(self, width: int, num_blocks: int, vocabulary: int, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Perceptron(nn.Module):
    """Linear layers of the given widths."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        logits: torch.Tensor = self.layers[-1](x)
        return logits


class Experts(nn.Module):
    """A block and a mixture of experts, all of which every token goes through, with weights."""

    def __init__(self, width: int, heads: int, count: int) -> None:
        super().__init__()
        self.attention = Block(width, heads)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        hidden = functional.gelu(torch.einsum("bsd,edf->bsef", y, self.up))
        return x + torch.einsum("bsef,efd,bse->bsd", hidden, self.down, weights)


class UNet(nn.Module):
    """Convolutions down and up, with skips."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.inside = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.downs = nn.ModuleList(_Convolutions(a, b) for a, b in pairs)
        self.ups = nn.ModuleList(_Convolutions(b + a, a) for a, b in reversed(pairs))
        self.outside = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        skips = []
        for down in self.downs:
            skips.append(x)
            x = functional.max_pool2d(down(x), 2)
        for up in self.ups:
            x = up(torch.cat([functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        image: torch.Tensor = self.outside(x)
        return image


class _Convolutions(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.norm1(self.conv1(x)))
        y: torch.Tensor = functional.silu(self.norm2(self.conv2(x)))
        return y


def _transformer(width: int, num_blocks: int, vocabulary: int) -> Callable[[], nn.Module]:
    return partial(Transformer, width, num_blocks, vocabulary, partial(Block, width, 8))


MIB = 2**20

CASES = (
    Case("deep and narrow", "many small layers", _transformer(128, 10, 512), partial(_tokens, 512), 32, 40 * MIB, 16),
    Case(
        "wide and shallow",
        "few large layers; four bytes of state for each of gradient and parameter do not fit one device",
        partial(Perceptron, (256, 1024, 1024, 1024, 256)),
        partial(_features, 256, 256),
        64,
        28 * MIB,
    ),
    Case(
        "large vocabulary",
        "most parameters are tables",
        _transformer(128, 4, 8192),
        partial(_tokens, 8192),
        32,
        64 * MIB,
        8,
    ),
    Case(
        "uneven layers",
        "layers of unequal size, so that equal cuts are not balanced; replicas on all devices do not fit",
        partial(Perceptron, (128, 256, 256, 1536, 1024, 256, 256, 128, 128)),
        partial(_features, 128, 128),
        64,
        42 * MIB,
    ),
    Case(
        "U-Net",
        "skip connections cross every cut",
        partial(UNet, (16, 32, 64, 96)),
        partial(_images, 16),
        32,
        64 * MIB,
        loss=_image_loss,
    ),
    Case(
        "long sequence",
        "activations outweigh parameters",
        _transformer(96, 4, 256),
        partial(_tokens, 256),
        16,
        64 * MIB,
        128,
    ),
    Case(
        "mixture of experts",
        "experts hold most parameters; replicas do not fit",
        partial(Transformer, 96, 4, 512, partial(Experts, 96, 8, 8)),
        partial(_tokens, 512),
        16,
        30 * MIB,
        8,
    ),
)

REFERENCES = (
    Case("deep reference", "", _transformer(96, 8, 1024), partial(_tokens, 1024), 32, 512 * MIB, 16),
    Case("wide reference", "", partial(Perceptron, (384, 768, 1536, 512)), partial(_features, 384, 512), 64, 512 * MIB),
)
"""What the emulated cluster is calibrated by: none of the models that are compared."""
