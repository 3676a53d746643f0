"""ResNet-50 with torchvision's names and sizes (25.6 M parameters): stages of bottlenecks, and batch norms.

He et al., "Deep Residual Learning for Image Recognition", 2015, table 1; the stride sits on the 3x3 convolution.
"""

import torch
from torch import nn
from torch.nn import functional

BLOCKS = (3, 4, 6, 3)
WIDTH = 64
NUM_CLASSES = 1000
IMAGE = 224
SMALL_IMAGE = 64

global_batch = 256


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; four times as many channels leave as lie in its middle."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """Four stages, each half as large and twice as wide as the one before."""

    def __init__(self, blocks: tuple[int, int, int, int], width: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, blocks[0], stride=1)
        self.layer2 = _stage(4 * width, 2 * width, blocks[1], stride=2)
        self.layer3 = _stage(8 * width, 4 * width, blocks[2], stride=2)
        self.layer4 = _stage(16 * width, 8 * width, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _stage(inputs: int, width: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, width, stride)
    rest = (Bottleneck(width * Bottleneck.expansion, width, 1) for _ in range(num_blocks - 1))
    return nn.Sequential(first, *rest)


def model() -> nn.Module:
    """The model to plan for."""
    return ResNet(BLOCKS, WIDTH, NUM_CLASSES)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, classes) for `size` samples."""
    return torch.randn(size, 3, IMAGE, IMAGE), torch.randint(NUM_CLASSES, (size,))


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the class."""
    return functional.cross_entropy(logits.float(), batch[1])


def small() -> nn.Module:
    """A narrow ResNet of the same stages, with one or two blocks each."""
    return ResNet((1, 2, 2, 1), 8, 10)


def small_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch for `small`."""
    return torch.randn(size, 3, SMALL_IMAGE, SMALL_IMAGE), torch.randint(10, (size,))
