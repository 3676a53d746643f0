"""A picture of each sample as it is handed over, and what a configuration says of pictures in general."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

GRID = 16
"""Tokens along each side of a picture whose size is free: 448 pixels of Qwen2-VL, as much as one tile of others."""

SIDE = 448
"""Pixels along each side of a picture whose size is free, of models that have no patches."""

_FIXED_SIDE = 224
"""Pixels along each side of a picture of one size that a configuration does not say."""


@dataclass(frozen=True)
class HandedOver:
    """One picture of each sample, as it is handed over.

    tensors: of so many samples. layout: those whose numbers say where a picture is and how large. size, also: the
    picture in words, if its size is free, and what else is assumed of it. tokens: that stand for it in the text (None:
    the model is to be asked). begins, ends: tokens before and after it. beside: what else is given for each token, from
    (samples, tokens of each, tokens of the picture).
    """

    tensors: "Callable[[int], Tensors]"
    layout: frozenset[str] = frozenset()
    size: str = ""
    also: str = ""
    tokens: int | None = None
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    beside: "Callable[[int, int, int], Tensors]" = lambda size, seq_len, tokens: {}


Make = Callable[[Any, Any], Iterator[HandedOver]]
"""Ways for a configuration and what of it is about pictures, those that say more first."""


def side_of(vision: Any) -> tuple[int, int]:
    """Height and width, in pixels, of the pictures that a vision configuration is for."""
    side = said_side(vision) or _FIXED_SIDE
    return (side[0], side[1]) if isinstance(side, list | tuple) else (side, side)


def said_side(vision: Any) -> Any:
    """The same as a configuration or one inside of it says it; None if none does."""
    parts = (getattr(vision, name, None) for name in getattr(vision, "sub_configs", None) or ())
    told = (getattr(part, name, None) for part in (vision, *parts) for name in ("image_size", "resolution"))
    return next((side for side in told if side is not None), None)


def pixels(config: Any, *outer: int) -> "torch.Tensor":
    """Pictures of the size that a vision configuration names: [outer..., channels, height, width]."""
    return noise(*outer, channels_of(config), *side_of(config))


def noise(*shape: int) -> "torch.Tensor":
    """What stands for numbers of a picture."""
    import torch

    return torch.randn(shape)


def channels_of(vision: Any) -> int:
    """Numbers of a pixel."""
    told = (getattr(vision, name, None) for name in ("in_channels", "num_channels"))
    return next((number for number in told if isinstance(number, int)), 3)


def patch_of(vision: Any) -> int:
    """Pixels along each side of a patch."""
    patch = vision.patch_size
    return int(patch if isinstance(patch, int) else patch[0])


def merged_of(config: Any, vision: Any) -> int:
    """Patches along each side of what becomes one token."""
    named = ("spatial_merge_size", "merge_size", "merge_kernel_size", "downsample_factor")
    told = (getattr(each, name, None) for each in (vision, config) for name in named)
    merged = next((each for each in told if each is not None), None)
    if merged is None:
        return round(1 / getattr(config, "downsample_ratio", 1.0))
    return int(merged if isinstance(merged, int) else merged[0])


def in_pixels(height: int, width: int) -> str:
    """What is assumed of pictures of that size."""
    return f"one picture of {height} x {width} pixels"
