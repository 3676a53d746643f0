"""Ways in which processors of Hugging Face models hand over a picture of each sample. A configuration rarely says which
of them its model takes, so several may be offered: the model is asked. Where the size of a picture is free, it is an
assumption."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from . import picture_patches
from .handed_over import (
    GRID,
    SIDE,
    HandedOver,
    Make,
    channels_of,
    in_pixels,
    merged_of,
    noise,
    patch_of,
    pixels,
    said_side,
    side_of,
)

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_FRAMES = 4
"""Frames of a video: as many as InstructBLIP-Video's processor takes."""

_PROMPT = 32
"""Tokens of the question about a picture, which is read together with the picture."""


def _of_fixed_size(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Pictures of the configured size: LLaVA, Gemma 3, PaliGemma, ..."""
    size = "" if said_side(vision) else in_pixels(*side_of(vision))
    yield HandedOver(lambda samples: {"pixel_values": pixels(vision, samples)}, size=size)


def _twice(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Pictures of two sizes, both configured: DeepSeek-VL's hybrid."""

    def tensors(samples: int) -> "Tensors":
        large = pixels(config.high_res_vision_config, samples)
        return {"pixel_values": pixels(vision, samples), "high_res_pixel_values": large}

    yield HandedOver(tensors)


def _with_pixel_mask(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Pictures of the configured size, and a mask of the pixels that are not padding: Aria."""

    def tensors(samples: int) -> "Tensors":
        import torch

        seen = torch.ones(samples, *side_of(vision), dtype=torch.bool)
        return {"pixel_values": pixels(vision, samples), "pixel_mask": seen}

    yield HandedOver(tensors, frozenset({"pixel_mask"}))


def _in_one_tile(config: Any, vision: Any) -> Iterator[HandedOver]:
    """All pictures of a sample in one tensor, with a mask of pixels or of pictures; those masked out are padding:
    Idefics2, Idefics3, SmolVLM; Granite-Docling."""

    def of(*mask: int, dtype: str) -> "Callable[[int], Tensors]":
        def tensors(samples: int) -> "Tensors":
            import torch

            seen = torch.ones(samples, 1, *mask, dtype=getattr(torch, dtype))
            return {"pixel_values": pixels(vision, samples, 1), "pixel_attention_mask": seen}

        return tensors

    layout = frozenset({"pixel_values", "pixel_attention_mask"})
    size, also = in_pixels(*side_of(vision)), ", not cut into tiles"
    yield HandedOver(of(*side_of(vision), dtype="long"), layout, size, also)
    yield HandedOver(of(dtype="bool"), layout, size, also)


def _in_tiles(config: Any, vision: Any) -> Iterator[HandedOver]:
    """A small version of the picture, and tiles of a large one with the smallest size allowed: LLaVA-NeXT,
    LLaVA-OneVision."""
    if getattr(config, "image_grid_pinpoints", None) is None:
        return
    tile, _ = side_of(vision)
    height, width = min(config.image_grid_pinpoints, key=lambda sides: (sides[0] * sides[1], sides))
    tiles = (height // tile) * (width // tile) + 1

    def tensors(samples: int) -> "Tensors":
        import torch

        sizes = torch.tensor([[height, width]] * samples)
        return {"pixel_values": pixels(vision, samples, tiles), "image_sizes": sizes}

    yield HandedOver(tensors, frozenset({"image_sizes"}), in_pixels(height, width))


def _of_free_size(config: Any, vision: Any) -> Iterator[HandedOver]:
    """Pictures and the size of each: Mistral 3, LightOnOCR, Emu3."""
    if getattr(config, "image_grid_pinpoints", None) is not None:
        return
    patched = getattr(vision, "patch_size", None) is not None
    side = GRID * patch_of(vision) * merged_of(config, vision) if patched else SIDE

    def tensors(samples: int) -> "Tensors":
        import torch

        sizes = torch.tensor([[side, side]] * samples)
        return {"pixel_values": noise(samples, channels_of(vision), side, side), "image_sizes": sizes}

    yield HandedOver(tensors, frozenset({"image_sizes"}), in_pixels(side, side))


def _in_cross_attention(config: Any, vision: Any) -> Iterator[HandedOver]:
    """As many tiles as a picture may have, of which one is used; text attends to it from its single token on: Llama 3.2
    Vision."""
    import torch

    most = vision.max_num_tiles

    def tensors(samples: int) -> "Tensors":
        return {
            "pixel_values": pixels(vision, samples, 1, most),
            "aspect_ratio_ids": torch.ones(samples, 1, dtype=torch.long),
            "aspect_ratio_mask": (torch.arange(most) < 1).long().expand(samples, 1, most),
        }

    def beside(samples: int, seq_len: int, tokens: int) -> "Tensors":
        return {"cross_attention_mask": (torch.arange(most) < 1).long().expand(samples, seq_len, 1, most)}

    layout = frozenset({"aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"})
    also = f", in one of {most} tiles"
    yield HandedOver(tensors, layout, in_pixels(*side_of(vision)), also, tokens=1, beside=beside)


def _asked_about(config: Any, vision: Any) -> Iterator[HandedOver]:
    """A picture, or the frames of a video, which a Q-Former turns into a few tokens: InstructBLIP."""
    of_video = getattr(config, "image_token_index", None) is None
    frames = _FRAMES if of_video else 1

    def tensors(samples: int) -> "Tensors":
        import torch

        seen = (samples, frames) if of_video else (samples,)
        asked = torch.randint(config.qformer_config.vocab_size, (samples, _PROMPT))
        return {"pixel_values": pixels(vision, *seen), "qformer_input_ids": asked}

    size = f"a video of {frames} frames" if of_video else in_pixels(*side_of(vision))
    also = f", and {_PROMPT} tokens to ask the Q-Former by"
    yield HandedOver(tensors, size=size, also=also, tokens=frames * config.num_query_tokens)


WAYS: tuple[tuple[frozenset[str], Make], ...] = (
    (frozenset({"pixel_values", "image_grid_thw", "image_merge_sizes"}), picture_patches.in_a_grid_of_own_merging),
    (frozenset({"pixel_values", "image_grid_thw"}), picture_patches.in_a_grid),
    (frozenset({"pixel_values", "image_grid_hw"}), picture_patches.in_a_flat_grid),
    (frozenset({"pixel_values", "target_sizes"}), picture_patches.in_a_row),
    (frozenset({"flattened_patches", "image_embeds_position_mask"}), picture_patches.in_numbered_patches),
    (frozenset({"pixel_values", "qformer_input_ids"}), _asked_about),
    (frozenset({"pixel_values", "spatial_shapes", "pixel_attention_mask"}), picture_patches.in_padded_patches),
    (frozenset({"pixel_values", "image_token_pooling", "image_grids"}), picture_patches.in_pooled_crops),
    (frozenset({"pixel_values", "aspect_ratio_ids", "cross_attention_mask"}), _in_cross_attention),
    (frozenset({"pixel_values", "high_res_pixel_values"}), _twice),
    (frozenset({"pixel_values", "pixel_attention_mask"}), _in_one_tile),
    (frozenset({"pixel_values", "pixel_mask"}), _with_pixel_mask),
    (frozenset({"pixel_values", "image_sizes"}), _in_tiles),
    (frozenset({"pixel_values", "image_sizes"}), _of_free_size),
    (frozenset({"pixel_values"}), _of_fixed_size),
)
"""(arguments of a forward, the way to hand over a picture to it), in the order in which the model is asked."""
