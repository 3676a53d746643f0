"""The free constants of the cost model: where each applies, what is known of it beforehand, and how to try a value."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

from meshwright.planner.cost import compute_cost, layer_cost, software, stage_cost
from meshwright.planner.cost.compute_cost import LOW_PRECISIONS
from meshwright.planner.plan.document import Plan
from meshwright.planner.solve import columns
from meshwright.profiler.machine.cluster import ClusterSpec, Device, HostGroup, Link

Where = Literal["device", "software", "link", "network", "omni-path", "module"]


@dataclass(frozen=True)
class Constant:
    """One free constant, tried as a factor on the value that the project has now.

    where: fields of devices whose names begin with `of`, of the stack `of`, or a module's constant.
    spread: standard deviation of the logarithm that is taken for likely before any data.
    """

    name: str
    where: Where
    of: tuple[str, ...]
    fields: tuple[str, ...]
    spread: float


def _device(name: str, of: tuple[str, ...], *fields: str, spread: float = 0.2) -> Constant:
    return Constant(f"{name}: {fields[0]}", "device", of, fields, spread)


def _stack(name: str, *fields: str, spread: float = 0.4) -> Constant:
    return Constant(f"{name}: {fields[0]}", "software", (name,), fields, spread)


def _module(name: str, spread: float) -> Constant:
    return Constant(name, "module", (), (name,), spread)


_BLACKWELL = ("b200", "b300", "gb200", "gb300")

CONSTANTS: tuple[Constant, ...] = (
    _device("V100", ("v100",), "matmul_efficiency", spread=0.1),
    _device("A100", ("a100", "a800"), "matmul_efficiency", spread=0.1),
    _device("H100", ("h100-sxm5-80gb", "h200", "h800"), "matmul_efficiency", spread=0.1),
    _device("H100 500 W", ("h100-sxm5-96gb",), "matmul_efficiency", spread=0.1),
    _device("Blackwell", _BLACKWELL, "matmul_efficiency", spread=0.1),
    _device("A100", ("v100", "a100", "a800"), "attention_efficiency", spread=0.4),
    _device("H100", ("h100", "h200", "h800"), "attention_efficiency", spread=0.4),
    _device("Blackwell", _BLACKWELL, "attention_efficiency", spread=0.4),
    _device("H100", ("h100", "h200", "h800"), "low_precision_efficiency", spread=0.4),
    _device("Blackwell", _BLACKWELL, "low_precision_efficiency", spread=0.4),
    _device("Blackwell", _BLACKWELL, "fp4", spread=0.3),
    _device("Blackwell Ultra", ("b300", "gb300"), "attention_efficiency", spread=0.3),
    _device("Blackwell Ultra", ("b300", "gb300"), "low_precision_efficiency", spread=0.2),
    Constant("link bandwidth", "link", (), ("bandwidth",), 0.2),
    Constant("link latency", "link", (), ("latency",), 0.7),
    Constant("network bandwidth", "network", (), ("bandwidth",), 0.07),
    Constant("network latency", "network", (), ("latency",), 0.7),
    Constant("Omni-Path bandwidth", "omni-path", (), ("bandwidth",), 0.4),
    _device("all", ("",), "contention", spread=0.4),
    _device("all", ("",), "launch", spread=0.4),
    _stack("fsdp1-flash1", "fusion"),
    _stack("fsdp1-flash1", "attention", spread=0.3),
    _stack("fsdp1-flash1", "loss"),
    _device("all", ("",), "bandwidth_efficiency", spread=0.1),
    _stack("fsdp2-compile", "fusion"),
    _stack("megatron-2021", "fusion"),
    _stack("megatron-2021", "overlap", spread=0.5),
    _stack("megatron-2021", "layer_s", spread=0.7),
    _stack("zero3-2021", "network", spread=0.5),
    _stack("megatron-2023", "fusion"),
    _stack("megatron-2023", "overlap", spread=0.5),
    _stack("megatron-2023", "layer_s", spread=0.7),
    _stack("megatron-core", "fusion"),
    _stack("megatron-core", "overlap", spread=0.5),
    _stack("megatron-core", "tensor_overlap", spread=0.15),
    _stack("megatron-core", "layer_s", spread=0.7),
    _stack("megatron-core", "routing_s", spread=0.5),
    _stack("megatron-core", "expert_s", spread=0.7),
    _module("UNHIDDEN_TRAFFIC", 0.3),
    _module("WAVE_EXPONENT", 0.3),
    _module("BATCHED", 0.3),
    _module("P2P_EXPOSED", 0.5),
    _module("STRAGGLING", 0.5),
    _module("MISALIGNED", 0.3),
    _module("CAST_BYTES", 0.5),
)

OMNI_PATH_BELOW = 12e9
"""Bytes per second of a host's network below which it is JeanZay's Omni-Path: 4 x 100 Gbit/s at the share seen."""

_AT_MOST_ONE = ("overlap", "tensor_overlap", "contention", "bandwidth_efficiency")
_OF_LOW_PRECISION = ("low_precision_efficiency", "CAST_BYTES")
_MODULES = (columns, compute_cost, layer_cost, software, stage_cost)


def applies(constant: Constant, plan: Plan) -> bool:
    """Whether the price of a plan may depend on a constant."""
    precision = plan.training.precision
    if constant.fields[0] in _OF_LOW_PRECISION and precision not in LOW_PRECISIONS:
        return False
    if constant.where == "device":
        fits = plan.cluster.device.name.startswith(constant.of)
        return fits and (constant.fields[0] != "fp4" or precision == "fp4")
    if constant.where == "software":
        return plan.training.software.split("+")[0] in constant.of
    if constant.where in ("network", "omni-path"):
        return plan.cluster.num_hosts > 1 and constant.where == _network_of(plan.cluster)
    return True


@contextmanager
def tried(factors: Mapping[str, float]) -> Iterator[None]:
    """While inside, stacks and module constants have their values times these factors (by name of the constant)."""
    stacks = dict(software.all_software())
    with ExitStack() as stack:
        for constant in CONSTANTS:
            factor = factors.get(constant.name, 1.0)
            if constant.where == "software":
                found = stacks[constant.of[0]]
                changes = {f: _limited(f, _value(found, f) * factor) for f in constant.fields}
                stacks[constant.of[0]] = found.model_copy(update=changes)
            elif constant.where == "module":
                (name,) = constant.fields
                for module in _MODULES:
                    if hasattr(module, name):
                        stack.enter_context(patch.object(module, name, getattr(module, name) * factor))
        stack.enter_context(patch.object(software, "all_software", lambda: stacks))
        yield


def on_cluster(plan: Plan, factors: Mapping[str, float]) -> Plan:
    """The plan on the same cluster with devices and links by these factors."""
    cluster = plan.cluster
    hosts = tuple(_host(group, factors) for group in cluster.hosts)
    network = _link(cluster.network, _network_of(cluster), factors)
    changed: ClusterSpec = cluster.model_copy(update={"hosts": hosts, "network": network})
    return plan.model_copy(update={"cluster": changed})


def _network_of(cluster: ClusterSpec) -> Where:
    return "omni-path" if cluster.network.bandwidth < OMNI_PATH_BELOW else "network"


def _host(group: HostGroup, factors: Mapping[str, float]) -> HostGroup:
    device: Device = group.device
    changes: dict[str, Any] = {}
    for constant in CONSTANTS:
        if constant.where != "device" or not device.name.startswith(constant.of):
            continue
        factor = factors.get(constant.name, 1.0)
        for name in constant.fields:
            if name == "fp4":
                flops = changes.get("flops", device.flops)
                changes["flops"] = {**flops, **({"fp4": flops["fp4"] * factor} if "fp4" in flops else {})}
            else:
                changes[name] = _limited(name, changes.get(name, getattr(device, name)) * factor)
    link = _link(group.link, "link", factors)
    return group.model_copy(update={"device": device.model_copy(update=changes), "link": link})


def _link(link: Link, where: Where, factors: Mapping[str, float]) -> Link:
    changes = {
        name: getattr(link, name) * factors.get(constant.name, 1.0)
        for constant in CONSTANTS
        if constant.where == where
        for name in constant.fields
    }
    return link.model_copy(update=changes)


def _value(stack: software.Software, name: str) -> float:
    value = getattr(stack, name)
    return 0.82 if value is None else float(value)  # the presets' overlap


def _limited(name: str, value: float) -> float:
    return min(value, 1.0) if name in _AT_MOST_ONE else value


def factors_of(logarithms: Mapping[str, float]) -> dict[str, float]:
    """Factors from their logarithms."""
    return {name: math.exp(value) for name, value in logarithms.items()}
