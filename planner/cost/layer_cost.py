"""What one layer costs under a shape and an option: the coefficients of the ILP, and of every estimate."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profiler.machine.cluster import ClusterSpec, Device, Group
from ...profiler.model.model_profile import ZERO, Costs, LayerClass, ModelProfile, amount_at
from ..plan.block_row import block_row
from ..plan.document import EXECUTABLE_RECOMPUTES, KEPT_ON_DEVICE, Axis, Recompute, parts_of
from ..plan.frameworks import Framework
from ..plan.legality import chosen_cuts, divisors, is_sequence_cut, stage_starts
from ..plan.shape import NO_EXTRAS, Cuts, LayerOption, Offered, Shape
from ..plan.training import TrainingSpec
from .comm_cost import Exchanged, GroupLinks, collective_s, exposed_s, ring_rates, unhidden_s
from .compute_cost import AsRun, Seconds, accumulate_s, amounts_of, layer_seconds_of_each, optimizer_s
from .context_cost import NOTHING, ContextCost, context_cost
from .crossing_cost import Crossings, Cut
from .data_cost import DataRates, DataSeconds, added_elements, added_share, exposed_data_s, gather_s, reduce_s
from .elementwise import Values
from .expert_cost import (
    COUNT_BYTES,
    SENDING_UNITS,
    Spread,
    copies,
    exchange_of,
    expert_products,
    groups_of,
    on_one_rank,
    routed_bytes,
    spread,
)
from .host_cost import AUTOCAST_TRAFFIC, Issued, hooks, left_in_queue
from .kept import kept, memo, memo_by
from .kernels import ExchangeRates, family_of, rings_of
from .kinds import Kind, kinds_of
from .layer_parts import (
    backward_at,
    given_to_parts,
    keeps_arriving,
    kept_at,
    repeats_attention,
    repeats_bank,
    repeats_collective,
    ways_of_parts,
    within,
)
from .memory_cost import MASTER_BYTES, StateBytes, state_bytes, uses_buffers, uses_fully_shard
from .peak import Arrivals
from .pieces_cost import ALONE, Beside, beside
from .priced_layer import HeldParameter, LayerCost, Traffic
from .sharding import padded_elements
from .software import StackMemory, load_software
from .tensor_costs import mode_costs
from .transient_cost import Transients, Turn, Working, transients

Part = Literal["forward", "backward"]

TensorTraffic = tuple[tuple[Part, bool, Traffic], ...]
"""(part, whether recompute repeats it, collective) of each exchange with tensor ranks."""

_Mode = tuple[str, Costs, int, tuple[int, ...]]
"""Name, observed costs, tensor degree, and indices of the cuts that are applied."""


MOST_TOGETHER = 100
"""Sizes of micro-batches for which operators of a layer are priced at once, which costs hardly more than for one."""


class CostModel:
    """Prices layers of one model on one cluster for one job; pure in its three inputs, with caches."""

    def __init__(
        self,
        profile: ModelProfile,
        cluster: ClusterSpec,
        training: TrainingSpec,
        job: ClusterSpec | None = None,
        framework: Framework | None = None,
    ) -> None:
        """job: the whole cluster, where `cluster` is only the part of it that some stages of a pipeline lie on.
        framework: layers have only the options that it knows."""
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
        self._seconds: dict[tuple[object, ...], dict[float, Seconds]] = {}
        self._modes: dict[tuple[int, int, bool, Cuts | None], _Mode] = {}

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kind of every layer of the chain."""
        return kinds_of(self.profile)

    @cached_property
    def kinds_of_layers(self) -> tuple[Kind, ...]:
        """Every kind that occurs, once."""
        return tuple(dict.fromkeys(self.kinds))

    @cached_property
    def layers_of_kinds(self) -> NDArray[np.float64]:
        """[kind that occurs] -> how many layers are of it."""
        return np.array([self.kinds.count(kind) for kind in self.kinds_of_layers], dtype=float)

    @cached_property
    def starts(self) -> list[int]:
        """Layers before which a stage may begin."""
        return stage_starts(self.profile) if self.framework is None else self.framework.starts(self.profile)

    @cached_property
    def _outside_blocks(self) -> frozenset[Kind]:
        """Kinds of layers that a framework does not recompute."""
        row = None if self.framework is None else block_row(self.profile.layers)
        return frozenset(kind for place, kind in enumerate(self.kinds) if row is not None and not row.holds(place))

    @cached_property
    def keeps_as_traced(self) -> bool:
        """Whether the training stack keeps the activations that the profile says, and no fewer."""
        return self.software.memory == StackMemory()

    @cached_property
    def _crossings(self) -> Crossings:
        return Crossings(self)

    @memo
    def links(self, size: int, stride: int) -> GroupLinks:
        """Links of the groups of `size` ranks that lie `stride` apart."""
        return GroupLinks(
            group=self.cluster.group(size, stride),
            link=self.cluster.link,
            network=self.software.through(self.cluster.network),
            devices_per_host=self.cluster.devices_per_host,
            factors=tuple(sorted(self.device.collective_factors.items())),
            flat=self.device.flat_rings,
            rings=rings_of(self.device),
        )

    @memo
    def links_of_stages(self, size: int, stride: int) -> GroupLinks:
        """Links of the groups of `size` ranks that lie `stride` apart and belong to several stages: where those have
        unequal devices, the slowest device and link of any."""
        if self.job is self.cluster:
            return self.links(size, stride)
        devices = [self.software.on(group.device, self.job.num_devices) for group in self.job.hosts]
        names = sorted({name for device in devices for name in device.collective_factors})
        return GroupLinks(
            group=self.job.group(size, stride),
            link=self.job.link,
            network=self.software.through(self.job.network),
            devices_per_host=max(group.devices_per_host for group in self.job.hosts),
            factors=tuple((name, max(d.collective_factors.get(name, 1.0) for d in devices)) for name in names),
            flat=any(device.flat_rings for device in devices),
            rings=rings_of(self.device),
        )

    @memo
    def places(self, size: int) -> tuple[int, ...]:
        """Strides of groups of `size` ranks that sit differently on the hosts, neighbours first."""
        per_host, apart = self.cluster.devices_per_host, self.job.num_devices // size
        found: dict[Group, int] = {}
        for stride in divisors(max(1, apart)):
            found.setdefault(self.links(size, min(stride, per_host)).group, stride)
        return tuple(found.values())

    def axis_links(self, shape: Shape, axis: Axis) -> GroupLinks:
        """Links of a mesh axis."""
        size, stride = shape.degree(axis), shape.stride(axis)
        return self.links_of_stages(size, stride) if axis == "pipeline" else self.links(size, stride)

    def optimizer_s(self, elements: Values, on_host: bool) -> Values:
        """Seconds of the optimizer step over `elements` parameters, on one device or in the host's memory."""
        return optimizer_s(elements, self.training.optimizer, self.device, on_host)

    def layer_class(self, kind: Kind) -> LayerClass:
        """The class of a kind."""
        return self.profile.classes[kind.layer_class]

    def mode(self, kind: Kind, shape: Shape) -> tuple[str, Costs, int]:
        """(name, observed costs, tensor degree) that a kind runs with under a shape."""
        return self._mode(kind, shape)[:3]

    def _mode(self, kind: Kind, shape: Shape) -> "_Mode":
        """(name, observed costs, tensor degree, cuts that are applied) that a kind runs with under a shape."""
        key = kind.layer_class, shape.tensor, shape.sequence, shape.cuts
        if key not in self._modes:  # asked for more often than all else: `memo_by` would cost a call more
            self._modes[key] = self._mode_of(self.layer_class(kind), shape)
        return self._modes[key]

    def _mode_of(self, layer_class: LayerClass, shape: Shape) -> "_Mode":
        chosen = chosen_cuts(layer_class, shape)
        if not chosen:
            return "whole", layer_class.whole, 1, ()
        slices = is_sequence_cut(layer_class, shape)
        return "sequence" if slices else "tensor", mode_costs(layer_class, chosen, slices), shape.tensor, chosen

    def _as_run(self, kind: Kind, shape: Shape) -> tuple[object, ...]:
        """What of a kind and a shape decides which kernels run, and on tensors of which sizes for a sample."""
        mode, _, tensor, chosen = self._mode(kind, shape)
        return kind.layer_class, mode, tensor, chosen

    def compute(self, kind: Kind, shape: Shape) -> Seconds:
        """Compute seconds of a layer for one micro-batch."""
        samples = shape.samples
        return self.compute_of_each(kind, shape, [samples])[samples]

    def compute_of_each(self, kind: Kind, shape: Shape, samples: Sequence[float]) -> Mapping[float, Seconds]:
        """[samples of a micro-batch] -> the same, at least for these, whatever the shape's own."""
        mode, costs, tensor, chosen = self._mode(kind, shape)
        spread = shape.expert if self.layer_class(kind).experts else 1
        known = self._seconds.setdefault((kind.layer_class, mode, tensor, spread, chosen), {})
        missing = [each for each in samples if each not in known]
        if missing:
            missing = list(dict.fromkeys(missing if known else (*missing, *self._job_samples)))
            as_run: AsRun = amounts_of
            if self.layer_class(kind).experts:
                as_run = partial(
                    on_one_rank,
                    products=expert_products(self.layer_class(kind), costs),
                    device=self.device,
                    expert=shape.expert,
                    imbalance=self.imbalance(kind, shape),
                )
            device, training = self.device, self.training
            found = layer_seconds_of_each(
                costs, device, training.precision, training.compute_bytes, missing, tensor, as_run
            )
            known.update(zip(missing, found, strict=True))
        return known

    @cached_property
    def _job_samples(self) -> tuple[float, ...]:
        """What `samples` of the job's shapes may be, if that is not too many to be priced together."""
        sizes, contexts = divisors(self.training.global_batch), divisors(self.job.num_devices)
        found = {size / context for size in sizes for context in contexts}
        return tuple(found) if len(found) <= MOST_TOGETHER else ()

    def imbalance(self, kind: Kind, shape: Shape) -> float:
        """Tokens of the rank whose experts get most, over the mean; 1 where each expert gets as many."""
        uneven = any(bank.called != "stacked" for bank in self.layer_class(kind).experts)
        return self.training.expert_imbalance if shape.expert > 1 and uneven else 1.0

    def elements(self, kind: Kind, shape: Shape, without: frozenset[str] = frozenset()) -> tuple[float, float]:
        """(all, trainable) parameter elements of a layer on one tensor rank, before data sharding, with its padding."""
        total = trainable = 0.0
        for item in self.held(kind, shape):
            if item.name in without:
                continue
            total += item.elements
            trainable += item.elements if item.trainable else 0.0
        return total, trainable

    def held(self, kind: Kind, shape: Shape) -> tuple[HeldParameter, ...]:
        """Parameters of a layer as one tensor rank has them."""
        _, _, tensor, chosen = self._mode(kind, shape)
        return self._held_by(kind.layer_class, tensor, shape.sharded_over, chosen)

    @memo
    def _held_by(
        self, number: int, tensor: int, sharded_over: int, chosen: tuple[int, ...]
    ) -> tuple[HeldParameter, ...]:
        """[parameter of a class]; chosen: the cuts that are applied."""
        layer_class = self.profile.classes[number]
        cut_dims = {name: dim for i in chosen for name, dim in layer_class.cuts[i].sharded.items()}
        partial = {name for i in chosen for name in layer_class.cuts[i].partial}
        held = []
        for parameter in layer_class.parameters:
            local = list(parameter.shape)
            if parameter.name in cut_dims:
                local[cut_dims[parameter.name]] //= tensor
            elements = padded_elements(tuple(local), sharded_over)
            is_partial = parameter.name in partial
            held.append(
                HeldParameter(parameter.name, elements, parameter.trainable, parameter.name not in cut_dims, is_partial)
            )
        return tuple(held)

    def _transients(
        self,
        kind: Kind,
        shape: Shape,
        state: StateBytes,
        working: Working[float],
        kept: float,
        resharded: bool,
        again: bool,
    ) -> Transients[float]:
        """Bytes that are there only during a layer's turn. again: the layer is recomputed, so that the first new
        gradient meets all that the forward has made again."""
        if state.buffers:
            most = max(working.forward, working.backward)
            return Transients(most, most, most)
        total, trainable = self.spread_of(kind, shape)
        if not uses_fully_shard(shape, self.training):
            sizes = [held.elements for held in self.held(kind, shape) if held.trainable]
            new = max(sizes, default=0) * state.new_gradient or trainable.gathered * MASTER_BYTES - kept
            most = max(working.forward, working.backward + (max(0.0, new) if again else 0.0), new)
            return Transients(most, most, -math.inf)
        ahead = self.fetched_ahead(kind, shape) if resharded and shape.sharded_over > 1 else None
        turn = Turn(
            copy=total.gathered * state.gathered,
            fetched=self.spread_of(ahead, shape)[0].gathered * state.gathered if ahead else 0.0,
            new=trainable.gathered * self.training.compute_bytes,
            whole=trainable.reduced * MASTER_BYTES,
            sharded_over=float(shape.sharded_over),
            resharded=resharded,
            copies_stay=state.copies_stay,
            in_root=kind.is_in_root(shape),
        )
        return transients(working, turn, kept, self.profile.returns_loss)

    @memo_by(lambda _, kind, shape: (kind, shape.pipeline == 1))
    def fetched_ahead(self, kind: Kind, shape: Shape) -> Kind | None:
        """What fully_shard handles before a layer of this kind: of its own kind if there are several in a row, else the
        next layer before it that has parameters of its own."""
        kinds = self.kinds
        places = [i for i, other in enumerate(kinds) if other == kind]
        if any(i and kinds[i - 1] == kind for i in places):
            return kind
        others = kinds[: places[0]][::-1]
        return next((k for k in others if self.layer_class(k).parameters and not k.is_in_root(shape)), None)

    def hidden_tensor(self, links: GroupLinks) -> float:
        """Share of tensor-parallel communication over these links that the stack hides; none between hosts. What cuts a
        matmul into pieces to send each as soon as it is ready writes into the other GPUs' memory (user buffers of
        Transformer Engine, torch's symmetric memory), which reaches as far as the links inside a host do."""
        return self.software.tensor_overlap if links.group.hosts == 1 else 0.0

    def shard_links(self, shape: Shape) -> GroupLinks:
        """Links of the groups that parameters are sharded over."""
        return self.links(shape.sharded_over, shape.shard_stride)

    def context_of(self, kind: Kind, shape: Shape, stride: int | None = None) -> ContextCost:
        """Exchanges of a layer's attention between context ranks; stride: between them, if not as the shape has it."""
        if shape.context == 1:
            return NOTHING
        return self._context(kind, shape, shape.stride("context") if stride is None else stride)

    @memo_by(
        lambda self, kind, shape, apart: (
            *self._as_run(kind, shape),
            *(shape.micro_batch, shape.context, shape.context_kind, apart),
        )
    )
    def _context(self, kind: Kind, shape: Shape, apart: int) -> ContextCost:
        _, costs, tensor = self.mode(kind, shape)
        return context_cost(
            self.layer_class(kind),
            costs,
            shape.micro_batch,
            self.training.compute_bytes,
            tensor,
            shape.context,
            shape.context_kind,
            self.links(shape.context, apart),
            self.device,
            self.training.precision,
        )

    def least_context_s(self, kind: Kind, shape: Shape) -> tuple[float, float]:
        """Exposed seconds of a layer's exchanges with context ranks in the forward, and in the backward without
        recompute, that no order of the mesh axes beats."""
        if shape.context == 1:
            return 0.0, 0.0
        contexts = [self.context_of(kind, shape, stride) for stride in self.places(shape.context)]
        return min(c.forward_s for c in contexts), min(c.backward_s for c in contexts)

    def tensor_s(self, kind: Kind, shape: Shape, traffic: TensorTraffic, links: GroupLinks) -> Exchanged:
        """Exposed seconds of a layer's exchanges with tensor ranks over these links, with what its products take longer
        that are cut to hide them. Where products are priced by shape, each exchange hides behind the one beside it;
        else all hide behind the layer."""
        seconds: dict[Part, float] = {"forward": 0.0, "backward": 0.0}
        hidden_s: dict[Part, float] = {"forward": 0.0, "backward": 0.0}
        repeated_s = repeated_hidden_s = 0.0
        share, found, computed = self.hidden_tensor(links), self.beside(kind, shape), self.compute(kind, shape)
        waiting = {
            ("forward", "all_gather"): list(found.gathers),
            ("forward", "reduce_scatter"): list(found.sums),
            ("backward", "all_gather"): list(found.gradient_gathers),
            ("backward", "reduce_scatter"): list(found.gradient_sums),
        }
        for part, repeated, item in traffic:
            item_s = collective_s(item.kind, item.bytes, links)
            product = waiting.get((part, item.kind))
            away_s = share * item_s if found is ALONE or not product else min(share * item_s, product.pop(0))
            seconds[part] += item_s
            hidden_s[part] += away_s
            if repeated:
                repeated_s, repeated_hidden_s = repeated_s + item_s, repeated_hidden_s + away_s
        pieces = found if share else ALONE
        return Exchanged(
            seconds["forward"] - min(hidden_s["forward"], computed.forward) + pieces.forward_s,
            seconds["backward"] - min(hidden_s["backward"], computed.backward) + pieces.backward_s,
            repeated_s - min(repeated_hidden_s, computed.forward),
        )

    def beside(self, kind: Kind, shape: Shape) -> Beside:
        """Products of a layer that hide its exchanges with tensor ranks, where the stack cuts them for that."""
        if shape.tensor == 1 or not self.software.tensor_overlap:
            return ALONE
        return self._beside(kind, shape)

    @memo_by(lambda self, kind, shape: (*self._as_run(kind, shape), shape.samples))
    def _beside(self, kind: Kind, shape: Shape) -> Beside:
        mode, costs, tensor, chosen = self._mode(kind, shape)
        if mode != "sequence":
            return ALONE
        cuts = [self.layer_class(kind).cuts[i] for i in chosen]
        precision, element_bytes = self.training.precision, self.training.compute_bytes
        return beside(costs, cuts, self.device, precision, element_bytes, shape.samples, tensor)

    def context_s(self, kind: Kind, shape: Shape, stride: int | None = None) -> Exchanged:
        """Exposed seconds of a layer's exchanges with context ranks; stride: as of `context_of`."""
        cost = self.context_of(kind, shape, stride)
        return Exchanged(cost.forward_s, cost.backward_s, cost.forward_s)

    def expert_s(self, kind: Kind, shape: Shape, stride: int | None = None) -> Exchanged:
        """Exposed seconds of sending a layer's tokens to their experts and bringing them back; stride: as of
        `dispatch_of`."""
        sent_s = self.exposed_dispatch_s(self.dispatch_of(kind, shape, stride)[0], self.compute(kind, shape).forward)
        return Exchanged(2 * sent_s, 2 * sent_s, 2 * sent_s)

    def exposed_dispatch_s(self, dispatch_s: Values, forward_s: Values) -> Values:
        """What sending tokens to experts adds where the stack hides a share of it behind the layer's forward."""
        taken = min(1.0, SENDING_UNITS / self.device.compute_units)
        return unhidden_s(dispatch_s, self.software.expert_overlap, forward_s, taken)

    def dispatch_of(self, kind: Kind, shape: Shape, stride: int | None = None) -> tuple[float, float, float]:
        """(seconds, bytes, calls) of sending a layer's tokens to their experts once for one micro-batch; bringing them
        back takes the same, and so do their gradients. stride: between expert ranks, if not as the shape has it."""
        if shape.expert == 1 or not self.layer_class(kind).experts:
            return 0.0, 0.0, 0.0
        slices = shape.tensor if self.mode(kind, shape)[0] == "sequence" else 1
        links = self.links(shape.expert, shape.expert_stride if stride is None else stride)
        whole, banks = self.layer_class(kind).whole, self.layer_class(kind).experts
        seconds = total = 0.0
        for bank in banks:
            num_bytes = routed_bytes(bank, whole, shape.samples, slices, self.training.compute_bytes)
            busiest = num_bytes * self.imbalance(kind, shape)
            num_copies = copies(bank, self.profile.tokens_per_sample)
            direct = self.software.dispatches_once_per_host
            tokens = self.imbalance(kind, shape) * amount_at(bank.routed, shape.samples) / slices / num_copies
            seconds += exchange_of(busiest, num_copies, links, direct, self.exchange, tokens, groups_of(bank))
            total += num_bytes
        return seconds, total, float(len(banks))

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of an element of weights, and of what products of tensor ranks read, when they are gathered."""
        low = self.training.precision == "fp8" and self.software.gathers_low_precision
        return 1 if low else self.training.compute_bytes

    @cached_property
    def exchange(self) -> ExchangeRates | None:
        """What kernels that send tokens straight to experts reach on the device, where that is known."""
        family = family_of(self.device)
        return None if family is None else family.exchange

    def host_s(self, kind: Kind, shape: Shape) -> float:
        """Seconds that the host adds to a pass through a layer, for its experts too."""
        banks, expert = self.layer_class(kind).experts, shape.expert
        routing_s = sum(self.software.host_routing_s(bank.count / expert, expert) for bank in banks)
        return self.software.host_layer_s + routing_s

    def passes_s(self, kind: Kind, shape: Shape) -> tuple[float, float, float]:
        """(Seconds of a layer's forward, of its backward, how much of both the device waits for the host), of what it
        computes alone. In eager mode autocast keeps much in fp32, and issuing a pass, with all that is around its
        operators, may take longer than the device computes."""
        if self.device.dispatch:
            return self._eager_passes_s(kind, shape)
        found = self.compute(kind, shape)
        return found.forward, found.backward, 0.0

    @memo_by(lambda self, kind, shape: (kind, *self._issued_as(shape)))
    def _eager_passes_s(self, kind: Kind, shape: Shape) -> tuple[float, float, float]:
        passes, (shown, _) = self._issued(kind, shape), self._left_in_queue(shape)
        ahead_s, back_s = (shown * each.wait_s for each in passes)
        return passes[0].device_s + ahead_s, passes[1].device_s + back_s, ahead_s + back_s

    def again_s(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Seconds that a recompute of a layer takes: what it computes, and what issuing it takes beyond what the host
        is ahead in the layer's passes."""
        more = self.compute(kind, shape).again(recompute)
        if more.wait_s == 0.0:
            return more.device_s
        ahead_s = self._left_in_queue(shape)[1] * sum(each.ahead_s for each in self._issued(kind, shape))
        return more.device_s + max(0.0, more.wait_s - ahead_s)

    def least_again_s(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """The same at least, however data is split: beside no hooks, and all that autocast may add."""
        found = self.compute(kind, shape)
        more, wider = found.again(recompute), AUTOCAST_TRAFFIC * self.training.is_mixed
        ahead = Issued(found.device_forward + wider * found.widened_forward, found.host_forward)
        back = Issued(found.device_backward + wider * found.widened_backward, found.host_backward)
        return more.device_s + max(0.0, more.wait_s - ahead.ahead_s - back.ahead_s)

    @memo_by(lambda self, shape: self._issued_as(shape))
    def _left_in_queue(self, shape: Shape) -> tuple[float, float]:
        """Share of what single layers wait for the host that a device with all layers waits, and of what the host is
        ahead in single layers that it is in the end. What a stage of a pipeline hides depends on its layers, and is not
        followed."""
        if shape.pipeline > 1:
            return 1.0, 1.0
        issued = [self._issued(kind, shape) for kind in self.kinds_of_layers]
        device_s, host_s = np.array([[(p.device_s, p.host_s) for p in passes] for passes in issued]).transpose(2, 1, 0)
        layers = self.layers_of_kinds
        return float(left_in_queue(host_s, device_s, layers)), float(left_in_queue(device_s, host_s, layers))

    def _issued_as(self, shape: Shape) -> tuple[object, ...]:
        """What of a shape decides what its layers are issued with."""
        return (
            *(shape.tensor, shape.sequence, shape.cuts, shape.expert, shape.samples, shape.num_microbatches),
            *(shape.sharded_over > 1, shape.context > 1, shape.pipeline == 1, uses_fully_shard(shape, self.training)),
        )

    @memo_by(
        lambda self, kind, shape: (
            *(kind, *self._as_run(kind, shape), shape.sequence, shape.expert),
            *(shape.samples, shape.num_microbatches, shape.sharded_over > 1, shape.context > 1),
            *(uses_fully_shard(shape, self.training), kind.is_in_root(shape)),
        )
    )
    def _issued(self, kind: Kind, shape: Shape) -> tuple[Issued, Issued]:
        """The forward and the backward of a layer."""
        found, layer_class, parts = self.compute(kind, shape), self.layer_class(kind), self.tensor_traffic(kind, shape)
        wrapped, each_s = uses_fully_shard(shape, self.training), self.device.dispatch
        autocast = self.training.is_mixed and not wrapped
        more = hooks(
            wrapped and not kind.is_in_root(shape),
            shape.sharded_over > 1,
            (found.host_forward / each_s, found.host_backward / each_s) if autocast else (0.0, 0.0),
            (sum(part == "forward" for part, *_ in parts), sum(part == "backward" for part, *_ in parts)),
            shape.context > 1 and any(op.kind == "attention" for op in layer_class.whole.operators),
            len(layer_class.parameters),
            len(self.kinds),
            shape.num_microbatches,
        )
        wider = AUTOCAST_TRAFFIC * autocast
        return (
            Issued(found.device_forward + wider * found.widened_forward, found.host_forward + more.forward * each_s),
            Issued(
                found.device_backward + wider * found.widened_backward, found.host_backward + more.backward * each_s
            ),
        )

    def accumulated_s(self, trainable: float, shape: Shape) -> float:
        """Seconds per micro-batch of adding new gradients to those of the micro-batches before: fp32, two reads and a
        write, of shards where they are reduced first."""
        if not self.adds_gradients(shape.num_microbatches):
            return 0.0
        elements = added_elements(trainable, float(shape.sharded_over), shape.gradient_sync == "every")
        return self.added_s(elements) * added_share(shape.num_microbatches)

    def adds_gradients(self, num_microbatches: int) -> bool:
        """Whether kernels of their own add gradients to those of the micro-batches before."""
        return num_microbatches > 1 and not self.software.accumulates_in_matmul

    def added_s(self, elements: float) -> float:
        """Seconds of adding that many gradients to those that are there."""
        return accumulate_s(elements, self.device)

    def tensor_traffic(self, kind: Kind, shape: Shape, recompute: Recompute = "full") -> TensorTraffic:
        """(part, whether recompute repeats it, collective) of tensor parallelism in one layer for one micro-batch."""
        mode, costs, tensor = self.mode(kind, shape)
        batch, sizes = shape.samples, {"all_gather": self.gathered_bytes}
        traffic: list[tuple[Part, bool, Traffic]] = [
            (
                c.part,
                c.part == "forward" and repeats_collective(c.repeated, c.within, recompute),
                Traffic(
                    "tensor",
                    c.kind,
                    c.tensor.at(batch, sizes.get(c.kind, self.training.compute_bytes), tensor),
                    1.0,
                    per_step=False,
                ),
            )
            for c in costs.collectives
            if mode != "whole"
        ]
        if shape.sequence and mode != "sequence":
            edges: tuple[tuple[Part, int], ...] = (("forward", kind.leaves), ("backward", kind.enters))
            neighbour = self.hidden_bytes(shape)
            traffic += [(part, False, Traffic("tensor", "all_gather", neighbour, 1.0, False)) for part, n in edges if n]
        return tuple(traffic)

    def hidden_bytes(self, shape: Shape) -> float:
        """Bytes of the hidden state that is sliced where sequence parallelism begins and gathered where it ends."""
        sizes = [
            c.whole.inputs.at(shape.samples, self.training.compute_bytes)
            for c in self.profile.classes
            if c.sequence is not None
        ]
        return max(sizes, default=0.0)

    @memo
    def cost(self, kind: Kind, shape: Shape, option: LayerOption) -> LayerCost:
        """What a layer of this kind costs under a shape and an option."""
        seconds = self.compute(kind, shape)
        state = state_bytes(shape, self.training)
        total, trainable = self.spread_of(kind, shape)
        tensor_traffic = self.tensor_traffic(kind, shape, option.recompute)
        tensor = self.tensor_s(kind, shape, tensor_traffic, self.axis_links(shape, "tensor"))
        in_root = kind.is_in_root(shape)
        resharded = option.reshard and uses_fully_shard(shape, self.training) and not in_root
        own, own_trainable = self.spread_of(kind, shape, kind.held_before(shape))
        ahead_s, back_s, waiting_s = self.passes_s(kind, shape)
        data = self._data(shape, resharded, own.reduced, own_trainable.reduced, (ahead_s, back_s))
        full = option.recompute == "full"
        kept, working = self.activation_bytes(kind, shape, option.recompute)
        uncast = full and not state.buffers and not uses_fully_shard(shape, self.training)
        held = 0.0 if resharded or uncast else total.gathered * state.gathered
        context = self.context_of(kind, shape)
        attended, sent = self.context_s(kind, shape), self.expert_s(kind, shape)
        attends_again = self.repeats_attention(kind, shape, option.recompute)
        exchanged = attends_again and option.recompute != "attention"  # whatever the exchanges have made comes back
        kept += 0.0 if exchanged else context.kept(option.recompute)
        dispatches_again = self.repeats_experts(kind, option.recompute)
        away_s = self._away_s(kept) if option.offload else 0.0
        buffers = context.buffer_bytes + (context.kept_bytes if exchanged else 0.0)
        if option.offload:  # one layer's on their way, the next one's arriving
            kept, buffers = 0.0, buffers + 2 * kept
        again = option.recompute not in ("none", "attention")
        passing = self._transients(kind, shape, state, working, kept, resharded, again)
        host_s = self.host_s(kind, shape)
        shard = shape.sharded_over
        return LayerCost(
            forward_s=ahead_s + host_s,
            backward_s=back_s + self.accumulated_s(trainable.gathered, shape) + host_s,
            weight_s=seconds.backward_weight,
            recompute_s=self.again_s(kind, shape, option.recompute),
            tensor_forward_s=tensor.forward_s,
            tensor_backward_s=tensor.backward_s + tensor.again_s,
            data_forward_s=data.forward_s,
            data_backward_s=data.backward_s,
            once_data_s=data.once_s + self.whole_gradients_s(kind, shape),
            optimizer_s=self.optimizer_s(trainable.stored / shard, state.on_host),
            elements=total.stored,
            trainable_elements=trainable.stored,
            kept_bytes=kept,
            held_bytes=held,
            released_bytes=0.0 if in_root and uses_fully_shard(shape, self.training) else held,
            accumulated_bytes=(trainable.gathered if state.buffers else trainable.reduced) * state.accumulated,
            root_bytes=trainable.gathered * state.root_gradients if in_root else 0.0,
            root_end_bytes=trainable.gathered * state.root_end if in_root else 0.0,
            transient_bytes=passing.transient + buffers,
            ending_bytes=passing.ending + buffers,
            waiting_bytes=passing.waiting + buffers,
            reduced_bytes=0.0 if in_root else trainable.reduced * MASTER_BYTES,
            traffic=tuple(
                Traffic(t.axis, t.kind, t.bytes, 2.0 if repeated else 1.0, False) for _, repeated, t in tensor_traffic
            )
            + self._exchange_traffic(kind, shape, attends_again, dispatches_again),
            context_forward_s=attended.forward_s,
            context_backward_s=attended.backward_s + (attended.again_s if attends_again else 0.0),
            expert_forward_s=sent.forward_s,
            expert_backward_s=sent.backward_s + (sent.again_s if dispatches_again else 0.0),
            offload_forward_s=exposed_s(away_s, seconds.forward, 1.0, self.device.contention),
            offload_backward_s=exposed_s(away_s, seconds.backward, 1.0, self.device.contention),
            arrived_bytes=self._arrived_bytes(kind, shape, option),
            host_s=waiting_s,
        )

    def repeats_attention(self, kind: Kind, shape: Shape, recompute: Recompute) -> bool:
        """Whether a layer's attention is run again, with its exchanges between context ranks."""
        return repeats_attention(self.mode(kind, shape)[1], recompute)

    def repeats_experts(self, kind: Kind, recompute: Recompute) -> bool:
        """Whether a layer's tokens are sent to their experts again."""
        return any(repeats_bank(bank, recompute) for bank in self.layer_class(kind).experts)

    def _exchange_traffic(
        self, kind: Kind, shape: Shape, repeats_attention: bool, repeats_experts: bool
    ) -> tuple[Traffic, ...]:
        """Collectives of one layer with context ranks and expert ranks for one micro-batch."""
        context, traffic = self.context_of(kind, shape), []
        for exchanges, times in ((context.forward, 2.0 if repeats_attention else 1.0), (context.backward, 1.0)):
            for e in exchanges:
                ends = 2.0 if e.kind == "p2p" else 1.0  # each rank of a ring sends one block and receives another
                traffic.append(Traffic("context", e.kind, e.num_bytes, ends * times * e.calls, False))
        _, num_bytes, calls = self.dispatch_of(kind, shape)
        if calls:
            passes = 6 if repeats_experts else 4
            traffic.append(Traffic("expert", "all_to_all", num_bytes / calls, passes * calls, False))
            told = 2.0 if repeats_experts else 1.0
            counts = [bank.count for bank in self.layer_class(kind).experts if bank.called != "stacked"]
            traffic += [Traffic("expert", "all_to_all", float(COUNT_BYTES * count), told, False) for count in counts]
        return tuple(traffic)

    def _away_s(self, num_bytes: float) -> float:
        """Seconds to bring bytes to the host, or back."""
        return num_bytes / self.device.host_bandwidth

    def spread_of(self, kind: Kind, shape: Shape, without: frozenset[str] = frozenset()) -> tuple[Spread, Spread]:
        """(all, trainable) parameter elements of a layer on one tensor rank by what they cost there."""
        return self._spread_of(kind, shape, without)

    @memo_by(
        lambda self, kind, shape, without: (
            *self._as_run(kind, shape),
            *(shape.sharded_over, shape.expert, shape.experts_over, without),
        )
    )
    def _spread_of(self, kind: Kind, shape: Shape, without: frozenset[str]) -> tuple[Spread, Spread]:
        total, trainable = self.elements(kind, shape, without)
        if shape.expert == 1:
            return Spread(total, total, total), Spread(trainable, trainable, trainable)
        others, others_trainable = self.elements(kind, shape, without | self.spread_names(kind, shape))
        return spread(total, total - others, shape), spread(trainable, trainable - others_trainable, shape)

    def stored_elements(self, kind: Kind, shape: Shape) -> tuple[float, float]:
        """(all, trainable) elements of a layer, as if all were sharded over the ranks that share its other ones."""
        total, trainable = self.spread_of(kind, shape)
        return total.stored, trainable.stored

    def spread_names(self, kind: Kind, shape: Shape) -> frozenset[str]:
        """Parameters of experts, where these are spread over ranks."""
        banks = self.layer_class(kind).experts if shape.expert > 1 else ()
        return frozenset(name for bank in banks for name in bank.parameters)

    def bank_elements(self, kind: Kind, shape: Shape) -> list[tuple[float, float]]:
        """[bank] -> (all, trainable) elements that one rank has of it, with the padding of the ranks that shard them;
        nothing where experts are not spread."""
        layer_class, found = self.layer_class(kind), []
        for bank in layer_class.experts if shape.expert > 1 else ():
            own = [p for p in layer_class.parameters if p.name in bank.parameters]
            sizes = [padded_elements((p.shape[0] // shape.expert, *p.shape[1:]), shape.same_experts) for p in own]
            trained = [size for size, p in zip(sizes, own, strict=True) if p.trainable]
            found.append((float(sum(sizes)), float(sum(trained))))
        return found

    def arriving_bytes(self, kind: Kind, shape: Shape, recomputed: bool) -> float:
        """Bytes of tensors from earlier layers that a layer keeps for one micro-batch."""
        batch, element_bytes = shape.samples, self.training.compute_bytes
        slices = self.mode(kind, shape)[0] == "sequence"
        return sum(
            item.size.at(batch, element_bytes) / (shape.tensor if slices and item.slices else 1)
            for item in (kind.keeps_for_recompute if recomputed else kind.keeps)
        )

    def _arrived_bytes(self, kind: Kind, shape: Shape, option: LayerOption) -> float:
        """Bytes of those that it keeps only because it is recomputed."""
        if not keeps_arriving(self.layer_class(kind), option.recompute) or option.offload:
            return 0.0
        return self.arriving_bytes(kind, shape, True) - self.arriving_bytes(kind, shape, False)

    def batch_bytes(self, shape: Shape) -> float:
        """Bytes of a rank's share of the global batch, which every stage holds."""
        each = sum(math.prod(tensor.shape) * _dtype_bytes(tensor.dtype) for tensor in self.profile.batch)
        return float(shape.micro_batch * shape.num_microbatches * each)

    @cached_property
    def buffer_bytes(self) -> float:
        """Bytes of the model's buffers, which are never sharded, in their own dtypes. A pipeline stage is taken to hold
        all, and holds only those of its layers and of the root."""
        return float(sum(math.prod(b.shape) * _dtype_bytes(b.dtype) for b in self.profile.buffers))

    def held_bytes(self, shape: Shape) -> float:
        """Bytes of what every stage holds all step long, whichever its layers are: its batches and the buffers."""
        return self.batch_bytes(shape) + self.buffer_bytes

    @memo_by(
        lambda self, kind, shape, recompute: (
            *(kind, shape.tensor, shape.sequence, shape.cuts, shape.samples, recompute),
            *(uses_buffers(shape, self.training), uses_fully_shard(shape, self.training)),
        )
    )
    def activation_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> tuple[float, Working[float]]:
        """(kept bytes, bytes beyond them while at work) for one micro-batch; in the backward recomputed layers pass
        through everything that they would have saved."""
        batch, element_bytes = shape.samples, self.training.compute_bytes
        _, costs, tensor = self.mode(kind, shape)
        logits = self._logits_bytes(kind, shape)
        buffers = uses_buffers(shape, self.training)
        mixed = self.training.is_mixed and not buffers and not self.software.memory.pure
        autocast = mixed and not uses_fully_shard(shape, self.training)
        if autocast and logits:
            element_bytes = MASTER_BYTES
        saved = costs.saved.at(batch, element_bytes, tensor)
        kept = kept_at(self.layer_class(kind), costs, recompute, batch, element_bytes, tensor)
        forward = costs.forward_transient.at(batch, element_bytes, tensor)
        backward = costs.backward_transient.at(batch, element_bytes, tensor)
        keeps_input = keeps_arriving(self.layer_class(kind), recompute)
        given = given_to_parts(self.layer_class(kind), costs, recompute)
        # What is kept only because a part is given it is there until the part's backward ends, beside what comes back.
        beside = sum(item.size.at(batch, element_bytes, tensor) for item in given if not item.saved_in)
        arriving = self.arriving_bytes(kind, shape, keeps_input)
        if autocast and not logits:
            wider, named = MASTER_BYTES - self.training.compute_bytes, parts_of(recompute)
            more = wider * autocast_elements(costs, batch)
            saved += more
            if recompute in ("none", "attention"):
                kept += more
            elif more:
                kept += arriving if keeps_input else 0.0
                kept += wider * autocast_elements(costs, batch, named) if named else 0.0
                wide = wider * sum(amount_at(item.size.elements, batch, tensor) for item in given)
                kept, beside = kept + wide, beside + wide
        memory, precision = self.software.memory, self.training.precision
        if logits and memory.logit_bytes is not None:
            made = memory.logit_bytes * self._num_logits(kind, shape)
            return arriving, Working(made, made, made, made)
        again = self._gathered_again(kind, shape)
        saved -= again
        again = self._gathered_again(kind, shape, parts_of(recompute))
        kept -= 0.0 if recompute == "full" else min(again, kept)
        saved *= memory.kept("none", precision)
        kept, arriving = (part * memory.kept(recompute, precision) for part in (kept, arriving))
        if parts_of(recompute):
            most = backward_at(self.layer_class(kind), costs, recompute, batch, element_bytes, tensor)
            backward = max(backward, most + saved + beside - kept)
        else:
            backward += max(0.0, saved - kept)
        return kept + arriving, Working(forward, backward, max(saved, kept), logits)

    def least_transient_bytes(self, kind: Kind, shape: Shape) -> float:
        """Bytes that are there only during a layer's turn, at least, whatever its option and however data is split."""
        working = self.activation_bytes(kind, shape, "none")[1]
        return max(working.forward, working.backward)

    def working_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> tuple[float, float, float]:
        """Bytes of a layer's activations that are there only during its turn (of its forward, of its backward), and
        what that has let go of when it ends."""
        working = self.activation_bytes(kind, shape, recompute)[1]
        return working.forward, working.backward, working.passed

    def ends_in_loss(self, kind: Kind, shape: Shape) -> bool:
        """Whether the loss is computed in a layer."""
        return self._logits_bytes(kind, shape) > 0

    def _gathered_again(self, kind: Kind, shape: Shape, recomputed: Collection[str] = ()) -> float:
        """Bytes of gathered inputs of matmuls beyond a rank's slice, where the stack does not keep them; recomputed:
        parts of the layer whose own do not count."""
        mode, costs, tensor = self.mode(kind, shape)
        if mode != "sequence" or not self.software.memory.gathers_again:
            return 0.0
        forward = (c for c in costs.collectives if c.part == "forward" and c.within not in recomputed)
        gathers = (c for c in forward if c.kind == "all_gather")
        whole = sum(c.tensor.at(shape.samples, self.training.compute_bytes, tensor) for c in gathers)
        return whole * (1 - 1 / tensor)

    def _logits_bytes(self, kind: Kind, shape: Shape) -> float:
        """Bytes of what a layer's last matmul makes for the loss in it, and of gathering that; 0 without a loss."""
        _, costs, tensor = self.mode(kind, shape)
        if not _has_loss(costs):
            return 0.0
        gathered = sum(
            c.tensor.at(shape.samples, self.training.compute_bytes, tensor)
            for c in costs.collectives
            if c.part == "forward" and c.kind == "all_gather"
        )
        return self._num_logits(kind, shape) * self.training.compute_bytes + 2 * gathered

    def _num_logits(self, kind: Kind, shape: Shape) -> float:
        """Elements that a layer's last matmul makes on one rank."""
        _, costs, tensor = self.mode(kind, shape)
        shapes = [op.shape for op in costs.operators if op.part == "forward" and op.shape is not None]
        rows, _, columns = shapes[-1] if shapes else (ZERO, ZERO, ZERO)
        return amount_at(rows, shape.samples, tensor) * amount_at(columns, shape.samples, tensor)

    def _data(
        self, shape: Shape, resharded: bool, moved: float, trainable: float, passes_s: tuple[float, float]
    ) -> DataSeconds[float]:
        """Exposed seconds of gathers and gradient reductions of one layer; traffic.py counts them. passes_s: of the
        forward and the backward that they hide behind."""
        rates = self._data_rates(shape)
        return exposed_data_s(
            gather_s(moved, self.gathered_bytes, rates),
            reduce_s(trainable, self.software.gradient_bytes, float(shape.sharded_over), rates),
            *passes_s,
            resharded,
            shape.gradient_sync == "every",
            self.data_overlap(shape),
            self.device.contention,
        )

    @memo_by(lambda _, at: (at.sharded_over, at.shard_stride, at.data_replicate, at.stride("data_replicate")))
    def _data_rates(self, shape: Shape) -> DataRates[float]:
        """Times of what data ranks exchange."""
        shard, replicate = self.shard_links(shape), self.axis_links(shape, "data_replicate")
        return DataRates(
            ring_rates("all_gather", shard), ring_rates("reduce_scatter", shard), ring_rates("all_reduce", replicate)
        )

    def data_overlap(self, shape: Shape) -> float:
        """Share of a layer's compute time behind which data communication can hide."""
        other = self.device.replica_overlap
        if other is None or shape.pipeline > 1 or uses_fully_shard(shape, self.training):
            return self.device.overlap
        return other

    def whole_gradients_s(self, kind: Kind, shape: Shape) -> float:
        """Seconds per step of summing gradients of weights that are left whole though they could be cut, where each
        tensor rank has the share of its slice of the sequence. (Norms and biases are too small to count.)"""
        mode, _, _, chosen = self._mode(kind, shape)
        cuts = self.layer_class(kind).cuts
        if mode != "sequence" or len(chosen) == len(cuts):
            return 0.0
        left = {name for i, cut in enumerate(cuts) if i not in chosen for name in cut.sharded}
        elements = sum(item.elements for item in self.held(kind, shape) if item.name in left and item.trainable)
        links = self.axis_links(shape, "tensor")
        return collective_s("all_reduce", MASTER_BYTES * elements / shape.sharded_over, links)

    def tie_bytes(self, elements: float, shape: Shape) -> float:
        """Bytes of gradients that a stage sums with other stages once per step: fp32, of tied weights that have this
        many elements there."""
        return 4 * elements / shape.sharded_over

    def tie_s(self, elements: float, shape: Shape) -> float:
        """Seconds of that: between the first stage and the last, which is where embedding and head are."""
        if shape.pipeline == 1 or elements == 0.0:
            return 0.0
        links = self.links_of_stages(2, shape.stride("pipeline") * (shape.pipeline - 1))
        return collective_s("all_reduce", self.tie_bytes(elements, shape), links)

    def crossings(self, shape: Shape) -> list[Cut]:
        """What crosses at every place of the chain, forward (the backward returns the same): before the first layer,
        between layers, after the last."""
        return self._crossings.cuts(shape)

    def arrivals(self, shape: Shape, firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> Arrivals:
        """What stages hold of tensors from earlier ones. firsts, ends: [stage] -> its first layer, and the one after
        its last."""
        return self._crossings.arrivals(shape, firsts, ends)

    def options(
        self,
        kind: Kind,
        shape: Shape,
        recompute: Recompute | None = None,
        reshard: bool | None = None,
        offered: Offered = NO_EXTRAS,
    ) -> list[LayerOption]:
        """The options of a layer of this kind under a shape, restricted to what is pinned: every kind of recompute that
        the executor runs, where the layer is a module and has saved something to give up, and giving back parameters.
        offered: recompute of any parts of the layer, too; activations that wait in the host's memory."""
        recomputes: tuple[Recompute, ...] = ("none",)
        if kind.can_recompute:
            kept = self.kept_bytes(kind, shape, "none")
            excluded = {"none"}
            excluded |= {"selective"} if self.layer_class(kind).writes_into_kept else set()
            excluded |= {"attention"} if self.layer_class(kind).writes_into_attention else set()
            runs = (r for r in self.ways(kind, offered) if r not in excluded)
            less = [r for r in runs if self.kept_bytes(kind, shape, r) < kept]
            recomputes = ("none", *less) if recompute is None else (self.pinned(kind, recompute),)
        reshards: tuple[bool, ...] = (shape.reshard,)
        if shape.sharded_over > 1 and shape.pipeline == 1:
            reshards = (False, True) if reshard is None else (reshard,)
            reshards = (False,) if kind.is_in_root(shape) or not self.layer_class(kind).parameters else reshards
        may_leave = "offload" in offered and kind.can_recompute
        offloads = {r: (False, True) if may_leave and r not in KEPT_ON_DEVICE else (False,) for r in recomputes}
        return [LayerOption(r, s, away) for r in recomputes for s in reshards for away in offloads[r]]

    def ways(self, kind: Kind, offered: Offered) -> tuple[Recompute, ...]:
        """Every kind of recompute that a layer may take, whether it gives anything up or not."""
        if not kind.can_recompute or kind in self._outside_blocks:
            return ("none",)
        if self.framework is not None:
            return self.framework.mixed
        parts = ways_of_parts(self.layer_class(kind)) if "parts" in offered else ()
        return (*EXECUTABLE_RECOMPUTES, *parts)

    def pinned(self, kind: Kind, recompute: Recompute) -> Recompute:
        """What a recompute that is pinned for all layers means for those of a kind."""
        may = kind.can_recompute and kind not in self._outside_blocks
        return within(self.layer_class(kind), recompute) if may else "none"

    @memo_by(
        lambda _, kind, shape, recompute: (kind, shape.tensor, shape.sequence, shape.cuts, shape.samples, recompute)
    )
    def kept_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Bytes that a layer keeps of one micro-batch in the model's own numbers."""
        _, costs, tensor = self.mode(kind, shape)
        layer_class = self.layer_class(kind)
        kept = kept_at(layer_class, costs, recompute, shape.samples, self.training.compute_bytes, tensor)
        return kept + self.arriving_bytes(kind, shape, keeps_arriving(layer_class, recompute))


@kept
def _has_loss(costs: Costs) -> bool:
    return any(op.kind == "loss" for op in costs.operators)


_NEARLY = 0.02
"""A norm moves its parameters besides what it reads and writes."""


def autocast_elements(costs: Costs, batch: float, recomputed: Collection[str] = ()) -> float:
    """Elements that autocast keeps in fp32 where the profile has them in the compute dtype: what layer norms read, for
    it keeps the residual stream in fp32; and as many for each matmul that reads the same of it as one before, as each
    makes a copy in the compute dtype. recomputed: parts of the layer whose own do not count."""
    stream, readers, found = amount_at(costs.inputs.elements, batch), 0, 0.0
    for op in costs.operators:
        if op.part != "forward":
            continue
        if op.name == "native_layer_norm":
            stream, readers = amount_at(op.moved.elements, batch) / 2, 0
            found += 0.0 if op.within in recomputed else stream
        elif op.kind == "attention":
            stream = 0.0
        elif op.shape is not None and stream:
            read = amount_at(op.shape[0], batch) * amount_at(op.shape[1], batch)
            readers += math.isclose(read, stream, rel_tol=_NEARLY)
            copies_it = readers > 1 and math.isclose(read, stream, rel_tol=_NEARLY)
            found += stream if copies_it and op.within not in recomputed else 0.0
    return found


def _dtype_bytes(name: str) -> int:
    """Bytes of one element of a torch dtype. Inputs in the compute dtype are given in fp32."""
    if name == "bool":
        return 1
    if name == "compute":
        return 4
    bits = next(int(size) for size in ("128", "64", "32", "16", "8") if size in name)
    return bits // 8
