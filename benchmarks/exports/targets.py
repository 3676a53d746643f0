"""Reads exported settings with the target's own parser, where it is installed."""

import importlib
import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.planner.export import Export
from meshwright.planner.export_options import (
    ACCELERATE_FSDP_KEYS,
    ACCELERATE_KEYS,
    ACCELERATE_PARALLELISM_KEYS,
    DEEPSPEED_KEYS,
    DEEPSPEED_ZERO_KEYS,
    MEGATRON_SIZES,
    MEGATRON_SWITCHES,
    MEGATRON_WORDS,
    TORCHTITAN_LISTS,
    TORCHTITAN_SIZES,
    TORCHTITAN_SWITCHES,
    TORCHTITAN_WORDS,
)

PACKAGES = {
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
}


def version(target: str) -> str | None:
    """The installed version of a target, or None."""
    try:
        return importlib.metadata.version(PACKAGES[target])
    except importlib.metadata.PackageNotFoundError:
        return None


def undocumented(found: Export) -> list[str]:
    """Options of an export that its target does not document."""
    options = {word for word in found.words if word.startswith("--")}
    if found.target == "megatron":
        return sorted(options - {*MEGATRON_SIZES, *MEGATRON_WORDS, *MEGATRON_SWITCHES})
    if found.target == "torchtitan":
        known = {*TORCHTITAN_SIZES, *TORCHTITAN_WORDS, *TORCHTITAN_SWITCHES, *TORCHTITAN_LISTS}
        return sorted({option.removeprefix("--").replace(".no-", ".") for option in options} - known)
    keys, inner = (
        (ACCELERATE_KEYS, {"fsdp_config": ACCELERATE_FSDP_KEYS, "parallelism_config": ACCELERATE_PARALLELISM_KEYS})
        if found.target == "accelerate"
        else (DEEPSPEED_KEYS, {"zero_optimization": DEEPSPEED_ZERO_KEYS})
    )
    nested = {key for name, known in inner.items() for key in set(found.document.get(name) or {}) - known}
    return sorted((set(found.document) - keys) | nested)


def parse(found: Export) -> None:
    """Let the target read its settings. Raises whatever its parser raises; ImportError where it is not installed."""
    with warnings.catch_warnings(), Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        _PARSERS[found.target](found)


def _megatron(found: Export) -> None:
    """Megatron-LM's own arguments are no package; its core reads the layout of stages and the sizes of its groups."""
    layouts = _module("megatron.core.transformer.pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    words = list(found.words)
    if "--pipeline-model-parallel-layout" in words:
        layouts.parse_str_to_list(words[words.index("--pipeline-model-parallel-layout") + 1].strip("'\""))


def _torchtitan(found: Export) -> None:
    tyro, configs = _module("tyro"), _module("torchtitan.config.configs")
    manager, again = _module("torchtitan.config.manager"), _module("torchtitan.distributed.activation_checkpoint")
    manager.ConfigManager.register_tyro_rules(manager.custom_registry)
    parts: dict[str, Any] = {
        "training": configs.TrainingConfig,
        "parallelism": configs.ParallelismConfig,
        "compile": configs.CompileConfig,
    }
    job = make_dataclass("Job", [*parts.items(), ("activation_checkpoint", again.ActivationCheckpointingConfig)])
    default = job(**{name: kind() for name, kind in parts.items()}, activation_checkpoint=again.SelectiveAC.Config())
    try:
        tyro.cli(job, args=list(found.words), default=default, registry=manager.custom_registry)
    except SystemExit as ending:
        raise ValueError(f"torchtitan ends with {ending.code}") from None


def _accelerate(found: Export) -> None:
    config = _module("accelerate.commands.config.config_args").ClusterConfig
    sizes = _module("accelerate.parallelism_config").ParallelismConfig
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(found.text)
        read = config.from_yaml_file(path)
    if read.parallelism_config:
        names = {key.removeprefix("parallelism_config_"): v for key, v in read.parallelism_config.items()}
        names.pop("cp_comm_strategy", None)
        sizes(**names)


def _deepspeed(found: Export) -> None:
    _module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(**found.document["zero_optimization"])


_PARSERS: dict[str, Callable[[Export], None]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)
