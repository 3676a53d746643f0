"""Weights as others read them: safetensors with an index, as Hugging Face stores them, or PyTorch state_dicts.

Files are laid out from names and shapes alone, and written piece by piece: whoever writes one holds no more than some
rows of a tensor (safetensors), or than a file (torch, which writes a dict at once). Nothing appears under its name
before all is complete.
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...profiler.document import replace_file
from .box_files import read_boxes
from .boxes import Box
from .checksums import CheckedReader

WeightFormat = Literal["safetensors", "torch"]

Piece = tuple[str, int, torch.Tensor]
"""(name of a tensor, number of the first row, some rows of it), or (name, 0, the whole tensor)."""

FILE_BYTES = 5 * 10**9
"""Most bytes of a file with several tensors: Hugging Face's default until version 5."""

_NAMES = {"safetensors": ("model", "safetensors"), "torch": ("pytorch_model", "bin")}
_PARTIAL = ".partial-"

_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtype -> its name in safetensors (from the README of the format)."""


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row of the tensor."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize


class WeightFiles:
    """The files of a model's weights in a folder. tensors: in the order in which they are stored. begins: names of
    tensors that are the first in their file.

    Raises ValueError for a dtype that the format does not have.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Stored],
        kind: WeightFormat = "safetensors",
        limit: int = FILE_BYTES,
        begins: Collection[str] = (),
    ) -> None:
        if kind not in _NAMES:
            raise ValueError(f"weights are written as {' or '.join(_NAMES)}, not as {kind!r}")
        self._folder, self._tensors, self._kind = folder, tensors, kind
        groups: list[list[str]] = [[]]
        size = 0
        for name, stored in tensors.items():
            if kind == "safetensors" and stored.dtype not in _KINDS:
                raise ValueError(f"{name} is {stored.dtype}, which safetensors cannot hold: give dtype=torch.bfloat16")
            if groups[-1] and (name in begins or size + stored.num_bytes > limit):
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += stored.num_bytes
        stem, ending = _NAMES[kind]
        count = len(groups)
        numbered = (f"{stem}-{i:05d}-of-{count:05d}.{ending}" for i in range(1, count + 1))
        self.files = dict(zip(numbered if count > 1 else [f"{stem}.{ending}"], groups, strict=True))
        self._index = self._folder / f"{stem}.{ending}.index.json"

    def begin(self) -> None:
        """Make the folder. For one process."""
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"{self._folder} is a file: give a folder for the weights")
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: str, pieces: Iterable[Piece]) -> None:
        """Write one file. pieces: all rows of the tensors in `files[file]`, each once, in any order."""
        path = self._folder / f"{_PARTIAL}{file}"
        names = self.files[file]
        if self._kind == "torch":
            whole = {name: torch.empty(self._tensors[name].shape, dtype=self._tensors[name].dtype) for name in names}
            for name, first, rows in pieces:
                held = whole[name]
                (held[first : first + rows.shape[0]] if held.dim() else held).copy_(rows.detach())
            torch.save(whole, path)
            return
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = written = 0
        for name in names:
            stored = self._tensors[name]
            header[name] = {
                "dtype": _KINDS[stored.dtype],
                "shape": list(stored.shape),
                "data_offsets": [end, end + stored.num_bytes],
            }
            end += stored.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            begin = handle.tell()
            for name, first, rows in pieces:
                stored = self._tensors[name]
                values = rows.detach().to("cpu", stored.dtype).contiguous()
                handle.seek(begin + header[name]["data_offsets"][0] + first * stored.row_bytes)
                written += handle.write(values.reshape(-1).view(torch.uint8).numpy().data)
            assert written == end
            os.fsync(handle.fileno())

    def finish(self) -> None:
        """Give all files their names, and write the index. To be called by one process, after all others have
        written."""
        stem, ending = _NAMES[self._kind]
        for old in [*self._folder.glob(f"{stem}-*-of-*.{ending}"), *self._folder.glob(f"{stem}.{ending}*")]:
            old.unlink()  # older weights: no index may name some of them
        for file in self.files:
            (self._folder / f"{_PARTIAL}{file}").rename(self._folder / file)
        if len(self.files) > 1:
            total = sum(stored.num_bytes for stored in self._tensors.values())
            places = {name: file for file, names in self.files.items() for name in names}
            document = {"metadata": {"total_size": total}, "weight_map": places}
            replace_file(self._index, json.dumps(document, indent=2).encode() + b"\n")


def cast(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype | None) -> dict[str, Stored]:
    """Shapes and dtypes to store for these tensors. dtype: the one for floating-point tensors; None: they keep their
    own."""
    return {
        name: Stored(tuple(shape), dtype if dtype is not None and own.is_floating_point else own)
        for name, (shape, own) in tensors.items()
    }


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    kind: WeightFormat,
    dtype: torch.dtype | None,
    limit: int,
) -> WeightFiles:
    """Write the weights of one checkpoint, tensor by tensor, with their checksums checked. limit: most bytes of a file.

    Raises DamagedError if the checkpoint is not as it was saved.
    """
    reader = CheckedReader(checkpoint)
    reader.check_documents()
    reader.check_sizes()
    saved = reader.read_metadata().state_dict_metadata
    found = {
        key.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
        for key, entry in saved.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    files = WeightFiles(folder, cast(found, dtype), kind, limit)
    files.begin()

    def read(names: list[str]) -> Iterator[Piece]:
        for name in names:
            shape, own = found[name]
            whole = torch.zeros(shape, dtype=own)
            read_boxes(reader, [Box(f"model.{name}", torch.Size(shape), (0,) * len(shape), whole)])
            yield name, 0, whole

    for file, names in files.files.items():
        files.write(file, read(names))
    files.finish()
    return files
