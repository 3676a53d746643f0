"""Small language models that are trained by plans and in one process, and what one process gives."""

import functools

import torch
from torch import nn

from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.same_numbers import (
    SEQ_LEN,
    Numbers,
    loss,
    next_tokens,
    numbers_of_one_process,
    randomised,
    samples,
)
from support.zoo import zoo_module

VOCABULARY = 1024
NUM_STEPS = 3
NOISE = 2e-7
"""Of the largest gradient of a model: gradients that are zero by mathematics are rounding noise of about this size."""


class _Attention(nn.Module):
    """Separate projections, queries and keys normed per head, and a parameter that nothing reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.q_scale = nn.Parameter(torch.ones(width // heads))
        self.k_norm = nn.LayerNorm(width // heads)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, len(self.q_scale)) for part in (self.q(x), self.k(x), self.v(x)))
        q, k = q * (1 + self.q_scale.float()), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class _UnfusedAttention(_Attention):
    """The same by products and a softmax, so that scores are kept for backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, 8).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: type[_Attention] = _Attention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = attention(width, heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class _ParallelBlock(_Block):
    """Attention and a net, side by side, of one norm."""

    def __init__(self, width: int, heads: int, attention: type[_Attention] = _Attention) -> None:
        super().__init__(width, heads, attention)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.net(y)


class _Normed(nn.Module):
    def __init__(self, attention: type[_Attention] = _Attention, block: type[_Block] = _Block) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(block(32, 4, attention) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _constructor(name: str) -> nn.Module:
    if name == "gpt":
        gpt = zoo_module("gpt.py")
        return gpt.GPT(gpt.Config(num_layers=4, num_heads=4, width=32, vocabulary=VOCABULARY, context=SEQ_LEN))
    if name == "normed":
        return _Normed()
    if name == "unfused":
        return _Normed(_UnfusedAttention)
    if name == "parallel":
        return _Normed(block=_ParallelBlock)
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=SEQ_LEN, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def _build(name: str) -> nn.Module:
    return randomised(_constructor(name))


@functools.cache
def loaded_model(name: str) -> LoadedModel:
    """The model of that name: gpt, gpt2, llama, or one of this file."""
    return load_model(functools.partial(_build, name), batch=next_tokens(VOCABULARY), loss=loss)


@functools.cache
def profile_of(name: str) -> ModelProfile:
    """Its profile."""
    return trace(loaded_model(name))


@functools.cache
def reference_of(name: str) -> Numbers:
    """What plain PyTorch in one process gives on the samples that plans train on, too."""
    return numbers_of_one_process(functools.partial(_build, name), samples(VOCABULARY, NUM_STEPS))
