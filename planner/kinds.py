"""Kinds of layers that cost the same under every shape: what they share, and which arriving tensors they keep."""

from dataclasses import dataclass

from ..profiler.model_profile import Bytes, CrossingTensor, ModelProfile
from .strategy import Shape, can_recompute


@dataclass(frozen=True)
class SharedName:
    """A parameter (name relative to the layer's root) that other layers read, too.

    by_name: under the same name, so that they are always on one stage; else tied, so that stages hold copies.
    repeated: an earlier layer has it already.
    """

    name: str
    by_name: bool
    repeated: bool


@dataclass(frozen=True)
class Arriving:
    """A tensor from an earlier layer that counts with its reader. slices: under sequence parallelism it is a slice."""

    size: Bytes
    slices: bool


@dataclass(frozen=True)
class Kind:
    """Layers that cost the same under every shape: class, whether slices of the sequence begin or end here, what they
    share with others, and which of the tensors that arrive they keep (without recompute, and with it)."""

    layer_class: int
    enters: int = 0
    leaves: int = 0
    can_recompute: bool = True
    shared: tuple[SharedName, ...] = ()
    keeps: tuple[Arriving, ...] = ()
    keeps_for_recompute: tuple[Arriving, ...] = ()

    def is_in_root(self, shape: Shape) -> bool:
        """Whether layers of the same stage read this one's parameters: fully_shard must leave them to its root, which
        never gives them back. (Tied layers of a pipeline are taken to be on different stages.)"""
        return any(item.by_name or shape.pipeline == 1 for item in self.shared)

    def held_before(self, shape: Shape) -> frozenset[str]:
        """Parameters that an earlier layer of the stage holds: gathered and reduced there."""
        return frozenset(s.name for s in self.shared if s.repeated and (s.by_name or shape.pipeline == 1))


def kinds_of(profile: ModelProfile) -> tuple[Kind, ...]:
    """Kind of every layer of the chain."""
    classes, layers = profile.classes, profile.layers
    sliced = [classes[layer.layer_class].sequence is not None for layer in layers]
    shared, kept = _shared_names(profile), _kept_arriving(profile)
    kinds = []
    for i, layer in enumerate(layers):
        leaves = enters = 0
        if not sliced[i]:
            enters = int(i + 1 < len(layers) and sliced[i + 1])
            leaves = int(i > 0 and sliced[i - 1])
        kinds.append(Kind(layer.layer_class, enters, leaves, can_recompute(profile, layer), shared[i], *kept[i]))
    return tuple(kinds)


def _kept_arriving(profile: ModelProfile) -> list[tuple[tuple[Arriving, ...], tuple[Arriving, ...]]]:
    """[layer] -> (tensors from earlier layers that it keeps, the same if it is recomputed).

    What somebody saves counts once, with its last reader: stages before that one send it on, and hold it as what they
    send. What nobody saves is kept by the layers that are recomputed from it. A tensor that a layer hands on unchanged
    is one with what it was given.
    """
    tensors = profile.tensors
    groups: dict[int, list[CrossingTensor]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(i if tensor.same_as is None else tensor.same_as, []).append(tensor)
    kept: list[tuple[list[Arriving], list[Arriving]]] = [([], []) for _ in profile.layers]
    for group in groups.values():
        arriving = Arriving(group[0].size, group[0].requires_grad and "sequence" in group[0].dims)
        saved = any(tensor.saved_by for tensor in group)
        last = max(tensor.last_used_by for tensor in group)
        for reader in sorted({reader for tensor in group for reader in tensor.used_by}):
            if saved and reader == last:
                kept[reader][0].append(arriving)
            if reader == last or not saved:
                kept[reader][1].append(arriving)
    return [(tuple(without), tuple(with_it)) for without, with_it in kept]


def _shared_names(profile: ModelProfile) -> list[tuple[SharedName, ...]]:
    """[layer] -> its parameters that other layers read, too."""
    ties = {name: group for group in profile.ties for name in group}
    readers: dict[str, list[int]] = {}
    for i, layer in enumerate(profile.layers):
        for name in layer.parameters:
            readers.setdefault(name, []).append(i)
    found = []
    for i, layer in enumerate(profile.layers):
        prefix = f"{layer.root}." if layer.root else ""
        names = []
        for name in layer.parameters:
            all_readers = {reader for tied in ties.get(name, (name,)) for reader in readers.get(tied, ())}
            if len(all_readers) > 1:
                names.append(SharedName(name.removeprefix(prefix), len(readers[name]) > 1, min(all_readers) < i))
        found.append(tuple(names))
    return found
