"""Plans as configuration files of Accelerate (FSDP2), and its files as a Layout; one table of keys serves both ways."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...profiler.model.model_profile import ModelProfile
from ..plan.block_row import BlockRow, block_row
from ..plan.document import AXES, Plan
from ..plan.training import Precision
from .deepspeed import read_deepspeed
from .export_notes import (
    OtherTargetError,
    Settings,
    kept_note,
    order_note,
    ordered,
    recomputed_blocks,
    refuse_pipeline,
    whole_layers_notes,
)
from .from_flags import left_over, mapping, number, read_document, unknown_keys
from .imports import Layout
from .megatron import read_megatron

_KEYS = frozenset(
    {
        "compute_environment",
        "debug",
        "deepspeed_config",
        "distributed_type",
        "downcast_bf16",
        "dynamo_config",
        "enable_cpu_affinity",
        "fsdp_config",
        "gpu_ids",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "megatron_lm_config",
        "mixed_precision",
        "num_machines",
        "num_processes",
        "parallelism_config",
        "rdzv_backend",
        "same_network",
        "tpu_env",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "use_cpu",
    }
)
"""Top-level keys of a configuration file that we know; Accelerate refuses files with keys that it does not know."""

_FSDP_KEYS = frozenset(
    {
        "fsdp_version",
        "fsdp_reshard_after_forward",
        "fsdp_sharding_strategy",
        "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload",
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_min_num_params",
        "fsdp_offload_params",
        "fsdp_state_dict_type",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_sync_module_states",
        "fsdp_use_orig_params",
        "fsdp_backward_prefetch",
        "fsdp_forward_prefetch",
        "fsdp_ignored_modules",
    }
)

_PARALLELISM_KEYS = frozenset(
    "parallelism_config_" + name
    for name in (
        "dp_replicate_size",
        "dp_shard_size",
        "tp_size",
        "cp_size",
        "cp_backend",
        "cp_comm_strategy",
        "sp_size",
        "sp_backend",
        "sp_seq_length",
        "sp_seq_length_is_variable",
        "sp_attn_implementation",
    )
)


KEYS = {"": _KEYS, "fsdp_config": _FSDP_KEYS, "parallelism_config": _PARALLELISM_KEYS}
"""Section of an Accelerate configuration file -> its keys ("": the top level); see targets.py for the version."""


def accelerate_settings(plan: Plan, notes: list[str]) -> Settings:
    """Accelerate's configuration for a plan. What it cannot express, but the script can, is added to `notes`. Raises
    ValueError for what Accelerate cannot do."""
    degrees, training = plan.degrees, plan.training
    refuse_pipeline(plan, "accelerate")
    if training.precision == "fp4":
        raise ValueError("precision fp4 is unknown to Accelerate; plan in bf16")
    if degrees.expert > 1:
        found = f"expert={degrees.expert}: Accelerate's ParallelismConfig has no expert ranks"
        raise OtherTargetError(found, ("megatron", "torchtitan"), "plan with --pin expert=1")
    if plan.sequence_parallel:
        raise ValueError(
            "sequence parallelism beside tensor parallelism: Accelerate's follows the model's tp_plan, and needs more "
            "memory without it; plan with --pin sequence=off"
        )
    document: Settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if degrees.num_devices == 1 else "FSDP",
        "mixed_precision": "no" if training.precision == "fp32" else training.precision,
        "num_machines": plan.cluster.num_machines,
        "num_processes": degrees.num_devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    notes.append(
        f"batches are said in the script: batch_size={plan.micro_batch} in the DataLoader, and Accelerator("
        f"gradient_accumulation_steps={plan.num_microbatches}); global batch {training.global_batch}"
    )
    if degrees.sharded_over == 1:
        if degrees.tensor > 1:
            raise ValueError(
                f"tensor={degrees.tensor} without shards: Accelerate's tensor parallelism goes with FSDP2; plan with "
                "--pin data_shard=2 or more"
            )
        if degrees.data_replicate > 1:
            document["distributed_type"] = "MULTI_GPU"
        if any(layer.recompute != "none" for layer in plan.layers):
            notes.append("recompute is said in the script: model.gradient_checkpointing_enable()")
        return document
    document |= _shards(plan, notes)
    if ordered(plan, plan.mesh_axes) != ordered(plan, AXES):
        notes.append(order_note(plan, "accelerate"))
    notes += whole_layers_notes(plan)
    return document


def _shards(plan: Plan, notes: list[str]) -> Settings:
    """Sections for a plan whose data or context ranks share parameters: FSDP2, and the number of ranks on each axis."""
    degrees, reshards = plan.degrees, plan.zero_stage == 3
    if plan.gradient_sync == "every" and plan.num_microbatches > 1:
        notes.append(
            "gradients are reduced after every micro-batch only if the script says so: GradientAccumulationPlugin("
            f"num_steps={plan.num_microbatches}, sync_each_batch=True); without it they stay unsharded, which takes "
            "more memory than the plan"
        )
    row = block_row(plan.layers) or BlockRow(0, len(plan.layers), 0)
    kind, counts, sizes = recomputed_blocks(plan, row, "accelerate", notes)
    if kind in ("attention", "selective"):
        raise ValueError(
            f"recompute={kind}: Accelerate recomputes whole blocks or none; plan with --pin recompute=full"
        )
    if kind == "full" and counts != sizes:
        notes.append(
            f"recompute of {sum(counts)} of {sum(sizes)} blocks becomes all of them: Accelerate knows no number; less "
            "memory, more time; plan with --pin recompute=full or none for what it does"
        )
    if reshards:
        notes += kept_note(plan, "accelerate")
    wrapped = [layer for place, layer in enumerate(plan.layers) if row.holds(place) and layer.root]
    fsdp: Settings = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshards,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(
            dict.fromkeys(layer.layer_class.partition(".")[0] for layer in wrapped)
        ),
        "fsdp_activation_checkpointing": kind == "full",
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    parallelism: Settings = {
        "parallelism_config_dp_replicate_size": degrees.data_replicate,
        "parallelism_config_dp_shard_size": degrees.data_shard,
        "parallelism_config_tp_size": degrees.tensor,
        "parallelism_config_cp_size": degrees.context,
    }
    if degrees.data_replicate > 1 and degrees.data_shard == 1:
        raise ValueError(
            f"{degrees.data_replicate} replicas of {degrees.context} context ranks: Accelerate takes replicas only "
            "beside data_shard above 1; plan with --pin data_replicate=1"
        )
    if degrees.context > 1:
        exchange = "alltoall" if plan.context_kind == "all_to_all" else "allgather"
        parallelism["parallelism_config_cp_comm_strategy"] = exchange
        if plan.context_kind == "ring":
            notes.append("context ranks pass keys and values in a ring in the plan; Accelerate gathers them")
    return {"fsdp_config": fsdp, "parallelism_config": parallelism}


_PRECISIONS: dict[str, Precision] = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

_STRATEGIES = {
    **dict.fromkeys(("1", "FULL_SHARD"), "FULL_SHARD"),
    **dict.fromkeys(("2", "SHARD_GRAD_OP"), "SHARD_GRAD_OP"),
    **dict.fromkeys(("3", "NO_SHARD"), "NO_SHARD"),
    **dict.fromkeys(("4", "HYBRID_SHARD"), "HYBRID_SHARD"),
    **dict.fromkeys(("5", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"), "HYBRID_SHARD_ZERO2"),
}
"""fsdp_sharding_strategy of FSDP1, as a number or a name -> its name."""

_DEEPSPEED_KEYS = frozenset(
    {
        "deepspeed_config_file",
        "deepspeed_hostfile",
        "deepspeed_moe_layer_cls_names",
        "deepspeed_multinode_launcher",
        "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_optimizer_nvme_path",
        "offload_param_device",
        "offload_param_nvme_path",
        "zero3_init_flag",
        "zero3_save_16bit_model",
        "zero_stage",
    }
)

_MEGATRON_KEYS = {
    "megatron_lm_tp_degree": "--tensor-model-parallel-size",
    "megatron_lm_pp_degree": "--pipeline-model-parallel-size",
    "megatron_lm_sequence_parallelism": "--sequence-parallel",
    "megatron_lm_recompute_activations": "--recompute-activations",
    "megatron_lm_use_distributed_optimizer": "--use-distributed-optimizer",
    "megatron_lm_num_micro_batches": "",
    "megatron_lm_gradient_clipping": "",
}
"""Key of megatron_lm_config -> Megatron-LM's option; "" if it has none."""

_KINDS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_GPU", "NO")


def read_accelerate(
    document: Mapping[str, Any], num_devices: int, profile: ModelProfile | None = None, folder: Path = Path()
) -> Layout:
    """The layout of an Accelerate configuration file on a number of GPUs. Micro-batch and accumulation are set in the
    script and not in the file, so they are left open.

    profile: the model, with which Megatron-LM's settings are checked. folder: where a file lies that this one names.
    Raises ValueError that names the key which is wrong or not understood.
    """
    kind = str(document.get("distributed_type", "")).upper()
    if kind not in _KINDS:
        raise ValueError(f"distributed_type: {kind or 'missing'}; {', '.join(_KINDS)} are read")
    processes = document.get("num_processes", num_devices)
    if processes != num_devices:
        raise ValueError(f"num_processes: {processes}, but {num_devices} GPUs: give --gpus {processes}")
    ignored = unknown_keys(document, _KEYS, "accelerate", "")
    precision, notes = _precision_of(document)
    notes += _check_together(document, kind, num_devices)
    if kind == "DEEPSPEED":
        found = _of_deepspeed(document, num_devices, precision, folder)
    elif kind == "MEGATRON_LM":
        found = _of_megatron(document, num_devices, precision, profile)
    else:
        found = _of_fsdp(document, num_devices, kind, precision)
    backend = str(mapping(document, "dynamo_config").get("dynamo_backend", "no")).lower()
    if backend not in ("no", "none") and found.target == "accelerate":
        found = replace(found, software="fsdp2-compile")
    return replace(found, ignored=(*ignored, *found.ignored), notes=(*notes, *found.notes))


_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
"""Section -> the distributed_type under which Accelerate reads it."""


def _check_together(document: Mapping[str, Any], kind: str, num_devices: int) -> list[str]:
    """Notes on sections that have no effect. Raises ValueError that names two keys which contradict each other."""
    if kind == "NO" and num_devices > 1:
        raise ValueError(
            f"distributed_type: NO, which starts one process, and num_processes: {num_devices}: write MULTI_GPU, or "
            "give --gpus 1"
        )
    machines = number(document, "num_machines", 1)
    if num_devices % machines:
        raise ValueError(f"num_processes: {num_devices} is no multiple of num_machines: {machines}; change one of them")
    ids = [each for each in str(document.get("gpu_ids") or "all").split(",") if each.strip()]
    if machines == 1 and ids != ["all"] and len(ids) < num_devices:
        raise ValueError(f"num_processes: {num_devices}, but gpu_ids: {document['gpu_ids']} are {len(ids)} GPUs")
    sizes = mapping(document, "parallelism_config")
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        for key in _PARALLELISM_KEYS & sizes.keys():
            if key.endswith("_size") and number(sizes, key, 1) > 1:
                raise ValueError(
                    f"{key}: {sizes[key]} and distributed_type: {kind}, which says its degrees elsewhere: leave it out"
                )
    return [
        f"{section} has no effect beside distributed_type: {kind}"
        for section, reader in _SECTIONS.items()
        if mapping(document, section) and reader != kind
    ]


def _precision_of(document: Mapping[str, Any]) -> tuple[Precision | None, list[str]]:
    """(precision by mixed_precision, None if the file does not set it; notes on it)."""
    said = document.get("mixed_precision")
    if said is None:
        return None, []
    word = "no" if said is False else str(said).lower()
    if word not in _PRECISIONS:
        raise ValueError(f"mixed_precision: {said}; Accelerate takes no, bf16, fp16 and fp8")
    return _PRECISIONS[word], []


_ASKED = (
    "precision",
    "mixed_precision is not said, and is what accelerate launch is told with --mixed_precision: give --precision bf16, "
    "or fp32 if it is told nothing",
)
_OPEN_BATCHES = "batch size and gradient accumulation are said in the script: chosen at their best here"


def _of_deepspeed(document: Mapping[str, Any], num_devices: int, precision: Precision | None, folder: Path) -> Layout:
    """The layout of a file with distributed_type: DEEPSPEED, or of the JSON file that it names."""
    own = mapping(document, "deepspeed_config")
    ignored = unknown_keys(own, _DEEPSPEED_KEYS, "accelerate", "deepspeed_config.")
    if "deepspeed_config_file" in own:
        also = [key for key in ("zero_stage", "gradient_accumulation_steps", "offload_param_device") if key in own]
        if also:
            raise ValueError(
                f"deepspeed_config.deepspeed_config_file and {also[0]}: Accelerate takes the JSON alone; leave out "
                f"{also[0]}"
            )
        found = read_deepspeed(read_document(folder / str(own["deepspeed_config_file"])), num_devices)
        if None not in (precision, found.precision) and precision != found.precision:
            raise ValueError(
                f"mixed_precision: {document['mixed_precision']}, but {own['deepspeed_config_file']} says "
                f"{found.precision}: change one of them"
            )
        return found
    zero: dict[str, Any] = {"stage": own.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {"device": str(own.get(f"{name}_device") or "none").lower()}
    inner: dict[str, Any] = {"zero_optimization": zero}
    if own.get("gradient_accumulation_steps") not in (None, "auto"):
        inner["gradient_accumulation_steps"] = own["gradient_accumulation_steps"]
    if precision in ("bf16", "fp16"):
        inner[precision] = {"enabled": True}
    found = read_deepspeed(inner, num_devices)
    asks = (_ASKED,) if precision is None else ()
    notes = ("batch size is said in the script: chosen at its best here", found.notes[0])
    return replace(found, precision=precision, asks=asks, ignored=tuple(ignored), notes=notes)


def _of_megatron(
    document: Mapping[str, Any], num_devices: int, precision: Precision | None, profile: ModelProfile | None
) -> Layout:
    """The layout of a file with distributed_type: MEGATRON_LM."""
    own = mapping(document, "megatron_lm_config")
    ignored = unknown_keys(own, _MEGATRON_KEYS, "accelerate", "megatron_lm_config.")
    if profile is None:
        raise ValueError("megatron_lm_config: its stages are counted in blocks of the model, which is not known here")
    words: list[str] = []
    for key, option in _MEGATRON_KEYS.items():
        value = own.get(key)
        value = {"true": True, "false": False}.get(str(value).lower(), value)
        if option and value not in (None, False):
            words += [option] if value is True else [option, str(value)]
    count = own.get("megatron_lm_num_micro_batches")
    found = read_megatron(words, num_devices, profile)
    return replace(
        found,
        precision=precision,
        num_microbatches=None if count is None else number(own, "megatron_lm_num_micro_batches", 1),
        asks=(_ASKED,) if precision is None else (),
        ignored=(*ignored, *found.ignored),
        notes=("batch size is said in the script: chosen at its best here",),
    )


def _of_fsdp(document: Mapping[str, Any], num_devices: int, kind: str, precision: Precision | None) -> Layout:
    """The layout of a file with distributed_type: FSDP, MULTI_GPU or NO, for FSDP2 or FSDP1."""
    asks, notes = (_ASKED,) if precision is None else (), [_OPEN_BATCHES]
    fsdp = mapping(document, "fsdp_config") if kind == "FSDP" else {}
    sizes = mapping(document, "parallelism_config")
    ignored = unknown_keys(fsdp, _FSDP_KEYS, "accelerate", "fsdp_config.")
    ignored += unknown_keys(sizes, _PARALLELISM_KEYS, "accelerate", "parallelism_config.")
    if str(fsdp.get("fsdp_offload_params", False)).lower() == "true":
        raise ValueError("fsdp_offload_params: true; parameters on the host are not priced: set it to false")
    if number(sizes, "parallelism_config_sp_size", 1) > 1:
        raise ValueError("parallelism_config_sp_size: Ulysses sequence ranks of DeepSpeed are not read; set it to 1")
    tensor = number(sizes, "parallelism_config_tp_size", 1)
    context = number(sizes, "parallelism_config_cp_size", 1)
    replicas = number(sizes, "parallelism_config_dp_replicate_size", 1)
    strategy = _strategy(fsdp, kind)
    machines = number(document, "num_machines", 1)
    if strategy.startswith("HYBRID") and replicas not in (1, machines):
        raise ValueError(
            f"parallelism_config_dp_replicate_size: {replicas}, but {strategy} makes a replica of each of "
            f"num_machines: {machines}; leave out one"
        )
    if strategy == "NO_SHARD" and kind == "FSDP" and number(sizes, "parallelism_config_dp_shard_size", 1) > 1:
        raise ValueError(
            f"parallelism_config_dp_shard_size: {sizes['parallelism_config_dp_shard_size']} contradicts "
            "fsdp_sharding_strategy: NO_SHARD; leave out one"
        )
    if strategy.startswith("HYBRID") and replicas == 1:
        replicas = machines
        notes.append(f"{strategy}: {replicas} replicas, one for each of num_machines")
    if kind == "FSDP" and str(fsdp.get("fsdp_version", 1)) == "1":
        notes.append("fsdp_version 1, which is priced as FSDP2")
    rest = left_over(num_devices, tensor * context * replicas, "replicate x tensor x context")
    shards = rest
    if kind != "FSDP" or strategy == "NO_SHARD":
        shards = number(sizes, "parallelism_config_dp_shard_size", 1)
        replicas *= left_over(rest, shards, "parallelism_config_dp_shard_size")
    elif number(sizes, "parallelism_config_dp_shard_size", shards) != shards:
        raise ValueError(
            f"parallelism_config_dp_shard_size: {sizes['parallelism_config_dp_shard_size']}, but {shards} ranks are "
            f"left of {num_devices} GPUs: give --gpus"
        )
    again = str(fsdp.get("fsdp_activation_checkpointing", False)).lower() == "true"
    exchange = str(sizes.get("parallelism_config_cp_comm_strategy", "allgather"))
    return Layout(
        target="accelerate",
        data_replicate=replicas,
        data_shard=shards,
        tensor=tensor,
        context=context,
        context_kind="all_to_all" if exchange == "alltoall" else "all_gather",
        reshard="all" if strategy in ("FULL_SHARD", "HYBRID_SHARD") and shards * context > 1 else "none",
        recompute=None if kind != "FSDP" else "full" if again else "none",
        precision=precision,
        ignored=tuple(ignored),
        notes=tuple(notes),
        asks=asks,
    )


def _strategy(fsdp: Mapping[str, Any], kind: str) -> str:
    """Sharding strategy under its FSDP1 name, also if an FSDP2 file sets it by fsdp_reshard_after_forward."""
    if kind != "FSDP":
        return "NO_SHARD"
    word = str(fsdp.get("fsdp_reshard_after_forward", "")).upper()
    said = str(fsdp.get("fsdp_sharding_strategy", "")).upper()
    found = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(word) or _STRATEGIES.get(word)
    if word and found is None:
        raise ValueError(f"fsdp_reshard_after_forward: {word.lower()}; FSDP2 takes true or false")
    if said and said not in _STRATEGIES:
        raise ValueError(f"fsdp_sharding_strategy: {said}; choose {', '.join(dict.fromkeys(_STRATEGIES.values()))}")
    if found and said and _STRATEGIES[said] != found:
        raise ValueError(
            f"fsdp_sharding_strategy: {said} contradicts fsdp_reshard_after_forward: {word.lower()}; leave out one"
        )
    return found or _STRATEGIES.get(said, "FULL_SHARD")
