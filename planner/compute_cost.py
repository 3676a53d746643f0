"""Seconds that one device computes: operators by roofline with shape-dependent efficiency, and the optimizer step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..profiler.cluster import Device, MatmulSample
from ..profiler.model_profile import Costs, OpProfile, amount_at
from .plan import Recompute

WAVE_EXPONENT = 0.63
"""How much of the ideal loss to partly filled waves of tiles is paid. Pilot fit on published runs, 10-90%: 0.5-0.7."""

UNHIDDEN_TRAFFIC = 0.27
"""Share of a matmul's operand traffic that its arithmetic does not hide. Same fit, 0.25-0.31."""

MISALIGNED = 0.12
"""Speed of products inside attention whose sides are no multiples of 8 elements, over that of aligned ones: tensor
cores load 16 bytes at a time. Pilot fit on published runs (heads of 150 features): 0.10-0.13."""

OPTIMIZER_BYTES = {"adamw": 28, "sgd": 12}
"""Bytes moved per fp32 parameter: read parameter, gradient and moments, write parameter and moments."""


LOW_PRECISIONS = ("fp8", "fp4")

OF_WEIGHTS = ("mm", "addmm", "_grouped_mm")
"""Matmuls that low precision is for: of weights; those inside attention stay in bf16."""

SELECTIVELY_KEPT = ("matmul", "attention")
"""Kinds of operators that selective recompute does not repeat."""


@dataclass(frozen=True)
class Seconds:
    """Compute time of one layer for one micro-batch. repeated: the parts of the forward that recompute repeats: all of
    it ("full"), all but matmuls and attention ("selective"), or unfused attention only ("attention")."""

    forward: float
    repeated: dict[Recompute, float]
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        """Both parts of the backward."""
        return self.backward_input + self.backward_weight


def layer_seconds(costs: Costs, device: Device, precision: str, element_bytes: int, batch: int, tensor: int) -> Seconds:
    """Compute seconds of a layer on one device, forward and backward, each operator on its own roofline.

    Operators of the backward that serve both gradients count as input part.
    """
    seconds = {"forward": 0.0, "backward_input": 0.0, "backward_weight": 0.0, "backward": 0.0}
    repeated: dict[Recompute, float] = {"none": 0.0, "attention": 0.0, "selective": 0.0, "full": 0.0}
    for op in costs.operators:
        op_s = operator_s(op, device, precision, element_bytes, batch, tensor)
        seconds[op.part] += op_s
        if op.part == "forward":
            repeated["attention"] += op_s if op.core else 0.0
            repeated["full"] += op_s if op.repeated else 0.0
            repeated["selective"] += op_s if op.repeated and op.kind not in SELECTIVELY_KEPT else 0.0
    return Seconds(
        seconds["forward"], repeated, seconds["backward_input"] + seconds["backward"], seconds["backward_weight"]
    )


def operator_s(op: OpProfile, device: Device, precision: str, element_bytes: int, batch: int, tensor: int) -> float:
    """Seconds of one operator: max(FLOPs / speed at this shape, bytes / bandwidth), and no less than a launch."""
    traffic_s = moving_s(op.moved.at(batch, element_bytes, tensor), device, op.name, op.kind)
    flops = amount_at(op.flops, batch, tensor)
    if flops == 0.0:
        return max(traffic_s, device.launch)
    low = precision in LOW_PRECISIONS
    peak = device.flops["bf16" if low else precision]
    if low and op.name in OF_WEIGHTS and op.shape is not None:
        rows, _, columns = (amount_at(side, batch, tensor) for side in op.shape)
        speed = device.flops[precision] * device.low_precision_efficiency * tile_efficiency(rows, columns, device)
        return max(flops / speed + UNHIDDEN_TRAFFIC * traffic_s, traffic_s, device.launch)
    if op.kind == "matmul" and op.shape is not None:
        rows, inner, columns = (amount_at(side, batch, tensor) for side in op.shape)
        if precision in device.matmul_samples:  # what moving its operands takes is in the measured share
            share = measured_efficiency((rows, inner, columns), device.matmul_samples[precision])
            return max(flops / (peak * share), device.launch)
        speed = peak * device.matmul_efficiency * tile_efficiency(rows, columns, device)
        if op.name in ("bmm", "baddbmm") and precision != "fp32" and (inner % 8 or columns % 8):
            speed *= MISALIGNED
        arithmetic_s = flops / speed + UNHIDDEN_TRAFFIC * traffic_s
    elif op.kind == "attention":
        backward = device.attention_backward_efficiency if op.part != "forward" else None
        arithmetic_s = flops / (peak * (backward or device.attention_efficiency))
    else:
        arithmetic_s = flops / (peak * device.matmul_efficiency)
    return max(arithmetic_s, traffic_s, device.launch)


def moving_s(num_bytes: float, device: Device, *kernels: str) -> float:
    """Seconds to move bytes in one kernel: at the measured speed of the first of `kernels` (operator, kind) that has
    one, and of kernels of this size, else at the device's usual share of its bandwidth."""
    share = next((device.kernel_efficiency[k] for k in kernels if k in device.kernel_efficiency), None)
    speed = device.bandwidth * (device.bandwidth_efficiency if share is None else share)
    return num_bytes / (speed * _size_efficiency(num_bytes, device.size_efficiency))


def _size_efficiency(num_bytes: float, samples: Sequence[tuple[float, float]]) -> float:
    """Between the samples by a power law, beyond them that of the nearest; 1 where there are none."""
    if not samples or num_bytes <= samples[0][0]:
        return samples[0][1] if samples else 1.0
    for (low, slower), (high, faster) in pairwise(samples):
        if num_bytes <= high:
            place = math.log(num_bytes / low) / math.log(high / low)
            return float(slower * (faster / slower) ** place)
    return samples[-1][1]


def measured_efficiency(shape: Sequence[float], samples: Sequence[MatmulSample]) -> float:
    """Share of peak of a product of this shape (rows, inner, columns): the logarithmic mean of the samples, weighted
    by their nearness, in doublings of the sides; beyond the samples as at the nearest of their sides."""
    total = weights = 0.0
    sides = [
        math.log2(min(max(side, min(s[i] for s in samples)), max(s[i] for s in samples)))
        for i, side in enumerate(shape)
    ]
    for *measured, share in samples:
        distance = sum((side - math.log2(other)) ** 2 for side, other in zip(sides, measured, strict=True))
        weight = 1.0 / (distance + _SAME_SHAPE) ** 2
        total += weight * math.log(share)
        weights += weight
    return math.exp(total / weights)


_SAME_SHAPE = 0.01
"""Squared doublings of the sides within which a sample counts as the shape itself."""


def tile_efficiency(rows: float, columns: float, device: Device) -> float:
    """Share of a large matmul's speed that one of this shape keeps: tiles at the edges and in the last wave idle."""
    tile_rows, tile_columns = device.tile
    tiles = math.ceil(max(rows, 1.0) / tile_rows) * math.ceil(max(columns, 1.0) / tile_columns)
    waves = tiles / device.compute_units
    filled = waves / math.ceil(waves)
    return float(max(filled, 1.0 / device.compute_units) ** WAVE_EXPONENT)


def accumulate_s(num_elements: float, device: Device) -> float:
    """Seconds to add as many fp32 gradients to those that are there."""
    return moving_s(12.0 * num_elements, device, "add_", "elementwise")


def optimizer_s(num_elements: float, optimizer: str, device: Device) -> float:
    """Seconds to update `num_elements` fp32 parameters on one device: all memory traffic, at any size alike (an
    optimizer works parameter by parameter)."""
    share = device.kernel_efficiency.get(optimizer, device.bandwidth_efficiency)
    return OPTIMIZER_BYTES[optimizer] * num_elements / (device.bandwidth * share)
