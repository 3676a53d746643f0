"""Rows of published measurements, made by hand."""

import json
from copy import deepcopy
from typing import Any

from benchmarks.published.rows import Row, parse_row

BASE: dict[str, Any] = {
    "id": "one",
    "source": "nobody",
    "quality": "A",
    "model": {
        "name": "small", "arch": "gpt", "n_layers": 8, "hidden": 256, "n_heads": 4, "n_kv_heads": 4, "head_dim": None,
        "ffn_hidden": 1024, "vocab": 1024, "seq_len": 128, "gated_mlp": False, "tied_embeddings": True,
        "n_experts": None, "topk": None, "moe_ffn_hidden": None, "n_shared_experts": None, "n_dense_layers": None,
        "attn_type": None, "pos_emb": "learned",
    },
    "cluster": {
        "gpu": "A100-SXM4-80GB", "gpu_mem_gb": 80, "n_gpus": 8, "gpus_per_node": 8,
        "intra_node_link": "NVLink3 600GB/s (NVSwitch)", "inter_node_link": None,
    },
    "config": {
        "dp": 8, "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": None, "sp": False, "zero_stage": 3, "fsdp": True,
        "shard_group": None, "micro_batch": 2, "global_batch": 16, "recompute": "none", "recompute_detail": None,
        "schedule": "none", "precision": "bf16", "compile": False, "async_tp": None, "cuda_graphs": None,
        "framework": "torchtitan (FSDP2)", "task": "pretrain", "cpu_offload_layers": None, "pp_layout": None,
    },
    "measured": {
        "step_time_s": 0.01, "tokens_per_s_per_gpu": None, "peak_mem_gb": 4.0, "oom": False,
        "mem_metric": "torch max_memory_reserved",
    },
    "derived": {},
    "software": None,
    "notes": None,
    "scoring": {
        "score_time": True, "score_memory": True, "score_oom": False, "weight": 1.0, "superseded": False,
        "strategy": "FSDP", "size": "<5B", "gpu": "A100-80GB", "file": "hand", "unknown": [],
    },
}  # fmt: skip


def data(**changes: Any) -> dict[str, Any]:
    """BASE with changes given as section__key."""
    found = deepcopy(BASE)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            found[section][key] = value
        else:
            found[section] = value
    return found


def row(**changes: Any) -> Row:
    """The row of that data."""
    return parse_row(json.dumps(data(**changes)), "hand.jsonl", 7)
