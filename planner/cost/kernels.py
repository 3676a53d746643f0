"""Seconds of single kernels by their shapes: matrix products, one or many at once, and fused attention.

What a kernel loses to its shape has a few causes, each with a number that has a meaning, in kernels.toml by family of
devices and dtype: work is done in tiles, and the last wave of them is not full; a tile has to be filled before its
arithmetic runs; small tiles read more for what they compute; operands move while arithmetic runs, and not all of that
is hidden; long products draw more power than the device may, and its clock falls. The numbers are fitted to public
measurements of single kernels, with whole shapes left out: `python -m benchmarks.published.fit_components`.
"""

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from pydantic import Field

from ...profiler.document import Frozen
from ...profiler.machine.cluster import Device
from ..arrays import Floats

FILE = Path(__file__).parent / "kernels.toml"

TILES = ((128, 256), (256, 128), (256, 256), (128, 128), (128, 64), (64, 64))
"""Rows and columns of the tiles that cuBLAS, CUTLASS and DeepGEMM choose from. The best for a shape is taken."""

SMALL_TILE = 0.05
"""Loss of a tile of 128 x 128, per side, because it reads its operands more often: its speed is 1 / (1 + 2 x 0.05). The
error over all devices is nearly the same from 0.03 to 0.08."""

WAVE = 0.5
"""Exponent that tells how much of the ideal loss to a partly filled last wave is paid: 0 none, as with tiles cut along
the inner side; 1 all of it. The error over all devices is nearly the same from 0.4 to 0.7."""

OPERAND_TRAFFIC = 0.2
"""Share of the time to move a product's operands at full bandwidth that arithmetic does not hide. The error is nearly
the same from 0.1 to 0.3."""

LONG_S = 5e-4
"""Seconds of a product that has half of the loss to power."""

SIZES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5625}
"""Bytes of an element as products read it; fp4 includes an 8-bit scale for each 16 elements."""

SIDES_ALIGNED = 8
"""Number of 16-bit elements that tensor cores load at a time. Sides that are no multiple of it are loaded in pieces."""

QUERY_TILE = 128
"""Queries that one tile of attention works on."""


class ProductRates(Frozen):
    """Rates of products of one dtype on a family of devices. The allowed ranges are those that make physical sense: a
    fitted number outside means that the formula lacks a term."""

    speed: float = Field(
        ge=0.3,
        le=1.15,
        description="share of peak of a large product in the best tiles; the clock may be a tenth above the peak's",
    )
    fill: float = Field(ge=0, le=3000, description="inner elements in whose time a tile is filled and written")
    launch: float = Field(ge=0, le=40e-6, description="seconds until a kernel of a CUDA graph is under way, with casts")
    cast_bytes: float = Field(
        default=0.0, ge=0, le=12, description="bytes moved for each element of the activations that are cast before it"
    )
    power: float = Field(ge=0, le=0.6, description="share that a long product takes longer, as the clock falls")


class UnalignedRates(Frozen):
    """Speed of 16-bit products of weights whose inputs or outputs are no multiple of SIDES_ALIGNED (a vocabulary of
    50,257, say), over that of others; 1 if it was not measured."""

    odd: float = Field(default=1.0, ge=0.02, le=1, description="where one of the two is odd")
    even: float = Field(default=1.0, ge=0.02, le=1, description="where both are even")
    source: str = Field(default="not measured", description="where the numbers come from")

    def share(self, sides: Sequence[Floats]) -> Floats:
        """[shape] -> share of their speed that products keep; sides: those sides that lie contiguous in memory."""
        whole = [np.ceil(side) for side in sides]
        odd = np.any([side % 2 == 1 for side in whole], axis=0)
        aligned = np.all([side % SIDES_ALIGNED == 0 for side in whole], axis=0)
        share: Floats = np.where(aligned, 1.0, np.where(odd, self.odd, self.even))
        return share


class AttentionRates(Frozen):
    """Rates of fused attention on a family of devices."""

    speed: float = Field(ge=0.1, le=1.3, description="share of peak of its products, if scores cost nothing")
    head: float = Field(
        ge=0, le=250, description="width of a head at which the softmax of a score takes as long as its products"
    )
    fill: float = Field(ge=0, le=2000, description="keys in whose time a tile of queries is filled and written")
    tail: float = Field(ge=0, le=2, description="share of the longest tile's time in which other units idle at the end")
    traffic: float = Field(ge=0, le=2.5, description="share of the traffic at full bandwidth that is not hidden")
    launch: float = Field(ge=0, le=40e-6, description="seconds until its kernels are under way")


class ExpertRates(Frozen):
    """Rates of a bank of experts on one rank, on a family of devices."""

    speed: float = Field(ge=0.3, le=1.15, description="share of peak of large grouped products in the best tiles")
    fill: float = Field(ge=0, le=3000, description="inner elements in whose time a tile is filled and written")
    weights: float = Field(
        ge=0.8, le=2, description="time to read the weights of experts with few tokens, over the ideal"
    )
    traffic: float = Field(
        ge=0, le=12, description="share of the products' operand traffic that is not hidden, casts included"
    )
    permute: float = Field(
        ge=0, le=8, description="times that a routed copy is read and written to sort tokens and bring them back"
    )
    passing: float = Field(
        default=0.0,
        ge=0,
        le=12,
        description="times that every token of the ranks that share the experts is moved on each of them, whichever "
        "rank has its experts: routing, sorting and the sum of outputs of kernels that see all tokens",
    )
    launch: float = Field(ge=0, le=300e-6, description="seconds of routing and sorting, however few tokens")


class RingRates(Frozen):
    """Rates of NCCL's collectives over the links inside a host of these devices."""

    reach: float = Field(ge=0.1, le=1.4, description="share of the link's bandwidth of a ring of many ranks")
    pairs: float = Field(
        default=0.0, ge=0, le=1, description="share of that which n ranks lack, times n: fewer ranks use fewer channels"
    )
    shared: float = Field(
        default=0.0, ge=0, le=3, description="power of the ranks that send at once with which links fall that all share"
    )
    reduced: float = Field(ge=0.9, le=1.6, description="speed of all-reduce over a gather's, per byte: switches add up")
    exchanged: float = Field(
        default=1.0,
        ge=0.5,
        le=1.6,
        description="speed of all-to-all over a gather's: each pair is a message of its own",
    )
    hop: float = Field(
        default=1.0, ge=0.05, le=3, description="time of a hop of a message of one packet over the link's latency"
    )
    base: float = Field(ge=0, le=40e-6, description="seconds of the smallest collective, but for its hops")
    ramp: float = Field(ge=0, le=3, description="how much of what it takes to fill a ring's pipeline is paid")

    def bandwidth(self, ranks: float, talking: float) -> float:
        """Share of the link's bandwidth that a ring of `ranks` ranks of a host gets. talking: ranks of the host that
        send at the same time."""
        return float(self.reach * (1.0 - self.pairs / ranks) * self.sharing(talking))

    def sharing(self, talking: float) -> float:
        """Share of the link's bandwidth that each rank keeps if `talking` ranks of a host send at the same time."""
        return float((2.0 / talking) ** self.shared)


class ExchangeRates(Frozen):
    """Rates of kernels that send tokens straight to the memory of experts (DeepEP, HybridEP and similar)."""

    unit: float = Field(ge=5e9, le=150e9, description="bytes per second that one multiprocessor handles")
    own: float = Field(ge=0.5, le=15, description="copies of a token in whose time it is read or summed up once")
    header: float = Field(ge=100, le=30000, description="bytes in whose time one copy is announced")
    reach: float = Field(ge=0.4, le=1.3, description="share of the bandwidth of the link in a host, if units suffice")
    network: float = Field(ge=0.4, le=1.3, description="share of the network's bandwidth between hosts")
    launch: float = Field(ge=0, le=300e-6, description="seconds until tokens are under way")


class KernelFamily(Frozen):
    """Kernels of a family of devices, by dtype."""

    products: dict[str, ProductRates] = Field(default={})
    attention: dict[str, AttentionRates] = Field(default={})
    experts: dict[str, ExpertRates] = Field(default={})
    rings: RingRates | None = None
    exchange: ExchangeRates | None = None
    unaligned: UnalignedRates = UnalignedRates()
    backward: float = Field(default=0.8, ge=0.4, le=1, description="speed of attention's backward over its forward's")
    generations: dict[str, float] = Field(
        default={}, description="speed of attention by the generation of its kernel, over that of the rates"
    )
    source: str = Field(description="where the numbers come from")

    def generation(self, name: str) -> float:
        """Speed of a generation of attention kernels; if it was not measured, of the nearest older one that was.
        "torch" stands for FlashAttention 2, or for cuDNN if that has no good kernel for the device."""
        if name == "torch":
            name = "flash-2" if self.generations.get("flash-2", 0.0) > 0.5 else "cudnn"
        order = ("cudnn", "flash-3", "flash-2", "flash-1")
        found = (self.generations[older] for older in order[order.index(name) :] if older in self.generations)
        return next(found, 1.0)


@cache
def families() -> dict[str, KernelFamily]:
    """Family name -> its kernels."""
    return {name: KernelFamily.model_validate(table) for name, table in tomllib.loads(FILE.read_text()).items()}


def family_of(device: Device) -> KernelFamily | None:
    """The kernels of a device's family, None if it names none. Raises ValueError, with the known names, for an unknown
    family."""
    if device.kernels and device.kernels not in families():
        raise ValueError(
            f"device {device.name!r}: there are no kernels {device.kernels!r}; there are {', '.join(families())}, "
            "or leave the line out: its efficiencies count then"
        )
    return families().get(device.kernels)


def rings_of(device: Device) -> RingRates | None:
    """Rates of collectives inside a host of these devices, None if they are not known."""
    family = family_of(device)
    return None if family is None else family.rings


def products_s(
    rows: Floats,
    inner: Floats,
    columns: Floats,
    device: Device,
    peak: float,
    rates: ProductRates | ExpertRates,
    groups: Floats | float = 1.0,
    skew: Sequence[float] = (1.0,),
) -> Floats:
    """[shape] -> seconds of the arithmetic of products, by tiles and waves. peak: FLOP/s of the dtype. groups: number
    of products that run at once, each with `rows` rows. skew: if their rows differ, rows over the mean, with equally
    many products for each entry."""
    best: Floats = np.full(np.shape(rows), np.inf)
    rows, columns = np.maximum(rows, 1.0), np.maximum(columns, 1.0)
    units = float(device.compute_units)
    for tile_rows, tile_columns in TILES:
        high = np.ceil(rows / tile_rows)
        if len(skew) > 1:
            high = np.mean([np.ceil(rows * share / tile_rows) for share in skew], axis=0)
        waves = groups * high * np.ceil(columns / tile_columns) / units
        paid = waves * (np.maximum(np.ceil(waves), 1.0) / waves) ** WAVE
        small = 1.0 + SMALL_TILE * (128 / tile_rows + 128 / tile_columns)
        best = np.minimum(best, paid * (tile_rows * tile_columns * small))
    seconds: Floats = 2.0 * best * (inner + rates.fill) * (units / (peak * rates.speed))
    return seconds


def product_s(
    rows: Floats,
    inner: Floats,
    columns: Floats,
    device: Device,
    dtype: str,
    peak: float,
    rates: ProductRates,
    groups: Floats | float = 1.0,
) -> Floats:
    """[shape] -> seconds of products, with the traffic of their operands, without launch and casts. groups: number of
    products that run at once."""
    num_bytes = groups * (SIZES[dtype] * (rows * inner + inner * columns) + 2.0 * rows * columns)
    seconds = products_s(rows, inner, columns, device, peak, rates, groups)
    slowest: Floats = np.maximum(seconds + OPERAND_TRAFFIC * num_bytes / device.bandwidth, num_bytes / device.bandwidth)
    return slowest * (1.0 + rates.power * slowest / (slowest + LONG_S))


def attention_s(
    flops: Floats,
    rows: Floats,
    inner: Floats,
    columns: Floats,
    num_bytes: Floats,
    products: Floats | float,
    device: Device,
    peak: float,
    rates: AttentionRates,
) -> Floats:
    """[shape] -> seconds of fused attention, without launch. rows: queries of all heads; inner: width of a head;
    columns: number of keys. products: matrix products for each tile, 2 in forward and 5 in backward. `flops` count only
    the keys that a mask leaves."""
    each = 2.0 * products * inner
    seen = np.minimum(flops / np.maximum(each * rows, 1.0), columns)
    speed = peak * rates.speed / (1.0 + rates.head / np.maximum(inner, 1.0))
    work_s = each * rows * (seen + QUERY_TILE / 2 + rates.fill) / speed
    unit_s = each * QUERY_TILE * columns / (speed / device.compute_units)
    longest_s = unit_s * (1.0 + rates.fill / np.maximum(columns, 1.0))
    seconds: Floats = np.maximum(work_s + rates.tail * unit_s, longest_s) + rates.traffic * num_bytes / device.bandwidth
    return seconds


def bank_products_s(
    rows: Floats,
    inner: Floats,
    columns: Floats,
    groups: Floats,
    device: Device,
    dtype: str,
    peak: float,
    rates: ExpertRates,
    skew: Sequence[float] = (1.0,),
) -> Floats:
    """[shape] -> seconds of one product for each of `groups` experts at once, of `rows` tokens each. Experts without
    tokens compute nothing, and their weights are not read. skew: see products_s."""
    active = groups * np.minimum(rows, 1.0)
    size = SIZES[dtype]
    weights_s = rates.weights * size * active * inner * columns / device.bandwidth
    moved = active * np.maximum(rows, 1.0) * (size * inner + 2.0 * columns)
    products = products_s(rows, inner, columns, device, peak, rates, np.maximum(active, 1e-9), skew)
    seconds: Floats = np.maximum(products, weights_s)
    return seconds + rates.traffic * moved / device.bandwidth


def permute_s(num_bytes: Floats, device: Device, rates: ExpertRates) -> Floats:
    """Seconds to sort copies of tokens by expert, and to bring the results back into order. num_bytes: bytes of all
    copies."""
    seconds: Floats = rates.permute * 2.0 * num_bytes / device.bandwidth
    return seconds
