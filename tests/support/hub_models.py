"""Models of Hugging Face configurations: written, loaded, and trained once for real on what is handed over."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel, split_inputs


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
