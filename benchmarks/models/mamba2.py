"""Mamba-2 2.7B: a state-space language model, scanned in chunks by matrix products in plain PyTorch.

Dao and Gu, "Transformers are SSMs", 2024; the scan is the algorithm of section 6 (chunks attend to themselves, states
pass between them). Sizes of state-spaces/mamba2-2.7b, with its vocabulary padded to 50,288.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are those of the 2.7 B model. One group: all heads share what they read and write."""

    num_layers: int = 64
    width: int = 2560
    expand: int = 2
    state: int = 128
    head_width: int = 64
    convolution: int = 4
    chunk: int = 256
    vocabulary: int = 50_288

    @property
    def inner(self) -> int:
        """Features inside a mixer."""
        return self.expand * self.width

    @property
    def num_heads(self) -> int:
        """Heads of a mixer."""
        return self.inner // self.head_width


SMALL = Config(num_layers=4, width=32, state=8, head_width=16, chunk=8, vocabulary=256)

seq_len = 2048
global_batch = 256


class Mixer(nn.Module):
    """Takes the place of attention: a short convolution, the scan, and a gated norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.mixed = config.inner + 2 * config.state
        self.in_proj = nn.Linear(config.width, config.inner + self.mixed + config.num_heads, bias=False)
        self.conv1d = nn.Conv1d(
            self.mixed, self.mixed, config.convolution, groups=self.mixed, padding=config.convolution - 1
        )
        self.dt_bias = nn.Parameter(torch.linspace(-6.9, -2.2, config.num_heads))
        self.log_decay = nn.Parameter(torch.linspace(1, 16, config.num_heads).log())
        self.skip = nn.Parameter(torch.ones(config.num_heads))
        self.norm = nn.RMSNorm(config.inner, eps=1e-5)
        self.out_proj = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        config = self.config
        gate, mixed, dt = self.in_proj(u).split([config.inner, self.mixed, config.num_heads], dim=-1)
        mixed = functional.silu(self.conv1d(mixed.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        x, write, read = mixed.split([config.inner, config.state, config.state], dim=-1)
        x = x.unflatten(-1, (config.num_heads, config.head_width))
        dt = functional.softplus(dt.float() + self.dt_bias.float())
        decay = -dt * self.log_decay.float().exp()
        y = scan(x * dt.to(x.dtype).unsqueeze(-1), decay, write, read, config.chunk) + x * self.skip.unsqueeze(-1)
        return self.out_proj(self.norm(y.flatten(2) * functional.silu(gate)))


def scan(x: torch.Tensor, decay: torch.Tensor, write: torch.Tensor, read: torch.Tensor, chunk: int) -> torch.Tensor:
    """y[t] = h[t] read[t] where h[t] = exp(decay[t]) h[t-1] + x[t] write[t], for every head.

    x: [batch, length, heads, head_width]; decay: [batch, length, heads], float32; write, read: [batch, length, state].
    The length is a multiple of the chunk, or shorter than it.
    """
    chunk = min(chunk, x.shape[1])
    x, decay = (part.unflatten(1, (-1, chunk)).movedim(3, 1) for part in (x, decay))  # [batch, head, chunks, chunk, ..]
    write, read = (part.unflatten(1, (-1, chunk)).unsqueeze(1) for part in (write, read))
    total = decay.cumsum(-1)
    y = (read @ write.transpose(-1, -2) * _decays(total).to(x.dtype)) @ x

    to_end = (total[..., -1:] - total).exp().to(x.dtype)
    states = (x * to_end.unsqueeze(-1)).transpose(-1, -2) @ write  # [batch, head, chunks, head_width, state]
    ends = functional.pad(total[..., -1].cumsum(-1), (1, 0))
    between = _decays(ends)[..., :-1, 1:].to(x.dtype)  # from the end of a chunk to the start of a later one
    arriving = (between @ states.flatten(3)).unflatten(3, states.shape[3:])
    y = y + (read @ arriving.transpose(-1, -2)) * total.exp().to(x.dtype).unsqueeze(-1)
    return y.movedim(1, 3).flatten(1, 2)


def _decays(total: torch.Tensor) -> torch.Tensor:
    """exp(total[t] - total[s]) for s <= t, else 0."""
    length = total.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=total.device).tril()
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()


class Block(nn.Module):
    """A mixer beside a shortcut; there is no feed-forward part."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mixer = Mixer(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


class Mamba2(nn.Module):
    """Embedding, blocks, and a head that shares the embedding's weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    """The model to plan for."""
    return Mamba2(Config())


def batch(size: int, seq_len: int = seq_len) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets) for `size` samples."""
    tokens = torch.randint(Config.vocabulary, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def small() -> nn.Module:
    """A small Mamba-2, built like the model to plan for."""
    return Mamba2(SMALL)


def small_batch(size: int, seq_len: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch for `small`."""
    tokens = torch.randint(SMALL.vocabulary, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]
