"""Plans as configurations of DeepSpeed, and its files as a Layout; one table of keys serves both ways."""

from collections.abc import Mapping
from typing import Any

from ..plan.block_row import BlockRow, block_row
from ..plan.document import AXES, Plan
from ..plan.training import LOW_PRECISIONS, Precision
from .export_notes import (
    OtherTargetError,
    Settings,
    kept_note,
    order_note,
    ordered,
    refuse_pipeline,
    sync_note,
    whole_layers_notes,
)
from .from_flags import left_over, mapping, number, unknown_keys
from .imports import Layout

_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization",
        "bf16",
        "fp16",
        "optimizer",
        "tensor_parallel",
    }
)
"""Top-level keys of a DeepSpeed configuration that describe a layout."""

_OLD_BF16 = "bfloat16"
"""Earlier name of the key bf16, which DeepSpeed still reads if bf16 is missing."""

_TENSOR_KEYS = frozenset({"autotp_size", "tp", "dtype", "tp_overlap_comm"})

_ZERO_KEYS = frozenset({"stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "offload_optimizer"})

_REFUSED: dict[str, str] = {
    "sequence_parallel_size": "Ulysses sequence ranks of DeepSpeed are not read",
    "pipeline": "stages are made in code (PipelineModule), which the file does not show",
    "curriculum_learning": "sequences that grow have no one step time",
    "sparse_attention": "sparse attention is priced where the model has it, not by a key",
    "amp": "apex's mixed precision is not priced; use bf16 or fp16",
    "elasticity": "a batch that follows the number of GPUs has no one step time",
}

_ZERO_REFUSED: dict[str, str] = {
    "offload_param": "parameters on the host are not priced",
    "zero_hpz_partition_size": "a second copy of the parameters inside the host (hpZ) is not priced",
    "zero_quantized_weights": "quantized gathers are not priced",
    "zero_quantized_gradients": "quantized reductions are not priced",
    "mics_shard_size": "MiCS is not read; write it as --setup hsdp:N",
    "zenflow": "ZenFlow is not priced",
    "cpu_offload": "DeepSpeed has dropped it; use offload_optimizer",
}


KEYS = {"": _KEYS, "zero_optimization": _ZERO_KEYS}
"""Section of a DeepSpeed configuration -> its keys that describe a layout ("": the top level); see targets.py for the
version."""


def deepspeed_settings(plan: Plan, notes: list[str]) -> Settings:
    """DeepSpeed's configuration for a plan. What it cannot express is added to `notes`. Raises ValueError for what
    DeepSpeed cannot do."""
    degrees, training, stage = plan.degrees, plan.training, plan.zero_stage
    refuse_pipeline(plan, "deepspeed")
    if training.precision in LOW_PRECISIONS:
        raise ValueError(f"precision {training.precision} is no key of DeepSpeed; plan in bf16")
    if degrees.context > 1 or degrees.expert > 1:
        ways = {"context": degrees.context, "expert": degrees.expert}
        used = [f"{name}={count}" for name, count in ways.items() if count > 1]
        found = f"{', '.join(used)}: DeepSpeed says {'these' if used[1:] else 'that'} in code (Ulysses, MoE layers)"
        without = " ".join(f"--pin {name}=1" for name, count in ways.items() if count > 1)
        raise OtherTargetError(found, ("megatron", "torchtitan"), f"plan with {without}")
    if degrees.data_replicate > 1 and degrees.data_shard > 1:
        found = f"{degrees.data_replicate} replicas of {degrees.data_shard} shards: ZeRO shards over all data ranks"
        raise OtherTargetError(found, ("torchtitan", "accelerate"), "plan with --pin data_replicate=1")
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
    row = block_row(plan.layers) or BlockRow(0, len(plan.layers), 0)
    recomputes = {layer.recompute for place, layer in enumerate(plan.layers) if row.holds(place)}
    if recomputes != {"none"}:
        counted = sum(layer.recompute != "none" for layer in plan.layers)
        notes.append(
            f"recompute ({', '.join(sorted(recomputes - {'none'}))} in {counted} of {len(plan.layers)} layers) is "
            "said in the script: model.gradient_checkpointing_enable() does it for all blocks; without it, it "
            "takes more memory than the plan"
        )
    if stage == 3:
        notes += kept_note(plan, "deepspeed") + sync_note(plan, "deepspeed")
    if ordered(plan, plan.mesh_axes) != ordered(plan, AXES):
        notes.append(order_note(plan, "deepspeed"))
    notes += whole_layers_notes(plan)
    return document


_AUTO = "auto"
"""Value that the Hugging Face Trainer replaces by one from its TrainingArguments."""

TRAINER_MICRO_BATCH = 8
"""Default of per_device_train_batch_size in TrainingArguments (transformers 4 and 5)."""

_ADAM = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")


def read_deepspeed(document: Mapping[str, Any], num_devices: int) -> Layout:
    """The layout of a DeepSpeed configuration on a number of GPUs. Recompute is set in the script, so it is left open.
    Values that are "auto" are left open, too: with_flags in imports.py asks for them, or takes the Trainer's default.

    Raises ValueError that names the key which is wrong or not understood.
    """
    for key, reason in _REFUSED.items():
        section = document.get(key)
        if section and not (isinstance(section, Mapping) and section.get("enabled") is False):
            raise ValueError(f"{key}: {reason}")
    document = _with_today_s_bf16(document)
    ignored = unknown_keys(document, _KEYS, "deepspeed", "")
    if document and not document.keys() & _KEYS:
        raise ValueError(
            "none of its keys says a layout of DeepSpeed, as zero_optimization or train_micro_batch_size_per_gpu do: "
            "give the configuration that the script passes to DeepSpeed"
        )
    ignored += unknown_keys(mapping(document, "tensor_parallel"), _TENSOR_KEYS, "deepspeed", "tensor_parallel.")
    zero = mapping(document, "zero_optimization")
    _refuse_in_zero(zero)
    ignored += unknown_keys(zero, {*_ZERO_KEYS, *_ZERO_REFUSED}, "deepspeed", "zero_optimization.")
    stage = number(zero, "stage", 0, least=0)
    if stage > 3:
        raise ValueError(f"zero_optimization.stage: {stage}; choose 0, 1, 2 or 3")
    tensor = _read_tensor(mapping(document, "tensor_parallel"))
    offload = mapping(zero, "offload_optimizer").get("device")
    if offload in ("cpu", "nvme") and stage == 0:
        raise ValueError(
            f"zero_optimization.offload_optimizer.device: {offload} and stage: 0, which has no optimizer of ZeRO to "
            "offload: give stage 1 or more, or leave it out"
        )
    data = left_over(num_devices, tensor, "autotp_size")
    micro, steps, batch = _batch_sizes(document, data)
    precision, asks = _read_precision(document)
    notes = ["activation checkpointing is said in the script: chosen at its best here"]
    if precision == "fp32" and not asks:
        notes.append("neither bf16 nor fp16 is enabled, so DeepSpeed computes in fp32")
    return Layout(
        target="deepspeed",
        data_replicate=1 if stage else data,
        data_shard=data if stage else 1,
        tensor=tensor,
        reshard="all" if stage == 3 else "none",
        sync_every=stage >= 2,
        micro_batch=micro,
        num_microbatches=steps,
        global_batch=batch if batch is not None else micro * steps * data if micro and steps else None,
        precision=None if asks else precision,
        sgd=_read_optimizer(document),
        offload_optimizer=offload in ("cpu", "nvme"),
        ignored=tuple(ignored),
        notes=tuple(notes),
        asks=asks,
        defaults=_trainer_rules(document, micro, steps, batch),
    )


def _refuse_in_zero(zero: Mapping[str, Any]) -> None:
    """Raise ValueError for a key of zero_optimization that asks for something which is not priced."""
    for key, reason in _ZERO_REFUSED.items():
        value = zero.get(key)
        unset = value is None or value is False or (value in (1, -1) and value is not True) or value == {}
        if not unset and mapping(zero, key).get("device") != "none":
            raise ValueError(f"zero_optimization.{key}: {reason}")


def _batch_sizes(document: Mapping[str, Any], data: int) -> tuple[int | None, int | None, int | None]:
    """(samples of a GPU's micro-batch, micro-batches of a step, samples of a step on all GPUs), each None if it is left
    open. data: number of data ranks. Raises ValueError unless the first two times `data` are the third."""
    micro, steps, batch = (
        None if document.get(key) in (None, _AUTO) else number(document, key, 1)
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    if micro is None and batch is not None and steps is not None:
        micro, rest = divmod(batch, steps * data)
        if rest or not micro:
            raise ValueError(
                f"train_batch_size {batch} is no multiple of gradient_accumulation_steps x data ranks = {steps} x "
                f"{data}: change one of them"
            )
    if None not in (micro, steps, batch) and (micro or 1) * (steps or 1) * data != batch:
        raise ValueError(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x data "
            f"ranks = {micro} x {steps} x {data}: change one of them"
        )
    if micro is not None and batch is None and "gradient_accumulation_steps" not in document:
        batch = None if document.get("train_batch_size") == _AUTO else micro * data
    return micro, steps, batch


def _with_today_s_bf16(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with bf16 under its present name. Raises ValueError if the two names have different values."""
    if _OLD_BF16 not in document:
        return document
    old, new = (mapping(document, name).get("enabled", False) for name in (_OLD_BF16, "bf16"))
    if "bf16" in document and old != new:
        raise ValueError(f"{_OLD_BF16}.enabled: {old} and bf16.enabled: {new} contradict each other: leave out one")
    rest = {key: value for key, value in document.items() if key != _OLD_BF16}
    return {"bf16": document[_OLD_BF16], **rest}


def _read_tensor(section: Mapping[str, Any]) -> int:
    """Number of tensor ranks of AutoTP. Raises ValueError if its two keys differ."""
    size = number(section, "autotp_size", 1, least=0) or 1
    inner = mapping(section, "tp")
    if "tp_size" in inner and number(inner, "tp_size", 1) != size:
        raise ValueError(
            f"tensor_parallel.tp.tp_size: {inner['tp_size']} and tensor_parallel.autotp_size: "
            f"{section.get('autotp_size', 0)} contradict each other: leave out one"
        )
    return size


def _read_precision(document: Mapping[str, Any]) -> tuple[Precision, tuple[tuple[str, str], ...]]:
    """(the precision that is enabled, what to ask the user if the Trainer's flags decide it)."""
    names: tuple[Precision, ...] = ("bf16", "fp16")
    asked = [name for name in names if mapping(document, name).get("enabled") == _AUTO]
    enabled = [name for name in names if mapping(document, name).get("enabled") is True]
    if len(enabled) > 1:
        raise ValueError("bf16.enabled and fp16.enabled are both true: DeepSpeed takes one of them")
    if enabled or not asked:
        return (enabled[0] if enabled else "fp32"), ()
    flags = " and ".join(f'{name}.enabled is "auto"' for name in asked)
    return "fp32", (
        (
            "precision",
            f"{flags}, which the Trainer fills in from its --bf16 or --fp16: give --precision bf16, or fp32 if it runs "
            "with neither",
        ),
    )


def _trainer_rules(
    document: Mapping[str, Any], micro: int | None, steps: int | None, batch: int | None
) -> tuple[tuple[str, int, str], ...]:
    """(field of Layout, value, reason) for sizes that are "auto": defaults of TrainingArguments."""
    found: list[tuple[str, int, str]] = []
    if micro is None and document.get("train_micro_batch_size_per_gpu") == _AUTO:
        rule = (
            f'train_micro_batch_size_per_gpu is "auto": {TRAINER_MICRO_BATCH}, the per_device_train_batch_size of '
            "TrainingArguments if none is given; --micro-batch changes it"
        )
        found.append(("micro_batch", TRAINER_MICRO_BATCH, rule))
    if steps is None and batch is None and document.get("gradient_accumulation_steps") == _AUTO:
        rule = 'gradient_accumulation_steps is "auto": 1, as in TrainingArguments; --global-batch changes it'
        found.append(("num_microbatches", 1, rule))
    return tuple(found)


def _read_optimizer(document: Mapping[str, Any]) -> bool | None:
    """Whether the optimizer is plain SGD; None if the script makes it. Raises ValueError for optimizers whose cost is
    not known."""
    kind = mapping(document, "optimizer").get("type")
    if kind is None:
        return None
    if str(kind).lower() not in ("sgd", *_ADAM):
        raise ValueError(f"optimizer.type: {kind}; adam, adamw and sgd are priced")
    return str(kind).lower() == "sgd"
