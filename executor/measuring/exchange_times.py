"""Times exchanges between ranks: between pairs of hosts, and collectives over all ranks, some milliseconds each."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ...planner.cost.comm_cost import CollectiveKind
from ...planner.plan.document import Plan
from ..torch_compat import all_gather_single, reduce_scatter_single
from .exchanges import KINDS, TimedExchanges, collective_sizes
from .measurement import quantile

FEWEST_HOSTS = 3
"""Least number of hosts for rates to be measured: two hosts have a single link, so it is not known which one is
slow."""

PARTNERS = 8
"""Most partners that a host is paired with. Its fastest pair counts, so that it is not taken for slow because one of
its partners is."""

REPEATS = 3
"""Repeats of every exchange, after a first one that opens connections: the fewest with which a single wrong one shows
in the interval. All exchanges took 2 to 4 s between four emulated hosts of 12.5 to 25 MB/s."""

MESSAGE_S = 0.01
"""Seconds that a message should take at the declared rate, by which its size is chosen. Tried with 40 MB/s declared and
links of 25 and 12.5 MB/s: rates came out within 5%."""

LEAST_BYTES, MOST_BYTES = 1 << 16, 1 << 23
"""Limits of one rank's message in bytes. Assumptions: the least is as small as gloo's messages can be told from
latency; the most is small beside what a plan's margin leaves free."""

Place = tuple[int, int]
"""(number of its host in the cluster, its number on that host) of a process."""


def pairings(hosts: int, most: int = PARTNERS) -> list[dict[int, int]]:
    """At most so many rounds: host -> its partner. In each round a host has another partner; if their number is odd,
    one host has none. (The circle method of a round-robin tournament.)"""
    seats = hosts + hosts % 2
    rounds = []
    for turn in range(seats - 1):
        order = [seats - 1, *((turn + i) % (seats - 1) for i in range(seats - 1))]
        pairs = list(zip(order[: seats // 2], reversed(order[seats // 2 :]), strict=True))
        both = [*pairs, *((b, a) for a, b in pairs)]
        rounds.append({a: b for a, b in both if max(a, b) < hosts})
    step = max(1, len(rounds) // most)
    return rounds[::step][:most]


def exchange_times(
    plan: Plan, processes: Sequence[int], device: torch.device, words: dist.ProcessGroup | None = None
) -> TimedExchanges:
    """What the ranks of a plan take to exchange bytes. All of them must call it.

    processes: [rank of the plan] -> process of the default group, whose backend carries tensors of `device`. words: a
    gloo group for what ranks tell each other; None: the default group is one.
    """
    places = [plan.cluster.host_of(processes.index(process)) for process in range(len(processes))]
    rates = _host_rates(places, plan.cluster.between_hosts.bandwidth, device, words)
    return TimedExchanges(host_rates=rates, collectives=_collectives(collective_sizes(plan.cluster), device, words))


def _collectives(
    sizes: Sequence[int], device: torch.device, words: dist.ProcessGroup | None
) -> tuple[tuple[CollectiveKind, float, float], ...]:
    ranks, own = dist.get_world_size(), dict[tuple[CollectiveKind, float], list[float]]()
    for size in sizes:
        share = torch.ones(size // 4 // ranks, device=device)
        full = torch.ones(share.numel() * ranks, device=device)
        calls: dict[CollectiveKind, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, full),
            "all_gather": partial(all_gather_single, full, share),
            "reduce_scatter": partial(reduce_scatter_single, share, full),
        }
        for repeat in range(-1, REPEATS):
            for kind in KINDS:
                full.fill_(1.0)
                dist.barrier(group=words)
                seconds = _seconds(calls[kind], device)
                if repeat >= 0:  # the first opens connections
                    own.setdefault((kind, float(size)), []).append(seconds)
    found: list[dict[tuple[CollectiveKind, float], list[float]]] = [own] * ranks
    dist.all_gather_object(found, own, group=words)
    slowest = {key: [max(each) for each in zip(*(rank[key] for rank in found), strict=True)] for key in own}
    return tuple((kind, size, quantile(tuple(taken), 0.5)) for (kind, size), taken in slowest.items())


def _host_rates(
    places: Sequence[Place], bytes_per_s: float, device: torch.device, words: dist.ProcessGroup | None
) -> tuple[tuple[float, ...], ...]:
    """host_rates of TimedExchanges. places: [process]. bytes_per_s: declared rate of a host's link, by which the size
    of messages is chosen."""
    hosts = 1 + max(host for host, _ in places)
    if hosts < FEWEST_HOSTS:
        return ()
    ranks_each = max(number for _, number in places) + 1
    size = int(min(max(bytes_per_s * MESSAGE_S / ranks_each, LEAST_BYTES), MOST_BYTES))
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    at = {place: process for process, place in enumerate(places)}
    host, number = places[dist.get_rank()]
    rounds = pairings(hosts)
    seconds: list[list[float]] = []
    for repeat in range(-1, REPEATS):
        taken: list[float] = []
        for partners in rounds:
            partner = partners.get(host, -1)
            peer = at.get((partner, number))
            taken.append(0.0)
            for sends in (host < partner, host > partner):  # at once they sometimes took turns on gloo
                dist.barrier(group=words)
                if peer is not None:
                    passed_s = _seconds(partial(_pass, message, peer, sends), device)
                    taken[-1] = taken[-1] if sends else passed_s  # a sender may be done before it has arrived
        if repeat >= 0:
            seconds.append(taken)
    found: list[list[list[float]]] = [[] for _ in places]
    dist.all_gather_object(found, seconds, group=words)
    return tuple(rates_of([own[repeat] for own in found], places, size, rounds) for repeat in range(REPEATS))


def _pass(message: torch.Tensor, peer: int, sends: bool) -> None:
    """Send a message to another rank, or receive one."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if sends else dist.irecv, message, peer)]):
        work.wait()


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    began = time.perf_counter()
    call()
    _wait_for(device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rates_of(
    seconds: Sequence[Sequence[float]], places: Sequence[Place], size: int, rounds: Sequence[dict[int, int]]
) -> tuple[float, ...]:
    """[host] -> bytes per second in the host's fastest round: what all ranks of one direction got, over the time of the
    slowest rank of both directions. seconds: [process][round], 0.0 for those who got nothing. size: bytes of a
    message."""
    best = [0.0] * (1 + max(host for host, _ in places))
    for turn, partners in enumerate(rounds):
        for host, partner in partners.items():
            pair = zip(places, seconds, strict=True)
            taken = [own[turn] for (at, _), own in pair if at in (host, partner) and own[turn]]
            if taken:
                best[host] = max(best[host], len(taken) // 2 * size / max(taken))
    return tuple(best)
