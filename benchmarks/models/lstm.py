"""A language model of two LSTM layers: the large one of Zaremba et al. on Penn Treebank (66 M parameters).

"Recurrent Neural Network Regularization", 2014, section 4.1: 1500 units, 35 steps, 65% dropout, 10,000 words.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are the paper's."""

    num_layers: int = 2
    width: int = 1500
    vocabulary: int = 10_000
    dropout: float = 0.65


SMALL = Config(width=32, vocabulary=64, dropout=0.0)

seq_len = 35
global_batch = 20


class LanguageModel(nn.Module):
    """Embedding, LSTM layers, and a head of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.width, config.width, num_layers=config.num_layers, dropout=config.dropout, batch_first=True
        )
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.dropout(self.tokens(tokens)))
        return self.head(self.dropout(x))


def model() -> nn.Module:
    """The model to plan for."""
    return LanguageModel(Config())


def batch(size: int, seq_len: int = seq_len) -> tuple[torch.Tensor, torch.Tensor]:
    """(words, following words) for `size` samples."""
    tokens = torch.randint(Config.vocabulary, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next word."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def small() -> nn.Module:
    """A narrow model of the same layers, with few words and no dropout."""
    return LanguageModel(SMALL)


def small_batch(size: int, seq_len: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch for `small`."""
    tokens = torch.randint(SMALL.vocabulary, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]
