"""Exchanges of tensor parallelism that a stack hides behind matrix products: which product hides which exchange, and
how much longer it takes in the pieces that this needs."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ...profiler.machine.cluster import Device
from ...profiler.model.model_profile import Costs, TensorCut
from ..arrays import Floats
from ..plan.training import LOW_PRECISIONS
from .compute_cost import OF_WEIGHTS, operators_s, table_of
from .kernels import family_of


@dataclass(frozen=True)
class Beside:
    """Seconds of the products that a layer's exchanges run beside, one entry for each cut, and seconds that pieces add.

    gathers, sums: in the forward, of products that read what is gathered, and of products that make what is summed.
    gradient_gathers, gradient_sums: the same in the backward. forward_s, backward_s: what running the products in
    pieces adds.
    """

    gathers: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()
    gradient_gathers: tuple[float, ...] = ()
    gradient_sums: tuple[float, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0


ALONE = Beside()
"""For layers whose products are not cut into pieces."""


def beside(
    costs: Costs,
    cuts: Collection[TensorCut],
    device: Device,
    precision: str,
    element_bytes: int,
    samples: float,
    tensor: int,
) -> Beside:
    """Products beside a layer's exchanges, for devices whose kernels are priced by shape; `ALONE` for others.

    A gathered input arrives slice by slice, one from each rank, and a sum leaves in slices. Transformer Engine cuts
    some products into such slices: the forward of columns and rows, and the gradients of what rows read. Each slice is
    a launch of its own. Several streams run them, so waves fill up, and the operands of one slice move while others
    compute. The sum in the backward runs beside the product that makes gradients of the columns' weights, which does
    not wait for it.
    """
    family = family_of(device)
    dtype = precision if precision in LOW_PRECISIONS else "bf16"
    if family is None or dtype not in family.products:
        return ALONE
    operators = tuple(op for op in costs.operators if op.name in OF_WEIGHTS and op.shape is not None)
    if not operators:
        return ALONE
    seconds = operators_s(table_of(operators), device, precision, element_bytes, samples, tensor)
    again = np.full(len(operators), (tensor - 1) * family.products["bf16"].launch)

    def total(amounts: Floats, part: str, modules: Collection[str]) -> float:
        return float(sum(amounts[i] for i, op in enumerate(operators) if op.part == part and op.module in modules))

    columns, rows = [cut.columns for cut in cuts], [cut.rows for cut in cuts]
    return Beside(
        gathers=tuple(total(seconds, "forward", names) for names in columns),
        sums=tuple(total(seconds, "forward", names) for names in rows),
        gradient_gathers=tuple(total(seconds, "backward_input", names) for names in rows),
        gradient_sums=tuple(total(seconds, "backward_weight", names) for names in columns),
        forward_s=sum(total(again, "forward", names) for names in (*columns, *rows)),
        backward_s=sum(total(again, "backward_input", names) for names in rows),
    )
