"""A small U-Net: its skip connections cross every cut between the way down and the way up."""

import torch
from torch import nn
from torch.nn import functional

WIDTHS = (64, 128, 256, 512)
IMAGE = 128

global_batch = 64


class Convolutions(nn.Module):
    """Two 3x3 convolutions, each with group norm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.norm1(self.conv1(x)))
        return functional.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Predicts an image from an image."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.downs = nn.ModuleList(
            Convolutions(inputs, outputs) for inputs, outputs in zip((3, *widths[:-2]), widths[:-1], strict=True)
        )
        self.middle = Convolutions(widths[-2], widths[-1])
        self.ups = nn.ModuleList(
            Convolutions(inputs + outputs, outputs)
            for inputs, outputs in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            x = up(torch.cat([functional.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.out(x)


def model() -> nn.Module:
    """The model to plan for."""
    return UNet(WIDTHS)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(noisy image, clean image) for `size` samples."""
    return torch.randn(size, 3, IMAGE, IMAGE), torch.randn(size, 3, IMAGE, IMAGE)


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    return functional.mse_loss(output.float(), batch[1].float())


def small() -> nn.Module:
    """A small U-Net, built like the model to plan for."""
    return UNet((8, 16, 32, 64))


def small_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch for `small`."""
    return torch.randn(size, 3, 16, 16), torch.randn(size, 3, 16, 16)
