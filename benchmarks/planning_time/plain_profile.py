"""Pieces of a ModelProfile made of plain numbers: amounts, a bank of experts, a chain of layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.profiler.model.model_profile import (
    Amount,
    Bytes,
    Costs,
    CrossingTensor,
    Experts,
    LayerClass,
    LayerPart,
    LayerProfile,
    ModelProfile,
    OpProfile,
    ParameterProfile,
    PartBytes,
    Producer,
)

SEQ_LEN = 64


def fixed(value: float) -> Amount:
    """An amount that does not grow with the batch."""
    return (value, 0.0, 0.0, 0.0)


def per_sample(value: float, cut: bool = False) -> Amount:
    """An amount proportional to the batch, and to 1 / tensor if cut."""
    return (0.0, 0.0, 0.0, value) if cut else (0.0, value, 0.0, 0.0)


def elements(value: float, cut: bool = False) -> Bytes:
    """So many elements of the compute dtype per sample."""
    return Bytes(elements=per_sample(value, cut))


def expert_bank(
    count: int, copies: int, width: int, inner: int
) -> tuple[Experts, ParameterProfile, tuple[OpProfile, ...]]:
    """A bank of experts to which each token goes `copies` times, its weight [count, width, inner], and the grouped
    product with that and the two of its backward."""
    rows = per_sample(float(copies * SEQ_LEN))
    sides = {
        "forward": (rows, fixed(width), fixed(inner)),
        "backward_input": (rows, fixed(inner), fixed(width)),
        "backward_weight": (fixed(width), rows, fixed(inner)),
    }
    products = tuple(
        OpProfile(
            name="_grouped_mm",
            module="experts",
            kind="matmul",
            part=part,  # type: ignore[arg-type]
            flops=per_sample(2 * rows[1] * width * inner),
            moved=Bytes(elements=fixed(float(count * width * inner))),
            shape=shape,
        )
        for part, shape in sides.items()
    )
    bank = Experts(module="experts", count=count, parameters=("up",), routed=rows, called="routed")
    return bank, ParameterProfile(name="up", shape=(count, width, inner)), products


@dataclass(frozen=True)
class Part:
    """A part of a layer, by shares: of what the layer saves, that it gives up and that only it is given and keeps, and
    of the layer's forward. reads_arriving: it is given what arrives in the layer."""

    name: str
    freed: float
    given: float
    forward: float
    reads_arriving: bool = False


def with_parts(plain: LayerClass, parts: Sequence[Part]) -> LayerClass:
    """The class with these parts. The last one runs its attention and its experts; each calls one of its collectives
    of the forward again, as far as there are so many; what each saves the next one is given."""
    modes = {name: getattr(plain, name) for name in ("whole", "tensor", "sequence")}
    found = {name: _in_parts(costs, parts) for name, costs in modes.items() if costs is not None}
    named = tuple(LayerPart(name=part.name, reads_arriving=part.reads_arriving) for part in parts)
    banks = tuple(bank.model_copy(update={"module": f"{parts[-1].name}.experts"}) for bank in plain.experts)
    return plain.model_copy(update={**found, "parts": named, "experts": banks})


def _in_parts(costs: Costs, parts: Sequence[Part]) -> Costs:
    operators: list[OpProfile] = []
    for op in costs.operators:
        if op.part != "forward":
            operators.append(op)
        elif op.kind == "attention" or op.core or op.module == "experts":
            operators.append(op.model_copy(update={"within": parts[-1].name}))
        else:
            rest = 1.0 - sum(part.forward for part in parts)
            pieces = [("", rest), *((part.name, part.forward) for part in parts)]
            operators += [_share(op, share, name) for name, share in pieces]
    experts = "experts", f"{parts[-1].name}.experts"
    moved = [op.model_copy(update={"module": experts[1]}) if op.module == experts[0] else op for op in operators]
    last = len(parts) - 1
    sizes = [PartBytes(saved_in=(i,), given_to=(), size=_scaled(costs.saved, p.freed)) for i, p in enumerate(parts)]
    sizes += [PartBytes(saved_in=(), given_to=(i,), size=_scaled(costs.saved, p.given)) for i, p in enumerate(parts)]
    sizes += [
        PartBytes(saved_in=(i,), given_to=(i + 1,), size=_scaled(costs.saved, parts[i].freed / 8)) for i in range(last)
    ]
    gone = [_scaled(costs.saved, -part.freed) for part in parts]
    peaks = [_sum([costs.backward_transient, *gone[number + 1 :]]) for number in range(len(parts) + 1)]
    names = iter([part.name for part in parts])
    collectives = tuple(
        c.model_copy(update={"within": next(names, "")}) if c.part == "forward" else c for c in costs.collectives
    )
    return costs.model_copy(
        update={
            "operators": tuple(moved),
            "part_bytes": tuple(sizes),
            "part_peaks": tuple(peaks),
            "collectives": collectives,
        }
    )


def _share(op: OpProfile, share: float, within: str) -> OpProfile:
    a, b, c, d = (share * number for number in op.flops)
    return op.model_copy(update={"flops": (a, b, c, d), "within": within})


def _scaled(size: Bytes, share: float) -> Bytes:
    (a, b, c, d), (e, f, g, h) = ([share * n for n in amount] for amount in (size.elements, size.other_bytes))
    return Bytes(elements=(a, b, c, d), other_bytes=(e, f, g, h))


def _sum(sizes: Sequence[Bytes]) -> Bytes:
    (a, b, c, d), (e, f, g, h) = (
        [sum(numbers) for numbers in zip(*amounts, strict=True)]
        for amounts in ([size.elements for size in sizes], [size.other_bytes for size in sizes])
    )
    return Bytes(elements=(a, b, c, d), other_bytes=(e, f, g, h))


def chain(
    name: str,
    classes: Sequence[LayerClass],
    order: Sequence[int],
    crossing: Sequence[float],
    ties: Sequence[tuple[int, int]] = (),
    loose: Sequence[int] = (),
    attention_modules: Sequence[str] = (),
) -> ModelProfile:
    """Layers `order` (indices of classes), with `crossing` bytes per sample after each but the last. ties: pairs of
    layers with one weight; loose: layers of two modules, which are not recomputed."""
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            layer_class=c,
            root=f"layer{i}",
            modules=(f"layer{i}", f"more{i}") if i in loose else (f"layer{i}",),
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
            size=elements(size / 2),
        )
        for i, size in enumerate(crossing)
    )
    return ModelProfile(
        name=name,
        source=name,
        fingerprint="0" * 64,
        seq_len=SEQ_LEN,
        torch_version="none",
        classes=tuple(classes),
        layers=layers,
        tensors=tensors,
        ties=tuple((f"layer{a}.weight", f"layer{b}.weight") for a, b in ties),
        batch=(),
        returns_loss=False,
        attention_modules=tuple(attention_modules),
    )
