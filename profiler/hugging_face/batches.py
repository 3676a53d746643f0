"""Micro-batches of a Hugging Face model like those of its processor and a collator, and a loss if its head has none.
They follow from what its forward takes, from its configuration, and from the tasks that transformers lists it for."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..model.loaded import Batch, Build, Loss, MakeBatch
from . import recordings
from .handed_over import HandedOver, pixels
from .picture_patches import in_padded_patches, numbered_patches
from .picture_tokens import AskedModel
from .pictures import Picture, mark_of, picture_beside, picture_of, unsaid_mark
from .recordings_in_text import recording_of, without_place

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batches:
    """Micro-batches of a model. loss: None for heads that return their own. layout, assumes: see LoadedModel."""

    make: MakeBatch
    loss: Loss | None = None
    layout: frozenset[str] = frozenset()
    assumes: str = ""
    fewest_tokens: int = 1


def batches_of(architecture: Any, config: Any, path: Path, build: Build) -> Batches:
    """Micro-batches for a class of transformers. build: returns the model, which is asked how many tokens its pictures
    take. Raises ValueError if no way to make batches is known, or if the configuration at `path` does not fit
    pictures."""
    main_input = architecture.main_input_name
    takes = inspect.signature(architecture.forward).parameters.keys()
    if _is_made_for(architecture, "CTC") and main_input in recordings.HEARD:
        return _letters_heard(config, path, main_input)
    if _is_made_for(architecture, "MASK_GENERATION") and {"pixel_values", "input_points"} <= takes:
        said = f"{_PROMPTS} point in each picture, and the mask of what is there"
        return Batches(_pointed_at(config), _mask_loss, assumes=said)
    if {"pixel_values", "input_ids", "return_loss"} <= takes and hasattr(config, "vision_config"):
        way = next(in_padded_patches(config, config.vision_config)) if "spatial_shapes" in takes else None
        layout, size = (frozenset(), "") if way is None else (way.layout, f"{way.size} in each sample")
        return Batches(_texts_and_pictures(config, way), layout=layout, assumes=size)
    task = next((task for task in LABELS if _is_made_for(architecture, task)), None)
    why = ""
    if task != "MASKED_LM" and {"input_ids", "labels"} <= takes:
        asked = AskedModel(build, str(path))
        picture = _picture(architecture, takes, config, path, asked)
        given = "pixel_values"
        if picture is None:
            picture, given = recording_of(takes, config, asked), "input_features"
        if picture is not None:
            make = _text_with_picture(config, picture, LABELS[task] if task in _CLASSIFIES else None)
            assumes = _joined(picture.assumes, _left_out(takes, main_input, given))
            return Batches(make, None, picture.layout, assumes, fewest_tokens=picture.around + 1)
        why = without_place(takes, config, asked)
    if config.model_type in _IN_CODEBOOKS and main_input == "input_ids":
        return Batches(_codes(config))
    if task is None and main_input in _SEEN and {"labels", "decoder_input_ids"} <= takes:
        task = "SEQ_TO_SEQ_CAUSAL_LM"  # a text that is read off a picture
    if task is None and architecture.__name__.endswith("ForCausalLM") and {"input_ids", "labels"} <= takes:
        task = "CAUSAL_LM"  # whatever else transformers lists it under
    if task == "MASKED_LM" and main_input == "inputs":
        return Batches(_as_long_as_can_be(config))
    if task is None or main_input not in _INPUTS:
        raise ValueError(
            f'{path} asks for "{architecture.__name__}", whose batches are not known here (known: models that '
            f"take {' or '.join(_INPUTS)} and return a loss of one of {', '.join(LABELS)}; CTC on recordings; CLIP "
            "and its like; SAM and its like; text in which tokens stand for the pictures that its get_image_features "
            'takes); give another head under "architectures", or write a model.py with model() and batch(size)'
        )
    left_out = _left_out(takes, main_input)
    assumes = _joined(_assumed(config, main_input), f"{left_out}: {why}" if why else left_out)
    return Batches(_inputs_and_labels(task, main_input, takes, config), assumes=assumes)


def _left_out(takes: Collection[str], *given: str) -> str:
    """Which inputs beside text a forward would take, and is not given, in words; '' if there are none."""
    left = [name for name in ("pixel_values", *recordings.HEARD) if name in takes and name not in given]
    return f"samples without {' and '.join(left)}, which its forward would take" if left else ""


def _joined(*said: str) -> str:
    return "; ".join(each for each in said if each)


def _letters_heard(config: Any, path: Path, main_input: str) -> Batches:
    if not isinstance(config.vocab_size, int):
        raise ValueError(f'{path} has no "vocab_size": say how many letters it writes, the blank among them')
    make = recordings.ctc_batches(config, main_input)
    return Batches(make, recordings.ctc_loss(config), assumes=recordings.assumed(letters=True))


def _inputs_and_labels(task: str, main_input: str, takes: Collection[str], config: Any) -> MakeBatch:
    """Micro-batches of one main input and the labels of a task."""
    make_input, make_labels = _INPUTS[main_input], LABELS[task]
    if make_input is _image and not hasattr(config, "image_size"):
        seen = next((part for part in parts_of(config) if hasattr(part, "image_size")), config)
    else:
        seen = config
    if "decoder_input_ids" not in takes or main_input == "flattened_patches":
        begins_by: tuple[str, ...] = ()
    else:
        begins_by = ("decoder_start_token_id", *(("pad_token_id",) if main_input == "input_values" else ()))
    starts = all(isinstance(getattr(config, name, None), int) for name in begins_by)

    def sequences(size: int, seq_len: int) -> Batch:
        made = {main_input: make_input(seen, size, seq_len), "labels": make_labels(config, size, seq_len)}
        return made if starts else {**made, "decoder_input_ids": make_labels(config, size, seq_len)}  # no start token

    def samples(size: int) -> Batch:
        return {main_input: make_input(seen, size, 0), "labels": make_labels(config, size, 0)}

    return sequences if {make_input, make_labels} & {_tokens, _class_per_token} else samples


def text_of(config: Any) -> Any:
    """The configuration of the part that writes text, or reads it."""
    return config.get_text_config(decoder=True) if len(parts_of(config)) > 1 else config.get_text_config()


def parts_of(config: Any) -> list[Any]:
    """The configurations inside of a configuration."""
    found = (getattr(config, name, None) for name in config.sub_configs or ("encoder", "decoder"))
    return [part for part in found if part is not None]


def _picture(architecture: Any, takes: Collection[str], config: Any, path: Path, model: AskedModel) -> Picture | None:
    """The picture in the model's text; None if it takes none. Raises ValueError if the model and its configuration do
    not fit together."""
    unsaid = unsaid_mark(takes, config)
    if unsaid:
        raise ValueError(
            f"{path} has no {unsaid}, the token that stands in the text in the places of a picture: give its number"
        )
    mark = mark_of(config)
    if mark is not None and "pixel_values" in takes and mark >= model.words:
        raise ValueError(
            f"{path} marks pictures by token {mark}, and its text_config has a vocabulary of {model.words:,}, so no "
            f'embedding has it: give text_config a "vocab_size" above {mark}'
        )
    beside = _is_made_for(architecture, "IMAGE_TEXT_TO_TEXT")
    try:
        return picture_of(takes, config, model) or (picture_beside(takes, config) if beside else None)
    except ValueError as error:
        raise ValueError(
            f"the {architecture.__name__} of {path} does not take {error}. Make the numbers of its configuration fit "
            "together, or write a model.py with model() and batch(size)"
        ) from error


_PROMPTS = 1
"""Number of things to find in a picture, each by one point: an assumption."""


def _pointed_at(config: Any) -> MakeBatch:
    """Micro-batches of pictures, each with a point (column, row) and with a mask, of the picture's size, of the thing
    there."""

    def batch(size: int) -> Batch:
        import torch

        seen = pixels(config.vision_config, size)
        height, width = seen.shape[-2:]
        points = torch.rand(size, _PROMPTS, 1, 2) * torch.tensor([width, height])
        masks = (torch.rand(size, _PROMPTS, height, width) < 0.5).float()
        return {"pixel_values": seen, "input_points": points, "targets": masks}

    return batch


def _mask_loss(output: Any, batch: Any) -> "torch.Tensor":
    """Cross-entropy and dice of the best of the masks that are offered, and the error of the overlap that the model
    expects of each, as in Segment Anything (Kirillov et al., ICCV 2023, appendix A), which has focal loss for
    cross-entropy: transformers has no loss for these heads."""
    import torch
    from torch.nn import functional

    offered = output.pred_masks.float()
    wanted = functional.interpolate(batch["targets"].float(), size=offered.shape[-2:], mode="area")
    wanted = wanted[:, :, None].expand_as(offered)
    entropy = functional.binary_cross_entropy_with_logits(offered, wanted, reduction="none").mean((-2, -1))
    shown = offered.sigmoid()
    dice = 1 - (2 * (shown * wanted).sum((-2, -1)) + 1) / ((shown + wanted).sum((-2, -1)) + 1)
    inside = (offered.detach() > 0).float()
    overlap = torch.minimum(inside, wanted).sum((-2, -1)) / torch.maximum(inside, wanted).sum((-2, -1)).clamp(min=1)
    expected = (output.iou_scores.float() - overlap).square().mean(-1)
    mean: torch.Tensor = ((entropy + dice).amin(-1) + expected).mean()
    return mean


_SEEN = ("pixel_values", "flattened_patches")
"""Names of main inputs that are pictures."""

_PATCHES_ACROSS = 45
"""Patches along each side of the largest picture: Pix2Struct's processor takes up to 2,048 patches in all."""


def _assumed(config: Any, main_input: str) -> str:
    """What is assumed of a main input, in words; '' if nothing is."""
    if main_input == "flattened_patches":
        return f"pictures of {_PATCHES_ACROSS} x {_PATCHES_ACROSS} patches"
    is_free = main_input in recordings.HEARD and config.model_type != "whisper"
    return recordings.assumed(letters=False) if is_free else ""


_IN_CODEBOOKS = ("musicgen_decoder", "musicgen_melody_decoder")
"""Types of models that write several rows of codes at once, each from a codebook of its own."""


def _codes(config: Any) -> MakeBatch:
    """Micro-batches of codes of music: in the input the codebooks of a sample follow each other, in the labels they are
    side by side."""

    def batch(size: int, seq_len: int) -> Batch:
        import torch

        codes = torch.randint(config.vocab_size, (size, config.num_codebooks, seq_len))
        return {"input_ids": codes.flatten(0, 1), "labels": codes.transpose(1, 2).contiguous()}

    return batch


def _as_long_as_can_be(config: Any) -> MakeBatch:
    """Micro-batches for Perceiver, of the one length that it gives words for: it has a query for each position."""

    def batch(size: int) -> Batch:
        length = config.max_position_embeddings
        return {"inputs": _tokens(config, size, length), "labels": _tokens(config, size, length)}

    return batch


def _texts_and_pictures(config: Any, way: HandedOver | None) -> MakeBatch:
    """Micro-batches of texts, each with a picture; the loss is to tell which belong together. way: how to hand over
    pictures, if any size is possible."""
    text, vision = config.get_text_config(), config.vision_config

    def batch(size: int) -> Batch:
        words = _tokens(text, size, text.max_position_embeddings)
        seen = {"pixel_values": pixels(vision, size)} if way is None else way.tensors(size)
        return {"input_ids": words, **seen, "return_loss": True}

    return batch


_NOT_LEARNT = -100
"""Label of tokens that are not to be predicted, in all of transformers' losses."""


_CLASSIFIES = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION")


def _text_with_picture(config: Any, picture: Picture, make_labels: "_MakeTensor | None") -> MakeBatch:
    """Micro-batches of texts that begin with a picture, with labels: the text's own tokens, or what make_labels
    makes."""
    text, mark = config.get_text_config(), picture.mark

    def batch(size: int, seq_len: int) -> Batch:
        import torch

        if seq_len <= picture.around:
            raise ValueError(
                f"a {picture.kind} takes {picture.around} tokens, and a sample has {seq_len}: give a longer --seq-len"
            )
        below = min(mark or text.vocab_size, text.vocab_size)
        words = torch.randint(below, (size, seq_len)) if below > 1 else _tokens(text, size, seq_len)
        if mark is not None:
            here = [*picture.begins, *[mark] * picture.tokens, *picture.ends]
            words[:, : picture.around] = torch.tensor(here)
        written = words.masked_fill(words >= text.vocab_size, _NOT_LEARNT)
        labels = written if make_labels is None else make_labels(config, size, seq_len)
        return {"input_ids": words, **picture.tensors(size, seq_len), "labels": labels}

    return batch


def _is_made_for(architecture: Any, task: str) -> bool:
    """Whether transformers lists a class for a task, with any type of model."""
    found = auto_classes(task).values()
    return any(architecture.__name__ in ((names,) if isinstance(names, str) else names) for names in found)


def auto_classes(task: str) -> dict[str, Any]:
    """Type of model -> name of the class (for some types several) that transformers' auto class for a task would
    choose."""
    from transformers.models.auto import modeling_auto

    names: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return names


def _tokens(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(text_of(config).vocab_size, (size, seq_len))


def _image(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    return pixels(config, size)


def _recording(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    return recordings.heard(size)


def _patches(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    return numbered_patches(size, _PATCHES_ACROSS, config.vision_config.patch_embed_hidden_size)


def _spectrogram(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    """Spectrograms as the main input. For Whisper they are [size, frequencies, frames], with two frames for each
    position of the encoder, whose second convolution has a stride of 2; for other models as long as a recording."""
    import torch

    if config.model_type == "whisper":
        return torch.randn(size, config.num_mel_bins, 2 * config.max_source_positions)
    return recordings.spectrogram(config, size)


def _class_per_sample(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(config.num_labels, (size,))


def _class_per_token(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(config.num_labels, (size, seq_len))


_MakeTensor = Callable[[Any, int, int], "torch.Tensor"]

_INPUTS: dict[str, _MakeTensor] = {
    "input_ids": _tokens,
    "pixel_values": _image,
    "flattened_patches": _patches,
    "input_features": _spectrogram,
    "input_values": _recording,
}
"""Name of a main input -> how to make it."""

LABELS: dict[str, _MakeTensor] = {
    "SPEECH_SEQ_2_SEQ": _tokens,
    "SEQ_TO_SEQ_CAUSAL_LM": _tokens,
    "MASKED_LM": _tokens,
    "CAUSAL_LM": _tokens,
    "IMAGE_CLASSIFICATION": _class_per_sample,
    "SEQUENCE_CLASSIFICATION": _class_per_sample,
    "TOKEN_CLASSIFICATION": _class_per_token,
}
"""Transformers' name of a task -> how to make its labels. If a config does not name its architecture, the first task
counts that lists its type of model."""
