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
    """Seconds of the products that each exchange of a layer runs beside, cut by cut, and what pieces add to these.

    gathers, sums: of the forward, of products that read what is gathered and of those that make what is summed.
    gradient_gathers, gradient_sums: of the backward, likewise.
    """

    gathers: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()
    gradient_gathers: tuple[float, ...] = ()
    gradient_sums: tuple[float, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0


ALONE = Beside()
"""Nothing is cut."""


def beside(
    costs: Costs,
    cuts: Collection[TensorCut],
    device: Device,
    precision: str,
    element_bytes: int,
    samples: float,
    tensor: int,
) -> Beside:
    """The products beside a layer's exchanges, on a device whose kernels are priced by shape; `ALONE` on others.

    A gathered input arrives slice by slice, one from each rank, and a sum leaves so. Transformer Engine cuts the
    forward of columns and rows, and of the gradients those of what rows read, into such slices. Each is a launch of its
    own; several streams run them, so that waves fill up and operands move behind other slices. What is summed in the
    backward runs beside the product that makes gradients of the columns' weights, which does not wait for it.
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
