"""Parameter elements of layers under a shape."""

from dataclasses import replace

from ..plan.shape import Shape
from .expert_cost import Spread, spread
from .job_model import JobModel
from .kept import memo, memo_by
from .kinds import Kind
from .memory_cost import MASTER_BYTES
from .priced_layer import HeldParameter
from .sharding import padded_elements


class LayerElements(JobModel):
    """Elements of layers' parameters on one rank."""

    def elements(self, kind: Kind, shape: Shape, without: frozenset[str] = frozenset()) -> tuple[float, float]:
        """(all, trainable) parameter elements of a layer on one tensor rank, before they are sharded over data ranks,
        with padding: as many elements of the compute dtype as gathering them moves and gathered copies take. without:
        names of parameters that are left out."""
        total = trainable = 0.0
        for item in self.held(kind, shape):
            if item.name in without:
                continue
            total += self._gathered(item, shape) if item.bytes_kept else item.elements
            trainable += item.elements if item.trainable else 0.0
        return total, trainable

    def _gathered(self, item: HeldParameter, shape: Shape) -> float:
        """Elements of the compute dtype that have as many bytes as a parameter that is kept in fewer bits than others.
        0 if it is not sharded, as there is no gathered copy of it."""
        return item.elements * item.bytes_kept / self.training.compute_bytes if shape.sharded_over > 1 else 0.0

    def _stored(self, kind: Kind, shape: Shape, without: frozenset[str]) -> float:
        """Elements of a layer on one tensor rank, where a parameter kept in fewer bits counts by its share of the
        bytes."""
        own_bytes = self.training.compute_bytes if self.software.memory.pure else MASTER_BYTES
        held = (item for item in self.held(kind, shape) if item.name not in without)
        return sum(item.elements * (item.bytes_kept / own_bytes if item.bytes_kept else 1.0) for item in held)

    def held(self, kind: Kind, shape: Shape) -> tuple[HeldParameter, ...]:
        """Parameters of a layer as one tensor rank has them."""
        _, _, tensor, chosen = self._mode(kind, shape)
        return self._held_by(kind.layer_class, tensor, shape.sharded_over, chosen)

    @memo
    def _held_by(
        self, number: int, tensor: int, sharded_over: int, chosen: tuple[int, ...]
    ) -> tuple[HeldParameter, ...]:
        """[parameter] of class number `number` on one tensor rank. chosen: indices of the cuts that are applied."""
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
            whole, kept = parameter.name not in cut_dims, parameter.bytes_kept
            held.append(HeldParameter(parameter.name, elements, parameter.trainable, whole, is_partial, kept))
        return tuple(held)

    def spread_of(self, kind: Kind, shape: Shape, without: frozenset[str] = frozenset()) -> tuple[Spread, Spread]:
        """(all, trainable) parameter elements of a layer on one tensor rank, each in the three sizes of `Spread`."""
        return self._spread_of(kind, shape, without)

    @memo_by(
        lambda self, kind, shape, without: (
            *self._as_run(kind, shape),
            *(shape.sharded_over, shape.expert, shape.experts_over, without),
        )
    )
    def _spread_of(self, kind: Kind, shape: Shape, without: frozenset[str]) -> tuple[Spread, Spread]:
        total, trainable = self.elements(kind, shape, without)
        of_experts = self.spread_names(kind, shape)
        others, others_trainable = (
            self.elements(kind, shape, without | of_experts) if of_experts else (total, trainable)
        )
        found = spread(total, total - others, shape)
        if any(item.bytes_kept for item in self.held(kind, shape)):
            kept, beside = (self._stored(kind, shape, left_out) for left_out in (without, without | of_experts))
            found = replace(found, stored=spread(kept, kept - beside, shape).stored)
        return found, spread(trainable, trainable - others_trainable, shape)

    def stored_elements(self, kind: Kind, shape: Shape) -> tuple[float, float]:
        """(all, trainable) elements of a layer that, divided by the ranks that share its other parameters, give what a
        rank stores."""
        total, trainable = self.spread_of(kind, shape)
        return total.stored, trainable.stored

    def spread_names(self, kind: Kind, shape: Shape) -> frozenset[str]:
        """Names of the parameters of experts, if these are spread over ranks; else none."""
        banks = self.layer_class(kind).experts if shape.expert > 1 else ()
        return frozenset(name for bank in banks for name in bank.parameters)

    def bank_elements(self, kind: Kind, shape: Shape) -> list[tuple[float, float]]:
        """[bank of experts] -> (all, trainable) elements of it on one expert rank before sharding, with the padding
        that shards need; empty if experts are not spread."""
        layer_class, found = self.layer_class(kind), []
        for bank in layer_class.experts if shape.expert > 1 else ():
            own = [p for p in layer_class.parameters if p.name in bank.parameters]
            sizes = [padded_elements((p.shape[0] // shape.expert, *p.shape[1:]), shape.same_experts) for p in own]
            trained = [size for size, p in zip(sizes, own, strict=True) if p.trainable]
            found.append((float(sum(sizes)), float(sum(trained))))
        return found
