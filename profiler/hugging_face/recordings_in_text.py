"""Recordings in the text of a Hugging Face model, as its processor hands them over. The model itself is asked how many
tokens stand for one."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from .picture_tokens import AskedModel
from .pictures import Picture
from .recordings import BINS, FRAMES_PER_S, SECONDS

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_MARKS = ("audio_token_id", "audio_token_index")
_WIDTHS = ("num_mel_bins", "input_dim", "feature_size", "input_size", "num_mels")
_MASKS = ("input_features_mask", "feature_attention_mask")


def recording_of(takes: Collection[str], config: Any, model: AskedModel) -> Picture | None:
    """The recording in the text of a model whose forward takes these arguments; None if it has no place for one, or
    takes none of those that can be made here."""
    mark = _mark_of(config)
    if mark is None or "input_features" not in takes or mark >= model.words:
        return None
    asked = model.takes("get_audio_features")
    masks = [name for name in _MASKS if name in takes and name in (asked or takes)]
    for shape, frames in _spectrograms(config):
        tensors = partial(_tensors, shape, frames, masks)
        try:
            tokens = model.tokens(partial(tensors, 1), masks) if asked else model.tokens_heard(frames)
        except ValueError:  # not what this model takes
            continue
        if tokens is None:
            return None
        said = f"one recording of {frames / FRAMES_PER_S:g} s in each sample, which takes {tokens} tokens"
        return Picture(tokens, mark, _of_any_length(tensors), frozenset(masks), said, kind="recording")
    return None


def without_place(takes: Collection[str], config: Any, model: AskedModel) -> str:
    """Why the text of a model that takes recordings has no place for one, in words; "" if there is no such reason."""
    mark, unsaid = _mark_of(config), [name for name in _MARKS if hasattr(config, name)]
    if "input_features" not in takes or not unsaid or (mark is not None and mark < model.words):
        return ""
    if mark is None:
        return f'its configuration has no "{unsaid[0]}", the token that stands in the text in the places of one'
    return f"token {mark} marks recordings, and its vocabulary of {model.words:,} has no embedding for it"


def _mark_of(config: Any) -> int | None:
    return next((found for name in _MARKS if isinstance(found := getattr(config, name, None), int)), None)


def _of_any_length(tensors: "Callable[[int], Tensors]") -> "Callable[[int, int], Tensors]":
    """A function of (samples, tokens of each) that makes these tensors and ignores the number of tokens."""
    return lambda size, seq_len: tensors(size)


def _spectrograms(config: Any) -> Iterator[tuple[tuple[int, int], int]]:
    """(shape of a recording, [frequencies, frames] or the other way round; its number of frames) for all that a model
    may take, the most likely first. Encoders like Whisper's always take two frames for each of their positions."""
    parts = [getattr(config, name, None) for name in ("audio_config", "encoder_config", "audio_encoder_config")]
    audio = next((part for part in parts if part is not None), config)
    bins = next((found for name in _WIDTHS if isinstance(found := getattr(audio, name, None), int)), BINS)
    positions = getattr(audio, "max_source_positions", None)
    if isinstance(positions, int):
        yield (bins, 2 * positions), 2 * positions
    frames = SECONDS * FRAMES_PER_S
    yield (bins, frames), frames
    yield (frames, bins * getattr(audio, "num_stacked_frames", 1)), frames


def _tensors(shape: tuple[int, int], frames: int, masks: Collection[str], size: int) -> "Tensors":
    import torch

    return {"input_features": torch.randn(size, *shape), **{name: torch.ones(size, frames).long() for name in masks}}
