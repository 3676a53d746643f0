"""What layers exchange with other ranks, and the exposed seconds of it."""

from functools import cached_property

from ...profiler.model.model_profile import amount_at
from ..plan.document import Recompute
from ..plan.shape import Shape
from .comm_cost import Exchanged, GroupLinks, collective_s, ring_rates, unhidden_s
from .context_cost import NOTHING, ContextCost, context_cost
from .data_cost import DataRates, DataSeconds, exposed_data_s, gather_s, reduce_s
from .elementwise import Values
from .expert_cost import COUNT_BYTES, SENDING_UNITS, copies, exchange_of, groups_of, routed_bytes
from .kept import memo_by
from .kernels import ExchangeRates, family_of
from .kinds import Kind
from .layer_elements import LayerElements
from .layer_parts import repeats_attention, repeats_bank
from .layer_passes import LayerPasses, Part, TensorTraffic
from .memory_cost import MASTER_BYTES, uses_fully_shard
from .pieces_cost import ALONE, Beside, beside
from .priced_layer import Traffic


class LayerExchanges(LayerElements, LayerPasses):
    """Traffic of layers with tensor, context, expert and data ranks. For that of pipeline ranks see
    crossing_cost.py."""

    def hidden_tensor(self, links: GroupLinks) -> float:
        """Share of tensor-parallel communication over these links that the stack hides; 0 between hosts. Stacks that
        cut a matmul into pieces, to send each as soon as it is ready, write into the memory of other GPUs (user buffers
        of Transformer Engine, torch's symmetric memory). That reaches only as far as the links inside a host."""
        return self.software.tensor_overlap if links.group.hosts == 1 else 0.0

    def tensor_s(self, kind: Kind, shape: Shape, traffic: TensorTraffic, links: GroupLinks) -> Exchanged:
        """Exposed seconds of a layer's exchanges with tensor ranks over these links, with the time that products lose
        by being cut into pieces. If products are priced by shape, each exchange hides behind the product beside it;
        else all exchanges together hide behind the layer's compute."""
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
        """Products of a layer that hide its exchanges with tensor ranks; `ALONE` if the stack does not cut them for
        that."""
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

    def context_of(self, kind: Kind, shape: Shape, stride: int | None = None) -> ContextCost:
        """Cost of a layer's exchanges between context ranks. stride: ranks from one context rank to the next; None: as
        in the shape."""
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
        """(forward, backward without recompute) -> lower bound, for all orders of the mesh axes, on the exposed seconds
        of a layer's exchanges with context ranks."""
        if shape.context == 1:
            return 0.0, 0.0
        contexts = [self.context_of(kind, shape, stride) for stride in self.places(shape.context)]
        return min(c.forward_s for c in contexts), min(c.backward_s for c in contexts)

    def context_s(self, kind: Kind, shape: Shape, stride: int | None = None) -> Exchanged:
        """Exposed seconds of a layer's exchanges with context ranks. stride: see `context_of`."""
        cost = self.context_of(kind, shape, stride)
        return Exchanged(cost.forward_s, cost.backward_s, cost.forward_s)

    def dispatch_of(self, kind: Kind, shape: Shape, stride: int | None = None) -> tuple[float, float, float]:
        """(seconds, bytes, calls) to send a layer's tokens to their experts once for one micro-batch. Bringing them
        back takes the same, and so do the gradients of both. stride: ranks from one expert rank to the next; None: as
        in the shape."""
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
    def exchange(self) -> ExchangeRates | None:
        """Rates, on this device, of kernels that send tokens straight to experts; None if they are not known."""
        family = family_of(self.device)
        return None if family is None else family.exchange

    def exposed_dispatch_s(self, dispatch_s: Values, forward_s: Values) -> Values:
        """Seconds that sending tokens to experts adds, if the stack hides a share of it behind the layer's forward."""
        taken = min(1.0, SENDING_UNITS / self.device.compute_units)
        return unhidden_s(dispatch_s, self.software.expert_overlap, forward_s, taken)

    def expert_s(self, kind: Kind, shape: Shape, stride: int | None = None) -> Exchanged:
        """Exposed seconds of sending a layer's tokens to their experts and bringing them back. stride: see
        `dispatch_of`."""
        sent_s = self.exposed_dispatch_s(self.dispatch_of(kind, shape, stride)[0], self.compute(kind, shape).forward)
        return Exchanged(2 * sent_s, 2 * sent_s, 2 * sent_s)

    def repeats_attention(self, kind: Kind, shape: Shape, recompute: Recompute) -> bool:
        """Whether a recompute runs a layer's attention again, with its exchanges between context ranks."""
        return repeats_attention(self.mode(kind, shape)[1], recompute)

    def repeats_experts(self, kind: Kind, recompute: Recompute) -> bool:
        """Whether a recompute sends a layer's tokens to their experts again."""
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

    def _data(
        self, shape: Shape, resharded: bool, moved: float, trainable: float, passes_s: tuple[float, float]
    ) -> DataSeconds[float]:
        """Exposed seconds of gathering one layer's parameters and reducing its gradients; traffic.py counts bytes and
        calls. passes_s: seconds of the forward and the backward, behind which they hide."""
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
        """Coefficients of the seconds of what data ranks exchange."""
        shard, replicate = self.shard_links(shape), self.axis_links(shape, "data_replicate")
        return DataRates(
            ring_rates("all_gather", shard), ring_rates("reduce_scatter", shard), ring_rates("all_reduce", replicate)
        )

    def data_overlap(self, shape: Shape) -> float:
        """Share of a layer's compute time that may hide communication of data ranks."""
        other = self.device.replica_overlap
        if other is None or shape.pipeline > 1 or uses_fully_shard(shape, self.training):
            return self.device.overlap
        return other

    def whole_gradients_s(self, kind: Kind, shape: Shape) -> float:
        """Seconds per step to sum gradients of weights that could be cut but are left whole beside sequence
        parallelism: each tensor rank has computed them from its slice of the sequence. (Norms and biases are too small
        to count.)"""
        mode, _, _, chosen = self._mode(kind, shape)
        cuts = self.layer_class(kind).cuts
        if mode != "sequence" or len(chosen) == len(cuts):
            return 0.0
        left = {name for i, cut in enumerate(cuts) if i not in chosen for name in cut.sharded}
        elements = sum(item.elements for item in self.held(kind, shape) if item.name in left and item.trainable)
        links = self.axis_links(shape, "tensor")
        return collective_s("all_reduce", MASTER_BYTES * elements / shape.sharded_over, links)

    def tie_bytes(self, elements: float, shape: Shape) -> float:
        """Bytes of the fp32 gradients that a stage sums with other stages once per step. elements: of tied weights on
        the stage."""
        return 4 * elements / shape.sharded_over

    def tie_s(self, elements: float, shape: Shape) -> float:
        """Seconds of that sum. It is taken to be between the first and the last stage, which hold embedding and
        head."""
        if shape.pipeline == 1 or elements == 0.0:
            return 0.0
        links = self.links_of_stages(2, shape.stride("pipeline") * (shape.pipeline - 1))
        return collective_s("all_reduce", self.tie_bytes(elements, shape), links)
