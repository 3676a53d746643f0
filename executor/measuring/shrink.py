"""Shrinks a Hugging Face config to a model that trains in a moment, and can be cut as finely as a plan cuts the
whole."""

import json
from pathlib import Path
from typing import Any

from ...planner.plan.document import Degrees
from ...profiler.tensor_cuts.tensor_cuts import SMALLEST_VOCABULARY

MAX_EXPERTS = 4

_HEAD_WIDTH = 8
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads",)
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_INNER = (
    "intermediate_size",
    "n_inner",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def shrunken_config(config: dict[str, Any], degrees: Degrees, max_ranks: int) -> dict[str, Any]:
    """A config of the same architecture, so small that it trains in a moment, and large enough to be cut by these
    degrees on up to max_ranks ranks."""
    tensor = min(degrees.tensor, max_ranks)
    layers = max(2, min(degrees.pipeline, max_ranks))
    heads = next((config[k] for k in _HEADS if isinstance(config.get(k), int)), 2)
    kv_heads = next((config[k] for k in _KV_HEADS if isinstance(config.get(k), int)), heads)
    spread = min(degrees.tensor * degrees.context, max_ranks)
    small_kv_heads = spread if spread > 1 else min(kv_heads, 2)
    small_heads = small_kv_heads * min(heads // kv_heads, 2)
    if kv_heads == 1 < heads:  # which is cut in another way than several
        small_kv_heads, small_heads = 1, max(2, spread)
    width = small_heads * _HEAD_WIDTH
    vocabulary = _small_vocabulary(config.get("vocab_size"), degrees.tensor, tensor)
    sizes: dict[tuple[str, ...], int] = {
        _LAYERS: layers,
        _HEADS: small_heads,
        _KV_HEADS: small_kv_heads,
        _WIDTH: width,
        _INNER: 2 * width,
        ("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"): _HEAD_WIDTH,
        ("vocab_size",): vocabulary,
        ("q_lora_rank", "kv_lora_rank"): width // 2,
    }
    most = {
        ("num_local_experts", "num_experts", "n_routed_experts"): MAX_EXPERTS,
        ("num_experts_per_tok",): MAX_EXPERTS // 2,
        ("n_group", "topk_group", "first_k_dense_replace"): 1,
    }
    small = dict(config)
    for keys, size in sizes.items():
        small.update({key: size for key in keys if isinstance(config.get(key), int)})
    for keys, size in most.items():
        small.update({key: min(size, config[key]) for key in keys if isinstance(config.get(key), int)})
    old_layers = next((config[k] for k in _LAYERS if isinstance(config.get(k), int)), None)
    for key, value in config.items():
        if key.endswith(("dropout", "_pdrop", "dropout_rate", "dropout_prob")) and isinstance(value, int | float):
            small[key] = 0.0
        elif key.endswith("_token_id") and isinstance(value, int):
            small[key] = min(value, vocabulary - 1)
        elif isinstance(value, list) and len(value) == old_layers:
            kinds = list(dict.fromkeys(map(str, value)))
            firsts = [value[[str(v) for v in value].index(kind)] for kind in kinds]
            small[key] = [firsts[i % len(firsts)] for i in range(layers)]
    if isinstance(config.get("image_size"), int) and isinstance(config.get("patch_size"), int):
        stages = len(config.get("depths", ())) or 2  # each halves the image
        small["image_size"] = 2**stages * config["patch_size"]
    for key in ("max_position_embeddings", "n_positions"):
        if isinstance(config.get(key), int):
            small[key] = min(config[key], 512)
    for key in ("quantization_config", "torch_dtype", "transformers_version", "rope_scaling"):
        small.pop(key, None)
    small["dtype"] = "float32"
    return small


def _small_vocabulary(words: Any, tensor: int, small_tensor: int) -> int:
    """The least size of a vocabulary that is cut if one of so many words is, and whole if that is."""
    if not isinstance(words, int) or words < SMALLEST_VOCABULARY:
        return 64 * small_tensor
    return -(-SMALLEST_VOCABULARY // small_tensor) * small_tensor + (words % tensor > 0)


def full_config(path: Path) -> dict[str, Any]:
    """The config with the defaults of its class filled in, for they may be large, too."""
    import transformers

    document = json.loads(path.read_text())
    full: dict[str, Any] = transformers.AutoConfig.for_model(**document).to_dict()
    return {**full, "architectures": document.get("architectures"), "model_type": document["model_type"]}
