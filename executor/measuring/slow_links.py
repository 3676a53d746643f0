"""Finds hosts with a slow link, by rates between pairs of hosts (exchange_times.py). Needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...planner.cost.refit import NOISE
from ...profiler.machine.cluster import ClusterSpec
from .significance import CONFIDENCE, means_of_alike, ratio_of


@dataclass(frozen=True)
class SlowLink:
    """A host with a slow link. host: its number in the cluster. ratio: how many times as long bytes take to and from it
    as between the others; low, high: interval of the ratio."""

    host: int
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"bytes to and from host {self.host} take {self.ratio:.2f} times as long as between the others "
            f"({self.low:.2f} to {self.high:.2f} at {CONFIDENCE:.0%})"
        )


def slow_links(rates: Sequence[Sequence[float]]) -> tuple[SlowLink, ...]:
    """Hosts whose link is slower than the median of the others' (of an even number the faster of the two in the middle)
    by more than repeats of one run differ. rates: [repeat][host] -> bytes per second."""
    found = []
    for host in range(len(rates[0]) if rates else 0):
        logs = []
        for each in rates:
            others = sorted(rate for other, rate in enumerate(each) if other != host)
            logs.append(math.log(others[len(others) // 2] / max(each[host], 1.0)))
        ratio, low, high = ratio_of(logs, len(rates[0]))
        if low > 1 + NOISE:
            found.append(SlowLink(host, ratio, low, high))
    return tuple(found)


def with_slow_links(cluster: ClusterSpec, slow: Sequence[SlowLink]) -> ClusterSpec:
    """The cluster with slower networks of these hosts. Hosts whose ratios differ no more than repeats of a run get one
    network, by their mean."""
    told = cluster.network
    ratios = means_of_alike({each.host: each.ratio for each in slow}, NOISE)
    rates = {host: told.bandwidth / ratio for host, ratio in ratios.items()}
    return cluster.changed({}, {host: told.model_copy(update={"bandwidth": rate}) for host, rate in rates.items()})
