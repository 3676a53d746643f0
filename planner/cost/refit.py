"""Corrects a device's constants by measured steps: a few runs on one's own machine tell more than any preset."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...profiler.machine.cluster import ClusterSpec, Device, Link
from ...profiler.model.model_profile import ModelProfile
from ..arrays import Floats
from ..plan.document import Plan
from .alone import all_kernels_s
from .comm_cost import CollectiveKind, collective_s
from .compute_cost import OPTIMIZER_BYTES
from .estimate import check_model_of, priced_by
from .layer_cost import CostModel

NOISE = 0.05
"""Standard deviation of log(measured / predicted) of a step time if the model were right. Repeats of published runs
differ by 1 to 6% (benchmarks/published/data/README.md)."""

EXCHANGE_NOISE = 0.1
"""The same for a collective that is timed alone, relative to what it takes within steps. Assumption: about as much as
gloo's collectives differ between groups and sizes."""

HUBER = 2.0
"""Residual, in units of the noise, from which a run's pull no longer grows, so that one slow run does not spoil the
fit."""

ROUNDS = 8
STEP = 0.05
"""Least change of a logarithm from which a derivative is taken. The first rounds change a constant by its spread,
because small changes of some show nothing: a launch counts only where it is longer than its kernel."""

COMPUTE = ("matmul", "attention", "memory traffic", "optimizer", "launch")
"""Constants of a device's compute, which a rank that runs without its peers can tell, too."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "p2p")


@dataclass(frozen=True)
class Knob:
    """A constant of a device that may be off by a factor. spread: standard deviation of the factor's logarithm before
    any run is seen. fields: the device's fields that change, as its sources name them."""

    name: str
    fields: tuple[str, ...]
    spread: float
    turn: Callable[[Device, float], Device]


@dataclass(frozen=True)
class MeasuredStep:
    """A plan that was run, and the seconds of one of its steps. position: pipeline coordinate of the rank, if one rank
    ran without its peers, so that its time is that of its kernels; None if the whole job ran. compute_s: [pipeline
    coordinate] -> seconds of the step in which the slowest rank there did not wait for others; () if not known."""

    label: str
    plan: Plan
    profile: ModelProfile
    step_s: float
    position: int | None = None
    compute_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective over all ranks of a plan's cluster that was timed alone. full_bytes: of the gathered or reduced
    tensor. seconds: of the slowest rank; NaN if it is still to be timed."""

    kind: CollectiveKind
    full_bytes: float
    seconds: float
    plan: Plan
    profile: ModelProfile


@dataclass(frozen=True)
class Refit:
    """The corrected device; the factor on each constant that the runs tell something about; and log(predicted /
    measured) of every run, before and after."""

    device: Device
    runs: tuple[MeasuredStep, ...]
    factors: dict[str, float]
    before: tuple[float, ...]
    after: tuple[float, ...]


def refit(
    device: Device,
    runs: Sequence[MeasuredStep],
    names: Sequence[str] | None = None,
    noise: float = NOISE,
    exchanged: Sequence[MeasuredCollective] = (),
) -> Refit:
    """`device` with its constants moved towards the best prediction of the runs, as far as runs and priors support.
    names: which KNOBS may move, None for all; what is known exactly should stay. noise: standard deviation of the
    logarithm of a measured step around a right model; less for runs that were measured well. exchanged: collectives
    timed alone on ranks of these runs; they tell apart kinds that all runs use in one proportion.

    Minimises sum rho((log predicted - log measured) / noise) + sum (log factor / spread)^2 by Gauss-Newton, where rho
    is Huber's, over steps, what ranks computed of them, and collectives. Slopes are taken from above and below in turn:
    a share that is 1 already cannot grow, so only the slope from below shows what it does. All plans must be for
    clusters of this device, or of hosts of several kinds, each of which is moved by the same factors. Raises ValueError
    without runs, and for plans of another model than their profile's.
    """
    if not runs:
        raise ValueError("there is no measured step to fit to; give at least one run")
    for run in runs:
        check_model_of(run.plan, run.profile)
    in_steps = [seconds for run in runs for seconds in (run.step_s, *run.compute_s)]
    measured = np.log([*in_steps, *(each.seconds for each in exchanged)])
    noises = np.array([noise] * len(in_steps) + [EXCHANGE_NOISE] * len(exchanged))
    steps = np.cumsum([0, *(1 + len(run.compute_s) for run in runs[:-1])])
    knobs = [knob for knob in KNOBS if names is None or knob.name in names]
    spreads = np.array([knob.spread for knob in knobs])
    point = np.zeros(len(knobs))

    def predicted(point: Floats) -> Floats:
        return _predicted(device, runs, exchanged, knobs, point)

    first = here = predicted(point)
    for number in range(ROUNDS):
        widths = np.maximum(STEP, spreads / 2**number)
        changes = -widths if number % 2 else widths
        there = [predicted(point + change) for change in np.diag(changes)]
        slopes = np.stack([(seen - here) / change for seen, change in zip(there, changes, strict=True)], 1)
        move = _move(here - measured, slopes, point, spreads, noises)
        here, point = _best_on_the_way(predicted, measured, point, move, spreads, here, noises)
        if np.abs(move).max() < 1e-3 and widths.max() == STEP:
            break
    found = {knob: math.exp(value) for knob, value in zip(knobs, point, strict=True) if abs(value) > 1e-3}
    factors = {knob.name: factor for knob, factor in found.items()}
    sources = dict(device.sources)
    for knob, factor in found.items():
        for field in knob.fields:
            told = f"{knob.name} x {factor:.2f}, fitted to {len(runs)} measured steps"
            sources[field] = f"{sources[field]}; {told}" if field in sources else told
    return Refit(
        turned(device, factors).model_copy(update={"sources": sources}),
        tuple(runs),
        factors,
        tuple((first - measured)[steps].tolist()),
        tuple((here - measured)[steps].tolist()),
    )


def most_open(
    device: Device,
    profile: ModelProfile,
    known: Sequence[Plan],
    others: Sequence[Plan],
    most: int,
    names: Sequence[str] | None = None,
    noise: float = NOISE,
    exchanged: Sequence[MeasuredCollective] = (),
) -> list[int]:
    """Indices of the other plans of a model, at most `most`, that are worth measuring beside the known ones before
    constants are fitted to their steps. They are chosen one after another: each time the plan whose step would be the
    least certain after those before it were measured, as long as it is less certain than the noise. names, noise,
    exchanged: as of `refit`.

    Constants are taken to be off by their spreads, independently, and the logarithms of steps to be linear in theirs.
    Then the plans that are measured leave the covariance (spreads^-2 + slopes' slopes / noise^2)^-1. (The greedy choice
    of a G-optimal design.)
    """
    runs = [MeasuredStep(plan.label, plan, profile, math.nan) for plan in (*known, *others)]
    knobs = [knob for knob in KNOBS if names is None or knob.name in names]
    if not (knobs and others):
        return []
    spreads = np.array([knob.spread for knob in knobs])
    here = _predicted(device, runs, exchanged, knobs, np.zeros(len(knobs)))
    moved = [_predicted(device, runs, exchanged, knobs, change) for change in np.diag(spreads)]
    slopes = np.stack([(there - here) / spread for there, spread in zip(moved, spreads, strict=True)], 1)
    before, alone = slopes[: len(known)], slopes[len(runs) :]
    told = np.diag(1 / spreads**2) + before.T @ before / noise**2 + alone.T @ alone / EXCHANGE_NOISE**2
    left, found = slopes[len(known) : len(runs)], list[int]()
    while len(found) < min(most, len(others)):
        variance = np.einsum("ij,jk,ik->i", left, np.linalg.inv(told), left)
        variance[found] = 0.0
        widest = int(np.argmax(variance))
        if variance[widest] <= noise**2:
            break
        found.append(widest)
        told += np.outer(left[widest], left[widest]) / noise**2
    return found


def turned(device: Device, factors: Mapping[str, float]) -> Device:
    """The device with each named constant multiplied by its factor; shares stay at most 1."""
    for knob in KNOBS:
        if knob.name in factors:
            device = knob.turn(device, factors[knob.name])
    return device


def slower(device: Device, ratio: float, source: str) -> Device:
    """A device that takes `ratio` times as long for all that it computes. source: where the ratio comes from, for its
    sources."""
    told = f"{ratio:.2f} times slower, {source}"
    sources = dict(device.sources)
    for knob in KNOBS:
        for field in knob.fields if knob.name in COMPUTE else ():
            sources[field] = f"{device.sources[field]}; {told}" if field in device.sources else told
    factors = {name: ratio if name == "launch" else 1 / ratio for name in COMPUTE if name != "optimizer"}
    kernels = {name: share / ratio for name, share in device.kernel_efficiency.items()}  # those of optimizers, too
    return turned(device, factors).model_copy(update={"kernel_efficiency": kernels, "sources": sources})


def on_device(plan: Plan, device: Device) -> Plan:
    """The plan on the same hosts, with this device and its links in them."""
    return plan.model_copy(update={"cluster": hosts_with(plan.cluster, device)})


def hosts_with(cluster: ClusterSpec, device: Device) -> ClusterSpec:
    """The same hosts, with this device and its links in them."""
    changes = {"device": device, "link": device.link, "network": None}
    hosts = tuple(group.model_copy(update=changes) for group in cluster.hosts)
    return cluster.model_copy(update={"hosts": hosts, "network": device.network})


def turned_hosts(cluster: ClusterSpec, factors: Mapping[str, float]) -> ClusterSpec:
    """The same hosts, of one or several kinds, with the named constants of each device and link multiplied by their
    factors."""
    hosts = []
    for group in cluster.hosts:
        linked = group.device.model_copy(update={"link": group.link, "network": group.network or cluster.network})
        device = turned(linked, factors)
        own = None if group.network is None else device.network
        hosts.append(group.model_copy(update={"device": device, "link": device.link, "network": own}))
    network = turned(cluster.device.model_copy(update={"network": cluster.network}), factors).network
    return cluster.model_copy(update={"hosts": tuple(hosts), "network": network})


def _predicted(
    device: Device,
    runs: Sequence[MeasuredStep],
    exchanged: Sequence[MeasuredCollective],
    knobs: Sequence[Knob],
    point: Floats,
) -> Floats:
    factors = {knob.name: math.exp(value) for knob, value in zip(knobs, point, strict=True)}
    moved = turned(device, factors)
    in_steps = [seconds for run in runs for seconds in _seconds(_moved(run.plan, moved, factors), run)]
    alone = [_collective_s(_moved(each.plan, moved, factors), each) for each in exchanged]
    return np.log([*in_steps, *alone])


def _collective_s(plan: Plan, each: MeasuredCollective) -> float:
    """Predicted seconds of a collective over all ranks, on the cluster of `plan`."""
    links = CostModel(each.profile, plan.cluster, plan.training).links(plan.cluster.num_devices, 1)
    return collective_s(each.kind, each.full_bytes, links)


def _seconds(plan: Plan, run: MeasuredStep) -> tuple[float, ...]:
    """Predicted seconds of a run on the cluster of `plan`: of its step, followed by those of each rank's compute if the
    run measured them. Of a run of one rank without peers only the seconds of its kernels."""
    model = CostModel(run.profile, plan.cluster, plan.training)
    found = priced_by(model, plan)
    if run.position is not None:
        return (all_kernels_s(model, plan, found)[run.position],)
    return (found.step_time_s, *(all_kernels_s(model, plan, found) if run.compute_s else ()))


def _moved(plan: Plan, device: Device, factors: Mapping[str, float]) -> Plan:
    """The plan with the moved device in its hosts; if hosts are of several kinds, with each kind moved by the
    factors."""
    if len(plan.cluster.kinds) == 1:
        return on_device(plan, device)
    return plan.model_copy(update={"cluster": turned_hosts(plan.cluster, factors)})


def _loss(residuals: Floats, point: Floats, spreads: Floats, noise: Floats) -> float:
    size = np.abs(residuals) / noise
    rho = np.where(size <= HUBER, size**2, HUBER * (2 * size - HUBER))
    return float(rho.sum() + ((point / spreads) ** 2).sum())


def _move(residuals: Floats, slopes: Floats, point: Floats, spreads: Floats, noise: Floats) -> Floats:
    """The move of the point that gives the least loss under the linearised model, by reweighted least squares; at most
    0.7 for each constant."""
    move: Floats = np.zeros(len(point))
    for _ in range(30):
        left = np.abs(residuals + slopes @ move) / noise
        pull = np.minimum(1.0, HUBER / np.maximum(left, 1e-9)) / noise**2
        matrix = slopes.T @ (pull[:, None] * slopes) + np.diag(1 / spreads**2)
        best = np.linalg.solve(matrix, slopes.T @ (pull * residuals) + point / spreads**2)
        move = -np.asarray(best, dtype=np.float64)
    clipped: Floats = np.clip(move, -0.7, 0.7)
    return clipped


def _best_on_the_way(
    predicted: Callable[[Floats], Floats],
    measured: Floats,
    point: Floats,
    move: Floats,
    spreads: Floats,
    here: Floats,
    noise: Floats,
) -> tuple[Floats, Floats]:
    """(predictions, point) after the whole move, half of it, a quarter, ...: the first that lessens the loss; without a
    move if none does."""
    loss = _loss(here - measured, point, spreads, noise)
    for share in (1.0, 0.5, 0.25, 0.125):
        there = predicted(point + share * move)
        if _loss(there - measured, point + share * move, spreads, noise) < loss:
            return there, point + share * move
    return here, point


def _share(value: float, factor: float) -> float:
    return min(1.0, value * factor)


def _matmul(device: Device, factor: float) -> Device:
    samples = {
        dtype: tuple((*sides, _share(share, factor)) for *sides, share in points)
        for dtype, points in device.matmul_samples.items()
    }
    return device.model_copy(
        update={
            "matmul_efficiency": _share(device.matmul_efficiency, factor),
            "low_precision_efficiency": _share(device.low_precision_efficiency, factor),
            "matmul_samples": samples,
            "product_speed": device.product_speed * factor,
            "low_precision_speed": device.low_precision_speed * factor,
        }
    )


def _attention(device: Device, factor: float) -> Device:
    backward = device.attention_backward_efficiency
    return device.model_copy(
        update={
            "attention_efficiency": _share(device.attention_efficiency, factor),
            "attention_backward_efficiency": None if backward is None else _share(backward, factor),
            "attention_speed": device.attention_speed * factor,
        }
    )


def _traffic(device: Device, factor: float) -> Device:
    kernels = {
        name: share if name in OPTIMIZER_BYTES else _share(share, factor)
        for name, share in device.kernel_efficiency.items()
    }
    usual = _share(device.bandwidth_efficiency, factor)
    return device.model_copy(update={"bandwidth_efficiency": usual, "kernel_efficiency": kernels})


def _optimizer(device: Device, factor: float) -> Device:
    kernels = {
        name: _share(device.kernel_efficiency.get(name, device.bandwidth_efficiency), factor)
        for name in OPTIMIZER_BYTES
    }
    return device.model_copy(update={"kernel_efficiency": {**device.kernel_efficiency, **kernels}})


def _launch(device: Device, factor: float) -> Device:
    return device.model_copy(update={"launch": device.launch * factor, "dispatch": device.dispatch * factor})


def _replica_overlap(device: Device, factor: float) -> Device:
    if device.replica_overlap is None:
        return device
    return device.model_copy(update={"replica_overlap": _share(device.replica_overlap, factor)})


def _link(field: str, part: str) -> Callable[[Device, float], Device]:
    def turn(device: Device, factor: float) -> Device:
        link: Link = getattr(device, field)
        return device.model_copy(update={field: link.model_copy(update={part: getattr(link, part) * factor})})

    return turn


def _collective(kind: str) -> Callable[[Device, float], Device]:
    def turn(device: Device, factor: float) -> Device:
        factors = {**device.collective_factors, kind: device.collective_factors.get(kind, 1.0) * factor}
        return device.model_copy(update={"collective_factors": factors})

    return turn


KNOBS: tuple[Knob, ...] = (
    Knob("matmul", ("matmul_efficiency", "matmul_samples", "product_speed"), 0.3, _matmul),
    Knob("attention", ("attention_efficiency", "attention_backward_efficiency", "attention_speed"), 0.4, _attention),
    Knob("memory traffic", ("bandwidth_efficiency", "kernel_efficiency"), 0.4, _traffic),
    Knob("optimizer", ("kernel_efficiency",), 0.4, _optimizer),
    Knob("launch", ("launch", "dispatch"), 0.5, _launch),
    Knob("link bandwidth", ("link.bandwidth",), 0.3, _link("link", "bandwidth")),
    Knob("link latency", ("link.latency",), 1.0, _link("link", "latency")),
    Knob("network bandwidth", ("network.bandwidth",), 0.3, _link("network", "bandwidth")),
    Knob("network latency", ("network.latency",), 1.0, _link("network", "latency")),
    Knob("replica overlap", ("replica_overlap",), 1.0, _replica_overlap),
    *(Knob(kind, ("collective_factors",), 0.4, _collective(kind)) for kind in COLLECTIVES),
)
"""What may be off. Spreads: assumptions, about as wide as the priors of the fit to published runs
(benchmarks/published/constants.py), and wider for latencies, which a backend decides."""
