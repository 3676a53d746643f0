"""What one layer costs under a shape and an option: the coefficients of the ILP, and of every estimate."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..profiler.cluster import ClusterSpec, Device
from ..profiler.model_profile import Costs, LayerClass, ModelProfile
from .comm_cost import Collective, GroupLinks, collective_s, exposed_s
from .compute_cost import Seconds, accumulate_s, layer_seconds, optimizer_s
from .kinds import Kind, kinds_of
from .memory_cost import StateBytes, state_bytes, uses_fully_shard
from .plan import Axis, Recompute
from .software import load_software
from .strategy import LayerOption, Shape, is_cut, is_sequence_cut
from .training import TrainingSpec

Part = Literal["forward", "backward"]

PREFETCHED_LAYERS = 2
"""Layers whose gathered parameters are there at once where layers reshard: the one at work and the next."""

P2P_EXPOSED = 0.8
"""Share of a transfer between stages that its receiver waits for. Pilot fit on published runs."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and calls of one collective on one axis by one rank."""

    axis: Axis
    kind: Collective
    bytes: float
    calls: float
    per_step: bool


@dataclass(frozen=True)
class LayerCost:
    """One layer under one shape and option. Seconds per micro-batch unless `once_`; bytes on one rank. weight_s: the
    part of backward_s that is for gradients of weights."""

    forward_s: float
    backward_s: float
    weight_s: float
    recompute_s: float
    tensor_forward_s: float
    tensor_backward_s: float
    data_forward_s: float
    data_backward_s: float
    once_data_s: float
    optimizer_s: float
    elements: float
    trainable_elements: float
    kept_bytes: float
    held_bytes: float
    transient_bytes: float
    traffic: tuple[Traffic, ...]

    @property
    def forward_total_s(self) -> float:
        """Forward of one micro-batch, exposed communication included."""
        return self.forward_s + self.tensor_forward_s + self.data_forward_s

    @property
    def backward_total_s(self) -> float:
        """Backward of one micro-batch, recompute and exposed communication included."""
        return self.backward_s + self.recompute_s + self.tensor_backward_s + self.data_backward_s

    @property
    def microbatch_s(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_total_s + self.backward_total_s

    @property
    def once_s(self) -> float:
        """Once per step: exposed gradient reduction and first gathers, and the optimizer."""
        return self.once_data_s + self.optimizer_s


@dataclass(frozen=True)
class Cut:
    """What crosses one place of the chain for one micro-batch: seconds until the next stage has it, and bytes."""

    seconds: float
    bytes: float


class CostModel:
    """Prices layers of one model on one cluster for one job; pure in its three inputs, with caches."""

    def __init__(self, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec) -> None:
        self.profile = profile
        self.cluster = cluster
        self.training = training
        self.software = load_software(training.software)
        self.device: Device = self.software.on(cluster.device, cluster.num_devices)
        if training.precision not in self.device.flops:
            known = ", ".join(self.device.flops)
            raise ValueError(f"{self.device.name} has no rate for {training.precision}; its device file has {known}")
        self._seconds: dict[tuple[int, str, int, int], Seconds] = {}
        self._links: dict[tuple[int, int], GroupLinks] = {}
        self._crossings: dict[tuple[int, int], list[float]] = {}

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kind of every layer of the chain."""
        return kinds_of(self.profile)

    def links(self, size: int, stride: int) -> GroupLinks:
        """Links of the groups of `size` ranks that lie `stride` apart."""
        if (size, stride) not in self._links:
            self._links[size, stride] = GroupLinks(
                group=self.cluster.group(size, stride),
                link=self.cluster.link,
                network=self.cluster.network,
                devices_per_host=self.cluster.devices_per_host,
                factors=tuple(sorted(self.device.collective_factors.items())),
            )
        return self._links[size, stride]

    def axis_links(self, shape: Shape, axis: Axis) -> GroupLinks:
        """Links of a mesh axis."""
        return self.links(shape.degree(axis), shape.stride(axis))

    def optimizer_s(self, elements: float) -> float:
        """Seconds of the optimizer step over `elements` parameters on one device."""
        return optimizer_s(elements, self.training.optimizer, self.device)

    def layer_class(self, kind: Kind) -> LayerClass:
        """The class of a kind."""
        return self.profile.classes[kind.layer_class]

    def mode(self, kind: Kind, shape: Shape) -> tuple[str, Costs, int]:
        """(name, observed costs, tensor degree) that a kind runs with under a shape."""
        layer_class = self.layer_class(kind)
        if is_sequence_cut(layer_class, shape) and layer_class.sequence is not None:
            return "sequence", layer_class.sequence, shape.tensor
        if is_cut(layer_class, shape) and layer_class.tensor is not None:
            return "tensor", layer_class.tensor, shape.tensor
        return "whole", layer_class.whole, 1

    def compute(self, kind: Kind, shape: Shape) -> Seconds:
        """Compute seconds of a layer for one micro-batch."""
        mode, costs, tensor = self.mode(kind, shape)
        key = (kind.layer_class, mode, shape.micro_batch, tensor)
        if key not in self._seconds:
            self._seconds[key] = layer_seconds(
                costs, self.device, self.training.precision, self.training.compute_bytes, shape.micro_batch, tensor
            )
        return self._seconds[key]

    def elements(self, kind: Kind, shape: Shape, without: frozenset[str] = frozenset()) -> tuple[float, float]:
        """(all, trainable) parameter elements of a layer on one tensor rank, before data sharding."""
        layer_class = self.layer_class(kind)
        divisor = shape.tensor if is_cut(layer_class, shape) else 1
        sharded = {name for cut in layer_class.cuts for name in cut.sharded}
        total = trainable = 0.0
        for parameter in layer_class.parameters:
            if parameter.name in without:
                continue
            count = parameter.num_elements / (divisor if parameter.name in sharded else 1)
            total += count
            trainable += count if parameter.trainable else 0.0
        return total, trainable

    def _passing_bytes(
        self, kind: Kind, shape: Shape, state: StateBytes, total: float, trainable: float, resharded: bool
    ) -> float:
        """Bytes of gradients, and of gathered parameters that are given back, while the layer is at work."""
        if not uses_fully_shard(shape, self.training):
            sizes = [p.num_elements for p in self.layer_class(kind).parameters if p.trainable]
            return max(sizes, default=0) * state.new_gradient
        gradients = state.passing_gradients - (state.root_gradients if kind.is_in_root(shape) else 0.0)
        return trainable * gradients + (PREFETCHED_LAYERS * total * state.gathered if resharded else 0.0)

    def _exposed_tensor_s(self, comm_s: float, compute_s: float) -> float:
        """What is left of tensor-parallel communication where the stack hides a share of it behind the layer's work."""
        return comm_s - min(self.software.tensor_overlap * comm_s, compute_s)

    def _accumulate_s(self, trainable: float, shape: Shape) -> float:
        """Seconds per micro-batch of adding new gradients to those of the micro-batches before: fp32, two reads and a
        write, of shards where they are reduced first."""
        if shape.num_microbatches == 1 or self.software.accumulates_in_matmul:
            return 0.0
        elements = trainable / (shape.data_shard if shape.gradient_sync == "every" else 1)
        added = accumulate_s(elements, self.device)
        return added * (1 - 1 / shape.num_microbatches)

    def tensor_traffic(self, kind: Kind, shape: Shape) -> tuple[tuple[Part, bool, Traffic], ...]:
        """(part, whether recompute repeats it, collective) of tensor parallelism in one layer for one micro-batch."""
        mode, costs, tensor = self.mode(kind, shape)
        element_bytes, batch = self.training.compute_bytes, shape.micro_batch
        traffic: list[tuple[Part, bool, Traffic]] = [
            (
                c.part,
                c.part == "forward" and c.repeated,
                Traffic("tensor", c.kind, c.tensor.at(batch, element_bytes, tensor), 1.0, per_step=False),
            )
            for c in costs.collectives
            if mode != "whole"
        ]
        if shape.sequence and mode != "sequence":
            edges: tuple[tuple[Part, int], ...] = (("forward", kind.leaves), ("backward", kind.enters))
            neighbour = self._hidden_bytes(shape)
            traffic += [(part, False, Traffic("tensor", "all_gather", neighbour, 1.0, False)) for part, n in edges if n]
        return tuple(traffic)

    def _hidden_bytes(self, shape: Shape) -> float:
        """Bytes of the hidden state that is sliced where sequence parallelism begins and gathered where it ends."""
        sizes = [
            c.whole.inputs.at(shape.micro_batch, self.training.compute_bytes)
            for c in self.profile.classes
            if c.sequence is not None
        ]
        return max(sizes, default=0.0)

    def cost(self, kind: Kind, shape: Shape, option: LayerOption) -> LayerCost:
        """What a layer of this kind costs under a shape and an option."""
        seconds = self.compute(kind, shape)
        state = state_bytes(shape, self.training)
        total, trainable = self.elements(kind, shape)
        axis_links = self.axis_links(shape, "tensor")
        tensor_s: dict[Part, float] = {"forward": 0.0, "backward": 0.0}
        repeated_s = 0.0
        for part, repeated, item in self.tensor_traffic(kind, shape):
            item_s = collective_s(item.kind, item.bytes, axis_links)
            tensor_s[part] += item_s
            repeated_s += item_s if repeated else 0.0
        in_root = kind.is_in_root(shape)
        resharded = option.reshard and uses_fully_shard(shape, self.training) and not in_root
        data = self._data(shape, resharded, *self.elements(kind, shape, kind.held_before(shape)), seconds)
        full = option.recompute == "full"
        kept, transient = self._activation_bytes(kind, shape, option.recompute)
        passing = self._passing_bytes(kind, shape, state, total, trainable, resharded)
        held = 0.0 if resharded else total * state.gathered
        held += trainable * (state.accumulated + (state.root_gradients if in_root else 0.0))
        shard = shape.data_shard
        return LayerCost(
            forward_s=seconds.forward + self.software.layer_s,
            backward_s=seconds.backward + self._accumulate_s(trainable, shape) + self.software.layer_s,
            weight_s=seconds.backward_weight,
            recompute_s=seconds.repeated[option.recompute],
            tensor_forward_s=self._exposed_tensor_s(tensor_s["forward"], seconds.forward),
            tensor_backward_s=self._exposed_tensor_s(tensor_s["backward"], seconds.backward)
            + (self._exposed_tensor_s(repeated_s, seconds.forward) if full else 0.0),
            data_forward_s=data.forward_s,
            data_backward_s=data.backward_s,
            once_data_s=data.once_s,
            optimizer_s=self.optimizer_s(trainable / shard),
            elements=total,
            trainable_elements=trainable,
            kept_bytes=kept,
            held_bytes=held,
            transient_bytes=transient + passing,
            traffic=data.traffic
            + self._partial_traffic(kind, shape)
            + tuple(
                Traffic(t.axis, t.kind, t.bytes, 2.0 if full and repeated else 1.0, False)
                for _, repeated, t in self.tensor_traffic(kind, shape)
            ),
        )

    def arriving_bytes(self, kind: Kind, shape: Shape, recomputed: bool) -> float:
        """Bytes of tensors from earlier layers that a layer keeps for one micro-batch."""
        batch, element_bytes = shape.micro_batch, self.training.compute_bytes
        slices = self.mode(kind, shape)[0] == "sequence"
        return sum(
            item.size.at(batch, element_bytes) / (shape.tensor if slices and item.slices else 1)
            for item in (kind.keeps_for_recompute if recomputed else kind.keeps)
        )

    def _activation_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> tuple[float, float]:
        """(kept, transient) bytes for one micro-batch; recomputed layers pass through everything that they would have
        saved."""
        batch, element_bytes = shape.micro_batch, self.training.compute_bytes
        _, costs, tensor = self.mode(kind, shape)
        saved = costs.saved.at(batch, element_bytes, tensor)
        under = {"none": costs.saved, "attention": costs.attention, "selective": costs.selective, "full": costs.full}
        kept = under[recompute].at(batch, element_bytes, tensor)
        forward = costs.forward_transient.at(batch, element_bytes, tensor)
        backward = costs.backward_transient.at(batch, element_bytes, tensor)
        transient = max(forward, backward) + max(0.0, saved - kept)
        return kept + self.arriving_bytes(kind, shape, recompute in ("selective", "full")), transient

    def _data(self, shape: Shape, resharded: bool, total: float, trainable: float, seconds: Seconds) -> "_DataCost":
        """Gathers and gradient reductions of one layer: exposed seconds and traffic."""
        shard, replicate = self.axis_links(shape, "data_shard"), self.axis_links(shape, "data_replicate")
        overlap, contention = self.device.overlap, self.device.contention
        gather_bytes = self.training.compute_bytes * total
        reduce_bytes = 4 * trainable
        gather_s = collective_s("all_gather", gather_bytes, shard)
        reduce_s = collective_s("reduce_scatter", reduce_bytes, shard)
        reduce_s += collective_s("all_reduce", reduce_bytes / shape.data_shard, replicate)
        every = shape.gradient_sync == "every"
        keeps = not resharded
        forward = exposed_s(gather_s, seconds.forward, overlap, contention)
        backward_comm = (gather_s if resharded else 0.0) + (reduce_s if every else 0.0)
        backward = exposed_s(backward_comm, seconds.backward, overlap, contention)
        once_comm = 0.0 if every else reduce_s
        once = 0.0
        if keeps and not every:
            once, forward = forward, 0.0
        if not every:
            room = seconds.backward if keeps else max(0.0, seconds.backward - gather_s)
            once += exposed_s(once_comm, room, overlap, contention)
        gathers = (2.0 if resharded else 1.0) if shape.data_shard > 1 else 0.0
        traffic = []
        if gathers:
            traffic.append(Traffic("data_shard", "all_gather", gather_bytes, gathers, per_step=keeps and not every))
            traffic.append(Traffic("data_shard", "reduce_scatter", reduce_bytes, 1.0, per_step=not every))
        if shape.data_replicate > 1:
            traffic.append(
                Traffic("data_replicate", "all_reduce", reduce_bytes / shape.data_shard, 1.0, per_step=not every)
            )
        return _DataCost(forward, backward, once, tuple(traffic))

    def _partial_traffic(self, kind: Kind, shape: Shape) -> tuple[Traffic, ...]:
        """Gradients of which each tensor rank has the share of its slice of the sequence, summed once per step. They
        are those of norms and biases, in one bucket for all layers: counted, but not worth seconds."""
        if self.mode(kind, shape)[0] != "sequence":
            return ()
        layer_class = self.layer_class(kind)
        sharded = frozenset(name for cut in layer_class.cuts for name in cut.sharded)
        _, whole = self.elements(kind, shape, sharded | kind.held_before(shape))
        return (Traffic("tensor", "all_reduce", 4 * whole / shape.data_shard, 1.0, per_step=True),) if whole else ()

    def tie_bytes(self, elements: float, shape: Shape) -> float:
        """Bytes of gradients that a stage sums with other stages once per step: fp32, of tied weights that have this
        many elements there."""
        return 4 * elements / shape.data_shard

    def tie_s(self, elements: float, shape: Shape) -> float:
        """Seconds of that: between the first stage and the last, which is where embedding and head are."""
        if shape.pipeline == 1 or elements == 0.0:
            return 0.0
        links = self.links(2, shape.stride("pipeline") * (shape.pipeline - 1))
        return collective_s("all_reduce", self.tie_bytes(elements, shape), links)

    def crossings(self, shape: Shape) -> list[Cut]:
        """What crosses at every place of the chain, forward (the backward returns the same): before the first layer,
        between layers, behind the last."""
        links = self.axis_links(shape, "pipeline")
        return [Cut(collective_s("p2p", size, links) if size else 0.0, size) for size in self._crossing_bytes(shape)]

    def _crossing_bytes(self, shape: Shape) -> list[float]:
        key = shape.micro_batch, shape.tensor if shape.sequence else 1
        if key not in self._crossings:
            sizes = [0.0] * (len(self.profile.layers) + 1)
            modes = [self.mode(kind, shape)[0] for kind in self.kinds]
            for tensor in self.profile.tensors:
                size = tensor.size.at(shape.micro_batch, self.training.compute_bytes)
                may_slice = tensor.requires_grad and "sequence" in tensor.dims and modes[tensor.made_by] == "sequence"
                for position in range(tensor.made_by + 1, tensor.last_used_by + 1):
                    sliced = may_slice and modes[position] == "sequence"
                    sizes[position] += size / shape.tensor if sliced else size
            self._crossings[key] = sizes
        return self._crossings[key]

    def options(
        self, kind: Kind, shape: Shape, recompute: Recompute | None = None, reshard: bool | None = None
    ) -> list[LayerOption]:
        """The options of a layer of this kind under a shape, restricted to what is pinned. Recompute is one where the
        layer is a module and has saved something to give up."""
        recomputes: tuple[Recompute, ...] = ("none",)
        if kind.can_recompute:
            _, costs, tensor = self.mode(kind, shape)
            batch, element_bytes = shape.micro_batch, self.training.compute_bytes
            kept, left = (costs_of.at(batch, element_bytes, tensor) for costs_of in (costs.saved, costs.full))
            saves = kept + self.arriving_bytes(kind, shape, False) > left + self.arriving_bytes(kind, shape, True)
            recomputes = (recompute,) if recompute is not None else ("none", "full") if saves else ("none",)
        reshards: tuple[bool, ...] = (shape.reshard,)
        if shape.data_shard > 1 and shape.pipeline == 1:
            reshards = (False, True) if reshard is None else (reshard,)
            reshards = (False,) if kind.is_in_root(shape) or not self.layer_class(kind).parameters else reshards
        return [LayerOption(r, s) for r in recomputes for s in reshards]


@dataclass(frozen=True)
class _DataCost:
    forward_s: float
    backward_s: float
    once_s: float
    traffic: tuple[Traffic, ...]
