"""The ClusterSpec of a row: GPU by preset, links read from text, per GPU or per node."""

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from meshwright.profiler.machine.cluster import ClusterSpec, Device, Link, cluster_of, load_device

from .rows import Row

GIB = 2**30

LINK_EFFICIENCY = 0.7938
"""Of a link's one-direction peak inside a host: as in the presets (profiler/machine/hardware)."""

NETWORK_EFFICIENCY = {"omni-path": 0.1707, "": 0.9}
"""Of a host's nominal network bandwidth, by a word of the text: as in the presets; Omni-Path by the same fit."""

NVLINK_DOMAINS = (72, 64)
"""GPUs that one NVL72 domain gives a job: all, or a power of two of them."""


@dataclass(frozen=True)
class Preset:
    """A GPU as published: a preset of ours and what differs from it.

    network_bits: nominal bits per second per GPU that the platform usually has between hosts.
    """

    device: str
    network_bits: float
    differs: dict[str, Any] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "V100-SXM2-16GB": Preset("v100-32gb", 100e9, {"memory": 15.77 * GIB}),
    "V100-SXM2-32GB": Preset("v100-32gb", 100e9),
    "A100-SXM4-40GB": Preset("a100-40gb", 200e9),
    "A100-SXM4-80GB": Preset("a100-80gb", 200e9),
    "A100-PCIe-80GB": Preset("a100-80gb", 50e9, {"bandwidth": 1935e9}),  # datasheet of the PCIe card
    "A800-SXM4-80GB": Preset("a800-80gb", 200e9),
    "H100-SXM5-80GB": Preset("h100-80gb", 400e9),
    "H100-SXM5-96GB-HBM2e-500W": Preset("h100-96gb", 400e9),
    "H800-SXM-80GB": Preset("h800-80gb", 400e9),
    "H200-SXM-141GB": Preset("h200", 400e9),
    "B200-SXM-180GB": Preset("b200", 400e9),
    "B300-SXM-288GB": Preset("b300", 800e9),
    "GB200-186GB": Preset("gb200", 400e9),
    "GB300-288GB": Preset("gb300", 800e9),
}

_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(?:[A-Za-z-]+\s+)?(\d+)\s*Gb/s(\s+per\s+(?:GPU|node))?", re.IGNORECASE)
_NVLINK = re.compile(r"(\d+)\s*GB/s")


@dataclass(frozen=True)
class Placed:
    """A row's cluster, and what was assumed because it does not say."""

    cluster: ClusterSpec
    assumed: tuple[str, ...]


def network_bits_per_node(text: str | None, gpus_per_node: int) -> float | None:
    """Nominal bits per second of one node out of text; None where it holds no rate.

    "8x200Gb/s per node" and "1600Gb/s per node" count for the node, "400Gb/s per GPU" for each GPU; a bare rate is the
    node's, as is a number of links ("4x Omni-Path 100Gb/s").
    """
    found = _RATE.search(text or "")
    if found is None:
        return None
    links, rate, per = found.groups()
    bits = float(links or 1) * float(rate) * 1e9
    return bits * gpus_per_node if per and per.lower().endswith("gpu") else bits


def place(row: Row) -> Placed:
    """The cluster of a row; a GPU without preset is the nearest of its family, with the memory that the row tells."""
    name, assumed = nearest(str(row.cluster["gpu"])), []
    preset = PRESETS[name]
    num_gpus, per_node = row.cluster["n_gpus"], row.cluster["gpus_per_node"]
    if per_node is None:
        assumed.append("gpus_per_node")
        per_node = load_device(preset.device).devices_per_host
    text = row.cluster["inter_node_link"]
    per_host = _domain(num_gpus) if "NVL72" in str(row.cluster["intra_node_link"]) else per_node
    bits = network_bits_per_node(text, per_host)
    if bits is None:
        bits = preset.network_bits * per_host
        if num_gpus > per_host:
            assumed.append("inter_node_link")
    word = next(word for word in NETWORK_EFFICIENCY if word in str(text).lower())
    device = _device(name)
    if name != row.cluster["gpu"]:
        assumed.append("gpu")
        told = row.cluster.get("gpu_mem_gb")
        device = device.model_copy(update={"memory": 0.97 * told * 1e9}) if told else device
    intra = _intra_bandwidth(row.cluster["intra_node_link"])
    link = device.link if intra is None else Link(bandwidth=intra * LINK_EFFICIENCY, latency=device.link.latency)
    fitting = max(size for size in range(1, min(per_host, num_gpus) + 1) if num_gpus % size == 0)
    cluster = cluster_of(device, num_gpus, fitting)
    hosts = tuple(group.model_copy(update={"link": link}) for group in cluster.hosts)
    network = Link(bandwidth=bits / 8 * NETWORK_EFFICIENCY[word], latency=device.network.latency)
    return Placed(cluster.model_copy(update={"hosts": hosts, "network": network}), tuple(assumed))


def nearest(name: str) -> str:
    """The preset of that name, or the one that shares most of its beginning; an A100 for a GPU of another kind."""
    if name in PRESETS:
        return name
    shared = {preset: _same_beginning(preset.upper(), name.upper()) for preset in PRESETS}
    most = max(shared.values())
    return next(preset for preset, length in shared.items() if length == most) if most > 2 else "A100-SXM4-80GB"


def _same_beginning(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _domain(num_gpus: int) -> int:
    """GPUs that one NVLink domain gives to a job of `num_gpus`, in equal domains."""
    if num_gpus <= max(NVLINK_DOMAINS):
        return num_gpus
    return next((size for size in NVLINK_DOMAINS if num_gpus % size == 0), 4)


def _intra_bandwidth(text: str | None) -> float | None:
    """Bytes per second, one direction, of the link inside a node; None where the text names no rate of ours.

    NVLink is sold by the sum of both directions.
    """
    if text is None:
        return None
    if "PCIe" in text:
        return 25e9  # PCIe 4.0 x16 in practice
    found = _NVLINK.search(text)
    return None if found is None else float(found.group(1)) * 1e9 / 2


@cache
def _device(name: str) -> Device:
    preset = PRESETS[name]
    return load_device(preset.device).model_copy(update={"name": name.lower(), **preset.differs})
