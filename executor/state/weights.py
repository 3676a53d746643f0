"""Trained weights read into shards: from safetensors as Hugging Face stores them, or from a checkpoint of any plan.

Every rank reads only the boxes that it holds; no rank ever has the whole model.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .box_files import read_boxes
from .boxes import Box
from .checkpoint_folder import latest_checkpoint
from .checksums import CheckedReader


@dataclass(frozen=True)
class Weights:
    """Where a model's parameters (and buffers) are loaded from.

    path: a .safetensors file, a folder with such files (and perhaps an index), an index.json, a run's folder or a
    checkpoint in it, or any folder of torch.distributed.checkpoint. names: name of a parameter in the model -> its name
    there; None leaves the parameter at its initial value (a new head, the adapters of LoRA).
    """

    path: str | Path
    names: Callable[[str], str | None] | None = None


class _Source(Protocol):
    """Stored tensors, which can be read in parts."""

    shapes: Mapping[str, torch.Size]

    def read(self, boxes: list[Box]) -> None:
        """Fill the boxes; their keys are names in the source."""
        ...


class Loading:
    """Which parameters and buffers of a model are loaded, and from where. Raises ValueError, on this rank alone, if
    something is not there.

    model: whole, on the meta device. ties: names of one parameter; it must be there under one of them.
    """

    def __init__(self, weights: Weights, model: nn.Module, ties: tuple[tuple[str, ...], ...]) -> None:
        self._source = _source(Path(weights.path))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        persistent = model.state_dict().keys()
        buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in persistent}
        rename = weights.names or _Prefixed(self._source.shapes, [*parameters, *buffers])
        tied = {name: names for names in ties for name in names}
        self._stored: dict[str, str] = {}
        missing = []
        for name, tensor in {**parameters, **buffers}.items():
            candidates = [rename(other) for other in (name, *tied.get(name, ()))]
            stored = next((c for c in candidates if c is not None and c in self._source.shapes), None)
            if stored is None:
                if name in parameters and None not in candidates:
                    missing.append(name)
                continue
            if self._source.shapes[stored] != tensor.shape:
                raise ValueError(
                    f"{weights.path} holds {stored} of shape {list(self._source.shapes[stored])}, the model's {name} "
                    f"is {list(tensor.shape)}: they are weights of another model"
                )
            self._stored[name] = stored
        if missing:
            raise ValueError(
                f"{weights.path} holds no {missing[0]} ({len(missing)} of {len(parameters)} parameters are missing); "
                "give weights=Weights(path, names=...), which says what a parameter is called there, or None for what "
                "is new (from meshwright.executor.state.weights import Weights)"
            )
        self.parameters = {name for name in self._stored if name in parameters}

    def fill(self, boxes: list[Box]) -> None:
        """Fill a rank's boxes; their keys are `model.<name>`."""
        wanted = [(box, self._stored.get(box.key.removeprefix("model."))) for box in boxes]
        self._source.read([replace(box, key=stored) for box, stored in wanted if stored is not None])


def refuse_whole_weights(module: nn.Module) -> None:
    """Make load_state_dict of a rank's part of a model raise ValueError for anything but the tensors of that part, as
    its state_dict() returns them. Otherwise strict=False would silently skip whole weights under their own names."""
    module.register_load_state_dict_pre_hook(_check_own)


def refuse_no_weights(module: nn.Module) -> None:
    """Make load_state_dict of a rank's model raise ValueError for an empty dict, which full_state_dict returns on some
    ranks."""
    module.register_load_state_dict_pre_hook(_check_given)


def _check_given(module: nn.Module, state_dict: Mapping[str, Any], *rest: Any) -> None:
    if not state_dict:
        raise ValueError(
            "load_state_dict of trainer.model was given nothing on this rank (full_state_dict() has tensors on rank 0 "
            "alone): go back to copies of trainer.model.state_dict(), which every rank keeps, or by save() and resume()"
        )


def _check_own(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    own = {prefix + name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    for name, given in state_dict.items():
        if not name.startswith(prefix) or not isinstance(given, torch.Tensor):
            continue
        known = own.get(name)
        if known is None or known.shape != given.shape or isinstance(known, DTensor) != isinstance(given, DTensor):
            raise ValueError(
                f"load_state_dict of trainer.model was given {name} of {list(given.shape)}, but this rank holds a part "
                "of the model, in which there is no such tensor: load whole weights in the function that builds the "
                "model, or from files with parallelize(weights=...); resume() reads a checkpoint, and copies of "
                "trainer.model.state_dict() go back"
            )


class _Prefixed:
    """Maps names of parameters to stored names, which may lack their leading module or have one more: weights of a
    whole model are stored with or without the name that its head gives it."""

    def __init__(self, stored: Mapping[str, Any], names: list[str]) -> None:
        leaving = sorted({name.partition(".")[0] + "." for name in names})
        adding = sorted({name.partition(".")[0] + "." for name in stored})
        ways = [("", ""), *((prefix, "") for prefix in leaving), *(("", prefix) for prefix in adding)]
        self._way = max(ways, key=lambda way: sum(self._renamed(name, way) in stored for name in names))

    def __call__(self, name: str) -> str:
        return self._renamed(name, self._way)

    def _renamed(self, name: str, way: tuple[str, str]) -> str:
        left_out, added = way
        return added + name.removeprefix(left_out)


class _Safetensors:
    """The tensors in memory-mapped safetensors files."""

    def __init__(self, files: list[Path]) -> None:
        try:
            from safetensors import safe_open
        except ImportError:
            raise ValueError(f"{files[0]} needs safetensors to be read: pip install safetensors") from None
        self._files: dict[str, Any] = {}
        shapes: dict[str, torch.Size] = {}
        for path in files:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 (no dict)
                self._files[name] = file
                shapes[name] = torch.Size(file.get_slice(name).get_shape())
        self.shapes: Mapping[str, torch.Size] = shapes

    def read(self, boxes: list[Box]) -> None:
        """Fill the boxes."""
        for box in boxes:
            stored = self._files[box.key]
            if not box.offsets:
                box.tensor.copy_(stored.get_tensor(box.key))
                continue
            place = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.tensor.shape, strict=True))
            box.tensor.copy_(stored.get_slice(box.key)[place])


class _Distributed:
    """The tensors in a folder of torch.distributed.checkpoint; in ours `model.` stands before their names."""

    def __init__(self, folder: Path) -> None:
        self._reader = CheckedReader(folder)
        self._reader.check_documents()
        entries = self._reader.read_metadata().state_dict_metadata
        found = {key: entry.size for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        ours = (folder / "state.json").is_file()
        self._prefix = "model." if ours else ""
        self.shapes: Mapping[str, torch.Size] = {
            key.removeprefix(self._prefix): size for key, size in found.items() if key.startswith(self._prefix)
        }

    def read(self, boxes: list[Box]) -> None:
        """Fill the boxes."""
        read_boxes(self._reader, [replace(box, key=self._prefix + box.key) for box in boxes])


def _source(path: Path) -> _Source:
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _Safetensors(_indexed(path))
        if path.suffix == ".safetensors":
            return _Safetensors([path])
    if path.is_dir():
        checkpoint = latest_checkpoint(path) or path
        if (checkpoint / ".metadata").is_file():
            return _Distributed(checkpoint)
        for index in sorted(path.glob("*.safetensors.index.json")):
            return _Safetensors(_indexed(index))
        if files := sorted(path.glob("*.safetensors")):
            return _Safetensors(files)
    raise ValueError(
        f"no weights at {path}: give a .safetensors file, a folder with such files, or a folder of checkpoints"
    )


def _indexed(index: Path) -> list[Path]:
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{index} names {missing[0]}, which is not beside it ({len(missing)} of {len(names)} missing)")
    return [index.parent / name for name in names]
