"""Checkpoints that any plan of the same model can resume: written atomically by all ranks, in whole-tensor terms.

A run's folder holds one folder per checkpoint, `step-00000120`, which appears by a rename once all of it is on disk:

    plan.json  state.json  .metadata  __0_0.distcp ...

The numbers are in the format of torch.distributed.checkpoint: `model.<name>` and `optimizer.<name>.<state>` are whole
tensors under the model's own names (tied ones under their first), of which every rank writes and reads only the boxes
that it holds. `optimizer.stage<k>` has what is no tensor, `rng.<data rank>.<stage>` the random states.
"""

import copy
import io
import os
import random
import re
import shutil
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...planner.cost.sharding import shard_dim
from ...planner.plan import Plan, load_plan
from ..apply import AppliedModel
from ..parallel.mesh import RankMesh
from ..parallel.tensor_layout import ParameterCut
from ..watch import Watch
from .checkpoint_folder import Progress, complete_checkpoints, latest_checkpoint, read_progress

_PARTIAL, _DISCARDED = ".partial-", ".discarded-"


class Stateful(Protocol):
    """What can be saved with a checkpoint: a learning-rate scheduler, for one."""

    def state_dict(self) -> dict[str, Any]:
        """What there is to save."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was saved."""
        ...


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor, and this rank's memory of it."""

    key: str
    whole: torch.Size
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies in the whole."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)

    @property
    def index(self) -> MetadataIndex:
        """Its name in the checkpoint."""
        return MetadataIndex(self.key, torch.Size(self.offsets))


def boxes(
    key: str, tensor: torch.Tensor, cut: ParameterCut | None, tensor_rank: int, shard_rank: int, num_shards: int
) -> list[Box]:
    """The parts of a whole tensor that a rank's shard consists of.

    tensor: a whole tensor, or a DTensor of fully_shard, which divides what tensor parallelism left to this tensor rank
    along one dim. A fused weight is cut part by part, so that a shard of it is several boxes.
    """
    if not isinstance(tensor, DTensor):
        return [Box(key, tensor.shape, (0,) * tensor.dim(), tensor.detach())]
    local = tensor.to_local().detach()
    if local.numel() == 0:
        return []
    gathered = tuple(tensor.shape)
    divided = shard_dim(gathered, num_shards)
    offsets = [0] * local.dim()
    offsets[divided] = shard_rank * -(-gathered[divided] // num_shards)
    if cut is None:
        return [Box(key, tensor.shape, tuple(offsets), local)]
    found = []
    whole = torch.Size(sum(cut.parts) if dim == cut.dim else size for dim, size in enumerate(gathered))
    here = whole_start = 0  # where the part begins, in what this tensor rank has and in the whole
    held = range(offsets[cut.dim], offsets[cut.dim] + local.shape[cut.dim])
    for part in cut.parts:
        width = part // cut.degree
        start, end = max(here, held.start), min(here + width, held.stop)
        if start < end:
            place = list(offsets)
            place[cut.dim] = whole_start + tensor_rank * width + start - here
            piece = local.narrow(cut.dim, start - held.start, end - start)
            found.append(Box(key, whole, tuple(place), piece))
        here, whole_start = here + width, whole_start + part
    return found


@dataclass(frozen=True)
class _Parameter:
    """A parameter of this rank. name: its first in the whole model; own_name: the one that it has here."""

    name: str
    own_name: str
    tensor: nn.Parameter


class ModelState:
    """A rank's part of a model, by the names of the whole; tied parameters may be there twice."""

    def __init__(self, model: AppliedModel, plan: Plan, mesh: RankMesh) -> None:
        self._model, self._plan, self._mesh = model, plan, mesh
        first = {name: names[0] for names in plan.model.ties for name in names}
        self._parameters = [_Parameter(first.get(n, n), n, p) for n, p in model.parameters.items()]

    def model_boxes(self) -> list[Box]:
        """Parameters and persistent buffers."""
        found = [box for p in self._parameters for box in self._boxes(f"model.{p.name}", p.own_name, p.tensor)]
        return found + [
            Box(f"model.{name}", buffer.shape, (0,) * buffer.dim(), buffer) for name, buffer in self._buffers().items()
        ]

    def _boxes(self, key: str, own_name: str, tensor: torch.Tensor) -> list[Box]:
        part = self._model.experts.get(own_name)
        if part is not None:
            held = boxes(key, tensor, None, 0, part.place.shard, part.num_shards)
            whole = torch.Size((part.count, *tensor.shape[1:]))
            return [replace(b, whole=whole, offsets=(b.offsets[0] + part.first, *b.offsets[1:])) for b in held]
        at, degrees = self._mesh.coordinates, self._plan.degrees
        shard_rank = at["data_shard"] * degrees.context + at["context"]
        return boxes(key, tensor, self._model.cut(own_name), at["tensor"], shard_rank, degrees.sharded_over)

    def _buffers(self) -> dict[str, torch.Tensor]:
        persistent = self._model.module.state_dict().keys()
        named = self._model.module.named_buffers()
        return {n.removeprefix(self._model.prefix): b for n, b in named if n in persistent}


class State(ModelState):
    """A rank's part of a run: the model and its optimizer."""

    def __init__(self, model: AppliedModel, plan: Plan, mesh: RankMesh, optimizer: Optimizer) -> None:
        super().__init__(model, plan, mesh)
        self._optimizer = optimizer

    def saved_boxes(self) -> list[Box]:
        """Everything that this rank can write: buffers only of the first replica, for each has its own."""
        tensors, _ = self._optimizer_state()
        found = [
            box
            for p in self._parameters
            for kind, tensor in tensors[p.own_name].items()
            for box in self._boxes(f"optimizer.{p.name}.{kind}", p.own_name, tensor)
        ]
        writes_buffers = self._mesh.data_rank == 0 and self._mesh.is_first_of_share
        buffers = {f"model.{name}" for name in self._buffers()}
        return found + [box for box in self.model_boxes() if writes_buffers or box.key not in buffers]

    def saved_objects(self, stateful: Mapping[str, Stateful]) -> dict[str, Any]:
        """What is no tensor, of the ranks that write it."""
        stage = self._mesh.coordinates["pipeline"]
        found: dict[str, Any] = {}
        if self._mesh.is_first_of_share:
            found[f"rng.{self._mesh.data_rank}.{stage}"] = random_state(self._mesh.device)
            if self._mesh.data_rank == 0:
                _, scalars = self._optimizer_state()
                found[f"optimizer.stage{stage}"] = {"scalars": scalars, "groups": self._groups()}
        if self._mesh.rank == 0:
            found |= {f"more.{name}": source.state_dict() for name, source in stateful.items()}
        return found

    def optimizer_boxes(self, saved: Metadata) -> tuple[list[Box], dict[str, dict[str, torch.Tensor]]]:
        """(where to read a saved optimizer state to, name here -> state -> the tensors that are filled so)."""
        kinds: dict[str, list[str]] = {}
        for key, entry in saved.state_dict_metadata.items():
            name, _, kind = key.removeprefix("optimizer.").rpartition(".")
            if key.startswith("optimizer.") and isinstance(entry, TensorStorageMetadata):
                kinds.setdefault(name, []).append(kind)
        found: list[Box] = []
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for p in self._parameters:
            own = tensors[p.own_name] = {}
            for kind in kinds.get(p.name, ()):
                key = f"optimizer.{p.name}.{kind}"
                entry = saved.state_dict_metadata[key]
                assert isinstance(entry, TensorStorageMetadata)
                own[kind] = torch.zeros_like(p.tensor, dtype=entry.properties.dtype, requires_grad=False)
                found += self._boxes(key, p.own_name, own[kind])
        return found, tensors

    def load_optimizer(self, tensors: dict[str, dict[str, torch.Tensor]], stages: Iterable[dict[str, Any]]) -> None:
        """Give the optimizer what was saved: tensors of this rank, and what all stages saved beside them.

        Raises ValueError if parameters of one group were saved in groups of different options.
        """
        scalars: dict[str, dict[str, Any]] = {}
        options: dict[str, dict[str, Any]] = {}
        for stage in stages:
            scalars |= stage["scalars"]
            options |= {name: group["options"] for group in stage["groups"] for name in group["names"]}
        known = {id(p.tensor): p for p in self._parameters}
        document: dict[str, Any] = {"state": {}, "param_groups": []}
        count = 0
        for group in self._optimizer.param_groups:
            own = [known[id(p)] for p in group["params"]]
            different = {repr(options[p.name]): options[p.name] for p in own if p.name in options}
            if len(different) > 1:
                raise ValueError(
                    f"the optimizer has {own[0].name} and {own[-1].name} in one parameter group, the checkpoint was "
                    f"saved with different options for them: {' and '.join(different)}; make the groups as they were"
                )
            kept = {key: value for key, value in group.items() if key != "params"}
            kept |= next(iter(different.values()), {})
            document["param_groups"].append({**kept, "params": list(range(count, count + len(own)))})
            for index, p in enumerate(own, count):
                # Tied parameters were saved once, but each counts its own steps.
                if state := {**tensors[p.own_name], **copy.deepcopy(scalars.get(p.name, {}))}:
                    document["state"][index] = state
            count += len(own)
        self._optimizer.load_state_dict(document)

    def _optimizer_state(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]]:
        """(name here -> state -> what is shaped like the parameter, first name -> state -> what is one value)."""
        tensors: dict[str, dict[str, torch.Tensor]] = {p.own_name: {} for p in self._parameters}
        scalars: dict[str, dict[str, Any]] = {}
        for p in self._parameters:
            for kind, value in self._optimizer.state.get(p.tensor, {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0 < p.tensor.dim():
                    scalars.setdefault(p.name, {})[kind] = value
                elif value.shape == p.tensor.shape:
                    tensors[p.own_name][kind] = value
                else:
                    raise ValueError(
                        f"{type(self._optimizer).__name__} keeps {kind!r} of shape {list(value.shape)} for {p.name} of "
                        f"shape {list(p.tensor.shape)}: only states like the parameter, or of one value, can be saved "
                        "for other plans"
                    )
        return tensors, scalars

    def _groups(self) -> list[dict[str, Any]]:
        names = {id(p.tensor): p.name for p in self._parameters}
        return [
            {
                "names": [names[id(p)] for p in group["params"]],
                "options": {key: value for key, value in group.items() if key != "params"},
            }
            for group in self._optimizer.param_groups
        ]


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators that models and data use: torch's, Python's and numpy's."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from a state of random_state."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class Checkpoints:
    """Writes and reads the checkpoints of one run. Every rank must have one, and call its methods together."""

    def __init__(self, state: State, plan: Plan, mesh: RankMesh, watch: Watch | None = None) -> None:
        self._state, self._plan, self._mesh, self._watch = state, plan, mesh, watch
        # A group of its own, on the CPU: a checkpoint is written beside the steps that follow.
        self._group = dist.new_group(backend="gloo") if mesh.device_mesh is not None else None
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, folder: Path, progress: Progress, stateful: Mapping[str, Stateful], wait: bool, keep: int | None
    ) -> None:
        """Write a checkpoint; with wait=False only until the numbers are copied, the rest beside what follows.

        Raises what went wrong with the last one that was not waited for.
        """
        self.wait()
        found, objects = self._state.saved_boxes(), self._state.saved_objects(stateful)
        if not wait:
            found = [Box(b.key, b.whole, b.offsets, b.tensor.to("cpu", copy=True)) for b in found]
        planner = _Writes(found, {key: _packed(value) for key, value in objects.items()})
        if wait:
            self._write(folder, progress, planner, keep)
            return

        def write() -> None:
            try:
                self._write(folder, progress, planner, keep)
            except BaseException as error:
                self._error = error

        self._writing = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Return when no checkpoint is being written any more. Raises what went wrong with it."""
        if self._writing is not None:
            with nullcontext() if self._watch is None else self._watch.seeing(self._writing):
                self._writing.join()
            self._writing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load(self, folder: Path, stateful: Mapping[str, Stateful]) -> Progress:
        """Take over a checkpoint: all numbers, the optimizer, random states, and `stateful`.

        folder: of one checkpoint. Raises ValueError on every rank if it is not of this model.
        """
        outcome: Progress | Exception
        try:
            outcome = self._load(folder, stateful)
        except Exception as error:  # the others must hear of it, or they would wait for this rank
            outcome = error
        errors = self._gathered(outcome if isinstance(outcome, Exception) else None)
        if isinstance(outcome, Exception):
            raise outcome
        for rank, other in enumerate(errors):
            if other is not None:
                raise RuntimeError(f"rank {rank} could not read {folder}: {type(other).__name__}: {other}")
        return outcome

    def latest(self, folder: Path) -> Path | None:
        """The last complete checkpoint of a run's folder, as the first rank sees it."""
        return self._from_first(latest_checkpoint(folder) if self._mesh.rank == 0 else None)  # type: ignore[no-any-return]

    def _write(self, folder: Path, progress: Progress, planner: "_Writes", keep: int | None) -> None:
        partial = Path(self._from_first(str(self._begin(folder, progress)) if self._mesh.rank == 0 else None))
        try:
            with _alone(self._group is None):
                save_distributed(
                    {},
                    storage_writer=FileSystemWriter(partial),
                    planner=planner,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
        except CheckpointException as error:
            first = min(error.failures)
            cause = error.failures[first][0]
            raise RuntimeError(
                f"no checkpoint of step {progress.steps} was written to {folder}: rank {first}: "
                f"{type(cause).__name__}: {cause}; the one before is still whole"
            ) from error
        if self._mesh.rank == 0:
            _finish(partial, keep)
        if self._group is not None:
            dist.barrier(self._group)

    def _begin(self, folder: Path, progress: Progress) -> Path:
        """A folder for what is not complete yet; those that others have left behind are removed."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob(f"{_PARTIAL}*"), *folder.glob(f"{_DISCARDED}*")]:
            shutil.rmtree(old)
        name = f"step-{progress.steps:08d}"
        again = sum(path.name.split(".")[0] == name for path in complete_checkpoints(folder))
        partial = folder / f"{_PARTIAL}{name}{f'.{again}' if again else ''}"
        partial.mkdir()
        self._plan.save(partial / "plan.json")
        (partial / "state.json").write_text(progress.model_dump_json(indent=1) + "\n")
        return partial

    def _load(self, folder: Path, stateful: Mapping[str, Stateful]) -> Progress:
        progress, saved_plan = read_progress(folder), load_plan(folder / "plan.json")
        reader = FileSystemReader(folder)
        saved = reader.read_metadata()
        found = self._state.model_boxes()
        _check_saved(found, saved, folder)
        own_optimizer, tensors = self._state.optimizer_boxes(saved)
        degrees = saved_plan.degrees
        stage = self._mesh.coordinates["pipeline"] if degrees.pipeline == self._plan.degrees.pipeline else 0
        rng = f"rng.{self._mesh.data_rank % degrees.data}.{stage}"
        stages = [key for key in saved.state_dict_metadata if re.fullmatch(r"optimizer\.stage\d+", key)]
        wanted = {f"more.{name}" for name in stateful}
        if missing := sorted(wanted - saved.state_dict_metadata.keys()):
            raise ValueError(
                f"{folder} holds no state of {', '.join(m.removeprefix('more.') for m in missing)}: it was saved "
                "without; call resume without it"
            )
        objects = read_boxes(reader, found + own_optimizer, {rng, *stages, *wanted})
        self._state.load_optimizer(tensors, [objects[key] for key in stages])
        set_random_state(objects[rng], self._mesh.device)
        for name, target in stateful.items():
            target.load_state_dict(objects[f"more.{name}"])
        return progress

    def _from_first(self, value: Any) -> Any:
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._mesh.processes[0], group=self._group)
        return box[0]

    def _gathered(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._plan.degrees.num_devices
        dist.all_gather_object(values, value, group=self._group)
        return values


def read_boxes(reader: StorageReader, wanted: list[Box], objects: Iterable[str] = ()) -> dict[str, Any]:
    """Fill boxes with what was saved of them; key -> object that was saved under it."""
    once = {box.index: box for box in wanted}
    reads = _Reads(once, set(objects))
    try:
        with _alone(True):
            load_distributed({}, storage_reader=reader, planner=reads, no_dist=True)
    except CheckpointException as error:  # its words are a traceback
        cause = next(iter(error.failures.values()))[0]
        raise RuntimeError(f"reading the checkpoint failed: {type(cause).__name__}: {cause}") from error
    for box in wanted:
        if box is not once[box.index]:
            box.tensor.copy_(once[box.index].tensor)
    return reads.objects


def _finish(partial: Path, keep: int | None) -> None:
    """Let a complete checkpoint appear under its name, and remove all but the last `keep`."""
    for path in (partial / "plan.json", partial / "state.json", partial):
        _sync(path)
    target = partial.with_name(partial.name.removeprefix(_PARTIAL))
    partial.rename(target)
    _sync(target.parent)
    if keep is not None:
        for old in complete_checkpoints(target.parent)[:-keep]:
            discarded = old.with_name(_DISCARDED + old.name)
            old.rename(discarded)  # so that what is left of it is never taken for a checkpoint
            shutil.rmtree(discarded)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_saved(wanted: list[Box], saved: Metadata, folder: Path) -> None:
    for box in wanted:
        entry = saved.state_dict_metadata.get(box.key)
        name = box.key.removeprefix("model.")
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{folder} holds no {name}: it is a checkpoint of another model")
        if entry.size != box.whole:
            raise ValueError(
                f"{folder} holds {name} of shape {list(entry.size)}, the model's is {list(box.whole)}: it is a "
                "checkpoint of another model"
            )


@contextmanager
def _alone(is_alone: bool) -> Iterator[None]:
    """torch warns that there is only one process, though it was told so."""
    with warnings.catch_warnings():
        if is_alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Writes(DefaultSavePlanner):
    """Writes boxes and packed objects; what several ranks hold is written by one of them."""

    def __init__(self, found: list[Box], objects: dict[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = {box.index: box for box in found}
        self._objects = objects

    def create_local_plan(self) -> SavePlan:
        """What this rank could write."""
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
        """The numbers of an item."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn])
        return self._boxes[write_item.index].tensor


class _Reads(LoadPlanner):
    """Reads boxes in place, and objects into `objects`."""

    def __init__(self, wanted: dict[MetadataIndex, Box], objects: set[str]) -> None:
        self._boxes = wanted
        self._wanted = objects
        self.objects: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the checkpoint's table of contents."""
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """What to read: of every saved box the part that lies in one of ours."""
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
        """Each rank reads what it wants."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The same."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an object."""
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where a part of a box goes."""
        part = self._boxes[read_item.dest_index].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was copied in place."""
