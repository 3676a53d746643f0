"""The best plan at each of several points (GPUs, sequence length, batch): what it costs, where the kind of plan
changes, and what more of each resource would be worth there."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...profiler.machine.cluster import ClusterSpec
from ...profiler.machine.units import GIB, gpus_in_words
from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import estimate
from ..plan.document import Plan
from ..plan.pins import Pins
from ..plan.training import Objective, TrainingSpec
from ..solve.explore import Explorer
from .fitting import SEARCHED_S, fewest, fits, grown, spread_evenly
from .search import InfeasibleError, SearchResult, SolverError, search
from .sensitivity import scaled, sensitivity
from .why_not import best_of

ALMOST = 0.999
"""Only plans with a step below so many times the known one are looked for: prices need to be right to a tenth of a
percent."""

_PRICING_S = 30.0
"""Seconds for all searches at one point that price what more of each resource is worth."""

_NUMBERS = re.compile(r"(?: over)? \d+(?:x\d+)?(?: x \d+)?| \([^)]*\)| with sequence parallel")


@dataclass(frozen=True)
class Point:
    """One question of a sweep with its answer: a result, or why there is none (none: the same in two words)."""

    profile: ModelProfile
    cluster: ClusterSpec
    training: TrainingSpec
    result: SearchResult | None
    why: str = ""
    none: str = "nothing fits"

    @property
    def num_devices(self) -> int:
        """Number of GPUs."""
        return self.cluster.num_devices

    @property
    def kind(self) -> str:
        """Kinds of parallelism of the plan, without degrees ("FSDP + TP"); without a plan, that nothing fits, is legal,
        or was found."""
        return self.none if self.result is None else kind_in_words(self.result.plan)

    def cost_per_million(self, price_per_hour: float) -> float | None:
        """US dollars for a million tokens (samples, if the model has no sequence); None without a plan. price_per_hour:
        of one device."""
        if self.result is None:
            return None
        return self.num_devices * price_per_hour / 3600 / self.result.estimate.tokens_per_s * 1e6


@dataclass(frozen=True)
class LeftOut:
    """A question of a sweep that cannot be asked, and why; seq_len: None if no sequence length can be asked with so
    many GPUs."""

    num_devices: int
    seq_len: int | None
    why: str

    @property
    def name(self) -> str:
        """How people call the point: "8 GPUs, 4,096 tokens"."""
        length = "" if self.seq_len is None else f", {self.seq_len:,} tokens"
        return f"{gpus_in_words(self.num_devices)}{length}"


def left_out_in_words(left_out: Iterable[LeftOut]) -> list[str]:
    """One sentence for each reason, with all points that it excludes."""
    points: dict[str, list[str]] = {}
    for each in left_out:
        points.setdefault(each.why, []).append(each.name)
    return [f"left out: {'; '.join(names)}: {why}" for why, names in points.items()]


@dataclass(frozen=True)
class Price:
    """What more of one resource is worth: share by which the step of the best plan changes (negative: it gets
    shorter)."""

    name: str
    share: float


def kind_in_words(plan: Plan) -> str:
    """Kinds of parallelism of a plan, without degrees and schedules: "HSDP + TP + PP"."""
    return _NUMBERS.sub("", plan.label)


def sweep(
    jobs: Iterable[tuple[ModelProfile, ClusterSpec, TrainingSpec]],
    pins: Pins,
    time_limit_s: float = 60.0,
    progress: Callable[[str, float | None], None] = lambda *_: None,
) -> tuple[Point, ...]:
    """The answer at every point, in order; a point without a plan says why there is none."""
    points = []
    for profile, cluster, training in jobs:
        length = "" if profile.seq_len is None else f", {profile.seq_len:,} tokens"
        progress(f"{gpus_in_words(cluster.num_devices)}{length}", None)
        result, why, none = None, "", ""
        try:
            result = search(profile, cluster, training, pins=pins, time_limit_s=time_limit_s, beside_open=False)
        except (InfeasibleError, SolverError) as error:
            why, none = str(error), "nothing fits" if getattr(error, "shown", False) else "nothing found"
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            why, none = str(error), "nothing legal"
        points.append(Point(profile, cluster, training, result, why, none))
    return tuple(points)


def changes_of_kind(points: Sequence[Point]) -> list[str]:
    """For each sequence length a sentence that says which kind of plan is best from how many GPUs on."""
    sentences = []
    for length in dict.fromkeys(point.profile.seq_len for point in points):
        line = sorted((p for p in points if p.profile.seq_len == length), key=lambda p: p.num_devices)
        runs = [(kind, [p.num_devices for p in same]) for kind, same in groupby(line, key=lambda p: p.kind)]
        words = [
            f"{kind} {'at' if len(counts) == 1 else 'from'} {counts[0]:,}{f' to {counts[-1]:,}' if counts[1:] else ''}"
            for kind, counts in runs
        ]
        where = "" if length is None else f"{length:,} tokens: "
        changes = f"the kind changes {_times(len(runs) - 1)}" if len(runs) > 1 else "one kind throughout"
        noun = gpus_in_words(runs[-1][1][-1]).partition(" ")[2]
        sentences.append(f"{where}{changes}: {', '.join(words)} {noun}")
    return sentences


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def marginal_prices(point: Point, pins: Pins) -> tuple[Price, ...]:
    """What more of each resource is worth at a point, most first; for each the job is planned again. Empty without a
    plan."""
    if point.result is None:
        return ()
    deadline = time.monotonic() + _PRICING_S
    cluster = point.cluster
    known = [point.result.plan, *(each.plan for each in point.result.runners_up if each.plan is not None)]
    base_s = point.result.certificate.fastest_s
    richer = {"1 GiB more per GPU": _with_memory(cluster, GIB), "2x compute": scaled(cluster, "compute", 2.0)}
    richer["2x device memory bandwidth"] = scaled(cluster, "device memory", 2.0)
    if cluster.devices_per_host > 1:
        richer["2x link bandwidth inside hosts"] = scaled(cluster, "links in a host", 2.0)
    if cluster.num_hosts > 1:
        richer["2x network bandwidth"] = scaled(cluster, "network", 2.0)
    best_s = {name: _best_s(point, more, known, pins, deadline, base_s) for name, more in richer.items()}
    prices = [Price(name, seconds / base_s - 1) for name, seconds in best_s.items()]
    return tuple(sorted(prices, key=lambda price: price.share))


def _best_s(
    point: Point, cluster: ClusterSpec, known: Sequence[Plan], pins: Pins, deadline: float, before_s: float
) -> float:
    """Seconds of the fastest step on a cluster with more of some resource: that of the fastest known plan there, or of
    a faster one, if the search finds any. known: plans that fit on the point's own cluster, and so on this one;
    before_s: fastest step on the point's own."""
    moved = [estimate(plan.model_copy(update={"cluster": cluster}), point.profile) for plan in known]
    found_s = min(before_s, *(each.step_time_s for each in moved))
    explorer = Explorer(point.profile, cluster, point.training, pins.framework)
    other = best_of(explorer, pins, deadline, ALMOST * found_s)
    return found_s if other is None else min(found_s, other[1].step_time_s)


def _with_memory(cluster: ClusterSpec, more_bytes: float) -> ClusterSpec:
    hosts = tuple(
        group.model_copy(
            update={"device": group.device.model_copy(update={"memory": group.device.memory + more_bytes})}
        )
        for group in cluster.hosts
    )
    return cluster.model_copy(update={"hosts": hosts})


def robustness(point: Point) -> str:
    """A sentence that says whether the plan stays the best of those that were priced, if any constant of the cluster is
    20% lower or higher; "" without a plan."""
    if point.result is None:
        return ""
    result = point.result
    shifts = sensitivity(result.plan, result.estimate, point.profile, result.alternatives)
    overtaken = [(shift.name, shift.overtaken_by) for shift in shifts if shift.overtaken_by is not None]
    if overtaken:
        cases = (f"with {name} at {by.change}, {by.label} would be over 1% faster" for name, by in overtaken)
        return f"not the best everywhere within +-20%: {'; '.join(cases)}"
    largest = shifts[0]
    worst = max(largest.lower_s, largest.higher_s) / result.estimate.step_time_s - 1
    return (
        "robust: with any number of the cluster 20% lower or higher, no other layout that was priced is over 1% "
        f"faster; the step hangs most on {largest.name} (up to {worst:+.0%})"
    )


def cluster_for(
    objective: Objective, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, pins: Pins
) -> tuple[ClusterSpec, str]:
    """(the part of a cluster that an objective asks for, a clause on it). The part has equal devices, spread evenly
    over as few hosts as hold them; the batch stays the same.

    throughput: the whole cluster. min-gpus: the fewest devices on which anything fits. cost: the number of devices with
    the lowest cost of a token; the price of a device does not matter, as all are equal. The whole cluster if no part
    does.
    """
    if objective is Objective.THROUGHPUT:
        return cluster, ""
    if any(group.device != cluster.hosts[0].device for group in cluster.hosts):
        raise ValueError(
            f"--objective {objective} chooses among equal devices; {cluster.name} has several kinds: give --gpus and "
            "--device of one"
        )
    counts = spread_evenly(cluster, cluster.num_devices)
    spread = "" if cluster.num_hosts == 1 else ", spread evenly over as few hosts as hold them"
    if objective is Objective.MIN_GPUS:
        deadline = time.monotonic() + SEARCHED_S

        def would_do(count: int) -> bool | None:
            return fits(Explorer(profile, grown(cluster, count), training, pins.framework), pins, deadline)

        found = fewest(counts, would_do)
        part = cluster if found.count is None else grown(cluster, found.count)
        which = "the fewest that this job fits on" if found.shown else "the fewest found that this job fits on"
        return part, f"{_used(cluster, part)}: {which}{spread} (--objective min-gpus)"
    cost: dict[int, float] = {}
    for count in (count for count in counts if count & (count - 1) == 0 or count == cluster.num_devices):
        explorer = Explorer(profile, grown(cluster, count), training, pins.framework)
        other = best_of(explorer, pins, time.monotonic() + 10.0)
        if other is not None:
            cost[count] = count * other[1].step_time_s
    # Where nothing fits, the whole cluster's search says why.
    part = grown(cluster, min(cost, key=lambda count: cost[count], default=cluster.num_devices))
    why = "a token costs least there, of the powers of two up to all of them"
    return part, f"{_used(cluster, part)}: {why}{spread} (--objective cost)"


def _used(cluster: ClusterSpec, part: ClusterSpec) -> str:
    return f"{part.num_devices:,} of {gpus_in_words(cluster.num_devices)}"
