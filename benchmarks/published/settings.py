"""What a row ran, in the planner's words: model sizes, shape, stages; what was assumed, and what had to be dropped."""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from meshwright.planner.plan import Recompute, Schedule
from meshwright.planner.strategy import Shape
from meshwright.planner.training import Precision

from .models import Latent, Mixture, Sizes
from .rows import Row


class CannotPriceError(ValueError):
    """A row that cannot be put in the planner's words, even nearly."""


DEFAULTS: dict[str, Any] = {
    "vocab": 51200,  # Megatron's GPT-2 vocabulary, padded
    "micro_batch": 1,
    "micro_batch of litgpt": 4,  # its own default for pretraining
    "num_microbatches": 1,  # where the global batch is unknown: one micro-batch on each rank
    "zero_stage": 1,  # the distributed optimizer
    "sp": True,  # sequence parallelism beside tensor parallelism in Megatron since 2022, on where it is not said
    "recompute": "none, or full where that does not fit",
    "schedule": "1f1b where there is a pipeline",
    "vpp": 2,  # where a schedule is interleaved, in as many parts as are not told
    "n_dense_layers": 0,
    "n_shared_experts": 0,
    "ep": 1,
}
"""Field -> what a user has where a row does not say: one table for all rows."""

UNFUSED = ("Megatron-LM", "Megatron-DeepSpeed", "Megatron-LM fork", "DeepSpeed ZeRO-3", "Alpa")
"""Frameworks that on V100, A100 and A800 keep the matrix of scores, with dropout, as GPT was trained before
FlashAttention; exceptions in FUSED_SINCE."""

FUSED_SINCE = ("MegaScale", "FlashAttention")
"""Words in source or notes that say otherwise."""

UNFUSED_DROPOUT = 0.1

_RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)

_MODULES = ("mla_up_proj", "mlp", "moe_act", "layernorm")
"""Modules that Megatron recomputes one by one; the planner knows all of a layer, its attention, or what is cheap."""

_ZERO_BUBBLE: dict[str, Schedule] = {"zb-1p": "zb-h1", "zb-2p": "zb-h2", "zb-v": "zb-v"}
"""The paper's schedules by the memory they take: as 1F1B, twice that, and ZB-V."""

RowRecompute: TypeAlias = Recompute | Literal["if needed"]


@dataclass(frozen=True)
class Setting:
    """A row as the planner can price it."""

    name: str
    sizes: Sizes
    shape: Shape
    global_batch: int
    blocks: tuple[int, ...]
    """Blocks of each stage; a rank that interleaves has several stages."""
    recompute: RowRecompute
    software: str
    precision: Precision
    recomputed: int | None = None
    """Blocks of each stage that are recomputed, where not all are."""
    assumed: tuple[str, ...] = field(default=(), compare=False)
    dropped: tuple[str, ...] = field(default=(), compare=False)


def setting_of(row: Row) -> Setting:
    """The nearest setting that the planner can express. Raises CannotPriceError where none is near."""
    assumed: list[str] = []
    dropped: list[str] = []
    if row.config["task"] == "lora":
        raise CannotPriceError("frozen parameters (LoRA)")
    sizes = _sizes(row, assumed)
    sizes = _expert_share(row, sizes, assumed, dropped)
    context = row.config["cp"] or 1
    if context > 1:
        # a sequence cut into pieces that do not see each other: right but for attention across them and its traffic
        dropped.append("context parallelism")
        if sizes.seq_len % context:
            raise CannotPriceError(f"cp={context} does not divide the sequence of {sizes.seq_len}")
        sizes = replace(sizes, seq_len=sizes.seq_len // context)
    recompute, recomputed = _recompute(row, assumed, dropped)
    shape, global_batch = _shape(row, context, assumed, dropped)
    blocks = _blocks(row, shape.pipeline, shape.virtual_stages)
    software = _software(row, dropped)
    return Setting(
        name=row.model["name"],
        sizes=sizes,
        shape=shape,
        global_batch=global_batch,
        blocks=blocks,
        recompute=recompute,
        recomputed=recomputed,
        software=software,
        precision=_precision(row),
        assumed=tuple(assumed),
        dropped=tuple(dropped),
    )


def _sizes(row: Row, assumed: list[str]) -> Sizes:
    model = row.model
    if "mamba" in str(model["arch"]):
        raise CannotPriceError("Mamba layers")
    for key in ("n_layers", "hidden", "n_heads", "ffn_hidden", "seq_len"):
        if model[key] is None:
            raise CannotPriceError(f"model.{key} is not published")
    gpt = model["arch"] == "gpt"
    unfused = _is_unfused(row)
    positions: Literal["learned", "rope", "none"] = "learned" if gpt else "rope"
    if model["pos_emb"] is not None:
        positions = {"learned": "learned", "rope": "rope"}.get(model["pos_emb"], "none")  # type: ignore[assignment]
    if model["vocab"] is None:
        assumed.append("vocab")
    if model["gated_mlp"] is None or model["tied_embeddings"] is None:
        assumed.append("gated_mlp, tied_embeddings")
    return Sizes(
        num_layers=model["n_layers"],
        width=model["hidden"],
        num_heads=model["n_heads"],
        num_kv_heads=model["n_kv_heads"] or model["n_heads"],
        head_width=model["head_dim"] or model["hidden"] // model["n_heads"],
        feed_forward=model["ffn_hidden"],
        vocabulary=model["vocab"] or DEFAULTS["vocab"],
        seq_len=model["seq_len"],
        gated=not gpt if model["gated_mlp"] is None else model["gated_mlp"],
        rms_norm=not gpt,
        biases=gpt,
        tied=gpt if model["tied_embeddings"] is None else model["tied_embeddings"],
        positions=positions,
        attention="eager" if unfused else "fused",
        dropout=UNFUSED_DROPOUT if unfused else 0.0,
        latent=_latent(model["attn_type"]),
        mixture=_mixture(row, assumed),
    )


def _is_unfused(row: Row) -> bool:
    framework = str(row.config["framework"]).split(" (")[0]
    old = any(row.cluster["gpu"].startswith(name) for name in ("V100", "A100", "A800"))
    told = f"{row.source} {row.software} {row.notes} {row.config['framework']}"
    return framework in UNFUSED and old and not any(word in told for word in FUSED_SINCE)


def _latent(text: str | None) -> Latent | None:
    """MLA(q_lora1536,kv_lora512,rope64) as numbers."""
    if text is None or not text.startswith("MLA"):
        return None
    found = re.search(r"q_lora\s*(\d+|none),\s*kv_lora\s*(\d+),\s*rope\s*(\d+)", text)
    if found is None:
        raise CannotPriceError(f"attention {text!r}")
    query, key_value, rotary = found.groups()
    return Latent(None if query == "none" else int(query), int(key_value), int(rotary))


def _mixture(row: Row, assumed: list[str]) -> Mixture | None:
    model = row.model
    if model["n_experts"] is None:
        if row.is_moe:
            raise CannotPriceError("model.n_experts is not published")
        return None
    for key in ("topk", "moe_ffn_hidden"):
        if model[key] is None:
            raise CannotPriceError(f"model.{key} is not published")
    assumed += [key for key in ("n_shared_experts", "n_dense_layers") if model[key] is None]
    return Mixture(
        count=model["n_experts"],
        top_k=model["topk"],
        width=model["moe_ffn_hidden"],
        shared=model["n_shared_experts"] or DEFAULTS["n_shared_experts"],
        dense_layers=model["n_dense_layers"] or DEFAULTS["n_dense_layers"],
    )


def _expert_share(row: Row, sizes: Sizes, assumed: list[str], dropped: list[str]) -> Sizes:
    """The model with one expert-parallel rank's experts; balanced routing brings them as many tokens as it has."""
    if sizes.mixture is None:
        return sizes
    if row.config["ep"] is None:
        assumed.append("ep")
    expert = row.config["ep"] or DEFAULTS["ep"]
    if expert == 1:
        return sizes
    dropped.append("expert parallelism")
    if sizes.mixture.count % expert:
        raise CannotPriceError(f"ep={expert} does not divide {sizes.mixture.count} experts")
    return replace(sizes, mixture=replace(sizes.mixture, held=sizes.mixture.count // expert))


def _recompute(row: Row, assumed: list[str], dropped: list[str]) -> tuple[RowRecompute, int | None]:
    told, detail = row.config["recompute"], str(row.config["recompute_detail"])
    if told is None:
        assumed.append("recompute")
        return "if needed", None
    if told == "selective":
        if any(word in detail for word in _MODULES):
            dropped.append("recompute of single modules")
            return "none", None
        megatron = any(word in str(row.config["framework"]) for word in ("Mega", "NeMo", "MegaScale"))
        return "attention" if megatron or "core_attn" in detail else "selective", None
    if told in _RECOMPUTES:
        return told, None
    found = re.search(r"(\d+) layers per virtual stage", detail)
    if found is None:
        raise CannotPriceError(f"recompute {told!r} ({detail})")
    return "full", int(found.group(1))


def _shape(row: Row, context: int, assumed: list[str], dropped: list[str]) -> tuple[Shape, int]:
    config = row.config
    tensor, pipeline, devices = config["tp"] or 1, config["pp"] or 1, row.cluster["n_gpus"]
    data, rest = divmod(devices, tensor * pipeline)
    if rest or (config["dp"] is not None and config["dp"] * context != data):
        raise CannotPriceError(
            f"dp x tp x pp x cp = {config['dp']} x {tensor} x {pipeline} x {context} is not the {devices} GPUs"
        )
    global_batch, micro_batch = config["global_batch"], config["micro_batch"]
    assumed += [key for key in ("global_batch", "micro_batch") if config[key] is None]
    litgpt = " of litgpt" if "litgpt" in str(config["framework"]) else ""
    micro_batch = micro_batch or DEFAULTS["micro_batch" + litgpt]
    global_batch = (global_batch or DEFAULTS["num_microbatches"] * micro_batch * (data // context)) * context
    microbatches, rest = divmod(global_batch, micro_batch * data)
    if rest or not microbatches:
        raise CannotPriceError(f"{data} ranks of micro-batches of {micro_batch} do not make up {global_batch} samples")
    zero = config["zero_stage"]
    if zero is None:
        assumed.append("zero_stage")
        zero = 3 if config["fsdp"] else DEFAULTS["zero_stage"]
    shard = 1 if zero == 0 else min(data, (config["shard_group"] or data // context) * context)
    if data % shard:
        raise CannotPriceError(f"shard groups of {shard} do not divide {data} data ranks")
    sequence = config["sp"]
    if sequence is None:
        sequence = DEFAULTS["sp"] if tensor > 1 else False
    schedule, virtual = _schedule(row, pipeline, microbatches, assumed, dropped)
    shape = Shape(
        data_replicate=data // shard,
        data_shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=micro_batch,
        num_microbatches=microbatches,
        sequence=bool(sequence) and tensor > 1,
        schedule=schedule,
        virtual_stages=virtual,
        # a pipeline of Megatron's reduces once per step whatever the ZeRO stage; FSDP after every micro-batch
        gradient_sync="every" if shard > 1 and (zero == 3 or (zero == 2 and pipeline == 1)) else "last",
        reshard=zero == 3 and shard > 1,
    )
    return shape, global_batch


def _schedule(
    row: Row, pipeline: int, microbatches: int, assumed: list[str], dropped: list[str]
) -> tuple[Schedule, int]:
    """(the nearest schedule, stages of each rank)."""
    told, virtual = str(row.config["schedule"]), row.config["vpp"]
    if pipeline == 1:
        return "none", 1
    if row.config["schedule"] in (None, "none") or "not stated" in told:
        assumed.append("schedule")
    if told in _ZERO_BUBBLE:
        return _ZERO_BUBBLE[told], 2 if told == "zb-v" else 1
    if "zero-bubble" in told:
        dropped.append("interleaved zero-bubble schedules")
    if told.startswith("interleaved") or (virtual or 1) > 1:
        if virtual is None:
            assumed.append("vpp")
        virtual = virtual or DEFAULTS["vpp"]
        return ("interleaved", virtual) if virtual > 1 else ("1f1b", 1)
    if microbatches < pipeline:
        dropped.append("1F1B with fewer micro-batches than stages")
        return "gpipe", 1
    return "gpipe" if told == "gpipe" else "1f1b", 1


def _blocks(row: Row, pipeline: int, virtual: int) -> tuple[int, ...]:
    """Blocks of each stage. Where they do not divide evenly: embedding and head count as one each if that makes them;
    else InternEvo levels them, and Megatron fills every stage but the last."""
    layers, chunks = row.model["n_layers"], pipeline * virtual
    if layers < pipeline:
        raise CannotPriceError(f"{layers} layers on {pipeline} stages")
    if layers % chunks == 0:
        counts = [layers // chunks] * chunks
    elif (layers + 2) % chunks == 0:
        counts = [(layers + 2) // chunks] * chunks
        counts[0] -= 1
        counts[-1] -= 1
    elif row.config["framework"] == "InternEvo" or -(-layers // chunks) * (chunks - 2) >= layers:
        counts = [layers // chunks + (index < layers % chunks) for index in range(chunks)]
    else:
        most = -(-layers // chunks)
        counts = [max(0, min(most, layers - most * index)) for index in range(chunks)]
    return tuple(counts)


def _precision(row: Row) -> Precision:
    told = str(row.config["precision"])
    return "fp4" if "fp4" in told else "fp8" if row.is_low_precision else "bf16"


SOFTWARE = {
    "Composer": "fsdp1-flash1",
    "PyTorch FSDP1": "fsdp2-eager",
    "torchtitan": "fsdp2-eager",
    "litgpt": "fsdp2-eager",
    "Lightning": "fsdp2-eager",
    "NeMo Automodel": "fsdp2-eager",
}
"""Words a framework begins with -> the training stack; others are Megatron's, of 2021 where attention is not fused."""


def _software(row: Row, dropped: list[str]) -> str:
    """The training stack of a row, by framework and time; choices that the cost model does not know."""
    config = row.config
    framework = str(config["framework"])
    stack = next((name for word, name in SOFTWARE.items() if framework.startswith(word)), None)
    stack = stack or ("megatron-2021" if _is_unfused(row) else "megatron-core")
    if stack == "fsdp2-eager" and (config["compile"] is True or "thunder" in framework):
        stack = "fsdp2-compile"
    if config["async_tp"] is True:
        dropped.append("asynchronous tensor parallelism")
    if config["cuda_graphs"] not in (None, "none", False):
        dropped.append("CUDA graphs")
    if config["cpu_offload_layers"]:
        dropped.append("CPU offload")
    return stack
