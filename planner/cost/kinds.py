"""Kinds of layers, which cost the same under every shape: which parameters they share with other layers, and which of
the tensors that arrive they keep."""

from dataclasses import dataclass
from functools import cached_property

from ...profiler.model.model_profile import FP32_BYTES, Bytes, CrossingTensor, ModelProfile
from ..plan.legality import can_recompute
from ..plan.shape import Shape
from .kept import kept


@dataclass(frozen=True)
class SharedName:
    """A parameter that other layers read, too; its name is relative to the layer's root.

    by_name: the others read it under the same name, and are always on one stage; else it is tied, and stages hold
    copies. repeated: an earlier layer reads it already.
    """

    name: str
    by_name: bool
    repeated: bool


@dataclass(frozen=True)
class Arriving:
    """A tensor from an earlier layer whose bytes are counted with a layer that reads it. slices: under sequence
    parallelism it is one slice."""

    size: Bytes
    slices: bool


@dataclass(frozen=True)
class Kind:
    """Layers that cost the same under every shape. They agree in class, in whether slices of the sequence begin or end
    there (`enters`, `leaves`), in the parameters that they share, and in the arriving tensors that they keep without
    recompute and with it."""

    layer_class: int
    enters: int = 0
    leaves: int = 0
    can_recompute: bool = True
    shared: tuple[SharedName, ...] = ()
    keeps: tuple[Arriving, ...] = ()
    keeps_for_recompute: tuple[Arriving, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layer_class, self.enters, self.leaves, self.can_recompute, self.shared, self.keeps))

    def is_in_root(self, shape: Shape) -> bool:
        """Whether other layers of the same stage read parameters of this one. fully_shard must then leave them to its
        root, which never gives them back. (Tied layers of a pipeline are taken to be on different stages.)"""
        return any(item.by_name or shape.pipeline == 1 for item in self.shared)

    def held_before(self, shape: Shape) -> frozenset[str]:
        """Parameters that an earlier layer of the stage holds; they are gathered and reduced there."""
        return frozenset(s.name for s in self.shared if s.repeated and (s.by_name or shape.pipeline == 1))


@kept
def kinds_of(profile: ModelProfile) -> tuple[Kind, ...]:
    """Kind of every layer of the chain; equal ones are one object."""
    classes, layers = profile.classes, profile.layers
    sliced = [classes[layer.layer_class].sequence is not None for layer in layers]
    shared, arriving = _shared_names(profile), _kept_arriving(profile)
    kinds = []
    for i, layer in enumerate(layers):
        leaves = enters = 0
        if not sliced[i]:
            enters = int(i + 1 < len(layers) and sliced[i + 1])
            leaves = int(i > 0 and sliced[i - 1])
        keeps = arriving[i]
        kinds.append(Kind(layer.layer_class, enters, leaves, can_recompute(profile, layer), shared[i], *keeps))
    first: dict[Kind, Kind] = {}
    return tuple(first.setdefault(kind, kind) for kind in kinds)


@kept
def shared_groups(profile: ModelProfile) -> list[list[int]]:
    """[layer] -> numbers of the groups of tied or shared parameters that it reads. Ties have the first numbers, in the
    profile's order."""
    group_of = {name: g for g, names in enumerate(profile.ties) for name in names}
    readers: dict[str, list[int]] = {}
    for i, layer in enumerate(profile.layers):
        for name in layer.parameters:
            readers.setdefault(name, []).append(i)
    for name, layers in readers.items():
        if len(layers) > 1 and name not in group_of:
            group_of[name] = len(group_of) + len(profile.ties)
    return [sorted({group_of[n] for n in layer.parameters if n in group_of}) for layer in profile.layers]


def _kept_arriving(profile: ModelProfile) -> list[tuple[tuple[Arriving, ...], tuple[Arriving, ...]]]:
    """[layer] -> (tensors from earlier layers that are counted with it, the same if it is recomputed).

    A tensor that any layer saves counts once, with its last reader: stages before that one send it on, and hold it as
    what they send. A tensor that no layer saves is kept for the layers that are recomputed from it, and counts once as
    well, with the last of them that can be recomputed. If a layer hands on a tensor unchanged, both are one tensor.
    """
    tensors = profile.tensors
    found: list[tuple[list[Arriving], list[Arriving]]] = [([], []) for _ in profile.layers]
    for group in ([tensors[i] for i in members] for members in _same(profile)):
        slices = group[0].requires_grad and "sequence" in group[0].dims
        saved = any(tensor.saved_by for tensor in group)
        in_fp32 = any(_savers_in_fp32(tensor) for tensor in group)
        readers = {reader for tensor in group for reader in tensor.used_by}
        last = max(readers)
        given = {i for tensor in group for i in (tensor.used_by if tensor.given_to is None else tensor.given_to)}
        repeated = max((i for i in given if can_recompute(profile, profile.layers[i])), default=None)
        for reader in readers:
            keeps = [(saved and reader == last, in_fp32 and reader == last)]
            keeps.append((reader == (last if saved else repeated), reader == (last if in_fp32 else repeated)))
            for items, (counts, counts_in_fp32) in zip(found[reader], keeps, strict=True):
                if counts or counts_in_fp32:
                    items.append(Arriving(_counted(group[0].size, counts, counts_in_fp32), slices))
    return [(tuple(without), tuple(with_it)) for without, with_it in found]


@kept
def kept_with_last(profile: ModelProfile) -> tuple[tuple[int, Arriving], ...]:
    """[crossing tensor] -> (last layer that reads it, the part of it that counts there whatever is recomputed)."""
    last, sizes = [-1] * len(profile.tensors), [Bytes()] * len(profile.tensors)
    for group in _same(profile):
        members = [profile.tensors[i] for i in group]
        saved = any(tensor.saved_by for tensor in members)
        in_fp32 = any(_savers_in_fp32(tensor) for tensor in members)
        for i in group:
            last[i] = max(tensor.last_used_by for tensor in members)
            sizes[i] = _counted(members[0].size, saved, in_fp32) if saved or in_fp32 else Bytes()
    slices = [tensor.requires_grad and "sequence" in tensor.dims for tensor in profile.tensors]
    return tuple((reader, Arriving(size, cut)) for reader, size, cut in zip(last, sizes, slices, strict=True))


def _same(profile: ModelProfile) -> list[list[int]]:
    """Groups of crossing tensors, by index, that are one tensor, because layers hand it on unchanged."""
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(profile.tensors):
        groups.setdefault(i if tensor.same_as is None else tensor.same_as, []).append(i)
    return list(groups.values())


def _savers_in_fp32(tensor: CrossingTensor) -> tuple[int, ...]:
    return tensor.saved_by if tensor.saved_in_fp32_by is None else tensor.saved_in_fp32_by


def _counted(size: Bytes, counts: bool, in_fp32: bool) -> Bytes:
    """A size that counts in every compute dtype, or only if that is fp32, or only if it is not."""
    if counts and in_fp32:
        return size
    sign = 1.0 if in_fp32 else -1.0
    fixed, per_sample, fixed_cut, per_sample_cut = (
        sign * (FP32_BYTES * elements + other) for elements, other in zip(size.elements, size.other_bytes, strict=True)
    )
    only = Bytes(in_fp32=(fixed, per_sample, fixed_cut, per_sample_cut))
    return only if in_fp32 else size.model_copy(update={"in_fp32": only.in_fp32})


def _shared_names(profile: ModelProfile) -> list[tuple[SharedName, ...]]:
    """[layer] -> those of its parameters that other layers read, too."""
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
