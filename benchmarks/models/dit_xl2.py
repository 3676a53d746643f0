"""DiT-XL/2, a diffusion transformer: every block is scaled and shifted by what time and class say (675 M parameters).

Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023, table 1, on 256 x 256 ImageNet: latents of
4 x 32 x 32, patches of 2 x 2, adaLN-Zero blocks. The fixed positions are a buffer here.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are the paper's."""

    depth: int = 28
    width: int = 1152
    num_heads: int = 16
    patch: int = 2
    channels: int = 4
    latent: int = 32
    num_classes: int = 1000
    frequencies: int = 256


SMALL = Config(depth=4, width=32, num_heads=4, latent=8, num_classes=10, frequencies=16)
STEPS = 1000

global_batch = 256

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Self-attention of all patches, with one fused projection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_width = config.width // config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, self.head_width)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """adaLN-Zero: shifts, scales and gates of both halves come from the condition."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-6, elementwise_affine=False)
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.fc2 = nn.Linear(4 * config.width, config.width)
        self.modulation = nn.Linear(config.width, 6 * config.width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        modulation = self.modulation(functional.silu(condition)).unsqueeze(1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(functional.gelu(self.fc1(y), approximate="tanh"))


class Final(nn.Module):
    """Patches of the noise and of its log variance."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self.linear = nn.Linear(config.width, config.patch**2 * 2 * config.channels)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        return self.linear(self.norm(x) * (1 + scale) + shift)


class DiT(nn.Module):
    """From a noisy latent, its time step and its class to (noise, log variance), side by side in the channels."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        side = config.latent // config.patch
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.register_buffer("positions", _sines(torch.arange(float(side * side)), config.width), persistent=False)
        self.time1 = nn.Linear(config.frequencies, config.width)
        self.time2 = nn.Linear(config.width, config.width)
        self.classes = nn.Embedding(config.num_classes + 1, config.width)  # the last one: no class
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final = Final(config)
        for linear in (*(block.modulation for block in self.blocks), self.final.modulation, self.final.linear):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, latent: torch.Tensor, step: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.patches(latent).flatten(2).transpose(1, 2) + self.positions
        time = self.time2(functional.silu(self.time1(_sines(step, self.config.frequencies).to(x.dtype))))
        condition = time + self.classes(label)
        for block in self.blocks:
            x = block(x, condition)
        return self._image(self.final(x, condition))

    def _image(self, patches: torch.Tensor) -> torch.Tensor:
        side, patch = self.config.latent // self.config.patch, self.config.patch
        grid = patches.unflatten(2, (patch, patch, -1)).unflatten(1, (side, side))
        return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def _sines(position: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines [position, width] of geometrically spaced frequencies."""
    powers = torch.arange(width // 2, dtype=torch.float32, device=position.device) / (width // 2)
    angles = position[:, None].float() * torch.exp(-math.log(10_000) * powers)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def model() -> nn.Module:
    """The model to plan for."""
    return DiT(Config())


def batch(size: int) -> Batch:
    """(noisy latent, time step, class, noise) for `size` samples."""
    return _random(Config(), size)


def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean negative log likelihood of the noise; it trains both halves, as the paper's two terms do."""
    mean, log_variance = output.float().chunk(2, dim=1)
    return 0.5 * (log_variance + (batch[3].float() - mean) ** 2 * torch.exp(-log_variance)).mean()


def small() -> nn.Module:
    """A small DiT, built like the model to plan for."""
    return DiT(SMALL)


def small_batch(size: int) -> Batch:
    """A micro-batch for `small`."""
    return _random(SMALL, size)


def _random(config: Config, size: int) -> Batch:
    latent = torch.randn(2, size, config.channels, config.latent, config.latent)
    return latent[0], torch.randint(STEPS, (size,)), torch.randint(config.num_classes, (size,)), latent[1]
