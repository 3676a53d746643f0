"""The model of a Hugging Face config.json: its architecture, and micro-batches and a loss that suit its head."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..document import parsed
from ..garbage import without_garbage_collection
from ..model.building import on_meta
from ..model.failures import called
from ..model.loaded import LoadedModel, checked, takes_seq_len
from ..model.source import PADDED
from .batches import LABELS, auto_classes, batches_of, parts_of, text_of

if TYPE_CHECKING:
    from torch import nn

_DEFAULT_CONTEXT = 8192
"""Tokens of the longest sequence that is taken from a config.json; longer ones must be asked for with --seq-len."""

_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Names of the chances with which a layer is left out of a step. They are set to 0, for plans are made for steps that
leave none out."""


def from_config(path: Path, multiple: int = 1, named: str | None = None) -> LoadedModel:
    """The model of a config.json. multiple: its vocabulary is padded to a multiple of this. named: its id on the
    hub."""
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
        if not isinstance(made, architecture.config_class):  # that of a model with it as a part
            made = next((part for part in parts_of(made) if isinstance(part, architecture.config_class)), made)
        made.use_cache = False
        for part in (made, *(getattr(made, name, None) for name in made.sub_configs)):
            for name in _LAYER_DROPS:
                if getattr(part, name, None):
                    dropped.add(name)
                    setattr(part, name, 0.0)
        return made

    def build() -> "nn.Module":
        module: nn.Module = _with_fused_attention(architecture, config)
        if architecture.__name__.endswith("LMHeadModel"):
            module.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else transformers warns that it guesses this
        return module

    first = config()
    batches = batches_of(architecture, first, path, build)
    make_batch = batches.make
    text = text_of(first)
    told = (getattr(text, key, None) for key in _CONTEXT_KEYS)
    longest = next((length for length in told if isinstance(length, int) and length > 0), None)
    if longest is not None:
        longest = max(1, longest - _first_position(architecture, build))
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
        if_not_run=_IF_NOT_RUN,
    )


def _first_position(architecture: Any, build: Callable[[], "nn.Module"]) -> int:
    """The row of the table of positions that a sample begins at. In RoBERTa and models like it that is after the row
    for padding, so samples are that much shorter than the table."""
    beside = vars(sys.modules[architecture.__module__])
    if not any(hasattr(each, _COUNTS) for each in (architecture, *beside.values())) and _COUNTS not in beside:
        return 0
    tables = {name: m for name, m in on_meta(build).named_modules() if type(m).__name__ == "Embedding"}
    padded = [m.padding_idx for name, m in tables.items() if name.endswith("position_embeddings")]
    return next((int(row) + 1 for row in padded if row is not None), 0)


_COUNTS = "create_position_ids_from_input_ids"
"""Name of transformers' function that numbers tokens, padding left out."""


def _with_fused_attention(architecture: Any, config: Callable[[], Any]) -> Any:
    """The module, with torch's fused attention if its class supports that."""
    if not getattr(architecture, "_supports_sdpa", False):
        return architecture._from_config(config())
    try:
        return architecture._from_config(config(), attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return architecture._from_config(config(), attn_implementation=None)


_IF_NOT_RUN = "Make the numbers of the configuration fit together, or write a model.py with model() and batch(size)"

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions")


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
        known = (found for task in LABELS if (found := auto_classes(task).get(model_type)))
        name = next((found if isinstance(found, str) else found[0] for found in known), None)
    if name is None:
        raise ValueError(f'{path} has no "architectures"; add for example "architectures": ["LlamaForCausalLM"]')
    with without_garbage_collection(), _quiet_torchao():
        architecture = getattr(transformers, name, None)
    if architecture is None:
        raise ValueError(
            f'{path} asks for the architecture "{name}", which transformers {transformers.__version__} does not have; '
            "write a model.py that builds it"
        )
    return architecture


@contextmanager
def _quiet_torchao() -> Iterator[None]:
    """While it lasts, torchao, which transformers imports if it is installed, does not log that it has kernels for
    other devices."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
