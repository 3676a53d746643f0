"""A Plan as settings of other training frameworks: Megatron-LM, torchtitan, Accelerate (FSDP2) and DeepSpeed.

What a target cannot say is never left out in silence. It is refused where the target would need more memory than the
plan, or train other layers on other ranks; it is dropped aloud, as one of `Export.notes`, where the target only takes
another time, or where code has to say it. Versions: export_options.py.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..profiler.units import format_seconds
from .block_row import BlockRow, block_row
from .export_options import NAMES, TARGETS, VERSIONS, Target
from .plan import AXES, Axis, ContextKind, LayerPlan, Plan, Recompute, Schedule
from .strategy import shape_of

Settings = dict[str, Any]

MEGATRON_CONTEXT: dict[ContextKind, str] = {"ring": "p2p", "all_to_all": "a2a", "all_gather": "allgather"}
TORCHTITAN_SCHEDULES: dict[Schedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
DATA_OUTERMOST: tuple[Axis, ...] = ("data_replicate", "data_shard", "context", "pipeline", "tensor")
"""Megatron-LM's other order of ranks, --use-tp-pp-dp-mapping; its usual one is that of AXES."""


@dataclass(frozen=True)
class Export:
    """Settings of a target. `words`: its command-line arguments; `document`: its file's content; one of them is empty.
    `notes`: what of the plan the settings do not say, a sentence each."""

    target: Target
    words: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    text: str = ""
    """What goes into a file: the settings, below a header that names versions, plan and notes."""


def export(plan: Plan, target: str) -> Export:
    """The plan for a target of TARGETS. Raises ValueError for what the target cannot do, with a way out."""
    if target not in TARGETS:
        raise ValueError(f"cannot export to {target!r}: choose {', '.join(TARGETS)}")
    chosen: Target = next(name for name in TARGETS if name == target)
    _refuse_everywhere(plan, chosen)
    notes: list[str] = []
    if chosen == "megatron":
        words = _megatron(plan, notes)
        text = _command_line(plan, chosen, words, notes, 'pretrain_gpt.py "${MEGATRON_ARGS[@]}"')
    elif chosen == "torchtitan":
        words = _torchtitan(plan, notes)
        text = _command_line(
            plan, chosen, words, notes, '-m torchtitan.train --module NAME --config NAME "${TORCHTITAN_ARGS[@]}"'
        )
    elif chosen == "accelerate":
        document = _accelerate(plan, notes)
        return Export(chosen, (), document, tuple(notes), _comment(_header(plan, chosen, notes)) + _yaml(document))
    else:
        document = _deepspeed(plan, notes)
        text = json.dumps({"_comment": _header(plan, chosen, notes), **document}, indent=2) + "\n"
        return Export(chosen, (), document, tuple(notes), text)
    return Export(chosen, tuple(words), {}, tuple(notes), text)


def zero_stage(plan: Plan) -> int:
    """ZeRO stage of a plan: 0 replicas, 1 optimizer state, 2 gradients too, 3 parameters too."""
    if plan.degrees.data_shard == 1:
        return 0
    if any(layer.reshard for layer in _layers(plan)):
        return 3
    return 2 if plan.gradient_sync == "every" else 1


def _layers(plan: Plan) -> list[LayerPlan]:
    return [layer for stage in plan.stages for layer in stage.layers]


def _refuse_everywhere(plan: Plan, target: Target) -> None:
    name = NAMES[target]
    if plan.recompute_parts:
        raise ValueError(
            f"the plan runs {', '.join(plan.recompute_parts)} again in every layer, which {name} cannot: plan without "
            "parts, for example --pin recompute=full"
        )
    offloaded = sum(layer.offload for layer in _layers(plan))
    if offloaded:
        raise ValueError(
            f"{offloaded} layers keep their activations on the host, which no flag of {name} says layer by layer: "
            "plan without offload, for example --pin recompute=full"
        )
    if plan.offload_optimizer and target in ("torchtitan", "accelerate"):
        raise ValueError(
            f"the optimizer runs on the host; {name} moves parameters and gradients there, too: export to megatron or "
            "deepspeed, or plan without offload"
        )


def _megatron(plan: Plan, notes: list[str]) -> list[str]:
    degrees, stage, row = plan.degrees, zero_stage(plan), _row(plan, "megatron")
    pipelined = degrees.pipeline > 1
    if plan.schedule not in ("none", "1f1b", "interleaved"):
        raise ValueError(
            f"schedule {plan.schedule}: Megatron-LM runs 1f1b and interleaved; plan with --pin schedule=1f1b"
        )
    if plan.schedule == "interleaved" and plan.num_microbatches % degrees.pipeline:
        raise ValueError(
            f"{plan.num_microbatches} micro-batches on {degrees.pipeline} stages: Megatron-LM interleaves in groups of "
            f"{degrees.pipeline}; plan with --pin schedule=1f1b, or another --global-batch"
        )
    if stage >= 2 and pipelined:
        raise ValueError(
            f"ZeRO-{stage} in a pipeline of {degrees.pipeline}: Megatron FSDP goes with tensor, context and expert "
            "parallelism, and its pipelines shard the optimizer only; plan with --pin pipeline=1, or compare with "
            f'--setup "tp={degrees.tensor} pp={degrees.pipeline} zero=1"'
        )
    words = ["--tensor-model-parallel-size", str(degrees.tensor)]
    words += ["--sequence-parallel"] if plan.sequence_parallel else []
    words += ["--pipeline-model-parallel-size", str(degrees.pipeline), "--num-layers", str(row.blocks)]
    words += _megatron_cuts(plan, row)
    if degrees.context > 1:
        words += [
            "--context-parallel-size",
            str(degrees.context),
            "--cp-comm-type",
            MEGATRON_CONTEXT[plan.context_kind],
        ]
    if degrees.expert > 1:
        words += ["--expert-model-parallel-size", str(degrees.expert)]
        if degrees.tensor > 1:
            notes.append(
                f"--expert-tensor-parallel-size is left at its default, {degrees.tensor}: Megatron-LM cuts each of the "
                "experts over the tensor ranks"
            )
    words += _megatron_data(plan, stage, notes)
    words += ["--micro-batch-size", str(plan.micro_batch), "--global-batch-size", str(plan.training.global_batch)]
    if plan.training.seq_len is not None:
        words += ["--seq-length", str(plan.training.seq_len)]
    words += {
        "bf16": ["--bf16"],
        "fp32": [],
        "fp16": ["--fp16"],
        "fp8": ["--bf16", "--fp8-format", "hybrid"],
        "fp4": ["--bf16", "--fp4-format", "e2m1"],
    }[plan.training.precision]
    words += _megatron_recompute(plan, row, notes)
    words += ["--optimizer", "adam" if plan.training.optimizer == "adamw" else "sgd"]
    if plan.offload_optimizer:
        words += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.0", "--use-precision-aware-optimizer"]
    fixed = (AXES,) if stage >= 2 or degrees.context > 1 else (AXES, DATA_OUTERMOST)
    if _order(plan, plan.mesh_axes) == _order(plan, AXES):
        pass
    elif DATA_OUTERMOST in fixed and _order(plan, plan.mesh_axes) == _order(plan, DATA_OUTERMOST):
        words.append("--use-tp-pp-dp-mapping")
    else:
        notes.append(_order_note(plan, "megatron"))
    notes += _whole_layers(plan, row)
    return words


def _megatron_cuts(plan: Plan, row: BlockRow) -> list[str]:
    """Which stage holds which blocks: nothing where they are even, else the layout string."""
    degrees = plan.degrees
    if degrees.pipeline == 1:
        return []
    counts = _ends_in_place(plan, row, "megatron")
    if len(set(counts)) == 1:
        return ["--num-layers-per-virtual-pipeline-stage", str(counts[0])] if degrees.virtual_stages > 1 else []
    stages = ["t" * count if count < 3 else f"t*{count}" for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return ["--pipeline-model-parallel-layout", "|".join(stages)]


def _megatron_data(plan: Plan, stage: int, notes: list[str]) -> list[str]:
    """How state is spread over data ranks, and what is hidden behind compute."""
    degrees = plan.degrees
    if degrees.data * degrees.context == 1:
        return []
    words = ["--overlap-grad-reduce"]
    if stage == 0:
        return words
    words += ["--use-distributed-optimizer", "--overlap-param-gather"]
    if degrees.data_replicate > 1:
        words += ["--num-distributed-optimizer-instances", str(degrees.data_replicate)]
    if stage >= 2:
        strategy = "optim_grads_params" if stage == 3 else "optim_grads"
        words += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]
        words += ["--no-gradient-accumulation-fusion", "--ckpt-format", "fsdp_dtensor"]
        notes += _kept_note(plan, "megatron") + _sync_note(plan, "megatron")
    return words


def _megatron_recompute(plan: Plan, row: BlockRow, notes: list[str]) -> list[str]:
    kind, counts, sizes = _recomputed(plan, row, "megatron", notes)
    if kind == "none":
        return []
    if kind == "selective":
        raise ValueError(
            "recompute=selective (all but matmuls and attention) is no --recompute-modules of Megatron-LM; plan with "
            "--pin recompute=attention, its core_attn, or --pin recompute=full"
        )
    if kind == "attention":
        if counts != sizes:
            notes.append(
                f"recompute of attention in {sum(counts)} of {sum(sizes)} blocks becomes all of them: 'selective' of "
                "Megatron-LM is for every block; less memory, more time"
            )
        return ["--recompute-granularity", "selective"]
    if counts == sizes:
        return ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    most = max(counts)
    if not _recomputes_first(plan, row):
        notes.append(
            f"the plan recomputes other blocks than the first {most} of each stage, which is what Megatron-LM's block "
            "method takes: the peak may be higher; plan check --megatron-args tells"
        )
    if any(count != min(most, size) for count, size in zip(counts, sizes, strict=True)):
        notes.append(
            f"recompute of {', '.join(map(str, counts))} blocks of the stages becomes {most} of each: "
            "--recompute-num-layers is one number for all stages; less memory, more time"
        )
    return ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", str(most)]


def _recomputes_first(plan: Plan, row: BlockRow) -> bool:
    """Whether the blocks that recompute are the first ones of every stage."""
    place = 0
    for stage in plan.stages:
        again = [x.recompute != "none" for p, x in enumerate(stage.layers, place) if row.holds(p)]
        if again != sorted(again, reverse=True):
            return False
        place += len(stage.layers)
    return True


def _torchtitan(plan: Plan, notes: list[str]) -> list[str]:
    degrees, training, stage = plan.degrees, plan.training, zero_stage(plan)
    pipelined = degrees.pipeline > 1
    if training.precision not in ("bf16", "fp32"):
        raise ValueError(
            f"precision {training.precision} is no flag of torchtitan, but a converter in its config function; plan in "
            "bf16"
        )
    alone = degrees.num_devices in (1, degrees.data_replicate)
    if training.precision == "bf16" and degrees.sharded_over == 1 and not alone:
        raise ValueError(
            "torchtitan computes in bf16 through FSDP (data_shard or context above 1) or plain DDP; this plan has "
            f"tensor={degrees.tensor} and pipeline={degrees.pipeline} without either, and would run in fp32: plan with "
            "--pin data_replicate=1 --pin data_shard=2 or more"
        )
    if pipelined and plan.gradient_sync == "every" and stage and plan.num_microbatches > 1:
        raise ValueError(
            "torchtitan's pipelines reduce gradients once, after the last micro-batch, and hold them unsharded until "
            f"then; the plan reduces after each of {plan.num_microbatches}: plan with --pin pipeline=1, or compare "
            f'with --setup "tp={degrees.tensor} pp={degrees.pipeline} zero=1"'
        )
    words: list[str] = []

    def say(name: str, *values: object) -> None:
        words.extend([f"--{name}", *map(str, values)])

    say("parallelism.data_parallel_replicate_degree", degrees.data_replicate)
    say("parallelism.data_parallel_shard_degree", degrees.data_shard)
    if degrees.sharded_over > 1:
        say("parallelism.fsdp_reshard_after_forward", _torchtitan_reshard(plan, notes))
    say("parallelism.tensor_parallel_degree", degrees.tensor)
    if degrees.tensor > 1 and not plan.sequence_parallel:
        say("parallelism.no-enable_sequence_parallel")
    if degrees.context > 1:
        say("parallelism.context_parallel_degree", degrees.context)
        if plan.context_kind != "all_gather":
            notes.append(
                f"context ranks exchange by {plan.context_kind} in the plan; torchtitan 0.3 takes no flag for it"
            )
    if degrees.expert > 1:
        say("parallelism.expert_parallel_degree", degrees.expert)
    say("parallelism.pipeline_parallel_degree", degrees.pipeline)
    if pipelined:
        if plan.schedule not in TORCHTITAN_SCHEDULES or (plan.schedule == "zb-h1" and degrees.virtual_stages == 1):
            raise ValueError(
                f"schedule {plan.schedule} with {degrees.virtual_stages} stage(s) of each rank: torchtitan runs gpipe, "
                "1f1b, interleaved, zb-h1 with several stages of each rank, and zb-v; plan with --pin schedule=1f1b"
            )
        say("parallelism.pipeline_parallel_schedule", TORCHTITAN_SCHEDULES[plan.schedule])
        say("parallelism.pipeline_parallel_microbatch_size", plan.micro_batch)
        say("parallelism.module_fqns_per_model_part", *_model_parts(plan, notes))
    if pipelined or degrees.expert > 1:
        say("training.disable_cuda_graphs")
    say("training.local_batch_size", plan.micro_batch * (plan.num_microbatches if pipelined else 1))
    say("training.global_batch_size", training.global_batch)
    if training.seq_len is not None:
        say("training.seq_len", training.seq_len)
    say("training.mixed_precision_param", "bfloat16" if training.precision == "bf16" else "float32")
    if training.software == "fsdp2-compile":
        say("compile.enable")
    if training.optimizer == "sgd":
        notes.append("the optimizer is SGD in the plan; torchtitan's is set in its config function")
    if not pipelined:
        notes += _sync_note(plan, "torchtitan")
    if _order(plan, plan.mesh_axes) != _order(plan, AXES):
        notes.append(_order_note(plan, "torchtitan"))
    notes += _whole_layers(plan, block_row(_layers(plan)))
    words.append(f"activation_checkpoint:{_torchtitan_recompute(plan, notes)}")  # a subcommand, so it comes last
    return words


def _torchtitan_reshard(plan: Plan, notes: list[str]) -> str:
    """always, never, or default: without a pipeline all but what comes behind the blocks."""
    layers, row = _layers(plan), block_row(_layers(plan))
    reshards = [layer.reshard for layer in layers]
    if not any(reshards):
        return "never"
    if row is not None and row.after and plan.degrees.pipeline == 1:
        expected = [place < len(layers) - row.after for place in range(len(layers))]
        if reshards == expected:
            return "default"
    notes += _kept_note(plan, "torchtitan")
    return "always"


def _torchtitan_recompute(plan: Plan, notes: list[str]) -> str:
    row = block_row(_layers(plan)) or BlockRow(0, len(_layers(plan)), 0)
    kind, counts, sizes = _recomputed(plan, row, "torchtitan", notes)
    if kind == "attention":
        raise ValueError(
            "recompute=attention is no mode of torchtitan; plan with --pin recompute=selective or recompute=full"
        )
    if kind == "selective":
        notes.append("selective of torchtitan also runs every second matmul again; less memory, more time")
    if kind != "none" and counts != sizes:
        notes.append(
            f"recompute of {sum(counts)} of {sum(sizes)} blocks becomes all of them: torchtitan knows no number; "
            f"less memory, more time; plan with --pin recompute={kind} or none for what it does"
        )
    return kind


def _model_parts(plan: Plan, notes: list[str]) -> list[str]:
    """Modules of each stage, with commas between them: torchtitan's own names where the model is one row of blocks."""
    row = block_row(_layers(plan))
    if row is None:
        parts = [[name for layer in stage.layers for name in layer.modules] for stage in plan.stages]
        deep = next((name for part in parts for name in part if name.count(".") > 1), None)
        if deep is not None:
            raise ValueError(
                f"torchtitan cuts a model at its children and at items of its lists, and {deep} lies deeper: plan with "
                "--pin pipeline=1"
            )
        return [",".join(dict.fromkeys(part)) for part in parts]
    counts = _ends_in_place(plan, row, "torchtitan")
    notes.append(
        "stages are said with the names of torchtitan's own decoders: tok_embeddings, layers.N, norm and lm_head"
    )
    parts, first = [], 0
    for count in counts:
        parts.append([f"layers.{block}" for block in range(first, first + count)])
        first += count
    parts[0] = ["tok_embeddings"] * bool(row.before) + parts[0]
    parts[-1] += ["norm", "lm_head"] if row.after else []
    return [",".join(part) for part in parts]


def _accelerate(plan: Plan, notes: list[str]) -> Settings:
    degrees, training, stage = plan.degrees, plan.training, zero_stage(plan)
    _refuse_pipeline(plan, "accelerate")
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
        if any(layer.recompute != "none" for layer in _layers(plan)):
            notes.append("recompute is said in the script: model.gradient_checkpointing_enable()")
        return document
    if plan.gradient_sync == "every" and plan.num_microbatches > 1:
        notes.append(
            "gradients are reduced after every micro-batch only if the script says so: GradientAccumulationPlugin("
            f"num_steps={plan.num_microbatches}, sync_each_batch=True); without it they stay unsharded, which takes "
            "more memory than the plan"
        )
    row = block_row(_layers(plan)) or BlockRow(0, len(_layers(plan)), 0)
    kind, counts, sizes = _recomputed(plan, row, "accelerate", notes)
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
        notes += _kept_note(plan, "accelerate")
    wrapped = [layer for place, layer in enumerate(_layers(plan)) if row.holds(place) and layer.root]
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
    if _order(plan, plan.mesh_axes) != _order(plan, AXES):
        notes.append(_order_note(plan, "accelerate"))
    notes += _whole_layers(plan, row)
    return document


def _deepspeed(plan: Plan, notes: list[str]) -> Settings:
    degrees, training, stage = plan.degrees, plan.training, zero_stage(plan)
    _refuse_pipeline(plan, "deepspeed")
    if training.precision in ("fp8", "fp4"):
        raise ValueError(f"precision {training.precision} is no key of DeepSpeed; plan in bf16")
    if degrees.context > 1 or degrees.expert > 1:
        raise ValueError(
            f"context={degrees.context}, expert={degrees.expert}: DeepSpeed says these in code (Ulysses, MoE layers); "
            "export to megatron or torchtitan"
        )
    if degrees.data_replicate > 1 and degrees.data_shard > 1:
        raise ValueError(
            f"{degrees.data_replicate} replicas of {degrees.data_shard} shards: ZeRO shards over all data ranks; plan "
            f"with --pin data_replicate=1, or export to torchtitan or accelerate"
        )
    if degrees.tensor > 1 and stage == 3:
        raise ValueError(
            f"ZeRO-3 with tensor={degrees.tensor}: DeepSpeed's AutoTP goes with ZeRO up to 2; plan with --pin tensor=1"
        )
    if plan.sequence_parallel:
        raise ValueError(
            "sequence parallelism beside tensor parallelism: DeepSpeed's AutoTP has none, and needs more memory "
            "without it; plan with --pin sequence=off"
        )
    document: Settings = {
        "train_batch_size": training.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
    }
    if plan.offload_optimizer:
        document["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if training.precision in ("bf16", "fp16"):
        document[training.precision] = {"enabled": True}
    if degrees.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": degrees.tensor}
    row = block_row(_layers(plan)) or BlockRow(0, len(_layers(plan)), 0)
    recomputes = {layer.recompute for place, layer in enumerate(_layers(plan)) if row.holds(place)}
    if recomputes != {"none"}:
        counted = sum(layer.recompute != "none" for layer in _layers(plan))
        notes.append(
            f"recompute ({', '.join(sorted(recomputes - {'none'}))} in {counted} of {len(_layers(plan))} layers) is "
            "said in the script: model.gradient_checkpointing_enable() does it for all blocks; without it, it "
            "takes more memory than the plan"
        )
    if stage == 3:
        notes += _kept_note(plan, "deepspeed") + _sync_note(plan, "deepspeed")
    if _order(plan, plan.mesh_axes) != _order(plan, AXES):
        notes.append(_order_note(plan, "deepspeed"))
    notes += _whole_layers(plan, row)
    return document


def _refuse_pipeline(plan: Plan, target: Target) -> None:
    if plan.degrees.pipeline > 1:
        raise ValueError(
            f"pipeline={plan.degrees.pipeline}: {NAMES[target]} has stages in code, not in its settings; plan with "
            "--pin pipeline=1, or export to megatron or torchtitan"
        )


def _row(plan: Plan, target: Target) -> BlockRow:
    row = block_row(_layers(plan))
    if row is None:
        raise ValueError(
            f"{plan.model.name} is no single row of numbered blocks, which is what {NAMES[target]} builds; export to "
            "torchtitan or accelerate"
        )
    return row


def _ends_in_place(plan: Plan, row: BlockRow, target: Target) -> tuple[int, ...]:
    """Blocks of each stage. Raises ValueError where layers before or behind the blocks are on other stages than the
    first and the last."""
    counts, place = [], 0
    for index, stage in enumerate(plan.stages):
        places = range(place, place + len(stage.layers))
        counts.append(sum(row.holds(p) for p in places))
        for p, layer in zip(places, stage.layers, strict=True):
            outside = p < row.before and index > 0
            if outside or (p >= row.before + row.blocks and index < len(plan.stages) - 1):
                raise ValueError(
                    f"{layer.name} is on stage {index}: {NAMES[target]} keeps what comes before the blocks on the "
                    "first stage, and what comes behind them on the last; plan with fewer stages, for example "
                    f"--pin pipeline={max(1, plan.degrees.pipeline // 2)}"
                )
        place += len(stage.layers)
    return tuple(counts)


def _recomputed(
    plan: Plan, row: BlockRow, target: Target, notes: list[str]
) -> tuple[Recompute, tuple[int, ...], tuple[int, ...]]:
    """(kind, blocks of each stage that recompute, blocks of each stage). What else recomputes is noted."""
    counts, sizes, kinds, others, place = [], [], set[Recompute](), [], 0
    for stage in plan.stages:
        places = range(place, place + len(stage.layers))
        blocks = [layer for p, layer in zip(places, stage.layers, strict=True) if row.holds(p)]
        others += [x.name for x in stage.layers if x.recompute != "none" and x not in blocks]
        kinds |= {layer.recompute for layer in blocks} - {"none"}
        counts.append(sum(layer.recompute != "none" for layer in blocks))
        sizes.append(len(blocks))
        place += len(stage.layers)
    if len(kinds) > 1:
        raise ValueError(
            f"blocks recompute in {len(kinds)} ways ({', '.join(sorted(kinds))}); {NAMES[target]} takes one: plan with "
            "--pin recompute=full"
        )
    if others:
        notes.append(f"recompute of {', '.join(others)} is left out: {NAMES[target]} recomputes blocks only")
    return (kinds.pop() if kinds else "none"), tuple(counts), tuple(sizes)


def _kept_note(plan: Plan, target: Target) -> list[str]:
    kept = sum(not layer.reshard for layer in _layers(plan))
    return [
        f"{kept} of {len(_layers(plan))} layers keep their parameters gathered in the plan; {NAMES[target]} gives all "
        "back: less memory, more time"
    ] * (kept > 0 and zero_stage(plan) == 3)


def _sync_note(plan: Plan, target: Target) -> list[str]:
    return [
        f"the plan reduces gradients once, after {plan.num_microbatches} micro-batches; {NAMES[target]} does after "
        "each: less memory, more time"
    ] * (plan.gradient_sync == "last" and plan.num_microbatches > 1 and plan.degrees.data_shard > 1)


def _order(plan: Plan, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(axis for axis in axes if plan.degrees.of(axis) > 1)


def _order_note(plan: Plan, target: Target) -> str:
    return (
        f"the plan orders ranks {' > '.join(_order(plan, plan.mesh_axes))}, outermost first; {NAMES[target]} orders "
        f"them {' > '.join(_order(plan, AXES))}: other links carry the traffic"
    )


def _whole_layers(plan: Plan, row: BlockRow | None) -> list[str]:
    """Layers that stay whole in the plan, though the target may cut them."""
    if plan.degrees.tensor == 1 or row is None:
        return []
    cut = {c.name for c in plan.classes if c.cuts}
    whole = [
        layer.name
        for place, layer in enumerate(_layers(plan))
        if not row.holds(place) and layer.parameters and layer.layer_class not in cut
    ]
    notes = [
        f"{', '.join(whole)} stay whole in the plan, on each of {plan.degrees.tensor} tensor ranks; the target may cut "
        "them: less memory"
    ] * bool(whole)
    return notes + _whole_attention(plan)


def _whole_attention(plan: Plan) -> list[str]:
    """Attention that stays whole in layers of which the rest is cut."""
    uncut = {c.name for c in plan.classes if c.cuts and all(cut.kind != "attention" for cut in c.cuts)}
    roots = [layer.root for layer in _layers(plan) if layer.layer_class in uncut and layer.root]
    count = sum(any(name.startswith(f"{root}.") for name in plan.model.attention_modules) for root in roots)
    return [
        f"the attention of {count} layers stays whole in the plan, on each of {plan.degrees.tensor} tensor ranks; the "
        "target cuts it, or refuses where its heads do not divide: other times and memory than the plan's"
    ] * bool(count)


def _header(plan: Plan, target: Target, notes: list[str]) -> list[str]:
    """What this is, for which plan, and every note."""
    device, found = plan.cluster.device.name, plan.prediction
    step = "" if found is None else f"; predicted {format_seconds(found.step_time_s)} a step, {plan.training.software}"
    return [
        f"{plan.model.name} on {plan.degrees.num_devices} x {device}, from a Meshwright plan: {shape_of(plan).label}, "
        f"micro-batch {plan.micro_batch} x {plan.num_microbatches}{step}",
        f"Options as of {VERSIONS[target]}. They say the layout; model, data and learning rate are yours.",
        *(f"Not said here: {note}" for note in notes),
    ]


def _comment(lines: list[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _command_line(plan: Plan, target: Target, words: list[str], notes: list[str], program: str) -> str:
    """A shell file that sets an array of arguments."""
    hosts, per_host = plan.cluster.num_hosts, plan.cluster.devices_per_host
    lines: list[str] = []
    for word in words:
        if word.startswith(("--", "activation_checkpoint:")):
            lines.append(f"    {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    launch = f"# torchrun --nnodes {hosts} --nproc-per-node {per_host} {program}\n"
    return _comment(_header(plan, target, notes)) + launch + f"{target.upper()}_ARGS=(\n" + "\n".join(lines) + "\n)\n"


def _yaml(document: Settings) -> str:
    """A mapping of scalars and of mappings of scalars."""
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {_scalar(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    """JSON is YAML, and quotes words such as no that YAML would read as something else."""
    return json.dumps(value)
