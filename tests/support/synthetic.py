"""Small ModelProfiles and clusters made of plain numbers, for tests of the planner that need no torch."""

import random
from collections.abc import Sequence

from benchmarks.planning_time.plain_profile import SEQ_LEN as SEQ_LEN
from benchmarks.planning_time.plain_profile import chain, expert_bank, per_sample
from meshwright.profiler.machine.cluster import ClusterSpec, Device, HostGroup, Link
from meshwright.profiler.model.model_profile import (
    Bytes,
    CollectiveProfile,
    Costs,
    LayerClass,
    ModelProfile,
    OpPart,
    OpProfile,
    ParameterProfile,
    TensorCut,
)


def device(memory: float = 80e9, **changes: object) -> Device:
    """A device of round numbers: 100 TFLOP/s, 1 TB/s, no overheads."""
    fields: dict[str, object] = {
        "name": "round",
        "memory": memory,
        "context": 0.0,
        "flops": {"bf16": 100e12, "fp32": 50e12},
        "matmul_efficiency": 1.0,
        "attention_efficiency": 0.5,
        "bandwidth": 1e12,
        "launch": 0.0,
        "overlap": 0.8,
        "contention": 0.2,
        "devices_per_host": 8,
        "link": Link(bandwidth=100e9, latency=1e-6),
        "network": Link(bandwidth=50e9, latency=1e-5),
        "sources": {},
    }
    return Device.model_validate(fields | changes)


def cluster(
    num_hosts: int = 1, per_host: int = 8, on: Device | None = None, network: Link | None = None
) -> ClusterSpec:
    """Equal hosts of `device()`."""
    each = on or device()
    group = HostGroup(count=num_hosts, devices_per_host=per_host, device=each, link=each.link)
    return ClusterSpec(name="test", hosts=(group,), network=network or each.network)


def costs(
    flops: float,
    saved: float,
    inputs: float,
    transient: float,
    tensor: bool = False,
    sequence: bool = False,
    parts: tuple[float, float] = (0.0, 0.0),
) -> Costs:
    """One matmul forward and two backward, with activation bytes given per sample (bf16 elements = bytes / 2). parts:
    shares of what is saved that recompute of attention, and selective recompute, give up; each takes as large a share
    of the forward."""

    def moved(value: float, cut: bool) -> Bytes:
        return Bytes(elements=per_sample(value / 2, cut))

    attention, selective = parts
    rest = 1.0 - attention - selective
    pieces = [("other", "forward", share * flops, core) for share, core in ((attention, True), (selective, False))]
    pieces += [("matmul", "forward", rest * flops, False)]
    pieces += [("other", part, flops, False) for part in ("backward_input", "backward_weight")]
    collectives: tuple[CollectiveProfile, ...] = ()
    if tensor:
        kinds = ("all_gather", "reduce_scatter") if sequence else ("all_reduce",)
        collectives = tuple(
            CollectiveProfile(kind=kind, part=part, tensor=moved(inputs, False))
            for part in ("forward", "backward")
            for kind in kinds
        )
    return Costs(
        operators=tuple(
            OpProfile(name="mm", module="", kind=kind, part=part, flops=per_sample(value, tensor), core=core)  # type: ignore[arg-type]
            for kind, part, value, core in pieces
            if value
        ),
        saved=moved(saved, tensor),
        attention=moved((1.0 - attention) * saved, tensor),
        selective=moved((1.0 - attention - selective) * saved if selective else saved, tensor),
        inputs=moved(inputs, tensor and sequence),
        forward_transient=Bytes(),
        backward_transient=moved(transient, tensor),
        collectives=collectives,
    )


def layer_class(
    name: str,
    flops: float,
    parameters: int,
    saved: float,
    inputs: float,
    transient: float = 0.0,
    heads: int | None = None,
    parts: tuple[float, float] = (0.0, 0.0),
) -> LayerClass:
    """A class of one weight; with `heads` tensor parallelism may cut it."""
    cut = heads is not None
    return LayerClass(
        name=name,
        parameters=(ParameterProfile(name="weight", shape=(parameters,)),),
        whole=costs(flops, saved, inputs, transient, parts=parts),
        cuts=(TensorCut(kind="mlp", columns=("a",), rows=("b",), units=(heads,), sharded={"weight": 0}),)
        if heads
        else (),
        tensor=costs(flops, saved, inputs, transient, tensor=True, parts=parts) if cut else None,
        sequence=costs(flops, saved, inputs, transient, tensor=True, sequence=True, parts=parts) if cut else None,
    )


def profile(
    classes: Sequence[LayerClass],
    order: Sequence[int],
    crossing: float | Sequence[float] = 1e6,
    ties: Sequence[tuple[int, int]] = (),
) -> ModelProfile:
    """A chain of layers `order` (indices of classes); `crossing` bytes per sample behind every layer."""
    behind = [crossing] * (len(order) - 1) if isinstance(crossing, int | float) else list(crossing)
    return chain("synthetic", classes, order, behind, ties)


def with_experts(layer: LayerClass, count: int, copies: int = 2, width: int = 256, inner: int = 1024) -> LayerClass:
    """The class with a bank of experts, one product of each, beside what it has; not cut by tensor parallelism."""
    bank, up, products = expert_bank(count, copies, width, inner)
    costs = {
        name: found.model_copy(update={"operators": found.operators + products})
        for name in ("whole", "tensor", "sequence")
        if (found := getattr(layer, name)) is not None
    }
    return layer.model_copy(update={**costs, "parameters": (*layer.parameters, up), "experts": (bank,)})


def random_class(
    rng: random.Random, name: str, heads: Sequence[int | None], parts: Sequence[tuple[float, float]] = ()
) -> LayerClass:
    """A class of random amounts, with one of these heads and, where there are any, one of these parts (see costs)."""
    return layer_class(
        name,
        flops=rng.uniform(1e10, 4e11),
        parameters=rng.randrange(1, 40) * 1_000_000,
        saved=rng.uniform(1e6, 4e8),
        inputs=rng.uniform(1e5, 5e7),
        transient=rng.uniform(0, 1e8),
        heads=rng.choice(heads),
        parts=rng.choice(parts) if parts else (0.0, 0.0),
    )


def with_attention(layer: LayerClass, heads: int, flops: float) -> LayerClass:
    """The class with attention over its sequence."""
    moved = Bytes(elements=per_sample(SEQ_LEN * 4 * 512))
    parts: tuple[tuple[OpPart, float], ...] = (("forward", 1.0), ("backward_input", 2.5))
    attention = tuple(
        OpProfile(name="sdpa", module="", kind="attention", part=p, flops=per_sample(n * flops), moved=moved)
        for p, n in parts
    )
    cut = TensorCut(kind="attention", columns=("a",), rows=("b",), units=(heads,), sharded={"weight": 0})
    costs = {
        name: found.model_copy(update={"operators": found.operators + attention})
        for name in ("whole", "tensor", "sequence")
        if (found := getattr(layer, name)) is not None
    }
    return layer.model_copy(update={**costs, "cuts": (cut,) if layer.cuts else ()})


NETWORK = Link(bandwidth=50e9, latency=1e-5)


def mixed(*kinds: tuple[int, int, Device], network: Link = NETWORK) -> ClusterSpec:
    """Hosts as (count, devices of each, device)."""
    hosts = tuple(
        HostGroup(count=count, devices_per_host=per_host, device=on, link=on.link) for count, per_host, on in kinds
    )
    return ClusterSpec(name="mixed", hosts=hosts, network=network)
