"""What the host takes to issue kernels: hidden where the device computes longer, and told where it does not."""

import math
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.answers.explain import launch_advice
from meshwright.planner.answers.search import search
from meshwright.planner.cost import host_cost
from meshwright.planner.cost.bands import fewest_parameters, no_time_band
from meshwright.planner.cost.compute_cost import layer_seconds
from meshwright.planner.cost.estimate import Estimate, estimate
from meshwright.planner.cost.host_cost import AUTOCAST_TRAFFIC, FORWARD, RECOMPUTED, SHARDED_UNIT
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.shape_bounds import ShapeBounds
from meshwright.planner.solve.space import Space
from meshwright.profiler.machine.cluster import load_device
from meshwright.profiler.model.model_profile import Bytes, ModelProfile, OpProfile
from support.synthetic import cluster, costs, device, layer_class, profile

DISPATCH = 1e-4
HOST = device(dispatch=DISPATCH)
TINY, LONG, LARGE = 1e6, 5e11, 1e14
"""FLOPs of a layer for a sample: 10 ns, 5 ms and 1 s."""


def model_of(flops: float, parameters: int = 1_000_000) -> ModelProfile:
    """Four equal layers with one product each, and two in the backward."""
    return profile([layer_class("linear", flops, parameters, saved=1e4, inputs=1e4)], [0] * 4, crossing=1e4)


def spread(shard: int, num_microbatches: int = 1) -> Shape:
    """Two devices with 4 samples each: sharded over both, or copies."""
    return Shape(
        data_replicate=2 // shard,
        data_shard=shard,
        tensor=1,
        pipeline=1,
        micro_batch=4 // num_microbatches,
        num_microbatches=num_microbatches,
    )


def priced(flops: float, shape: Shape, dispatch: float = DISPATCH) -> Estimate:
    """A plan of four of them."""
    model, training = model_of(flops), TrainingSpec(global_batch=8, seq_len=64)
    machine = cluster(on=device(dispatch=dispatch), per_host=2)
    return estimate(make_plan(model, machine, training, shape, [[LayerOption()] * 4]), model)


def test_a_pass_takes_no_less_than_the_host_takes_to_issue_it() -> None:
    found = layer_seconds(costs(TINY, 1e4, 1e4, 0.0), HOST, "bf16", 2, 1, 1)

    assert found.forward == found.host_forward == pytest.approx(DISPATCH)
    assert found.backward == found.host_backward == pytest.approx(2 * DISPATCH)
    assert found.again("full").host_s == pytest.approx((1 + RECOMPUTED) * DISPATCH)
    assert found.device_forward < 1e-2 * found.forward


def test_a_pass_that_computes_longer_hides_it() -> None:
    found = layer_seconds(costs(LARGE, 1e4, 1e4, 0.0), HOST, "bf16", 2, 1, 1)
    alone = layer_seconds(costs(LARGE, 1e4, 1e4, 0.0), device(), "bf16", 2, 1, 1)

    assert (found.forward, found.backward) == (alone.forward, alone.backward)


def test_hooks_of_sharded_units_cost_small_layers_and_not_large_ones() -> None:
    shape = spread(2)
    training = TrainingSpec(global_batch=8, seq_len=64)
    small, large = (CostModel(model_of(flops), cluster(on=HOST, per_host=2), training) for flops in (TINY, LARGE))

    ahead_s, back_s, waiting_s = small.passes_s(small.kinds[0], shape)
    found = large.compute(large.kinds[0], shape)

    assert ahead_s == pytest.approx((1 + FORWARD * SHARDED_UNIT) * DISPATCH)
    assert back_s > (2 + (1 - FORWARD) * SHARDED_UNIT) * DISPATCH
    assert waiting_s == pytest.approx(ahead_s + back_s, rel=1e-2)
    assert large.passes_s(large.kinds[0], shape) == (found.device_forward, found.device_backward, 0.0)


def test_long_layers_hide_what_short_ones_wait_for_on_one_stage() -> None:
    training = TrainingSpec(global_batch=8, seq_len=64)
    layers = [layer_class(name, flops, 1000, saved=1e4, inputs=1e4) for name, flops in (("s", TINY), ("l", LONG))]
    shape = spread(2)

    def passes(numbers: list[int], on: Shape) -> tuple[float, float, float]:
        """(Device, host, waiting) seconds of all layers, where they follow each other."""
        model = CostModel(profile(layers, numbers, crossing=1e4), cluster(on=HOST, per_host=4), training)
        found = [model.passes_s(kind, on) for kind in model.kinds]
        host_s = sum(each.host_s for kind in model.kinds for each in model._issued(kind, on))
        return sum(ahead + back for ahead, back, _ in found), host_s, sum(waiting for *_, waiting in found)

    computed_s, _, waiting_s = passes([0, 1, 0, 1], shape)
    assert (computed_s, waiting_s) == (pytest.approx(passes([1, 1], shape)[0], rel=1e-2), 0.0)
    assert computed_s < passes([0, 0], shape)[0] + passes([1, 1], shape)[0]

    many_s, issued_s, waiting_s = passes([0] * 40 + [1], shape)
    assert many_s == pytest.approx(issued_s)
    assert 0.0 < waiting_s < many_s

    staged = replace(shape, pipeline=2, schedule="1f1b", num_microbatches=2)
    assert passes([0, 1, 0, 1], staged)[2] > 0.0


def test_recompute_waits_for_the_host_only_where_the_host_is_not_ahead() -> None:
    training = TrainingSpec(global_batch=8, seq_len=64)
    hooks_s = (1 + RECOMPUTED) * DISPATCH

    def again(flops: float, shape: Shape) -> tuple[float, float, float]:
        """(Computed, in all, in all at least) seconds of a recompute."""
        model = CostModel(model_of(flops), cluster(on=HOST, per_host=4), training)
        found = model.compute(model.kinds[0], shape).again("full")
        return found.device_s, *(f(model.kinds[0], shape, "full") for f in (model.again_s, model.least_again_s))

    computed_s, again_s, _ = again(TINY, spread(2))
    assert again_s == pytest.approx(hooks_s)
    assert computed_s < 1e-3 * again_s
    computed_s, again_s, least_s = again(LARGE, spread(2))
    assert again_s == least_s == computed_s > hooks_s

    slightly = 9e10  # passes of 11 ms, which take the host 10 ms to issue
    computed_s, again_s, least_s = again(slightly, spread(2))
    assert computed_s < again_s < hooks_s
    assert least_s <= again_s
    assert again(slightly, spread(1))[2] == least_s


NONE: dict[str, Any] = {
    "wrapped": False, "sharded": False, "autocast_operators": (0.0, 0.0), "exchanges": (0, 0), "context": False,
    "num_parameters": 0, "num_layers": 10**9, "num_microbatches": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        ({"wrapped": True}, FORWARD * host_cost.WHOLE_UNIT, (1 - FORWARD) * host_cost.WHOLE_UNIT),
        ({"wrapped": True, "sharded": True}, FORWARD * SHARDED_UNIT, (1 - FORWARD) * SHARDED_UNIT),
        ({"sharded": True}, 0.0, 0.0),
        ({"autocast_operators": (10.0, 20.0)}, 10 * host_cost.AUTOCAST, 20 * host_cost.AUTOCAST),
        ({"exchanges": (2, 3)}, 2 * host_cost.EXCHANGE, 3 * host_cost.EXCHANGE),
        ({"context": True}, host_cost.CONTEXT_FORWARD, host_cost.CONTEXT_BACKWARD),
        ({"num_parameters": 8, "num_microbatches": 4}, 0.0, 2 * host_cost.PARAMETER),
        ({"num_layers": 5, "num_microbatches": 2}, 0.0, host_cost.STEP / 10),
        (
            {"num_parameters": 8, "num_microbatches": 4, "split": True},
            0.0,
            2 * host_cost.PARAMETER + 8 * host_cost.SPLIT,
        ),
    ],
    ids=["unit", "sharded unit", "no unit", "autocast", "exchanges", "context", "parameters", "step", "split"],
)
def test_each_hook_counts_where_it_is(given: dict[str, Any], forward: float, backward: float) -> None:
    found = host_cost.hooks(**{**NONE, **given})

    assert (found.forward, found.backward) == pytest.approx((forward, backward), abs=1e-6)


def test_what_the_device_waits_for_is_told_apart_from_what_it_computes() -> None:
    sharded, replicas = spread(2), spread(1)

    waits, computes = priced(TINY, sharded), priced(LARGE, sharded)

    assert waits.breakdown["launch"] > 0.9 * waits.step_time_s
    assert sum(waits.breakdown.values()) == pytest.approx(waits.step_time_s)
    assert "launch" not in computes.breakdown
    assert priced(TINY, replicas).breakdown["launch"] < 0.5 * waits.breakdown["launch"]


def test_micro_batches_are_issued_one_by_one_but_a_step_once() -> None:
    one, four = (priced(TINY, spread(1, count)).breakdown["launch"] for count in (1, 4))

    assert one < four < 4 * one


def test_a_host_that_is_not_known_keeps_nobody_waiting() -> None:
    assert "launch" not in priced(TINY, spread(2), dispatch=0.0).breakdown


def test_stacks_of_which_nothing_was_measured_do_not_wait() -> None:
    training = TrainingSpec(global_batch=8, seq_len=64, software="megatron-core")

    assert CostModel(model_of(TINY), cluster(on=HOST, per_host=2), training).device.dispatch == 0.0


def test_published_runs_say_nothing_of_steps_that_wait_for_the_host() -> None:
    model, training = model_of(TINY, fewest_parameters() // 3), TrainingSpec(global_batch=8, seq_len=64)
    model = model.model_copy(update={"attention_modules": ("linear.0",)})
    host = load_device("h100-80gb")

    waits, does_not = (
        search(model, cluster(on=host.model_copy(update={"dispatch": dispatch}), per_host=2), training).plan
        for dispatch in (host.dispatch, 0.0)
    )

    assert waits.prediction is not None
    assert waits.prediction.launch_share > 0.5
    assert "GPUs wait for CPUs" in no_time_band(waits)
    assert no_time_band(does_not) == ""


def test_autocast_moves_more_than_layers_in_16_bits() -> None:
    norm = OpProfile(
        name="native_layer_norm",
        module="",
        kind="norm",
        part="forward",
        flops=(0.0, 0.0, 0.0, 0.0),
        moved=Bytes(elements=(0.0, 1e9, 0.0, 0.0)),
    )
    layer = layer_class("norm", 0.0, 1_000_000, saved=1e4, inputs=1e4)
    layer = layer.model_copy(update={"whole": layer.whole.model_copy(update={"operators": (norm,)})})
    chain, machines = profile([layer], [0] * 2, crossing=1e4), cluster(on=HOST, per_host=2)
    model, pure = (
        CostModel(chain, machines, TrainingSpec(global_batch=8, software=software))
        for software in ("fsdp2-eager", "fsdp2-eager+pure-16-bit")
    )
    alone_s = model.compute(model.kinds[0], spread(1)).forward

    replicas_s, _, _ = model.passes_s(model.kinds[0], spread(1))

    assert alone_s == pytest.approx(4 * 2e9 / 1e12)
    assert replicas_s == pytest.approx((1 + AUTOCAST_TRAFFIC) * alone_s)
    assert model.passes_s(model.kinds[0], spread(2))[0] == pytest.approx(alone_s)
    assert pure.passes_s(pure.kinds[0], spread(1))[0] == pytest.approx(alone_s)


@pytest.mark.parametrize(
    ("changes", "software", "told"),
    [
        ({"dispatch": 0.0}, "fsdp2-eager", True),
        ({}, "fsdp2-eager", False),
        ({"dispatch": 0.0}, "megatron-core", False),
        ({"dispatch": 0.0, "name": "cpu-measured"}, "fsdp2-eager", False),
    ],
    ids=["an old file", "a preset", "a stack that nobody measured", "a CPU"],
)
def test_a_device_that_says_nothing_of_its_cpu_is_told(changes: dict[str, Any], software: str, told: bool) -> None:
    host = load_device("h100-80gb").model_copy(update=changes)
    training = TrainingSpec(global_batch=8, seq_len=64, software=software)
    plan = make_plan(model_of(TINY), cluster(on=host, per_host=2), training, spread(1), [[LayerOption()] * 4])

    assert bool(launch_advice(plan)) == told


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_a_pipeline_that_waits_for_the_host_is_bounded_by_the_way_of_one_micro_batch(schedule: Schedule) -> None:
    explorer = Explorer(model_of(TINY), cluster(on=HOST, per_host=2), TrainingSpec(global_batch=4, seq_len=64))
    pins = Pins(schedule=schedule, pipeline=2, micro_batch=2 if schedule == "interleaved" else 4)
    space = Space(explorer.profile, explorer.cluster, explorer.training, pins, explorer.choice.worth_trying)
    (family,) = space.families()
    best = explorer.explore(pins, math.inf, near=0).best

    least_s = explorer.bounds.held_s(family, space)
    way_s = ShapeBounds(explorer.chain).way_s(family, space.leaves(family), None, None)

    assert best is not None
    assert least_s >= way_s.min() > 0.0
    assert 0.7 * best.seconds < least_s <= best.seconds


@pytest.mark.parametrize("flops", [TINY, LARGE])
def test_a_split_backward_costs_the_host_for_each_parameter(flops: float) -> None:
    def backward_s(schedule: Schedule) -> float:
        shape = replace(spread(1, num_microbatches=4), data_replicate=1, pipeline=2, schedule=schedule)
        model = CostModel(model_of(flops), cluster(on=HOST, per_host=2), TrainingSpec(global_batch=8, seq_len=64))
        return model.cost(model.kinds[0], shape, LayerOption()).backward_s

    more_s = backward_s("zb-h1") - backward_s("1f1b")
    assert more_s == pytest.approx(host_cost.SPLIT * DISPATCH if flops == TINY else 0.0, abs=1e-9)
