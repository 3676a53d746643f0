"""Hosts on which a run computes slower than on the others, by its telemetry. Needs no torch.

What a rank computes in a step (rank_compute_s: the step without what it waits for) is divided by what its kernels are
predicted to take, so that stages of unequal length compare, and then by the same of the other hosts in the same step:
what slows all hosts at once, such as a longer batch, cancels. Of these ratios, one a step, the median counts, with the
interval between two of them in their order that holds the true median with 95% for all ranks together (the sign test's,
Bonferroni over the ranks); it asks nothing of the noise's shape, and a slow step more or less does not move it.

A rank is slow if the whole interval lies beyond what ranks differ by anyway. Beside ranks of the same layers on the
same device that is what repeats of one run differ by (refit.NOISE). Where no other host has any, the ratio leans on
the prediction of different layers, so that it is what that is usually off by. A host is as slow as its slowest rank,
for which the others of its groups wait.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...planner.cost.alone import kernels_s
from ...planner.cost.bands import time_band
from ...planner.cost.estimate import estimate
from ...planner.cost.refit import NOISE, slower
from ...planner.plan.document import Plan
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..reporting.run_diagnosis import UNKNOWN
from ..reporting.run_report import check_run_of
from ..run_document import load_run
from .measurement import WARM_UP_STEPS, quantile
from .significance import CONFIDENCE, means_of_alike, ratio_of

Floats = NDArray[np.float64]

Work = tuple[int, int]
"""What a rank computes, and on what: its pipeline coordinate, and the number of the first rank with an equal device."""

RECENT = 100
"""Number of last steps that are looked at: a host that has become slow is slow now, whatever it was before."""


class SpeedsUnknownError(ValueError):
    """A run does not tell how fast the hosts of a plan compute."""


@dataclass(frozen=True)
class SlowHost:
    """A host with slow ranks. host: its number in the cluster. ratio: how many times as long its slowest rank computes
    as the others do; low, high: interval of the ratio. beside: whether others compute the same layers."""

    host: int
    ranks: tuple[int, ...]
    ratio: float
    low: float
    high: float
    beside: bool

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        how = "beside ranks of the same layers" if self.beside else "by the prediction of their layers"
        return (
            f"host {self.host} ({ranks}) computes {self.ratio:.2f} times as long as the others ({self.low:.2f} to "
            f"{self.high:.2f} at {CONFIDENCE:.0%}, {how})"
        )


@dataclass(frozen=True)
class HostSpeeds:
    """What steps of a run tell about the speed of hosts. step_s: the median step. most: ratio of the slowest host, slow
    or not. threshold: a host is slow if its whole interval lies beyond. over_predicted: what all ranks compute, over
    what is predicted, in the median."""

    steps: int
    step_s: float
    slow: tuple[SlowHost, ...]
    most: float
    threshold: float
    over_predicted: float

    def __str__(self) -> str:
        if self.slow:
            return f"{'; '.join(map(str, self.slow))}, in {self.steps} steps"
        return (
            f"no host computes slower than the others in {self.steps} steps: the slowest takes {self.most:.2f} times "
            f"as long, {self.threshold:.2f} is what they differ by anyway; all compute {self.over_predicted:.2f} times "
            "as long as predicted, which `plan learn` fits the device to"
        )


def host_speeds(plan: Plan, profile: ModelProfile, path: Path) -> HostSpeeds:
    """Which hosts computed slower than the others in the last steps of a run by the plan.

    Raises SpeedsUnknownError if the run had other layers or hosts, does not say what ranks compute, or is too short;
    ValueError if it is a run of another model or layout.
    """
    header, steps = load_run(path, from_last_start=True)
    check_run_of(plan, header, path)
    if header.plan is not None and _what_ranks_do(header.plan) != _what_ranks_do(plan):
        raise SpeedsUnknownError(
            f"{path} is a run of another plan: {plan.label} as well, but with other layers on its ranks or on other "
            "hosts, so it shows no slow host"
        )
    ranks = plan.degrees.num_devices
    if ranks == 1:
        raise SpeedsUnknownError(f"{path} is a run of one rank: there is no other to be slower than")
    timed = steps[WARM_UP_STEPS:][-RECENT:]
    known = [step.rank_compute_s for step in timed if len(step.rank_compute_s) == ranks]
    if timed and not known:
        raise SpeedsUnknownError(
            f"{path} does not say what each rank computes (earlier versions did not write it, and on GPUs with sharded "
            "parameters it is not known), so it shows no slow host"
        )
    fewest = _fewest(ranks)
    if len(known) < fewest:
        raise SpeedsUnknownError(
            f"{path} has {len(steps)} steps since the run began or was resumed: {WARM_UP_STEPS} to warm up and at least"
            f" {fewest} more tell a slow one of {ranks} ranks from noise"
        )
    step_s = quantile(tuple(step.step_time_s for step in timed), 0.5)
    return _speeds(plan, profile, known, step_s)


def slow_in_laps(ran: Sequence[tuple[Plan, Sequence[tuple[float, ...]]]]) -> tuple[SlowHost, ...]:
    """Hosts whose ranks computed slower than others in laps of several plans on one cluster. Only plans count that give
    ranks of several hosts the same layers. Laps are few, and medians of steps, so the interval is Student's. ran:
    (plan, [lap][rank] -> seconds that it computes in a step)."""
    logs: dict[int, list[float]] = {}
    hosts: list[int] = []
    for plan, laps in ran:
        ranks = range(plan.degrees.num_devices)
        known = [lap for lap in laps if len(lap) == len(ranks)]
        hosts = [plan.cluster.host_of(rank)[0] for rank in ranks]
        work = [(plan.coordinates(rank)["pipeline"], 0) for rank in ranks]
        for rank in ranks if known and len(set(hosts)) > 1 else ():
            taken = np.maximum(np.array(known), 1e-9)
            others, beside = _others(taken, hosts, work, hosts[rank], work[rank])
            if beside:
                logs.setdefault(rank, []).extend(np.log(taken[:, rank] / others).tolist())
    slow: dict[int, list[SlowHost]] = {}
    for rank, found in logs.items():
        ratio, low, high = ratio_of(found, len(logs))
        if low > 1 + NOISE:
            slow.setdefault(hosts[rank], []).append(SlowHost(hosts[rank], (rank,), ratio, low, high, True))
    return tuple(_slowest(slow[host]) for host in sorted(slow))


def slower_cluster(
    cluster: ClusterSpec, slow: Sequence[SlowHost], source: str = "by the telemetry of a run"
) -> ClusterSpec:
    """The cluster with slower devices in the slow hosts: everything that they compute takes longer by the host's ratio.
    Hosts whose ratios differ no more than repeats of a run get the mean. source: where the ratios come from, in
    words."""
    ratios = means_of_alike({each.host: each.ratio for each in slow}, NOISE)
    own = {each.host: cluster.device_of(each.ranks[0]) for each in slow}
    return cluster.changed({host: slower(own[host], ratio, source) for host, ratio in ratios.items()})


def _what_ranks_do(plan: Plan) -> tuple[object, ...]:
    """All of a plan that determines which devices ranks have and what they compute."""
    return plan.cluster, plan.mesh_axes, plan.stages, plan.training, plan.micro_batch


def _speeds(plan: Plan, profile: ModelProfile, known: Sequence[tuple[float, ...]], step_s: float) -> HostSpeeds:
    ranks = range(plan.degrees.num_devices)
    positions = [plan.coordinates(rank)["pipeline"] for rank in ranks]
    hosts = [plan.cluster.host_of(rank)[0] for rank in ranks]
    devices = [plan.cluster.device_of(rank) for rank in ranks]
    work = [(positions[rank], devices.index(devices[rank])) for rank in ranks]
    told_s = _told_s(plan, profile, work)
    over = np.maximum(np.array(known), 1e-9) / np.array([told_s[each] for each in work])
    place = _place(len(known), len(ranks))
    band = time_band(plan)
    off = UNKNOWN if band is None else max(band.high, 1 / band.low)
    slow: dict[int, list[SlowHost]] = {}
    most, threshold = 0.0, 1 + NOISE
    others_of: dict[tuple[int, Work], tuple[Floats, bool]] = {}
    alone = len(set(hosts)) == 1
    for rank in ranks:
        key = (rank if alone else hosts[rank], work[rank])
        if key not in others_of:
            others_of[key] = _others(over, list(ranks) if alone else hosts, work, *key)
        others, beside = others_of[key]
        ratios = np.sort(over[:, rank] / others)
        ratio, low, high = (float(each) for each in (np.median(ratios), ratios[place], ratios[-1 - place]))
        least = 1 + NOISE if beside else max(1 + NOISE, off)
        if ratio > most:
            most, threshold = ratio, least
        if low > least:
            slow.setdefault(hosts[rank], []).append(SlowHost(hosts[rank], (rank,), ratio, low, high, beside))
    found_slow = tuple(_slowest(slow[host]) for host in sorted(slow))
    return HostSpeeds(len(known), step_s, found_slow, most, threshold, float(np.median(over)))


def _told_s(plan: Plan, profile: ModelProfile, work: Sequence[Work]) -> dict[Work, float]:
    """(pipeline coordinate, device) -> seconds that ranks with this work are predicted to compute, if all devices were
    equal to theirs."""
    found = {}
    for first in {first for _, first in work}:
        own = dict.fromkeys(range(plan.cluster.num_hosts), plan.cluster.device_of(first))
        moved = plan.model_copy(update={"cluster": plan.cluster.changed(own)})
        priced = estimate(moved, profile)
        for position in {position for position, device in work if device == first}:
            found[position, first] = kernels_s(moved, profile, priced, position)
    return found


def _slowest(found: Sequence[SlowHost]) -> SlowHost:
    """A host from its slow ranks, given one each: it is as slow as the slowest."""
    worst = max(found, key=lambda each: each.ratio)
    return replace(worst, ranks=tuple(rank for each in found for rank in each.ranks))


def _others(over: Floats, groups: Sequence[int], work: Sequence[Work], own: int, alike: Work) -> tuple[Floats, bool]:
    """([step] -> what ranks of other groups compute, over what is predicted; whether they compute the same layers).

    groups: [rank] -> its host, or the rank itself if there is one host. Of each group the median rank counts, and of
    the groups the median (of an even number the faster of the two in the middle): so slow groups, if fewer than half,
    do not hide each other.
    """
    elsewhere = [rank for rank, group in enumerate(groups) if group != own]
    same = [rank for rank in elsewhere if work[rank] == alike]
    by_group: dict[int, list[int]] = {}
    for rank in same or elsewhere:
        by_group.setdefault(groups[rank], []).append(rank)
    each = np.sort(np.stack([np.median(over[:, ranks], axis=1) for ranks in by_group.values()]), axis=0)
    return each[(len(each) - 1) // 2], bool(same)


def _fewest(ranks: int) -> int:
    """Least number of steps for which the interval of a median is finite."""
    return math.ceil(math.log2(2 * ranks / (1 - CONFIDENCE)))


def _place(steps: int, ranks: int) -> int:
    """How many of the smallest ratios lie below the interval of the median; as many of the largest lie above it."""
    chance = (1 - CONFIDENCE) / ranks
    missed = np.cumsum([2 * math.comb(steps, i) / 2**steps for i in range(steps)])
    return max(0, int(np.searchsorted(missed, chance, side="right")) - 1)
