"""Pictures in the text of a Hugging Face model, as its processor hands them over: which tensors hold a picture, and how
many tokens stand for it. The model itself is asked."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .handed_over import HandedOver, pixels
from .picture_tensors import WAYS
from .picture_tokens import AskedModel

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Picture:
    """The picture in one sample, or what stands in its places.

    tokens: how many stand for it in the text; each of them is `mark` (None: any token). tensors: (samples, tokens of
    each) -> the tensors of the picture. layout: names of those whose numbers say where a picture is and how large.
    assumes: its size in words, if any is possible. begins, ends: tokens before and after it. kind: what to call it.
    """

    tokens: int
    mark: int | None
    tensors: "Callable[[int, int], Tensors]"
    layout: frozenset[str] = frozenset()
    assumes: str = ""
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    kind: str = "picture"

    @property
    def around(self) -> int:
        """Number of tokens of a picture, with those that mark its ends."""
        return len(self.begins) + self.tokens + len(self.ends)


def picture_of(takes: Collection[str], config: Any, model: AskedModel) -> Picture | None:
    """The picture in the text of a model whose forward takes these arguments; None if no way to make it is known here.
    Raises ValueError, with the picture and the model's answer, if the model takes the picture in none of the ways that
    its arguments suggest."""
    vision = _vision(config)
    if vision is None or not _has_places(takes, config):
        return None
    refused = ""
    for names, make in WAYS:
        if names <= set(takes):
            try:
                ways = list(make(config, vision))
            except AttributeError:  # a configuration without what the names of the tensors promise
                continue
            for way in ways:
                try:
                    tokens = way.tokens or model.tokens(partial(way.tensors, 1), way.layout)
                except ValueError as error:
                    refused = refused or f"{way.size or 'pictures'}: {error}"
                    continue
                return _picture(takes, config, way, tokens)
    if refused:
        raise ValueError(refused)
    return None


def picture_beside(takes: Collection[str], config: Any) -> Picture | None:
    """The picture of a model that takes it beside the text and not in it, as BLIP does; None for others."""
    vision = _vision(config)
    placed = any("image" in name for name in takes) or any(hasattr(config, name) for name in _MARKS)
    if vision is None or "pixel_values" not in takes or placed:
        return None
    return Picture(0, None, lambda size, seq_len: {"pixel_values": pixels(vision, size)})


_MARKS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def mark_of(config: Any) -> int | None:
    """The token that stands in the text in the places of a picture; None if the configuration names none."""
    found = [getattr(config, name, None) for name in _MARKS]
    named = getattr(config, "vocabulary_map", None) or {}
    return next((token for token in (*found, named.get("<image>")) if isinstance(token, int)), None)


def unsaid_mark(takes: Collection[str], config: Any) -> str:
    """Names of the key in which a configuration with pictures fails to say which token marks them; '' if it says so, or
    has no pictures."""
    if _vision(config) is None or "pixel_values" not in takes or _has_places(takes, config):
        return ""
    if hasattr(config, "vocabulary_map"):
        return '"<image>" in its "vocabulary_map"'
    return next((f'"{name}"' for name in _MARKS if hasattr(config, name)), "")


def _has_places(takes: Collection[str], config: Any) -> bool:
    """Whether a configuration or a mask says where in the text pictures are."""
    return mark_of(config) is not None or "image_embeds_position_mask" in takes


def _vision(config: Any) -> Any:
    parts = (getattr(config, name, None) for name in ("vision_config", "vq_config"))
    return next((part for part in parts if part is not None), None)


def _picture(takes: Collection[str], config: Any, way: HandedOver, tokens: int) -> Picture:
    named = [name for name in _BESIDE if name in takes]
    types = "token_type_ids" in takes and config.model_type in _SEES_ITS_PROMPT_WHOLE

    def tensors(size: int, seq_len: int) -> "Tensors":
        here = _in_text(size, seq_len, tokens, after=len(way.begins))
        made = {**way.tensors(size), **dict.fromkeys(named, here), **way.beside(size, seq_len, tokens)}
        return {**made, "token_type_ids": 1 - here} if types else made

    layout = way.layout | set(named) | ({"token_type_ids"} if types else set())
    took = f"{way.size} in each sample, which takes {tokens} token{'s' if tokens > 1 else ''}{way.also}"
    assumes = took if way.size else ""
    return Picture(tokens, mark_of(config), tensors, layout, assumes, way.begins, way.ends)


_BESIDE = ("mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask")
"""Arguments of a forward that tell for each token whether a picture stands there."""

_SEES_ITS_PROMPT_WHOLE = ("paligemma",)
"""Types of models that attend to a picture and the question about it as a whole: in their token types 0 stands for
both, and 1 for what is to be learnt."""


def _in_text(size: int, seq_len: int, tokens: int, after: int = 0) -> "torch.Tensor":
    """[size, seq_len]: 1 at the `tokens` tokens of a picture, which begins after the first `after` tokens of a
    sample."""
    import torch

    here = torch.zeros(size, seq_len, dtype=torch.long)
    here[:, after : after + tokens] = 1
    return here
