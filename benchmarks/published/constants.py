"""The free constants of the cost model: where each applies, what is known of it beforehand, and how to try a value."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

from meshwright.planner.cost import compute_cost, crossing_cost, software
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.training import LOW_PRECISIONS
from meshwright.profiler.machine.cluster import ClusterSpec, Device, HostGroup, Link

Where = Literal["device", "software", "link", "omni-path", "module"]


@dataclass(frozen=True)
class Constant:
    """One free constant, tried as a factor on the value that the project has now.

    where: a field of devices whose names begin with `of`, of the stack `of`, or a module's constant.
    spread: standard deviation of the logarithm that is taken for likely before any data.
    """

    name: str
    where: Where
    of: tuple[str, ...]
    field: str
    spread: float


def _device(name: str, of: tuple[str, ...], field: str, spread: float) -> Constant:
    return Constant(f"{name}: {field}", "device", of, field, spread)


def _stack(name: str, field: str, spread: float = 0.4) -> Constant:
    return Constant(f"{name}: {field}", "software", (name,), field, spread)


def _module(name: str, spread: float) -> Constant:
    return Constant(name, "module", (), name, spread)


CONSTANTS: tuple[Constant, ...] = (
    _device("V100", ("v100",), "sustained", spread=0.4),
    _device("A100", ("a100", "a800"), "sustained", spread=0.4),
    _device("H100", ("h100-sxm5-80gb", "h200", "h800"), "sustained", spread=0.4),
    _device("H100 500 W", ("h100-sxm5-96gb",), "sustained", spread=0.4),
    _device("Blackwell", ("b200", "gb200"), "sustained", spread=0.4),
    _device("Blackwell Ultra", ("b300", "gb300"), "sustained", spread=0.4),
    Constant("link bandwidth", "link", (), "bandwidth", 0.05),
    Constant("link latency", "link", (), "latency", 0.7),
    Constant("Omni-Path bandwidth", "omni-path", (), "bandwidth", 0.4),
    _device("all", ("",), "contention", spread=0.4),
    _device("all", ("",), "launch", spread=0.4),
    _stack("fsdp1-flash1", "fusion"),
    _stack("fsdp1-flash1", "loss"),
    _device("all", ("",), "bandwidth_efficiency", spread=0.3),
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
    _stack("megatron-core", "tensor_overlap", spread=0.5),
    _stack("megatron-core", "layer_s", spread=0.7),
    _stack("megatron-core", "casts", spread=0.5),
    _stack("fsdp2-compile", "low_precision", spread=0.2),
    _stack("megatron-core", "step_s", spread=0.7),
    _stack("megatron-core", "routing_s", spread=0.5),
    _stack("megatron-core", "expert_s", spread=0.7),
    _module("BATCHED", 0.3),
    _module("P2P_EXPOSED", 0.5),
    _module("STRAGGLING", 0.5),
    _module("MISALIGNED", 0.3),
)

OMNI_PATH_BELOW = 12e9
"""Bytes per second of a host's network below which it is JeanZay's Omni-Path: 4 x 100 Gbit/s at the share seen."""

SHARES = ("sustained", "overlap", "tensor_overlap", "contention", "bandwidth_efficiency")
"""Fields that are shares of something."""
_OF_LOW_PRECISION = ("low_precision", "casts")
_MODULES = (compute_cost, crossing_cost, software)


def applies(constant: Constant, plan: Plan) -> bool:
    """Whether the price of a plan may depend on a constant."""
    precision = plan.training.precision
    if constant.field in _OF_LOW_PRECISION and precision not in LOW_PRECISIONS:
        return False
    if constant.where == "device":
        return plan.cluster.device.name.startswith(constant.of)
    if constant.where == "software":
        return plan.training.software.split("+")[0] in constant.of
    if constant.where == "omni-path":
        return plan.cluster.num_hosts > 1 and _is_omni_path(plan.cluster)
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
                moved = _moved(constant.field, _value(found, constant.field), factor)
                stacks[constant.of[0]] = found.model_copy(update={constant.field: moved})
            elif constant.where == "module":
                for module in _MODULES:
                    if hasattr(module, constant.field):
                        value = getattr(module, constant.field) * factor
                        stack.enter_context(patch.object(module, constant.field, value))
        stack.enter_context(patch.object(software, "all_software", lambda: stacks))
        yield


def on_cluster(plan: Plan, factors: Mapping[str, float]) -> Plan:
    """The plan on the same cluster with devices and links by these factors."""
    cluster = plan.cluster
    hosts = tuple(_host(group, factors) for group in cluster.hosts)
    network = _link(cluster.network, "omni-path", factors) if _is_omni_path(cluster) else cluster.network
    changed: ClusterSpec = cluster.model_copy(update={"hosts": hosts, "network": network})
    return plan.model_copy(update={"cluster": changed})


def _is_omni_path(cluster: ClusterSpec) -> bool:
    return cluster.network.bandwidth < OMNI_PATH_BELOW


def _host(group: HostGroup, factors: Mapping[str, float]) -> HostGroup:
    device: Device = group.device
    changes: dict[str, float] = {}
    for constant in CONSTANTS:
        if constant.where == "device" and device.name.startswith(constant.of):
            now = changes.get(constant.field, getattr(device, constant.field))
            changes[constant.field] = _moved(constant.field, now, factors.get(constant.name, 1.0))
    link = _link(group.link, "link", factors)
    return group.model_copy(update={"device": device.model_copy(update=changes), "link": link})


def _link(link: Link, where: Where, factors: Mapping[str, float]) -> Link:
    changes = {
        constant.field: getattr(link, constant.field) * factors.get(constant.name, 1.0)
        for constant in CONSTANTS
        if constant.where == where
    }
    return link.model_copy(update=changes)


def _value(stack: software.Software, name: str) -> float:
    value = getattr(stack, name)
    return 0.82 if value is None else float(value)  # the presets' overlap


def _moved(name: str, value: float, factor: float) -> float:
    """The value times a factor; of a share, its odds times the factor, so that no share is ever all or nothing."""
    return value * factor / (1.0 - value + value * factor) if name in SHARES else value * factor


def factors_of(logarithms: Mapping[str, float]) -> dict[str, float]:
    """Factors from their logarithms."""
    return {name: math.exp(value) for name, value in logarithms.items()}
