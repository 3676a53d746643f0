"""A Hugging Face config.json as a model: its architecture, and micro-batches and a loss such as its head takes."""

import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..document import parsed
from ..garbage import without_garbage_collection
from .loaded import Batch, LoadedModel, Loss, MakeBatch, called, checked, takes_seq_len
from .pictures import Picture, picture_of, pixels
from .source import PADDED

if TYPE_CHECKING:
    import torch
    from torch import nn

_DEFAULT_CONTEXT = 8192
"""Longest sequence taken from a config.json on its own: longer contexts are asked for with --seq-len."""

_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Chances that a layer is left out of a step: planned are steps that leave none out."""


def from_config(path: Path, multiple: int = 1, named: str | None = None) -> LoadedModel:
    """The model of a config.json. multiple: of which the number of words is made one, by adding some. named: what it is
    called on the hub."""
    try:
        document = parsed(json.loads, path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. A Hugging Face config.json is a JSON object") from None
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ValueError(
            f'{path} has no "model_type", so it is no Hugging Face config.json; '
            'such a file says, for example, "model_type": "llama", "architectures": ["LlamaForCausalLM"]'
        )
    if multiple > 1:
        words = document.get("vocab_size")
        if not isinstance(words, int):
            raise ValueError(f'{path} has no "vocab_size" at its top, so there is nothing to pad')
        document["vocab_size"] = -(-words // multiple) * multiple
    transformers = _transformers(path)
    architecture = _architecture(transformers, document, path)

    dropped: set[str] = set()

    def config() -> Any:
        made = called(lambda: transformers.AutoConfig.for_model(**document), str(path))
        if not isinstance(made, architecture.config_class):  # of a whole of which the architecture is a part
            made = next((part for part in _parts(made) if isinstance(part, architecture.config_class)), made)
        made.use_cache = False
        for part in (made, *(getattr(made, name, None) for name in made.sub_configs)):
            for name in _LAYER_DROPS:
                if getattr(part, name, None):
                    dropped.add(name)
                    setattr(part, name, 0.0)
        return made

    def build() -> "nn.Module":
        fused = {"attn_implementation": "sdpa"} if getattr(architecture, "_supports_sdpa", False) else {}
        module: nn.Module = architecture._from_config(config(), **fused)
        if architecture.__name__.endswith("LMHeadModel"):
            module.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else transformers warns that it guesses this
        return module

    first = config()
    batches = _batches(architecture, first, path)
    make_batch = batches.make
    text = _text_of(first)
    told = (getattr(text, key, None) for key in _CONTEXT_KEYS)
    longest = next((length for length in told if isinstance(length, int) and length > 0), None)
    loaded = checked(
        build,
        make_batch,
        name=path.resolve().parent.name if named is None else named.rpartition("/")[2],
        source=(named or str(path)) + (f"{PADDED}{multiple}" if multiple > 1 else ""),
        loss=batches.loss,
        seq_len=min(longest or 1024, _DEFAULT_CONTEXT) if takes_seq_len(make_batch) else None,
    )
    notes = (f"planned with {name}=0, so that every step runs every layer: set it so to train" for name in dropped)
    assumes = (batches.assumes,) if batches.assumes else ()
    return replace(
        loaded,
        notes=tuple(sorted(notes)),
        layout=batches.layout,
        assumes=assumes,
        fewest_tokens=batches.fewest_tokens,
    )


_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions")


def _text_of(config: Any) -> Any:
    """The configuration of what writes (or reads) text."""
    return config.get_text_config(decoder=True) if len(_parts(config)) > 1 else config.get_text_config()


def _transformers(path: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"{path} is a Hugging Face config.json, and transformers is not installed: pip install 'meshwright[hf]'"
        ) from None
    return transformers


def _architecture(transformers: Any, document: dict[str, Any], path: Path) -> Any:
    model_type = document["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f'{path} is of model_type "{model_type}", which transformers {transformers.__version__} does not know; '
            "write a model.py that builds it"
        )
    name = next(iter(document.get("architectures") or ()), None)
    if name is None:
        known = (found for task in _LABELS if (found := _auto_classes(task).get(model_type)))
        name = next((found if isinstance(found, str) else found[0] for found in known), None)
    if name is None:
        raise ValueError(f'{path} has no "architectures"; add for example "architectures": ["LlamaForCausalLM"]')
    with without_garbage_collection(), _without_scipy(), _quiet_torchao():
        architecture = getattr(transformers, name, None)
    if architecture is None:
        raise ValueError(
            f'{path} asks for the architecture "{name}", which transformers {transformers.__version__} does not have; '
            "write a model.py that builds it"
        )
    return architecture


@contextmanager
def _without_scipy() -> Iterator[None]:
    """Every model of transformers imports scipy.optimize, for the one function by which losses of object detection
    match boxes. An eighth of all time to import goes into that; here it waits until the function is called."""
    name = "scipy.optimize"
    if name in sys.modules or importlib.util.find_spec("scipy") is None:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.linear_sum_assignment = _linear_sum_assignment  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


@contextmanager
def _quiet_torchao() -> Iterator[None]:
    """transformers imports torchao where it is installed, which then tells of kernels that it has for other devices."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(*args, **kwargs)


@dataclass(frozen=True)
class _Batches:
    """Micro-batches of a model. loss: None for heads that return theirs. layout, assumes: see LoadedModel."""

    make: MakeBatch
    loss: Loss | None = None
    layout: frozenset[str] = frozenset()
    assumes: str = ""
    fewest_tokens: int = 1


def _batches(architecture: Any, config: Any, path: Path) -> _Batches:
    main_input = architecture.main_input_name
    takes = inspect.signature(architecture.forward).parameters
    if _is_made_for(architecture, "CTC") and main_input == "input_values":
        said = f"recordings of {_SECONDS} s at {_RATE // 1000} kHz in which {_LETTERS} letters are said"
        return _Batches(_sound(config), _ctc_loss(config), assumes=said)
    if _is_made_for(architecture, "MASK_GENERATION") and {"pixel_values", "input_points"} <= takes.keys():
        said = f"{_PROMPTS} point in each picture, and the mask of what is there"
        return _Batches(_pointed_at(config), _mask_loss, assumes=said)
    if "pixel_values" in takes and "input_ids" in takes and "return_loss" in takes:
        return _Batches(_texts_and_pictures(config))
    picture = picture_of(takes.keys(), config) if "input_ids" in takes else None
    if picture is not None:
        _check_mark(config, picture, path)
        make = _text_with_picture(config, picture)
        return _Batches(make, None, picture.layout, picture.assumes, fewest_tokens=picture.around + 1)
    if config.model_type in _IN_CODEBOOKS and main_input == "input_ids":
        return _Batches(_codes(config))
    task = next((task for task in _LABELS if _is_made_for(architecture, task)), None)
    if task is None and main_input == "pixel_values" and {"labels", "decoder_input_ids"} <= takes.keys():
        task = "SEQ_TO_SEQ_CAUSAL_LM"  # a text that is read off a picture
    if task is None or main_input not in _INPUTS:
        raise ValueError(
            f'{path} asks for "{architecture.__name__}", whose batches are not known here (known: models that '
            f"take {' or '.join(_INPUTS)} and return a loss of one of {', '.join(_LABELS)}; CTC on recordings; CLIP "
            "and its like; SAM and its like; pictures in text as LLaVA, LLaVA-NeXT, Qwen-VL, MiniCPM-V, Idefics3, "
            'InstructBLIP or Kosmos-2.5 take them); give another head under "architectures", or write a model.py with '
            "model() and batch(size)"
        )
    make_input, make_labels = _INPUTS[main_input], _LABELS[task]
    if make_input is _image and not hasattr(config, "image_size"):
        seen = next((part for part in _parts(config) if hasattr(part, "image_size")), config)
    else:
        seen = config
    composed = task == "SEQ_TO_SEQ_CAUSAL_LM" and _parts(config) and "decoder_input_ids" in takes
    starts = not composed or isinstance(getattr(config, "decoder_start_token_id", None), int)

    def sequences(size: int, seq_len: int) -> Batch:
        made = {main_input: make_input(seen, size, seq_len), "labels": make_labels(config, size, seq_len)}
        return made if starts else {**made, "decoder_input_ids": make_labels(config, size, seq_len)}  # none to begin by

    def samples(size: int) -> Batch:
        return {main_input: make_input(seen, size, 0), "labels": make_labels(config, size, 0)}

    return _Batches(sequences if {make_input, make_labels} & {_tokens, _class_per_token} else samples)


def _parts(config: Any) -> list[Any]:
    """Configurations inside of a configuration."""
    found = (getattr(config, name, None) for name in config.sub_configs or ("encoder", "decoder"))
    return [part for part in found if part is not None]


def _check_mark(config: Any, picture: Picture, path: Path) -> None:
    words = config.get_text_config().vocab_size
    if picture.mark is not None and picture.mark >= words:
        raise ValueError(
            f"{path} marks pictures by token {picture.mark}, and its text_config has a vocabulary of {words:,}, so no "
            f'embedding has it: give text_config a "vocab_size" above {picture.mark}'
        )


_SECONDS, _RATE, _LETTERS = 10, 16_000, 100
"""Of a recording, what it is sampled at, and letters said in it: an assumption, of the size of read sentences."""


def _sound(config: Any) -> MakeBatch:
    def batch(size: int) -> Batch:
        import torch

        said = torch.randint(1, config.vocab_size, (size, _LETTERS))
        return {"input_values": torch.randn(size, _SECONDS * _RATE), "targets": said}

    return batch


def _ctc_loss(config: Any) -> Loss:
    """The loss of transformers' CTC heads, whose own asks for the targets' lengths by their values."""

    def loss(output: Any, batch: Any) -> "torch.Tensor":
        import torch

        rows = output.logits.log_softmax(-1, dtype=torch.float32).transpose(0, 1)
        targets = batch["targets"]
        lengths = (rows.shape[0],) * rows.shape[1], (targets.shape[1],) * rows.shape[1]
        blank = config.pad_token_id or 0
        each = torch.nn.functional.ctc_loss(rows, targets, *lengths, blank, reduction="none", zero_infinity=True)
        mean: torch.Tensor = each.mean() / targets.shape[1]
        return mean

    return loss


_PROMPTS = 1
"""Things to find in a picture, by one point in each: an assumption."""


def _pointed_at(config: Any) -> MakeBatch:
    """Pictures, a point of each (column, row) and the mask of the thing there, as large as its picture."""

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


_IN_CODEBOOKS = ("musicgen_decoder", "musicgen_melody_decoder")
"""Types of models that write several rows of codes, each of its own codebook, at once."""


def _codes(config: Any) -> MakeBatch:
    """Rows of codes of music: the codebooks of a sample behind each other, in the labels beside each other."""

    def batch(size: int, seq_len: int) -> Batch:
        import torch

        codes = torch.randint(config.vocab_size, (size, config.num_codebooks, seq_len))
        return {"input_ids": codes.flatten(0, 1), "labels": codes.transpose(1, 2).contiguous()}

    return batch


def _texts_and_pictures(config: Any) -> MakeBatch:
    """A text beside each picture; which belong together is the loss."""
    text, vision = config.get_text_config(), config.vision_config

    def batch(size: int) -> Batch:
        words = _tokens(text, size, text.max_position_embeddings)
        return {"input_ids": words, "pixel_values": pixels(vision, size), "return_loss": True}

    return batch


def _text_with_picture(config: Any, picture: Picture) -> MakeBatch:
    """Text that begins with a picture."""
    text, mark = config.get_text_config(), picture.mark

    def batch(size: int, seq_len: int) -> Batch:
        import torch

        if seq_len <= picture.around:
            raise ValueError(
                f"a picture takes {picture.around} tokens, and a sample has {seq_len}: give a longer --seq-len"
            )
        words = torch.randint(mark, (size, seq_len)) if mark is not None and mark > 1 else _tokens(text, size, seq_len)
        if mark is not None:
            here = [*picture.begins, *[mark] * picture.tokens, *picture.ends]
            words[:, : picture.around] = torch.tensor(here)
        return {"input_ids": words, **picture.tensors(size, seq_len), "labels": words.clone()}

    return batch


def _is_made_for(architecture: Any, task: str) -> bool:
    """Whether transformers would choose the class for a task, for any type of model."""
    found = _auto_classes(task).values()
    return any(architecture.__name__ in ((names,) if isinstance(names, str) else names) for names in found)


def _auto_classes(task: str) -> dict[str, Any]:
    """Class names by model_type (a few types have several) that transformers' auto class for a task chooses from."""
    from transformers.models.auto import modeling_auto

    names: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return names


def _tokens(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(_text_of(config).vocab_size, (size, seq_len))


def _image(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    return pixels(config, size)


def _spectrogram(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    """Two frames for each position of the encoder, whose second convolution has a stride of 2."""
    import torch

    return torch.randn(size, config.num_mel_bins, 2 * config.max_source_positions)


def _class_per_sample(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(config.num_labels, (size,))


def _class_per_token(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(config.num_labels, (size, seq_len))


_MakeTensor = Callable[[Any, int, int], "torch.Tensor"]

_INPUTS: dict[str, _MakeTensor] = {"input_ids": _tokens, "pixel_values": _image, "input_features": _spectrogram}
"""How to make the main input of a Hugging Face model, by the name that its class gives it."""

_LABELS: dict[str, _MakeTensor] = {
    "SPEECH_SEQ_2_SEQ": _tokens,
    "SEQ_TO_SEQ_CAUSAL_LM": _tokens,
    "MASKED_LM": _tokens,
    "CAUSAL_LM": _tokens,
    "IMAGE_CLASSIFICATION": _class_per_sample,
    "SEQUENCE_CLASSIFICATION": _class_per_sample,
    "TOKEN_CLASSIFICATION": _class_per_token,
}
"""How to make the labels, by transformers' task; a config that names no architecture gets the first that it has."""
