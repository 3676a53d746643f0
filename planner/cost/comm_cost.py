"""Seconds of one collective over a group of ranks, from the hosts on which those ranks lie."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal

import numpy as np

from ...profiler.machine.cluster import Group, Link
from ..arrays import Floats
from .elementwise import Values, choose, least, most, root
from .kernels import ExchangeRates, RingRates

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "p2p", "all_to_all"]


@dataclass(frozen=True)
class GroupLinks:
    """A communication group and the links it runs over.

    devices_per_host: all of them communicate at once (as the groups of one mesh axis do), so they share the network of
    their host evenly, and also links inside a host that all traffic passes. flat: rings do not know which ranks share a
    host. rings: measured rates of collectives between such devices, if there are any.
    """

    group: Group
    link: Link
    network: Link
    devices_per_host: int
    factors: tuple[tuple[str, float], ...] = ()
    flat: bool = False
    rings: RingRates | None = None

    def factor(self, kind: CollectiveKind) -> float:
        """Measured time over that of the ideal ring with this backend; 1 if it was not measured."""
        return dict(self.factors).get(kind, 1.0)


def collective_s(kind: CollectiveKind, full_bytes: float, links: GroupLinks) -> float:
    """Seconds of one collective of a tensor of `full_bytes` (gathered or reduced size, not one rank's shard).

    Inside a host a ring moves (n-1)/n of the tensor past each device. Across hosts the group's share of a host's
    network carries (h-1)/h of it while the ring inside goes on, so the slower of the two counts. Latency: one hop per
    rank inside a host, one per host across hosts. all_reduce is a reduce_scatter and an all_gather. Where more is known
    of the links (RingRates), a pipeline has to be filled, too, latency between hosts is a tree's, and rings of NCCL
    carry (n-1)/n of the tensor across hosts as well, all but an all-reduce between two hosts, whose trees carry half:
    measured on 4 to 1,024 hosts, it moves as many bytes per second whatever their number.
    A flat ring carries (n-1)/n of the tensor across hosts, too, in n-1 steps as long as the slowest hop.
    all_to_all is of one rank's tensor, of which every rank keeps 1/n and sends the rest, each part to another rank.
    A group of one costs 0.0. Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005 (ring).
    """
    if links.group.size == 1 or full_bytes == 0.0:
        return 0.0
    return collective_seconds(kind, full_bytes, links)


def collective_seconds(kind: CollectiveKind, full_bytes: Values, links: GroupLinks) -> Values:
    """Seconds as `collective_s` gives them, for one tensor or a table of tensors; no tensor is empty, and the group has
    several ranks."""
    if kind == "p2p":
        return _neighbour_s(full_bytes, links) * links.factor(kind)
    if kind == "all_to_all":
        return exchange_s(full_bytes, full_bytes, links) * links.factor(kind)
    return ring_s(full_bytes, ring_rates(kind, links))


@dataclass(frozen=True)
class RingTimes(Generic[Values]):
    """Coefficients of the seconds of a ring's collective: per byte of the full tensor, of latency, and per square root
    of a byte, for filling its pipeline. A tensor that is cut into the best number of pieces, each of which passes every
    hop before the next rank can begin, takes moving + latency + 2 sqrt(moving latency). Only a share of the last term
    is paid (RingRates.ramp)."""

    per_byte_s: Values
    latency_s: Values
    per_root_s: Values


def ring_s(full_bytes: Values, times: RingTimes[Values] | RingTimes[float]) -> Values:
    """Seconds of a ring's collective of tensors with `full_bytes`, by the coefficients of `ring_rates`; empty tensors
    take none."""
    moving_s = full_bytes * times.per_byte_s + root(full_bytes) * times.per_root_s
    seconds: Values = choose(full_bytes > 0.0, moving_s + times.latency_s, 0.0)
    return seconds


def ring_rates(kind: CollectiveKind, links: GroupLinks) -> RingTimes[float]:
    """Coefficients of the seconds of an all_gather, reduce_scatter or all_reduce over these links."""
    times = 2 if kind == "all_reduce" else 1
    inside, hosts, size = links.group.ranks_per_host, links.group.hosts, links.group.size
    speed, rings = links.link.bandwidth, links.rings
    if rings is not None and inside > 1:
        speed *= rings.bandwidth(inside, links.devices_per_host) * (rings.reduced if kind == "all_reduce" else 1.0)
    inside_s = (size - 1) / size / speed if inside > 1 else 0.0
    across_s = 0.0
    if hosts > 1:
        share = min(inside, inside if rings is None else RING_CARDS) / links.devices_per_host
        across_s = _crossing(kind, links) / (links.network.bandwidth * share)
    hops, base_s = hosts - 1.0, 0.0 if rings is None else rings.base
    if rings is not None and hosts > 1:
        hops, base_s = TREE_HOPS * math.log2(hosts), base_s + times * NETWORK_BASE_S
    latency_s = (inside - 1) * _hop_s(links) + hops * links.network.latency
    if links.flat and hosts > 1:
        latency_s = (size - 1) * max(links.link.latency, links.network.latency)
    slower = links.factor(kind)
    per_byte_s, latency_s = times * slower * max(inside_s, across_s), times * slower * latency_s + base_s
    return RingTimes(per_byte_s, latency_s, _filling_s(per_byte_s, latency_s, rings))


def _crossing(kind: CollectiveKind, links: GroupLinks) -> float:
    """Share of the tensor that leaves a host in one pass of a ring."""
    hosts, size = links.group.hosts, links.group.size
    if links.flat or (links.rings is not None and (hosts > 2 or kind != "all_reduce")):
        return (size - 1) / size
    return (hosts - 1) / hosts


def _hop_s(links: GroupLinks) -> float:
    """Seconds that a small message takes for one hop inside a host."""
    return links.link.latency * (1.0 if links.rings is None else links.rings.hop)


def _filling_s(moving_s: Values, latency_s: float, rings: RingRates | None) -> Values:
    """Seconds to fill the pipeline of a collective whose bytes move for `moving_s`."""
    ramp = 0.0 if rings is None else rings.ramp
    filling_s: Values = 2.0 * ramp * root(moving_s * latency_s)
    return filling_s


NETWORK_BASE_S = 3.13e-5
"""Seconds of the smallest all-gather or reduce-scatter between hosts, without its hops: half of what was fitted to
all-reduces, which are one of each."""

TREE_HOPS = 2.08
"""Hops of a ring in whose time a tree reaches twice as many hosts. Fitted to all-reduce over 2 to 1,024 hosts:
benchmarks/published/fitted/components.md. All-gathers and reduce-scatters are taken to do alike, as NCCL's do since
2.23 (PAT); with rings' hops, steps on 4,000 GPUs and more come out 20-35% too long."""

RING_CARDS = 8
"""Ranks of a host whose network cards one collective's channels use, at most: all-reduce over 2 and over 20 racks of 72
GPUs with a card of 50 GB/s each moves 405 to 413 GB/s out of a rack (CoreWeave, nccl-tests)."""


RINGS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose seconds are latency, plus terms linear in the bytes and in their square root."""


def seconds_at_places(
    traffic: Sequence[tuple[CollectiveKind, Floats]], places: Sequence[GroupLinks], count: int
) -> Floats:
    """[place][size] -> seconds that these collectives take together. traffic: (kind, [size] -> bytes) of each; places:
    links of the group at each place on the hosts; count: number of sizes."""
    found = np.zeros((len(places), count))
    for kind in dict.fromkeys(kind for kind, _ in traffic):
        each = np.array([num_bytes for other, num_bytes in traffic if other == kind])
        total, roots, calls = each.sum(axis=0), np.sqrt(each).sum(axis=0), (each > 0.0).sum(axis=0)
        for place, links in enumerate(places):
            if kind in RINGS:
                times = ring_rates(kind, links)
                found[place] += total * times.per_byte_s + roots * times.per_root_s + calls * times.latency_s
            elif links.group.size > 1:
                found[place] += np.where(each > 0.0, collective_seconds(kind, each, links), 0.0).sum(axis=0)
    return found


def _neighbour_s(num_bytes: Values, links: GroupLinks) -> Values:
    """Seconds to hand a tensor to the next rank of the group. It crosses the network if any neighbours are on different
    hosts; then only the group's last rank on each host sends there."""
    if links.group.hosts > 1:
        share = links.group.ranks_per_host / links.devices_per_host
        return num_bytes / (links.network.bandwidth * share) + links.network.latency
    shared = 1.0 if links.rings is None else links.rings.sharing(links.devices_per_host)
    return num_bytes / (links.link.bandwidth * shared) + links.link.latency


def exchange_s(inside_bytes: Values, across_bytes: Values, links: GroupLinks) -> Values:
    """Seconds until every rank has sent its part to each of the others. inside_bytes, across_bytes: the bytes of one
    rank's tensor, if all n parts went over the links inside hosts, or over the network. The second are fewer if what
    several ranks of a host want crosses the network once. Both kinds of links work at the same time."""
    inside, size, rings = links.group.ranks_per_host, links.group.size, links.rings
    if size == 1:
        return 0.0 * inside_bytes
    speed = links.link.bandwidth
    if rings is not None and inside > 1:
        speed *= rings.bandwidth(inside, links.devices_per_host) * rings.exchanged
    inside_s = (inside - 1) / size / speed * inside_bytes
    across_s = (size - inside) / size / (links.network.bandwidth / links.devices_per_host) * across_bytes
    beside = min(inside, 2) - 1
    across_latency_s = _doublings(links.group.hosts) * links.network.latency + (0.0 if rings is None else rings.base)
    latency_s = beside * _hop_s(links) + across_latency_s
    slower_s = inside_s if links.group.hosts == 1 else most(inside_s, across_s)
    return slower_s + latency_s + _filling_s(slower_s, (inside - 1) * _hop_s(links) + across_latency_s, rings)


@dataclass(frozen=True)
class ExpertGroups:
    """Equal groups of neighbouring experts. A router first takes `chosen` of the groups for a token, and then its
    experts from those alone: "node-limited routing", DeepSeek-V3 (arXiv 2412.19437), section 2.1.2."""

    count: int = 1
    chosen: int = 1


ONE_GROUP = ExpertGroups()
"""For routers that choose among all experts."""


def direct_s(
    tokens: Values,
    row_bytes: Values,
    copies: Values,
    links: GroupLinks,
    units: float,
    rates: ExchangeRates,
    groups: ExpertGroups = ONE_GROUP,
) -> Values:
    """Seconds that kernels on `units` multiprocessors take to send a rank's tokens to their experts, or to bring them
    back (DeepEP, HybridEP). A token goes once to each rank that has any of its experts, and crosses the network once
    for each such host.

    row_bytes: bytes of one token. copies: experts that a token goes to, drawn at random from its groups.
    Multiprocessors, links inside hosts and the network work at the same time; the slowest counts most.
    """
    size, hosts = links.group.size, links.group.hosts
    if size == 1:
        return 0.0 * tokens
    reached = places_reached(size, copies, groups)
    beside = links.group.ranks_per_host
    units_s = tokens * (row_bytes * (reached + rates.own) + rates.header * reached) / (rates.unit * units)
    inside_s = tokens * row_bytes * reached * (beside - 1) / beside / (rates.reach * links.link.bandwidth)
    across = places_reached(hosts, copies, groups) * (hosts - 1) / hosts
    network = links.network.bandwidth / links.devices_per_host
    across_s = tokens * row_bytes * across / (rates.network * network)
    slowest_s: Values = (units_s**4 + inside_s**4 + across_s**4) ** 0.25
    return slowest_s + rates.launch


def places_reached(places: int, copies: Values, groups: ExpertGroups = ONE_GROUP) -> Values:
    """Mean number of places (ranks or hosts), out of so many with equally many neighbouring experts each, on which the
    experts of a token lie. `copies` experts are drawn at random from the groups that are drawn first. If neither the
    number of places nor that of groups is a multiple of the other, groups are ignored, which gives no fewer places."""
    whole, left = divmod(groups.count, places)
    if whole == 0 and places % groups.count == 0:
        return _drawn(places * groups.chosen // groups.count, copies)
    if left or groups.chosen == groups.count:
        return _drawn(places, copies)
    ways = math.comb(groups.count, groups.chosen)
    missed: Values = 0.0 * copies
    for here in range(min(whole, groups.chosen) + 1):
        share = math.comb(whole, here) * math.comb(groups.count - whole, groups.chosen - here) / ways
        missed = missed + share * (1.0 - here / groups.chosen) ** copies
    return places * (1.0 - missed)


def _drawn(places: int, copies: Values) -> Values:
    missed: Values = (1.0 - 1.0 / places) ** copies
    return places * (1.0 - missed)


def _doublings(hosts: int) -> int:
    return math.ceil(math.log2(hosts))


@dataclass(frozen=True)
class Exchanged:
    """Exposed seconds of a layer's exchanges on one mesh axis for a micro-batch: in the forward, in the backward, and
    in the recompute of the layer."""

    forward_s: float
    backward_s: float
    again_s: float


def unhidden_s(comm_s: Values, share: float, compute_s: Values, taken: float = 0.0) -> Values:
    """Seconds that communication adds if the stack hides a share of it behind the layer's work, at most as long as that
    lasts. taken: share of the device that hidden communication occupies, by which the layer's work gets slower
    meanwhile."""
    return comm_s - (1.0 - taken) * least(share * comm_s, compute_s)


def exposed_s(comm_s: Values, compute_s: Values, overlap: Values, contention: float) -> Values:
    """Seconds that communication adds to a layer that computes for `compute_s` meanwhile.

    Communication hides behind at most a share `overlap` of the compute time. What is hidden slows the compute by
    `contention` times its own seconds.
    """
    hidden_s = least(comm_s, overlap * compute_s)
    return comm_s - hidden_s + contention * hidden_s
