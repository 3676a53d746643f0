"""Measures a device: times kernels and collectives where they run, and fits the device's numbers to the times."""

import datetime
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ..document import write_file
from .cluster import Device, Link

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

WARM_UPS = 2
"""Calls before the clock starts; in these memory is allocated, libraries are loaded and kernels chosen."""

LEAST_SAMPLES = 3
MOST_SAMPLES = 200

SHORTEST_S = 2e-4
"""A kernel is repeated within a sample until that takes about so many seconds, so that the clock's own resolution does
not matter."""

OPTIMIZERS = {"adamw": (torch.optim.AdamW, 28), "sgd": (torch.optim.SGD, 12)}
"""Name -> (class, bytes moved for each fp32 parameter, as the planner counts them)."""

HALVES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Collective -> number of times that it goes around the ring."""

_WIDTH = 512
_LAUNCH_CHAIN = 50
_OPERATORS_OF_PAIR = 6
"""Operators of a linear layer and a ReLU that move memory: two in forward, four in backward."""

_KINDS = {
    "elementwise": ("add", "mul"),
    "norm": ("native_layer_norm", "native_layer_norm_backward"),
    "loss": ("_log_softmax", "_log_softmax_backward_data"),
    "embedding": ("embedding", "embedding_dense_backward"),
    "copy": ("clone",),
    "other": ("sum", "_softmax"),
}
"""Kind of operator -> the measured operators whose median stands for others of that kind."""


@dataclass(frozen=True)
class Effort:
    """What is measured, and for how long. Numbers of bytes are those of one tensor; for collectives of the full tensor.

    rounds: number of times that everything is measured, one after the other, so that a slow minute of the machine does
    not meet a single kernel. seconds_per_kernel, collective_samples: in each round.
    """

    rounds: int
    seconds_per_kernel: float
    matmul_sides: tuple[int, ...]
    most_matmul_flops: float
    traffic_bytes: int
    curve_bytes: tuple[int, ...]
    attention_lengths: tuple[int, ...]
    attention_heads: int
    collective_bytes: tuple[int, ...]
    collective_samples: int
    parameter_elements: int
    layer_runs: int


_MIB = 2**20

EFFORTS = {
    ("cpu", False): Effort(
        4, 0.02, (32, 128, 512, 2048), 5e9, 2 * _MIB, tuple(size * _MIB // 8 for size in (1, 4, 16, 64, 192, 384)),
        (128, 512, 1024), 8, (2**12, 2**16, 2**19, 2**22, 2**24), 5, 2**18, 10,
    ),
    ("cpu", True): Effort(
        3, 0.01, (32, 256, 1024), 1e9, 2 * _MIB, (_MIB // 8, 8 * _MIB, 48 * _MIB),
        (128, 512), 8, (2**12, 2**18, 2**22), 3, 2**18, 4,
    ),
    ("cuda", False): Effort(
        5, 0.02, (64, 256, 1024, 4096), 1.4e11, 64 * _MIB, tuple(4**power * _MIB // 16 for power in range(7)),
        (512, 1024, 4096), 32, (2**16, 2**20, 2**23, 2**26, 2**28), 5, 2**24, 10,
    ),
    ("cuda", True): Effort(
        3, 0.01, (64, 512, 4096), 1.4e11, 64 * _MIB, (_MIB // 16, 4 * _MIB, 256 * _MIB),
        (512, 2048), 32, (2**16, 2**22, 2**26), 3, 2**24, 4,
    ),
}  # fmt: skip
"""(device type, whether in a hurry) -> effort."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of `count` samples. spread: distance between the quartiles, over the median."""

    median_s: float
    spread: float
    count: int


def summary(samples: Sequence[float]) -> Timing:
    """Median and spread of samples in seconds; a few wild samples change neither."""
    if len(samples) == 1:
        return Timing(samples[0], 0.0, 1)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, (high - low) / median if median else 0.0, len(samples))


class Clock:
    """Times what runs on one device. All that CUDA needs for that (events, synchronising) is here."""

    def __init__(self, device_type: str) -> None:
        self.is_cuda = device_type == "cuda"

    def synchronise(self) -> None:
        """Wait until the device has done everything."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """A mark at the present moment in the device's work."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two marks; on CUDA only after `synchronise`."""
        return start.elapsed_time(end) * 1e-3 if self.is_cuda else end - start  # type: ignore[no-any-return]

    def seconds(self, run: Callable[[], object], repeats: int = 1) -> float:
        """Seconds of one call of `run`, on average over `repeats` calls."""
        start = self.mark()
        for _ in range(repeats):
            run()
        end = self.mark()
        self.synchronise()
        return self.between(start, end) / repeats

    def timing(self, run: Callable[[], object], budget_s: float) -> Timing:
        """Times of `run`, sampled for about `budget_s` seconds after a warm-up."""
        for _ in range(WARM_UPS):
            run()
        self.synchronise()
        start = time.perf_counter()
        repeats = max(1, math.ceil(SHORTEST_S / max(self.seconds(run), 1e-9)))
        samples: list[float] = []
        while len(samples) < LEAST_SAMPLES or (len(samples) < MOST_SAMPLES and time.perf_counter() < start + budget_s):
            samples.append(self.seconds(run, repeats))
        return summary(samples)


@dataclass(frozen=True)
class Measured:
    """What one rank has measured, or all of them, if merged.

    matmuls: dtype -> ((rows, inner, columns), timing). traffic: aten operator or optimizer -> (bytes, timing). curve:
    (bytes moved by an addition, timing). attention: forward and backward -> (FLOPs, timing). collectives: kind ->
    (bytes of the full tensor, timing).
    """

    matmuls: dict[str, list[tuple[tuple[int, int, int], Timing]]]
    traffic: dict[str, tuple[float, Timing]]
    curve: list[tuple[float, Timing]]
    attention: dict[str, list[tuple[float, Timing]]]
    launch: Timing
    collectives: dict[str, list[tuple[float, Timing]]] = field(default_factory=dict)


def measure(device_type: str, dtypes: Sequence[str], effort: Effort) -> Measured:
    """Everything about the device of this rank; torch.distributed runs already where there are several ranks.

    All ranks time the same kernel at the same time: CPU ranks share the memory's bandwidth. Activations have the first
    dtype of `dtypes`.
    """
    with torch.device(device_type), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return merged([_round(Clock(device_type), dtypes, effort) for _ in range(effort.rounds)])


def _round(clock: Clock, dtypes: Sequence[str], effort: Effort) -> Measured:
    dtype = DTYPES[dtypes[0]]

    def timed(run: Callable[[], object]) -> Timing:
        if num_ranks_here() > 1:
            dist.barrier()
        return clock.timing(run, effort.seconds_per_kernel)

    curve = []
    for size in effort.curve_bytes:
        x = torch.randn(size // dtype.itemsize).to(dtype)
        curve.append((3.0 * x.nbytes, timed(partial(torch.add, x, x))))
    traffic = {name: (moved, timed(run)) for name, run, moved in _kernels(effort.traffic_bytes, dtype)}
    return Measured(
        {name: _matmuls(DTYPES[name], effort, timed) for name in dtypes},
        {**traffic, **{name: _optimizer(name, effort, timed) for name in OPTIMIZERS}},
        curve,
        _attention(effort, dtype, timed),
        _launch(timed),
        _collectives(effort, clock) if num_ranks_here() > 1 else {},
    )


def num_ranks_here() -> int:
    """Ranks of the job that this process is one of; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


_Timed = Callable[[Callable[[], object]], Timing]


def _matmuls(dtype: torch.dtype, effort: Effort, timed: _Timed) -> list[tuple[tuple[int, int, int], Timing]]:
    found = []
    left, right = (torch.randn(max(effort.matmul_sides) ** 2).to(dtype) for _ in range(2))
    for rows in effort.matmul_sides:
        for inner in effort.matmul_sides:
            for columns in effort.matmul_sides:
                if 2.0 * rows * inner * columns > effort.most_matmul_flops:
                    continue
                a = left[: rows * inner].view(rows, inner)
                b = right[: inner * columns].view(columns, inner).t()
                found.append(((rows, inner, columns), timed(partial(torch.matmul, a, b))))
    return found


def _kernels(tensor_bytes: int, dtype: torch.dtype) -> Iterable[tuple[str, Callable[[], Any], float]]:
    """(aten operator, call, bytes that it reads and writes) for the operators of models that are not products."""
    aten = torch.ops.aten
    rows = max(1, tensor_bytes // (_WIDTH * dtype.itemsize))
    x, y = (torch.randn(rows, _WIDTH).to(dtype) for _ in range(2))
    scale, shift = (torch.ones(_WIDTH).to(dtype) for _ in range(2))
    _, mean, deviation = aten.native_layer_norm(x, [_WIDTH], scale, shift, 1e-5)
    softmax, log_softmax = aten._softmax(x, -1, False), aten._log_softmax(x, -1, False)
    indices = torch.randint(rows, (rows,))
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "add": (aten.add, (x, y)),
        "mul": (aten.mul, (x, y)),
        "relu": (aten.relu, (x,)),
        "threshold_backward": (aten.threshold_backward, (x, y, 0)),
        "gelu": (aten.gelu, (x,)),
        "gelu_backward": (aten.gelu_backward, (x, y)),
        "silu": (aten.silu, (x,)),
        "silu_backward": (aten.silu_backward, (x, y)),
        "tanh": (aten.tanh, (x,)),
        "native_layer_norm": (aten.native_layer_norm, (x, [_WIDTH], scale, shift, 1e-5)),
        "native_layer_norm_backward": (
            aten.native_layer_norm_backward,
            (y, x, [_WIDTH], mean, deviation, scale, shift, [True, True, True]),
        ),
        "_softmax": (aten._softmax, (x, -1, False)),
        "_softmax_backward_data": (aten._softmax_backward_data, (y, softmax, -1, dtype)),
        "_log_softmax": (aten._log_softmax, (x, -1, False)),
        "_log_softmax_backward_data": (aten._log_softmax_backward_data, (y, log_softmax, -1, dtype)),
        "embedding": (aten.embedding, (x, indices)),
        "embedding_dense_backward": (aten.embedding_dense_backward, (y, indices, rows, -1, False)),
        "clone": (aten.clone, (x,)),
        "sum": (aten.sum, (x, [0])),
    }
    for name, (operator, arguments) in calls.items():
        yield name, partial(operator, *arguments), _moved_bytes(name, arguments, operator(*arguments))


def _moved_bytes(name: str, arguments: tuple[Any, ...], result: Any) -> float:
    """Bytes that an operator moves, as a profile counts them: a lookup reads rows, and not the whole table."""
    written = sum(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor))
    if name == "embedding":
        return float(2 * written + arguments[1].nbytes)
    return float(written + sum(t.nbytes for t in arguments if isinstance(t, torch.Tensor)))


def _optimizer(name: str, effort: Effort, timed: _Timed) -> tuple[float, Timing]:
    kind, bytes_per_element = OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.randn(effort.parameter_elements)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = kind(parameters, lr=1e-4)
    return float(8 * effort.parameter_elements * bytes_per_element), timed(optimizer.step)


def _attention(effort: Effort, dtype: torch.dtype, timed: _Timed) -> dict[str, list[tuple[float, Timing]]]:
    """FLOPs and times of causal fused attention. The backward's time is that of forward and backward less that of the
    forward."""
    found: dict[str, list[tuple[float, Timing]]] = {"forward": [], "backward": []}
    for length in effort.attention_lengths:
        shape = (1, effort.attention_heads, length, 64)
        q, k, v, gradient = (torch.randn(shape).to(dtype) for _ in range(4))
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
        flops = 2.0 * effort.attention_heads * length * length * 64  # q k^T and probabilities v, half of each
        once, twice = timed(partial(_causal, q, k, v)), timed(partial(_causal_both, q, k, v, gradient))
        found["forward"].append((flops, once))
        rest_s = max(twice.median_s - once.median_s, 0.1 * twice.median_s)
        found["backward"].append((2.5 * flops, Timing(rest_s, once.spread + twice.spread, twice.count)))
    return found


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _causal_both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor) -> object:
    return torch.autograd.grad(_causal(q, k, v), (q, k, v), gradient)


def _launch(timed: _Timed) -> Timing:
    """Seconds of one of the smallest operators in eager mode, forward or backward, with its share of modules and
    autograd."""
    pairs = [module for _ in range(_LAUNCH_CHAIN) for module in (nn.Linear(4, 4), nn.ReLU())]
    chain, start = nn.Sequential(*pairs), torch.ones(1, 4, requires_grad=True)

    def there_and_back() -> None:
        chain.zero_grad()
        chain(start).sum().backward()

    whole = timed(there_and_back)
    return Timing(whole.median_s / (_OPERATORS_OF_PAIR * _LAUNCH_CHAIN), whole.spread, whole.count)


def _collectives(effort: Effort, clock: Clock) -> dict[str, list[tuple[float, Timing]]]:
    """Kind -> (bytes of the full tensor, timing). All ranks make the same calls."""
    ranks, rank = num_ranks_here(), dist.get_rank()
    found: dict[str, list[tuple[float, Timing]]] = {}
    for size in effort.collective_bytes:
        share = torch.ones(size // 4 // ranks)
        full = torch.ones(share.numel() * ranks)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, full),
            "all_gather": partial(dist.all_gather_into_tensor, full, share),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, share, full),
            "p2p": partial(_hand_over, full, rank, ranks),
        }
        for kind, call in calls.items():
            samples = []
            for _ in range(WARM_UPS + effort.collective_samples):
                full.fill_(1.0)
                dist.barrier()
                samples.append(clock.seconds(call))
            found.setdefault(kind, []).append((float(full.nbytes), summary(samples[WARM_UPS:])))
    return found


def _hand_over(tensor: torch.Tensor, rank: int, ranks: int) -> None:
    """Send a tensor from every even rank to the next one, all at once; if the number of ranks is odd, the last one
    waits."""
    peer = rank ^ 1
    if peer >= ranks:
        return
    operation = dist.isend if rank < peer else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        work.wait()


# --- fitting: times in, a Device out ---------------------------------------------------------------------------------


def merged(several: Sequence[Measured], *, ranks: bool = False) -> Measured:
    """One measurement in place of those of several rounds, or of all ranks: medians; for collectives, across ranks, the
    slowest rank counts."""
    first = several[0]

    def pairs(of: Callable[[Measured], list[tuple[Any, Timing]]], slowest: bool = False) -> list[tuple[Any, Timing]]:
        rows = zip(*(of(one) for one in several), strict=True)
        return [(row[0][0], _together([timing for _, timing in row], slowest)) for row in rows]

    return Measured(
        {name: pairs(lambda m, n=name: m.matmuls[n]) for name in first.matmuls},  # type: ignore[misc]
        {
            name: (moved, _together([one.traffic[name][1] for one in several]))
            for name, (moved, _) in first.traffic.items()
        },
        pairs(lambda m: m.curve),
        {name: pairs(lambda m, n=name: m.attention[n]) for name in first.attention},  # type: ignore[misc]
        _together([one.launch for one in several]),
        {name: pairs(lambda m, n=name: m.collectives[n], ranks) for name in first.collectives},  # type: ignore[misc]
    )


def _together(timings: Sequence[Timing], slowest: bool = False) -> Timing:
    medians = [timing.median_s for timing in timings]
    return Timing(
        max(medians) if slowest else statistics.median(medians),
        max(summary(medians).spread, statistics.median(timing.spread for timing in timings)),
        sum(timing.count for timing in timings),
    )


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(constant, slope) of a line through (amount, seconds), neither below 0, with the least squares of relative
    errors.

    Relative, because the smallest amounts tell most about the constant, and the largest about the slope.
    """
    ones = sum(1 / y**2 for _, y in points)
    xs, xxs = sum(x / y**2 for x, y in points), sum(x * x / y**2 for x, y in points)
    ys, xys = sum(1 / y for _, y in points), sum(x / y for x, y in points)
    determinant = ones * xxs - xs * xs
    constant = (ys * xxs - xys * xs) / determinant if determinant > 1e-12 * ones * xxs else 0.0
    if constant <= 0.0:
        return 0.0, xys / xxs
    slope = (xys - constant * xs) / xxs
    return (constant, slope) if slope > 0.0 else (ys / ones, 0.0)


def fit_factor(model_s: Sequence[float], measured_s: Sequence[float]) -> float:
    """The factor of the modelled times with the least squares of relative errors."""
    ratios = [model / measured for model, measured in zip(model_s, measured_s, strict=True)]
    return sum(ratios) / sum(ratio * ratio for ratio in ratios)


def fit_link(
    collectives: Mapping[str, Sequence[tuple[float, Timing]]], num_ranks: int
) -> tuple[Link, dict[str, float]]:
    """(link, kind of collective -> its time over that of an ideal ring on this link), from times of several sizes of
    each.

    The link is the one on which an all_gather takes as long as an ideal ring: (n-1)/n of the bytes, and n-1 hops.
    """
    hops, moved = num_ranks - 1, (num_ranks - 1) / num_ranks
    gather = [(full_bytes, timing.median_s) for full_bytes, timing in collectives["all_gather"]]
    constant, slope = fit_line(gather)
    slope = slope or gather[-1][1] / gather[-1][0]
    link = Link(bandwidth=moved / slope, latency=constant / hops)
    factors = {}
    for kind, points in collectives.items():
        measured_s = [timing.median_s for _, timing in points]
        if kind == "p2p":
            ideal_s = [size / link.bandwidth + link.latency for size, _ in points]
        else:
            ideal_s = [HALVES[kind] * (constant + slope * size) for size, _ in points]
        factors[kind] = fit_factor(ideal_s, measured_s)
    return link, factors


def fit_device(base: Device, measured: Measured, num_ranks: int, device_type: str) -> Device:
    """`base` with everything that was measured put in its place, each number with its source; the rest is base's own.

    The peak of a dtype is the best rate that any matmul reached; bandwidth is the best that any kernel reached. What
    the base prices by shape (its `kernels`) stays so, and small kernels of a GPU tell of its host: calls that follow
    each other are as fast as it issues them.
    """
    numbers: dict[str, Any] = {"name": f"{base.name}-measured"}
    sources = {
        key: text if text.startswith(_KEPT) else f"{_KEPT} {base.name}: {text}" for key, text in base.sources.items()
    }

    def put(name: str, value: Any, timings: Iterable[Timing], what: str) -> None:
        numbers[name] = value
        sources[name] = _source(what, list(timings), num_ranks, device_type)

    rates = {
        dtype: [(shape, 2.0 * math.prod(shape) / t.median_s) for shape, t in points]
        for dtype, points in measured.matmuls.items()
    }
    by_shape = PRICED_BY_SHAPE if base.kernels else ()
    peaks = {dtype: max(rate for _, rate in points) for dtype, points in rates.items()}
    kept = {dtype: base.flops[dtype] for dtype in by_shape if dtype in base.flops}
    samples = {dtype: tuple((*shape, rate / peaks[dtype]) for shape, rate in points) for dtype, points in rates.items()}
    matmul_timings = [t for points in measured.matmuls.values() for _, t in points]
    first = next(iter(rates))
    largest = max(math.prod(shape) for shape, _ in rates[first])
    large = [rate / peaks[first] for shape, rate in rates[first] if math.prod(shape) >= largest / 8]
    own = ", ".join(dtype for dtype in peaks if dtype not in kept) or "none"
    put("flops", {**base.flops, **peaks, **kept}, matmul_timings, f"best rate of a matmul, of {own}")
    put("matmul_efficiency", statistics.median(large), matmul_timings, f"median of the large matmuls in {first}")
    put(
        "matmul_samples",
        {dtype: points for dtype, points in samples.items() if dtype not in kept},
        matmul_timings,
        "share of the peak by rows, inner and columns, operands' traffic in it",
    )

    speeds = {name: moved / timing.median_s for name, (moved, timing) in measured.traffic.items()}
    best = max(speed for name, speed in speeds.items() if name not in OPTIMIZERS)
    traffic_timings = [timing for _, timing in measured.traffic.values()]
    shares = {name: speed / best for name, speed in speeds.items()}
    for kind, names in _KINDS.items():
        shares[kind] = statistics.median(shares[name] for name in names)
    put("bandwidth", best, traffic_timings, "best of the kernels that move bytes")
    put("bandwidth_efficiency", shares["elementwise"], [measured.traffic["add"][1]], "addition and product")
    put("kernel_efficiency", shares, traffic_timings, "share of the bandwidth by operator, or kind of operator")
    usual, _ = measured.traffic["add"]
    at_usual = _at(usual, [(moved, moved / timing.median_s) for moved, timing in measured.curve])
    if device_type == "cpu":
        put(
            "size_efficiency",
            tuple((moved, min(1.0, moved / timing.median_s / at_usual)) for moved, timing in measured.curve),
            [timing for _, timing in measured.curve],
            f"speed of an addition by bytes moved, over that at {usual / _MIB:.0f} MiB, at most 1",
        )
    for part, name in (("forward", "attention_efficiency"), ("backward", "attention_backward_efficiency")):
        reached = [flops / timing.median_s / peaks[first] for flops, timing in measured.attention[part]]
        what = f"causal fused attention, {part}, {first}, share of the matmul peak"
        put(name, min(1.0, statistics.median(reached)), [t for _, t in measured.attention[part]], what)
    tiny = "one operator of tiny linear layers and ReLUs, both passes"
    if device_type == "cpu":
        put("launch", measured.launch.median_s, [measured.launch], tiny)
    else:
        of_models = OF_MODELS * measured.launch.median_s
        put("dispatch", of_models, [measured.launch], f"{OF_MODELS:g} times {tiny}")
    if measured.collectives:
        link, factors = fit_link(measured.collectives, num_ranks)
        timings = [timing for points in measured.collectives.values() for _, timing in points]
        put("link", link, timings, "")
        put("collective_factors", factors, timings, "time over the ideal ring on that link")
        text = _source("line through all_gather of several sizes", timings, num_ranks, device_type)
        sources.update({"link.bandwidth": text, "link.latency": text})
        del sources["link"]
    return Device.model_validate({**dict(base), **numbers, "sources": sources})


PRICED_BY_SHAPE = ("bf16", "fp16")
"""Dtypes whose products a device with `kernels` prices by shape, as shares of the vendor's peak."""

OF_MODELS = 2.0
"""Time to issue an operator of a model, with views, casts and modules around it, over that of a tiny linear layer or
ReLU: 40 us beside 20.3 us on the host of an H100 (benchmarks/one_gpu/results/host.md)."""

_KEPT = "not measured, kept from preset"


def _at(place: float, points: Sequence[tuple[float, float]]) -> float:
    """The value of the point that is nearest on a logarithmic scale."""
    return min(points, key=lambda point: abs(math.log(point[0] / place)))[1]


def _source(what: str, timings: Sequence[Timing], num_ranks: int, device_type: str) -> str:
    least, most = min(t.count for t in timings), max(t.count for t in timings)
    count = str(least) if least == most else f"{least}-{most}"
    spread = statistics.median(t.spread for t in timings)
    ranks = f"{num_ranks} {device_type} rank{'s at the same time' if num_ranks > 1 else ''}"
    return (
        f"measured: {what}; {ranks}, torch {torch.__version__}, {datetime.date.today().isoformat()}, "
        f"median of {count} samples, quartiles {spread:.0%} apart"
    )


# --- the document ----------------------------------------------------------------------------------------------------


def device_toml(device: Device) -> str:
    """The device as a TOML that `load_device` reads; numbers to 4 digits."""
    lines = [f"# {device.name}; [sources] says where each number comes from."]
    tables: list[str] = []
    for name, value in dict(device).items():
        if value is None:
            continue
        if isinstance(value, Link):
            tables += ["", f"[{name}]", *(f"{key} = {_value(number)}" for key, number in dict(value).items())]
        elif isinstance(value, dict):
            tables += ["", f"[{name}]", *(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name} = {_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def save_device(device: Device, path: Path) -> None:
    """Write the device TOML; the file appears whole or not at all. Raises ValueError where it cannot be written."""
    write_file(path, device_toml(device))
