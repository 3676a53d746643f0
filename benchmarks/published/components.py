"""Scores the planner's models of kernels and collectives on public measurements of single parts.

    python -m benchmarks.published.components FOLDER [--json FILE]

FOLDER holds *.jsonl or *.jsonl.gz, one measurement a line: kind, gpu, dtype, sizes, and time_us (or tflops, or
efficiency and its peak). Prints |ln(predicted / measured)|, median and 90th percentile, by kind and GPU, and how many
rows have no price and why. Exit code 2: bad input.
"""

import argparse
import gzip
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.cost.comm_cost import CollectiveKind, GroupLinks, collective_seconds, direct_s
from meshwright.planner.cost.kernels import (
    SIZES,
    KernelFamily,
    attention_s,
    bank_products_s,
    families,
    permute_s,
    product_s,
)
from meshwright.profiler.machine.cluster import Device, Group, Link, load_device

Floats = NDArray[np.float64]
Row = Mapping[str, Any]

KINDS = (
    "GEMM",
    "attention",
    "expert layer",
    "dispatch and combine",
    "collectives in a host",
    "collectives between hosts",
)

_GPUS = (
    ("HBM2e, 500 W", "h100-96gb"),
    ("A100", "a100-80gb"),
    ("H100 PCIe", ""),
    ("H100", "h100-80gb"),
    ("H800", "h800-80gb"),
    ("H200", "h200"),
    ("GB200", "gb200"),
    ("GB300", "gb300"),
    ("B200", "b200"),
    ("B300", "b300"),
    ("L40S", "l40s"),
    ("V100", "v100-32gb"),
)
"""Words of a GPU's name -> preset, the first that is there; "": none of ours."""

_DTYPES = {"fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "fp16/bf16": "bf16", "nvfp4": "fp4"}

GENERATIONS = {
    "": "inference",
    "cudnn": "cudnn",
    "cudnn_fe": "cudnn",
    "cudnn_fe_fp8": "cudnn",
    "pyt_cudnn": "cudnn",
    "flash_attention_2": "flash-2",
    "pytorch_flash2": "flash-2",
    "pyt_flash_attention": "flash-2",
    "flash_attention": "flash-2",
    "flash_attention_1": "flash-1",
    "flash_attention_3": "flash-3",
}
"""Backend of a row -> generation of its kernel; others are not fused, or of no kind that training uses."""


class NotPricedError(Exception):
    """A row that the models do not speak of, and why."""


@dataclass
class Part:
    """Rows of one kind on one device in one dtype, by columns. what: which kernel, where that decides the price."""

    kind: str
    gpu: str
    device: Device
    dtype: str
    what: str
    measured_s: Floats = field(default_factory=lambda: np.zeros(0))
    sizes: dict[str, Floats] = field(default_factory=dict)
    shapes: tuple[str, ...] = ()
    """[row] -> what is left out together in folds."""

    @property
    def family(self) -> KernelFamily:
        """The kernels of the device."""
        return families()[self.device.kernels]

    @property
    def peak(self) -> float:
        """FLOP/s of the dtype."""
        return peak_of(self.device, self.dtype)


def peak_of(device: Device, dtype: str) -> float:
    """Dense peak FLOP/s of a dtype; that of fp8 whatever its scales are for."""
    return device.flops["fp8" if dtype == "fp8_block" else dtype]


def read(folder: Path) -> list[Row]:
    """Every row of a folder. Raises ValueError that names the file and line."""
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    if not files:
        raise ValueError(f"{folder} holds no *.jsonl and no *.jsonl.gz")
    rows = []
    for path in files:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: no JSON: {error}") from None
                if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
                    raise ValueError(f"{path}:{number}: a row is an object with a kind")
                rows.append(row)
    return rows


@cache
def device_of(gpu: str) -> Device:
    """The preset of a GPU. Raises NotPricedError."""
    name = next((preset for words, preset in _GPUS if words in gpu), "")
    if not name:
        raise NotPricedError(f"no preset for {gpu}")
    device = load_device(name)
    if "PCIe" in gpu:
        return device.model_copy(update={"bandwidth": 1.935e12})  # datasheet of the A100 PCIe card
    return device


def parts_of(rows: Iterable[Row]) -> tuple[list[Part], dict[str, int]]:
    """The rows by columns, and how many have no price by reason."""
    columns: dict[tuple[str, str, str, str], list[tuple[float, str, dict[str, float]]]] = defaultdict(list)
    reasons: dict[str, int] = defaultdict(int)
    rows = list(rows)
    disturbed = _disturbed(rows)
    for index, row in enumerate(rows):
        try:
            reader = _READERS.get(str(row["kind"]))
            if reader is None:
                raise NotPricedError(f"kind {row['kind']}")
            if index in disturbed:
                raise NotPricedError("collective that took longer than one of more bytes: a first call, or disturbed")
            if row.get("suspect"):
                raise NotPricedError("suspect by its source's table")
            kind, dtype, what, seconds, shape, sizes = reader(row)
            device_of(str(row.get("gpu")))
            columns[kind, str(row["gpu"]), dtype, what].append((seconds, shape, sizes))
        except NotPricedError as error:
            reasons[str(error)] += 1
        except (KeyError, TypeError, ValueError) as error:
            reasons[f"{row['kind']}: {type(error).__name__} {error}"] += 1
    parts = []
    for (kind, gpu, dtype, what), found in columns.items():
        if kind == KINDS[2] and what == "layer":
            tuned = _tuned(found)
            if len(tuned) < len(found):
                reasons[NOT_TUNED] += len(found) - len(tuned)
            found = tuned
        names = found[0][2]
        part = Part(
            kind,
            gpu,
            device_of(gpu),
            dtype,
            what,
            np.array([seconds for seconds, _, _ in found]),
            {name: np.array([sizes[name] for _, _, sizes in found], dtype=np.float64) for name in names},
            tuple(shape for _, shape, _ in found),
        )
        parts.append(part)
    return parts, dict(reasons)


_Read = tuple[str, str, str, float, str, dict[str, float]]
"""Kind, dtype, which kernel, seconds, shape for folds, sizes."""


def _dtype(row: Row) -> str:
    name = str(row.get("dtype"))
    dtype = _DTYPES.get(name, name)
    if dtype not in ("bf16", "fp8", "fp8_block", "fp4"):
        raise NotPricedError(f"dtype {name}")
    return dtype


def _seconds(row: Row, flops: float) -> float:
    """Measured seconds of a row, from its time or its rate."""
    derived = row.get("derived") or {}
    for holder in (row, derived):
        if holder.get("time_us"):
            return float(holder["time_us"]) * 1e-6
    for holder, name in ((row, "tflops"), (derived, "tflops"), (derived, "tflops_causal")):
        if holder.get(name) and flops:
            return flops / (float(holder[name]) * 1e12)
    raise NotPricedError("no time and no rate")


def _gemm(row: Row) -> _Read:
    m, n, k = (float(row[side]) for side in ("m", "n", "k"))
    cast = "aiconfigurator" in row["source"] or "quantisation included" in row["what"]
    alone = "random data" in row["what"]
    what = "layer" if cast else "sustained" if alone else "kernel"
    return "GEMM", _dtype(row), what, _seconds(row, 2 * m * n * k), f"{n:g} x {k:g}", {"m": m, "n": n, "k": k}


def _attention(row: Row) -> _Read:
    generation = GENERATIONS.get(str(row.get("backend") or ""))
    if "SimuMax" in row["source"]:
        generation = "flash-2" if "A100" in row["gpu"] else "cudnn"
    if generation is None or ("https" in row["source"] and "backend" not in row):
        raise NotPricedError(f"attention of {row.get('backend')}")
    b, s, heads = (float(row[name]) for name in ("b", "s", "heads"))
    groups, width, out = float(row["kv_heads"]), float(row["head_dim_qk"]), float(row["head_dim_v"])
    keys = float(row.get("s_kv") or s)
    passes = {"fwd": (1.0, 0.0), "bwd": (0.0, 1.0), "fwd+bwd": (1.0, 1.0)}[str(row["direction"])]
    share = 0.5 if row["causal"] else 1.0
    square = 2 * b * heads * s * keys * share
    flops = passes[0] * square * (width + out) + passes[1] * square * (3 * width + 2 * out)
    sizes = {"b": b, "s": s, "keys": keys, "heads": heads, "groups": groups, "width": (width + out) / 2, "share": share}
    sizes |= {"forward": passes[0], "backward": passes[1]}
    shape = f"{heads:g} x {width:g}"
    return "attention", _dtype(row), generation, _seconds(row, flops), shape, sizes


def _expert_layer(row: Row) -> _Read:
    if "min_latency" in str(row.get("kernel")):
        raise NotPricedError("a kernel for a few tokens of inference")
    if row["source"].startswith("https") or "tokens" not in row or "routing" not in row:
        raise NotPricedError("expert layer that does not tell its routing")
    names = ("tokens", "hidden", "intermediate", "num_experts", "topk", "ep")
    sizes = {name: float(row[name]) for name in names} | {"wide": 2.0 if row["gated"] else 1.0}
    sizes["busiest"] = 1.0 if row["routing"] == "balanced" else _routed(int(row["num_experts"]), int(row["ep"]))[0]
    shape = " x ".join(f"{sizes[name]:g}" for name in names[1:5])
    return "expert layer", _dtype(row), "layer", _seconds(row, 0.0), shape, sizes


POWER_LAW = 1.2
"""Exponent of the source's skewed routing: an expert's share of the tokens is drawn from x^-1.2 between 1 and 0.8 of
them, and the rank that is timed is the one with most."""


@cache
def _routed(experts: int, ranks: int) -> tuple[float, tuple[float, ...]]:
    """(tokens of the busiest rank over the mean of all, tokens of each of its experts over the mean of them), in the
    median of draws of the source's skewed routing; of many experts, of each eighth of them."""
    random = np.random.default_rng(0)
    power = 1.0 - POWER_LAW
    most = (0.8 * 8192) ** power
    draws = ((most - 1.0) * random.random((200, experts)) + 1.0) ** (1.0 / power)
    by_rank = (draws / draws.sum(axis=1, keepdims=True)).reshape(200, ranks, -1)
    busiest = by_rank[np.arange(200), by_rank.sum(axis=2).argmax(axis=1)]
    shares = np.sort(busiest / busiest.mean(axis=1, keepdims=True), axis=1)
    parts = [part.mean() for part in np.array_split(np.median(shares, axis=0), min(EIGHTHS, shares.shape[1]))]
    total = float(np.mean(parts))
    return float(np.median(busiest.sum(axis=1)) * ranks), tuple(float(part) / total for part in parts)


EIGHTHS = 8
"""Parts of a rank's experts, by their tokens, that are told apart where routing is skewed."""


NOT_TUNED = "expert layer slower than with more work: its kernel was not tuned for the shape"

UNTUNED = 1.5
"""How much longer than its work allows an expert layer may take by noise, tiles and waves."""


def _tuned(rows: Sequence[tuple[float, str, dict[str, float]]]) -> list[tuple[float, str, dict[str, float]]]:
    """(seconds, shape, sizes) of the rows of one GPU and dtype whose kernel was tuned.

    The source's library tries kernels by buckets of tokens and takes one that it has not tried in others, two to seven
    times as slow as its neighbours. Training runs one kernel at every shape, so that a layer with less of everything
    takes no longer. A row is left out if another of the same layer and routing shows that: what a layer takes is a sum
    of parts that grow with the copies it computes, the experts it holds, or the tokens it sees, or not at all, so that
    none may take longer than any other times the largest of these ratios. The prediction plays no part in that.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, (_, shape, at) in enumerate(rows):
        groups[shape, at["wide"], at["busiest"] > 1.0].append(i)
    keep = np.ones(len(rows), dtype=bool)
    for members in groups.values():
        seconds = np.array([rows[i][0] for i in members])
        tokens, ranks, busiest = (np.array([rows[i][2][k] for i in members]) for k in ("tokens", "ep", "busiest"))
        grows = np.stack([tokens / ranks * busiest, 1.0 / ranks, tokens])
        more = np.maximum(1.0, (grows[:, :, None] / grows[:, None, :]).max(axis=0))
        keep[members] = seconds <= UNTUNED * (more * seconds[None, :]).min(axis=1)
    return [row for row, kept in zip(rows, keep.tolist(), strict=True) if kept]


def _grouped(row: Row) -> _Read:
    if "m_per_group" not in row or ("B200" in row["gpu"] and "flashinfer" in row["source"]):
        raise NotPricedError("grouped GEMM of unknown groups")
    count, rows, n, k = (float(row[name]) for name in ("num_groups", "m_per_group", "n", "k"))
    sizes = {"rows": rows, "inner": k, "columns": n, "groups": count}
    if row["direction"] == "dgrad":
        sizes |= {"inner": n, "columns": k}
    elif row["direction"] == "wgrad":
        sizes |= {"rows": n, "inner": rows, "columns": k}
    elif row["direction"] != "fwd":
        raise NotPricedError("grouped GEMM of several passes")
    seconds = _seconds(row, 2 * count * rows * n * k)
    return "expert layer", _dtype(row), "products", seconds, f"{count:g} x {n:g} x {k:g}", sizes


_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
}
_WIRE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}

_BY_PYTHON = ("vidur", "SimuMax", "Galvatron", "all_reduce_bench.py")
"""Words of sources that time torch.distributed from Python: however few the bytes, it takes them 40 to 110 us, where
nccl-tests on the same GPUs take 10 to 25. A step issues its collectives ahead; what its host adds is priced apart."""

ISSUED_S = 200e-6
"""Seconds below which such a measurement is not of the collective alone; above, these sources and nccl-tests agree."""

_NETWORKS = (
    ("4x100Gb", 50e9),
    ("4x HDR200", 100e9),
    ("8x400Gb", 400e9),
    ("32x100Gb", 400e9),
    ("16x200Gb", 400e9),
    ("8 GPUs/node", 400e9),
    ("GB200 NVL72", 3600e9),
)
"""Words of a GPU's name -> nominal bytes per second of a host's network. Of NVL72 the whole domain is a host."""


def _disturbed(rows: Sequence[Row]) -> set[int]:
    """Places of collectives that took UNTUNED times as long as one of more bytes between the same ranks, in the same
    table of a source: a warm-up, or another job. (One over PCIe took 3 times as long for half of the bytes.)"""
    tables: dict[tuple[object, ...], list[tuple[float, float, int]]] = defaultdict(list)
    for index, row in enumerate(rows):
        sized = row["kind"] == "collective" and isinstance(row.get("bytes"), int | float)
        if sized and (row.get("time_us") or row.get("busbw_gbps")):
            place = tuple(str(row.get(name)) for name in ("source", "gpu", "what", "ranks", "nodes", "notes"))
            time = row.get("time_us") or row["bytes"] / row["busbw_gbps"]  # in one table all are by time or all by rate
            tables[place].append((float(row["bytes"]), float(time), index))
    found = set()
    for table in tables.values():
        shortest = math.inf
        for _, time, index in sorted(table, reverse=True):
            if time > UNTUNED * shortest:
                found.add(index)
            shortest = min(shortest, time)
    return found


def _collective(row: Row) -> _Read:
    what = _COLLECTIVES.get(str(row["what"]))
    if what is None:
        raise NotPricedError(f"collective {row['what']}")
    ranks, nodes, num_bytes, gpu = float(row["ranks"] or 0), row.get("nodes"), float(row["bytes"]), str(row["gpu"])
    if not ranks or not nodes:
        raise NotPricedError("collective of unknown ranks")
    if "pairwise" in gpu or "SHARP" in gpu:
        raise NotPricedError(f"collective over {'links of pairs' if 'pairwise' in gpu else 'switches that add'}")
    hosts = float(nodes)
    if "NVL72" in gpu:
        hosts = max(1.0, hosts / 18)
    derived = row.get("derived") or {}
    if row.get("time_us"):
        seconds = float(row["time_us"]) * 1e-6
    else:
        rate = float(row.get("busbw_gbps") or derived.get("busbw_gbps") or 0.0)
        if not rate:
            raise NotPricedError("no time and no rate")
        seconds = num_bytes * _WIRE[what] * (ranks - 1) / ranks / (rate * 1e9)
    if seconds < ISSUED_S and any(word in f"{row['source']} {row.get('notes')}" for word in _BY_PYTHON):
        raise NotPricedError("collective that its host took part of the time for")
    sizes = {"bytes": num_bytes, "ranks": ranks, "hosts": hosts}
    if hosts == 1:
        return KINDS[4], "bf16", what, seconds, f"{what} {ranks:g}", sizes
    network = next((rate for words, rate in _NETWORKS if words in gpu), None)
    if network is None:
        raise NotPricedError("a network of unknown bandwidth")
    return KINDS[5], "bf16", what, seconds, f"{what} {ranks:g} {gpu}", sizes | {"network": network}


def _moe_comm(row: Row) -> _Read:
    what = str(row["what"])
    step = next((word for word in ("dispatch", "combine") if what.endswith(word)), "")
    if not step or not any(word in what for word in ("DeepEP normal", "HybridEP", "MoE all-to-all")):
        raise NotPricedError(f"exchange of {what}")
    if "kernel" in row and row["kernel"] == "NVLinkOneSided":
        raise NotPricedError("exchange of one side")
    if row["gpu"] == "H800" or not row.get("time_us"):
        raise NotPricedError("exchange without a time")
    if float(row.get("nodes") or 1) > 4:
        raise NotPricedError("exchange over hosts that its source's table shows congested")
    domain = "NVL72" in str(row["gpu"])
    units = 132.0 if domain else float(row["num_sms"])
    low = "bf16" if step == "combine" else "fp8"
    dtype = _dtype(row) if domain and step == "dispatch" else low
    sizes = {"tokens": float(row["tokens_per_rank"]), "hidden": float(row["hidden"]), "topk": float(row["topk"])}
    sizes |= {"ranks": float(row["ep"]), "hosts": float(row.get("nodes") or 1), "units": units}
    shape = f"{sizes['hidden']:g} x {sizes['topk']:g} x {row['num_experts']}"
    return KINDS[3], dtype, step, float(row["time_us"]) * 1e-6, shape, sizes


_READERS: dict[str, Callable[[Row], _Read]] = {
    "gemm": _gemm,
    "attention": _attention,
    "moe_layer": _expert_layer,
    "grouped_gemm": _grouped,
    "collective": _collective,
    "moe_comm": _moe_comm,
}


def predicted_s(part: Part, family: KernelFamily | None = None) -> Floats:
    """[row] -> seconds that the planner's models give. family: kernels to price with, if not the device's own."""
    kernels = family or part.family
    return _PRICES[part.kind](part, kernels)


def _gemm_s(part: Part, kernels: KernelFamily) -> Floats:
    rates, device = kernels.products[part.dtype], part.device
    m, n, k = (part.sizes[side] for side in ("m", "n", "k"))
    seconds = product_s(m, k, n, device, part.dtype, part.peak, rates)
    if part.what == "layer":
        return seconds + rates.launch + rates.cast_bytes * m * k / device.bandwidth
    if part.what == "sustained":
        return seconds / device.sustained
    return seconds + (rates.launch if part.dtype == "bf16" else device.launch)


def _attention_s(part: Part, kernels: KernelFamily) -> Floats:
    rates, at = kernels.attention[part.dtype], part.sizes
    factor = kernels.generations[part.what] if part.what != "inference" else 1.0
    rows = at["b"] * at["heads"] * at["s"]
    queries, keys = rows * at["width"], at["b"] * at["groups"] * at["keys"] * at["width"]
    written = 2.0 if part.what == "inference" else 0.0  # the cache of keys and values
    total = np.zeros(len(rows))
    for direction, products in (("forward", 2.0), ("backward", 5.0)):
        flops = 2.0 * products * rows * at["keys"] * at["width"] * at["share"]
        back = direction == "backward"
        num_bytes = 2.0 * (queries * (4.0 if back else 2.0) + keys * (4.0 if back else 2.0 + written))
        seconds = attention_s(flops, rows, at["width"], at["keys"], num_bytes, products, part.device, part.peak, rates)
        speed = factor * (kernels.backward if back else 1.0)
        launch = rates.launch if part.what == "inference" else part.device.launch
        total += at[direction] * (seconds / speed + launch)
    return total


def _expert_layer_s(part: Part, kernels: KernelFamily) -> Floats:
    rates, device, at = kernels.experts[part.dtype], part.device, part.sizes
    if part.what == "products":
        sides = [at[name] for name in ("rows", "inner", "columns", "groups")]
        return bank_products_s(*sides, device, part.dtype, part.peak, rates) + device.launch
    held = np.maximum(at["num_experts"] / at["ep"], 1.0)
    copies = at["tokens"] * at["topk"] / at["ep"] * at["busiest"]
    sides = copies / held, at["hidden"], at["intermediate"], at["wide"], held
    products_s = np.zeros(len(copies))
    routed = np.stack([at["num_experts"], at["topk"], at["ep"], at["busiest"]], axis=1)
    for experts, topk, ranks, busiest in {*map(tuple, routed.tolist())}:
        rows = (routed == (experts, topk, ranks, busiest)).all(axis=1)
        each, hidden, wide, gate, count = (values[rows] for values in sides)
        skew = (1.0,) if busiest == 1.0 else _routed(int(experts), int(ranks))[1]
        products_s[rows] = sum(
            bank_products_s(each, inner, columns, count, device, part.dtype, part.peak, rates, skew)
            for inner, columns in ((hidden, gate * wide), (wide, hidden))
        )
    hidden = at["hidden"]
    passing_s = rates.passing * 2.0 * at["tokens"] * hidden / device.bandwidth
    return products_s + permute_s(2.0 * copies * hidden, device, rates) + passing_s + rates.launch


def _links(part: Part, kernels: KernelFamily, ranks: int, hosts: int, network: float) -> GroupLinks:
    device = part.device
    per_host = 72 if "NVL72" in part.gpu else 8
    return GroupLinks(
        Group(ranks_per_host=ranks // hosts, hosts=hosts),
        device.link,
        Link(bandwidth=network, latency=device.network.latency),
        per_host,
        rings=kernels.rings,
    )


def _by_group(part: Part, kernels: KernelFamily, price: Callable[[GroupLinks, NDArray[np.bool_]], Floats]) -> Floats:
    """[row] -> price(links of its group, rows of that group)."""
    found = np.zeros(len(part.measured_s))
    at = part.sizes
    networks = at.get("network", np.full(len(found), part.device.network.bandwidth))
    for ranks, hosts, network in {*zip(at["ranks"], at["hosts"], networks, strict=True)}:
        rows = (at["ranks"] == ranks) & (at["hosts"] == hosts) & (networks == network)
        found[rows] = price(_links(part, kernels, int(ranks), int(hosts), float(network)), rows)
    return found


def _collective_s(part: Part, kernels: KernelFamily) -> Floats:
    kind: CollectiveKind = part.what  # type: ignore[assignment]
    return _by_group(part, kernels, lambda links, rows: collective_seconds(kind, part.sizes["bytes"][rows], links))


def _exchange_s(part: Part, kernels: KernelFamily) -> Floats:
    at, rates = part.sizes, kernels.exchange
    if rates is None:
        return np.full(len(part.measured_s), np.nan)
    found = np.zeros(len(part.measured_s))
    for units in set(at["units"].tolist()):
        mine = at["units"] == units

        def price(links: GroupLinks, rows: NDArray[np.bool_], units: float = units) -> Floats:
            row_bytes = SIZES[part.dtype] * at["hidden"][rows]
            return direct_s(at["tokens"][rows], row_bytes, at["topk"][rows], links, units, rates)

        found[mine] = _by_group(part, kernels, price)[mine]
    return found


_PRICES: dict[str, Callable[[Part, KernelFamily], Floats]] = {
    "GEMM": _gemm_s,
    "attention": _attention_s,
    "expert layer": _expert_layer_s,
    KINDS[3]: _exchange_s,
    KINDS[4]: _collective_s,
    KINDS[5]: _collective_s,
}


@dataclass(frozen=True)
class Figure:
    """How far predictions of some rows are off: |ln(predicted / measured)|, and its sign."""

    rows: int
    median: float
    p90: float
    bias: float


def figures(parts: Sequence[Part]) -> dict[str, dict[str, Figure]]:
    """Kind -> (GPU, or "all") -> how far its rows are off."""
    logs: dict[str, dict[str, list[Floats]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        try:
            found = np.log(predicted_s(part) / part.measured_s)
        except KeyError:
            found = np.full(len(part.measured_s), np.nan)  # no rates for this dtype, generation or device
        logs[part.kind][part.gpu].append(found)
        logs[part.kind]["all"].append(found)
    told = {}
    for kind in KINDS:
        by_gpu = {gpu: np.concatenate(found) for gpu, found in logs[kind].items()}
        told[kind] = {gpu: _figure(values[~np.isnan(values)]) for gpu, values in sorted(by_gpu.items())}
    return told


def _figure(logs: Floats) -> Figure:
    if not len(logs):
        return Figure(0, 0.0, 0.0, 0.0)
    sizes = np.abs(logs)
    return Figure(len(logs), float(np.median(sizes)), float(np.quantile(sizes, 0.9)), float(np.median(logs)))


def markdown(found: Mapping[str, Mapping[str, Figure]], reasons: Mapping[str, int]) -> str:
    """The page: a table by kind and GPU, and what has no price."""
    lines = ["# Kernels and collectives beside public measurements", ""]
    lines += ["| kind | GPU | rows | median | p90 | bias |", "|---|---|---|---|---|---|"]
    for kind, by_gpu in found.items():
        for gpu, figure in sorted(by_gpu.items(), key=lambda item: (item[0] != "all", item[0])):
            if figure.rows:
                shown = f"{100 * figure.median:.1f}% | {100 * figure.p90:.0f}% | {100 * figure.bias:+.1f}%"
                lines.append(f"| {kind} | {gpu} | {figure.rows:,} | {shown} |")
    lines += ["", "Without a price:", ""]
    lines += [f"- {count:,}: {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.components", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    given = parser.parse_args(arguments)
    try:
        parts, reasons = parts_of(read(given.folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    found = figures(parts)
    print(markdown(found, reasons), end="")
    if given.json:
        told = {kind: {gpu: asdict(figure) for gpu, figure in by.items()} for kind, by in found.items()}
        given.json.write_text(json.dumps({"figures": told, "not priced": reasons}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
