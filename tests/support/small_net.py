"""A small model of linear layers, and how it is trained."""

from typing import Any

import torch
from torch import nn

WIDTH, CLASSES, GLOBAL_BATCH = 16, 8, 8


class Net(nn.Module):
    """Blocks of two linear layers, whose output is a view."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        nn.init.trunc_normal_(self.head.weight, std=0.5)
        nn.init.orthogonal_(self.blocks[0][0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.add_half(block(x))
        return self.head(x * self.scale)

    def add_half(self, x: torch.Tensor) -> torch.Tensor:
        """x + 0.5, in new memory."""
        return x + 0.5


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy; targets of -1 do not count."""
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=-1)


def batch_of(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, WIDTH, generator=generator)
    targets = torch.randint(CLASSES, (size, 4), generator=generator)
    return x, targets


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fails where parameters differ by more than rounding."""
    torch.testing.assert_close(found, dict(expected), rtol=1e-5, atol=1e-6)
