"""What ranks exchange before a race's steps: who is paired with whom, whose links are slow, and what is timed."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from meshwright.executor.measuring.exchange_times import PARTNERS, exchange_times, pairings, rates_of
from meshwright.executor.measuring.exchanges import (
    KINDS,
    TimedExchanges,
    collective_sizes,
    expected_collectives,
    measured_collectives,
)
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.executor.measuring.slow_links import SlowLink, slow_links, with_slow_links
from meshwright.executor.reporting.report import hosts_in_order
from meshwright.planner.answers.explain import reason
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from support.synthetic import cluster, layer_class, profile

PROFILE = profile([layer_class("block", 1e9, 1_000_000, 1e6, 1e5)], [0] * 4)
PLAN = make_plan(
    PROFILE,
    cluster(4, 1),
    TrainingSpec(global_batch=8, seq_len=64),
    Shape(4, 1, 1, 1, micro_batch=2, num_microbatches=1),
    [[LayerOption("none", False)] * 4],
)


@pytest.mark.parametrize("hosts", range(3, 10))
def test_every_host_meets_every_other_once_each_round_another_and_at_most_so_many(hosts: int) -> None:
    rounds = pairings(hosts, most=hosts)

    met = [tuple(sorted(pair)) for partners in rounds for pair in partners.items() if pair[0] < pair[1]]
    assert sorted(met) == list(combinations(range(hosts), 2))
    assert all(partners[partners[host]] == host != partners[host] for partners in rounds for host in partners)
    assert len(pairings(64)) == PARTNERS
    assert all(len(partners) == 64 for partners in pairings(64))


def test_a_host_counts_by_its_fastest_pair_and_a_pair_by_its_slower_direction() -> None:
    rounds = [{0: 1, 1: 0, 2: 3, 3: 2}, {0: 2, 2: 0, 1: 3, 3: 1}]
    seconds = [[1.0, 2.0], [1.25, 4.0], [2.0, 2.5], [2.0, 2.0]]

    assert rates_of(seconds, [(host, 0) for host in range(4)], 100, rounds) == (80.0, 80.0, 50.0, 50.0)
    two_each = [(host, number) for host in range(2) for number in range(2)]
    both_ways = rates_of([[1.0], [0.5], [1.0], [0.8]], two_each, 100, [{0: 1, 1: 0}])
    assert both_ways == (200.0, 200.0), "two messages at once, until the slower of them was through"
    assert rates_of([[1.0], [1.0], [0.0]], [(0, 0), (1, 0), (2, 0)], 100, [{0: 1, 1: 0}]) == (100.0, 100.0, 0.0)


def noisy(*rates: float) -> list[list[float]]:
    """Three repeats, 1% apart."""
    return [[rate * (1 + 0.01 * ((host + repeat) % 3 - 1)) for host, rate in enumerate(rates)] for repeat in range(3)]


def test_hosts_behind_slower_links_are_found_and_noise_and_too_little_finds_none() -> None:
    assert [each.host for each in slow_links(noisy(25.0, 25.0, 12.5, 12.5))] == [2, 3]
    assert [each.host for each in slow_links(noisy(25.0, 20.0, 25.0))] == [1]
    (slow,) = slow_links(noisy(25.0, 25.0, 25.0, 12.5))
    assert slow.low < slow.ratio < slow.high
    assert slow.ratio == pytest.approx(2.0, rel=0.02)
    assert "bytes to and from host 3 take 2.0" in str(slow)
    assert slow_links(noisy(25.0, 25.0, 24.5, 25.0)) == ()
    assert slow_links(noisy(25.0, 25.0, 25.0, 12.5)[:1]) == (), "one repeat does not tell of the noise"
    assert slow_links([]) == ()


def test_hosts_get_networks_as_much_slower_and_those_alike_are_one_kind() -> None:
    told = cluster(4, 1)
    slow = [SlowLink(host, ratio, ratio, ratio) for host, ratio in ((1, 2.0), (2, 2.04), (3, 4.0))]

    found = with_slow_links(told, slow)

    networks = [group.network.bandwidth if group.network else None for group in found.hosts]
    assert networks == [None, pytest.approx(50e9 / 2.02), pytest.approx(50e9 / 4)]
    assert [group.count for group in found.hosts] == [1, 2, 1]
    assert len(found.kinds) == 3
    assert found.between_hosts.bandwidth == pytest.approx(50e9 / 4)
    assert found.network == told.network


@pytest.mark.parametrize(("pipeline", "as_slow_as_all"), [(2, False), (1, True)])
def test_stages_on_fast_hosts_exchange_fast_and_groups_over_all_hosts_as_the_slowest(
    pipeline: int, as_slow_as_all: bool
) -> None:
    schedule, batches = ("1f1b", 2) if pipeline == 2 else ("none", 1)
    many = Shape(1, 4 // pipeline, 1, pipeline, micro_batch=2, num_microbatches=batches, schedule=schedule)
    sharded = replace(many, reshard=True, gradient_sync="every")
    uneven = [3, 1] if pipeline == 2 else [4]
    options = [[LayerOption("none", True)] * count for count in uneven]
    plan = make_plan(PROFILE, cluster(4, 1), PLAN.training, sharded, options)

    def step_s(*slow: int) -> float:
        on = with_slow_links(cluster(4, 1), [SlowLink(host, 8.0, 8.0, 8.0) for host in slow])
        return estimate(plan.model_copy(update={"cluster": on}), PROFILE).step_time_s

    assert step_s() < step_s(2, 3) <= step_s(0, 1) <= step_s(0, 1, 2, 3)
    assert (step_s(2, 3) == pytest.approx(step_s(0, 1, 2, 3))) is as_slow_as_all
    assert (step_s(2, 3) == pytest.approx(step_s(0, 1))) is as_slow_as_all


def test_stages_over_hosts_of_several_networks_say_which_counts_and_what_would_part_them() -> None:
    unequal = with_slow_links(PLAN.cluster, [SlowLink(host, 2.0, 2.0, 2.0) for host in (2, 3)])
    plan = PLAN.model_copy(update={"cluster": unequal})

    why = reason(plan, estimate(plan, PROFILE))

    assert "hosts whose links differ, so all count as the slowest (25 GB/s per host); a pipeline of 2 stages" in why
    assert "links are not equally fast" in hosts_in_order(plan)


def test_collectives_that_several_jobs_timed_count_once_each_by_their_median() -> None:
    sizes = collective_sizes(PLAN.cluster)
    jobs = [
        TimedExchanges(collectives=tuple((kind, size, taken) for size in sizes for kind in KINDS))
        for taken in (1.0, 5.0, 2.0)
    ]

    found = measured_collectives([(PLAN, PROFILE, job) for job in jobs])

    assert [(each.kind, each.full_bytes) for each in found] == [(kind, size) for size in sizes for kind in KINDS]
    assert {each.seconds for each in found} == {2.0}
    told = expected_collectives(PLAN, PROFILE)
    assert [(each.kind, each.full_bytes) for each in told] == [(each.kind, each.full_bytes) for each in found]
    assert all(size % (4 * 4) == 0 for size in sizes)
    assert measured_collectives([]) == []


def _timed(plan: Plan) -> TimedExchanges:
    return exchange_times(plan, range(plan.degrees.num_devices), torch.device("cpu"))


@pytest.mark.slow
def test_ranks_time_what_they_exchange() -> None:
    found = run_local_ranks(_timed, 4, PLAN, timeout_s=60)

    assert found == [found[0]] * 4
    (rates, *_) = found[0].host_rates
    assert len(rates) == 4
    assert min(rates) > 0
    assert [(kind, size) for kind, size, _ in found[0].collectives] == [
        (kind, size) for size in collective_sizes(PLAN.cluster) for kind in KINDS
    ]
    on_one = PLAN.model_copy(update={"cluster": cluster(1, 4)})
    assert run_local_ranks(_timed, 4, on_one, timeout_s=60)[0].host_rates == ()
