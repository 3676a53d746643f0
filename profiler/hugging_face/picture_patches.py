"""Ways to hand over pictures in patches. Models differ in how many patches become one token, and in their order."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .handed_over import GRID, SIDE, HandedOver, channels_of, in_pixels, merged_of, noise, patch_of, side_of

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_POOLED = 2
"""Patches along each side of what becomes one token in Molmo 2: its processor says so, its configuration does not."""


def in_a_grid(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Patches of all pictures, one picture after another, and the grid of each (frames, rows, columns): Qwen2-VL and
    models like it, whose patches are rows of numbers. Kimi's patches are small pictures, and Inkling's are as large as
    what becomes one token."""
    import torch

    patch, merged, channels = patch_of(vision), merged_of(config, vision), channels_of(vision)
    told = (getattr(vision, name, None) for name in ("temporal_patch_size", "patch_temporal"))
    deep = next((number for number in told if isinstance(number, int)), 1)
    side = GRID * merged

    def of(across: int, *each: int) -> "Callable[[int], Tensors]":
        def tensors(samples: int) -> "Tensors":
            grids = torch.tensor([[1, across, across]] * samples)
            return {"pixel_values": noise(samples * across**2, *each), "image_grid_thw": grids}

        return tensors

    layout, size = frozenset({"image_grid_thw"}), in_pixels(patch * side, patch * side)
    yield HandedOver(of(side, channels * deep * patch**2), layout, size)
    yield HandedOver(of(side, channels, patch, patch), layout, size)
    yield HandedOver(of(GRID, merged * patch, merged * patch, channels), layout, size)


def in_a_flat_grid(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Patches of all pictures, one picture after another, and rows and columns of each: Nemotron's omni models."""
    import torch

    patch, side = patch_of(vision), GRID * merged_of(config, vision)

    def tensors(samples: int) -> "Tensors":
        patches = noise(samples * side**2, channels_of(vision) * patch**2)
        return {"pixel_values": patches, "image_grid_hw": torch.tensor([[side, side]] * samples)}

    yield HandedOver(tensors, frozenset({"image_grid_hw"}), in_pixels(patch * side, patch * side))


def in_a_grid_of_own_merging(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Patches and grids as of `in_a_grid`, and for each picture how many patches become one token: VideoLLaMA 3, where
    all do so singly."""
    import torch

    for each in in_a_grid(config, vision):

        def tensors(samples: int, each: HandedOver = each) -> "Tensors":
            return {**each.tensors(samples), "image_merge_sizes": torch.ones(samples, dtype=torch.long)}

        yield HandedOver(tensors, each.layout | {"image_merge_sizes"}, each.size)


def in_a_row(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Patches of all pictures in one row, the grid of each, and a token at both of its ends: MiniCPM-V."""
    import torch

    patch, channels = patch_of(vision), channels_of(vision)
    merged = 2 if config.downsample_mode == "4x" else 4
    side = max(1, getattr(config, "image_size", SIDE) // (patch * merged)) * merged
    begins, ends = (getattr(config, name, None) for name in ("image_start_id", "image_end_id"))

    def tensors(samples: int) -> "Tensors":
        return {
            "pixel_values": noise(1, channels, patch, samples * side**2 * patch),
            "target_sizes": torch.tensor([[side, side]] * samples),
        }

    yield HandedOver(
        tensors,
        frozenset({"target_sizes"}),
        in_pixels(patch * side, patch * side),
        ", not cut into slices",
        begins=() if begins is None else (begins,),
        ends=() if ends is None else (ends,),
    )


def in_padded_patches(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Patches of each picture, a mask of those that are not padding, and the grid of each picture: LFM2-VL."""
    import torch

    patch, side = patch_of(vision), GRID * merged_of(config, vision)

    def tensors(samples: int) -> "Tensors":
        return {
            "pixel_values": noise(samples, side**2, channels_of(vision) * patch**2),
            "spatial_shapes": torch.tensor([[side, side]] * samples),
            "pixel_attention_mask": torch.ones(samples, side**2, dtype=torch.long),
        }

    layout = frozenset({"spatial_shapes", "pixel_attention_mask"})
    yield HandedOver(tensors, layout, in_pixels(patch * side, patch * side))


def in_pooled_crops(config: Any, vision: Any) -> Iterator[HandedOver]:
    """A small version of the picture and one crop of it, both in patches, and which patches become one token: Molmo
    2."""
    import torch

    patch, (height, width) = patch_of(vision), side_of(vision)
    rows, columns = height // patch, width // patch
    down, right = -(-rows // _POOLED), -(-columns // _POOLED)
    padded = torch.full((down * _POOLED, right * _POOLED), -1)
    padded[:rows, :columns] = torch.arange(rows * columns).view(rows, columns)
    pooled = padded.view(down, _POOLED, right, _POOLED).transpose(1, 2).reshape(down * right, -1)

    def tensors(samples: int) -> "Tensors":
        crops = [torch.where(pooled < 0, -1, pooled + crop * rows * columns) for crop in range(2 * samples)]
        return {
            "pixel_values": noise(2 * samples, rows * columns, channels_of(vision) * patch**2),
            "image_token_pooling": torch.cat(crops),
            "image_grids": torch.tensor([[down, right, down, right]] * samples),
        }

    yield HandedOver(tensors, frozenset({"image_token_pooling", "image_grids"}), in_pixels(height, width))


def in_numbered_patches(config: Any, vision: Any) -> Iterator[HandedOver]:
    """As many patches as the model takes at most, each with its row and column in front: Kosmos-2.5."""
    columns = int(vision.max_num_patches**0.5)
    wide = vision.patch_embed_hidden_size

    def tensors(samples: int) -> "Tensors":
        return {"flattened_patches": numbered_patches(samples, columns, wide)}

    yield HandedOver(tensors, size=f"one picture of {columns} x {columns} patches", tokens=config.latent_query_num)


def numbered_patches(samples: int, across: int, wide: int) -> "torch.Tensor":
    """[samples, across * across, 2 + wide]: patches of square pictures, each with its row and column in front."""
    import torch

    at = torch.arange(across**2)
    where = torch.stack((at // across + 1, at % across + 1), -1).float()
    return torch.cat((where.expand(samples, -1, -1), noise(samples, across**2, wide)), -1)
