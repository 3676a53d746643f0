"""One transformer for every published row: GPT, Llama, mixture of experts, latent attention, built from its numbers."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): queries and keys+values go through narrow projections."""

    query_rank: int | None
    key_value_rank: int
    rotary_width: int


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts: how many, to how many each token goes, how wide each is, how many all tokens go through, how
    many layers before are dense; in how many groups they are, and out of how many of these a token's are taken."""

    count: int
    top_k: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2 mixers: heads, their width, what each remembers, and heads that share what they read and write."""

    num_heads: int
    head_width: int
    state: int
    groups: int = 1
    convolution: int = 4
    chunk: int = 128


@dataclass(frozen=True)
class Sizes:
    """All that decides the operators of a transformer. attention "eager" keeps the matrix of scores, as software
    before FlashAttention does; dropout as that software's default. frozen: only norms are trained, as the stand-in of
    adapters, which are as small. pattern: one letter for each layer of a hybrid, M a state-space mixer, E a mixture of
    experts, * attention, - a feed-forward; "" for layers of attention and feed-forward."""

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
    frozen: bool = False
    pattern: str = ""
    mamba: StateSpace | None = None


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
        if sizes.pattern:
            self.blocks = nn.ModuleList(Single(sizes, kind) for kind in sizes.pattern[: sizes.num_layers])
        else:
            self.blocks = nn.ModuleList(Block(sizes, index < dense) for index in range(sizes.num_layers))
        self.norm = _norm(sizes, sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight
        if sizes.frozen:
            trained = {
                id(p) for m in self.modules() if isinstance(m, nn.RMSNorm | nn.LayerNorm) for p in m.parameters()
            }
            for parameter in self.parameters():
                parameter.requires_grad_(id(parameter) in trained)

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
    """Attention and feed-forward, each after a norm and added to the stream."""

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
        """The stream after the block."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: torch.Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return out


class Single(nn.Module):
    """A layer of a hybrid: one mixer after a norm, added to the stream."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.norm1 = _norm(sizes, sizes.width)
        if kind == "M":
            assert sizes.mamba is not None
            self.mixer: nn.Module = Mamba(sizes, sizes.mamba)
        elif kind == "E":
            assert sizes.mixture is not None
            self.feed_forward: nn.Module = MixtureOfExperts(sizes, sizes.mixture)
        elif kind == "*":
            self.attention: nn.Module = Attention(sizes)
        else:
            self.feed_forward = FeedForward(sizes, sizes.feed_forward)
        self.inner = {"M": "mixer", "*": "attention"}.get(kind, "feed_forward")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream after the layer."""
        out: torch.Tensor = x + getattr(self, self.inner)(self.norm1(x))
        return out


class Mamba(nn.Module):
    """A Mamba-2 mixer: a short convolution, a scan in chunks by products of matrices, and a gated norm (Dao and Gu,
    "Transformers are SSMs", 2024, section 6)."""

    def __init__(self, sizes: Sizes, space: StateSpace) -> None:
        super().__init__()
        self.space = space
        self.width = space.num_heads * space.head_width
        self.mixed = self.width + 2 * space.groups * space.state
        self.into = nn.Linear(sizes.width, self.width + self.mixed + space.num_heads, bias=False)
        self.convolution = nn.Conv1d(
            self.mixed, self.mixed, space.convolution, groups=self.mixed, padding=space.convolution - 1
        )
        self.log_decay = nn.Parameter(torch.empty(space.num_heads))
        self.norm = _norm(sizes, self.width)
        self.out = nn.Linear(self.width, sizes.width, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """What the states return, projected back to the stream."""
        space = self.space
        gate, mixed, step = self.into(u).split([self.width, self.mixed, space.num_heads], dim=-1)
        mixed = functional.silu(self.convolution(mixed.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        sides = space.groups * space.state
        x, write, read = mixed.split([self.width, sides, sides], dim=-1)
        x = x.unflatten(-1, (space.num_heads, space.head_width))
        each = space.num_heads // space.groups
        write, read = (
            side.unflatten(-1, (space.groups, space.state)).repeat_interleave(each, dim=2) for side in (write, read)
        )
        step = functional.softplus(step)
        y = _scan(x * step.unsqueeze(-1), -step * self.log_decay.exp(), write, read, min(space.chunk, u.shape[1]))
        out: torch.Tensor = self.out(self.norm(y.flatten(2) * functional.silu(gate)))
        return out


def _scan(x: torch.Tensor, decay: torch.Tensor, write: torch.Tensor, read: torch.Tensor, chunk: int) -> torch.Tensor:
    """y[t] = h[t] read[t] where h[t] = exp(decay[t]) h[t-1] + x[t] write[t], [batch, length, heads, ...] all: inside
    chunks by scores between their positions, between chunks by states."""
    x, write, read = (part.unflatten(1, (-1, chunk)).transpose(2, 3) for part in (x, write, read))
    total = decay.unflatten(1, (-1, chunk)).transpose(2, 3).cumsum(-1)  # [batch, chunks, heads, position]
    apart = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
    y = (read @ write.transpose(-1, -2) * apart) @ x
    states = (x * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2) @ write
    ends = total[..., -1].cumsum(1)
    between = (ends.unsqueeze(2) - ends.unsqueeze(1)).exp().permute(0, 3, 1, 2).tril(-1)  # [batch, heads, to, from]
    arriving = (between @ states.transpose(1, 2).flatten(3)).unflatten(3, states.shape[3:]).transpose(1, 2)
    y = y + (read @ arriving.transpose(-1, -2)) * total.exp().unsqueeze(-1)
    return y.transpose(2, 3).flatten(1, 2)


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
    """Attention whose keys and values are unfolded from one narrow vector per token.

    The rotary part of keys, which heads share, is unfolded with the rest here, for each head: 1-2% more work, but heads
    may then be cut between ranks as Megatron does, where each keeps the shared part.
    """

    def __init__(self, sizes: Sizes, latent: Latent) -> None:
        super().__init__()
        self.sizes, self.latent = sizes, latent
        queries = sizes.num_heads * (sizes.head_width + latent.rotary_width)
        if latent.query_rank:
            self.query_down = nn.Linear(sizes.width, latent.query_rank, bias=False)
            self.query_norm = _norm(sizes, latent.query_rank)
        self.query = nn.Linear(latent.query_rank or sizes.width, queries, bias=False)
        self.down = nn.Linear(sizes.width, latent.key_value_rank, bias=False)
        self.norm = _norm(sizes, latent.key_value_rank)
        unfolded = sizes.num_heads * (2 * sizes.head_width + latent.rotary_width)
        self.up = nn.Linear(latent.key_value_rank, unfolded, bias=False)
        self.out = nn.Linear(sizes.num_heads * sizes.head_width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the heads read, projected back to the stream."""
        head, rotary = self.sizes.head_width, self.latent.rotary_width
        narrow = self.query_norm(self.query_down(x)) if self.latent.query_rank else x
        q = self.query(narrow).unflatten(-1, (-1, head + rotary)).transpose(1, 2)
        unfolded = self.up(self.norm(self.down(x))).unflatten(-1, (-1, 2 * head + rotary)).transpose(1, 2)
        k, k_rotary, v = unfolded.split((head, rotary, head), dim=-1)
        q_plain, q_rotary = q.split((head, rotary), dim=-1)
        q, k = torch.cat((q_plain, _rotated(q_rotary)), dim=-1), torch.cat((k, _rotated(k_rotary)), dim=-1)
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
        scores = self.router(tokens).softmax(dim=-1)
        if self.mixture.groups > 1:
            scores = _of_best_groups(scores, self.mixture)
        weights, chosen = scores.topk(self.mixture.top_k, dim=-1)
        y = self.experts(tokens, weights, chosen).view_as(x)
        out: torch.Tensor = y if self.shared is None else y + self.shared(x)
        return out


def _of_best_groups(scores: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """Scores of the experts of each token's groups, which are those whose best two have the highest sum; of others 0
    (DeepSeek-V3)."""
    by_group = scores.unflatten(-1, (mixture.groups, -1))
    best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(mixture.chosen_groups, dim=-1).indices
    kept = torch.zeros_like(by_group[..., 0]).scatter(-1, best, 1.0)
    of_best: torch.Tensor = (by_group * kept.unsqueeze(-1)).flatten(-2)
    return of_best


@torch.library.custom_op("published::by_expert", mutates_args=())
def by_expert(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order that brings copies of one expert together, where those of each expert end). One operator, as the routing
    kernels of training stacks are: any part of a sequence may be routed by itself, which a sort does not show."""
    expert, order = chosen.sort()
    return order, torch.searchsorted(expert, torch.arange(count, device=expert.device), right=True).int()


@by_expert.register_fake
def _(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(chosen), chosen.new_empty(count, dtype=torch.int32)


class Experts(nn.Module):
    """Feed-forwards, gated or with squared ReLU, stacked; tokens are sorted by expert, and grouped matmuls run them."""

    def __init__(self, sizes: Sizes, mixture: Mixture) -> None:
        super().__init__()
        inner = 2 * mixture.width if sizes.gated else mixture.width
        self.count, self.gated = mixture.count, sizes.gated
        self.up = nn.Parameter(torch.empty(mixture.count, sizes.width, inner))
        self.down = nn.Parameter(torch.empty(mixture.count, mixture.width, sizes.width))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Weighted sum of what each token's experts return."""
        order, ends = by_expert(chosen.flatten(), self.count)
        source = order // chosen.shape[-1]
        inner = torch._grouped_mm(tokens[source], self.up, ends)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = functional.silu(gate) * up
        else:
            inner = functional.relu(inner).square()
        inner = inner * weights.flatten()[order].unsqueeze(-1)  # as fused kernels do: nothing of full width is saved
        y = torch._grouped_mm(inner, self.down, ends)
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
