"""flex_attention with a mask of blocks that the model makes once for each length."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def causal(b, h, q, k):
    return q >= k


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + self.out(flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 50)
        self.masks = {}

    def forward(self, tokens):
        length = tokens.shape[1]
        if length not in self.masks:
            self.masks[length] = create_block_mask(causal, None, None, length, length, device=tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.masks[length])
        return self.head(x)


def model():
    return Model()


def batch(size, seq_len=16):
    return torch.randint(50, (size, seq_len)), torch.randint(50, (size, seq_len))


def loss(output, batch):
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
