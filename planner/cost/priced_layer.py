"""Numbers of what one layer costs under a shape and an option: seconds, bytes and collectives."""

from dataclasses import dataclass, replace

from ..plan.document import GroupAxis
from .comm_cost import CollectiveKind


@dataclass(frozen=True)
class Traffic:
    """One kind of collective that a rank calls on one mesh axis: bytes of each call, and calls for each micro-batch or
    step."""

    axis: GroupAxis
    kind: CollectiveKind
    bytes: float
    calls: float
    per_step: bool


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of a layer class on one tensor rank. elements: with the padding that data shards need. whole: not cut
    by tensor parallelism. partial: read between cut modules, so that each tensor rank has only a share of its gradient.
    bytes_kept: bytes of an element; 0 if it is kept like all others."""

    name: str
    elements: int
    trainable: bool
    whole: bool
    partial: bool = False
    bytes_kept: float = 0.0


@dataclass(frozen=True)
class LayerCost:
    """One layer under one shape and option. Seconds are per micro-batch, those with `once_` in their name per step;
    bytes are those of one rank.

    weight_s: the part of backward_s for gradients of weights. host_s: what the device waits for the host to issue
    kernels, in forward and backward. kept_bytes: activations of one micro-batch until the layer's backward;
    arrived_bytes: the part of them that comes from earlier layers and counts only because this one is recomputed.
    put_off_bytes: what a micro-batch holds more (or less) from its backward for inputs to that for weights, if a
    zero-bubble schedule divides the two. held_bytes: compute copies of parameters; released_bytes: the part of them
    that is given back once gradients are reduced. accumulated_bytes: gradients before they are reduced, beyond their
    shards. root_bytes: gradients that wait for fully_shard's root from the layer's backward on; root_end_bytes: what
    reducing them there takes. transient_bytes: there only during the layer's turn, beyond what is kept and held;
    ending_bytes: the same in a pass that reduces gradients; waiting_bytes: the part of that which is there while the
    gradients of the next layer (its reduced_bytes) are still being reduced.
    """

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
    released_bytes: float
    accumulated_bytes: float
    root_bytes: float
    root_end_bytes: float
    transient_bytes: float
    ending_bytes: float
    waiting_bytes: float
    reduced_bytes: float
    traffic: tuple[Traffic, ...]
    context_forward_s: float = 0.0
    context_backward_s: float = 0.0
    expert_forward_s: float = 0.0
    expert_backward_s: float = 0.0
    offload_forward_s: float = 0.0
    offload_backward_s: float = 0.0
    arrived_bytes: float = 0.0
    host_s: float = 0.0
    put_off_bytes: float = 0.0

    @property
    def least_kept_bytes(self) -> float:
        """Lower bound on the bytes of activations of a micro-batch in flight, at any time until its backward ends."""
        return self.kept_bytes + min(0.0, self.put_off_bytes)

    def reducing_bytes(self, following: "LayerCost | None") -> float:
        """Bytes that are there only during the layer's turn, in a pass that reduces gradients. following: the next
        layer of the stage; None if there is none."""
        waiting = 0.0 if following is None else self.waiting_bytes + following.reduced_bytes
        return max(self.ending_bytes, waiting)

    def with_waiting(self, num_bytes: float) -> "LayerCost":
        """This layer's cost at a place of the chain where `num_bytes` of other layers' tensors pass by during its
        turn."""
        if not num_bytes:
            return self
        return replace(
            self,
            transient_bytes=self.transient_bytes + num_bytes,
            ending_bytes=self.ending_bytes + num_bytes,
            waiting_bytes=self.waiting_bytes + num_bytes,
        )

    @property
    def exchange_forward_s(self) -> float:
        """Seconds in the forward of exposed exchanges with context ranks, expert ranks and the host."""
        return self.context_forward_s + self.expert_forward_s + self.offload_forward_s

    @property
    def exchange_backward_s(self) -> float:
        """Seconds in the backward of exposed exchanges with context ranks, expert ranks and the host."""
        return self.context_backward_s + self.expert_backward_s + self.offload_backward_s

    @property
    def forward_total_s(self) -> float:
        """Seconds of the forward of one micro-batch, exposed communication included."""
        return self.forward_s + self.tensor_forward_s + self.data_forward_s + self.exchange_forward_s

    @property
    def backward_total_s(self) -> float:
        """Seconds of the backward of one micro-batch, recompute and exposed communication included."""
        exposed_s = self.tensor_backward_s + self.data_backward_s + self.exchange_backward_s
        return self.backward_s + self.recompute_s + exposed_s

    @property
    def microbatch_s(self) -> float:
        """Seconds of forward and backward of one micro-batch."""
        return self.forward_total_s + self.backward_total_s

    @property
    def once_s(self) -> float:
        """Seconds per step: exposed gradient reductions, first gathers, and the optimizer."""
        return self.once_data_s + self.optimizer_s
