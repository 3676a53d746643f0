"""Models of Hugging Face configurations: written, loaded, and trained once for real on what is handed over."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel, split_inputs

NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {
    **NARROW,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Configurations of the smallest of encoders, and of decoders of text."""


def loaded_from(folder: Path, config: Mapping[str, Any], architecture: str) -> LoadedModel:
    """The model of a configuration, written to `folder`/config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "architectures": [architecture]}))
    return load_model(path)


def trained_once(loaded: LoadedModel) -> tuple[nn.Module, Any, dict[str, Any]]:
    """(The module with its gradients, a batch of two, what of it forward was given by name); its loss is finite."""
    torch.manual_seed(0)
    module, batch = loaded.build(), loaded.batch(2)
    args, kwargs = split_inputs(module, batch, loaded.loss is not None)
    output = module(*args, **kwargs)
    loss = output.loss if loaded.loss is None else loaded.loss(output, batch)
    loss.backward()
    assert torch.isfinite(loss)
    return module, batch, kwargs


def with_gradients(module: nn.Module) -> set[str]:
    """Names of the parameters that have a gradient."""
    return {name for name, parameter in module.named_parameters() if parameter.grad is not None}
