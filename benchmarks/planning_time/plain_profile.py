"""Pieces of a ModelProfile made of plain numbers: amounts, a bank of experts, a chain of layers."""

from collections.abc import Sequence

from meshwright.profiler.model_profile import (
    Amount,
    Bytes,
    CrossingTensor,
    Experts,
    LayerClass,
    LayerProfile,
    ModelProfile,
    OpProfile,
    ParameterProfile,
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


def chain(
    name: str,
    classes: Sequence[LayerClass],
    order: Sequence[int],
    crossing: Sequence[float],
    ties: Sequence[tuple[int, int]] = (),
    loose: Sequence[int] = (),
    attention_modules: Sequence[str] = (),
) -> ModelProfile:
    """Layers `order` (indices of classes), with `crossing` bytes per sample behind each but the last. ties: pairs of
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
