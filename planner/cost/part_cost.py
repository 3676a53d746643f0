"""Recompute of chosen operators in all layers of a plan: seconds of running them again, and bytes not kept for it."""

import numpy as np

from ...profiler.machine.cluster import Device
from ...profiler.model.model_profile import Costs, OpProfile, amount_at
from .compute_cost import operators_s, table_of


def part_cost(
    costs: Costs,
    parts: tuple[str, ...],
    device: Device,
    precision: str,
    element_bytes: int,
    samples: float,
    tensor: int,
) -> tuple[float, float]:
    """(seconds of repeating the parts' forward, bytes that they return and that are not kept) for one micro-batch.

    A part is "module" or "module:kind of operator", the module by its name in the layer. Which returned tensors would
    have been saved is not in a profile: products' and norms' count, and a third of what elementwise kernels move (two
    read, one written), so what is saved on memory is rather said too small.
    """
    chosen = [op for op in costs.operators if op.part == "forward" and any(_is_in(op, part) for part in parts)]
    if not chosen:
        return 0.0, 0.0
    seconds = operators_s(table_of(chosen), device, precision, element_bytes, samples, tensor)
    return float(np.sum(seconds)), sum(_returned(op, element_bytes, samples, tensor) for op in chosen)


def _is_in(op: OpProfile, part: str) -> bool:
    module, _, kind = part.partition(":")
    return f"{op.module}.".startswith(f"{module}.") and kind in ("", op.kind)


def _returned(op: OpProfile, element_bytes: int, samples: float, tensor: int) -> float:
    if op.kind == "matmul" and op.shape is not None:
        rows, _, columns = (amount_at(side, samples, tensor) for side in op.shape)
        return element_bytes * rows * columns
    share = {"norm": 1 / 2, "elementwise": 1 / 3}.get(op.kind, 0.0)
    return share * op.moved.at(samples, element_bytes, tensor)
