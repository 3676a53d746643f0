"""Options of other training frameworks that a layout is said with, and the versions they were checked against.

Megatron-LM: megatron/training/arguments.py at commit 000c4ac2, and the dataclasses and layout parser of the wheel
megatron-core 0.16.1. torchtitan 0.3.0, Accelerate 1.15.0 and DeepSpeed 0.19.8: the dataclasses and parsers of the
released packages.
"""

from typing import Literal, get_args

Target = Literal["megatron", "torchtitan", "accelerate", "deepspeed"]
TARGETS: tuple[Target, ...] = get_args(Target)

NAMES: dict[Target, str] = {
    "megatron": "Megatron-LM",
    "torchtitan": "torchtitan",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
}
VERSIONS: dict[Target, str] = {
    "megatron": "Megatron-LM core 0.16",
    "torchtitan": "torchtitan 0.3.0",
    "accelerate": "Accelerate 1.15.0",
    "deepspeed": "DeepSpeed 0.19.8",
}

MEGATRON_SIZES = frozenset(
    {
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
        "--expert-model-parallel-size",
        "--num-distributed-optimizer-instances",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--micro-batch-size",
        "--global-batch-size",
        "--seq-length",
        "--num-layers",
        "--recompute-num-layers",
    }
)
"""Megatron-LM options that take one whole number."""

MEGATRON_WORDS: dict[str, tuple[str, ...]] = {
    "--pipeline-model-parallel-layout": (),
    "--cp-comm-type": ("p2p", "a2a", "allgather"),
    "--data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--recompute-modules": ("core_attn",),
    "--fp8-format": ("e4m3", "hybrid"),
    "--fp4-format": ("e2m1",),
    "--optimizer": ("adam", "sgd"),
    "--ckpt-format": (),
    "--optimizer-offload-fraction": (),
}
"""Options that take one word, with the words that are understood; (): any."""

MEGATRON_SWITCHES = frozenset(
    {
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--torch-fsdp2-no-reshard-after-forward",
        "--no-gradient-accumulation-fusion",
        "--use-tp-pp-dp-mapping",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--recompute-activations",
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
        "--bf16",
        "--fp16",
    }
)

MEGATRON_REFUSED: dict[str, str] = {
    "--hierarchical-context-parallel-sizes": "context ranks in several levels are not priced",
    "--expert-tensor-parallel-size": "experts that are cut otherwise than the rest are not priced",
    "--rampup-batch-size": "a global batch that grows has no one step time",
    "--decrease-batch-size-if-needed": "a global batch that changes has no one step time",
    "--distribute-saved-activations": "saved activations spread over tensor ranks are not priced",
    "--cpu-offloading-num-layers": "activations that wait on the host are not priced by number of layers",
    "--fp8-param-gather": "parameters kept in fp8 are not priced",
    "--grad-reduce-in-bf16": "gradients reduced in bf16 are not priced",
    "--main-grads-dtype": "gradients in another dtype than fp32 are not priced",
    "--main-params-dtype": "main parameters in another dtype than fp32 are not priced",
    "--exp-avg-dtype": "optimizer state in another dtype than fp32 is not priced",
    "--exp-avg-sq-dtype": "optimizer state in another dtype than fp32 is not priced",
    "--microbatch-group-size-per-virtual-pipeline-stage": "interleaving in groups of another size is not priced",
    "--mtp-num-layers": "multi-token prediction layers are priced where the model has them, not by a flag",
    "--enable-full-sharding-in-hsdp": "optimizer state sharded further than gradients is not priced",
    "--defer-embedding-wgrad-compute": "weight gradients computed late are not priced",
    "--heterogeneous-layers-config-path": "blocks that a file makes unequal are not read; give the model itself",
    "--yaml-cfg": "a YAML file is not read; give its settings as flags",
    "--pipeline-model-parallel-split-rank": "encoder and decoder on pipelines of their own are not priced",
    "--model-parallel-size": "Megatron-LM has dropped it; use --tensor-model-parallel-size",
    "--batch-size": "Megatron-LM has dropped it; use --micro-batch-size",
    "--checkpoint-activations": "Megatron-LM has dropped it; use --recompute-granularity full",
}
"""Options that change what a step costs and that no plan can say, with the reason."""

TORCHTITAN_SIZES = frozenset(
    {
        "parallelism.data_parallel_replicate_degree",
        "parallelism.data_parallel_shard_degree",
        "parallelism.tensor_parallel_degree",
        "parallelism.pipeline_parallel_degree",
        "parallelism.context_parallel_degree",
        "parallelism.expert_parallel_degree",
        "parallelism.pipeline_parallel_microbatch_size",
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.pipeline_parallel_layers_per_stage",
        "training.local_batch_size",
        "training.global_batch_size",
        "training.seq_len",
    }
)

TORCHTITAN_WORDS: dict[str, tuple[str, ...]] = {
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "parallelism.pipeline_parallel_schedule": (
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
    ),
    "training.mixed_precision_param": ("bfloat16", "float32"),
    "training.dtype": ("float32",),
    "activation_checkpoint.mode": ("none", "full", "selective"),
}

TORCHTITAN_SWITCHES = frozenset(
    {"parallelism.enable_sequence_parallel", "training.disable_cuda_graphs", "compile.enable"}
)

TORCHTITAN_LISTS = frozenset({"parallelism.module_fqns_per_model_part"})

TORCHTITAN_HARMLESS = frozenset(
    {
        "context_parallel_load_balancer",
        "context_parallel_ptrr_mask_key",
        "context_parallel_rotate_method",
        "enable_async_tensor_parallel",
        "enable_fsdp_symm_mem",
        "spmd_backend",
    }
)
"""Flags of the section parallelism that do not change what is priced."""

TORCHTITAN_REFUSED: dict[str, str] = {
    "training.enable_cpu_offload": "parameters and gradients on the host are not priced",
    "parallelism.pipeline_parallel_schedule_csv": "a schedule of your own is not read",
    "activation_checkpoint.memory_budget": "a memory budget leaves recompute to the compiler, which is not priced",
    "activation_checkpoint.selective_ac_option": "recompute of every n-th block was dropped by torchtitan 0.3",
}

ACCELERATE_KEYS = frozenset(
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

ACCELERATE_FSDP_KEYS = frozenset(
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

ACCELERATE_PARALLELISM_KEYS = frozenset(
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

DEEPSPEED_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization",
        "bf16",
        "fp16",
        "tensor_parallel",
    }
)
"""Keys of a DeepSpeed configuration that a layout is said with."""

DEEPSPEED_ZERO_KEYS = frozenset(
    {"stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "offload_optimizer"}
)

DEEPSPEED_REFUSED: dict[str, str] = {
    "sequence_parallel_size": "Ulysses sequence ranks of DeepSpeed are not read",
    "pipeline": "stages are made in code (PipelineModule), which the file does not show",
    "curriculum_learning": "sequences that grow have no one step time",
    "sparse_attention": "sparse attention is priced where the model has it, not by a key",
    "elasticity": "a batch that follows the number of GPUs has no one step time",
}

DEEPSPEED_ZERO_REFUSED: dict[str, str] = {
    "offload_param": "parameters on the host are not priced",
    "zero_hpz_partition_size": "a second copy of the parameters inside the host (hpZ) is not priced",
    "zero_quantized_weights": "quantized gathers are not priced",
    "zero_quantized_gradients": "quantized reductions are not priced",
    "mics_shard_size": "MiCS is not read; write it as --setup hsdp:N",
    "zenflow": "ZenFlow is not priced",
    "cpu_offload": "DeepSpeed has dropped it; use offload_optimizer",
}
