"""Properties that costs, estimates and the search have whatever the model, the cluster and the job."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.planner.cost import software
from meshwright.planner.cost.bands import memory_band, time_band
from meshwright.planner.cost.comm_cost import CollectiveKind, GroupLinks, collective_s, exchange_s, exposed_s
from meshwright.planner.cost.compute_cost import accumulate_s, layer_seconds, moving_s, optimizer_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.memory_cost import state_bytes
from meshwright.planner.cost.stage_cost import allocatable_bytes, budget_bytes, closed_form_s, outside_bytes
from meshwright.planner.plan.document import Recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.space import Space
from meshwright.profiler.machine.cluster import ClusterSpec, Device, Group, Link, cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile
from support.strategies import ROUNDING, any_links, clusters, factors, jobs, log_floats, models, plans, priced, sizes
from support.synthetic import SEQ_LEN, cluster, device, layer_class, profile
from support.zoo import zoo_profile

GIB = 2**30


NO_LATENCY = Link(bandwidth=50e9, latency=0.0)


# --- communication ---------------------------------------------------------------------------------------------------

COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "p2p")
RINGS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def on_more_hosts(links: GroupLinks, more: int) -> GroupLinks:
    """The group with as many ranks on each of more hosts."""
    group = Group(ranks_per_host=links.group.ranks_per_host, hosts=links.group.hosts + more)
    return GroupLinks(group, links.link, links.network, links.devices_per_host)


@settings(max_examples=100)
@given(st.sampled_from(COLLECTIVES), any_links(), sizes, factors)
def test_more_bytes_never_take_less_time(kind: CollectiveKind, links: GroupLinks, size: float, factor: float) -> None:
    assert collective_s(kind, size, links) <= collective_s(kind, size * factor, links)


@settings(max_examples=100)
@given(st.sampled_from(RINGS), any_links(), sizes, st.integers(1, 512))
def test_more_hosts_with_as_many_ranks_each_never_take_less_time(
    kind: CollectiveKind, links: GroupLinks, size: float, more: int
) -> None:
    assert collective_s(kind, size, links) <= collective_s(kind, size, on_more_hosts(links, more)) * (1 + ROUNDING)


@settings(max_examples=100)
@given(any_links(), sizes)
def test_all_reduce_never_takes_less_time_than_reduce_scatter_or_all_gather(links: GroupLinks, size: float) -> None:
    whole, scatter, gather = (collective_s(kind, size, links) for kind in RINGS[:1] + RINGS[2:] + RINGS[1:2])

    assert whole >= scatter
    assert whole >= gather


@settings(max_examples=100)
@given(st.sampled_from(COLLECTIVES), any_links(), sizes, factors, factors)
def test_more_bandwidth_never_makes_a_collective_slower(
    kind: CollectiveKind, links: GroupLinks, size: float, inside: float, across: float
) -> None:
    link = links.link.model_copy(update={"bandwidth": links.link.bandwidth * inside})
    network = links.network.model_copy(update={"bandwidth": links.network.bandwidth * across})

    faster_s = collective_s(kind, size, GroupLinks(links.group, link, network, links.devices_per_host))

    assert faster_s <= collective_s(kind, size, links) * (1 + ROUNDING)


@settings(max_examples=100)
@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1), st.floats(0, 10))
def test_overlapped_work_lies_between_the_longer_and_the_sum_and_grows_with_both(
    comm_s: float, compute_s: float, overlap: float, contention: float, more_s: float
) -> None:
    both_s = compute_s + exposed_s(comm_s, compute_s, overlap, contention)

    longest_s, sum_s = max(comm_s, compute_s), comm_s + compute_s
    assert longest_s * (1 - ROUNDING) <= both_s <= sum_s * (1 + ROUNDING)
    assert compute_s + exposed_s(comm_s + more_s, compute_s, overlap, contention) >= both_s * (1 - ROUNDING)
    assert compute_s + more_s + exposed_s(comm_s, compute_s + more_s, overlap, contention) >= both_s * (1 - ROUNDING)


# --- models, clusters, jobs ------------------------------------------------------------------------------------------


def with_device(on: ClusterSpec, change: Callable[[Device], dict[str, object]]) -> ClusterSpec:
    """The cluster with every device changed."""
    hosts = tuple(g.model_copy(update={"device": g.device.model_copy(update=change(g.device))}) for g in on.hosts)
    return on.model_copy(update={"hosts": hosts})


def with_links(on: ClusterSpec, inside: Callable[[Link], Link], across: Callable[[Link], Link]) -> ClusterSpec:
    """The cluster with its links changed."""
    hosts = tuple(g.model_copy(update={"link": inside(g.link)}) for g in on.hosts)
    return on.model_copy(update={"hosts": hosts, "network": across(on.network)})


def wider(factor: float) -> Callable[[Link], Link]:
    """The same link with more bandwidth."""
    return lambda link: link.model_copy(update={"bandwidth": link.bandwidth * factor})


def optimum_s(model: ModelProfile, on: ClusterSpec, training: TrainingSpec) -> float:
    """The proven least closed form of a step; infinite where nothing fits."""
    best = Explorer(model, on, training).explore(Pins(), math.inf, near=0).best
    return best.seconds if best is not None else math.inf


# --- the search ------------------------------------------------------------------------------------------------------

BETTER: dict[str, Callable[[ClusterSpec, float], ClusterSpec]] = {
    "link bandwidth": lambda on, c: with_links(on, wider(c), wider(1.0)),
    "network bandwidth": lambda on, c: with_links(on, wider(1.0), wider(c)),
    "FLOP/s": lambda on, c: with_device(on, lambda d: {"flops": {k: v * c for k, v in d.flops.items()}}),
    "memory": lambda on, c: with_device(on, lambda d: {"memory": d.memory * c}),
    "memory bandwidth": lambda on, c: with_device(on, lambda d: {"bandwidth": d.bandwidth * c}),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BETTER)
@settings(max_examples=30)
@given(models(), clusters, jobs, st.floats(1.0, 10.0))
def test_more_of_it_never_makes_the_optimum_slower(
    what: str, model: ModelProfile, on: ClusterSpec, training: TrainingSpec, factor: float
) -> None:
    before_s = optimum_s(model, on, training)

    after_s = optimum_s(model, BETTER[what](on, factor), training)

    assert after_s <= before_s * (1 + ROUNDING)


def test_what_tensor_ranks_cut_is_chosen_for_every_place_they_can_take() -> None:
    """With slow links in the host two of three layers were worth cutting, with faster ones all; across a slow network,
    where the best plan has its tensor ranks, two are best with either: the faster host had the slower plan."""
    few, many = (layer_class(f"c{i}", 1e10, 1_000_000, 0.0, moved, 1e3, 2) for i, moved in enumerate((1e5, 10**5.5)))
    model = profile([few, many], [0, 0, 1], 1e7)
    slow_links = device(memory=0.5e9, link=Link(bandwidth=10**9.5, latency=1e-5))
    on = cluster(2, 2, slow_links, Link(bandwidth=1e8, latency=1e-3))
    training = TrainingSpec(global_batch=4, seq_len=SEQ_LEN, memory_margin=0.0)

    before_s = optimum_s(model, on, training)

    assert optimum_s(model, BETTER["link bandwidth"](on, 2.0), training) <= before_s


def ideal(on: ClusterSpec) -> ClusterSpec:
    """The cluster without latencies; launches of `device()` take no time."""
    at_once: Callable[[Link], Link] = lambda link: link.model_copy(update={"latency": 0.0})  # noqa: E731
    return with_links(on, at_once, at_once)


def faster(on: ClusterSpec, factor: float) -> ClusterSpec:
    """Every FLOP/s and bandwidth multiplied."""
    changed = with_device(
        on,
        lambda d: {"flops": {k: v * factor for k, v in d.flops.items()}, "bandwidth": d.bandwidth * factor},
    )
    return with_links(changed, wider(factor), wider(factor))


@contextmanager
def faster_host(factor: float) -> Iterator[None]:
    """The host's seconds divided, of every training stack."""
    fields = ("layer_s", "stage_s", "step_s", "routing_s", "expert_s")
    stacks = {
        name: stack.model_copy(update={field: getattr(stack, field) / factor for field in fields})
        for name, stack in software.all_software().items()
    }
    with mock.patch.object(software, "all_software", return_value=stacks):
        yield


@pytest.mark.slow
@settings(max_examples=40)
@given(models(), clusters, jobs, log_floats(0.01, 100.0))
def test_the_optimum_of_a_cluster_c_times_as_fast_takes_1_over_c_of_the_time(
    model: ModelProfile, on: ClusterSpec, training: TrainingSpec, factor: float
) -> None:
    before_s = optimum_s(model, ideal(on), training)

    with faster_host(factor):
        after_s = optimum_s(model, faster(ideal(on), factor), training)

    assert after_s * factor == pytest.approx(before_s, rel=1e-6)


# --- estimates of a plan ---------------------------------------------------------------------------------------------

RECOMPUTES: tuple[Recompute, ...] = ("none", "attention", "selective", "full")


@pytest.mark.slow
@settings(max_examples=100)
@given(plans(), st.data())
def test_recompute_never_makes_a_plan_faster(
    case: tuple[ModelProfile, ClusterSpec, TrainingSpec, Shape, list[int]], data: st.DataObject
) -> None:
    num_layers = len(case[0].layers)
    modes: list[Recompute] = data.draw(st.lists(st.sampled_from(RECOMPUTES), min_size=num_layers, max_size=num_layers))

    without, some, full = (priced(case, each) for each in (["none"] * num_layers, modes, ["full"] * num_layers))

    assert without.step_time_s <= some.step_time_s * (1 + ROUNDING)
    assert some.step_time_s <= full.step_time_s * (1 + ROUNDING)


def renamed(model: ModelProfile) -> ModelProfile:
    """The same model with names that sort in the opposite order, of layers, modules and parameters."""
    names = {layer.name: f"part{len(model.layers) - i:03}.x" for i, layer in enumerate(model.layers)}

    def new(name: str) -> str:
        return names[name.split(".")[0]] + name[len(name.split(".")[0]) :]

    layers = tuple(
        layer.model_copy(
            update={
                "name": new(layer.name),
                "root": new(layer.root),
                "modules": tuple(map(new, layer.modules)),
                "parameters": tuple(map(new, layer.parameters)),
            }
        )
        for layer in model.layers
    )
    tensors = tuple(
        t.model_copy(update={"producer": t.producer.model_copy(update={"name": new(t.producer.name)})})
        for t in model.tensors
    )
    ties = tuple(tuple(map(new, group)) for group in model.ties)
    return model.model_copy(update={"layers": layers, "tensors": tensors, "ties": ties})


@pytest.mark.slow
@settings(max_examples=100)
@given(plans())
def test_names_of_layers_change_neither_memory_nor_time(
    case: tuple[ModelProfile, ClusterSpec, TrainingSpec, Shape, list[int]],
) -> None:
    recomputes: list[Recompute] = ["none", "full"] * len(case[0].layers)

    before = priced(case, recomputes)
    after = priced((renamed(case[0]), *case[1:]), recomputes)

    assert [stage.items for stage in after.memory] == [pytest.approx(stage.items) for stage in before.memory]
    assert after.step_time_s == pytest.approx(before.step_time_s)


@pytest.mark.slow
@settings(max_examples=100)
@given(plans(), log_floats(0.01, 100.0))
def test_a_plan_on_a_cluster_c_times_as_fast_takes_1_over_c_of_the_time(
    case: tuple[ModelProfile, ClusterSpec, TrainingSpec, Shape, list[int]], factor: float
) -> None:
    model, on, training, shape, counts = case
    recomputes: list[Recompute] = ["none", "full"] * len(model.layers)

    slow = priced((model, ideal(on), training, shape, counts), recomputes)
    with faster_host(factor):
        fast = priced((model, faster(ideal(on), factor), training, shape, counts), recomputes)

    assert fast.step_time_s * factor == pytest.approx(slow.step_time_s)
    assert fast.memory == slow.memory


@st.composite
def single_layers(draw: st.DrawFn) -> tuple[ModelProfile, ClusterSpec, TrainingSpec, Shape, list[int]]:
    """A model of one layer on devices that overlap as they like."""
    model, training = draw(models(max_layers=1)), draw(jobs)
    overlaps = {"overlap": draw(st.floats(0, 1)), "contention": draw(st.floats(0, 1))}
    on = with_device(draw(clusters), lambda _: overlaps)
    space = Space(model, on, training, Pins())
    shapes = [shape for family in list(space.families()) for shape in space.shapes(family)]
    assume(shapes)
    return model, on, training, draw(st.sampled_from(shapes)), [1]


@settings(max_examples=80)
@given(single_layers(), st.sampled_from(RECOMPUTES))
def test_a_layers_step_lies_between_the_longer_of_compute_and_communication_and_their_sum(
    case: tuple[ModelProfile, ClusterSpec, TrainingSpec, Shape, list[int]], recompute: Recompute
) -> None:
    model, on, training, shape, _ = case

    found = priced(case, [recompute])

    prices = CostModel(model, on, training)
    compute_s = sum(found.breakdown[part] for part in ("compute", "recompute", "optimizer"))
    comm_s = sum(
        t.calls * collective_s(t.kind, t.bytes / t.calls, prices.axis_links(shape, t.axis)) for t in found.collectives
    )
    assert found.step_time_s >= max(compute_s, comm_s) * (1 - ROUNDING)
    assert found.step_time_s <= (compute_s + comm_s) * (1 + ROUNDING)


def test_hidden_tensor_parallel_communication_still_takes_its_time(tmp_path: Path) -> None:
    """A stack that hides half of it cannot hide it behind a layer that computes next to nothing."""
    stack = tmp_path / "stack.toml"
    stack.write_text('[half-hidden]\ndescription = "overlaps"\ntensor_overlap = 0.5\nsource = "this test"\n')
    model = profile([layer_class("c", 1e6, 1_000, saved=1e6, inputs=1e9, heads=2)], [0])
    on, shape = cluster(per_host=2), Shape(1, 1, 2, 1, micro_batch=1, num_microbatches=1)
    training = TrainingSpec(global_batch=1, seq_len=SEQ_LEN, software=str(stack))

    found = priced((model, on, training, shape, [1]), ["none"])

    links = CostModel(model, on, training).axis_links(shape, "tensor")
    assert found.step_time_s >= 2 * collective_s("all_reduce", 1e9, links)


@pytest.mark.parametrize(("num_hosts", "hidden"), [(1, True), (2, False)])
def test_tensor_parallel_communication_hides_inside_a_host_only(tmp_path: Path, num_hosts: int, hidden: bool) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[hides-all]\ndescription = "overlaps"\ntensor_overlap = 1.0\nsource = "this test"\n')
    model = profile([layer_class("c", 1e13, 1_000, saved=1e6, inputs=1e6, heads=2)], [0])
    on, shape = cluster(num_hosts, per_host=2 // num_hosts), Shape(1, 1, 2, 1, micro_batch=1, num_microbatches=1)
    training = TrainingSpec(global_batch=1, seq_len=SEQ_LEN, software=str(stack))

    found = priced((model, on, training, shape, [1]), ["none"])

    assert (found.breakdown["tensor"] == 0.0) == hidden


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=100)
@given(plans())
def test_recompute_is_offered_only_where_it_keeps_less(
    case: tuple[ModelProfile, ClusterSpec, TrainingSpec, Shape, list[int]],
) -> None:
    model, on, training, shape, _ = case
    prices = CostModel(model, on, training)

    offered = [(kind, option) for kind in prices.kinds for option in prices.options(kind, shape)]

    for kind, option in offered:
        if option.recompute != "none":
            kept = prices.cost(kind, shape, option).kept_bytes
            assert kept < prices.cost(kind, shape, LayerOption("none", option.reshard)).kept_bytes


def test_recompute_is_not_offered_where_keeping_the_input_costs_more() -> None:
    """The second layer saves 1 MB per sample; to repeat it, the 10 MB are needed that nobody else keeps."""
    model = profile([layer_class("c", 1e11, 1_000_000, saved=1e6, inputs=1e6)], [0, 0], crossing=1e7)
    unsaved = tuple(tensor.model_copy(update={"saved_by": ()}) for tensor in model.tensors)
    prices = CostModel(
        model.model_copy(update={"tensors": unsaved}), cluster(), TrainingSpec(global_batch=8, seq_len=SEQ_LEN)
    )
    shape = Shape(8, 1, 1, 1, micro_batch=1, num_microbatches=1)

    offered = prices.options(prices.kinds[1], shape)

    assert offered == [LayerOption("none", False)]


def test_giving_parameters_back_is_not_offered_to_layers_without_any() -> None:
    model = profile([layer_class("c", 1e11, 1_000_000, saved=1e6, inputs=1e6)], [0, 0])
    bare = model.model_copy(
        update={
            "classes": tuple(c.model_copy(update={"parameters": ()}) for c in model.classes),
            "layers": tuple(layer.model_copy(update={"parameters": ()}) for layer in model.layers),
        }
    )
    prices = CostModel(bare, cluster(), TrainingSpec(global_batch=8, seq_len=SEQ_LEN))

    offered = prices.options(prices.kinds[0], Shape(1, 8, 1, 1, micro_batch=1, num_microbatches=1))

    assert {option.reshard for option in offered} == {False}


# --- units -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_magnitudes_of_llama_3_8b_on_8_h100_are_those_of_milliseconds_seconds_and_gib() -> None:
    """FSDP over 8 GPUs, one sequence of 8,192 tokens each, every block recomputed: 8e9 x 8 x 8192 FLOPs in a GPU."""
    model, on = zoo_profile("llama3_8b"), cluster_of(load_device("h100-80gb"), 8)
    training = TrainingSpec(global_batch=16, seq_len=8192)
    shape = Shape(1, 8, 1, 1, micro_batch=1, num_microbatches=2, gradient_sync="every")
    prices, h100 = CostModel(model, on, training), on.device
    block = prices.kinds[1]
    options = [LayerOption("full" if prices.kinds[i] == block else "none", True) for i in range(len(model.layers))]

    found = estimate(make_plan(model, on, training, shape, [options]), model)
    cost = prices.cost(block, shape, options[1])
    seconds = layer_seconds(model.classes[block.layer_class].whole, h100, "bf16", 2, batch=1, tensor=1)

    assert 3.5e14 < model.flops_per_sample() < 6e14
    assert 4e-3 < seconds.forward < 20e-3
    assert 1.5 < seconds.backward / seconds.forward < 3.5
    assert 0.7 < seconds.repeated["full"].device_s / seconds.forward < 1.0, "the last matmul is not run again"
    assert 4e-3 < cost.forward_total_s < 20e-3
    assert 12e-3 < cost.backward_total_s < 80e-3
    assert cost.elements == pytest.approx(218e6, rel=0.01)
    assert cost.kept_bytes == pytest.approx(8192 * 4096 * 2, rel=0.01), "its input"
    assert 1.0 < found.step_time_s < 3.5
    assert 6e3 < found.tokens_per_s / 8 < 16e3
    assert 0.25 < found.mfu < 0.7
    assert found.samples_per_s == pytest.approx(16 / found.step_time_s)
    assert 20 * GIB < found.memory[0].device_bytes < 60 * GIB
    assert found.memory[0].items["parameters"] == pytest.approx(4 * 8.03e9 / 8, rel=0.01)
    assert 70 * GIB < budget_bytes(h100, training) < 80 * GIB
    assert 60 * GIB < allocatable_bytes(shape, h100, training) < budget_bytes(h100, training)
    assert prices.crossings(shape)[2].bytes == 8192 * 4096 * 2
    assert 1e-3 < collective_s("all_gather", 2 * 218e6, prices.links(8, 1)) < 4e-3
    assert 5e-3 < optimizer_s(1e9, "adamw", h100) < 20e-3
    assert 2e-3 < accumulate_s(1e9, h100) < 10e-3
    assert 0.2e-3 < moving_s(1e9, h100, "copy") < 1e-3
    by_kind = {t.kind: t for t in found.collectives}
    assert by_kind["all_gather"].bytes == pytest.approx(2 * 2 * 2 * 8.03e9, rel=0.02), "twice, of 2 micro-batches, bf16"
    assert by_kind["reduce_scatter"].bytes == pytest.approx(2 * 4 * 8.03e9, rel=0.02), "of 2 micro-batches, fp32"


@pytest.mark.slow
def test_magnitudes_of_mixtral_with_experts_and_context_spread_over_a_host() -> None:
    """One sequence of 8,192 tokens, two experts each, on 64 H100: 134 MB go to experts and come back, over NVLink."""
    model, on = zoo_profile("mixtral_8x7b"), cluster_of(load_device("h100-80gb"), 64)
    training, keep = TrainingSpec(global_batch=64, seq_len=8192), LayerOption("none", True)
    prices = CostModel(model, on, training)
    spread = Shape(1, 64, 1, 1, micro_batch=1, num_microbatches=1, expert=8, reshard=True)
    sliced = Shape(1, 8, 1, 1, micro_batch=8, num_microbatches=1, context=8)
    state = state_bytes(spread, training)

    with_experts = prices.cost(prices.kinds[1], spread, keep)
    by_heads = prices.cost(prices.kinds[1], replace(sliced, context_kind="all_to_all"), keep)
    in_a_ring = prices.cost(prices.kinds[1], sliced, keep)

    assert 0.5e-3 < with_experts.expert_forward_s < 2e-3
    assert 10e-3 < with_experts.forward_s < 40e-3
    assert 0.2e-3 < by_heads.context_forward_s < 2e-3, "168 MB of queries, keys, values and outputs, over NVLink"
    assert 1e-3 < in_a_ring.context_forward_s < 8e-3, "8 blocks of 34 million outputs, merged at 26 bytes each"
    assert 10e-3 < exchange_s(1e9, 1e9, prices.links(64, 1)) < 50e-3, "1 GB of a GPU over its share of 8 network cards"
    assert 0.2 < optimizer_s(1e9, "adamw", on.device, on_host=True) < 2.0
    assert (64 * state.sharded_parameters, 64 * state.optimizer, state.gathered) == (4, 8, 2)
    assert 0.5 * GIB < outside_bytes(spread, on.device) < 4 * GIB
    assert closed_form_s([0.1, 0.1], [0.02, 0.01], 4) == pytest.approx(0.52)
    plan = make_plan(model, on, training, spread, [[keep] * len(model.layers)])
    for band in (time_band(plan), memory_band(plan)):
        assert band is not None
        assert 0.5 < band.low < 1.1
        assert 0.9 < band.high < 2.0
