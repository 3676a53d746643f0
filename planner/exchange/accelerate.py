"""Plans as a configuration file of Accelerate (FSDP2), and its files as a Layout: one table of keys for both ways."""

from collections.abc import Mapping
from typing import Any

from ..plan.block_row import BlockRow, block_row
from ..plan.document import AXES, Plan
from ..plan.training import Precision
from .export_notes import (
    Settings,
    kept_note,
    layers_of,
    order_note,
    ordered,
    recomputed_blocks,
    refuse_pipeline,
    whole_layers_notes,
    zero_stage,
)
from .from_flags import left_over, mapping, number, unknown_keys
from .imports import Layout

_KEYS = frozenset(
    {
        "compute_environment",
        "debug",
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
"""Top-level keys of a configuration file that are known; Accelerate itself refuses any it does not know."""

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
"""Keys of an Accelerate configuration file by section; see targets.py for the version."""


def accelerate_settings(plan: Plan, notes: list[str]) -> Settings:
    """Accelerate's configuration for a plan; what it does not say is added to the notes. Raises ValueError for what
    Accelerate cannot do."""
    degrees, training, stage = plan.degrees, plan.training, zero_stage(plan)
    refuse_pipeline(plan, "accelerate")
    if training.precision == "fp4":
        raise ValueError("precision fp4 is unknown to Accelerate; plan in bf16")
    if degrees.expert > 1:
        raise ValueError(
            f"expert={degrees.expert}: Accelerate's ParallelismConfig has no expert ranks; export to megatron or "
            "torchtitan"
        )
    if plan.sequence_parallel:
        raise ValueError(
            "sequence parallelism beside tensor parallelism: Accelerate's follows the model's tp_plan, and needs more "
            "memory without it; plan with --pin sequence=off"
        )
    document: Settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if degrees.num_devices == 1 else "FSDP",
        "mixed_precision": "no" if training.precision == "fp32" else training.precision,
        "num_machines": plan.cluster.num_hosts,
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
        if any(layer.recompute != "none" for layer in layers_of(plan)):
            notes.append("recompute is said in the script: model.gradient_checkpointing_enable()")
        return document
    if plan.gradient_sync == "every" and plan.num_microbatches > 1:
        notes.append(
            "gradients are reduced after every micro-batch only if the script says so: GradientAccumulationPlugin("
            f"num_steps={plan.num_microbatches}, sync_each_batch=True); without it they stay unsharded, which takes "
            "more memory than the plan"
        )
    row = block_row(layers_of(plan)) or BlockRow(0, len(layers_of(plan)), 0)
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
    if stage == 3:
        notes += kept_note(plan, "accelerate")
    wrapped = [layer for place, layer in enumerate(layers_of(plan)) if row.holds(place) and layer.root]
    document["fsdp_config"] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": stage == 3,
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
    document["parallelism_config"] = parallelism
    if ordered(plan, plan.mesh_axes) != ordered(plan, AXES):
        notes.append(order_note(plan, "accelerate"))
    notes += whole_layers_notes(plan)
    return document


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
    ignored = unknown_keys(document, _KEYS, "accelerate", "")
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
    fsdp = mapping(document, "fsdp_config")
    sizes = mapping(document, "parallelism_config")
    ignored += unknown_keys(fsdp, _FSDP_KEYS, "accelerate", "fsdp_config.")
    ignored += unknown_keys(sizes, _PARALLELISM_KEYS, "accelerate", "parallelism_config.")
    if fsdp.get("fsdp_offload_params"):
        raise ValueError("fsdp_offload_params: true; parameters on the host are not priced: set it to false")
    if number(sizes, "parallelism_config_sp_size", 1) > 1:
        raise ValueError("parallelism_config_sp_size: Ulysses sequence ranks of DeepSpeed are not read; set it to 1")
    tensor = number(sizes, "parallelism_config_tp_size", 1)
    context = number(sizes, "parallelism_config_cp_size", 1)
    replicas = number(sizes, "parallelism_config_dp_replicate_size", 1)
    shards = left_over(num_devices, tensor * context * replicas, "replicate x tensor x context")
    if number(sizes, "parallelism_config_dp_shard_size", shards) != shards:
        raise ValueError(
            f"parallelism_config_dp_shard_size: {sizes['parallelism_config_dp_shard_size']}, but {shards} ranks are "
            f"left of {num_devices} GPUs: give --gpus"
        )
    reshard = _read_reshard(fsdp)
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


def _read_reshard(fsdp: Mapping[str, Any]) -> bool:
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
