"""What one layer costs under a shape and an option: the coefficients of the ILP, and of every estimate."""

from functools import cached_property

from ..arrays import Ints
from ..plan.document import EXECUTABLE_RECOMPUTES, KEPT_ON_DEVICE, Recompute
from ..plan.shape import NO_EXTRAS, LayerOption, Offered, Shape
from .comm_cost import exposed_s
from .crossing_cost import Crossings, Cut
from .kept import memo
from .kinds import Kind
from .layer_bytes import LayerBytes
from .layer_exchanges import LayerExchanges
from .layer_parts import ways_of_parts, within
from .memory_cost import MASTER_BYTES, state_bytes, uses_fully_shard
from .peak import Arrivals
from .priced_layer import LayerCost, Traffic


class CostModel(LayerExchanges, LayerBytes):
    """Prices layers of one model on one cluster for one job; depends on its inputs only, and caches."""

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
        away_forward_s, away_backward_s = self._away_s(kind, shape, kept if option.offload else 0.0)
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
            offload_forward_s=away_forward_s,
            offload_backward_s=away_backward_s,
            arrived_bytes=self._arrived_bytes(kind, shape, option),
            host_s=waiting_s,
            put_off_bytes=self.put_off_bytes(kind, shape),
        )

    def _away_s(self, kind: Kind, shape: Shape, num_bytes: float) -> tuple[float, float]:
        """(seconds of the forward, seconds of the backward) that moving a layer's bytes to the host and back adds,
        beyond what compute hides."""
        seconds, moved_s = self.compute(kind, shape), num_bytes / self.device.host_bandwidth
        forward_s = exposed_s(moved_s, seconds.forward, 1.0, self.device.contention)
        return forward_s, exposed_s(moved_s, seconds.backward, 1.0, self.device.contention)

    def least_away_s(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Lower bound on the seconds that a layer takes longer if what it keeps is moved to the host's memory."""
        return sum(self._away_s(kind, shape, self.least_kept_bytes(kind, shape, recompute)))

    def options(
        self,
        kind: Kind,
        shape: Shape,
        recompute: Recompute | None = None,
        reshard: bool | None = None,
        offered: Offered = NO_EXTRAS,
    ) -> list[LayerOption]:
        """Options of a layer of this kind under a shape, restricted to what is pinned. They vary in recompute (every
        kind that the executor runs, if the layer is a module and keeps less with it) and in whether gathered parameters
        are given back. offered: further choices, which are recompute of any parts of the layer, and activations that
        wait in the host's memory."""
        recomputes: tuple[Recompute, ...] = ("none",)
        if kind.can_recompute:
            kept = self.kept_bytes(kind, shape, "none")
            excluded = {"none"}
            # a hook may ask for gradients of its own, for which what is kept would be taken twice
            once = self.layer_class(kind).writes_into_kept or self.profile.hooks_gradients
            excluded |= {"selective"} if once else set()
            excluded |= {"attention"} if self.layer_class(kind).writes_into_attention else set()
            runs = (r for r in self.ways(kind, offered) if r not in excluded)
            less = [r for r in runs if self.kept_bytes(kind, shape, r) < kept]
            recomputes = ("none", *less) if recompute is None else (self.pinned(kind, recompute),)
        places = {way: self._places(kind, way, offered) for way in recomputes}
        reshards: tuple[bool, ...] = (shape.reshard,)
        if shape.sharded_over > 1 and shape.pipeline == 1:
            reshards = (False, True) if reshard is None else (reshard,)
            reshards = (False,) if kind.is_in_root(shape) or not self.layer_class(kind).parameters else reshards
        return [LayerOption(r, s, away) for r in recomputes for s in reshards for away in places[r]]

    @staticmethod
    def _places(kind: Kind, recompute: Recompute, offered: Offered) -> tuple[bool, ...]:
        """Choices of whether what a layer keeps waits in the host's memory: (False,), or (False, True) if it may."""
        may_leave = "offload" in offered and kind.can_recompute and recompute not in KEPT_ON_DEVICE
        return (False, True) if may_leave else (False,)

    def ways_with_places(self, kind: Kind, recompute: Recompute | None, offered: Offered) -> tuple[LayerOption, ...]:
        """Every kind of recompute that a layer may take, or the pinned one, each with every place for what it keeps.
        The first one recomputes nothing beyond what is pinned."""
        ways = self.ways(kind, offered) if recompute is None else (self.pinned(kind, recompute),)
        return tuple(LayerOption(way, False, away) for way in ways for away in self._places(kind, way, offered))

    def ways(self, kind: Kind, offered: Offered) -> tuple[Recompute, ...]:
        """Every kind of recompute that a layer may take, whether it saves memory or not."""
        if not kind.can_recompute or kind in self.outside_blocks:
            return ("none",)
        if self.framework is not None:
            return self.framework.mixed
        parts = ways_of_parts(self.layer_class(kind)) if "parts" in offered else ()
        return (*EXECUTABLE_RECOMPUTES, *parts)

    def pinned(self, kind: Kind, recompute: Recompute) -> Recompute:
        """The recompute of layers of a kind, if `recompute` is pinned for all layers: none where they cannot be
        recomputed, and of named parts those that they have."""
        may = kind.can_recompute and kind not in self.outside_blocks
        return within(self.layer_class(kind), recompute) if may else "none"

    @cached_property
    def _crossings(self) -> Crossings:
        return Crossings(self)

    def crossings(self, shape: Shape) -> list[Cut]:
        """[place of the chain] -> what crosses there in the forward (the backward returns the same): before the first
        layer, between layers, after the last."""
        return self._crossings.cuts(shape)

    def arrivals(self, shape: Shape, firsts: Ints, ends: Ints) -> Arrivals:
        """[stage] -> what it holds of tensors from earlier stages. firsts, ends: [stage] -> its first layer, and the
        layer after its last."""
        return self._crossings.arrivals(shape, firsts, ends)
