"""Random small planning problems made of plain numbers: few enough plans to price every one of them."""

import random
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.planner.layer_cost import CostModel
from meshwright.planner.strategy import Pins
from meshwright.planner.tensor_choice import CutChoice
from meshwright.planner.training import TrainingSpec
from meshwright.profiler.cluster import ClusterSpec, Device, HostGroup, Link
from meshwright.profiler.model_profile import (
    Amount,
    Bytes,
    CollectiveProfile,
    Costs,
    CrossingTensor,
    Experts,
    LayerClass,
    LayerProfile,
    ModelProfile,
    OpProfile,
    ParameterProfile,
    Producer,
    TensorCut,
)

SEQ_LEN = 64

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
    device = _device(draw)
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
    return Instance(
        seed,
        chain,
        ClusterSpec(name=f"{hosts} x {per_host}", hosts=(group,), network=network),
        training,
        pins,
    )


def _device(draw: random.Random) -> Device:
    """Round numbers: 100 TFLOP/s, 1 TB/s; some launch kernels, slow down while they communicate, or are tiny."""
    return Device(
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


def _layer_class(draw: random.Random, name: str) -> LayerClass:
    """A plain layer, a block with attention (fused, or one that keeps its scores), or a mixture of experts."""
    kind = draw.choice(("plain", "plain", "fused", "scores", "mixture"))
    heads = draw.choice((None, 2, 4, 4)) if kind != "mixture" else None
    parameters = [ParameterProfile(name="weight", shape=(draw.randrange(1, 40) * 1_000_000,))]
    flops, saved, inputs = draw.uniform(1e10, 4e11), draw.uniform(1e6, 4e8), draw.uniform(1e5, 5e7)
    transient = draw.uniform(0, 1e8)
    shares = sorted((draw.uniform(0, 1), draw.uniform(0, 1)))
    core = (draw.uniform(1e9, 1e11), draw.uniform(1e4, 1e6))
    experts: tuple[Experts, ...] = ()
    if kind == "mixture":
        count, width = draw.choice((2, 4, 6)), 512
        parameters.append(ParameterProfile(name="up", shape=(count, width, 1024)))
        routed = _per_sample(2.0 * SEQ_LEN)
        experts = (Experts(module="experts", count=count, parameters=("up",), routed=routed, called="routed"),)

    def costs(cut: bool, sliced: bool) -> Costs:
        operators = [_operator("mm", part, _per_sample(flops, cut)) for part in ("forward", "backward_input")]
        operators.append(_operator("mm", "backward_weight", _per_sample(flops, cut)))
        if kind == "fused":
            operators += [
                _operator("sdpa", part, _per_sample(n * core[0], cut), "attention", _elements(core[1], cut))
                for part, n in (("forward", 1.0), ("backward_input", 2.5))
            ]
        if kind == "scores":
            side = _per_sample(4.0 * SEQ_LEN, cut), _fixed(64.0), _fixed(float(SEQ_LEN))
            scores = _operator("bmm", "forward", _per_sample(core[0], cut), "matmul", _elements(core[1], cut))
            operators.append(scores.model_copy(update={"core": True, "shape": side}))
            operators.append(_operator("bmm", "backward_input", _per_sample(2 * core[0], cut)))
        for bank in experts:
            operators += _expert_products(bank, width, 1024)
        collectives = tuple(
            CollectiveProfile(kind=kind_, part=part, tensor=_elements(inputs / 2, False))
            for part in ("forward", "backward")
            for kind_ in (("all_gather", "reduce_scatter") if sliced else ("all_reduce",))
            if cut
        )
        least, between = (_elements(share * saved / 2, cut) for share in (shares[0] / 4, shares[0]))
        return Costs(
            operators=tuple(operators),
            saved=_elements(saved / 2, cut),
            full=least,
            selective=between,
            attention=_elements(shares[1] * saved / 2, cut) if kind == "scores" else _elements(saved / 2, cut),
            inputs=_elements(inputs / 2, sliced),
            forward_transient=Bytes(),
            backward_transient=_elements(transient / 2, cut),
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


def _expert_products(bank: Experts, width: int, inner: int) -> list[OpProfile]:
    """The grouped product with the experts' weights, and the two of its backward."""
    rows, moved = bank.routed, Bytes(elements=_fixed(float(bank.count * width * inner)))
    sides = {
        "forward": (rows, _fixed(width), _fixed(inner)),
        "backward_input": (rows, _fixed(inner), _fixed(width)),
        "backward_weight": (_fixed(width), rows, _fixed(inner)),
    }
    flops = _per_sample(2 * rows[1] * width * inner)
    return [
        _operator("_grouped_mm", part, flops, "matmul", moved).model_copy(update={"module": "experts", "shape": shape})
        for part, shape in sides.items()
    ]


def _chain(draw: random.Random, classes: list[LayerClass], order: list[int]) -> ModelProfile:
    same = [(a, b) for a in range(len(order)) for b in range(a + 1, len(order)) if order[a] == order[b]]
    ties = [draw.choice(same)] if same and draw.random() < 0.3 else []
    crossing = [draw.uniform(1e5, 5e7) if draw.random() < 0.5 else 1e6 for _ in order[1:]]
    whole = [draw.random() < 0.9 for _ in order]  # whether a layer is one module, and may be recomputed
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            layer_class=c,
            root=f"layer{i}",
            modules=(f"layer{i}",) if whole[i] else (f"layer{i}", f"more{i}"),
            parameters=tuple(f"layer{i}.{parameter.name}" for parameter in classes[c].parameters),
        )
        for i, c in enumerate(order)
    )
    tensors = tuple(
        CrossingTensor(
            producer=Producer(kind="module", name=f"layer{i}"),
            made_by=i,
            last_used_by=i + 1,
            used_by=(i + 1,),
            saved_by=(i + 1,),
            shape=(1, SEQ_LEN, max(1, round(size / 2 / SEQ_LEN))),
            dims=("batch", "sequence", "other"),
            dtype="compute",
            requires_grad=True,
            size=_elements(size / 2, False),
        )
        for i, size in enumerate(crossing)
    )
    return ModelProfile(
        name="random",
        source="random",
        fingerprint="0" * 64,
        seq_len=SEQ_LEN,
        torch_version="none",
        classes=tuple(classes),
        layers=layers,
        tensors=tensors,
        ties=tuple((f"layer{a}.weight", f"layer{b}.weight") for a, b in ties),
        batch=(),
        returns_loss=False,
        attention_modules=tuple(f"layer{i}" for i, c in enumerate(order) if classes[c].cuts),
    )


def _per_sample(value: float, cut: bool = False) -> Amount:
    """An amount proportional to the batch, and to 1 / tensor if cut."""
    return (0.0, 0.0, 0.0, value) if cut else (0.0, value, 0.0, 0.0)


def _fixed(value: float) -> Amount:
    return (value, 0.0, 0.0, 0.0)


def _elements(value: float, cut: bool) -> Bytes:
    return Bytes(elements=_per_sample(value, cut))


def _operator(name: str, part: str, flops: Amount, kind: str = "other", moved: Bytes | None = None) -> OpProfile:
    return OpProfile(name=name, module="", kind=kind, part=part, flops=flops, moved=moved or Bytes())  # type: ignore[arg-type]
