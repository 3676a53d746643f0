"""Bytes of the activations of layers, and of what is there only during a layer's turn."""

import math
from collections.abc import Collection
from functools import cached_property

from ...profiler.model.model_profile import ZERO, Costs, amount_at
from ..plan.document import Recompute, parts_of
from ..plan.schedules import ZERO_BUBBLE
from ..plan.shape import LayerOption, Shape
from .expert_cost import NO_ELEMENTS
from .kept import kept, memo_by
from .kinds import Kind
from .layer_elements import LayerElements
from .layer_parts import backward_at, given_to_parts, keeps_arriving, kept_at
from .memory_cost import MASTER_BYTES, StateBytes, uses_buffers, uses_fully_shard
from .transient_cost import Transients, Turn, Working, transients


class LayerBytes(LayerElements):
    """Memory of layers on one rank, without what their parameters take all step long (memory_cost.py)."""

    def arriving_bytes(self, kind: Kind, shape: Shape, recomputed: bool) -> float:
        """Bytes of tensors from earlier layers that are counted with a layer, for one micro-batch."""
        batch, element_bytes = shape.samples, self.training.compute_bytes
        slices = self.mode(kind, shape)[0] == "sequence"
        return sum(
            item.size.at(batch, element_bytes) / (shape.tensor if slices and item.slices else 1)
            for item in (kind.keeps_for_recompute if recomputed else kind.keeps)
        )

    def _arrived_bytes(self, kind: Kind, shape: Shape, option: LayerOption) -> float:
        """Bytes of tensors from earlier layers that are counted with a layer only because it is recomputed."""
        if not keeps_arriving(self.layer_class(kind), option.recompute) or option.offload:
            return 0.0
        return self.arriving_bytes(kind, shape, True) - self.arriving_bytes(kind, shape, False)

    def batch_bytes(self, shape: Shape) -> float:
        """Bytes of a data rank's share of the global batch; every stage holds it."""
        each = sum(math.prod(tensor.shape) * _dtype_bytes(tensor.dtype) for tensor in self.profile.batch)
        return float(shape.micro_batch * shape.num_microbatches * each)

    def buffer_bytes(self, shape: Shape) -> float:
        """Bytes of the model's buffers, in their own dtypes and never sharded, and of those that the stack adds. Every
        pipeline stage is taken to hold all of the model's, though it only holds those of its layers and of the root.
        Those of the stack belong to a rank, so its stages share them."""
        if not self.software.memory.unread_gradients:
            return self._of_buffers
        return self._of_buffers + self._unread_bytes(shape) / shape.virtual_stages

    @cached_property
    def _of_buffers(self) -> float:
        return float(sum(math.prod(b.shape) * _dtype_bytes(b.dtype) for b in self.profile.buffers))

    @memo_by(lambda _, shape: (shape.tensor, shape.sequence, shape.cuts))
    def _unread_bytes(self, shape: Shape) -> float:
        """Bytes of gradients that linear layers return and nobody reads: one tensor for each weight of a layer, which
        equal layers share; for a bank of experts, one for each weight of one expert. Weights that read one tensor count
        as one, as Megatron has them. Source: Transformer Engine 2, get_dummy_wgrad in pytorch/module/base.py, which
        keeps one for each shape and never frees it."""
        found: dict[tuple[object, ...], float] = {}
        for kind in self.kinds_of_layers:
            layer_class, costs = self.layer_class(kind), self.mode(kind, shape)[1]
            if _has_loss(costs) or not any(op.kind == "matmul" for op in costs.operators):
                continue
            of_experts = {name: bank.count for bank in layer_class.experts for name in bank.parameters}
            whole = {parameter.name: parameter for parameter in layer_class.parameters}
            for item in self._held_by(kind.layer_class, shape.tensor, 1, self._mode(kind, shape)[3]):
                dims = whole[item.name].shape
                if item.trainable and len(dims) > 1:
                    size = item.elements / of_experts.get(item.name, 1)
                    found[item.name, size] = size * self.training.compute_bytes
        return sum(found.values())

    def held_bytes(self, shape: Shape) -> float:
        """Bytes that every stage holds all step long, whichever its layers are: batch and buffers."""
        return self.batch_bytes(shape) + self.buffer_bytes(shape)

    @memo_by(
        lambda _, kind, shape, recompute: (kind, shape.tensor, shape.sequence, shape.cuts, shape.samples, recompute)
    )
    def kept_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Bytes that a layer keeps of one micro-batch as the profile counts them, without what the training stack
        changes."""
        _, costs, tensor = self.mode(kind, shape)
        layer_class = self.layer_class(kind)
        kept = kept_at(layer_class, costs, recompute, shape.samples, self.training.compute_bytes, tensor)
        return kept + self.arriving_bytes(kind, shape, keeps_arriving(layer_class, recompute))

    def least_kept_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Lower bound on the bytes that a layer keeps of one micro-batch, at any time until its backward ends and
        however data is split."""
        kept, _ = self._activations(kind, shape, recompute, False)
        return kept + min(0.0, self._put_off_bytes(kind, shape))

    def put_off_bytes(self, kind: Kind, shape: Shape) -> float:
        """Bytes that a layer holds more of a micro-batch between its backward for inputs and its backward for weights
        than before the first of them: gradients that the second waits for, less what is no longer needed. 0 under
        schedules that do not split the backward. 0 also in Megatron's stacks, where both are about equal (60 published
        runs of zero-bubble pipelines, memory 4.2% off in the median)."""
        return 0.0 if uses_buffers(shape, self.training) else self._put_off_bytes(kind, shape)

    def _put_off_bytes(self, kind: Kind, shape: Shape) -> float:
        """The same, for stacks without buffers of weights and gradients."""
        if shape.schedule not in ZERO_BUBBLE:
            return 0.0
        _, costs, tensor = self.mode(kind, shape)
        memory, element_bytes = self.software.memory, self.training.compute_bytes
        put_off = costs.put_off.at(shape.samples, element_bytes, tensor)
        if memory.logit_bytes is not None and self.ends_in_loss(kind, shape):
            return put_off
        spent = costs.spent.at(shape.samples, element_bytes, tensor)
        return put_off - spent * memory.kept("none", self.training.precision)

    def activation_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> tuple[float, Working[float]]:
        """(bytes that a layer keeps of one micro-batch, bytes beyond them during its turn). In the backward of a
        recomputed layer everything comes back that it would have kept without recompute."""
        mixed = self.training.is_mixed and not self.software.memory.pure
        plain = not uses_buffers(shape, self.training) and not uses_fully_shard(shape, self.training)
        return self._activations(kind, shape, recompute, mixed and plain)

    @memo_by(
        lambda _, kind, shape, recompute, autocast: (
            *(kind, shape.tensor, shape.sequence, shape.cuts, shape.samples, recompute, autocast),
        )
    )
    def _activations(
        self, kind: Kind, shape: Shape, recompute: Recompute, autocast: bool
    ) -> tuple[float, Working[float]]:
        """What `activation_bytes` returns. autocast: whether autocast casts in the layer; it computes one that ends in
        the loss in fp32."""
        batch, element_bytes = shape.samples, self.training.compute_bytes
        _, costs, tensor = self.mode(kind, shape)
        logits = self._logits_bytes(kind, shape)
        if logits and autocast:
            element_bytes = MASTER_BYTES
        saved = costs.saved.at(batch, element_bytes, tensor)
        kept = kept_at(self.layer_class(kind), costs, recompute, batch, element_bytes, tensor)
        saved, kept, entering = self._fused(costs, recompute, batch, tensor, saved, kept)
        forward = costs.forward_transient.at(batch, element_bytes, tensor)
        backward = costs.backward_transient.at(batch, element_bytes, tensor)
        keeps_input = keeps_arriving(self.layer_class(kind), recompute)
        given = given_to_parts(self.layer_class(kind), costs, recompute)
        # What is kept only because a part is given it is there until the part's backward ends, beside what comes back.
        beside = sum(item.size.at(batch, element_bytes, tensor) for item in given if not item.saved_in)
        arriving = self.arriving_bytes(kind, shape, keeps_input) + (0.0 if keeps_input else entering)
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
            return arriving, Working(made, max(made, self._head_backward_bytes(kind, shape)), made, made)
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

    def _fused(
        self, costs: Costs, recompute: Recompute, batch: float, tensor: int, saved: float, kept: float
    ) -> tuple[float, float, float]:
        """(bytes that a layer saves, those that it keeps under a recompute, bytes of arriving tensors that it keeps
        beside them), with the stack's fused kernels. What parts of a layer keep is taken to shrink by the same share as
        the whole."""
        if not self.software.memory.fuses or costs.fused is None or not saved:
            return saved, kept, 0.0
        element_bytes = self.training.compute_bytes
        fused = costs.fused.at(batch, element_bytes, tensor)
        if recompute in ("none", "attention"):
            kept = max(0.0, fused - (saved - kept))
        elif parts_of(recompute):
            kept *= fused / saved
        return fused, kept, costs.fused_inputs.at(batch, element_bytes, tensor)

    def _head_backward_bytes(self, kind: Kind, shape: Shape) -> float:
        """Bytes of the gradients of logits, and of a gradient of the head's weight that nobody reads; 0 for stacks that
        return none of these."""
        if not self.software.memory.unread_gradients:
            return 0.0
        weights = sum(item.elements for item in self.held(kind, shape) if item.trainable)
        return self.training.compute_bytes * (self._num_logits(kind, shape) + weights)

    def working_bytes(self, kind: Kind, shape: Shape, way: LayerOption) -> tuple[float, float, float]:
        """(bytes during a layer's forward, bytes during its backward, bytes that the backward has let go of at its end)
        of activations, beyond those that it keeps; lower bounds, however data is split."""
        _, working = self._activations(kind, shape, way.recompute, False)
        moved = 2 * self.least_kept_bytes(kind, shape, way.recompute) if way.offload else 0.0
        return working.forward + moved, working.backward + moved, working.passed

    def ends_in_loss(self, kind: Kind, shape: Shape) -> bool:
        """Whether the loss is computed in a layer."""
        return self._logits_bytes(kind, shape) > 0

    def _gathered_again(self, kind: Kind, shape: Shape, recomputed: Collection[str] = ()) -> float:
        """Bytes by which gathered inputs of matmuls exceed a rank's slice, if the stack gathers them once more instead
        of keeping them; else 0. recomputed: parts of the layer that are left out."""
        mode, costs, tensor = self.mode(kind, shape)
        if mode != "sequence" or not self.software.memory.gathers_again:
            return 0.0
        forward = (c for c in costs.collectives if c.part == "forward" and c.within not in recomputed)
        gathers = (c for c in forward if c.kind == "all_gather")
        whole = sum(c.tensor.at(shape.samples, self.training.compute_bytes, tensor) for c in gathers)
        return whole * (1 - 1 / tensor)

    def _logits_bytes(self, kind: Kind, shape: Shape) -> float:
        """Bytes of the logits that a layer's last matmul makes, and of gathering them; 0 if the layer does not compute
        the loss."""
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
        """Elements of the output of a layer's last forward matmul on one rank."""
        _, costs, tensor = self.mode(kind, shape)
        shapes = [op.shape for op in costs.operators if op.part == "forward" and op.shape is not None]
        rows, _, columns = shapes[-1] if shapes else (ZERO, ZERO, ZERO)
        return amount_at(rows, shape.samples, tensor) * amount_at(columns, shape.samples, tensor)

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
        """Bytes that are there only during a layer's turn. again: the layer is recomputed, so that its first new
        gradient comes while everything is there that the forward has made again."""
        if state.buffers:
            most = max(working.forward, working.backward)
            return Transients(most, most, most)
        total, trainable = self.spread_of(kind, shape)
        if not uses_fully_shard(shape, self.training):
            sizes = [held.elements for held in self.held(kind, shape) if held.trainable]
            new = max(sizes, default=0) * state.new_gradient or trainable.gathered * MASTER_BYTES - kept
            most = max(working.forward, working.backward + (max(0.0, new) if again else 0.0), new)
            return Transients(most, most, -math.inf)
        before = self.fetched_ahead(kind, shape)
        fetched, fetched_trainable = self.spread_of(before, shape) if before else (NO_ELEMENTS, NO_ELEMENTS)
        frozen = total.gathered - trainable.gathered + fetched.gathered - fetched_trainable.gathered
        turn = Turn(
            copy=total.gathered * state.gathered,
            fetched=fetched.gathered * state.gathered,
            new=trainable.gathered * self.training.compute_bytes,
            whole=trainable.reduced * MASTER_BYTES,
            sharded_over=float(shape.sharded_over),
            resharded=resharded,
            copies_stay=state.copies_stay,
            in_root=kind.is_in_root(shape),
            frozen=frozen * state.gathered,
        )
        return transients(working, turn, kept, self.profile.returns_loss)

    @memo_by(lambda _, kind, shape: (kind, shape.pipeline == 1))
    def fetched_ahead(self, kind: Kind, shape: Shape) -> Kind | None:
        """Kind of the layer whose parameters fully_shard gathers ahead in the backward of a layer of this kind: the
        same kind if there are several in a row, else that of the nearest earlier layer with parameters of its own; None
        if there is none."""
        kinds = self.kinds
        places = [i for i, other in enumerate(kinds) if other == kind]
        if any(i and kinds[i - 1] == kind for i in places):
            return kind
        others = kinds[: places[0]][::-1]
        return next((k for k in others if self.layer_class(k).parameters and not k.is_in_root(shape)), None)


@kept
def _has_loss(costs: Costs) -> bool:
    return any(op.kind == "loss" for op in costs.operators)


_NEARLY = 0.02
"""Relative difference up to which the tensor that a matmul reads counts as the one that a norm has returned: a norm's
traffic also contains its parameters."""


def autocast_elements(costs: Costs, batch: float, recomputed: Collection[str] = ()) -> float:
    """Elements that a layer keeps in fp32 under autocast, where the profile has them in the compute dtype. These are
    the inputs of layer norms, because autocast keeps the residual stream in fp32; and as many for every further matmul
    that reads the same tensor, because each makes a copy in the compute dtype. recomputed: parts of the layer that are
    left out."""
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
    """Bytes of one element of a torch dtype. "compute" counts as fp32, in which inputs are given."""
    if name == "bool":
        return 1
    if name == "compute":
        return 4
    bits = next(int(size) for size in ("128", "64", "32", "16", "8") if size in name)
    return bits // 8
