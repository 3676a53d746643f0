"""Reads folders of published measurements: one JSON object a line, checked, with what was measured in plain units."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DATA = Path(__file__).parent / "data"

NOT_RUNS = ("components.jsonl",)
"""Files of layer timings; they hold no training steps."""

Json = dict[str, Any]
Metric = Literal["allocated", "reserved", "device"]

_DEGREES = ("dp", "tp", "pp", "cp")

_SECTIONS: dict[str, tuple[str, ...]] = {
    "model": ("name", "arch", "n_layers", "seq_len"),
    "cluster": ("gpu", "n_gpus", "gpus_per_node", "inter_node_link", "intra_node_link"),
    "config": (*_DEGREES, "micro_batch", "global_batch", "recompute", "schedule", "precision", "framework"),
    "measured": ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gb", "mem_metric", "oom"),
    "scoring": ("score_time", "score_memory", "score_oom", "weight", "superseded", "strategy", "size", "gpu", "file"),
}

_COUNTS = (
    *(("model", key) for key in ("n_layers", "seq_len")),
    *(("cluster", key) for key in ("n_gpus", "gpus_per_node")),
    *(("config", key) for key in (*_DEGREES, "micro_batch", "global_batch")),
)


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    id: str
    file: str
    line: int
    source: str
    quality: str
    model: Json
    cluster: Json
    config: Json
    measured: Json
    derived: Json
    scoring: Json
    software: str
    notes: str

    @property
    def is_moe(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.model["n_experts"] is not None or "moe" in str(self.model["arch"])

    @property
    def is_low_precision(self) -> bool:
        """Whether matmuls run in fp8 or fp4."""
        return any(word in str(self.config["precision"]) for word in ("fp8", "float8", "fp4"))

    @property
    def scores_time(self) -> bool:
        """Whether its step time counts."""
        return bool(self.scoring["score_time"]) and not self.scoring["superseded"] and self.weight > 0

    @property
    def is_scored(self) -> bool:
        """Whether anything of it counts."""
        return self.scores_time or bool(self.scoring["score_memory"]) or bool(self.scoring["score_oom"])

    @property
    def weight(self) -> float:
        """1 / number of repeats of the same configuration."""
        return float(self.scoring["weight"])

    @property
    def step_s(self) -> float | None:
        """Measured seconds per step: as published, else from tokens/s and the global batch, else as derived from the
        published TFLOP/s."""
        if self.measured["step_time_s"] is not None:
            return float(self.measured["step_time_s"])
        speed, batch = self.measured["tokens_per_s_per_gpu"], self.config["global_batch"]
        if speed is not None and batch is not None:
            return float(batch * self.model["seq_len"] / (speed * self.cluster["n_gpus"]))
        derived = self.derived.get("step_time_s")
        return None if derived is None else float(derived)

    @property
    def memory_bytes(self) -> float | None:
        """Measured peak of one GPU; a published GB is 1e9 bytes (see the data's README), but in torchtitan's table of
        B200 runs: what makes it (pytorch/ao, benchmarks/float8/training/parse_torchtitan_logs.py) prints the GiB of the
        log."""
        peak = self.measured["peak_mem_gb"]
        is_gib = "torchtitan" in self.source and "memory column in GB as published" in self.notes
        return None if peak is None else (2**30 if is_gib else 1e9) * float(peak)

    @property
    def memory_metric(self) -> Metric:
        """What was measured: bytes handed out, held by the allocator, or seen by the driver. Undefined ones are taken
        as what frameworks log, the allocator's own; those of Zero Bubble's paper are what its code logs, torch's
        max_memory_allocated in units of 10^6 bytes (megatron/core/pipeline_parallel/zerobubble/runtime.py)."""
        told = str(self.measured["mem_metric"]).lower().split("; reserved")[0]
        if "smi" in told:
            return "device"
        is_zero_bubble = self.source.startswith("Zero Bubble P") and "not stated" in told
        return "allocated" if "alloc" in told or is_zero_bubble else "reserved"

    @property
    def memory_is_of_first_host(self) -> bool:
        """Whether that was read on the job's first host alone. So it is inferred of bigscience's pipelines on V100: the
        layout that is said to take 13 GB where there are 32 ran out of 16 on the other host, which has the loss."""
        return "experiments/tr3m" in self.source and self.memory_metric == "device"

    @property
    def is_fragmentation(self) -> bool:
        """Ran out of memory although three quarters of it or less had been handed out."""
        peak = self.measured["peak_mem_gb"]
        return bool(self.measured["oom"]) and peak is not None and peak <= 0.75 * self.cluster["gpu_mem_gb"]


def read_folders(folders: list[Path]) -> list[Row]:
    """All rows of all *.jsonl files of the folders, in order of name. Raises ValueError that names file and line."""
    rows = [row for folder in folders for row in _read_folder(folder)]
    seen: dict[str, Row] = {}
    for row in rows:
        other = seen.setdefault(row.id, row)
        if other is not row and other.file == row.file:
            raise ValueError(f"{row.file}:{row.line}: id {row.id!r} is on line {other.line} already; ids must differ")
    return rows


def _read_folder(folder: Path) -> Iterator[Row]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one that holds *.jsonl files, such as {DATA}")
    paths = [path for path in sorted(folder.glob("*.jsonl")) if path.name not in NOT_RUNS]
    if not paths:
        raise ValueError(f"{folder} holds no *.jsonl file of runs; give a folder such as {DATA}")
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if line.strip():
                yield parse_row(line, path.name, number)


def parse_row(line: str, file: str, number: int) -> Row:
    """One line as a Row. Raises ValueError that names file, line and what is wrong."""
    where = f"{file}:{number}"
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); each line holds one object") from None
    if not isinstance(data, dict) or not isinstance(data.get("id"), str):
        raise ValueError(f"{where}: a measurement is an object with a text `id`")
    for section, keys in _SECTIONS.items():
        values = data.get(section)
        if not isinstance(values, dict):
            raise ValueError(f"{where}: {data['id']} has no object `{section}`")
        missing = [key for key in keys if key not in values]
        if missing:
            raise ValueError(f"{where}: {data['id']} has no `{section}.{missing[0]}`; write null where it is unknown")
    for section, key in _COUNTS:
        _check_count(data[section][key], f"{where}: {data['id']}: {section}.{key}")
    config = data["config"]
    model = {key: data["model"].get(key) for key in _MODEL_KEYS} | data["model"]
    return Row(
        id=data["id"],
        file=data["scoring"]["file"],
        line=number,
        source=str(data.get("source")),
        quality=str(data.get("quality")),
        model=model,
        cluster=data["cluster"],
        config={key: config.get(key) for key in _CONFIG_KEYS} | config,
        measured=data["measured"],
        derived=data.get("derived") or {},
        scoring=data["scoring"],
        software=str(data.get("software")),
        notes=str(data.get("notes")),
    )


_MODEL_KEYS = (
    "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn_hidden", "vocab", "gated_mlp", "tied_embeddings", "pos_emb",
    "n_experts", "topk", "moe_ffn_hidden", "n_shared_experts", "n_dense_layers", "attn_type", "params_b",
)  # fmt: skip

_CONFIG_KEYS = (
    "vpp", "ep", "sp", "zero_stage", "fsdp", "shard_group", "recompute_detail", "compile", "async_tp", "cuda_graphs",
    "task", "cpu_offload_layers", "pp_layout", "moe_dispatcher", "moe_a2a_overlap",
)  # fmt: skip


def _check_count(value: object, what: str) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{what} is {value!r}; it must be a whole number of at least 1, or null where unknown")
