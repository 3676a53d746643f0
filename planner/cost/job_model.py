"""A model in a job on a cluster: its kinds of layers, how each runs under a shape, and the links of its groups."""

from functools import cached_property

import numpy as np

from ...profiler.machine.cluster import ClusterSpec, Device, Group
from ...profiler.model.model_profile import Costs, LayerClass, ModelProfile
from ..arrays import Floats
from ..plan.block_row import block_row
from ..plan.document import Axis
from ..plan.frameworks import Framework
from ..plan.legality import chosen_cuts, divisors, is_sequence_cut, stage_starts
from ..plan.shape import Cuts, Shape
from ..plan.training import TrainingSpec
from .comm_cost import GroupLinks
from .kept import memo
from .kernels import rings_of
from .kinds import Kind, kinds_of
from .software import load_software
from .tensor_costs import mode_costs

_Mode = tuple[str, Costs, int, tuple[int, ...]]
"""Name, observed costs, tensor degree, and indices of the cuts that are applied."""


class JobModel:
    """What all prices of one model on one cluster for one job are based on; depends on its inputs only, and caches."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: ClusterSpec,
        training: TrainingSpec,
        job: ClusterSpec | None = None,
        framework: Framework | None = None,
    ) -> None:
        """job: the whole cluster, if `cluster` is only the part of it that holds some stages of a pipeline. framework:
        if given, layers have only the options that it can run."""
        self.profile = profile
        self.framework = framework
        self.cluster = cluster
        self.job = job or cluster
        self.training = training
        self.software = load_software(training.software)
        self.device: Device = self.software.on(cluster.device, self.job.num_devices)
        if training.precision not in self.device.flops:
            known = ", ".join(self.device.flops)
            raise ValueError(f"{self.device.name} has no rate for {training.precision}; its device file has {known}")
        self._modes: dict[tuple[int, int, bool, Cuts | None], _Mode] = {}

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """[layer] -> its kind."""
        return kinds_of(self.profile)

    @cached_property
    def kinds_of_layers(self) -> tuple[Kind, ...]:
        """Every kind that occurs, once."""
        return tuple(dict.fromkeys(self.kinds))

    @cached_property
    def layers_of_kinds(self) -> Floats:
        """[kind that occurs] -> number of layers."""
        return np.array([self.kinds.count(kind) for kind in self.kinds_of_layers], dtype=float)

    @cached_property
    def starts(self) -> list[int]:
        """Layers before which a stage may begin."""
        return stage_starts(self.profile) if self.framework is None else self.framework.starts(self.profile)

    @cached_property
    def outside_blocks(self) -> frozenset[Kind]:
        """Kinds of the layers before and after the blocks, which a framework does not recompute; empty without a
        framework."""
        row = None if self.framework is None else block_row(self.profile.layers)
        return frozenset(kind for place, kind in enumerate(self.kinds) if row is not None and not row.holds(place))

    @memo
    def links(self, size: int, stride: int) -> GroupLinks:
        """Links of groups of `size` ranks, with `stride` ranks from one member to the next."""
        return GroupLinks(
            group=self.cluster.group(size, stride),
            link=self.cluster.link,
            network=self.software.through(self.cluster.between_hosts),
            devices_per_host=self.cluster.devices_per_host,
            factors=tuple(sorted(self.device.collective_factors.items())),
            flat=self.device.flat_rings,
            rings=rings_of(self.device),
        )

    @memo
    def links_of_stages(self, size: int, stride: int) -> GroupLinks:
        """Links of groups of `size` ranks, `stride` ranks apart, that belong to several stages. If stages have unequal
        devices, the slowest device and link of any."""
        if self.job is self.cluster:
            return self.links(size, stride)
        devices = [self.software.on(group.device, self.job.num_devices) for group in self.job.hosts]
        names = sorted({name for device in devices for name in device.collective_factors})
        return GroupLinks(
            group=self.job.group(size, stride),
            link=self.job.link,
            network=self.software.through(self.job.between_hosts),
            devices_per_host=max(group.devices_per_host for group in self.job.hosts),
            factors=tuple((name, max(d.collective_factors.get(name, 1.0) for d in devices)) for name in names),
            flat=any(device.flat_rings for device in devices),
            rings=rings_of(self.device),
        )

    @memo
    def places(self, size: int) -> tuple[int, ...]:
        """Strides at which groups of `size` ranks lie differently on the hosts, one for each way; neighbouring ranks
        first."""
        per_host, apart = self.cluster.devices_per_host, self.job.num_devices // size
        found: dict[Group, int] = {}
        for stride in divisors(max(1, apart)):
            found.setdefault(self.links(size, min(stride, per_host)).group, stride)
        return tuple(found.values())

    def axis_links(self, shape: Shape, axis: Axis) -> GroupLinks:
        """Links of a mesh axis."""
        size, stride = shape.degree(axis), shape.stride(axis)
        return self.links_of_stages(size, stride) if axis == "pipeline" else self.links(size, stride)

    def shard_links(self, shape: Shape) -> GroupLinks:
        """Links of the groups that parameters are sharded over."""
        return self.links(shape.sharded_over, shape.shard_stride)

    def layer_class(self, kind: Kind) -> LayerClass:
        """The class of a kind."""
        return self.profile.classes[kind.layer_class]

    def mode(self, kind: Kind, shape: Shape) -> tuple[str, Costs, int]:
        """(name, observed costs, tensor degree) that a kind runs with under a shape."""
        return self._mode(kind, shape)[:3]

    def _mode(self, kind: Kind, shape: Shape) -> _Mode:
        """(name, observed costs, tensor degree, indices of the cuts that are applied) with which a kind runs under a
        shape."""
        key = kind.layer_class, shape.tensor, shape.sequence, shape.cuts
        if key not in self._modes:  # asked for more often than all else: `memo_by` would cost a call more
            self._modes[key] = self._mode_of(self.layer_class(kind), shape)
        return self._modes[key]

    def _mode_of(self, layer_class: LayerClass, shape: Shape) -> _Mode:
        chosen = chosen_cuts(layer_class, shape)
        if not chosen:
            return "whole", layer_class.whole, 1, ()
        slices = is_sequence_cut(layer_class, shape)
        return "sequence" if slices else "tensor", mode_costs(layer_class, chosen, slices), shape.tensor, chosen

    def _as_run(self, kind: Kind, shape: Shape) -> tuple[object, ...]:
        """What decides which kernels a kind runs under a shape, and on tensors of which sizes for a sample."""
        mode, _, tensor, chosen = self._mode(kind, shape)
        return kind.layer_class, mode, tensor, chosen

    def imbalance(self, kind: Kind, shape: Shape) -> float:
        """Tokens of the rank whose experts get most, over the mean of all ranks; 1 if every expert gets equally
        many."""
        uneven = any(bank.called != "stacked" for bank in self.layer_class(kind).experts)
        return self.training.expert_imbalance if shape.expert > 1 and uneven else 1.0
