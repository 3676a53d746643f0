"""Corrects what a device holds beside tensors by the measured memory of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...profiler.machine.cluster import ClusterSpec, Device
from ...profiler.machine.units import GIB
from ...profiler.model.model_profile import ModelProfile
from ..arrays import Floats
from ..plan.document import AXES, Axis, Plan
from .estimate import StageMemory, estimate
from .refit import HUBER, hosts_with

NOISE = 0.02
"""Standard deviation of a process's peak relative to a right model: ranks that do the same differed by 0 to 2% (DDP,
FSDP and TP on two CPU ranks)."""

CONTEXT_SPREAD = 0.5
"""Standard deviation of the bytes outside the allocator, over the preset's, before any process is seen: libraries
differ."""

FRAGMENTATION_SPREAD = 0.05
"""Standard deviation of what an allocator holds beyond what it has handed out, as a share of that, before any process
is seen; 3 to 10% in published runs."""

GROUPS_SPREAD = 0.25 * GIB
"""Standard deviation of the bytes of an axis's buffers, before any process is seen: NCCL's communicators take up to 0.7
GiB each (nccl issue 964); FSDP2 over gloo took 0.3 GiB more than predicted (17 million parameters, two CPU ranks)."""

_ROUNDS = 20


@dataclass(frozen=True)
class MeasuredMemory:
    """Measured peak, in bytes, of the process of a rank that ran a plan. position: its pipeline coordinate. kind:
    "resident", the whole process; or "reserved", what torch's allocator held on the GPU."""

    label: str
    plan: Plan
    profile: ModelProfile
    position: int
    kind: Literal["resident", "reserved"]
    bytes: float


@dataclass(frozen=True)
class MemoryRefit:
    """Fitted constants: bytes outside the allocator, share that the allocator holds beyond what it has handed out,
    bytes of each axis in use. before, after: predicted bytes of every observation."""

    context: float
    fragmentation: float
    communicators: dict[str, float]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def of(self, device: Device, count: int) -> Device:
        """The device with these constants. count: observations that they were fitted to."""
        told = f"fitted to the measured memory of {count} processes"
        changed = {
            "context": self.context,
            "fragmentation": self.fragmentation,
            "communicators": {**device.communicators, **self.communicators},
        }
        fields = {name: value for name, value in changed.items() if getattr(device, name) != value}
        sources = {**device.sources, **dict.fromkeys(fields, told)}
        return device.model_copy(update={**fields, "sources": sources})

    def at(self, cluster: ClusterSpec, count: int) -> ClusterSpec:
        """The hosts with these constants in their devices."""
        hosts = tuple(group.model_copy(update={"device": self.of(group.device, count)}) for group in cluster.hosts)
        return cluster.model_copy(update={"hosts": hosts})


def refit_memory(device: Device, seen: Sequence[MeasuredMemory]) -> MemoryRefit:
    """Constants of the device's memory, moved towards the best prediction of the observations as far as these and
    priors support. What the allocator hands out is computed, and not fitted.

        resident = context + allocated (1 + fragmentation) + sum of the axes in use
        reserved =           allocated (1 + fragmentation)

    Minimises sum rho((predicted - measured) / (noise measured)) + sum ((constant - preset) / spread)^2 over constants
    of at least 0, where rho is Huber's. Raises ValueError without observations.
    """
    if not seen:
        raise ValueError("there is no measured memory to fit to; give at least one process")
    found = [_predicted(each, device) for each in seen]
    axes = sorted({axis for each in seen for axis in _in_use(each)}, key=AXES.index)
    prior = np.array([device.context, device.fragmentation, *(device.communicator_of(axis) for axis in axes)])
    spread = np.array([CONTEXT_SPREAD * max(device.context, 1.0), FRAGMENTATION_SPREAD, *(GROUPS_SPREAD for _ in axes)])
    rows = np.array([_row(each, memory, axes) for each, memory in zip(seen, found, strict=True)])
    allocated = np.array([memory.allocated_bytes for memory in found])
    measured = np.array([each.bytes for each in seen])
    point = _least(rows, measured - allocated, NOISE * measured, prior, spread)
    return MemoryRefit(
        context=float(point[0]),
        fragmentation=float(point[1]),
        communicators={axis: float(value) for axis, value in zip(axes, point[2:], strict=True)},
        before=tuple((allocated + rows @ prior).tolist()),
        after=tuple((allocated + rows @ point).tolist()),
    )


def _predicted(each: MeasuredMemory, device: Device) -> StageMemory:
    plan = each.plan.model_copy(update={"cluster": hosts_with(each.plan.cluster, device)})
    return estimate(plan, each.profile).memory[each.position]


def _in_use(each: MeasuredMemory) -> set[Axis]:
    return {axis for axis in AXES if each.plan.degrees.of(axis) > 1 and each.kind == "resident"}


def _row(each: MeasuredMemory, memory: StageMemory, axes: Sequence[Axis]) -> list[float]:
    """Coefficients of context, fragmentation and axes in what an observation is predicted to have beyond allocated
    bytes."""
    used = _in_use(each)
    is_resident = float(each.kind == "resident")
    return [is_resident, memory.allocated_bytes, *(float(axis in used) for axis in axes)]


def _least(rows: Floats, wanted: Floats, noise: Floats, prior: Floats, spread: Floats) -> Floats:
    """The constants with the least loss, by reweighted least squares; constants that would be negative are held at
    0."""
    point, free = prior.copy(), np.ones(len(prior), dtype=bool)
    for _ in range(_ROUNDS):
        off = np.abs(rows @ point - wanted) / noise
        weight = np.minimum(1.0, HUBER / np.maximum(off, 1e-9)) / noise**2
        scaled = rows[:, free] * spread[free]
        matrix = scaled.T @ (weight[:, None] * scaled) + np.eye(int(free.sum()))
        right = scaled.T @ (weight * wanted) + prior[free] / spread[free]
        point = np.zeros(len(prior))
        point[free] = spread[free] * np.linalg.solve(matrix, right)
        free &= point >= 0.0
        point = np.maximum(point, 0.0)
    return point
