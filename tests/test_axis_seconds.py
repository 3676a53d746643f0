"""Seconds of communication by mesh axis: what the estimate's traffic takes on the links of each axis."""

import pytest

from meshwright.planner.cost.axis_seconds import axis_seconds
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import Link
from support.synthetic import cluster, device, layer_class, profile

BLOCK = layer_class("block", 1e12, 1000, saved=1e6, inputs=1e5)
PROFILE = profile([BLOCK], [0] * 4)
LINK, NETWORK = Link(bandwidth=1e11, latency=0.0), Link(bandwidth=1e10, latency=0.0)


def plan_of(**degrees: int) -> Plan:
    shape = Shape(
        **{"data_replicate": 1, "data_shard": 1, "tensor": 1, "pipeline": 1, **degrees},
        micro_batch=1,
        num_microbatches=4,
    )
    if shape.pipeline > 1:
        shape = Shape(**{**shape.__dict__, "schedule": "1f1b"})
    training = TrainingSpec(global_batch=4 * shape.data)
    machines = cluster(2, shape.degrees.num_devices // 2, device(link=LINK), NETWORK)
    layers, stages = [LayerOption()] * (len(PROFILE.layers) // shape.pipeline), shape.pipeline
    return make_plan(PROFILE, machines, training, shape, [layers] * stages)


def test_shards_on_two_hosts_take_what_their_network_needs() -> None:
    plan = plan_of(data_shard=4)
    passed = sum(item.bytes for item in estimate(plan, PROFILE).collectives)

    found = axis_seconds(plan, PROFILE)

    # A ring over two hosts of two: half of every tensor crosses the network of each.
    assert found == {"data_shard": pytest.approx(passed / 2 / NETWORK.bandwidth)}


def test_every_axis_that_passes_something_has_its_seconds() -> None:
    plan = plan_of(data_replicate=2, pipeline=2)

    found = axis_seconds(plan, PROFILE)

    assert found.keys() == {item.axis for item in estimate(plan, PROFILE).collectives}
    assert min(found.values()) > 0
