"""Reads exported settings with the target's own parser, where it is installed."""

import importlib
import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.planner.exchange import accelerate, deepspeed, megatron, torchtitan
from meshwright.planner.exchange.export import Export

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
        return sorted(options - megatron.FLAGS.known)
    if found.target == "torchtitan":
        return sorted({o.removeprefix("--").replace(".no-", ".") for o in options} - torchtitan.FLAGS.known)
    keys = accelerate.KEYS if found.target == "accelerate" else deepspeed.KEYS
    sections = {name: found.document.get(name) or {} for name in keys if name} | {"": found.document}
    return sorted({key for name, section in sections.items() for key in set(section) - keys[name]})


def parse(found: Export) -> None:
    """Let the target read its settings. Raises whatever its parser raises; ImportError where it is not installed."""
    with warnings.catch_warnings(), Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        _PARSERS[found.target](found)


_OF_CONFIG = {
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--num-layers": "num_layers",
    "--recompute-num-layers": "recompute_num_layers",
    "--recompute-granularity": "recompute_granularity",
    "--recompute-method": "recompute_method",
    "--cp-comm-type": "cp_comm_type",
    "--pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
}
"""Megatron-LM's arguments that its core's TransformerConfig holds and checks against each other."""


def _megatron(found: Export) -> None:
    """Megatron-LM's own arguments are no package; its core checks the layout of stages, degrees and recompute, for a
    model of the plan's number of blocks, and as many experts as share them."""
    core = "megatron.core.transformer"
    layouts = _module(f"{core}.pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    config, dtypes = _module(f"{core}.transformer_config").TransformerConfig, _module("torch")
    words = list(found.words)
    said = {_OF_CONFIG[w]: words[i + 1].strip("'\"") for i, w in enumerate(words) if w in _OF_CONFIG}
    sizes = {name: int(value) if value.isdecimal() else value for name, value in said.items()}
    if "pipeline_model_parallel_layout" in sizes:
        layouts.parse_str_to_list(sizes["pipeline_model_parallel_layout"])
    experts = sizes.get("expert_model_parallel_size", 1)
    heads = 64 * sizes["tensor_model_parallel_size"] * sizes.get("context_parallel_size", 1)
    config(
        **sizes,
        hidden_size=64 * heads,
        num_attention_heads=heads,
        num_moe_experts=experts if experts > 1 else None,
        sequence_parallel="--sequence-parallel" in words,
        pipeline_dtype=dtypes.bfloat16,
        bf16="--bf16" in words,
        fp16="--fp16" in words,
    )


def torchtitan_job(words: Sequence[str]) -> Any:
    """What torchtitan's own parser makes of a command line: a job of the parts that say a layout. SystemExit: it
    refuses them."""
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
    return tyro.cli(job, args=list(words), default=default, registry=manager.custom_registry)


def _torchtitan(found: Export) -> None:
    try:
        torchtitan_job(found.words)
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
