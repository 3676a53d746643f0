"""One transformer for every published row: GPT, Llama, mixture of experts, latent attention, built from its numbers."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from meshwright.profiler.load import LoadedModel, load_model


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): queries and keys+values go through narrow projections."""

    query_rank: int | None
    key_value_rank: int
    rotary_width: int


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts. held: experts whose weights the traced model has; fewer than `count` for the share of one
    expert-parallel rank, which balanced routing sends as many tokens as it has itself."""

    count: int
    top_k: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    held: int | None = None


@dataclass(frozen=True)
class Sizes:
    """All that decides the operators of a transformer. attention "eager" keeps the matrix of scores, as software
    before FlashAttention does; dropout as that software's default."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    seq_len: int
    gated: bool
    rms_norm: bool
    biases: bool
    tied: bool
    positions: Literal["learned", "rope", "none"]
    attention: Literal["fused", "eager"] = "fused"
    dropout: float = 0.0
    latent: Latent | None = None
    mixture: Mixture | None = None


def loaded(name: str, sizes: Sizes) -> LoadedModel:
    """The model in the form that the profiler takes, with token batches and cross entropy."""
    model = load_model(partial(Transformer, sizes), seq_len=sizes.seq_len, batch=partial(_batch, sizes), loss=_loss)
    return LoadedModel(**{**vars(model), "name": name})


def _batch(sizes: Sizes, size: int, seq_len: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(size, seq_len, dtype=torch.long)
    return tokens, tokens


def _loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


class Transformer(nn.Module):
    """Embeddings, pre-norm blocks, and a head that is tied to the token embedding or not."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.seq_len, sizes.width) if sizes.positions == "learned" else None
        dense = sizes.mixture.dense_layers if sizes.mixture else sizes.num_layers
        self.blocks = nn.ModuleList(Block(sizes, index < dense) for index in range(sizes.num_layers))
        self.norm = _norm(sizes, sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, sizes: Sizes, dense: bool) -> None:
        super().__init__()
        self.norm1 = _norm(sizes, sizes.width)
        self.attention = LatentAttention(sizes, sizes.latent) if sizes.latent else Attention(sizes)
        self.norm2 = _norm(sizes, sizes.width)
        if dense or sizes.mixture is None:
            self.feed_forward: nn.Module = FeedForward(sizes, sizes.feed_forward)
        else:
            self.feed_forward = MixtureOfExperts(sizes, sizes.mixture)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream behind the block."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: torch.Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return out


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        keys = sizes.num_kv_heads * sizes.head_width
        queries = sizes.num_heads * sizes.head_width
        self.query = nn.Linear(sizes.width, queries, bias=sizes.biases)
        self.key = nn.Linear(sizes.width, keys, bias=sizes.biases)
        self.value = nn.Linear(sizes.width, keys, bias=sizes.biases)
        self.out = nn.Linear(queries, sizes.width, bias=sizes.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the heads read, projected back to the stream."""
        head = self.sizes.head_width
        q, k, v = (
            project(x).unflatten(-1, (-1, head)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if self.sizes.positions == "rope":
            q, k = _rotated(q), _rotated(k)
        y = _attend(q, k, v, self.sizes)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class LatentAttention(nn.Module):
    """Attention whose keys and values are unfolded from one narrow vector per token."""

    def __init__(self, sizes: Sizes, latent: Latent) -> None:
        super().__init__()
        self.sizes, self.latent = sizes, latent
        queries = sizes.num_heads * (sizes.head_width + latent.rotary_width)
        if latent.query_rank:
            self.query_down = nn.Linear(sizes.width, latent.query_rank, bias=False)
            self.query_norm = _norm(sizes, latent.query_rank)
        self.query = nn.Linear(latent.query_rank or sizes.width, queries, bias=False)
        self.down = nn.Linear(sizes.width, latent.key_value_rank + latent.rotary_width, bias=False)
        self.norm = _norm(sizes, latent.key_value_rank)
        self.up = nn.Linear(latent.key_value_rank, 2 * sizes.num_heads * sizes.head_width, bias=False)
        self.out = nn.Linear(sizes.num_heads * sizes.head_width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the heads read, projected back to the stream."""
        head, rotary = self.sizes.head_width, self.latent.rotary_width
        narrow = self.query_norm(self.query_down(x)) if self.latent.query_rank else x
        q = self.query(narrow).unflatten(-1, (-1, head + rotary)).transpose(1, 2)
        folded, k_rotary = self.down(x).split((self.latent.key_value_rank, rotary), dim=-1)
        k, v = self.up(self.norm(folded)).unflatten(-1, (-1, 2 * head)).transpose(1, 2).split(head, dim=-1)
        q_plain, q_rotary = q.split((head, rotary), dim=-1)
        k_rotary = _rotated(k_rotary.unsqueeze(1)).expand(-1, k.shape[1], -1, -1)
        q, k = torch.cat((q_plain, _rotated(q_rotary)), dim=-1), torch.cat((k, k_rotary), dim=-1)
        y = _attend(q, k, functional.pad(v, (0, rotary)), self.sizes)[..., :head]
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two projections with GELU between, or three with a SiLU gate."""

    def __init__(self, sizes: Sizes, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, inner, bias=sizes.biases)
        self.gate = nn.Linear(sizes.width, inner, bias=sizes.biases) if sizes.gated else None
        self.down = nn.Linear(inner, sizes.width, bias=sizes.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One vector per token."""
        inner = functional.gelu(self.up(x)) if self.gate is None else functional.silu(self.gate(x)) * self.up(x)
        out: torch.Tensor = self.down(inner)
        return out


class MixtureOfExperts(nn.Module):
    """Each token goes through its top-k experts and the shared ones."""

    def __init__(self, sizes: Sizes, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.router = nn.Linear(sizes.width, mixture.count, bias=False)
        self.experts = Experts(sizes, mixture)
        self.shared = FeedForward(sizes, mixture.shared * mixture.width) if mixture.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One vector per token."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(self.mixture.top_k, dim=-1)
        y = self.experts(tokens, weights, chosen).view_as(x)
        out: torch.Tensor = y if self.shared is None else y + self.shared(x)
        return out


class Experts(nn.Module):
    """Gated feed-forwards, stacked; tokens are sorted by expert, and grouped matmuls run them."""

    def __init__(self, sizes: Sizes, mixture: Mixture) -> None:
        super().__init__()
        self.held = mixture.held or mixture.count
        self.gate_up = nn.Parameter(torch.empty(self.held, sizes.width, 2 * mixture.width))
        self.down = nn.Parameter(torch.empty(self.held, mixture.width, sizes.width))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Weighted sum of what each token's experts return."""
        expert, order = (chosen.flatten() % self.held).sort()
        source = order // chosen.shape[-1]
        ends = torch.searchsorted(expert, torch.arange(self.held, device=expert.device), right=True).int()
        gate, up = torch._grouped_mm(tokens[source], self.gate_up, ends).chunk(2, dim=-1)
        y = torch._grouped_mm(functional.silu(gate) * up, self.down, ends)
        y = y * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, source, y)


def _norm(sizes: Sizes, width: int) -> nn.Module:
    return nn.RMSNorm(width) if sizes.rms_norm else nn.LayerNorm(width)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, over the whole width given."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.outer(torch.arange(length, device=x.device), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    if sizes.attention == "fused":
        grouped = k.shape[1] != q.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # the fused softmax kernel masks as it reads
    return functional.dropout(scores.softmax(dim=-1), sizes.dropout) @ v
