"""Four linear layers as plain attributes: the model of the pipeline-parallel tutorials."""

import torch
from torch import nn
from torch.nn import functional

WIDTH = 1024
NUM_CLASSES = 16

global_batch = 256


class MLP(nn.Module):
    """fc1 .. fc4 with ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, 4 * width)
        self.fc3 = nn.Linear(4 * width, width)
        self.fc4 = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.fc1(x))
        x = functional.relu(self.fc2(x))
        x = functional.relu(self.fc3(x))
        return self.fc4(x)


def model() -> nn.Module:
    """The model to plan for."""
    return MLP(WIDTH)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, class) for `size` samples."""
    return torch.randn(size, WIDTH), torch.randint(NUM_CLASSES, (size,))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the class."""
    return functional.cross_entropy(output.float(), batch[1])


def small() -> nn.Module:
    """A narrow MLP, built like the model to plan for."""
    return MLP(32)


def small_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch for `small`."""
    return torch.randn(size, 32), torch.randint(NUM_CLASSES, (size,))
