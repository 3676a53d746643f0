"""What a layer keeps and runs again under each kind of recompute, that of parts of the layer included."""

from collections.abc import Collection
from itertools import combinations

from ...profiler.model.model_profile import Costs, Experts, LayerClass, PartBytes
from ..plan.document import Recompute, parts_of, recompute_of_parts
from .kept import kept


@kept
def ways_of_parts(layer_class: LayerClass) -> tuple[Recompute, ...]:
    """One recompute for every choice of one or more of a layer's parts."""
    names = [part.name for part in layer_class.parts]
    return tuple(recompute_of_parts(some) for n in range(1, len(names) + 1) for some in combinations(names, n))


def within(layer_class: LayerClass, recompute: Recompute) -> Recompute:
    """The recompute that layers of this class run, if `recompute` is asked of all layers. If it names parts, those that
    the layer has, in the layer's order (none, if it has none of them); else `recompute` itself."""
    named = parts_of(recompute)
    if not named:
        return recompute
    return recompute_of_parts([part.name for part in layer_class.parts if part.name in named])


def unknown_parts(layer_class: LayerClass, recompute: Recompute) -> tuple[str, ...]:
    """Parts that a recompute names but layers of this class do not have."""
    return tuple(name for name in parts_of(recompute) if name not in {part.name for part in layer_class.parts})


def kept_at(
    layer_class: LayerClass, costs: Costs, recompute: Recompute, batch: float, element_bytes: int, tensor: int
) -> float:
    """Bytes that a layer keeps from forward to backward, without tensors from other layers. costs: those of the mode
    that the layer runs in; batch, element_bytes, tensor: as for Bytes.at."""
    named = _indices(layer_class, recompute)
    if not named:
        under = {"none": costs.saved, "attention": costs.attention, "selective": costs.selective, "full": costs.full}
        return under[recompute].at(batch, element_bytes, tensor)
    size = costs.saved.at(batch, element_bytes, tensor)
    for item in costs.part_bytes:
        if item.is_kept(named) != bool(item.saved_in):
            size += item.size.at(batch, element_bytes, tensor) * (1 if item.is_kept(named) else -1)
    return size


def backward_at(
    layer_class: LayerClass, costs: Costs, recompute: Recompute, batch: float, element_bytes: int, tensor: int
) -> float:
    """Bytes beyond `saved` at the peak of a backward that recomputes parts of the layer: what each part saves comes
    back when the backward reaches it."""
    named = _indices(layer_class, recompute)
    gone = [(max(item.saved_in), item.size) for item in costs.part_bytes if item.saved_in and not item.is_kept(named)]
    return max(
        (
            peak.at(batch, element_bytes, tensor)
            - sum(size.at(batch, element_bytes, tensor) for last, size in gone if last < number)
            for number, peak in enumerate(costs.part_peaks)
        ),
        default=costs.backward_transient.at(batch, element_bytes, tensor),
    )


def given_to_parts(layer_class: LayerClass, costs: Costs, recompute: Recompute) -> list[PartBytes]:
    """Tensors made in a layer that are kept because they are inputs of recomputed parts."""
    named = _indices(layer_class, recompute)
    return [item for item in costs.part_bytes if any(part in named for part in item.given_to)]


def keeps_arriving(layer_class: LayerClass, recompute: Recompute) -> bool:
    """Whether the tensors that arrive at a layer are kept for its recompute."""
    named = _indices(layer_class, recompute)
    return recompute in ("selective", "full") or any(layer_class.parts[i].reads_arriving for i in named)


def repeats_attention(costs: Costs, recompute: Recompute) -> bool:
    """Whether a recompute runs attention again."""
    named = parts_of(recompute)
    if not named:
        return recompute in ("attention", "full")
    return any(op.within in named for op in costs.operators if op.kind == "attention" or op.core)


def repeats_bank(bank: Experts, recompute: Recompute) -> bool:
    """Whether a recompute gives a bank of experts its tokens again."""
    named = parts_of(recompute)
    return recompute in ("selective", "full") or any(f"{bank.module}.".startswith(f"{name}.") for name in named)


def repeats_collective(repeated: bool, part: str, recompute: Recompute) -> bool:
    """Whether a recompute calls a collective of the forward again. repeated: recompute of the whole layer does; part:
    name of the part of the layer whose recompute does."""
    named = parts_of(recompute)
    return part in named if named else repeated and recompute in ("selective", "full")


@kept
def _places(layer_class: LayerClass) -> dict[str, int]:
    return {part.name: place for place, part in enumerate(layer_class.parts)}


def _indices(layer_class: LayerClass, recompute: Recompute) -> Collection[int]:
    """Indices, in the class's list, of the parts that are recomputed. Raises ValueError for a part that the class does
    not have."""
    places, named = _places(layer_class), parts_of(recompute)
    missing = [name for name in named if name not in places]
    if missing:
        known = ", ".join(places) or "none"
        raise ValueError(f"recompute={recompute!r}: {layer_class.name} has no part {missing[0]}; its parts: {known}")
    return [places[name] for name in named]
