"""What the ranks of a job take to exchange bytes before its first step, and what of it constants are fitted to. Needs
no torch."""

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
"""What is timed over all ranks. Transfers between stages are not: who waits for them is the schedule's matter."""

_COLLECTIVE_S = 0.04
"""Seconds in which the larger tensor would pass the slowest link once, at the rate that is told. Tried with links of 25
MB/s: all-reduces 1.09 times the ideal ring, which a long measurement has at 1.06."""

_PARTS = (4, 1)
"""The larger tensor over those that are timed: two sizes tell latency from bandwidth."""

_LEAST_BYTES, _MOST_BYTES = 1 << 18, 1 << 25
"""Of the larger tensor. Assumptions: smaller ones vary too much (at 64 KiB by 15% and more between shaped links), and a
larger one may not fit beside what the job holds."""


class TimedExchanges(Frozen):
    """host_rates: [repeat][host] bytes per second that pass between a host and that one of its partners with which it
    is fastest, in the slower direction; () for fewer than three hosts. collectives: (kind, bytes of the full tensor,
    median seconds of the slowest rank) over all ranks."""

    host_rates: tuple[tuple[NonNegativeFloat, ...], ...] = ()
    collectives: tuple[tuple[CollectiveKind, PositiveFloat, PositiveFloat], ...] = ()


def collective_sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Bytes of the tensors that are exchanged over all ranks of a cluster, each a whole number of fp32 on all ranks."""
    link = cluster.between_hosts if cluster.num_hosts > 1 else cluster.link
    unit = 4 * cluster.num_devices
    largest = min(max(link.bandwidth * _COLLECTIVE_S, _LEAST_BYTES), _MOST_BYTES)
    return tuple(unit * max(1, int(largest / part / unit)) for part in _PARTS)


def expected_collectives(plan: Plan, profile: ModelProfile) -> list[MeasuredCollective]:
    """What a job by this plan will exchange before its first step, not measured yet."""
    if plan.degrees.num_devices == 1:
        return []
    sizes = collective_sizes(plan.cluster)
    return [MeasuredCollective(kind, float(size), math.nan, plan, profile) for size in sizes for kind in KINDS]


def measured_collectives(found: Sequence[tuple[Plan, ModelProfile, TimedExchanges]]) -> list[MeasuredCollective]:
    """Each collective once, by its median over all jobs that timed it. found: of jobs on clusters of as many ranks."""
    seconds: dict[tuple[CollectiveKind, float], list[float]] = {}
    for _, _, exchanged in found:
        for kind, size, taken in exchanged.collectives:
            seconds.setdefault((kind, size), []).append(taken)
    return [
        MeasuredCollective(kind, size, quantile(tuple(taken), 0.5), *found[0][:2])
        for (kind, size), taken in seconds.items()
    ]
