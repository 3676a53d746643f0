"""What a row ran, in the planner's words: model sizes, shape, stages; what was assumed, and what had to be dropped."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from meshwright.planner.plan.document import EXECUTABLE_RECOMPUTES, ContextKind, Recompute
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.shape import Shape
from meshwright.planner.plan.training import Precision

from .known import KNOWN, Known, like_parameters
from .models import Latent, Mixture, Sizes, StateSpace
from .rows import Row


class CannotPriceError(ValueError):
    """A row that cannot be put in the planner's words, even nearly."""


DEFAULTS: dict[str, Any] = {
    "vocab": 51200,  # Megatron's GPT-2 vocabulary, padded
    "micro_batch": 1,
    "micro_batch of litgpt": 4,  # its own default for pretraining
    "compile of torchtitan in fp8": True,  # its float8.md asks for it; asynchronous tensor parallelism refuses without
    "num_microbatches of torchtitan": "as many as ranks of the pipeline, its own default in 2024",
    "num_microbatches": 1,  # where the global batch is unknown: one micro-batch on each rank
    "zero_stage": 1,  # the distributed optimizer
    "sp": True,  # sequence parallelism beside tensor parallelism in Megatron since 2022, on where it is not said
    "recompute": "none, or selective where that does not fit, or (not in mixtures) full",
    "moe_dispatcher": "a token once to each host, as DeepEP does",
    "schedule": "1f1b where there is a pipeline",
    "vpp": 2,  # where a schedule is interleaved, in as many parts as are not told; or as the layers of a stage divide
    "n_dense_layers": 0,
    "n_shared_experts": 0,
    "ep": 1,
    "seq_len": 4096,
    "attn_type": "MLA(q_lora1536,kv_lora512,rope64)",  # DeepSeek-V2 and V3, where latent attention has no numbers
    "cp_comm_type": {"torchtitan": "all_gather", "Meta": "all_gather", "InternEvo": "all_to_all", "": "ring"},
    "expert balance": 1.1,  # busiest rank over the mean, where routing is not said to be forced even
}
"""Field -> what a user has where a row does not say: one table for all rows."""

APPROXIMATIONS = (
    "adapters cost nothing",
    "a dense model of the active parameters",
    "schedule without interleaving",
)
"""What is priced although the planner, or the row, does not say enough to price it exactly."""

UNFUSED = ("Megatron-LM", "Megatron-DeepSpeed", "Megatron-LM fork", "DeepSpeed ZeRO-3", "Alpa")
"""Frameworks that on V100, A100 and A800 keep the matrix of scores, with dropout, as GPT was trained before
FlashAttention; exceptions in FUSED_SINCE."""

FUSED_SINCE = ("MegaScale", "FlashAttention")
"""Words in source or notes that say otherwise."""

UNFUSED_DROPOUT = 0.1

EVEN_ROUTING = "(?<!un)(?<!not force-)balanced|forced balance"
"""Words of notes that say that each expert gets as many tokens."""

_RECOMPUTES: tuple[Recompute, ...] = EXECUTABLE_RECOMPUTES

_PARTS: dict[str, tuple[str, ...]] = {
    "mla_up_proj": ("attention.query", "attention.up"),
    "core_attn": ("attention:attention",),
    "mlp": ("feed_forward.up", "feed_forward.gate", "feed_forward.down"),
    "moe_act": ("feed_forward.experts:elementwise",),
    "shared_experts": ("feed_forward.shared",),
    "moe": ("feed_forward.router", "feed_forward.experts", "feed_forward.shared"),
    "layernorm": ("norm1", "norm2"),
}
"""Modules that Megatron recomputes one by one -> parts of our blocks."""

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
    repeated: tuple[str, ...] = ()
    """Single modules that every block runs again beside its recompute; see single_modules.py."""
    offloaded: int = 0
    """First blocks of the model whose activations wait in the host's memory."""
    imbalance: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean."""
    assumed: tuple[str, ...] = field(default=(), compare=False)
    dropped: tuple[str, ...] = field(default=(), compare=False)


def setting_of(row: Row) -> Setting:
    """The nearest setting that the planner can express. Raises CannotPriceError where none is near."""
    assumed: list[str] = []
    sizes = _sizes(row, assumed)
    if "lora" in str(row.config["task"]).lower() or "peft" in str(row.config["task"]).lower():
        assumed.append("adapters cost nothing")
        sizes = replace(sizes, frozen=True)
    recompute, recomputed, parts = _recompute(row, assumed)
    shape, global_batch = _shape(row, sizes, assumed)
    extra = _extra_blocks(row)
    blocks = _blocks(row, sizes.num_layers - extra, shape.pipeline, shape.virtual_stages)
    blocks = (*blocks[:-1], blocks[-1] + extra)
    software = _software(row, shape.expert, assumed)
    even = re.search(EVEN_ROUTING, row.notes) is not None
    if shape.expert > 1 and not even:
        assumed.append("expert balance")
    return Setting(
        name=row.model["name"],
        sizes=sizes,
        shape=shape,
        global_batch=global_batch,
        blocks=blocks,
        recompute=recompute,
        recomputed=recomputed,
        repeated=parts,
        offloaded=row.config["cpu_offload_layers"] or 0,
        imbalance=1.0 if even or shape.expert == 1 else DEFAULTS["expert balance"],
        software=software,
        precision=_precision(row),
        assumed=tuple(name for name in assumed if name not in APPROXIMATIONS),
        dropped=tuple(name for name in assumed if name in APPROXIMATIONS),
    )


def _sizes(row: Row, assumed: list[str]) -> Sizes:
    model, known = row.model, _known(row, assumed)
    gpt = model["arch"] == "gpt"
    unfused = _is_unfused(row)
    positions: Literal["learned", "rope", "none"] = "learned" if gpt else "rope"
    if model["pos_emb"] is not None:
        positions = {"learned": "learned", "rope": "rope"}.get(model["pos_emb"], "none")  # type: ignore[assignment]

    def told(key: str, otherwise: Any) -> Any:
        """The row's number, or that of the known model, or the default, which is said to be assumed."""
        value = model[key] if model[key] is not None else getattr(known, key, None)
        if value is None:
            assumed.append(key)
            return otherwise
        return value

    layers, hidden = told("n_layers", None) + _extra_blocks(row), told("hidden", None)
    heads = told("n_heads", max(1, hidden // 128))
    gated = told("gated_mlp", not gpt)
    return Sizes(
        num_layers=layers,
        width=hidden,
        num_heads=heads,
        num_kv_heads=model["n_kv_heads"] or known.n_kv_heads or heads,
        head_width=model["head_dim"] or known.head_dim or hidden // heads,
        feed_forward=told("ffn_hidden", 4 * hidden),
        vocabulary=told("vocab", DEFAULTS["vocab"]),
        seq_len=told("seq_len", DEFAULTS["seq_len"]),
        gated=gated,
        rms_norm=not gpt,
        biases=gpt,
        tied=told("tied_embeddings", gpt),
        positions=positions,
        attention="eager" if unfused else "fused",
        dropout=UNFUSED_DROPOUT if unfused else 0.0,
        latent=_latent(model["attn_type"], assumed),
        mixture=_mixture(row, known, assumed),
        pattern=known.pattern or _hybrid_pattern(row, layers, assumed),
        mamba=known.mamba or StateSpace(max(1, 2 * hidden // 64), 64, 128),
    )


def _hybrid_pattern(row: Row, layers: int, assumed: list[str]) -> str:
    """Layers of a hybrid of which nothing is known but that it has Mamba layers: like Nemotron-H, attention in one of
    twelve, of the rest mixers and feed-forwards (or mixtures) in turn. "" for models without."""
    if "mamba" not in str(row.model["arch"]):
        return ""
    assumed.append("pattern of layers")
    behind = "E" if row.model["n_experts"] is not None else "-"
    return "".join("*" if i % 12 == 11 else "M" if i % 2 == 0 else behind for i in range(layers))


def _extra_blocks(row: Row) -> int:
    """Blocks that a recipe trains beside the model's own, to predict one more token (DeepSeek-V3); their head is left
    out."""
    return int("mtp_num_layers=1" in row.notes and "w/o MTP" not in row.notes)


def _known(row: Row, assumed: list[str]) -> Known:
    """What is known of a row's model beside the row: by its name, or for lack of that by its size."""
    model = row.model
    by_name = next((known for name, known in KNOWN.items() if str(model["name"]).startswith(name)), Known())
    missing = [key for key in ("n_layers", "hidden") if model[key] is None and getattr(by_name, key) is None]
    if by_name.hidden is not None or not missing:
        return by_name
    billions = _active_billions(row) or model.get("params_b")
    if billions is None:
        raise CannotPriceError(f"model.{missing[0]} is not published, and neither is the number of parameters")
    assumed.append("a Llama of as many parameters")
    return like_parameters(1e9 * float(billions))


def _active_billions(row: Row) -> float | None:
    """Parameters, in billions, that each token of a mixture uses, where its name says so: Qwen3-30B-A3B."""
    found = re.search(r"-A(\d+(?:\.\d+)?)B", str(row.model["name"]))
    return None if found is None else float(found.group(1))


def _is_unfused(row: Row) -> bool:
    framework = str(row.config["framework"]).split(" (")[0]
    old = any(str(row.cluster["gpu"]).startswith(name) for name in ("V100", "A100", "A800"))
    told = f"{row.source} {row.software} {row.notes} {row.config['framework']}".replace("pre-FlashAttention", "")
    return framework in UNFUSED and old and not any(word in told for word in FUSED_SINCE)


def _latent(text: str | None, assumed: list[str]) -> Latent | None:
    """MLA(q_lora1536,kv_lora512,rope64) as numbers."""
    if text is None or not text.startswith("MLA"):
        return None
    pattern = r"q_lora\s*(\d+|none),\s*kv_lora\s*(\d+),\s*rope\s*(\d+)"
    found = re.search(pattern, text)
    if found is None:
        assumed.append("attn_type")
        found = re.search(pattern, DEFAULTS["attn_type"])
    assert found is not None
    query, key_value, rotary = found.groups()
    return Latent(None if query == "none" else int(query), int(key_value), int(rotary))


def _mixture(row: Row, known: Known, assumed: list[str]) -> Mixture | None:
    model = row.model
    count = model["n_experts"] or known.n_experts
    if count is None:
        if row.is_moe:
            assumed.append("a dense model of the active parameters")
        return None
    top_k, width = model["topk"] or known.topk, model["moe_ffn_hidden"] or known.moe_ffn_hidden
    if top_k is None:
        assumed.append("topk")
    if width is None:
        assumed.append("moe_ffn_hidden")
    shared, dense = (
        getattr(known, key) if model[key] is None else model[key] for key in ("n_shared_experts", "n_dense_layers")
    )
    assumed += [key for key, value in (("n_shared_experts", shared), ("n_dense_layers", dense)) if value is None]
    return Mixture(
        count=count,
        top_k=min(count, top_k or 2),
        width=width or model["ffn_hidden"] or 4 * model["hidden"],
        shared=DEFAULTS["n_shared_experts"] if shared is None else shared,
        dense_layers=DEFAULTS["n_dense_layers"] if dense is None else dense,
        groups=known.n_groups,
        chosen_groups=known.topk_groups,
    )


def _recompute(row: Row, assumed: list[str]) -> tuple[RowRecompute, int | None, tuple[str, ...]]:
    """(recompute, blocks of each stage that are recomputed if not all, parts of blocks that are recomputed)."""
    told, detail = row.config["recompute"], str(row.config["recompute_detail"])
    if told is None:
        assumed.append("recompute")
        return "if needed", None, ()
    megatron = any(word in str(row.config["framework"]) for word in ("Mega", "NeMo", "MegaScale"))
    if told == "selective":
        words = re.findall(r"[a-z_]+", detail)
        modules = [word for word in words if word in _PARTS] or (["core_attn"] if megatron else [])
        if not modules:
            return "selective", None, ()
        parts = tuple(dict.fromkeys(part for module in modules for part in _PARTS[module]))
        return ("attention" if "core_attn" in modules else "none"), None, parts
    if told in _RECOMPUTES:
        return told, None, ()
    found = re.search(r"(\d+) layers per virtual stage", detail)
    if found is not None:
        return "full", int(found.group(1)), ()
    assumed.append("recompute")
    return ("full" if "full" in str(told) else "selective"), None, ()


def _shape(row: Row, sizes: Sizes, assumed: list[str]) -> tuple[Shape, int]:
    config = row.config
    tensor, pipeline, context = (config[key] or 1 for key in ("tp", "pp", "cp"))
    devices = row.cluster["n_gpus"]
    data, rest = divmod(devices, tensor * pipeline * context)
    if rest:
        raise CannotPriceError(f"tp x pp x cp = {tensor} x {pipeline} x {context} does not divide the {devices} GPUs")
    if config["dp"] is not None and config["dp"] != data:
        assumed.append("dp")
    global_batch, micro_batch, microbatches = _batches(row, data, assumed)
    zero = config["zero_stage"]
    if zero is None:
        assumed.append("zero_stage")
        zero = 3 if config["fsdp"] else DEFAULTS["zero_stage"]
    sequence = config["sp"]
    if sequence is None:
        sequence = DEFAULTS["sp"] if tensor > 1 else False
    sequence = bool(sequence) and tensor > 1
    shard = 1 if zero == 0 else math.gcd(data, config["shard_group"] or data)
    expert = _expert(row, sizes, shard * context * (tensor if sequence else 1), assumed)
    schedule, virtual = _schedule(row, sizes.num_layers - _extra_blocks(row), pipeline, microbatches, assumed)
    layerwise = zero == 3 and not (pipeline > 1 and "torchtitan" in str(config["framework"]))
    shape = Shape(
        data_replicate=data // shard,
        data_shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=micro_batch,
        num_microbatches=microbatches,
        sequence=sequence,
        schedule=schedule,
        virtual_stages=virtual,
        # a pipeline of Megatron's reduces once per step whatever the ZeRO stage; FSDP after every micro-batch, but not
        # in torch's pipelines, where layers stay gathered as well (torchtitan's reshard_after_forward = "default")
        gradient_sync="every" if shard > 1 and (layerwise or (zero == 2 and pipeline == 1)) else "last",
        reshard=layerwise and shard * context > 1,
        context=context,
        context_kind=_context_kind(row),
        expert=expert,
    )
    return shape, global_batch


def _batches(row: Row, data: int, assumed: list[str]) -> tuple[int, int, int]:
    """(global batch, micro-batch, micro-batches). What does not divide is said: the micro-batch is then the largest
    that does, and ranks without a sample of their own get one."""
    config = row.config
    global_batch, micro_batch = config["global_batch"], config["micro_batch"]
    assumed += [key for key in ("global_batch", "micro_batch") if config[key] is None]
    litgpt = " of litgpt" if "litgpt" in str(config["framework"]) else ""
    pipeline = config["pp"] or 1
    if micro_batch is None and global_batch is not None and pipeline > 1 and "torchtitan" in str(config["framework"]):
        micro_batch = max(1, global_batch // data // pipeline)
    micro_batch = micro_batch or DEFAULTS["micro_batch" + litgpt]
    samples, rest = divmod(global_batch or DEFAULTS["num_microbatches"] * micro_batch * data, data)
    if rest:
        assumed.append("global_batch as a multiple of the data ranks")
        samples += 1
    if samples % micro_batch:
        assumed.append("micro_batch as a divisor")
        micro_batch = max(size for size in range(1, min(micro_batch, samples) + 1) if samples % size == 0)
    return samples * data, micro_batch, samples // micro_batch


def _expert(row: Row, sizes: Sizes, ranks: int, assumed: list[str]) -> int:
    """Expert-parallel degree; experts are spread over ranks with tokens of their own, and not cut by tensor
    parallelism."""
    if sizes.mixture is None:
        return 1
    if row.config["ep"] is None:
        assumed.append("ep")
    wanted = row.config["ep"] or DEFAULTS["ep"]
    expert = math.gcd(wanted, sizes.mixture.count, ranks)
    if expert != wanted:
        assumed.append("ep as a divisor of ranks and experts")
    return expert


def _context_kind(row: Row) -> ContextKind:
    framework = str(row.config["framework"])
    kinds: dict[str, ContextKind] = DEFAULTS["cp_comm_type"]
    return next(kind for word, kind in kinds.items() if word in framework)


def _schedule(row: Row, num_layers: int, pipeline: int, microbatches: int, assumed: list[str]) -> tuple[Schedule, int]:
    """(the nearest schedule, stages of each rank)."""
    told, virtual = str(row.config["schedule"]), row.config["vpp"]
    if pipeline == 1:
        return "none", 1
    if row.config["schedule"] in (None, "none") or "not stated" in told:
        assumed.append("schedule")
    if told in _ZERO_BUBBLE:
        return _ZERO_BUBBLE[told], 2 if told == "zb-v" else 1
    zero_bubble = "zero-bubble" in told or "dualpipe" in told.lower()
    interleaved = told.startswith("interleaved") or "looped" in told
    if interleaved or (virtual or 1) > 1:
        if virtual is None:
            assumed.append("vpp")
        virtual = virtual or _pieces(num_layers, pipeline)
        in_rounds = microbatches % max(1, microbatches // pipeline) == 0
        if virtual > 1 and in_rounds and num_layers + 2 >= pipeline * virtual:
            return ("zb-h1" if zero_bubble else "interleaved"), virtual
        if virtual > 1:
            assumed.append("schedule without interleaving")
    if zero_bubble:
        return "zb-h1", 1
    if told not in ("1f1b", "gpipe", "None", "none") and not interleaved and "schedule" not in assumed:
        assumed.append("schedule")
    return "gpipe" if "gpipe" in told.lower() else "1f1b", 1


def _pieces(num_layers: int, pipeline: int) -> int:
    """Stages of each rank where an interleaved schedule does not tell them: as usual, but of stages of equal layers the
    fewest that leave as many layers in each (three layers are no two pieces)."""
    layers, left = divmod(num_layers, pipeline)
    usual: int = DEFAULTS["vpp"]
    if left or layers < usual:
        return usual
    return next(pieces for pieces in range(usual, layers + 1) if layers % pieces == 0)


def _blocks(row: Row, layers: int, pipeline: int, virtual: int) -> tuple[int, ...]:
    """Blocks of each stage: as the row lays them out; else evenly. Where they do not divide: embedding and head count
    as one each if that makes them; else InternEvo levels them, and Megatron fills every stage but the last."""
    chunks = pipeline * virtual
    laid_out = _laid_out(str(row.config["pp_layout"]))
    if layers < pipeline:
        raise CannotPriceError(f"{layers} layers on {pipeline} stages")
    if len(laid_out) == chunks and sum(laid_out) == layers:
        return laid_out
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


def _laid_out(text: str) -> tuple[int, ...]:
    """Blocks of each stage out of Megatron's notation: Et*4|(t*4|)*14tmL is an embedding and four blocks, 14 stages of
    four, and a last one."""
    spread = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found.group(1) * int(found.group(2)), text)
    spread = re.sub(r"(\w)\*(\d+)", lambda found: found.group(1) * int(found.group(2)), spread)
    return tuple(stage.count("t") for stage in spread.split("|"))


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
    "InternEvo": "megatron-2023",
}
"""Words a framework begins with -> the training stack; others are Megatron's: of 2021 where attention is not fused, of
2023 where it is known that communication is waited for (Megatron-LM beside MegaScale, and SimuMax's runs)."""


def _dispatches_once(row: Row, expert: int, assumed: list[str]) -> bool:
    """Whether a token goes once to each host with experts of its, as DeepEP and HybridEP send it. Megatron's rows whose
    recompute is known come with all that their recipe sets (see the data's README): what it leaves is all-to-all."""
    told = row.config["moe_dispatcher"]
    if expert == 1:
        return False
    if _is_dropless(row):
        return True
    if told is None:
        of_recipe = "Megatron" in str(row.config["framework"]) and row.config["recompute"] is not None
        if "DeepEP" not in row.notes and not of_recipe:
            assumed.append("moe_dispatcher")
        return not of_recipe
    return any(word in str(told).lower() for word in ("deepep", "hybridep", "flex"))


def _is_dropless(row: Row) -> bool:
    """Whether a row is of the release whose tables tell mixtures that drop tokens from those that do not. Its script
    (Megatron-Bridge 0.1, scripts/performance/run_script.py) runs the latter with DeepEP, and overlaps exchanges with
    another micro-batch of 1F1B."""
    return "(dropless)" in row.notes


def _overlaps_experts(row: Row) -> bool:
    """Whether exchanges of tokens hide behind another micro-batch's work."""
    told = re.search(r"EP[ -]overlap(?!-off)", row.notes, re.IGNORECASE) is not None
    return row.config["moe_a2a_overlap"] is True or told or _is_dropless(row)


def _software(row: Row, expert: int, assumed: list[str]) -> str:
    """The training stack of a row, by framework and time, with what it has switched on."""
    config = row.config
    framework = str(config["framework"])
    stack = next((name for word, name in SOFTWARE.items() if framework.startswith(word)), None)
    if stack is None and _is_unfused(row):
        stack = "zero3-2021" if "ZeRO-3" in framework else "megatron-2021"
    if stack is None:
        waits = framework == "Megatron-LM" or "overlap paths off" in row.notes
        stack = "megatron-2023" if waits else "megatron-core"
    if stack == "fsdp2-eager" and (_is_compiled(row, assumed) or "thunder" in framework):
        stack = "fsdp2-compile"
    variants = {
        "overlapped-tensor": config["async_tp"] is True,
        "half-gradients": _reduces_half(stack, row),
        _graphs(config["cuda_graphs"], row.notes): True,
        "once-per-host": _dispatches_once(row, expert, assumed),
        "overlapped-experts": _overlaps_experts(row),
        "deepspeed": framework.startswith("Megatron-DeepSpeed") and "2021" not in row.software,
        "deepspeed-2021": framework.startswith("Megatron-DeepSpeed") and "2021" in row.software,
        "pure-16-bit": framework.startswith("litgpt +"),
        "deepspeed-bf16": framework.startswith("Megatron-DeepSpeed")
        and "bf16" in str(config["precision"])
        and not _adds_up_in_bf16(row),
        "flat-optimizer": framework.startswith("InternEvo"),
        "half-moments": framework.startswith("Megatron-Bridge") and str(row.model["attn_type"]).startswith("MLA"),
        "torchtitan": framework.startswith("torchtitan"),
        "compiled-selective": stack == "fsdp2-compile" and framework.startswith("torchtitan"),
        "saves-all": "nvfuser" in framework,
        "low-precision-gathers": _gathers_fp8(row),
        "delayed-scaling": _delays_scales(row),
        "flash-2": _before_fused_attention(row),
        "token-drop": expert > 1 and any(word in row.notes for word in ("tokendrop", "token dropping")),
        "te-kernels": stack == "fsdp2-eager" and "kernels: TE" in row.notes,
        "loss-in-place": _loses_in_place(row),
        "compiled-loss": framework.startswith("torchtitan") and config["compile"] is True and _is_since_2025(row),
        "fixed-segments": framework.startswith("torchtitan") and row.software == "torch 2024-03",
    }
    return "+".join([stack, *(name for name, on in variants.items() if on and name)])


def _before_fused_attention(row: Row) -> bool:
    """Whether a row is of NeMo before August 2024, when its launcher turned cuDNN's attention off ("until we've tested
    it more", its configuration for container 24.03.01; on since pull request 422), and says of no model that it ran
    fused attention all the same. It ran FlashAttention 2 then."""
    if not re.match(r"NeMo 24\.0[1-7]", str(row.software)):
        return False
    told = re.search(r"([\w/]+) attention: TE fused", row.notes)
    return told is None or not any(str(row.model["name"]).startswith(name) for name in told.group(1).split("/"))


def _delays_scales(row: Row) -> bool:
    """Whether a row's casts to fp8 use the scale of steps before: where it says so, and of Transformer Engine before
    2025, which knew no other."""
    before = str(row.software).startswith(("NeMo 24.", "Composer 2023"))
    told = "delayed scaling" in f"{row.config['precision']} {row.notes}"
    return row.is_low_precision and (told or before)


def _is_compiled(row: Row, assumed: list[str]) -> bool:
    """Whether a row's blocks are compiled."""
    told = row.config["compile"]
    if told is None and str(row.config["framework"]).startswith("torchtitan") and row.is_low_precision:
        assumed.append("compile")
        told = DEFAULTS["compile of torchtitan in fp8"]
    return told is True


def _gathers_fp8(row: Row) -> bool:
    """Whether a row casts to fp8 what it then gathers: torchtitan, with one scale for a tensor."""
    words = str(row.config["precision"])
    scaled = row.is_low_precision and not any(word in words for word in ("row", "mx", "fp4"))
    return str(row.config["framework"]).startswith("torchtitan") and scaled


def _loses_in_place(row: Row) -> bool:
    """Whether the loss of a row is Transformer Engine's, which writes gradients over the logits: where it says that its
    cross entropy is fused (SimuMax, whose docs/strategy says by which), and in Megatron-Bridge's recipes."""
    return "cross-entropy fusion on" in row.notes or str(row.config["framework"]).startswith("Megatron-Bridge")


def _is_since_2025(row: Row) -> bool:
    """Whether a row tells a torch of 2025 or later, when torchtitan compiled the loss as well."""
    return re.search(r"torch (2025|2026|2\.[6-9]|2\.1\d)", row.software) is not None


def _reduces_half(stack: str, row: Row) -> bool:
    """Whether gradients are reduced in 16 bits where the stack usually does so in 32: Megatron of 2021 in fp16 (or in
    bf16, while it did not know better), Composer's PURE mixed precision, InternEvo, and the FSDP examples of IBM."""
    precision, framework = str(row.config["precision"]), str(row.config["framework"])
    of_precision = (stack == "megatron-2021" and ("fp16" in precision or _adds_up_in_bf16(row))) or "PURE" in precision
    return of_precision or framework.startswith(("InternEvo", "PyTorch FSDP1"))


def _adds_up_in_bf16(row: Row) -> bool:
    """Whether a row says of itself that its bf16 gradients were not yet added up in fp32."""
    return "bf16" in str(row.config["precision"]) and "before the fp32-grad-accumulation optimizer" in row.notes


def _graphs(told: object, notes: str) -> str:
    """The variant of CUDA graphs that a row tells: implementation:what of a step they hold. Where only its notes tell
    of them, they are taken to hold parts."""
    text = str(told).lower()
    if told is None and "CUDA graphs" in notes:
        return "part-graphs"
    if told in (None, False) or text.startswith("none") or text in ("no", "false"):
        return ""
    return "graphs" if "full" in text or text in ("per-layer", "local") else "part-graphs"
