"""What a job times of exchanges between ranks before its first step, for the fit of constants. Needs no torch."""

import math
from collections.abc import Sequence

from pydantic import NonNegativeFloat, PositiveFloat

from ...planner.cost.comm_cost import CollectiveKind
from ...planner.cost.refit import MeasuredCollective
from ...planner.plan.document import Plan
from ...profiler.document import Frozen
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from .measurement import quantile

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives that are timed over all ranks. Transfers between stages are not timed: who waits for them depends on the
schedule."""

_COLLECTIVE_S = 0.04
"""The larger tensor has so many bytes that it would pass the slowest link once in so many seconds, at its declared
rate. Tried with links of 25 MB/s: all-reduces took 1.09 times the ideal ring, and 1.06 times in a long measurement."""

_PARTS = (4, 1)
"""The larger tensor over each of those that are timed: two sizes tell latency from bandwidth."""

_LEAST_BYTES, _MOST_BYTES = 1 << 18, 1 << 25
"""Limits of the larger tensor. Assumptions: times of smaller ones vary too much (at 64 KiB by 15% and more between
shaped links), and a larger one may not fit beside what the job holds."""


class TimedExchanges(Frozen):
    """host_rates: [repeat][host] -> bytes per second between a host and the partner with which it is fastest, in the
    slower direction; () for fewer than three hosts. collectives: (kind, bytes of the full tensor, median seconds of the
    slowest rank), over all ranks."""

    host_rates: tuple[tuple[NonNegativeFloat, ...], ...] = ()
    collectives: tuple[tuple[CollectiveKind, PositiveFloat, PositiveFloat], ...] = ()


def collective_sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Bytes of the tensors in collectives over all ranks of a cluster; each gives every rank a whole number of fp32."""
    link = cluster.between_hosts if cluster.num_hosts > 1 else cluster.link
    unit = 4 * cluster.num_devices
    largest = min(max(link.bandwidth * _COLLECTIVE_S, _LEAST_BYTES), _MOST_BYTES)
    return tuple(unit * max(1, int(largest / part / unit)) for part in _PARTS)


def expected_collectives(plan: Plan, profile: ModelProfile) -> list[MeasuredCollective]:
    """The collectives that a job by this plan will time before its first step; their seconds are not known yet."""
    if plan.degrees.num_devices == 1:
        return []
    sizes = collective_sizes(plan.cluster)
    return [MeasuredCollective(kind, float(size), math.nan, plan, profile) for size in sizes for kind in KINDS]


def measured_collectives(found: Sequence[tuple[Plan, ModelProfile, TimedExchanges]]) -> list[MeasuredCollective]:
    """Each collective once, with its median over all jobs that timed it. found: jobs on clusters with equally many
    ranks."""
    seconds: dict[tuple[CollectiveKind, float], list[float]] = {}
    for _, _, exchanged in found:
        for kind, size, taken in exchanged.collectives:
            seconds.setdefault((kind, size), []).append(taken)
    return [
        MeasuredCollective(kind, size, quantile(tuple(taken), 0.5), *found[0][:2])
        for (kind, size), taken in seconds.items()
    ]
