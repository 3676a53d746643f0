"""Seconds of one collective over a group of ranks, from where those ranks really sit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...profiler.machine.cluster import Group, Link
from .elementwise import Values, choose, least

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "p2p", "all_to_all"]


@dataclass(frozen=True)
class GroupLinks:
    """A communication group with the links it runs over.

    devices_per_host: all of them talk at once (as the groups of one mesh axis do), so a host's network is shared
    evenly between them. flat: rings know nothing of hosts.
    """

    group: Group
    link: Link
    network: Link
    devices_per_host: int
    factors: tuple[tuple[str, float], ...] = ()
    flat: bool = False

    def factor(self, kind: CollectiveKind) -> float:
        """Measured time over the ideal ring for this backend; 1 where nothing was measured."""
        return dict(self.factors).get(kind, 1.0)


def collective_s(kind: CollectiveKind, full_bytes: float, links: GroupLinks) -> float:
    """Seconds of one collective of a tensor of `full_bytes` (gathered or reduced size, not one rank's shard).

    Inside a host a ring moves (n-1)/n of the tensor past each device. Across hosts the group's share of a host's
    network carries (h-1)/h of it while the ring inside goes on, so the slower of the two counts. Latency: one hop per
    rank inside a host, one per host across hosts. all_reduce is a reduce_scatter and an all_gather.
    A flat ring carries (n-1)/n of the tensor across hosts, too, in n-1 steps as long as the slowest hop.
    all_to_all is of one rank's tensor, of which every rank keeps 1/n and sends the rest, each part to another rank.
    A group of one costs 0.0. Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005 (ring).
    """
    if links.group.size == 1 or full_bytes == 0.0:
        return 0.0
    if kind == "p2p":
        return _neighbour_s(full_bytes, links) * links.factor(kind)
    if kind == "all_to_all":
        return exchange_s(full_bytes, full_bytes, links) * links.factor(kind)
    return ring_s(full_bytes, ring_rates(kind, links))


def ring_s(full_bytes: Values, rates: tuple[Values, Values]) -> Values:
    """Seconds of a ring's collective of tensors of `full_bytes`, at rates as of `ring_rates`; what is empty is free."""
    per_byte_s, latency_s = rates
    seconds: Values = choose(full_bytes > 0.0, full_bytes * per_byte_s + latency_s, 0.0)
    return seconds


def ring_rates(kind: CollectiveKind, links: GroupLinks) -> tuple[float, float]:
    """(seconds per byte of the full tensor, seconds of latency) of all_gather, reduce_scatter or all_reduce."""
    times = (2 if kind == "all_reduce" else 1) * links.factor(kind)
    inside, hosts, size = links.group.ranks_per_host, links.group.hosts, links.group.size
    inside_s = (size - 1) / size / links.link.bandwidth if inside > 1 else 0.0
    across_s = 0.0
    if hosts > 1:
        crossing = size if links.flat else hosts
        across_s = (crossing - 1) / crossing / (links.network.bandwidth * inside / links.devices_per_host)
    latency_s = (inside - 1) * links.link.latency + (hosts - 1) * links.network.latency
    if links.flat and hosts > 1:
        latency_s = (size - 1) * max(links.link.latency, links.network.latency)
    return times * max(inside_s, across_s), times * latency_s


RINGS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose seconds are linear in bytes, but for latency."""


def seconds_at_places(traffic: Sequence[tuple[CollectiveKind, float]], places: Sequence[GroupLinks]) -> list[float]:
    """[place] -> seconds of these collectives, each (kind, bytes): the bytes of all rings of a kind at once."""
    sums: dict[CollectiveKind, tuple[float, int]] = {}
    for kind, num_bytes in traffic:
        if num_bytes:
            total, calls = sums.get(kind, (0.0, 0))
            sums[kind] = total + num_bytes, calls + 1
    found = []
    for links in places:
        seconds = sum(collective_s(kind, size, links) for kind, size in traffic if kind not in RINGS)
        for kind in RINGS:
            if kind in sums:
                per_byte_s, latency_s = ring_rates(kind, links)
                seconds += sums[kind][0] * per_byte_s + sums[kind][1] * latency_s
        found.append(seconds)
    return found


def _neighbour_s(num_bytes: float, links: GroupLinks) -> float:
    """Seconds to hand a tensor to the next rank of the group; over the network if any neighbour is on another host, to
    which only the last of the group's ranks on a host sends."""
    if links.group.hosts > 1:
        share = links.group.ranks_per_host / links.devices_per_host
        return num_bytes / (links.network.bandwidth * share) + links.network.latency
    return num_bytes / links.link.bandwidth + links.link.latency


def exchange_s(inside_bytes: float, across_bytes: float, links: GroupLinks) -> float:
    """Seconds until every rank has sent its part to each of the others. inside_bytes, across_bytes: what one rank would
    send if all n parts of its tensor went over that link; they differ where what several ranks of a host want crosses
    the network once. Links inside hosts and the network work at the same time."""
    inside, size = links.group.ranks_per_host, links.group.size
    if size == 1:
        return 0.0
    inside_s = (inside - 1) / size * inside_bytes / links.link.bandwidth
    across_s = (size - inside) / size * across_bytes / (links.network.bandwidth / links.devices_per_host)
    latency_s = (links.link.latency if inside > 1 else 0.0) + _doublings(links.group.hosts) * links.network.latency
    return max(inside_s, across_s) + latency_s


def _doublings(hosts: int) -> int:
    return math.ceil(math.log2(hosts))


@dataclass(frozen=True)
class Exchanged:
    """Exposed seconds of a layer's exchanges on one axis for a micro-batch: of its forward, of its backward, and of
    what the backward repeats where the layer is run again."""

    forward_s: float
    backward_s: float
    again_s: float


def unhidden_s(comm_s: Values, share: float, compute_s: Values) -> Values:
    """What is left of communication where the stack hides a share of it behind the layer's work, as far as it goes."""
    return comm_s - least(share * comm_s, compute_s)


def exposed_s(comm_s: Values, compute_s: Values, overlap: Values, contention: float) -> Values:
    """Seconds that communication adds to a layer that computes `compute_s` meanwhile.

    Behind a share `overlap` of the compute time communication hides, yet slows it by `contention` of what is hidden.
    """
    hidden_s = least(comm_s, overlap * compute_s)
    return comm_s - hidden_s + contention * hidden_s
