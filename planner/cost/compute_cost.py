"""Seconds that one device computes: operators by roofline with shape-dependent efficiency, and the optimizer step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ...profiler.machine.cluster import Device, MatmulSample
from ...profiler.model.model_profile import SELECTIVELY_KEPT, Amount, Costs, OpProfile
from ..arrays import Flags, Floats, Ints
from ..plan.document import Recompute, parts_of
from ..plan.training import LOW_PRECISIONS
from .elementwise import Values
from .host_cost import NOTHING_ISSUED, RECOMPUTED, Issued, sum_of
from .kept import kept
from .kernels import KernelFamily, attention_s, bank_products_s, family_of, product_s

WAVE_EXPONENT = 0.432
"""How much of the ideal loss to partly filled waves of tiles is paid. This and the other constants here are fitted to
published runs, see benchmarks/published/fitted/fit.md."""

UNHIDDEN_TRAFFIC = 0.29
"""Share of a matmul's operand traffic that its arithmetic does not hide."""

MISALIGNED = 0.11
"""Speed of products inside attention whose sides are no multiples of 8 elements, over that of aligned ones: tensor
cores load 16 bytes at a time. Seen in published runs with heads of 150 features."""

OPTIMIZER_BYTES = {"adamw": 28, "sgd": 12}
"""Bytes moved per fp32 parameter: read parameter, gradient and moments, write parameter and moments."""


BATCHED = 0.285
"""Speed of batched products (inside attention that is not fused) over that of large ones."""

CAST_BYTES = {"fp8": 6.0, "fp4": 7.5}
"""Bytes moved to cast one element of the activations or gradients that a product reads to fp8 or fp4. fp8 with a scale
of the tensor at hand reads 2 for its largest value and 2 to cast it, and writes 1, and 1 more transposed for the
gradient of the weights. Measured on Transformer Engine's layers (casts and products, less products alone, for each
operand that is cast to one of the two) at 0.81 of the bandwidth: 5.5 on H200 and 6.1 on B300; 4.8 with scales of blocks
(mxfp8, B300); 2.6 to 3.4 with scales of earlier steps, which reads once less; 7.0 in nvfp4. In a layer some casts are
fused with the kernel before (`Software.casts`). Weights are cast once a step, which is not priced: Transformer Engine
keeps them from the first micro-batch on, torchao casts shards before it gathers them."""

HALVES = ("bf16", "fp16")

OF_WEIGHTS = ("mm", "addmm", "_grouped_mm")
"""Matmuls that run in low precision: those with weights. Matmuls inside attention stay in bf16."""

WIDENED = ("elementwise", "norm", "copy", "other")
"""Kinds of operators that read or write what autocast keeps in fp32: norms, and sums along the residual stream."""


@dataclass(frozen=True)
class Seconds:
    """Compute time of one layer for one micro-batch; no pass is shorter than the host takes to issue its operators.

    repeated: what each kind of recompute repeats of the forward: all of it ("full"), all but matmuls and attention
    ("selective"), or unfused attention only ("attention"). within: what recompute of each part of the layer repeats, by
    the part's name. host_forward, host_backward: seconds of the host. device_forward, device_backward: seconds of the
    device's kernels; widened_forward and widened_backward are the part of these that autocast runs in fp32, priced as
    if it were in 16 bits.
    """

    forward: float
    repeated: dict[Recompute, Issued]
    backward_input: float
    backward_weight: float
    within: dict[str, Issued] = field(default_factory=dict)
    host_forward: float = 0.0
    host_backward: float = 0.0
    device_forward: float = 0.0
    device_backward: float = 0.0
    widened_forward: float = 0.0
    widened_backward: float = 0.0

    def again(self, recompute: Recompute) -> Issued:
        """Seconds of device and host for what a recompute repeats."""
        named = parts_of(recompute)
        return sum_of(self.within[name] for name in named if name in self.within) if named else self.repeated[recompute]

    @property
    def backward(self) -> float:
        """Both parts of the backward."""
        return self.backward_input + self.backward_weight


@dataclass(frozen=True)
class OperatorTable:
    """Operators of a layer by columns: their amounts as coefficients of (1, batch, 1 / tensor, batch / tensor), and
    their properties. counts: how many equal operators an entry stands for; `sides` are of one of them, other amounts of
    all together. kernels: every (name, kind) that occurs; kernel: [operator] -> index into it."""

    flops: Floats
    elements: Floats
    other_bytes: Floats
    sides: Floats
    counts: Floats
    kernels: tuple[tuple[str, str], ...]
    kernel: Ints
    is_product: Flags
    is_attention: Flags
    is_of_weights: Flags
    is_batched: Flags
    parts: Floats
    """[forward, input part, weight part of the backward][operator] -> 1 if the operator belongs there, else 0."""
    repeats: Floats
    """[attention, selective, full recompute, each part][operator] -> 1 if that recompute repeats the operator, else
    0."""
    part_names: tuple[str, ...]
    has_forward: Flags


def table_of(operators: Sequence[OpProfile]) -> OperatorTable:
    """The operators by columns."""
    kernels = tuple(dict.fromkeys((op.name, op.kind) for op in operators))
    forward = np.array([op.part == "forward" for op in operators], dtype=bool)
    weights = np.array([op.part == "backward_weight" for op in operators], dtype=bool)
    again = np.array([op.repeated for op in operators], dtype=bool) & forward
    cheap = np.array([op.kind not in SELECTIVELY_KEPT for op in operators], dtype=bool)
    core = np.array([op.core for op in operators], dtype=bool) & forward
    product = np.array([op.kind == "matmul" and op.shape is not None for op in operators], dtype=bool)
    part_names = tuple(dict.fromkeys(op.within for op in operators if op.within))
    of_parts = [np.array([op.within == name for op in operators], dtype=bool) for name in part_names]
    of_weights = np.array([op.name in OF_WEIGHTS and op.shape is not None for op in operators], dtype=bool)
    return OperatorTable(
        flops=_amounts([op.flops for op in operators]),
        elements=_amounts([op.moved.elements for op in operators]),
        other_bytes=_amounts([op.moved.other_bytes for op in operators]),
        sides=np.stack([_amounts([(op.shape or _NO_SHAPE)[side] for op in operators]) for side in range(3)]),
        counts=np.array([op.kernels for op in operators], dtype=np.float64),
        kernels=kernels,
        kernel=np.array([kernels.index((op.name, op.kind)) for op in operators], dtype=np.int64),
        is_product=product,
        is_attention=np.array([op.kind == "attention" for op in operators], dtype=bool),
        is_of_weights=of_weights,
        is_batched=product & np.array([op.name in ("bmm", "baddbmm") for op in operators], dtype=bool),
        parts=np.array([forward, ~forward & ~weights, weights], dtype=np.float64),
        repeats=np.array([core, again & cheap, again, *of_parts], dtype=np.float64),
        part_names=part_names,
        has_forward=forward,
    )


_NO_SHAPE = ((1.0, 0.0, 0.0, 0.0),) * 3


def _amounts(amounts: Sequence[Amount]) -> Floats:
    return np.array(amounts, dtype=np.float64).reshape(len(amounts), 4)


@kept
def _table_of_layer(costs: Costs) -> OperatorTable:
    return table_of(costs.operators)


@dataclass(frozen=True)
class Amounts:
    """Amounts of operators at several batch sizes: tables [operator][batch]. sides: rows, inner, columns. groups:
    number of equal products that run at once, one for each expert; empty if every operator is a single product."""

    flops: Floats
    elements: Floats
    other_bytes: Floats
    sides: Floats
    groups: Floats = field(default_factory=lambda: np.zeros((0, 0)))


def batches_at(batches: Sequence[float], tensor: int) -> Floats:
    """[4][batch] -> (1, batch, 1 / tensor, batch / tensor), which the coefficients of amounts are multiplied by."""
    each = np.array(batches, dtype=np.float64)
    return np.stack([np.ones(len(each)), each, np.full(len(each), 1.0 / tensor), each / tensor])


def amounts_of(table: OperatorTable, at: Floats) -> Amounts:
    """The amounts of operators as they were observed."""
    return Amounts(table.flops @ at, table.elements @ at, table.other_bytes @ at, table.sides @ at)


AsRun = Callable[[OperatorTable, Floats], Amounts]
"""Function that returns the amounts of operators as one rank runs them."""


def layer_seconds(
    costs: Costs, device: Device, precision: str, element_bytes: int, batch: float, tensor: int
) -> Seconds:
    """Compute seconds of a layer on one device, forward and backward, each operator on its own roofline.

    Operators of the backward that serve both gradients count as input part.
    """
    return layer_seconds_of_each(costs, device, precision, element_bytes, [batch], tensor, amounts_of)[0]


def layer_seconds_of_each(
    costs: Costs,
    device: Device,
    precision: str,
    element_bytes: int,
    batches: Sequence[float],
    tensor: int,
    as_run: AsRun,
) -> list[Seconds]:
    """[batch] -> compute seconds of a layer on one device, as `layer_seconds` gives them for one batch; several batches
    cost little more than one. as_run: returns the amounts that one rank runs (fewer, if experts are spread over
    ranks)."""
    table = _table_of_layer(costs)
    seconds = _operators_s(table, as_run(table, batches_at(batches, tensor)), device, precision, element_bytes)
    found = []
    issued_s = device.dispatch * table.counts
    passes_s, again_s = table.parts @ issued_s, table.repeats @ issued_s
    again_s = np.where(again_s > 0.0, again_s + device.dispatch * RECOMPUTED, 0.0).tolist()
    host_forward, host_backward = float(passes_s[0]), float(passes_s[1] + passes_s[2])
    kernels_s = table.parts @ seconds
    parts_s = np.maximum(kernels_s, passes_s[:, None]).T.tolist()
    widened_s = table.parts @ (seconds * _are_widened(table)[:, None])
    of_device = zip(kernels_s[0], kernels_s[1:].sum(axis=0), widened_s[0], widened_s[1:].sum(axis=0), strict=True)
    repeats_s = (table.repeats @ seconds).T.tolist()
    for parts, repeats, own in zip(parts_s, repeats_s, of_device, strict=True):
        forward, backward_input, backward_weight = parts
        attention, selective, full, *of_parts = map(Issued, repeats, again_s)
        repeated: dict[Recompute, Issued] = {
            "none": NOTHING_ISSUED,
            "attention": attention,
            "selective": selective,
            "full": full,
        }
        within = dict(zip(table.part_names, of_parts, strict=True))
        found.append(
            Seconds(
                *(forward, repeated, backward_input, backward_weight, within, host_forward, host_backward),
                *map(float, own),
            )
        )
    return found


def _are_widened(table: OperatorTable) -> Flags:
    """[operator] -> whether it reads or writes what autocast keeps in fp32 (WIDENED)."""
    widened: Flags = np.array([kind in WIDENED for _, kind in table.kernels], dtype=bool)[table.kernel]
    return widened


def operator_s(op: OpProfile, device: Device, precision: str, element_bytes: int, batch: float, tensor: int) -> float:
    """Seconds of one operator."""
    return float(operators_s(table_of((op,)), device, precision, element_bytes, batch, tensor)[0])


def operators_s(
    table: OperatorTable, device: Device, precision: str, element_bytes: int, batch: float, tensor: int
) -> Floats:
    """Seconds of each operator: max(FLOPs / speed at this shape, bytes / bandwidth), and no less than a launch."""
    amounts = amounts_of(table, batches_at([batch], tensor))
    return _operators_s(table, amounts, device, precision, element_bytes)[:, 0]


def _operators_s(table: OperatorTable, amounts: Amounts, device: Device, precision: str, element_bytes: int) -> Floats:
    """[operator][batch] -> seconds of each entry; one that stands for several equal operators takes the seconds of
    all."""
    if (table.counts == 1.0).all():
        return _kernels_s(table, amounts, device, precision, element_bytes)
    counts = table.counts[:, None]
    one = replace(
        amounts,
        flops=amounts.flops / counts,
        elements=amounts.elements / counts,
        other_bytes=amounts.other_bytes / counts,
    )
    return counts * _kernels_s(table, one, device, precision, element_bytes)


def _kernels_s(table: OperatorTable, amounts: Amounts, device: Device, precision: str, element_bytes: int) -> Floats:
    """[operator][batch] -> seconds of one kernel of each entry."""
    flops, (rows, inner, columns) = amounts.flops, amounts.sides
    traffic_s = _moving_s(element_bytes * amounts.elements + amounts.other_bytes, device, table)
    low = precision in LOW_PRECISIONS
    peak = device.flops["bf16" if low else precision] * device.sustained
    speed = np.full(flops.shape, peak * device.matmul_efficiency)
    tiles = tile_efficiencies(rows, columns, device)
    speed[table.is_product] *= tiles[table.is_product]
    speed[table.is_batched] *= BATCHED
    if precision != "fp32":
        speed[table.is_batched[:, None] & ((inner % 8 != 0) | (columns % 8 != 0))] *= MISALIGNED
    backward = device.attention_backward_efficiency or device.attention_efficiency
    attention = np.where(table.has_forward, device.attention_efficiency, backward)
    speed[table.is_attention] = peak * attention[table.is_attention][:, None]
    shows = table.is_product
    if low:
        lower = device.flops[precision] * device.sustained * device.low_precision_efficiency * tiles
        speed[table.is_of_weights] = lower[table.is_of_weights]
        shows = shows | table.is_of_weights
    seconds = flops / speed + UNHIDDEN_TRAFFIC * traffic_s * (shows[:, None] & (flops > 0.0))
    seconds = np.maximum(seconds, traffic_s)
    if low:
        are_cast = (table.is_of_weights * (1.0 - table.parts[2]))[:, None]
        cast = CAST_BYTES[precision] * device.casts * rows * inner * are_cast
        seconds = seconds + cast / (device.bandwidth * device.bandwidth_efficiency)
    if precision in device.matmul_samples:  # what moving its operands takes is in the measured share
        for i, j in np.argwhere(table.is_product[:, None] & (flops > 0.0)).tolist():
            shape = rows[i, j], inner[i, j], columns[i, j]
            share = measured_efficiency(shape, device.matmul_samples[precision])
            seconds[i, j] = flops[i, j] / (peak * share)
    slowest: Floats = np.maximum(seconds, device.launch)
    family = family_of(device)
    if family is not None and precision not in device.matmul_samples:
        _price_by_shape(slowest, table, amounts, traffic_s, device, precision, family)
    return slowest


def _price_by_shape(
    seconds: Floats,
    table: OperatorTable,
    amounts: Amounts,
    traffic_s: Floats,
    device: Device,
    precision: str,
    family: KernelFamily,
) -> None:
    """Replace entries of `seconds` by those of the device's kernel family, for kernels that it prices by shape in this
    precision: products (except those inside unfused attention) and fused attention."""
    low = precision in LOW_PRECISIONS
    usual = "bf16" if low or precision == "fp16" else precision
    if usual not in family.products:
        return
    products = table.is_product & ~table.is_batched
    for dtype, mask in ((precision, table.is_of_weights), (usual, ~table.is_of_weights)) if low else ((usual, None),):
        of_dtype = products if mask is None else products & mask
        if of_dtype.any():
            seconds[of_dtype] = _products_s(table, amounts, of_dtype, device, dtype, family)
    fused = table.is_attention & (amounts.sides[1] > 1.0).any(axis=1)
    if fused.any() and usual in family.attention:
        moved_bytes = traffic_s[fused] * (device.bandwidth * device.bandwidth_efficiency)
        forward = table.has_forward[fused][:, None]
        rows, inner, columns = amounts.sides[:, fused]
        attends_s = attention_s(
            amounts.flops[fused],
            rows,
            inner,
            columns,
            moved_bytes,
            np.where(forward, 2.0, 5.0),
            device,
            device.flops[usual],
            family.attention[usual],
        )
        speed = device.sustained * device.attention_speed * np.where(forward, 1.0, family.backward)
        seconds[fused] = attends_s / speed + device.launch


def _products_s(
    table: OperatorTable, amounts: Amounts, mask: Flags, device: Device, dtype: str, family: KernelFamily
) -> Floats:
    """[operator of the mask][batch] -> seconds of products in a dtype, with launches and casts to it."""
    flops, (rows, inner, columns) = amounts.flops[mask], amounts.sides[:, mask]
    groups = amounts.groups[mask] if amounts.groups.size else np.ones_like(rows)
    peak, usual = device.flops[dtype], family.products["bf16" if dtype in LOW_PRECISIONS else dtype]
    seconds = product_s(rows, inner, columns, device, dtype, peak, family.products[dtype], groups)
    if dtype in HALVES:  # outputs and inputs of weights lie contiguous, whichever of the three products it is
        outputs_or_inner = np.where(table.parts[2][mask][:, None] > 0.0, rows, inner)
        share = family.unaligned.share((outputs_or_inner, columns))
        seconds /= np.where(table.is_of_weights[mask][:, None], share, 1.0)
    banks = (groups > 1.0).any(axis=1)
    if banks.any() and dtype in family.experts:
        sides = rows[banks], inner[banks], columns[banks], groups[banks]
        seconds[banks] = bank_products_s(*sides, device, dtype, peak, family.experts[dtype])
    low = dtype in LOW_PRECISIONS
    speed = device.sustained * (device.low_precision_speed if low else device.product_speed)
    seconds = seconds / speed + usual.launch
    if low:
        cast = CAST_BYTES[dtype] * device.casts * groups * rows * inner
        cast_s = cast / (device.bandwidth * device.bandwidth_efficiency) + device.launch
        seconds += cast_s * (1.0 - table.parts[2][mask])[:, None]
    found: Floats = np.where(flops > 0.0, seconds, device.launch)
    return found


def _moving_s(num_bytes: Floats, device: Device, table: OperatorTable) -> Floats:
    """[operator][batch] -> `moving_s`."""
    if device.size_efficiency:
        kernels = [table.kernels[kernel] for kernel in table.kernel.tolist()]
        pairs = zip(num_bytes.tolist(), kernels, strict=True)
        found = [[moving_s(size, device, *names) for size in sizes] for sizes, names in pairs]
        return np.array(found).reshape(num_bytes.shape)
    speeds = np.array([device.bandwidth * _share(device, kernels) for kernels in table.kernels])
    seconds: Floats = num_bytes / speeds[table.kernel][:, None]
    return seconds


def moving_s(num_bytes: float, device: Device, *kernels: str) -> float:
    """Seconds that one kernel takes to move bytes. Its speed is the measured one of the first of `kernels` (operator
    name, kind) that has any, else the device's usual share of its bandwidth; both are corrected for the kernel's
    size."""
    speed = device.bandwidth * _share(device, kernels)
    return num_bytes / (speed * _size_efficiency(num_bytes, device.size_efficiency))


def _share(device: Device, kernels: Sequence[str]) -> float:
    """Share of the bandwidth that the first of these kernels with a measured share reaches; else the device's usual
    share."""
    for kernel in kernels:
        if kernel in device.kernel_efficiency:
            return device.kernel_efficiency[kernel]
    return device.bandwidth_efficiency


def _size_efficiency(num_bytes: float, samples: Sequence[tuple[float, float]]) -> float:
    """Share of its full speed that a kernel of this size reaches: between samples by a power law, beyond them as at the
    nearest; 1 without samples."""
    if not samples or num_bytes <= samples[0][0]:
        return samples[0][1] if samples else 1.0
    for (low, slower), (high, faster) in pairwise(samples):
        if num_bytes <= high:
            place = math.log(num_bytes / low) / math.log(high / low)
            return float(slower * (faster / slower) ** place)
    return samples[-1][1]


def measured_efficiency(shape: Sequence[float], samples: Sequence[MatmulSample]) -> float:
    """Share of the peak that a product of this shape (rows, inner, columns) reaches: the geometric mean of the samples,
    weighted by their nearness in doublings of the sides. Sides beyond all samples count as the nearest one of a
    sample."""
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
"""Added to the squared distance of a sample (in doublings of the sides), so that the weight of a sample of the same
shape is large, but finite."""


def tile_efficiencies(rows: Floats, columns: Floats, device: Device) -> Floats:
    """[shape] -> share of a large matmul's speed that a matmul of this shape keeps: tiles at its edges and in the last
    wave are not full."""
    tile_rows, tile_columns = device.tile
    tiles = np.ceil(np.maximum(rows, 1.0) / tile_rows) * np.ceil(np.maximum(columns, 1.0) / tile_columns)
    waves = tiles / device.compute_units
    filled = waves / np.ceil(waves)
    kept_share: Floats = np.maximum(filled, 1.0 / device.compute_units) ** WAVE_EXPONENT
    return kept_share


def accumulate_s(num_elements: float, device: Device) -> float:
    """Seconds to add new fp32 gradients of so many elements to those that are there."""
    return moving_s(12.0 * num_elements, device, "add_", "elementwise")


def optimizer_s(num_elements: Values, optimizer: str, device: Device, on_host: bool = False) -> Values:
    """Seconds to update `num_elements` fp32 parameters. It is all memory traffic, at one speed for all sizes (an
    optimizer works parameter by parameter).

    on_host: optimizer state and step are in the host's memory. fp32 gradients and parameters go there, then parameters
    come back, without overlap (Ren et al., ZeRO-Offload, USENIX ATC 2021, without its delayed update). Parameters go
    there, too, because code that changes the model changes it on the device.
    """
    moved = OPTIMIZER_BYTES[optimizer] * num_elements
    if on_host:
        return 3 * 4 * num_elements / device.host_bandwidth + moved / device.host_memory_bandwidth
    share = device.kernel_efficiency.get(optimizer, device.bandwidth_efficiency)
    return moved / (device.bandwidth * share)
