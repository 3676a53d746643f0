"""Bytes of layers' activations, and of what is there only during a layer's turn."""

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
    """Memory of layers on one rank beside what their parameters take all step long (memory_cost.py)."""

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

    def buffer_bytes(self, shape: Shape) -> float:
        """Bytes of the model's buffers, which are never sharded, in their own dtypes, and of the stack's own. A
        pipeline stage is taken to hold all, and holds only those of its layers and of the root; the stack's are the
        rank's, whose stages share them."""
        if not self.software.memory.unread_gradients:
            return self._of_buffers
        return self._of_buffers + self._unread_bytes(shape) / shape.virtual_stages

    @cached_property
    def _of_buffers(self) -> float:
        return float(sum(math.prod(b.shape) * _dtype_bytes(b.dtype) for b in self.profile.buffers))

    @memo_by(lambda _, shape: (shape.tensor, shape.sequence, shape.cuts))
    def _unread_bytes(self, shape: Shape) -> float:
        """Bytes of gradients that linear layers return and nobody reads, one for each weight of a layer, of experts for
        each weight of one. Weights that read one tensor are taken to be one, as Megatron has them. Source: Transformer
        Engine 2, get_dummy_wgrad in pytorch/module/base.py, which keeps one for each shape and never frees it."""
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
        """Bytes of what every stage holds all step long, whichever its layers are: its batches and the buffers."""
        return self.batch_bytes(shape) + self.buffer_bytes(shape)

    @memo_by(
        lambda _, kind, shape, recompute: (kind, shape.tensor, shape.sequence, shape.cuts, shape.samples, recompute)
    )
    def kept_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Bytes that a layer keeps of one micro-batch in the model's own numbers."""
        _, costs, tensor = self.mode(kind, shape)
        layer_class = self.layer_class(kind)
        kept = kept_at(layer_class, costs, recompute, shape.samples, self.training.compute_bytes, tensor)
        return kept + self.arriving_bytes(kind, shape, keeps_arriving(layer_class, recompute))

    def least_kept_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Bytes that a layer keeps of one micro-batch at least, wherever in its backward that is and however data is
        split."""
        kept, _ = self._activations(kind, shape, recompute, False)
        return kept + min(0.0, self._put_off_bytes(kind, shape))

    def put_off_bytes(self, kind: Kind, shape: Shape) -> float:
        """Bytes by which a layer holds more of a micro-batch between its backward for inputs and that for weights than
        it holds before the first: the gradients that weights wait for, less what is no longer needed. 0 under schedules
        that do not split the backward, and in Megatron's stacks, where the one takes about as much as the other (60
        published runs of zero-bubble pipelines, memory 4.2% off in the median)."""
        return 0.0 if uses_buffers(shape, self.training) else self._put_off_bytes(kind, shape)

    def _put_off_bytes(self, kind: Kind, shape: Shape) -> float:
        """The same where weights and gradients do not lie in buffers."""
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
        """(kept bytes, bytes beyond them while at work) for one micro-batch; in the backward recomputed layers pass
        through everything that they would have saved."""
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
        """What `activation_bytes` gives, by whether autocast casts: it computes a layer that ends in the loss in
        fp32."""
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
        """(saved bytes, those kept under a recompute, what arrives and is kept beside them) by the stack's kernels.
        What parts keep is taken to shrink as the whole does."""
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
        """Bytes of gradients of logits, and of the head's weight where one is returned that nobody reads."""
        if not self.software.memory.unread_gradients:
            return 0.0
        weights = sum(item.elements for item in self.held(kind, shape) if item.trainable)
        return self.training.compute_bytes * (self._num_logits(kind, shape) + weights)

    def working_bytes(self, kind: Kind, shape: Shape, way: LayerOption) -> tuple[float, float, float]:
        """Bytes of a layer's activations that are there only during its turn (of its forward, of its backward), and
        what that has let go of when it ends: at least, however data is split."""
        _, working = self._activations(kind, shape, way.recompute, False)
        moved = 2 * self.least_kept_bytes(kind, shape, way.recompute) if way.offload else 0.0
        return working.forward + moved, working.backward + moved, working.passed

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
        """What fully_shard handles before a layer of this kind: of its own kind if there are several in a row, else the
        next layer before it that has parameters of its own."""
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
