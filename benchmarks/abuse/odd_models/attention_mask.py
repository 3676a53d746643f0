"""nn.MultiheadAttention with padding masks and a causal mask made of the input's length."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x, padding):
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        mixed, _ = self.attention(x, x, x, key_padding_mask=padding, attn_mask=causal, need_weights=False)
        return x + self.mlp(x + mixed)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32, padding_idx=0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens, padding):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -1e9))
        return self.head(x)


def model():
    return Model()


def batch(size, seq_len=12):
    tokens = torch.randint(1, 50, (size, seq_len))
    return tokens, torch.arange(seq_len).expand(size, seq_len) > 9, torch.randint(50, (size, seq_len))


def loss(output, batch):
    return functional.cross_entropy(output.flatten(0, 1), batch[2].flatten())
