"""Checkpoints that any plan of the same model can resume: written atomically by all ranks, in whole-tensor terms.

A run's folder holds one folder per checkpoint, `step-00000120`, which appears by a rename once all of it is on disk:

    plan.json  state.json  .metadata  __0_0.distcp ...  checksums.json

The numbers are in the format of torch.distributed.checkpoint: `model.<name>` and `optimizer.<name>.<state>` are whole
tensors under the model's own names (tied ones under their first), of which every rank writes and reads only the boxes
that it holds. `optimizer.stage<k>` has what is no tensor (`.<rank>` behind it, of an optimizer of whole matrices),
`rng.<data rank>.<stage>` the random states, `loader.<name>.<data rank>` that of a data loader, `more.<name>` what else
the user saves beside.
"""

import atexit
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...planner.plan.document import Plan, load_plan
from ..parallel.mesh import RankMesh
from ..watch import Watch
from .box_files import Writes, read_boxes, write_boxes
from .boxes import Box
from .checkpoint_folder import Progress, complete_checkpoints, latest_checkpoint, read_progress
from .checksums import CHECKSUMS, CheckedReader, DamagedError, damage_in
from .extra_state import Stateful, check_alike, is_of_data_rank
from .host_copies import HostCopies
from .random_state import set_random_state
from .run_lock import RunLock, hold, let_go
from .run_state import State

_PARTIAL, _DISCARDED = ".partial-", ".discarded-"


class Checkpoints:
    """Writes and reads the checkpoints of one run. Every rank must have one, and call its methods together."""

    def __init__(self, state: State, plan: Plan, mesh: RankMesh, watch: Watch | None = None) -> None:
        self._state, self._plan, self._mesh, self._watch = state, plan, mesh, watch
        # A group of its own, on the CPU: a checkpoint is written beside the steps that follow.
        self._group = dist.new_group(backend="gloo") if mesh.device_mesh is not None else None
        self._copies = HostCopies()
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._locks: dict[Path, RunLock] = {}

    def save(
        self, folder: Path, progress: Progress, stateful: Mapping[str, Stateful], wait: bool, keep: int | None
    ) -> None:
        """Write a checkpoint. With wait=False it returns when the numbers are copied, and the rest is written beside
        what follows.

        Raises the error of the last checkpoint, if that was not waited for.
        """
        self.wait()
        self.lock(folder)
        loaders = {name: source for name, source in stateful.items() if is_of_data_rank(source)}
        extras = self._state.extras({name: source for name, source in stateful.items() if name not in loaders})
        for name, extra in extras.items():
            check_alike(name, extra, self.on_all)
        found = self._state.saved_boxes(extras, self.buffers_elsewhere())
        objects = self._state.saved_objects(extras, loaders)
        if wait:
            self._write(folder, progress, Writes(found, objects), keep)
            return
        found, made = self._copies.take(found)
        planned = Writes(found, objects)

        def write() -> None:
            try:
                made()
                self._write(folder, progress, planned, keep)
            except BaseException as error:
                self._error = error

        self._writing = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._writing.start()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Wait for the last checkpoint of a script that ends without `close`; if it fails, the script fails, too."""
        try:
            self.wait()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            os._exit(1)  # Python would end as if nothing were wrong

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raises its error, if it failed."""
        if self._writing is not None:
            with nullcontext() if self._watch is None else self._watch.seeing(self._writing):
                self._writing.join()
            self._writing = None
            atexit.unregister(self._at_exit)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load(self, folder: Path, stateful: Mapping[str, Stateful]) -> Progress:
        """Restore a checkpoint: all numbers, the optimizer, random states, and `stateful`.

        folder: that of one checkpoint. Raises ValueError on every rank if it is of another model, and DamagedError if
        it is not as it was saved; that names the last checkpoint that is.
        """
        outcome: Progress | Exception
        try:
            outcome = self._load(folder, stateful)
        except Exception as error:  # the others must hear of it, or they would wait for this rank
            outcome = error
        errors = self.on_all(outcome if isinstance(outcome, Exception) else None)
        damaged = next((error for error in errors if isinstance(error, DamagedError)), None)
        if damaged is not None:
            raise DamagedError(f"{damaged}. {self._way_out(folder)}")
        if isinstance(outcome, Exception):
            raise outcome
        for rank, other in enumerate(errors):
            if other is not None:
                raise RuntimeError(f"rank {rank} could not read {folder}: {type(other).__name__}: {other}")
        return outcome

    def _way_out(self, damaged: Path) -> str:
        """A sentence that names the last good checkpoint before a damaged one; all ranks together check them."""
        everything = complete_checkpoints(damaged.parent)
        earlier = everything[: everything.index(damaged)] if damaged in everything else everything
        for folder in reversed(earlier):
            found = damage_in(folder, self._mesh.rank, self._plan.degrees.num_devices)
            if not any(self.on_all(found)):
                return (
                    f"The last good checkpoint is {folder}: move {damaged.name} out of {damaged.parent}, and resume "
                    "goes on from there"
                )
        return f"No checkpoint before it in {damaged.parent} is whole"

    def latest(self, folder: Path) -> Path | None:
        """The last complete checkpoint in a run's folder, as the first rank sees it."""
        return self.from_first(lambda: latest_checkpoint(folder))  # type: ignore[no-any-return]

    def lock(self, folder: Path, make: bool = True) -> None:
        """Keep other jobs out of a run's folder until `close`. Raises ValueError on every rank if another job is in it.

        make: whether to make the folder if it does not exist.
        """

        def lock() -> None:
            is_one_checkpoint = (folder / "state.json").is_file()  # which is only read
            if folder not in self._locks and not is_one_checkpoint and (make or folder.is_dir()):
                self._locks[folder] = hold(folder)

        self.from_first(lock)

    def buffers_elsewhere(self) -> set[str]:
        """Names of buffers that another pipeline stage writes. Every stage has all buffers of the model, but only the
        stage whose modules write into one (running statistics) has its true value. All ranks must call it."""
        if self._plan.degrees.pipeline == 1:
            return set()
        position = self._mesh.coordinates["pipeline"]
        own = self._state.written_buffers()
        claims = [claim for claim in self.on_all((position, own)) if claim[0] != position]
        return {name for other, names in claims for name in names if name not in own or other > position}

    def gathered(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The states of all ranks on the plan's first rank; [] on the others. They are sent over the CPU, whatever the
        ranks train on."""
        self.wait()
        if self._group is None:
            return [state]
        first = self._mesh.processes[0]
        found: list[Any] | None = [None] * self._plan.degrees.num_devices if self._mesh.rank == 0 else None
        dist.gather_object(state, found, dst=first, group=self._group)
        return found or []

    def close(self) -> None:
        """Wait for what is being written, and let other jobs into the folders."""
        try:
            self.wait()
        finally:
            while self._locks:
                let_go(self._locks.popitem()[0])

    def _write(self, folder: Path, progress: Progress, planned: Writes, keep: int | None) -> None:
        partial: Path = self.from_first(lambda: self._begin(folder, progress))
        try:
            write_boxes(partial, planned, self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"no checkpoint of step {progress.steps} was written to {folder}: {error}; the one before is still "
                "whole"
            ) from error
        self.from_first(lambda: _finish(partial, keep))

    def _begin(self, folder: Path, progress: Progress) -> Path:
        """Make the folder of a checkpoint that is not complete yet, and remove those that others have left behind."""
        self._locks[folder].check()
        for old in [*folder.glob(f"{_PARTIAL}*"), *folder.glob(f"{_DISCARDED}*")]:
            shutil.rmtree(old)
        name = f"step-{progress.steps:08d}"
        again = sum(path.name.split(".")[0] == name for path in complete_checkpoints(folder))
        partial = folder / f"{_PARTIAL}{name}{f'.{again}' if again else ''}"
        partial.mkdir()
        self._plan.save(partial / "plan.json")
        progress.model_copy(update={"checksums": True}).save(partial / "state.json")
        return partial

    def _load(self, folder: Path, stateful: Mapping[str, Stateful]) -> Progress:
        reader = CheckedReader(folder)
        reader.check_documents()
        progress, saved_plan = read_progress(folder), load_plan(folder / "plan.json")
        if progress.checksums:
            reader = CheckedReader(folder, required=True)
        if self._mesh.rank == 0:
            reader.check_sizes()
        saved = reader.read_metadata()
        found = self._state.model_boxes()
        _check_saved(found, saved, folder)
        own_optimizer, tensors = self._state.optimizer_boxes(saved)
        degrees = saved_plan.degrees
        stage = self._mesh.coordinates["pipeline"] if degrees.pipeline == self._plan.degrees.pipeline else 0
        rng = f"rng.{self._mesh.data_rank % degrees.data}.{stage}"
        stages = [key for key in saved.state_dict_metadata if re.fullmatch(r"optimizer\.stage\d+(\.\d+)?", key)]
        loaders = {name: source for name, source in stateful.items() if is_of_data_rank(source)}
        _check_loaders(loaders, saved, self._plan, folder)
        stateful = {name: source for name, source in stateful.items() if name not in loaders}
        own_loaders = {name: f"loader.{name}.{self._mesh.data_rank}" for name in loaders}
        wanted = {f"more.{name}" for name in stateful}
        if missing := sorted(wanted - saved.state_dict_metadata.keys()):
            raise ValueError(
                f"{folder} holds no state of {', '.join(m.removeprefix('more.') for m in missing)}: it was saved "
                "without; call resume without it"
            )
        trees = read_boxes(reader, [], wanted)
        refills = [self._state.refill(n, source, trees[f"more.{n}"], saved) for n, source in stateful.items()]
        found += [box for refill in refills for box in refill.boxes]
        objects = read_boxes(reader, found + own_optimizer, {rng, *stages, *own_loaders.values()})
        # What all ranks together have read by now is checked; the rest is small.
        reader.check_items(("model.", "optimizer."), self._mesh.rank, self._plan.degrees.num_devices)
        self._state.begin_anew()
        self._state.load_optimizer(tensors, [objects[key] for key in stages])
        set_random_state(objects[rng], self._mesh.device)
        for refill in refills:
            refill.give()
        for name, key in own_loaders.items():
            loaders[name].load_state_dict(objects[key])
        return progress

    def from_first(self, act: Callable[[], Any]) -> Any:
        """The result of `act` on the first rank, on all ranks; its error is raised on all of them."""
        box: list[Any] = [None, None]
        if self._mesh.rank == 0:
            try:
                box[0] = act()
            except Exception as error:  # the others must hear of it, or they would wait for this rank
                box[1] = error
        if self._group is not None:
            dist.broadcast_object_list(box, src=self._mesh.processes[0], group=self._group)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def on_all(self, value: Any) -> list[Any]:
        """[process] -> its value; on all ranks, which must all call it."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._plan.degrees.num_devices
        dist.all_gather_object(values, value, group=self._group)
        return values


def _finish(partial: Path, keep: int | None) -> None:
    """Give a complete checkpoint its name, and remove all but the last `keep`. Raises RuntimeError if files of other
    ranks are not in the folder."""
    reader = CheckedReader(partial, required=True)
    try:
        reader.check_documents()
        reader.check_sizes()
    except DamagedError as error:
        raise RuntimeError(
            f"no checkpoint was made in {partial.parent}, for not all that ranks have written is there: {error}. The "
            "folder must be the same for all ranks: on several hosts a shared file system"
        ) from error
    for path in (partial / "plan.json", partial / "state.json", partial / CHECKSUMS, partial):
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


def _check_loaders(names: Iterable[str], saved: Metadata, plan: Plan, folder: Path) -> None:
    for name in names:
        count = sum(
            re.fullmatch(rf"loader\.{re.escape(name)}\.\d+", key) is not None for key in saved.state_dict_metadata
        )
        if not count:
            raise ValueError(f"{folder} holds no state of {name}: it was saved without; call resume without it")
        if count != plan.degrees.data:
            raise ValueError(
                f"{folder} holds the state of {name} on each of {count} data ranks, this plan has {plan.degrees.data}: "
                "what a StatefulDataLoader has read cannot be dealt out anew. Plan with as many data ranks, or read by "
                "trainer.loader, whose place every plan can go on from"
            )


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
