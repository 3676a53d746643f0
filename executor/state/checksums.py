"""Checksums of a checkpoint, of every box and object in it: what was damaged since is found when it is read, and named.

`checksums.json` holds CRC-32 sums, which miss no burst of up to 32 bits: of `.metadata` and of our documents whole, and
of every item of the files with boxes.
"""

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...profiler.document import write_file

CHECKSUMS = "checksums.json"
_BLOCK_BYTES = 2**24


class DamagedError(ValueError):
    """A checkpoint is no longer as it was saved. The message names the file, and the tensor in it."""


class CheckedWriter(FileSystemWriter):
    """Writes checksums beside the data. They are sums of what is read back from disk, not of what was to be written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, and sum them up."""
        results = super().write_data(plan, planner).wait()
        folder = Path(self.path)
        summed: Future[list[WriteResult]] = Future()
        summed.set_result(
            [
                WriteResult(r.index, r.size_in_bytes, (r.storage_data, _sum_of_item(folder, r.storage_data)))
                for r in results
            ]
        )
        return summed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents of all ranks, and all checksums."""
        items: dict[str, list[tuple[int, int, int]]] = {}
        for result in (r for of_rank in results for r in of_rank):
            place, found = result.storage_data
            items.setdefault(place.relative_path, []).append((place.offset, place.length, found))
        bare = [[WriteResult(r.index, r.size_in_bytes, r.storage_data[0]) for r in of_rank] for of_rank in results]
        super().finish(metadata, bare)
        folder = Path(self.path)
        body = {
            "files": {path.name: _size_and_sum(path) for path in sorted(folder.iterdir()) if path.name not in items},
            "items": {name: [(length, found) for _, length, found in sorted(items[name])] for name in sorted(items)},
        }
        write_file(folder / CHECKSUMS, _text_of(body))


class CheckedReader(FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint, and checks everything that it reads and that has a checksum.

    Raises DamagedError for what is not as it was written. required: the folder must have checksums.
    """

    def __init__(self, folder: Path, required: bool = False) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files: dict[str, tuple[int, int]] = {}
        self._items: dict[tuple[str, int], tuple[int, int]] = {}  # (file, offset) -> (bytes, sum)
        self._checked: set[tuple[str, int]] = set()
        self._is_summed = (folder / CHECKSUMS).is_file()
        if self._is_summed:
            self._read_sums()
        elif required:
            raise DamagedError(f"{folder / CHECKSUMS} is missing, though the checkpoint was saved with it")

    def check_documents(self) -> None:
        """Check the documents: all files that hold no boxes."""
        for name, (size, found) in self._files.items():
            self._check_size(name, size)
            if _size_and_sum(self._folder / name)[1] != found:
                raise DamagedError(f"{self._folder / name} is damaged: its checksum is not the one that was saved")

    def check_sizes(self) -> None:
        """Check that all files with boxes are there in full length. To be called after check_documents."""
        sizes: dict[str, int] = {}
        for (name, _), (length, _) in self._items.items():
            sizes[name] = sizes.get(name, 0) + length
        for name, size in sizes.items():
            self._check_size(name, size)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents."""
        metadata = super().read_metadata(*args, **kwargs)
        self.storage_data = metadata.storage_data
        return metadata

    def check_items(self, but: tuple[str, ...], first: int, step: int) -> None:
        """Check every `step`-th item from number `first` on, without items whose keys begin with one of `but`. To be
        called after read_metadata."""
        wanted = sorted(
            ((place.relative_path, place.offset), place)
            for index, place in self.storage_data.items()
            if not (but and index.fqn.startswith(but))
        )
        for (name, _), place in wanted[first::step]:
            with (self._folder / name).open("rb") as file:
                self._slice_file(file, place)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        place = sinfo.relative_path, sinfo.offset
        view = super()._slice_file(file, sinfo)
        if not self._is_summed or place in self._checked:
            return view
        length, expected = self._items.get(place, (-1, 0))
        if length != sinfo.length or _sum_of(view) != expected:
            raise DamagedError(
                f"{self._folder / sinfo.relative_path} is damaged: the {sinfo.length:,} bytes of "
                f"{self._name_of(sinfo)} from {sinfo.offset:,} on are not those that were saved"
            )
        self._checked.add(place)
        view.seek(0)
        return view

    def _name_of(self, place: Any) -> str:
        known = (index for index, other in self.storage_data.items() if other is place or other == place)
        index = next(known, None)
        return "an item" if index is None else _words(index)

    def _check_size(self, name: str, size: int) -> None:
        path = self._folder / name
        if not path.is_file():
            raise DamagedError(f"{path} is missing: the checkpoint was saved with it")
        if (found := path.stat().st_size) == size:
            return
        lost = f", and {names} with the rest" if (names := self._lost_beyond(name, found)) else ""
        what = "is cut off" if found < size else "has grown"
        raise DamagedError(f"{path} {what}: it has {found:,} bytes, {size:,} were saved{lost}")

    def _lost_beyond(self, name: str, size: int) -> str:
        """Names of what lay in a file beyond so many bytes; '' if that cannot be told."""
        if name not in {file for file, _ in self._items}:
            return ""
        try:
            places = self.read_metadata().storage_data.items()
        except Exception:  # the table of contents is damaged, too
            return ""
        lost = sorted(_words(i) for i, p in places if p.relative_path == name and p.offset + p.length > size)
        return ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")

    def _read_sums(self) -> None:
        path = self._folder / CHECKSUMS
        try:
            text = path.read_text(encoding="utf-8")
            body = json.loads(text)["body"]
            if _text_of(body) != text:
                raise ValueError
            self._files = {name: (size, found) for name, (size, found) in body["files"].items()}
            for name, items in body["items"].items():
                offset = 0
                for length, found in items:
                    self._items[name, offset] = (length, found)
                    offset += length
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedError(f"{path} is damaged: its own checksum is not the one that was saved") from None


def damage_in(folder: Path, first: int, step: int) -> str | None:
    """What is damaged in a checkpoint, in words; None if nothing is found. Of its items, every `step`-th is checked,
    from number `first` on.

    None also for a checkpoint that was saved without checksums.
    """
    try:
        reader = CheckedReader(folder)
        reader.check_documents()
        reader.check_sizes()
        reader.read_metadata()
        reader.check_items((), first, step)
    except (DamagedError, OSError) as error:
        return str(error)
    return None


def _words(index: MetadataIndex) -> str:
    name = index.fqn.removeprefix("model.")
    at = tuple(index.offset) if index.offset is not None else ()
    return f"{name} at {list(at)}" if any(at) else name


def _text_of(body: dict[str, Any]) -> str:
    inner = json.dumps(body, separators=(",", ":"))
    return f'{{"crc32":{zlib.crc32(inner.encode())},"body":{inner}}}'


def _size_and_sum(path: Path) -> tuple[int, int]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, _sum_of(file)


def _sum_of_item(folder: Path, place: Any) -> int:
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return _crc(_blocks(file, place.length))


def _sum_of(file: Any) -> int:
    return _crc(iter(lambda: file.read(_BLOCK_BYTES), b""))


def _blocks(file: IO[bytes], length: int) -> Iterable[bytes]:
    while length > 0 and (block := file.read(min(_BLOCK_BYTES, length))):
        length -= len(block)
        yield block


def _crc(blocks: Iterable[bytes]) -> int:
    found = 0
    for block in blocks:
        found = zlib.crc32(block, found)
    return found
