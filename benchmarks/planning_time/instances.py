"""Random small planning problems made of plain numbers: few enough plans to price every one of them."""

import random
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import recompute_of_parts
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.tensor_choice import CutChoice
from meshwright.profiler.machine.cluster import ClusterSpec, Device, HostGroup, Link
from meshwright.profiler.model.model_profile import (
    Amount,
    Bytes,
    CollectiveProfile,
    Costs,
    Experts,
    LayerClass,
    ModelProfile,
    OpProfile,
    ParameterProfile,
    TensorCut,
)

from .plain_profile import SEQ_LEN, Part, chain, elements, expert_bank, fixed, per_sample, with_parts

CLUSTERS = ((1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (1, 6), (2, 3), (3, 2), (2, 4))
"""(hosts, devices of each)."""

PINS = (
    *(Pins(),) * 6,
    *(Pins(everything=True),) * 6,
    Pins(everything=True, micro_batch=1),
    Pins(everything=True, pipeline=1),
    Pins(tensor=2),
    Pins(pipeline=2),
    Pins(pipeline=2, micro_batch=1),
    Pins(schedule="gpipe"),
    Pins(schedule="interleaved"),
    Pins(schedule="zb-h1"),
    Pins(schedule="zb-h2"),
    Pins(schedule="zb-v"),
    Pins(recompute="full"),
    Pins(recompute="selective"),
    Pins(recompute="none"),
    Pins(reshard=True),
    Pins(gradient_sync="every"),
    Pins(most=(("tensor", 1), ("micro_batch", 2))),
    Pins(without=("1f1b",)),
    Pins(sequence=True),
)
"""What users decide beforehand; most instances leave everything open."""


@dataclass(frozen=True)
class Instance:
    """One question to the planner."""

    seed: int
    profile: ModelProfile
    cluster: ClusterSpec
    training: TrainingSpec
    pins: Pins

    @cached_property
    def choice(self) -> CutChoice:
        """Which cuts tensor parallelism applies."""
        return CutChoice(CostModel(self.profile, self.cluster, self.training))


def instance(seed: int) -> Instance:
    """A chain of 2 to 5 layers of up to 3 classes on 2 to 8 devices, with memory from ample to hopeless."""
    draw = random.Random(seed)
    classes = [_layer_class(draw, f"c{i}") for i in range(draw.randint(1, 3))]
    order = [draw.randrange(len(classes)) for _ in range(draw.choice((2, 2, 3, 3, 4, 5)))]
    issuing = random.Random(f"host {seed}").choice((0.0, 0.0, 2e-5, 1e-4))
    device = _device(draw).model_copy(update={"dispatch": issuing})
    hosts, per_host = draw.choice(CLUSTERS)
    network = Link(bandwidth=draw.choice((1e9, 50e9)), latency=1e-5)
    group = HostGroup(count=hosts, devices_per_host=per_host, device=device, link=device.link)
    training = TrainingSpec(
        global_batch=draw.choice((2, 3, 4, 6, 8, 12)),
        seq_len=SEQ_LEN,
        memory_margin=0.0,
        precision=draw.choice(("bf16", "bf16", "fp32")),
        optimizer=draw.choice(("adamw", "adamw", "sgd")),
    )
    chain, pins = _chain(draw, classes, order), draw.choice(PINS)
    if pins.everything:  # offload doubles the options of every layer; fewer of the others, so that plans stay few
        recompute = draw.choice((None, "none", "selective", "full"))
        pins = replace(pins, recompute=recompute, reshard=draw.choice((None, False, True)))
    own = random.Random(f"parts {seed}")
    if len(order) < 4 and own.random() < 0.6:  # a part or two double the ways to recompute
        parts = [_parts(own) for _ in classes]
        chain = chain.model_copy(
            update={"classes": tuple(with_parts(*pair) for pair in zip(chain.classes, parts, strict=True))}
        )
        longest = recompute_of_parts([part.name for part in max(parts, key=len)])
        if pins.recompute is None:
            pins = replace(pins, parts=True, recompute=own.choice((None, None, None, "parts:a", longest)))
    return Instance(
        seed,
        chain,
        ClusterSpec(name=f"{hosts} x {per_host}", hosts=(group,), network=network),
        training,
        pins,
    )


def _parts(draw: random.Random) -> list[Part]:
    """One part of a layer, or two."""
    names = ("a", "b")[: draw.randint(1, 2)]
    shares = [draw.uniform(0.05, 0.4) for _ in names]
    return [
        Part(name, share, draw.choice((0.0, 0.1)) * share, draw.uniform(0.05, 0.45), draw.random() < 0.5)
        for name, share in zip(names, shares, strict=True)
    ]


def chunked_instance(seed: int, schedule: Schedule, memory: float, num_layers: int = 8) -> Instance:
    """A chain of layers of 3 classes in two stages on each of two devices, one where the schedule has no chunks; of 8
    there are more cuts than the search lists."""
    draw = random.Random(seed)
    classes = [_layer_class(draw, f"c{i}") for i in range(3)]
    order = [draw.randrange(len(classes)) for _ in range(num_layers)]
    device = _device(draw).model_copy(update={"memory": memory})
    group = HostGroup(count=1, devices_per_host=2, device=device, link=device.link)
    virtual = 2 if schedule in ("interleaved", "zb-v") else None
    pins = Pins(pipeline=2, schedule=schedule, virtual_stages=virtual, micro_batch=1)
    return Instance(
        seed,
        _chain(draw, classes, order),
        ClusterSpec(name="1 x 2", hosts=(group,), network=device.network),
        TrainingSpec(global_batch=4, seq_len=SEQ_LEN, memory_margin=0.0),
        pins,
    )


def random_layers(draw: random.Random, number: int) -> ModelProfile:
    """A chain of so many layers, most of them unlike their neighbours."""
    classes = [_layer_class(draw, f"c{i}") for i in range(draw.randint(1, number))]
    return _chain(draw, classes, [draw.randrange(len(classes)) for _ in range(number)])


def _device(draw: random.Random) -> Device:
    """Round numbers: 100 TFLOP/s, 1 TB/s; some launch kernels, slow down while they communicate, or are tiny. Those
    that hide part of their communication have kernels that are priced by shape, and collectives with them."""
    device = Device(
        name="round",
        memory=draw.choice((0.7e9, 1e9, 1.5e9, 2e9, 4e9)),
        context=draw.choice((0.0, 1e7)),
        flops={"bf16": 100e12, "fp32": 50e12},
        matmul_efficiency=1.0,
        attention_efficiency=0.5,
        bandwidth=1e12,
        launch=draw.choice((0.0, 1e-5)),
        overlap=draw.choice((0.0, 0.8, 1.0)),
        contention=draw.choice((0.0, 0.2)),
        devices_per_host=8,
        link=Link(bandwidth=draw.choice((5e9, 100e9)), latency=1e-6),
        network=Link(bandwidth=50e9, latency=1e-5),
        sources={},
    )
    return device.model_copy(update={"kernels": "hopper"}) if device.overlap == 0.8 else device


def _layer_class(draw: random.Random, name: str) -> LayerClass:
    """A plain layer, a block with attention (fused, or one that keeps its scores), or a mixture of experts."""
    kind = draw.choice(("plain", "plain", "fused", "scores", "mixture"))
    heads = draw.choice((None, 2, 4, 4)) if kind != "mixture" else None
    parameters = [ParameterProfile(name="weight", shape=(draw.randrange(1, 40) * 1_000_000,))]
    flops, saved, inputs = draw.uniform(1e10, 4e11), draw.uniform(1e6, 4e8), draw.uniform(1e5, 5e7)
    transient = draw.uniform(0, 1e8)
    shares = sorted((draw.uniform(0, 1), draw.uniform(0, 1)))
    core = (draw.uniform(1e9, 1e11), draw.uniform(1e4, 1e6))
    own = random.Random(f"put off {saved}")
    put_off, spent = own.uniform(0.0, 1.0) * saved, own.choice((0.0, 0.0, 0.9)) * saved
    experts: tuple[Experts, ...] = ()
    products: tuple[OpProfile, ...] = ()
    if kind == "mixture":
        bank, up, products = expert_bank(draw.choice((2, 4, 6)), copies=2, width=512, inner=1024)
        parameters.append(up)
        experts = (bank,)

    def costs(cut: bool, sliced: bool) -> Costs:
        operators = [_operator("mm", part, per_sample(flops, cut)) for part in ("forward", "backward_input")]
        operators.append(_operator("mm", "backward_weight", per_sample(flops, cut)))
        if kind == "fused":
            operators += [
                _operator("sdpa", part, per_sample(n * core[0], cut), "attention", elements(core[1], cut))
                for part, n in (("forward", 1.0), ("backward_input", 2.5))
            ]
        if kind == "scores":
            side = per_sample(4.0 * SEQ_LEN, cut), fixed(64.0), fixed(float(SEQ_LEN))
            scores = _operator("bmm", "forward", per_sample(core[0], cut), "matmul", elements(core[1], cut))
            operators.append(scores.model_copy(update={"core": True, "shape": side}))
            operators.append(_operator("bmm", "backward_input", per_sample(2 * core[0], cut)))
        operators += products
        collectives = tuple(
            CollectiveProfile(kind=kind_, part=part, tensor=elements(inputs / 2, False))
            for part in ("forward", "backward")
            for kind_ in (("all_gather", "reduce_scatter") if sliced else ("all_reduce",))
            if cut
        )
        least, between = (elements(share * saved / 2, cut) for share in (shares[0] / 4, shares[0]))
        return Costs(
            operators=tuple(operators),
            saved=elements(saved / 2, cut),
            full=least,
            selective=between,
            attention=elements(shares[1] * saved / 2, cut) if kind == "scores" else elements(saved / 2, cut),
            inputs=elements(inputs / 2, sliced),
            forward_transient=Bytes(),
            backward_transient=elements(transient / 2, cut),
            put_off=elements(put_off / 2, cut),
            spent=elements(spent / 2, cut),
            collectives=collectives,
        )

    cut = TensorCut(kind="attention", columns=("a",), rows=("b",), units=(heads or 1,), sharded={"weight": 0})
    return LayerClass(
        name=name,
        parameters=tuple(parameters),
        whole=costs(cut=False, sliced=False),
        cuts=(cut,) if heads else (),
        tensor=costs(cut=True, sliced=False) if heads else None,
        sequence=costs(cut=True, sliced=True) if heads else None,
        experts=experts,
    )


def _chain(draw: random.Random, classes: list[LayerClass], order: list[int]) -> ModelProfile:
    same = [(a, b) for a in range(len(order)) for b in range(a + 1, len(order)) if order[a] == order[b]]
    ties = [draw.choice(same)] if same and draw.random() < 0.3 else []
    crossing = [draw.uniform(1e5, 5e7) if draw.random() < 0.5 else 1e6 for _ in order[1:]]
    whole = [draw.random() < 0.9 for _ in order]  # whether a layer is one module, and may be recomputed
    return chain(
        "random",
        classes,
        order,
        crossing,
        ties,
        loose=[i for i, single in enumerate(whole) if not single],
        attention_modules=[f"layer{i}" for i, c in enumerate(order) if classes[c].cuts],
    )


def _operator(name: str, part: str, flops: Amount, kind: str = "other", moved: Bytes | None = None) -> OpProfile:
    return OpProfile(name=name, module="", kind=kind, part=part, flops=flops, moved=moved or Bytes())  # type: ignore[arg-type]
