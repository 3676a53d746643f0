"""Every step of a run as a line of JSON: time, speed, memory of every rank, communication by mesh axis."""

import os
import resource
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch.nn.parallel import DistributedDataParallel

from ..planner.plan.document import AXES, Plan
from .parallel.mesh import RankMesh, mechanism
from .run_document import AxisSeconds, RunHeader, RunRestart, RunStep

_OPERATIONS = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "send",
    "_allgather_base",
    "_reduce_scatter_base",
)
"""Methods of torch's process groups that send something, in torch 2.11 to 2.13."""


class StepMetrics(Protocol):
    """What a step gave."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def step_time_s(self) -> float: ...


class Telemetry:
    """Writes a run's file. Every rank must have one; the plan's first rank writes."""

    def __init__(self, path: Path, plan: Plan, mesh: RankMesh) -> None:
        self._plan, self._mesh = plan, mesh
        self._clock = CommunicationClock(mesh)
        self._axes = sorted({*self._clock.axes.values()})
        self._ended_s: float | None = None
        self._between_s = 0.0
        self._ended: list[tuple[int, StepMetrics, float, float, Callable[[], Covered]]] = []
        self._file = path.open("a") if mesh.rank == 0 else None
        on_gpu = mesh.device.type == "cuda"
        self._write(
            RunHeader(
                model=plan.model.name,
                layout=plan.label,
                num_ranks=plan.degrees.num_devices,
                device=torch.cuda.get_device_name(mesh.device) if on_gpu else "cpu",
                torch_version=torch.__version__,
                tokens_per_step=plan.training.global_batch * (plan.training.seq_len or 1),
                memory_kind="allocated" if on_gpu else "resident",
                plan=plan.model_copy(update={"certificate": None, "alternatives": ()}),
            )
        )

    def begin(self) -> None:
        """A step begins."""
        if self._mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._mesh.device)
        self._between_s = 0.0 if self._ended_s is None else time.perf_counter() - self._ended_s
        self._clock.start()

    def replicated(self, replicas: DistributedDataParallel) -> None:
        """DDP communicates out of C++: let it be seen."""
        self._clock.watch_replicas(replicas)

    def end(self, step: int, metrics: StepMetrics) -> None:
        """All of the step is launched. Nothing is read yet, for that would wait for the device."""
        peak = float(peak_memory_bytes(self._mesh.device))
        self._ended.append((step, metrics, self._between_s, peak, self._clock.stop()))
        self._ended_s = time.perf_counter()

    def flush(self) -> None:
        """Gather what all ranks saw of the steps so far, and write it. All ranks must call it."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        own = []
        for *_, peak, read in ended:
            found = read()
            computed_s = _UNKNOWN if found.computed_s is None else found.computed_s
            own.append([peak, computed_s, *(found.axis_s.get(axis, 0.0) for axis in self._axes)])
        rows = self._gathered(torch.tensor(own, dtype=torch.float64, device=self._mesh.device))
        for place, (step, metrics, between_s, *_) in enumerate(ended):
            self._write_step(step, metrics, between_s, rows[:, place])
        self._ended_s = time.perf_counter()

    def _write_step(self, step: int, metrics: StepMetrics, between_s: float, rows: torch.Tensor) -> None:
        step_time_s = metrics.step_time_s
        prediction = self._plan.prediction
        planned = self._plan.training.global_batch * (self._plan.training.seq_len or 1) / step_time_s
        done = 0.0 if prediction is None else prediction.mfu * prediction.step_time_s / step_time_s
        order = [self._mesh.processes[rank] for rank in range(self._plan.degrees.num_devices)]
        computed = tuple(float(rows[process, 1]) for process in order)
        self._write(
            RunStep(
                step=step,
                loss=metrics.loss,
                grad_norm=metrics.grad_norm,
                step_time_s=step_time_s,
                between_s=between_s,
                tokens_per_s=metrics.tokens_per_s,
                mfu=None if prediction is None else done * metrics.tokens_per_s / planned,
                peak_memory_bytes=tuple(int(rows[process, 0]) for process in order),
                communication_s={
                    axis: AxisSeconds(mean=float(rows[:, 2 + i].mean()), max=float(rows[:, 2 + i].max()))
                    for i, axis in enumerate(self._axes)
                },
                rank_communication_s=tuple(float(rows[process, 2:].sum()) for process in order) if self._axes else (),
                rank_compute_s=computed if min(computed) >= 0.0 else (),
            )
        )

    def restarted(self, checkpoint: Path, steps: int, began_s: float) -> None:
        """A checkpoint was taken over. began_s: when that began, by time.monotonic."""
        if self._file is None:
            return
        load_s = time.monotonic() - began_s
        age_s = _process_age_s()
        files = (path for path in checkpoint.rglob("*") if path.is_file())
        self._write(
            RunRestart(
                steps=steps,
                num_ranks=self._plan.degrees.num_devices,
                start_s=None if age_s is None else max(0.0, age_s - load_s),
                load_s=load_s,
                loaded_bytes=sum(path.stat().st_size for path in files),
            )
        )

    def close(self) -> None:
        """End the file, and leave torch as it was."""
        self._clock.close()
        if self._file is not None:
            self._file.close()

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        if self._mesh.device_mesh is None:
            return own[None]
        rows = [torch.empty_like(own) for _ in range(self._plan.degrees.num_devices)]
        dist.all_gather(rows, own)
        return torch.stack(rows).cpu()

    def _write(self, document: BaseModel) -> None:
        if self._file is not None:
            self._file.write(document.model_dump_json() + "\n")
            self._file.flush()


class ComputedSeconds:
    """What this rank computed in each step, without what it waited for: in memory, in the place of a run's file."""

    def __init__(self, mesh: RankMesh) -> None:
        self._clock = CommunicationClock(mesh)
        self._ended: list[Callable[[], Covered]] = []

    def begin(self) -> None:
        """A step begins."""
        self._clock.start()

    def replicated(self, replicas: DistributedDataParallel) -> None:
        """DDP communicates out of C++: let it be seen."""
        self._clock.watch_replicas(replicas)

    def end(self, step: int, metrics: StepMetrics) -> None:
        """All of the step is launched."""
        self._ended.append(self._clock.stop())

    def flush(self) -> None:
        """Nothing is written."""

    def restarted(self, checkpoint: Path, steps: int, began_s: float) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Leave torch as it was."""
        self._clock.close()

    def taken(self) -> list[float | None]:
        """[step] since the last call -> seconds computed; None where that cannot be seen. Waits for the device."""
        ended, self._ended = self._ended, []
        return [read().computed_s for read in ended]


def peak_memory_bytes(device: torch.device) -> int:
    """Most that torch allocated on the GPU, or that the process held on the CPU, since restart_peak_memory; if that was
    not called, since the step or the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, StopIteration):  # Linux; getrusage there counts what began this process, too
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def restart_peak_memory(device: torch.device) -> None:
    """Forget peaks until now: those of building the model, of warming up. (Only Linux can on the CPU.)"""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR.write_text("5")


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _process_age_s() -> float | None:
    """Seconds since this process began; None where the system does not say (Linux does)."""
    try:
        began = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - began
    except (OSError, ValueError, IndexError):
        return None


_UNKNOWN = -1.0
"""Stands for computed seconds that are not known, on the way from rank to rank."""


@dataclass(frozen=True)
class Covered:
    """Axis -> seconds of a step in which something was under way on it; and the seconds of the step in which this rank
    waited for none of it, None where that cannot be seen."""

    axis_s: dict[str, float]
    computed_s: float | None


class CommunicationClock:
    """Seconds of a step in which something was under way on each mesh axis, and those in which nothing was waited for.

    An operation is under way from its call until this rank has waited for it, whether it computes meanwhile or not; on
    the GPU that is told by events on the streams. It is waited for from the call of `wait` on, or of the operation
    where that returns nothing to wait for; of gradients that DDP reduces, from the last bucket on, behind which it has
    nothing left to compute. fully_shard lets streams of a GPU wait for each other where no call tells of it, so what
    its ranks compute is not known there. axes: name of a process group -> axis.
    """

    def __init__(self, mesh: RankMesh) -> None:
        self._on_gpu = mesh.device.type == "cuda"
        self._sees_waits = not (self._on_gpu and mechanism(mesh.plan) == "fsdp")
        self.axes: dict[str, str] = {}
        if mesh.device_mesh is not None:
            self.axes[dist.group.WORLD.group_name] = "all"  # type: ignore[union-attr]
            if mesh.plan.degrees.context > 1:
                self.axes[mesh.shard_mesh.get_group().group_name] = "data_shard"
            if mesh.spread is not None:
                for dim, name in (("data_replicate",) * 2, ("expert_shard", "data_shard"), ("expert", "expert")):
                    self.axes[mesh.spread.get_group(dim).group_name] = name
            for axis in AXES:
                group = mesh.group(axis)
                if group is not None:
                    self.axes[group.group_name] = axis
        self._intervals: list[tuple[str, Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._pending: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
        self._running = False
        self._started: Any = None
        self._originals: dict[tuple[type, str], Any] = {}
        if self.axes:
            for name in _OPERATIONS:
                if hasattr(dist.ProcessGroup, name):
                    self._replace(dist.ProcessGroup, name, self._issuing)
            self._replace(dist.Work, "wait", self._waiting)

    def start(self) -> None:
        """A step begins."""
        self._intervals, self._waits = [], []
        self._running = True
        self._started = self._now()

    def stop(self) -> Callable[[], Covered]:
        """The step is launched. What comes back gives its seconds, and waits for the device to finish the step."""
        self._running = False
        return partial(self._covered, self._started, self._intervals, self._waits, self._now())

    def _covered(
        self, started: Any, intervals: list[tuple[str, Any, Any]], waits: list[tuple[Any, Any]], end: Any
    ) -> Covered:
        if self._on_gpu:
            end.synchronize()
        spans: dict[str, list[tuple[float, float]]] = {}
        for axis, begin, stop in intervals:
            spans.setdefault(axis, []).append((self._seconds(started, begin), self._seconds(started, stop)))
        axis_s = {axis: covered_s(found) for axis, found in spans.items()}
        if not self._sees_waits:
            return Covered(axis_s, None)
        waited = [(self._seconds(started, begin), self._seconds(started, stop)) for begin, stop in waits]
        return Covered(axis_s, max(0.0, self._seconds(started, end) - covered_s(waited)))

    def close(self) -> None:
        """Leave torch as it was."""
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        self._originals.clear()

    def watch_replicas(self, replicas: DistributedDataParallel) -> None:
        """Reduce the gradients of replicas through Python, as DDP itself would."""
        group = replicas.process_group
        axis = self.axes.get(group.group_name, "all")

        def hook(  # DDP reads the annotations
            state: None,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            begin, is_last = self._now(), bucket.is_last()
            work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
            assert work is not None

            def done(future: torch.futures.Future[Any]) -> torch.Tensor:
                end = self._now()
                self._intervals.append((axis, begin, end))
                if is_last:
                    self._waits.append((begin, end))
                reduced: torch.Tensor = future.value()[0]
                return reduced

            reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
            return reduced

        replicas.register_comm_hook(None, hook)

    def _replace(self, owner: type, name: str, around: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._originals[owner, name] = original
        setattr(owner, name, around(original))

    def _issuing(self, original: Any) -> Any:
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            axis = self.axes.get(group.group_name) if self._running else None
            if axis is None:
                return original(group, *args, **kwargs)
            begin = self._now()
            work = original(group, *args, **kwargs)
            if work is None:
                end = self._now()
                self._intervals.append((axis, begin, end))
                self._waits.append((begin, end))
            else:
                self._pending[work] = (axis, begin)
            return work

        return issue

    def _waiting(self, original: Any) -> Any:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if (begun := self._pending.pop(work, None)) is None:
                return original(work, *args, **kwargs)
            begin = self._now()
            done = original(work, *args, **kwargs)
            end = self._now()
            self._intervals.append((*begun, end))
            self._waits.append((begin, end))
            return done

        return wait

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, started: Any, moment: Any) -> float:
        seconds: float = started.elapsed_time(moment) / 1e3 if self._on_gpu else moment - started
        return seconds


def covered_s(spans: list[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
