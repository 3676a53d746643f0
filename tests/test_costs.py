"""Cost functions against numbers derived here, at their limits, and in their order."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.cost.chain import unbeaten
from meshwright.planner.cost.comm_cost import GroupLinks, collective_s, exposed_s
from meshwright.planner.cost.compute_cost import (
    UNHIDDEN_TRAFFIC,
    WAVE_EXPONENT,
    operator_s,
    optimizer_s,
    tile_efficiencies,
)
from meshwright.planner.cost.crossing_cost import P2P_EXPOSED
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.simulate import simulated_step_s
from meshwright.planner.cost.software import STAGE_S, load_software
from meshwright.planner.cost.stage_cost import closed_form_s
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.schedules import in_flight, table
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve import knapsack
from meshwright.planner.solve.knapsack import ItemGroup, Turns, least_weight, lightest
from meshwright.profiler.machine.cluster import Group, Link
from meshwright.profiler.model.model_profile import Bytes, ModelProfile, OpProfile
from support import slow
from support.synthetic import cluster, device, layer_class, profile

GIB = 2**30


def links(ranks_per_host: int, hosts: int = 1) -> GroupLinks:
    return GroupLinks(
        group=Group(ranks_per_host=ranks_per_host, hosts=hosts),
        link=Link(bandwidth=100e9, latency=1e-6),
        network=Link(bandwidth=50e9, latency=1e-5),
        devices_per_host=8,
    )


def test_ring_of_one_is_free() -> None:
    assert collective_s("all_reduce", 1e9, links(1)) == 0.0


def test_all_gather_inside_a_host_moves_all_but_ones_own_share() -> None:
    assert collective_s("all_gather", 8e9, links(8)) == pytest.approx(7 * 1e9 / 100e9 + 7e-6)


def test_group_gets_its_share_of_the_hosts_network() -> None:
    one_per_host = collective_s("all_gather", 8e9, links(1, hosts=2))

    assert one_per_host == pytest.approx(0.5 * 8e9 / (50e9 / 8) + 1e-5)


def test_a_flat_ring_carries_nearly_all_of_a_tensor_across_hosts_in_steps_of_the_slowest_hop() -> None:
    flat = replace(links(4, hosts=2), devices_per_host=4, flat=True)

    assert collective_s("all_gather", 8e9, flat) == pytest.approx(7 / 8 * 8e9 / 50e9 + 7 * 1e-5)


def test_of_stages_in_a_row_on_a_host_only_the_last_one_sends_to_the_next_host() -> None:
    alone, in_a_row = (collective_s("p2p", 1e9, links(ranks, hosts=2)) for ranks in (1, 8))

    assert alone == pytest.approx(1e9 / (50e9 / 8) + 1e-5)
    assert in_a_row == pytest.approx(1e9 / 50e9 + 1e-5)


def test_a_flat_ring_inside_a_host_is_any_ring() -> None:
    assert collective_s("all_reduce", 1e9, replace(links(8), flat=True)) == collective_s("all_reduce", 1e9, links(8))


@pytest.mark.parametrize("hosts", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_all_reduce_is_never_cheaper_than_its_halves(ranks: int, hosts: int) -> None:
    gather, scatter, both = (
        collective_s(kind, 1e8, links(ranks, hosts)) for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )

    assert both >= gather + scatter - 1e-15


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "p2p"])
def test_collectives_grow_with_bytes_and_with_hosts(kind: str) -> None:
    sizes = [collective_s(kind, num_bytes, links(4, 2)) for num_bytes in (1e3, 1e6, 1e9)]  # type: ignore[arg-type]
    spread = [collective_s(kind, 1e8, links(4, hosts)) for hosts in (1, 2, 3, 8, 64)]  # type: ignore[arg-type]

    assert sizes == sorted(sizes)
    assert spread == sorted(spread)


def test_exposed_communication_lies_between_the_rest_and_all_of_it() -> None:
    assert exposed_s(1.0, 0.0, overlap=0.8, contention=0.3) == 1.0
    assert exposed_s(1.0, 10.0, overlap=0.8, contention=0.3) == pytest.approx(0.3)
    assert exposed_s(1.0, 0.5, overlap=0.8, contention=0.0) == pytest.approx(0.6)


def test_matmul_takes_flops_over_speed_plus_the_traffic_it_cannot_hide() -> None:
    on = device()
    side = (4096.0, 0.0, 0.0, 0.0)
    op = OpProfile(
        name="mm",
        module="",
        kind="matmul",
        part="forward",
        flops=(2 * 4096.0**3, 0, 0, 0),
        moved=Bytes(elements=(3 * 4096.0**2, 0, 0, 0)),
        shape=(side, side, side),
    )

    seconds = operator_s(op, on, "bf16", 2, batch=1, tensor=1)

    assert seconds == pytest.approx(2 * 4096**3 / 100e12 + UNHIDDEN_TRAFFIC * 3 * 4096**2 * 2 / 1e12)


def test_nothing_is_faster_than_a_launch() -> None:
    op = OpProfile(name="add", module="", kind="elementwise", part="forward", moved=Bytes(other_bytes=(8, 0, 0, 0)))

    assert operator_s(op, device(launch=5e-6), "bf16", 2, 1, 1) == 5e-6


def test_last_wave_of_tiles_costs_as_much_as_a_full_one() -> None:
    on = device(compute_units=4)

    shares = tile_efficiencies(np.array([128.0 * 2, 128.0 * 5]), np.array([256.0 * 2, 256.0]), on)

    assert shares.tolist() == [1.0, pytest.approx((5 / 8) ** WAVE_EXPONENT)]


def test_adam_moves_28_bytes_per_parameter() -> None:
    assert optimizer_s(1e9, "adamw", device()) == pytest.approx(0.028)


# --- memory, against sums written out here ---------------------------------------------------------------------------


def model_of_one_class(num_layers: int = 4) -> ModelProfile:
    block = layer_class("block", 1e12, 10_000_000, saved=300e6, inputs=20e6, transient=50e6, heads=8)
    return profile([block], [0] * num_layers)


def plan_of(model: ModelProfile, shape: Shape, options: list[list[LayerOption]], devices: int, batch: int) -> Plan:
    return make_plan(model, cluster(per_host=devices), TrainingSpec(global_batch=batch, seq_len=64), shape, options)


ARRIVING = 1e6
"""Bytes of what a synthetic layer gets from the one before, and keeps."""


def test_ddp_memory_is_16_bytes_a_parameter_a_compute_copy_and_all_activations() -> None:
    model = model_of_one_class()
    shape = Shape(2, 1, 1, 1, micro_batch=1, num_microbatches=1)

    memory = estimate(plan_of(model, shape, [[LayerOption()] * 4], 2, 2), model).memory[0]

    parameters = 4 * 10e6
    assert memory.items["parameters"] == 4 * parameters
    assert memory.items["gradients"] == 4 * parameters
    assert memory.items["optimizer"] == 8 * parameters
    assert memory.items["gathered"] == 2 * parameters
    assert memory.items["activations"] == pytest.approx(4 * 300e6 + 3 * ARRIVING)
    new_gradient = 10e6 * 4  # of one parameter at a time, in fp32 before it is added: when activations are gone
    assert memory.items["transient"] == pytest.approx(max(50e6, new_gradient))


def test_fsdp_divides_state_and_holds_two_layers_gathered() -> None:
    model = model_of_one_class()
    shape = Shape(1, 4, 1, 1, micro_batch=1, num_microbatches=1)

    memory = estimate(plan_of(model, shape, [[LayerOption(reshard=True)] * 4], 4, 4), model).memory[0]

    assert memory.items["parameters"] == 4 * 4 * 10e6 / 4
    assert memory.items["gathered"] == 0
    assert memory.items["gradients"] == 0, "the last layer has its turn first, and what is reduced is gone by then"
    assert memory.items["transient"] == pytest.approx(50e6 + 2 * 2 * 10e6)


def test_gradients_peak_where_activations_are_few() -> None:
    block = layer_class("block", 1e12, 10_000_000, saved=1e6, inputs=1e6, transient=2e6)
    model = profile([block], [0] * 4)
    shape = Shape(1, 4, 1, 1, micro_batch=1, num_microbatches=1)

    memory = estimate(plan_of(model, shape, [[LayerOption(reshard=True)] * 4], 4, 4), model).memory[0]

    # In the second layer's turn, two layers behind it have left shards, and the fp32 gradients of one are on their way.
    # It and the first are gathered, both have their activations, and its bf16 gradients come as its own go.
    assert memory.items["gradients"] == 2 * 4 * 10e6 / 4
    assert memory.items["activations"] == 2 * 1e6 + ARRIVING
    own, on_their_way = 2 * 10e6, 4 * 10e6
    assert memory.items["transient"] == pytest.approx(2e6 + (own - 1e6) + 2 * own + on_their_way)


def test_gradients_on_their_way_are_those_of_the_layer_behind() -> None:
    block = layer_class("block", 1e12, 10_000_000, saved=1e6, inputs=1e6, transient=40e6)
    small, large = (layer_class("head", 1e12, n, saved=1e6, inputs=1e6) for n in (14_000_000, 17_000_000))
    shape = Shape(1, 4, 1, 1, micro_batch=1, num_microbatches=1)
    models = [profile([block, head], [0, 0, 0, 1]) for head in (small, large)]

    plans = [(m, plan_of(m, shape, [[LayerOption(reshard=True)] * 4], 4, 4)) for m in models]
    transients = [estimate(plan, m).memory[0].items["transient"] for m, plan in plans]

    assert transients[1] - transients[0] == pytest.approx(4 * 3e6), "fp32"


def test_of_equal_layers_the_last_but_one_may_hold_most() -> None:
    # More is there in the last one's turn, but nothing is reduced then yet.
    model = profile([layer_class("block", 1e12, 10_000_000, saved=20e6, inputs=1e6, transient=30e6)], [0] * 4)
    shape = Shape(1, 4, 1, 1, micro_batch=1, num_microbatches=1)

    memory = estimate(plan_of(model, shape, [[LayerOption()] * 4], 4, 4), model).memory[0]

    assert memory.items["activations"] == pytest.approx(3 * 20e6 + 2 * ARRIVING)


def test_recomputed_layer_keeps_its_input_and_passes_through_the_rest() -> None:
    model = model_of_one_class()
    shape = Shape(2, 1, 1, 1, micro_batch=1, num_microbatches=1)

    memory = estimate(plan_of(model, shape, [[LayerOption("full")] * 4], 2, 2), model).memory[0]

    assert memory.items["activations"] == pytest.approx(3 * ARRIVING)
    assert memory.items["transient"] == pytest.approx(50e6 + 300e6 + 4 * 10e6)  # with the layer's first new gradient


def test_first_stage_of_1f1b_holds_a_micro_batch_per_stage_and_what_it_sent() -> None:
    model = model_of_one_class()
    shape = Shape(1, 1, 1, 4, micro_batch=1, num_microbatches=8, schedule="1f1b")

    memory = estimate(plan_of(model, shape, [[LayerOption()]] * 4, 4, 8), model).memory

    sent, each = ARRIVING, 300e6 + ARRIVING
    back = ARRIVING  # the gradient that the micro-batch before has sent
    expected = [4 * 300e6 + 5 * sent, 3 * each + 4 * sent + back, 2 * each + 3 * sent + back, each + back]
    assert [stage.items["activations"] for stage in memory] == pytest.approx(expected)


def with_tensor(model: ModelProfile, index: int, **changes: object) -> ModelProfile:
    tensors = list(model.tensors)
    tensors[index] = tensors[index].model_copy(update=changes)
    return model.model_copy(update={"tensors": tuple(tensors)})


@pytest.mark.parametrize("option", [LayerOption(), LayerOption("full")])
def test_a_stage_holds_what_it_received_whether_or_not_a_layer_keeps_it(option: LayerOption) -> None:
    saved = model_of_one_class(2)
    unsaved = with_tensor(saved, 0, saved_by=())
    shape = Shape(1, 1, 1, 2, micro_batch=1, num_microbatches=4, schedule="gpipe")

    memory = [estimate(plan_of(m, shape, [[option]] * 2, 2, 4), m).memory[1] for m in (saved, unsaved)]

    assert memory[1].items["activations"] == pytest.approx(memory[0].items["activations"])


def test_what_arrives_whole_is_held_whole_beside_a_sliced_layer() -> None:
    whole = layer_class("embedding", 1e12, 10_000_000, saved=1e6, inputs=1e6)
    block = layer_class("block", 1e12, 10_000_000, saved=300e6, inputs=20e6, heads=8)
    shape = Shape(1, 1, 4, 2, micro_batch=1, num_microbatches=4, schedule="gpipe", sequence=True)
    models = [profile([whole, block], order, crossing=20e6) for order in ([0, 1], [1, 1])]

    plans = [(m, plan_of(m, shape, [[LayerOption()]] * 2, 8, 4)) for m in models]
    from_whole, from_slices = (estimate(plan, m).memory[1].items["activations"] for m, plan in plans)

    assert from_whole - from_slices == pytest.approx(4 * 20e6 * 3 / 4), "4 micro-batches, 3/4 more of each"


def test_gradients_of_what_passes_through_a_stage_are_there_throughout_its_backward() -> None:
    model = model_of_one_class(3)
    skipping = with_tensor(model, 0, last_used_by=2, used_by=(1, 2), saved_by=(1,))
    shape = Shape(1, 1, 1, 3, micro_batch=1, num_microbatches=6, schedule="1f1b")

    plans = [(m, plan_of(m, shape, [[LayerOption()]] * 3, 3, 6)) for m in (model, skipping)]
    without, with_skip = (estimate(plan, m).memory[1].items["activations"] for m, plan in plans)

    from_behind, own = 1, 1  # one set that it receives, and one that it makes of that
    assert with_skip - without == pytest.approx((from_behind + own) * ARRIVING)


def test_tied_weights_are_padded_once() -> None:
    tied = profile([layer_class("block", 1e12, 10_000_001, saved=1e6, inputs=1e6)], [0, 0], ties=[(0, 1)])
    shape = Shape(1, 8, 1, 1, micro_batch=1, num_microbatches=1)

    memory = estimate(plan_of(tied, shape, [[LayerOption()] * 2], 8, 8), tied).memory[0]

    assert memory.items["parameters"] == 4 * 10_000_008 / 8


def test_tied_weights_on_one_stage_count_once() -> None:
    block = layer_class("block", 1e12, 10_000_000, saved=1e6, inputs=1e6)
    apart, tied = profile([block], [0, 0]), profile([block], [0, 0], ties=[(0, 1)])
    shape = Shape(1, 1, 1, 1, micro_batch=1, num_microbatches=1)

    plans = [(m, plan_of(m, shape, [[LayerOption()] * 2], 1, 1)) for m in (apart, tied)]
    sizes = [estimate(plan, m).memory[0].allocated_bytes for m, plan in plans]

    assert sizes[0] - sizes[1] == pytest.approx(10e6 * (4 + 4 + 8 + 4)), "parameter, gradient, moments, step temporary"


def test_traffic_of_fsdp_is_two_gathers_and_a_reduction_per_micro_batch() -> None:
    model = model_of_one_class()
    shape = Shape(1, 4, 1, 1, micro_batch=1, num_microbatches=2, gradient_sync="every")

    found = estimate(plan_of(model, shape, [[LayerOption(reshard=True)] * 4], 4, 8), model).collectives

    by_kind = {(t.axis, t.kind): t for t in found}
    assert by_kind["data_shard", "all_gather"].bytes == 2 * 2 * 4 * 2 * 10e6
    assert by_kind["data_shard", "all_gather"].calls == 2 * 2 * 4
    assert by_kind["data_shard", "reduce_scatter"].bytes == 2 * 4 * 4 * 10e6


def test_breakdown_adds_up_to_the_step() -> None:
    model = model_of_one_class()
    shape = Shape(1, 1, 2, 2, micro_batch=1, num_microbatches=4, schedule="1f1b")

    found = estimate(plan_of(model, shape, [[LayerOption("full")] * 2] * 2, 4, 4), model)

    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)


def test_what_the_host_adds_to_a_step_is_no_waiting_for_stages() -> None:
    model, shape = model_of_one_class(), Shape(2, 1, 1, 1, micro_batch=1, num_microbatches=2)
    plan = plan_of(model, shape, [[LayerOption()] * 4], 2, 4)
    own = plan.model_copy(update={"training": plan.training.model_copy(update={"software": "megatron-core"})})

    found = estimate(own, model)

    assert found.breakdown["fixed"] == load_software("megatron-core").step_s > 0
    assert found.breakdown["pipeline"] == 0
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)


# --- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), [("1f1b", 4, 4), ("1f1b", 4, 9), ("gpipe", 3, 5)])
def test_in_flight_counts_of_shapes_are_those_of_the_schedules_table(
    schedule: str, stages: int, microbatches: int
) -> None:
    shape = Shape(1, 1, 1, stages, micro_batch=1, num_microbatches=microbatches, schedule=schedule)  # type: ignore[arg-type]

    counted = [in_flight(actions) for actions in table(shape.schedule, stages, microbatches)]

    assert counted == [shape.in_flight(stage) for stage in range(stages)]


def test_the_host_s_call_of_a_stage_shows_where_the_stage_computes_for_less() -> None:
    shape = Shape(1, 1, 1, 2, micro_batch=1, num_microbatches=4, schedule="1f1b")
    on, training = cluster(1, 2), TrainingSpec(global_batch=4, seq_len=64)
    forward_s, prices = [], []
    for flops in (1e9, 20e9, 200e9):
        model = CostModel(profile([layer_class("a", flops, 1000, 1e5, 1e4)], [0, 0]), on, training)
        forward_s.append(model.compute(model.kinds[0], shape).forward)  # of the one layer of each stage
        prices.append(model.crossings(shape))

    assert forward_s[0] < forward_s[1] < STAGE_S < forward_s[2]
    assert [cuts[1].call_s for cuts in prices] == pytest.approx([STAGE_S - forward_s[0], STAGE_S - forward_s[1], 0.0])
    assert prices[0][1].waited_s == pytest.approx(P2P_EXPOSED * prices[0][1].seconds + STAGE_S - forward_s[0])
    assert prices[0][0].waited_s == prices[0][2].waited_s == 0.0


def test_cuda_graphs_take_the_host_s_call_of_a_stage_away() -> None:
    model = profile([layer_class("a", 1e9, 1000, 1e5, 1e4)], [0, 0])
    shape = Shape(1, 1, 1, 2, micro_batch=1, num_microbatches=4, schedule="1f1b")
    eager, replayed = (
        CostModel(model, cluster(1, 2), TrainingSpec(global_batch=4, seq_len=64, software=name)).crossings(shape)[1]
        for name in ("fsdp2-eager", "fsdp2-eager+graphs")
    )

    assert eager.call_s > 0.0
    assert replayed.call_s == 0.0


def test_equal_stages_take_m_plus_p_minus_1_rounds() -> None:
    assert simulated_step_s("1f1b", [1.0] * 4, [2.0] * 4, [0.0] * 4, 8) == pytest.approx((8 + 3) * 3.0)
    assert simulated_step_s("1f1b", [1.0] * 4, [2.0] * 4, [0.0] * 4, 1000) == pytest.approx(1003 * 3.0)


def test_closed_form_is_within_the_published_range_of_the_simulation() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        stages, microbatches = int(rng.integers(2, 7)), int(rng.integers(7, 30))
        forward = rng.uniform(0.5, 1.5, stages)
        backward = forward * rng.uniform(1.5, 2.5, stages)
        closed = closed_form_s(list(forward + backward), [0.0] * stages, microbatches)
        simulated = simulated_step_s("1f1b", list(forward), list(backward), [0.0] * stages, microbatches)
        lower = max(sum((forward + backward)[:s]) + microbatches * (forward + backward)[s] for s in range(stages))
        assert lower <= simulated * (1 + 1e-9)
        assert 0.999 <= closed / simulated <= 1.2


def test_long_steps_continue_the_last_period_exactly() -> None:
    forward, backward, once = [1.0, 1.3, 0.7], [2.0, 2.4, 1.9], [0.1, 0.2, 0.3]
    steps = [simulated_step_s("1f1b", forward, backward, once, m) for m in (17, 18, 19, 60)]

    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])
    assert steps[3] - steps[2] == pytest.approx(41 * (steps[1] - steps[0]))


# --- knapsack --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_knapsack_finds_the_least_weight_of_all_packings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(10):
        groups = [
            ItemGroup(
                int(rng.integers(1, 5)), rng.integers(0, 20, n).astype(float), rng.integers(0, 20, n).astype(float)
            )
            for n in rng.integers(1, 5, int(rng.integers(1, 4)))
        ]
        room = float(rng.integers(0, 150))
        choices = [list(itertools.combinations_with_replacement(range(len(g.weights)), g.count)) for g in groups]
        fitting = [
            sum(g.weights[i] for g, taken in zip(groups, packing, strict=True) for i in taken)
            for packing in itertools.product(*choices)
            if sum(g.memory[i] for g, taken in zip(groups, packing, strict=True) for i in taken) <= room
        ]

        found = least_weight(groups, room)

        assert (found.weight if found else math.inf) == pytest.approx(min(fitting, default=math.inf))


@pytest.mark.parametrize("seed", slow.but_first(range(20), 6))
def test_the_lightest_packing_in_turns_is_that_of_all_packings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to three runs of equal items with up to five options each, in two passes."""
    if seed % 2:
        monkeypatch.setattr(knapsack, "SMALL", 0)
    if seed % 4 == 1:
        monkeypatch.setattr(knapsack, "FEW", 20)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        rows = [
            Turns(
                int(rng.integers(1, 4)),
                rng.integers(0, 20, n).astype(float),
                rng.integers(5, 20, (2, n)).astype(float),
                rng.integers(0, 5, (2, n)).astype(float),
                rng.integers(0, 15, (2, n)).astype(float),
                rng.integers(0, 25, (2, n)).astype(float),
            )
            for n in rng.integers(1, 6, int(rng.integers(1, 4)))
        ]
        rooms, starting = rng.integers(20, 120, 2).astype(float), rng.integers(0, 9, (2, len(rows[0].weights)))
        choices = [list(itertools.combinations_with_replacement(range(len(r.weights)), r.count)) for r in rows]
        fitting = [
            sum(r.weights[i] for r, taken in zip(rows, packing, strict=True) for i in taken)
            for packing in itertools.product(*choices)
            if (_most_held(rows, packing, starting.astype(float)) <= rooms).all()
        ]

        found = lightest(rows, rooms, math.inf, starting.astype(float))

        assert (found.weight if found else math.inf) == pytest.approx(min(fitting, default=math.inf))
        if found is not None:
            packing = [np.repeat(np.arange(len(c)), c) for c in found.counts]
            assert (_most_held(rows, packing, starting.astype(float)) <= rooms).all()


def _most_held(rows: list[Turns], packing: Sequence[Sequence[int]], starting: np.ndarray) -> np.ndarray:
    """[pass] -> the most that is held at any turn, one item after the other."""
    items = [(r, i, k + 1 == len(taken)) for r, taken in zip(rows, packing, strict=True) for k, i in enumerate(taken)]
    most = np.full(2, -np.inf)
    for turn, (row, option, is_end) in enumerate(items):
        held = starting[:, items[0][1]] + sum(r.before[:, i] for r, i, _ in items[: turn + 1])
        held = held + sum((r.after[:, i] for r, i, _ in items[turn + 1 :]), np.zeros(2))
        most = np.maximum(most, held + (row.ending if is_end else row.transient)[:, option])
    return most


def test_thirty_options_for_each_of_eighty_layers_take_few_combinations() -> None:
    """What 24 and more options must not do: multiply. The lightest packing is between two neighbours of the hull."""
    keep = np.linspace(0.0, 1.0, 30)
    row = Turns(80, (1 - keep) ** 2, keep[None, :], np.zeros((1, 30)), 1 - keep[None, :], 1 - keep[None, :])

    found = lightest([row], np.array([40.5]), math.inf, np.zeros((1, 30)))

    assert found is not None
    assert float(found.counts[0] @ row.before[0]) <= 40.5
    relaxed = 80 * (1 - 40.5 / 80) ** 2
    assert relaxed - 1e-9 <= found.weight <= relaxed * 1.02


def test_turns_that_hold_much_leave_few_combinations_to_look_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """124 layers of six options: what holds least between turns holds most in its turn, so those that keep more must be
    the last. The knapsack of the last turn alone is 2% below what fits, and millions of combinations are lighter."""
    layers, none = np.array([[0.07, 0.49, 1.04, 3.25, 3.68, 4.23]]), np.full((1, 6), 0.006)
    turn = np.array([[16.55, 16.12, 15.5, 10.17, 9.75, 9.13]])
    weights = np.array([144.2, 119.5, 116.7, 140.4, 115.7, 112.8])
    head = Turns(1, np.array([44.0]), np.array([[3.43]]), np.zeros((1, 1)), np.array([[4.2]]), np.array([[4.2]]))
    rows, looked_through = [Turns(125, weights, layers, none, turn, turn), head], [0]
    most_inside = knapsack._most_inside

    def counted(table: np.ndarray, row: Turns) -> np.ndarray:
        looked_through[0] += len(table)
        return most_inside(table, row)

    monkeypatch.setattr(knapsack, "_most_inside", counted)

    found = lightest(rows, np.array([71.5]), math.inf, np.zeros((1, 6)))

    assert found is not None
    assert found.counts[0].sum() == 125
    assert looked_through[0] < 10_000


def test_a_second_pass_with_less_room_leaves_few_combinations_to_look_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of five local layers with a global one between them, as Gemma 3 has them. What binds is the last turn of the
    second pass, 0.5% above what that of the first says."""
    held = np.array([0.325, 0.47, 0.771, 0.916, 1.924, 2.069])
    turn = np.array([2.31, 2.02, 1.865, 1.575, 0.677, 0.387])
    last = np.array([[16.0]] * 2)

    def run(count: int, weights: list[float], less: float = 0.0) -> Turns:
        before = np.array([held - less * (held > 1)] * 2)
        turns = np.array([turn, turn + 0.29])
        return Turns(count, np.array(weights), before, np.full((2, 6), 0.036), turns, turns)

    near = [1.728, 1.71, 1.486, 1.468, 1.352, 1.334]
    rows = [run(5, near), *[run(1, [1.471, 1.453, 1.277, 1.258, 1.15, 1.131], 0.157), run(5, near)] * 4]
    rows.append(Turns(1, np.array([5.659]), np.array([[11.554]] * 2), np.full((2, 1), 2.5), last, last))
    compared, unbeaten_rows = [0], knapsack._unbeaten

    def counted(points: np.ndarray, deadline_s: float) -> np.ndarray:
        compared[0] += len(points)
        return unbeaten_rows(points, deadline_s)

    monkeypatch.setattr(knapsack, "_unbeaten", counted)

    found = lightest(rows, np.array([62.7, 60.7]), math.inf, np.zeros((2, 6)))

    assert found is not None
    held_at_last = sum(row.before[1] @ counts for row, counts in zip(rows, found.counts, strict=True)) + last[0, 0]
    assert 60.6 < held_at_last <= 60.7
    assert compared[0] < 5_000


@pytest.mark.slow
def test_one_row_of_many_combinations_is_looked_through_without_comparing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 layers of eight options, of which the lightest keeps 12 GiB, and whatever keeps less holds much in its turn
    (a Granite model on 64 GPUs): 720,000 combinations are lighter than what fits."""
    weights = np.array([0.67578, 0.67361, 0.67434, 0.67216, 0.6281, 0.62592, 0.49803, 0.49585])
    held = np.array([0.35654, 0.51383, 0.65017, 0.80747, 3.49388, 3.65117, 12.13552, 12.29281])
    after = np.array([[0.31459, 0.47189] * 4, [0.03932] * 8])
    turn = np.array([19.51779, 19.20319, 19.18221, 18.86762, 16.38045, 16.06586, 7.69686, 7.38227])
    turns = np.array([turn, turn + 0.31459])
    of_first, of_last = np.array([[0.59979], [0.91438]]), np.full((2, 1), 6.5766)
    rows = [
        Turns(1, np.array([0.0241]), np.full((2, 1), 1.54141), np.array([[2.05521], [1.15606]]), of_first, of_first),
        Turns(24, weights, np.array([held] * 2), after, turns, np.array([turn] * 2)),
        Turns(1, np.array([0.30862]), np.full((2, 1), 4.99763), np.array([[2.05523], [1.15607]]), of_last, of_last),
    ]
    compared, unbeaten = [0], knapsack._unbeaten

    def counted(points: np.ndarray, deadline_s: float) -> np.ndarray:
        compared[0] += len(points)
        return unbeaten(points, deadline_s)

    monkeypatch.setattr(knapsack, "_unbeaten", counted)

    found = lightest(rows, np.array([72.84597, 71.94681]), 16.12, np.zeros((2, 1)))

    assert found is not None
    assert found.weight == pytest.approx(15.79, abs=0.01)
    assert compared[0] < 5_000


def test_options_that_another_beats_in_time_and_memory_are_dropped() -> None:
    model = profile([layer_class("block", 1e12, 1_000_000, 4e8, 1e7, parts=(0.1, 0.2))], [0] * 4)
    prices = CostModel(model, cluster(per_host=4), TrainingSpec(global_batch=8, seq_len=64))
    shape = Shape(1, 4, 1, 1, micro_batch=1, num_microbatches=2, gradient_sync="every")
    options = prices.options(prices.kinds[0], shape)
    costs = [prices.cost(prices.kinds[0], shape, option) for option in options]

    left = [options[i] for i in unbeaten([*costs, replace(costs[0], recompute_s=1.0)])]

    assert {option.recompute for option in options} == {"none", "attention", "selective", "full"}
    assert left == options


def test_recompute_that_saves_nothing_is_not_offered() -> None:
    model = profile([layer_class("block", 1e12, 1_000_000, 4e8, 1e7, parts=(0.0, 0.0))], [0] * 2)
    prices = CostModel(model, cluster(per_host=2), TrainingSpec(global_batch=8, seq_len=64))

    offered = prices.options(prices.kinds[0], Shape(2, 1, 1, 1, micro_batch=1, num_microbatches=4))

    assert [option.recompute for option in offered] == ["none", "full"]


@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_what_no_other_beats_stays_and_of_equal_ones_the_first(
    block: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knapsack, "BLOCK", block)
    points = np.random.default_rng(columns).integers(0, 6, (60, columns)).astype(float)

    stays = knapsack._unbeaten(points, math.inf)

    unique = [i for i, point in enumerate(points) if not (points[:i] == point).all(axis=1).any()]
    unbeaten = [i for i in unique if not ((points <= points[i]).all(axis=1) & (points < points[i]).any(axis=1)).any()]
    assert sorted(stays) == unbeaten
