"""What a user saves beside model and optimizer: tensors like parameters by rank, in whole-tensor terms; the rest once.

Averaged weights (`save(ema=...)`) hold this rank's shard of every parameter. They are found in a state_dict as a dict
that names parameters or buffers as the trainer's model does (`module.` may stand before), or as a list of one tensor
for each parameter in the model's order. Everything else has to be alike on all ranks, for another plan has other ranks;
but a StatefulDataLoader of torchdata is its data rank's own, and so is its state.
"""

import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .boxes import Box

_MARK = "__meshwright__"
_LEADS = ("", "module.", "_orig_mod.", "module._orig_mod.", "model.")


class Stateful(Protocol):
    """What can be saved with a checkpoint: a learning-rate scheduler, averaged weights."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state."""
        ...


def is_of_data_rank(source: Stateful) -> bool:
    """Whether a source belongs to one data rank and knows its place in the data: a StatefulDataLoader of torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")  # whoever has one has imported it
    return module is not None and isinstance(source, module.StatefulDataLoader)


def loader_state(name: str, source: Stateful) -> Any:
    """A copy of a data loader's state. Raises ValueError if a checkpoint could not be read with it."""
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    try:
        return torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name} cannot be saved: its state holds more than numbers, texts and tensors, which a checkpoint is not "
            f"read for ({str(error).splitlines()[0]}); let the dataset's state_dict() give such"
        ) from None


@dataclass(frozen=True)
class Place:
    """A parameter or buffer of this rank. name: its name in the whole model. own_name: its name on this rank."""

    name: str
    own_name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Extra:
    """What one source saves. tree: its state_dict, without tensors that are divided like parameters. shards: (path in
    the tree, parameter, tensor) of these."""

    tree: Any
    shards: list[tuple[str, Place, torch.Tensor]]

    def digests(self) -> dict[str, str]:
        """Path in the tree -> hash of the value there."""
        return {path: hashlib.sha256(_packed(leaf)).hexdigest() for path, leaf in _leaves(self.tree, "")}


def extra_of(source: Stateful, parameters: list[Place], buffers: list[Place], prefix: str) -> Extra:
    """What a source saves on this rank. prefix: stands before names of parameters in the trainer's model."""
    shards: list[tuple[str, Place, torch.Tensor]] = []
    known = {place.own_name: place for place in (*buffers, *parameters)}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Mapping):
            found: dict[Any, Any] = {}
            leads: set[tuple[str, bool, bool]] = set()
            for key, value in node.items():
                named = _named(key, value, known, prefix)
                if named is None:
                    found[key] = walk(value, f"{path}/{key}")
                else:
                    lead, in_module, place = named
                    leads.add((lead, in_module, isinstance(value, DTensor)))
                    shards.append((path, place, value))
            if leads:
                lead, in_module, _ = min(leads)
                found[_MARK] = {"kind": "named", "lead": lead, "in_module": in_module}
            return found
        if isinstance(node, list | tuple):
            for trained_only in (False, True):
                order = [p for p in parameters if p.tensor.requires_grad or not trained_only]
                if order and len(order) == len(node) and all(map(_is_like, node, order)):
                    shards.extend((path, place, value) for place, value in zip(order, node, strict=True))
                    return {_MARK: {"kind": "listed", "trained_only": trained_only, "tuple": isinstance(node, tuple)}}
            return [walk(value, f"{path}/{i}") for i, value in enumerate(node)]
        return node

    return Extra(walk(source.state_dict(), ""), shards)


def check_alike(name: str, extra: Extra, gathered: Callable[[Any], list[Any]]) -> None:
    """Raise ValueError, on every rank, if what is saved only once is not the same on all ranks. gathered: returns
    [rank] -> value."""
    own = extra.digests()
    if len(set(gathered(hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()))) == 1:
        return
    every = gathered(own)
    for rank, other in enumerate(every):
        for path in sorted(own_first := every[0].keys() | other.keys()):
            if every[0].get(path) != other.get(path):
                raise ValueError(
                    f"{name} cannot be saved: {path.lstrip('/') or 'its state'} of its {len(own_first)} values differs "
                    f"between ranks 0 and {rank}, and is no tensor that is named and shaped like a parameter of "
                    "trainer.model, so no other plan could take it over. Save what is alike on all ranks, or tensors "
                    "in a dict with the names of trainer.model.named_parameters()"
                )


def extra_key(name: str, path: str, place: Place) -> str:
    """The key of a tensor in the checkpoint."""
    return f"more.{name}:{path}:{place.name}"


class Refill:
    """A saved tree that is restored to a source after its boxes were read. boxes: to be read into.

    make_boxes: (key, place, tensor that is divided like the place's) -> its boxes.
    """

    def __init__(
        self,
        name: str,
        source: Stateful,
        tree: Any,
        saved: Metadata,
        parameters: list[Place],
        buffers: list[Place],
        prefix: str,
        make_boxes: Callable[[str, Place, torch.Tensor], list[Box]],
    ) -> None:
        self._name, self._source, self._saved, self._prefix = name, source, saved, prefix
        self._parameters, self._buffers, self._make = parameters, buffers, make_boxes
        self.boxes: list[Box] = []
        self._tree = self._walk(tree, source.state_dict() if _has_mark(tree) else None, "")

    def give(self) -> None:
        """Restore the source from the tree."""
        self._source.load_state_dict(self._tree)

    def _walk(self, node: Any, now: Any, path: str) -> Any:
        if isinstance(node, dict) and _MARK in node:
            mark = node[_MARK]
            if mark["kind"] == "listed":
                order = [p for p in self._parameters if p.tensor.requires_grad or not mark["trained_only"]]
                current = list(now) if isinstance(now, list | tuple) and len(now) == len(order) else [None] * len(order)
                made = [self._tensor(path, place, value) for place, value in zip(order, current, strict=True)]
                return tuple(made) if mark["tuple"] else made
            found = {k: self._walk(v, _inside(now, k), f"{path}/{k}") for k, v in node.items() if k != _MARK}
            known = {place.own_name: place for place in (*self._buffers, *self._parameters)}
            names = {}
            for key, value in now.items() if isinstance(now, Mapping) else ():
                named = _named(key, value, known, self._prefix)
                if named is not None:
                    names[named[2].own_name] = key
            for place in known.values():
                if extra_key(self._name, path, place) in self._saved.state_dict_metadata:
                    usual = mark["lead"] + (self._prefix if mark["in_module"] else "") + place.own_name
                    key = names.get(place.own_name, usual)
                    found[key] = self._tensor(path, place, _inside(now, key))
            return found
        if isinstance(node, dict):
            return {k: self._walk(v, _inside(now, k), f"{path}/{k}") for k, v in node.items()}
        if isinstance(node, list):
            return [self._walk(v, _inside(now, i), f"{path}/{i}") for i, v in enumerate(node)]
        return node

    def _tensor(self, path: str, place: Place, now: Any) -> torch.Tensor:
        key = extra_key(self._name, path, place)
        entry = self._saved.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"the checkpoint holds no {place.name} of {self._name}: it is of another model")
        made = torch.zeros_like(place.tensor, dtype=entry.properties.dtype, requires_grad=False)
        self.boxes += self._make(key, place, made)
        if isinstance(made, DTensor) and isinstance(now, torch.Tensor) and not isinstance(now, DTensor):
            return made.to_local()
        return made


def like_place(value: torch.Tensor, place: Place) -> torch.Tensor:
    """A tensor, made a shard of the whole in the way that the place's tensor is."""
    own = place.tensor
    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value.detach()
    return DTensor.from_local(
        value.detach(), own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def _named(key: Any, value: Any, known: Mapping[str, Place], prefix: str) -> tuple[str, bool, Place] | None:
    """(lead, whether the prefix follows it, place) if an entry is a tensor for a place: its key is the lead, perhaps
    the prefix, and the place's name. None for any other entry."""
    if not isinstance(key, str) or not isinstance(value, torch.Tensor):
        return None
    for lead in _LEADS:
        for before in dict.fromkeys((prefix, "")):
            place = known.get(key.removeprefix(lead + before)) if key.startswith(lead + before) else None
            if place is not None and _is_like(value, place):
                return lead, before == prefix, place
    return None


def _is_like(value: Any, place: Place) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    own = place.tensor
    if isinstance(value, DTensor) or not isinstance(own, DTensor):
        return value.shape == own.shape and isinstance(value, DTensor) <= isinstance(own, DTensor)
    return value.shape == own.to_local().shape


def _has_mark(node: Any) -> bool:
    if isinstance(node, dict):
        return _MARK in node or any(map(_has_mark, node.values()))
    return isinstance(node, list) and any(map(_has_mark, node))


def _inside(node: Any, key: Any) -> Any:
    try:
        return node[key]
    except (KeyError, IndexError, TypeError):
        return None


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(node, list) and node:
        for i, value in enumerate(node):
            yield from _leaves(value, f"{path}/{i}")
    else:
        yield path, node


def _packed(value: Any) -> bytes:
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        whole = value.detach().cpu().contiguous()
        return repr((whole.dtype, whole.shape)).encode() + whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, DTensor):
        return repr((value.shape, _packed(value.to_local()))).encode()
    if isinstance(value, bool | int | float | str | None):
        return repr(value).encode()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def places_of(named: Mapping[str, nn.Parameter | torch.Tensor], first: Mapping[str, str]) -> list[Place]:
    """A place for each of these tensors. first: name of a tied tensor -> the first of its names."""
    return [Place(first.get(name, name), name, tensor) for name, tensor in named.items()]
