"""The measurement of stability: small changes, one at a time, and what counts as a flip in vain."""

import pytest

from benchmarks.planning_time.stability import LITTLE, Change, changed, row, text_of
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from support.cli import some_plan
from support.synthetic import layer_class, profile


def test_each_change_is_of_one_number_and_small() -> None:
    plan = some_plan(shard=4, pipeline=4, per_host=8)
    cluster, batch = cluster_of(load_device("h100-80gb"), 16), plan.training.global_batch

    found = list(changed(cluster, plan.training, plan))

    assert len(found) == 14
    for what, on, job in found:
        if what.startswith("batch"):
            assert on == cluster
            assert abs(job.global_batch - batch) == plan.degrees.data
            continue
        assert job == plan.training
        device, before = on.device, cluster.device
        ratios = {
            "compute": device.flops["bf16"] / before.flops["bf16"],
            "memory": device.memory / before.memory,
            "device memory": device.bandwidth / before.bandwidth,
            "links in a host": on.link.bandwidth / cluster.link.bandwidth,
            "network": on.network.bandwidth / cluster.network.bandwidth,
            "latency of links": on.network.latency / cluster.network.latency,
        }
        name, _, sign = what.rpartition(" ")
        assert ratios.pop(name) == pytest.approx(1 + LITTLE if sign.startswith("+") else 1 - LITTLE)
        assert set(ratios.values()) == {1.0}


def test_a_flip_gains_nothing_where_the_layout_before_is_as_fast_within_what_simplicity_may_cost() -> None:
    assert Change("compute +2%", "FSDP 8", 1.0, 1.009, flips=True).gains_nothing
    assert not Change("compute +2%", "FSDP 8", 1.0, 1.02, flips=True).gains_nothing
    assert not Change("batch 9", "FSDP 8", 1.0, None, flips=True).gains_nothing
    assert not Change("compute +2%", "FSDP 8", 1.0, 1.0, flips=False).gains_nothing


@pytest.mark.slow
def test_a_case_is_planned_with_each_change() -> None:
    model = profile([layer_class("linear", 1e12, 6_000_000, saved=1e4, inputs=1e4)], [0] * 2, crossing=1e4)
    training = TrainingSpec(global_batch=64, seq_len=64)

    found = row("small", model, cluster_of(load_device("h100-80gb"), 2), training, 5.0)

    assert len(found.changes) == 12
    assert found.flips == [change for change in found.changes if change.layout != found.layout]
    assert all((change.before_s is None) or change.flips for change in found.changes)
    assert f"in {int(bool(found.flips))} of 1 cases, with {len(found.flips)} of 12 changes" in text_of([found], "")
