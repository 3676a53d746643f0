"""The form in which a picture of each sample is handed over, and what a configuration says of pictures in general."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

GRID = 16
"""Tokens along each side of a picture whose size is not given: in Qwen2-VL 448 pixels, about one tile of other
models."""

SIDE = 448
"""Pixels along each side of a picture whose size is not given, for models without patches."""

_FIXED_SIDE = 224
"""Pixels along each side of a picture, for models of one size that the configuration does not give."""


@dataclass(frozen=True)
class HandedOver:
    """How a picture of each sample is handed over to a model.

    tensors: number of samples -> tensors. layout: names of those whose numbers say where a picture is and how large.
    size: the picture in words, if any size is possible; also: what else is assumed of it. tokens: how many stand for it
    in the text (None: the model is asked). begins, ends: tokens before and after it. beside: (samples, tokens of each,
    tokens of the picture) -> what else is given for each token.
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
"""Takes a configuration and the part of it on pictures; returns ways to hand over a picture, the most specific
first."""


def side_of(vision: Any) -> tuple[int, int]:
    """Height and width, in pixels, of the pictures that a vision configuration is for."""
    side = said_side(vision) or _FIXED_SIDE
    return (side[0], side[1]) if isinstance(side, list | tuple) else (side, side)


def said_side(vision: Any) -> Any:
    """The size of pictures as a vision configuration, or one inside of it, says it; None if none does."""
    parts = (getattr(vision, name, None) for name in getattr(vision, "sub_configs", None) or ())
    told = (getattr(part, name, None) for part in (vision, *parts) for name in ("image_size", "resolution"))
    return next((side for side in told if side is not None), None)


def pixels(config: Any, *outer: int) -> "torch.Tensor":
    """[outer..., channels, height, width]: pictures of the size in a vision configuration."""
    return noise(*outer, channels_of(config), *side_of(config))


def noise(*shape: int) -> "torch.Tensor":
    """Random numbers in place of those of a picture."""
    import torch

    return torch.randn(shape)


def channels_of(vision: Any) -> int:
    """Numbers for each pixel: channels."""
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
    """What is assumed of a picture of this size, in words."""
    return f"one picture of {height} x {width} pixels"
