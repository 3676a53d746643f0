"""Recompute of single modules as Megatron does it beside a plan's own, which the planner has no words for: seconds of
running them again, and bytes not kept for it. What `recompute=parts:...` says is whole submodules of the layer whose
tensors were seen; published runs name kinds of operators inside of modules, too."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from meshwright.planner.cost.compute_cost import operators_s, table_of
from meshwright.planner.cost.estimate import Estimate, estimate, priced_by, step_seconds
from meshwright.planner.cost.kinds import Kind
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.layer_parts import kept_at
from meshwright.planner.cost.priced_layer import LayerCost
from meshwright.planner.cost.transient_cost import Working
from meshwright.planner.plan.document import Plan, Recompute
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.profiler.model.model_profile import ModelProfile, OpProfile, amount_at


class RepeatingModel(CostModel):
    """Prices layers that run single modules again in their backward, beside what a plan says that they recompute.

    A module is named as in its layer; "module:kind" is its operators of one kind. Which returned tensors would have
    been saved is not in a profile: products' and norms' count, and a third of what elementwise kernels move (two read,
    one written), so what is saved on memory is rather said too small. Of a chain of fused kernels the last counts. In a
    layer that is recomputed whole nothing is added.
    """

    def __init__(self, plan: Plan, profile: ModelProfile, repeated: tuple[str, ...]) -> None:
        super().__init__(profile, plan.cluster, plan.training)
        self._repeated = repeated

    def cost(self, kind: Kind, shape: Shape, option: LayerOption) -> LayerCost:
        """What a layer of this kind costs under a shape and an option."""
        found = super().cost(kind, shape, option)
        again = self._run_again(kind, shape, option.recompute)
        if not again:
            return found
        _, _, tensor = self.mode(kind, shape)
        precision, element_bytes = self.training.precision, self.training.compute_bytes
        seconds = operators_s(table_of(again), self.device, precision, element_bytes, shape.samples, tensor)
        return replace(found, recompute_s=found.recompute_s + float(np.sum(seconds)))

    def activation_bytes(self, kind: Kind, shape: Shape, recompute: Recompute) -> tuple[float, Working]:
        """(kept bytes, bytes beyond them while at work) for one micro-batch."""
        kept, working = super().activation_bytes(kind, shape, recompute)
        again = self._run_again(kind, shape, recompute)
        if not again:
            return kept, working
        _, costs, tensor = self.mode(kind, shape)
        samples, element_bytes = shape.samples, self.training.compute_bytes
        fuses = self.software.memory.fuses
        makers = list(_last_of_chains(again)) if fuses else again
        returned = sum(_returned(op, element_bytes, samples, tensor, fuses) for op in makers)
        all_kept = kept_at(self.layer_class(kind), costs, recompute, samples, element_bytes, tensor)
        freed = min(returned, max(0.0, all_kept - costs.full.at(samples, element_bytes, tensor)))
        freed *= self.software.memory.kept(recompute, self.training.precision)
        return kept - freed, replace(working, backward=working.backward + freed)

    def _run_again(self, kind: Kind, shape: Shape, recompute: Recompute) -> list[OpProfile]:
        """Operators of the forward that run again."""
        if recompute == "full":
            return []
        operators = self.mode(kind, shape)[1].operators
        return [op for op in operators if op.part == "forward" and any(_is_in(op, name) for name in self._repeated)]


def estimate_of(plan: Plan, profile: ModelProfile, repeated: tuple[str, ...]) -> Estimate:
    """The estimate of a plan whose layers run single modules again."""
    return priced_by(RepeatingModel(plan, profile, repeated), plan) if repeated else estimate(plan, profile)


def step_seconds_of(plan: Plan, profile: ModelProfile, repeated: tuple[str, ...]) -> float:
    """Seconds of one step, as `estimate_of` gives them."""
    return estimate_of(plan, profile, repeated).step_time_s if repeated else step_seconds(plan, profile)


def _is_in(op: OpProfile, name: str) -> bool:
    module, _, kind = name.partition(":")
    return f"{op.module}.".startswith(f"{module}.") and kind in ("", op.kind)


def _last_of_chains(operators: Sequence[OpProfile]) -> Iterator[OpProfile]:
    """Operators whose results fused kernels keep: of neighbours in one module that are no products, the last."""
    for (_, is_product), chain in groupby(operators, key=lambda op: (op.module, op.kind == "matmul")):
        found = list(chain)
        yield from found if is_product else found[-1:]


def _returned(op: OpProfile, element_bytes: int, samples: float, tensor: int, fuses: bool) -> float:
    """Bytes that an operator returns. fuses: in the compute dtype, whatever the profile's operators do in between."""
    if op.kind == "matmul" and op.shape is not None:
        rows, _, columns = (amount_at(side, samples, tensor) for side in op.shape)
        return element_bytes * rows * columns
    share = {"norm": 1 / 2, "elementwise": 1 / 3}.get(op.kind, 0.0)
    if fuses:
        share = 1.0 if op.name == "_to_copy" else share  # of its two sides one is in the compute dtype
        return share * element_bytes * amount_at(op.moved.elements, samples, tensor)
    return share * op.moved.at(samples, element_bytes, tensor)
