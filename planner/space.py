"""The space of shapes as a tree: degrees and micro-batch first, then how data is split and axes are ordered.

Every shape is counted. Whole subtrees that a rule excludes are counted by product, not enumerated.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from ..profiler.cluster import ClusterSpec
from ..profiler.model_profile import ModelProfile
from .plan import AXES, EXECUTABLE_SCHEDULES, Axis, Schedule
from .simulate import ZERO_BUBBLE, is_chunked
from .strategy import Pins, Shape, divisors, legal_cuts, sequence_rule, sharding_rule, tensor_rule
from .training import TrainingSpec


@dataclass(frozen=True)
class Family:
    """Shapes that differ only in how data ranks are split, when gradients are reduced, and in the order of axes."""

    tensor: int
    pipeline: int
    data: int
    sequence: bool
    schedule: Schedule
    micro_batch: int
    num_microbatches: int
    virtual_stages: int = 1


MOST_CHUNKS = 8
"""Stages of one rank that are tried; more only if pinned. Their bubbles differ little, their transfers add up."""


class Space:
    """All shapes of a model on a cluster for a job, minus what the user pinned away.

    rejected: rule -> shapes it excludes. Pinned-away shapes are not part of the space.
    """

    def __init__(self, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, pins: Pins) -> None:
        self.profile = profile
        self.cluster = cluster
        self.training = training
        self.pins = pins
        self.rejected: Counter[str] = Counter()
        self._most_stages = len(legal_cuts(profile)) + 1
        self._may_shard = sharding_rule(profile, training.precision) is None
        self._cached_orders: dict[tuple[int, int, int, int], tuple[tuple[Axis, ...], ...]] = {}

    def families(self) -> Iterator[Family]:
        """Legal families; fills `rejected` on the way."""
        num_devices = self.cluster.num_devices
        if not (self.pins.allows("context", 1) and self.pins.allows("expert", 1)):
            return  # neither axis is part of the space yet
        for tensor in divisors(num_devices):
            if not (self.pins.allows("tensor", tensor) and self._sequence_modes(tensor)):
                continue
            for pipeline in divisors(num_devices // tensor):
                if not self.pins.allows("pipeline", pipeline):
                    continue
                rule = tensor_rule(self.profile, tensor)
                if rule is None and (tensor > 1 or (pipeline > 1 and self.training.is_mixed)):
                    rule = sharding_rule(self.profile, self.training.precision)
                data = num_devices // tensor // pipeline
                if not self._splits(data):
                    continue
                if rule is None and pipeline > self._most_stages:
                    found = f"pipeline={pipeline} has more stages than the model can be cut into ({self._most_stages})"
                    yield from self._reject(found, tensor, pipeline, data)
                elif rule is None and self.training.global_batch % data:
                    found = f"global batch {self.training.global_batch} is no multiple of {data} data ranks"
                    yield from self._reject(found, tensor, pipeline, data)
                elif rule is not None:
                    yield from self._reject(rule, tensor, pipeline, data)
                else:
                    yield from self._legal(tensor, pipeline, data)

    def _legal(self, tensor: int, pipeline: int, data: int) -> Iterator[Family]:
        for micro_batch in divisors(self.training.global_batch // data):
            if not self.pins.allows("micro_batch", micro_batch):
                continue
            count = self.training.global_batch // data // micro_batch
            if micro_batch < self.profile.smallest_micro_batch:
                few = f"a batch norm of the model needs micro-batches of {self.profile.smallest_micro_batch} samples"
                self.rejected[few] += self._below(tensor, pipeline, data, count)
                continue
            for schedule, virtual in self._schedules(pipeline):
                rule = self._schedule_rule(schedule, virtual, pipeline, count)
                if rule is not None:
                    modes = len(self._sequence_modes(tensor))
                    self.rejected[rule] += modes * self._leaves(tensor, pipeline, data, count)
                    continue
                for sequence in self._sequences(tensor, pipeline, data, count):
                    yield Family(tensor, pipeline, data, sequence, schedule, micro_batch, count, virtual)

    def _schedules(self, pipeline: int) -> list[tuple[Schedule, int]]:
        """(schedule, stages of each rank) pairs that the pins allow, legal or not."""
        if pipeline == 1:
            return [("none", 1)] if self.pins.schedule in (None, "none") else []
        most = max(1, self._most_stages // pipeline)
        chunks = [v for v in range(2, most + 1) if v <= MOST_CHUNKS or v == self.pins.virtual_stages]
        pairs: list[tuple[Schedule, int]] = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-h2", 1)]
        pairs += [("interleaved", v) for v in chunks] + [("zb-v", 2)] * (most >= 2)
        return [
            (schedule, virtual)
            for schedule, virtual in pairs
            if self.pins.allows("schedule", schedule)
            and self.pins.allows("virtual_stages", virtual)
            and (schedule in EXECUTABLE_SCHEDULES or self.pins.everything or self.pins.schedule == schedule)
        ]

    def _schedule_rule(self, schedule: Schedule, virtual: int, pipeline: int, count: int) -> str | None:
        """The rule that excludes a schedule for `count` micro-batches, or None if it is legal."""
        if schedule == "1f1b" and count < pipeline:
            return "1F1B needs at least as many micro-batches as stages"
        if schedule == "gpipe" and count >= pipeline and self.pins.allows("schedule", "1f1b"):
            return "GPipe takes as long as 1F1B and holds more"
        if is_chunked(schedule) and count < pipeline:
            return "interleaved and zero-bubble schedules need at least as many micro-batches as ranks"
        if schedule == "interleaved" and count % max(1, count // pipeline):
            return "interleaved 1F1B needs equal rounds of micro-batches"
        if schedule in ZERO_BUBBLE and self.pins.recompute not in (None, "none"):
            return "zero-bubble schedules run without recompute"
        return None

    def _sequences(self, tensor: int, pipeline: int, data: int, count: int) -> Iterator[bool]:
        for sequence in self._sequence_modes(tensor):
            rule = sequence_rule(self.profile, tensor) if sequence else None
            if rule is None:
                yield sequence
            else:
                self.rejected[rule] += self._leaves(tensor, pipeline, data, count)

    def _sequence_modes(self, tensor: int) -> list[bool]:
        """Without and with sequence parallelism, as far as the pins allow."""
        modes = (False, True) if tensor > 1 else (False,)
        return [sequence for sequence in modes if self.pins.splits_sequences(tensor, sequence)]

    def _reject(self, rule: str, tensor: int, pipeline: int, data: int) -> Iterator[Family]:
        """Count everything below a rejected choice of degrees; yields nothing."""
        share = max(1, self.training.global_batch // data)
        micro_batches = [b for b in divisors(share) if self.pins.allows("micro_batch", b)]
        count = sum(self._below(tensor, pipeline, data, share // b) for b in micro_batches)
        if count:
            self.rejected[rule] += count
        return iter(())

    def _below(self, tensor: int, pipeline: int, data: int, count: int) -> int:
        """Shapes of all schedules and modes for `count` micro-batches."""
        modes = len(self._sequence_modes(tensor))
        return modes * len(self._schedules(pipeline)) * self._leaves(tensor, pipeline, data, count)

    def _leaves(self, tensor: int, pipeline: int, data: int, count: int) -> int:
        """Shapes below one family."""
        total = 0
        for replicate, shard in self._splits(data):
            modes = len(_modes(self.pins, pipeline, shard, count))
            total += modes * len(self._orders(replicate, shard, tensor, pipeline))
        return total

    def num_shapes(self, family: Family) -> int:
        """Shapes of a family."""
        return self._leaves(family.tensor, family.pipeline, family.data, family.num_microbatches)

    def shapes(self, family: Family) -> Iterator[Shape]:
        """Every shape of a family."""
        for replicate, shard in self._splits(family.data):
            for sync, reshard in _modes(self.pins, family.pipeline, shard, family.num_microbatches):
                for order in self._orders(replicate, shard, family.tensor, family.pipeline):
                    yield Shape(
                        data_replicate=replicate,
                        data_shard=shard,
                        tensor=family.tensor,
                        pipeline=family.pipeline,
                        micro_batch=family.micro_batch,
                        num_microbatches=family.num_microbatches,
                        sequence=family.sequence,
                        schedule=family.schedule,
                        virtual_stages=family.virtual_stages,
                        gradient_sync=sync,
                        reshard=reshard,
                        mesh_axes=order,
                    )

    def _splits(self, data: int) -> list[tuple[int, int]]:
        """(data_replicate, data_shard) pairs that the pins allow; without sharding where a parameter forbids it."""
        return [
            (data // shard, shard)
            for shard in (divisors(data) if self._may_shard else [1])
            if self.pins.allows("data_shard", shard) and self.pins.allows("data_replicate", data // shard)
        ]

    def _orders(self, replicate: int, shard: int, tensor: int, pipeline: int) -> tuple[tuple[Axis, ...], ...]:
        """Orders of the mesh axes that differ in where some group sits; on one host there is one."""
        key = replicate, shard, tensor, pipeline
        if key not in self._cached_orders:
            degrees: dict[Axis, int] = {
                "pipeline": pipeline,
                "data_replicate": replicate,
                "data_shard": shard,
                "tensor": tensor,
            }
            self._cached_orders[key] = _orders(self.cluster, degrees)
        return self._cached_orders[key]


def _modes(pins: Pins, pipeline: int, shard: int, count: int) -> list[tuple[Literal["every", "last"], bool]]:
    """(when gradients are reduced, whether a pipeline's layers give parameters back): choices only where they save
    memory, that is with shards, and for the first with several micro-batches."""
    syncs: tuple[Literal["every", "last"], ...] = ("last",)
    if shard > 1 and count > 1:
        syncs = ("every", "last") if pins.gradient_sync is None else (pins.gradient_sync,)
    reshards: tuple[bool, ...] = (False,)
    if shard > 1 and pipeline > 1:
        reshards = (False, True) if pins.reshard is None else (pins.reshard,)
    return [(sync, reshard) for sync in syncs for reshard in reshards]


def _orders(cluster: ClusterSpec, degrees: dict[Axis, int]) -> tuple[tuple[Axis, ...], ...]:
    active = [axis for axis in AXES if degrees.get(axis, 1) > 1]
    if cluster.num_hosts == 1 or len(active) < 2:
        return (AXES,)
    idle = tuple(axis for axis in AXES if axis not in active)
    orders: dict[tuple[tuple[Axis, int, int], ...], tuple[Axis, ...]] = {}
    for order in permutations(active):
        stride, places = 1, []
        for axis in reversed(order):
            group = cluster.group(degrees[axis], stride)
            places.append((axis, group.ranks_per_host, group.hosts))
            stride *= degrees[axis]
        orders.setdefault(tuple(sorted(places)), idle + order)
    return tuple(orders.values())
