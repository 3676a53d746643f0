"""Reads settings of Megatron-LM, torchtitan, Accelerate and DeepSpeed: arguments or files of theirs -> a Layout.

What changes the layout or its cost and no plan can say is refused by name. Everything else that is not understood
(data, learning rate, logging) is listed in `Layout.ignored`.
"""

import difflib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..profiler.model_profile import ModelProfile
from .block_row import BlockRow, block_row
from .export import DATA_OUTERMOST, MEGATRON_CONTEXT, TORCHTITAN_SCHEDULES
from .export_options import (
    ACCELERATE_FSDP_KEYS,
    ACCELERATE_KEYS,
    ACCELERATE_PARALLELISM_KEYS,
    DEEPSPEED_KEYS,
    DEEPSPEED_REFUSED,
    DEEPSPEED_ZERO_KEYS,
    DEEPSPEED_ZERO_REFUSED,
    MEGATRON_REFUSED,
    MEGATRON_SIZES,
    MEGATRON_SWITCHES,
    MEGATRON_WORDS,
    NAMES,
    TORCHTITAN_HARMLESS,
    TORCHTITAN_LISTS,
    TORCHTITAN_REFUSED,
    TORCHTITAN_SIZES,
    TORCHTITAN_SWITCHES,
    TORCHTITAN_WORDS,
    Target,
)
from .imports import Layout
from .plan import AXES, Recompute, Schedule
from .training import Precision

_NEAR = 0.87
"""Names this much alike (difflib's ratio) are taken for a typing mistake, not for another option."""


def read_words(text: str) -> list[str]:
    """Arguments from a string, or from a file that holds them, such as the one `plan export` writes."""
    path = Path(text)
    if not text.lstrip().startswith("-") and "\n" not in text and path.is_file():
        lines = [line for line in path.read_text().splitlines() if not line.rstrip().endswith("_ARGS=(")]
        text = "\n".join(line for line in lines if line.strip() != ")")
    return shlex.split(text.replace("\\\n", " "), comments=True)


def read_megatron(words: Sequence[str], num_devices: int, profile: ModelProfile) -> Layout:
    """The layout of Megatron-LM arguments on a number of GPUs.

    Raises ValueError that names the option that is wrong, not understood, or for another model.
    """
    said, ignored = _megatron_words(words)
    size = _Sizes(said, "megatron")
    tensor, context = size("--tensor-model-parallel-size"), size("--context-parallel-size")
    pipeline = size("--pipeline-model-parallel-size")
    data = _left_over(num_devices, tensor * pipeline * context, "tensor x pipeline x context")
    row = block_row(profile.layers)
    if row is not None and size("--num-layers", row.blocks) != row.blocks:
        raise ValueError(
            f"--num-layers {size('--num-layers')}, but {profile.name} has {row.blocks} blocks: give the model that the "
            "arguments are for"
        )
    zero, replicas = _megatron_zero(said, size, data)
    counts = _megatron_blocks(said, size, pipeline, row, profile)
    virtual = len(counts) // pipeline if counts else 1
    recompute, recomputed = _megatron_recompute(said, size)
    notes = [] if "--micro-batch-size" in said else ["--micro-batch-size is not given: chosen at its best"]
    micro = size("--micro-batch-size") if "--micro-batch-size" in said else None
    batch = size("--global-batch-size") if "--global-batch-size" in said else None
    return Layout(
        target="megatron",
        data_replicate=replicas if zero else data,
        data_shard=data // replicas if zero else 1,
        tensor=tensor,
        context=context,
        expert=size("--expert-model-parallel-size"),
        pipeline=pipeline,
        virtual_stages=virtual,
        context_kind={word: kind for kind, word in MEGATRON_CONTEXT.items()}[said.get("--cp-comm-type", "p2p")],
        sequence="--sequence-parallel" in said and tensor > 1,
        schedule="none" if pipeline == 1 else "interleaved" if virtual > 1 else "1f1b",
        reshard="all" if zero == 3 else "none",
        sync_every=zero >= 2,
        mesh_axes=DATA_OUTERMOST if "--use-tp-pp-dp-mapping" in said else AXES,
        stage_sizes=_stage_sizes(counts, row),
        micro_batch=micro,
        global_batch=batch if batch is not None or micro is None else micro * data,
        recompute=recompute,
        recomputed=recomputed,
        seq_len=size("--seq-length") if "--seq-length" in said else None,
        precision=_megatron_precision(said),
        software="megatron-core",
        sgd=said.get("--optimizer") == "sgd",
        offload_optimizer="--optimizer-cpu-offload" in said,
        ignored=tuple(ignored),
        notes=tuple(notes),
    )


def read_torchtitan(words: Sequence[str], num_devices: int, profile: ModelProfile) -> Layout:
    """The layout of torchtitan's arguments on a number of GPUs; flags that are not there have torchtitan's defaults.

    Raises ValueError that names the flag that is wrong or not understood.
    """
    said, ignored = _torchtitan_words(words)
    size = _Sizes(said, "torchtitan")
    tensor, context = size("parallelism.tensor_parallel_degree"), size("parallelism.context_parallel_degree")
    pipeline, replicas = (
        size("parallelism.pipeline_parallel_degree"),
        size("parallelism.data_parallel_replicate_degree"),
    )
    shards = _left_over(num_devices, tensor * pipeline * context * replicas, "replicate x tensor x pipeline x context")
    asked = said.get("parallelism.data_parallel_shard_degree", "-1")
    if asked != "-1" and size("parallelism.data_parallel_shard_degree") != shards:
        raise ValueError(
            f"--parallelism.data_parallel_shard_degree {asked}, but {shards} ranks are left of {num_devices} GPUs; "
            "give --gpus, or -1"
        )
    row = block_row(profile.layers)
    schedule = _torchtitan_schedule(said) if pipeline > 1 else "none"
    sizes = _torchtitan_stages(said, size, pipeline, schedule, row, profile)
    local = size("training.local_batch_size", 8)
    micro = size("parallelism.pipeline_parallel_microbatch_size", 1) if pipeline > 1 else local
    batch = said.get("training.global_batch_size", "-1")
    whole = local * replicas * shards if batch == "-1" else size("training.global_batch_size")
    notes = []
    if "--config" in words or any(word.startswith("--config=") for word in words):
        notes.append("what the --config function sets is not read: flags that are not given have torchtitan's defaults")
    if pipeline > 1 and whole > local * replicas * shards:
        notes.append(
            f"torchtitan empties the pipeline after each {local} samples; priced as one pass of {whole} samples"
        )
    reshard = said.get("parallelism.fsdp_reshard_after_forward", "default")
    keeps = reshard == "never" or (reshard == "default" and pipeline > 1)
    recompute: Recompute = _recompute_word(said.get("activation_checkpoint.mode", "selective"))
    sharded = shards * context > 1
    return Layout(
        target="torchtitan",
        data_replicate=replicas,
        data_shard=shards,
        tensor=tensor,
        context=context,
        expert=size("parallelism.expert_parallel_degree"),
        pipeline=pipeline,
        virtual_stages=max(1, len(sizes) // pipeline),
        context_kind="all_gather",
        sequence=tensor > 1 and said.get("parallelism.enable_sequence_parallel", "true") == "true",
        schedule=schedule,
        sync_every=pipeline == 1,
        reshard="none" if keeps or not sharded else "inner" if reshard == "default" else "all",
        stage_sizes=sizes,
        micro_batch=micro,
        global_batch=whole,
        recompute=recompute,
        seq_len=size("training.seq_len") if "training.seq_len" in said else None,
        precision="fp32" if said.get("training.mixed_precision_param") == "float32" else "bf16",
        software="fsdp2-compile" if said.get("compile.enable") == "true" else "fsdp2-eager",
        ignored=tuple(ignored),
        notes=tuple(notes),
    )


def read_accelerate(document: Mapping[str, Any], num_devices: int) -> Layout:
    """The layout of an Accelerate configuration file on a number of GPUs. Micro-batch and accumulation are said in the
    script, not here, so they are left open.

    Raises ValueError that names the key that is wrong or not understood.
    """
    kind = str(document.get("distributed_type", "")).upper()
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise ValueError(
            f"distributed_type: {kind or 'missing'}; FSDP (with fsdp_version: 2), MULTI_GPU and NO are read. For "
            "DeepSpeed give its JSON, for Megatron-LM its arguments"
        )
    processes = document.get("num_processes", num_devices)
    if processes != num_devices:
        raise ValueError(f"num_processes: {processes}, but {num_devices} GPUs: give --gpus {processes}")
    ignored = _unknown_keys(document, ACCELERATE_KEYS, "accelerate", "")
    precision: Precision = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}.get(  # type: ignore[assignment]
        str(document.get("mixed_precision") or "no").lower().replace("false", "no"), "bf16"
    )
    software = "fsdp2-compile" if document.get("dynamo_config") else "fsdp2-eager"
    open_choices = ("batch size and gradient accumulation are said in the script: chosen at their best here",)
    if kind != "FSDP":
        return Layout(
            "accelerate",
            data_replicate=num_devices,
            precision=precision,
            software=software,
            ignored=tuple(ignored),
            notes=open_choices,
        )
    fsdp = _mapping(document, "fsdp_config")
    sizes = _mapping(document, "parallelism_config")
    ignored += _unknown_keys(fsdp, ACCELERATE_FSDP_KEYS, "accelerate", "fsdp_config.")
    ignored += _unknown_keys(sizes, ACCELERATE_PARALLELISM_KEYS, "accelerate", "parallelism_config.")
    if fsdp.get("fsdp_offload_params"):
        raise ValueError("fsdp_offload_params: true; parameters on the host are not priced: set it to false")
    if _number(sizes, "parallelism_config_sp_size", 1) > 1:
        raise ValueError("parallelism_config_sp_size: Ulysses sequence ranks of DeepSpeed are not read; set it to 1")
    tensor = _number(sizes, "parallelism_config_tp_size", 1)
    context = _number(sizes, "parallelism_config_cp_size", 1)
    replicas = _number(sizes, "parallelism_config_dp_replicate_size", 1)
    shards = _left_over(num_devices, tensor * context * replicas, "replicate x tensor x context")
    if _number(sizes, "parallelism_config_dp_shard_size", shards) != shards:
        raise ValueError(
            f"parallelism_config_dp_shard_size: {sizes['parallelism_config_dp_shard_size']}, but {shards} ranks are "
            f"left of {num_devices} GPUs: give --gpus"
        )
    reshard = _accelerate_reshard(fsdp)
    again = str(fsdp.get("fsdp_activation_checkpointing", False)).lower() == "true"
    exchange = str(sizes.get("parallelism_config_cp_comm_strategy", "allgather"))
    return Layout(
        target="accelerate",
        data_replicate=replicas,
        data_shard=shards,
        tensor=tensor,
        context=context,
        context_kind="all_to_all" if exchange == "alltoall" else "all_gather",
        reshard="all" if reshard else "none",
        recompute="full" if again else "none",
        precision=precision,
        software=software,
        ignored=tuple(ignored),
        notes=open_choices,
    )


def read_deepspeed(document: Mapping[str, Any], num_devices: int) -> Layout:
    """The layout of a DeepSpeed configuration on a number of GPUs. Recompute is said in the script, so it is left open.

    Raises ValueError that names the key that is wrong or not understood.
    """
    for key, reason in DEEPSPEED_REFUSED.items():
        if document.get(key):
            raise ValueError(f"{key}: {reason}")
    ignored = _unknown_keys(document, DEEPSPEED_KEYS, "deepspeed", "")
    zero = _mapping(document, "zero_optimization")
    for key, reason in DEEPSPEED_ZERO_REFUSED.items():
        if zero.get(key) not in (None, False, 1, {}):
            raise ValueError(f"zero_optimization.{key}: {reason}")
    ignored += _unknown_keys(zero, DEEPSPEED_ZERO_KEYS, "deepspeed", "zero_optimization.")
    stage = _number(zero, "stage", 0, least=0)
    if stage > 3:
        raise ValueError(f"zero_optimization.stage: {stage}; choose 0, 1, 2 or 3")
    tensor = _number(_mapping(document, "tensor_parallel"), "autotp_size", 1, least=0) or 1
    data = _left_over(num_devices, tensor, "autotp_size")
    micro, steps, batch = (
        None if document.get(key) in (None, "auto") else _number(document, key, 1)
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    if batch is None and micro is not None:
        batch = micro * (steps or 1) * data
    if micro is None and batch is not None and steps is not None:
        micro = batch // steps // data
    if None not in (micro, steps, batch) and (micro or 1) * (steps or 1) * data != batch:
        raise ValueError(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x data "
            f"ranks = {micro} x {steps} x {data}: change one of them"
        )
    precision: Precision = "fp32"
    for name in ("bf16", "fp16"):
        if _mapping(document, name).get("enabled") is True:
            precision = "bf16" if name == "bf16" else "fp16"
    return Layout(
        target="deepspeed",
        data_replicate=1 if stage else data,
        data_shard=data if stage else 1,
        tensor=tensor,
        reshard="all" if stage == 3 else "none",
        sync_every=stage >= 2,
        micro_batch=micro,
        global_batch=batch,
        precision=precision,
        offload_optimizer=_mapping(zero, "offload_optimizer").get("device") in ("cpu", "nvme"),
        ignored=tuple(ignored),
        notes=("activation checkpointing is said in the script: chosen at its best here",),
    )


def read_document(path: Path) -> dict[str, Any]:
    """A mapping from a YAML or JSON file. Raises ValueError if it is none."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    if path.suffix == ".json":
        try:
            found = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error})") from None
    else:
        try:
            yaml = import_module("yaml")  # not among our dependencies; transformers brings it
        except ImportError:
            raise ValueError(f"{path}: reading YAML needs PyYAML (pip install pyyaml)") from None
        try:
            found = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no settings; a mapping of keys to values is read")
    return found


class _Sizes:
    """Whole numbers among what was said."""

    def __init__(self, said: Mapping[str, str], target: Target) -> None:
        self._said = said
        self._target = target

    def __call__(self, name: str, default: int = 1) -> int:
        """The number said for an option; `default` where it is not there."""
        text = self._said.get(name, str(default))
        if not text.isdecimal() or int(text) < 1:
            flag = name if name.startswith("--") else f"--{name}"
            raise ValueError(f"{flag} {text}: give a whole number of at least 1")
        return int(text)


def _left_over(num_devices: int, used: int, what: str) -> int:
    data, rest = divmod(num_devices, used)
    if rest or not data:
        raise ValueError(f"{what} = {used} does not divide {num_devices} GPUs: give --gpus, or other degrees")
    return data


def _check_known(name: str, known: Iterable[str]) -> None:
    """Raises ValueError for a name that is nearly one that is understood."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    if near:
        raise ValueError(f"{name} is unknown; did you mean {near[0]}?")


def _megatron_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(option -> its value, what is ignored). Raises ValueError for options that are refused."""
    known = {*MEGATRON_SIZES, *MEGATRON_WORDS, *MEGATRON_SWITCHES}
    said: dict[str, str] = {}
    ignored: list[str] = []
    for name, values in _grouped(words):
        if name in MEGATRON_REFUSED:
            raise ValueError(f"{name}: {MEGATRON_REFUSED[name]}")
        if name not in known:
            _check_known(name, {*known, *MEGATRON_REFUSED})
            ignored.append(name)
            continue
        if name in MEGATRON_SWITCHES:
            if values:
                raise ValueError(f"{name} {values[0]}: it takes no value")
            said[name] = "true"
            continue
        if len(set(values)) != 1:
            raise ValueError(f"{name} {' '.join(values)}: give one value; a value for each layer is not read")
        allowed = MEGATRON_WORDS.get(name, ())
        if allowed and values[0] not in allowed:
            raise ValueError(f"{name} {values[0]}: {' and '.join(allowed)} can be priced")
        said[name] = values[0]
    return said, ignored


def _grouped(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Options, each with the words up to the next option."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, mark, value = word.partition("=")
            found.append((name, [value] if mark else []))
        elif not found:
            raise ValueError(f"cannot read {word!r}: arguments begin with an option such as --seq-length")
        else:
            found[-1][1].append(word)
    return found


def _megatron_zero(said: Mapping[str, str], size: _Sizes, data: int) -> tuple[int, int]:
    """(ZeRO stage, replicas of the shards)."""
    replicas = size("--num-distributed-optimizer-instances")
    if data % replicas:
        raise ValueError(f"--num-distributed-optimizer-instances {replicas} does not divide {data} data ranks")
    if "--use-torch-fsdp2" in said:
        return (2 if "--torch-fsdp2-no-reshard-after-forward" in said else 3), replicas
    if "--use-megatron-fsdp" in said:
        strategies = MEGATRON_WORDS["--data-parallel-sharding-strategy"]
        return strategies.index(said.get("--data-parallel-sharding-strategy", "no_shard")), replicas
    return int("--use-distributed-optimizer" in said and data > 1), replicas


def _megatron_precision(said: Mapping[str, str]) -> Precision:
    if "--fp8-format" in said:
        return "fp8"
    if "--fp4-format" in said:
        return "fp4"
    return "bf16" if "--bf16" in said else "fp16" if "--fp16" in said else "fp32"


def _megatron_recompute(said: Mapping[str, str], size: _Sizes) -> tuple[Recompute, int | None]:
    """(kind, blocks of each stage that recompute or None for all)."""
    kind = "selective" if "--recompute-activations" in said else said.get("--recompute-granularity")
    if kind is None:
        return "none", None
    if kind == "selective":
        return "attention", None
    method = said.get("--recompute-method")
    if method is None or "--recompute-num-layers" not in said:
        raise ValueError("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    count = size("--recompute-num-layers")
    if method == "uniform" and count > 1:
        raise ValueError(
            f"--recompute-method uniform with --recompute-num-layers {count}: groups of several blocks are not priced; "
            "give 1, or --recompute-method block"
        )
    return "full", None if method == "uniform" else count


def _megatron_blocks(
    said: Mapping[str, str], size: _Sizes, pipeline: int, row: BlockRow | None, profile: ModelProfile
) -> tuple[int, ...]:
    """Blocks of each stage, in the order of the chain; () without a pipeline."""
    ways = [
        name
        for name in (
            "--pipeline-model-parallel-layout",
            "--num-layers-per-virtual-pipeline-stage",
            "--num-virtual-stages-per-pipeline-rank",
        )
        if name in said
    ]
    if len(ways) > 1:
        raise ValueError(f"{' and '.join(ways)}: Megatron-LM takes one of them")
    if pipeline == 1:
        return ()
    row = _needed(row, profile, pipeline)
    if "--pipeline-model-parallel-layout" in said:
        return parse_layout(said["--pipeline-model-parallel-layout"], pipeline, row.blocks)
    head = int("--account-for-embedding-in-pipeline-split" in said)
    tail = int("--account-for-loss-in-pipeline-split" in said)
    ends = {
        index: size(name)
        for index, name in ((0, "--decoder-first-pipeline-num-layers"), (-1, "--decoder-last-pipeline-num-layers"))
        if name in said
    }
    virtual = size("--num-virtual-stages-per-pipeline-rank")
    each, rest = divmod(row.blocks + head + tail - sum(ends.values()), pipeline - len(ends))
    if "--num-layers-per-virtual-pipeline-stage" in said:
        of_chunk = size("--num-layers-per-virtual-pipeline-stage")
        virtual, over = divmod(each, of_chunk)
        rest += over
    if rest or each % virtual or any(count % virtual for count in ends.values()) or each < 1:
        raise ValueError(
            f"{row.blocks} blocks do not spread evenly over {pipeline} stages x {virtual}; Megatron-LM takes uneven "
            "ones as --pipeline-model-parallel-layout"
        )
    counts = [each // virtual] * (pipeline * virtual)
    for index, count in ends.items():
        for chunk in range(virtual):
            counts[chunk * pipeline + index % pipeline] = count // virtual
    counts[0] -= head
    counts[-1] -= tail
    return tuple(counts)


def parse_layout(text: str, pipeline: int, num_blocks: int) -> tuple[int, ...]:
    """Blocks of each stage from a --pipeline-model-parallel-layout such as Et*3|(tt|)*4,L.

    Raises ValueError if it is malformed, holds another number of blocks, or has a stage with nothing on it.
    """
    where = f"--pipeline-model-parallel-layout {text}"
    stages = _unrolled(text.replace(",", ""), where).split("|")
    if "m" in text:
        raise ValueError(f"{where}: multi-token prediction layers (m) are not read")
    flat = "".join(stages)
    if flat != f"E{'t' * flat.count('t')}L":
        raise ValueError(f"{where}: write E, then the blocks as t, then L, with | between stages")
    if flat.count("t") != num_blocks:
        raise ValueError(f"{where}: {flat.count('t')} blocks, the model has {num_blocks}")
    if len(stages) % pipeline:
        raise ValueError(f"{where}: {len(stages)} stages are no multiple of the {pipeline} pipeline ranks")
    if "" in stages:
        raise ValueError(f"{where}: stage {stages.index('')} is empty, which no plan can say; put a block there")
    return tuple(stage.count("t") for stage in stages)


def _unrolled(text: str, where: str) -> str:
    """(pattern)*N and x*N written out."""
    found, place = "", 0
    while place < len(text):
        item, place = text[place], place + 1
        if item == "(":
            end = text.find(")", place)
            if end < 0:
                raise ValueError(f"{where}: a bracket is not closed")
            item, place = _unrolled(text[place:end], where), end + 1
        digits = ""
        if text[place : place + 1] == "*":
            digits = "".join(_digits(text[place + 1 :]))
            place += 1 + len(digits)
        found += item * int(digits or 1)
    return found


def _digits(text: str) -> Iterable[str]:
    for letter in text:
        if not letter.isdecimal():
            return
        yield letter


def _needed(row: BlockRow | None, profile: ModelProfile, pipeline: int) -> BlockRow:
    if row is None:
        raise ValueError(
            f"a pipeline of {pipeline}: the flags count blocks, and {profile.name} is no single row of them; plan it "
            f"with: plan MODEL --pin pipeline={pipeline}"
        )
    return row


def _stage_sizes(counts: Sequence[int], row: BlockRow | None) -> tuple[int, ...]:
    """Layers of each stage: its blocks, on the first what comes before them, on the last what comes behind."""
    if not counts or row is None:
        return ()
    sizes = list(counts)
    sizes[0] += row.before
    sizes[-1] += row.after
    return tuple(sizes)


def _torchtitan_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    known = {*TORCHTITAN_SIZES, *TORCHTITAN_WORDS, *TORCHTITAN_SWITCHES, *TORCHTITAN_LISTS}
    said: dict[str, str] = {}
    ignored: list[str] = []
    subcommand = "activation_checkpoint:"
    modes = [word.replace("-", "_") for word in words]
    for mode in modes:
        if mode.startswith(subcommand):
            said["activation_checkpoint.mode"] = mode.removeprefix(subcommand)
    rest = [word for word, mode in zip(words, modes, strict=True) if not mode.startswith(subcommand)]
    for flag, values in _grouped(rest):
        name = flag.removeprefix("--").replace("-", "_")
        section, _, last = name.rpartition(".")
        negated = f"{section}.{last.removeprefix('no_')}"
        if name in TORCHTITAN_REFUSED:
            raise ValueError(f"{flag}: {TORCHTITAN_REFUSED[name]}")
        if last.startswith("no_") and negated in TORCHTITAN_SWITCHES:
            said[negated] = "false"
        elif name not in known:
            _check_known(name, {*known, *TORCHTITAN_REFUSED})
            if section == "parallelism" and last not in TORCHTITAN_HARMLESS:
                raise ValueError(f"{flag} is no flag of torchtitan's parallelism that is priced; leave it out")
            ignored.append(flag)
        elif name in TORCHTITAN_SWITCHES:
            said[name] = (values or ["true"])[0].lower()
        elif name in TORCHTITAN_LISTS:
            said[name] = " ".join(values)
        elif len(values) != 1:
            raise ValueError(f"{flag} takes one value; found {len(values)}")
        else:
            said[name] = values[0]
    for name, allowed in TORCHTITAN_WORDS.items():
        if name in said and said[name] not in allowed:
            raise ValueError(f"--{name} {said[name]}: {', '.join(allowed)} can be priced")
    return said, ignored


def _torchtitan_schedule(said: Mapping[str, str]) -> Schedule:
    word = said.get("parallelism.pipeline_parallel_schedule", "1F1B")
    return {spelled: schedule for schedule, spelled in TORCHTITAN_SCHEDULES.items()}[word]


def _torchtitan_stages(
    said: Mapping[str, str],
    size: _Sizes,
    pipeline: int,
    schedule: Schedule,
    row: BlockRow | None,
    profile: ModelProfile,
) -> tuple[int, ...]:
    """Layers of each stage; () without a pipeline."""
    if pipeline == 1:
        return ()
    if "parallelism.module_fqns_per_model_part" in said:
        return _named_stages(said["parallelism.module_fqns_per_model_part"].split(" "), row, profile, pipeline)
    row = _needed(row, profile, pipeline)
    head = size("parallelism.pipeline_parallel_first_stage_less_layers", 1)
    tail = size("parallelism.pipeline_parallel_last_stage_less_layers", 1)
    stages = pipeline * (1 if schedule in ("1f1b", "gpipe") else 2)
    if "parallelism.pipeline_parallel_layers_per_stage" in said:
        stages = -(-(row.blocks + head + tail) // size("parallelism.pipeline_parallel_layers_per_stage"))
    each, extra = divmod(row.blocks + head + tail, stages)
    counts = [each + (index < extra) for index in range(stages)]
    counts[0] -= head
    counts[-1] -= tail
    if stages % pipeline or min(counts) < 0:
        raise ValueError(
            f"{row.blocks} blocks do not make {stages} stages on {pipeline} ranks; give other "
            "--parallelism.pipeline_parallel_layers_per_stage"
        )
    return _stage_sizes(counts, row)


def _named_stages(parts: Sequence[str], row: BlockRow | None, profile: ModelProfile, pipeline: int) -> tuple[int, ...]:
    """Layers of each stage from the names of their modules: blocks by number, others by the model's own names."""
    names = [[name.strip("'\"[] ") for name in part.split(",")] for part in parts]
    if len(names) % pipeline:
        raise ValueError(
            f"--parallelism.module_fqns_per_model_part has {len(names)} parts, no multiple of {pipeline} ranks"
        )
    if row is None:
        held = [{layer.name: None for layer in profile.layers if {*layer.modules} & {*part}} for part in names]
        order = [name for part in held for name in part]
        if order != [layer.name for layer in profile.layers]:
            raise ValueError(
                "--parallelism.module_fqns_per_model_part does not name every module of the model once, in order"
            )
        return tuple(len(part) for part in held)
    numbers = [[int(n.rpartition(".")[2]) for n in part if n.rpartition(".")[2].isdecimal()] for part in names]
    if [number for part in numbers for number in part] != list(range(row.blocks)):
        raise ValueError(
            f"--parallelism.module_fqns_per_model_part must name blocks 0 to {row.blocks - 1} once, in order; found "
            f"{sum(map(len, numbers))} of {row.blocks}"
        )
    return _stage_sizes([len(part) for part in numbers], row)


def _recompute_word(word: str) -> Recompute:
    kinds: dict[str, Recompute] = {"none": "none", "full": "full", "selective": "selective"}
    return kinds[word]


def _accelerate_reshard(fsdp: Mapping[str, Any]) -> bool:
    """Whether parameters are given back after forward (FULL_SHARD) or kept (SHARD_GRAD_OP)."""
    if "fsdp_sharding_strategy" in fsdp and "fsdp_reshard_after_forward" not in fsdp:
        strategy = str(fsdp["fsdp_sharding_strategy"]).upper()
        if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP", "1", "2"):
            raise ValueError(
                f"fsdp_sharding_strategy: {strategy}; write it for FSDP2, as fsdp_reshard_after_forward and sizes in "
                "parallelism_config"
            )
        return strategy in ("FULL_SHARD", "1")
    word = str(fsdp.get("fsdp_reshard_after_forward", True)).lower()
    if word not in ("true", "false"):
        raise ValueError(f"fsdp_reshard_after_forward: {word}; FSDP2 takes true or false")
    return word == "true"


def _unknown_keys(found: Mapping[str, Any], known: Iterable[str], target: Target, where: str) -> list[str]:
    """Keys that are ignored. Raises ValueError for one that is nearly one that is understood."""
    keys = set(known)
    strange = [key for key in found if key not in keys]
    for key in strange:
        _check_known(key, keys)
        if target == "accelerate":
            raise ValueError(f"{where}{key} is no key of {NAMES[target]}, which would refuse the file: leave it out")
    return [f"{where}{key}" for key in strange if key != "_comment"]


def _mapping(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(found: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    value = found.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}: {value}; give a whole number of at least {least}")
    return value
