"""Pictures in text, as the processor of a Hugging Face model hands them over: how many tokens stand for one, and which
tensors bring it. Where the number of tokens depends on the size of a picture, that size is an assumption."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_GRID = 16
"""Tokens along each side of a picture whose size is free: 448 pixels of Qwen2-VL, as much as one tile of others."""

_FRAMES = 4
"""Frames of a video, as the processor of InstructBLIP-Video takes."""

_PROMPT = 32
"""Tokens of the question that is asked about a picture while it is looked at."""


@dataclass(frozen=True)
class Picture:
    """The picture of one sample.

    tokens: that stand for it in the text, each of them `mark` (None: any). tensors: (samples, tokens of each) -> what
    brings it. layout: those whose numbers say where a picture is and how large. assumes: its size in words, if free.
    begins, ends: tokens that stand before and after it.
    """

    tokens: int
    mark: int | None
    tensors: "Callable[[int, int], Tensors]"
    layout: frozenset[str] = frozenset()
    assumes: str = ""
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def around(self) -> int:
        """Tokens of a picture and of what marks its ends."""
        return len(self.begins) + self.tokens + len(self.ends)


def picture_of(takes: Collection[str], config: Any) -> Picture | None:
    """The picture in the text of a model whose forward takes these; None where how to make it is not known here."""
    vision = getattr(config, "vision_config", None)
    if vision is None or "labels" not in takes:
        return None
    for names, make in _MAKERS:
        if names <= set(takes):
            try:
                found = make(config, vision)
            except AttributeError:  # a configuration without what the names of the tensors promise
                continue
            if found is not None:
                return found
    return None


def _side(config: Any) -> tuple[int, int]:
    side = getattr(config, "image_size", 224)
    return (side[0], side[1]) if isinstance(side, list | tuple) else (side, side)


def _mark(config: Any) -> int | None:
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    found = (getattr(config, name, None) for name in names)
    return next((token for token in found if isinstance(token, int)), None)


def pixels(config: Any, *outer: int) -> "torch.Tensor":
    """Pictures of the size that a vision configuration names: [outer..., channels, height, width]."""
    import torch

    return torch.randn(*outer, getattr(config, "num_channels", 3), *_side(config))


def _in_text(size: int, seq_len: int, tokens: int, after: int = 0) -> "torch.Tensor":
    """[size, seq_len]: 1 where a picture stands, which is where a sample begins, `after` so many tokens."""
    import torch

    here = torch.zeros(size, seq_len, dtype=torch.long)
    here[:, after : after + tokens] = 1
    return here


def _of_fixed_size(config: Any, vision: Any) -> Picture | None:
    """As many tokens for each picture as the configuration says: LLaVA, Gemma 3, ..."""
    mark, side = _mark(config), getattr(vision, "image_size", None)
    told = (getattr(config, name, None) for name in ("image_seq_length", "mm_tokens_per_image"))
    tokens = next((number for number in told if isinstance(number, int)), None)
    by_size = getattr(config, "image_grid_pinpoints", None) is not None
    if by_size or mark is None or tokens is None or not isinstance(side, int | list | tuple):
        return None
    return Picture(tokens, mark, lambda size, seq_len: {"pixel_values": pixels(vision, size)})


def _in_a_grid(config: Any, vision: Any) -> Picture | None:
    """Patches in rows, those of all pictures behind each other, and the grid of each: Qwen2-VL and its like."""
    patch, merged, deep = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    mark, side = _mark(config), _GRID * merged
    if mark is None:
        return None

    def tensors(size: int, seq_len: int) -> "Tensors":
        import torch

        return {
            "pixel_values": torch.randn(size * side**2, channels * deep * patch**2),
            "image_grid_thw": torch.tensor([[1, side, side]] * size),
            "mm_token_type_ids": _in_text(size, seq_len, _GRID**2),
        }

    layout = frozenset({"image_grid_thw", "mm_token_type_ids"})
    return Picture(_GRID**2, mark, tensors, layout, _assumed(patch * side, patch * side, _GRID**2))


def _in_a_row(config: Any, vision: Any) -> Picture | None:
    """Patches of all pictures in one row, the grid of each, and a token at both of its ends: MiniCPM-V."""
    patch, channels, mark = vision.patch_size, vision.num_channels, _mark(config)
    merged = 2 if config.downsample_mode == "4x" else 4
    across = config.image_size // (patch * merged)
    side, ends = across * merged, (config.image_start_id, config.image_end_id)
    if mark is None or None in ends or across < 1:
        return None

    def tensors(size: int, seq_len: int) -> "Tensors":
        import torch

        return {
            "pixel_values": torch.randn(1, channels, patch, size * side**2 * patch),
            "target_sizes": torch.tensor([[side, side]] * size),
            "mm_token_type_ids": _in_text(size, seq_len, across**2, after=1),
        }

    layout = frozenset({"target_sizes", "mm_token_type_ids"})
    told = _assumed(patch * side, patch * side, across**2) + ", not cut into slices"
    return Picture(across**2, mark, tensors, layout, told, ends[:1], ends[1:])


def _in_tiles(config: Any, vision: Any) -> Picture | None:
    """A small version and the tiles of a large one, whose rows end in a token each: LLaVA-NeXT."""
    tile, patch = vision.image_size, vision.patch_size
    height, width = min(config.image_grid_pinpoints, key=lambda sides: (sides[0] * sides[1], sides))
    tiles = (height // tile) * (width // tile) + 1
    rows, columns = height // patch, width // patch
    tokens = (tile // patch) ** 2 + rows * (columns + 1)
    mark = _mark(config)
    if mark is None or config.vision_feature_select_strategy != "default":
        return None

    def tensors(size: int, seq_len: int) -> "Tensors":
        import torch

        return {"pixel_values": pixels(vision, size, tiles), "image_sizes": torch.tensor([[height, width]] * size)}

    return Picture(tokens, mark, tensors, frozenset({"image_sizes"}), _assumed(height, width, tokens))


def _in_one_tile(config: Any, vision: Any) -> Picture | None:
    """Pictures of a sample in a row, those that are all zeros only fill it up: Idefics3, SmolVLM."""
    height, width = _side(vision)
    tokens = (height // vision.patch_size) * (width // vision.patch_size) // config.scale_factor**2
    mark = _mark(config)
    if mark is None:
        return None

    def tensors(size: int, seq_len: int) -> "Tensors":
        import torch

        seen = torch.ones(size, 1, height, width, dtype=torch.long)
        return {"pixel_values": pixels(vision, size, 1), "pixel_attention_mask": seen}

    layout = frozenset({"pixel_values", "pixel_attention_mask"})
    return Picture(tokens, mark, tensors, layout, _assumed(height, width, tokens) + ", not cut into tiles")


def _asked_about(config: Any, vision: Any) -> Picture | None:
    """A picture, or the frames of a video, that a Q-Former sums up in a few tokens: InstructBLIP."""
    of_video = getattr(config, "image_token_index", None) is None
    frames, mark = _FRAMES if of_video else 1, _mark(config)
    if mark is None:
        return None

    def tensors(size: int, seq_len: int) -> "Tensors":
        import torch

        seen = (size, frames) if of_video else (size,)
        asked = torch.randint(config.qformer_config.vocab_size, (size, _PROMPT))
        return {"pixel_values": pixels(vision, *seen), "qformer_input_ids": asked}

    of = f"videos of {frames} frames" if of_video else "one picture in each sample"
    return Picture(
        frames * config.num_query_tokens, mark, tensors, assumes=f"{of} and {_PROMPT} tokens to ask the Q-Former by"
    )


def _in_patches(config: Any, vision: Any) -> Picture | None:
    """Patches with their row and column before them, as many as the model takes at most: Kosmos-2.5."""
    most, tokens = vision.max_num_patches, config.latent_query_num
    columns = int(most**0.5)

    def tensors(size: int, seq_len: int) -> "Tensors":
        import torch

        at = torch.arange(columns**2)
        where = torch.stack((at // columns + 1, at % columns + 1), -1).float()
        inside = torch.randn(size, columns**2, vision.patch_embed_hidden_size)
        patches = torch.cat((where.expand(size, -1, -1), inside), -1)
        return {"flattened_patches": patches, "image_embeds_position_mask": _in_text(size, seq_len, tokens)}

    layout = frozenset({"image_embeds_position_mask"})
    assumes = f"one picture of {columns} x {columns} patches in each sample, which takes {tokens} tokens"
    return Picture(tokens, None, tensors, layout, assumes)


def _assumed(height: int, width: int, tokens: int) -> str:
    return f"one picture of {height} x {width} pixels in each sample, which takes {tokens} tokens"


_MAKERS: tuple[tuple[set[str], Callable[[Any, Any], Picture | None]], ...] = (
    ({"pixel_values", "image_grid_thw", "mm_token_type_ids"}, _in_a_grid),
    ({"pixel_values", "target_sizes", "mm_token_type_ids"}, _in_a_row),
    ({"flattened_patches", "image_embeds_position_mask"}, _in_patches),
    ({"pixel_values", "qformer_input_ids"}, _asked_about),
    ({"pixel_values", "pixel_attention_mask"}, _in_one_tile),
    ({"pixel_values", "image_sizes", "vision_feature_select_strategy"}, _in_tiles),
    ({"pixel_values"}, _of_fixed_size),
)
"""What a forward takes -> how its picture is made; the first that its configuration fits."""
