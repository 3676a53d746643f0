"""Boxes and objects in a folder of torch.distributed.checkpoint: written by all ranks, read by each for itself."""

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import StorageReader

from .boxes import Box
from .checksums import CheckedWriter, DamagedError


class Writes(DefaultSavePlanner):
    """Plans to write boxes and objects. Objects are packed at once; a box that several ranks hold is written by one of
    them."""

    def __init__(self, found: list[Box], objects: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = {box.index: box for box in found}
        self._objects = {key: _packed(value) for key, value in objects.items()}

    def create_local_plan(self) -> SavePlan:
        """All items that this rank could write."""
        tensors = [
            WriteItem(
                index,
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(box.chunk, TensorProperties.create_from_tensor(box.tensor), box.whole),
            )
            for index, box in self._boxes.items()
        ]
        objects = [
            WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(packed)))
            for key, packed in self._objects.items()
        ]
        self.plan = SavePlan([*tensors, *objects])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item to write."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn])
        return self._boxes[write_item.index].tensor


class Reads(LoadPlanner):
    """Plans to read boxes in place, and objects into `objects`."""

    def __init__(self, wanted: dict[MetadataIndex, Box], objects: set[str]) -> None:
        self._boxes = wanted
        self._wanted = objects
        self.objects: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Note the checkpoint's table of contents."""
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """All items to read: the parts of saved boxes that lie in boxes of this rank, and the wanted objects."""
        items: list[ReadItem] = []
        for box in self._boxes.values():
            entry = self._saved[box.key]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(box.key, entry, [box.chunk])
        for key in self._wanted:
            index, nowhere = MetadataIndex(key), torch.Size((0,))
            assert isinstance(self._saved[key], BytesStorageMetadata)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks, unchanged: each reads what it wants."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan of this rank, unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an object that was read."""
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a box that an item is read into."""
        part = self._boxes[read_item.dest_index].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the item was read in place."""


def write_boxes(folder: Path, planned: Writes, group: dist.ProcessGroup | None) -> None:
    """Write what all ranks of a group (None: this rank alone) have planned. All of them must call it.

    Raises RuntimeError on every rank if one of them cannot write.
    """
    try:
        with _alone(group is None):
            save_distributed(
                {},
                storage_writer=CheckedWriter(folder),
                planner=planned,
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:  # its message is a traceback
        first = min(error.failures)
        cause = error.failures[first][0]
        raise RuntimeError(f"rank {first}: {type(cause).__name__}: {cause}") from error


def read_boxes(reader: StorageReader, wanted: list[Box], objects: Iterable[str] = ()) -> dict[str, Any]:
    """Fill boxes with their saved numbers. Returns key -> saved object, for the keys in `objects`.

    Raises DamagedError if a checked reader finds other bytes than were saved.
    """
    once = {box.index: box for box in wanted}
    reads = Reads(once, set(objects))
    try:
        with _alone(True):
            load_distributed({}, storage_reader=reader, planner=reads, no_dist=True)
    except CheckpointException as error:  # its message is a traceback
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, DamagedError):
            raise cause from None
        raise RuntimeError(f"reading the checkpoint failed: {type(cause).__name__}: {cause}") from error
    for box in wanted:
        if box is not once[box.index]:
            box.tensor.copy_(once[box.index].tensor)
    return reads.objects


@contextmanager
def _alone(is_alone: bool) -> Iterator[None]:
    """While it lasts, torch does not warn that only one process writes or reads, if `is_alone`."""
    with warnings.catch_warnings():
        if is_alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
