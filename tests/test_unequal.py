"""Unequal devices: stages on their own kind of device, against brute force, and what a plan says about them."""

import io
import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from meshwright.executor.reporting.report import gpus_of
from meshwright.executor.reporting.report_facts import host_patterns
from meshwright.executor.reporting.terminal import print_memory, print_placement
from meshwright.planner.answers.check import check
from meshwright.planner.answers.explain import reason
from meshwright.planner.answers.fitting import closest_plan
from meshwright.planner.answers.search import InfeasibleError, search
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.stage_models import stage_kinds
from meshwright.planner.plan.document import Plan, placements
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import is_chunked
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.bounds import recompute_of
from meshwright.planner.solve.explore import TIE, Explorer
from meshwright.planner.solve.ilp import solve_master
from meshwright.planner.solve.scan import least_by_ranks, scan, simulated_s
from meshwright.planner.solve.space import Space
from meshwright.planner.solve.tensor_choice import CutChoice
from meshwright.profiler.machine.cluster import ClusterSpec, Device, Link
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.enumeration import plans_of
from support.synthetic import device, layer_class, mixed, profile, random_class

FAST = device(name="fast", flops={"bf16": 200e12, "fp32": 100e12})
SLOW = device(name="slow")


def as_the_slowest(cluster: ClusterSpec) -> ClusterSpec:
    """The same hosts with the worst of their devices."""
    slowest, link = cluster.device, cluster.link
    hosts = tuple(group.model_copy(update={"device": slowest, "link": link}) for group in cluster.hosts)
    return cluster.model_copy(update={"hosts": hosts})


def random_instance(seed: int) -> tuple[ModelProfile, ClusterSpec, TrainingSpec]:
    """A chain of up to 4 layers on two or three kinds of devices that differ in speed, memory and links."""
    rng = random.Random(seed)
    classes = [random_class(rng, f"c{i}", [None, 2, 4]) for i in range(rng.randint(1, 3))]
    order = [rng.randrange(len(classes)) for _ in range(rng.randint(2, 4))]
    same = [(a, b) for a in range(len(order)) for b in range(a + 1, len(order)) if order[a] == order[b]]
    ties = [rng.choice(same)] if same and rng.random() < 0.3 else []
    kinds = [
        device(
            memory=rng.choice([0.5e9, 1e9, 2e9, 4e9]),
            name=f"kind{i}",
            flops={"bf16": rng.uniform(50e12, 300e12), "fp32": 50e12},
            bandwidth=rng.uniform(0.5e12, 3e12),
            overlap=rng.choice([0.0, 0.8]),
            link=Link(bandwidth=rng.choice([5e9, 100e9]), latency=1e-6),
        )
        for i in range(3)
    ]
    sizes = ("1x2 1x2", "2x1 2x1", "1x1 1x1", "2x1 1x2", "1x2 1x1 1x1", "1x2 2x1 1x2", "1x3 1x1")
    pairs = [tuple(map(int, size.split("x"))) for size in rng.choice(sizes).split()]
    hosts = [(count, per_host, on) for (count, per_host), on in zip(pairs, kinds, strict=False)]
    network = Link(bandwidth=rng.choice([1e9, 50e9]), latency=1e-5)
    devices = sum(count * per_host for count, per_host, _ in hosts)
    batch = rng.choice([2, 4]) * (3 if devices == 6 else 1)
    return (
        profile(classes, order, 1e6, ties),
        mixed(*hosts, network=network),
        TrainingSpec(global_batch=batch, seq_len=64, memory_margin=0.0),
    )


def every_plan(
    model: ModelProfile, on: ClusterSpec, training: TrainingSpec, pins: Pins | None = None
) -> Iterator[Plan]:
    """All plans with the kinds in all orders, whatever the search would keep of them."""
    choices = CutChoice(CostModel(model, on, training)).worth_trying
    space = Space(model, on, training, pins or Pins(), choices)
    shapes = {replace(s, kind_order=()) for family in list(space.families()) for s in space.shapes(family)}
    orders = list(itertools.permutations(range(len(on.kinds))))
    for shape, order in itertools.product(shapes, orders):
        yield from plans_of(replace(shape, kind_order=order), model, on, training)


def is_small(seed: int) -> bool:
    """Whether an instance has few enough plans to enumerate in a test."""
    model, on, training = random_instance(seed)
    return len(model.layers) <= 3 and len(on.kinds) == 2 and training.global_batch == 2


SMALL = [seed for seed in range(200) if is_small(seed)][:16]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SMALL)
def test_search_finds_the_optimum_of_brute_force_over_all_orders_of_kinds(seed: int) -> None:
    model, on, training = random_instance(seed)

    explorer = Explorer(model, on, training)
    outcome = explorer.explore(Pins(), math.inf)

    priced = (estimate(plan, model) for plan in every_plan(model, on, training))
    once_s = explorer.model.software.step_s
    expected = min((found.step_time_s - once_s for found in priced if found.fits), default=None)
    assert (outcome.best is None) == (expected is None)
    if outcome.best is not None and expected is not None:
        assert outcome.bound * (1 - 1e-9) <= expected <= outcome.best.seconds * (1 + 1e-9)
        assert outcome.best.seconds <= max(outcome.bound, expected) * (1 + 1e-3)


@pytest.mark.parametrize("seed", slow.but_first(SMALL[:12], 1))
def test_a_pinned_zero_bubble_pipeline_is_the_best_of_all_cuts_and_orders_of_kinds(seed: int) -> None:
    model, on, training = random_instance(seed)
    pins = Pins(schedule="zb-h1")

    explorer = Explorer(model, on, training)
    outcome = explorer.explore(pins, math.inf)

    priced = (estimate(plan, model) for plan in every_plan(model, on, training, pins))
    once_s = explorer.model.software.step_s
    expected = min((found.step_time_s - once_s for found in priced if found.fits), default=None)
    assert (outcome.best is None) == (expected is None)
    if outcome.best is not None and expected is not None:
        assert outcome.bound * (1 - 1e-9) <= expected <= outcome.best.seconds * (1 + 1e-9)
        assert outcome.best.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", slow.but_these(range(40), {33}))  # 33 alone sees stages in a wrong order
def test_master_ilp_scan_and_search_agree_on_unequal_devices(seed: int) -> None:
    model, on, training = random_instance(1000 + seed)
    explorer, space = Explorer(model, on, training), Space(model, on, training, Pins())
    families = [family for family in space.families() if not is_chunked(family.schedule)]
    shapes = [shape for family in families for shape in space.shapes(family)]

    scanned = [found.seconds for found in (scan(explorer.priced(s, None, None)) for s in shapes) if found is not None]
    solved = solve_master([explorer.priced(s, None, None) for s in shapes])
    explored = explorer.explore(Pins(), math.inf).best

    assert (solved is None) == (explored is None) == (not scanned)
    if solved is not None and explored is not None:
        assert solved[0].objective == pytest.approx(min(scanned), rel=1e-5)
        assert explored.seconds <= min(scanned) * (1 + 1e-9)


@pytest.mark.parametrize("seed", slow.but_these(range(40), {2}))
def test_no_plan_on_unequal_devices_is_faster_than_the_bounds_that_know_memory(seed: int) -> None:
    model, on, training = random_instance(3000 + seed)
    explorer, space = Explorer(model, on, training), Space(model, on, training, Pins())
    for family in list(space.families()):
        anywhere_s = max(explorer.bounds.anywhere_s(family, space), explorer.bounds.of_family(family))
        least = np.maximum(anywhere_s, explorer.bounds.of_shapes(family, space))
        for i, shape in enumerate(space.shapes(family)):
            prices = explorer.priced(shape, None, None)
            found = None if is_chunked(shape.schedule) else scan(prices)
            if found is not None:
                own = [explorer.bounds.with_memory_s(family, space, [i])[0]]
                if shape.pipeline > 1:
                    own += [explorer.bounds.of_prices(prices, math.inf)[0], least_by_ranks(prices, math.inf)[0]]
                assert max(least[i], *own) <= simulated_s(prices, found) * (1 + 1e-9)


def longer_instance(seed: int) -> tuple[ModelProfile, ClusterSpec, TrainingSpec]:
    """A chain of 8 to 14 layers on four hosts of two kinds, of which one is faster by a little or by much."""
    rng = random.Random(seed)
    classes = [random_class(rng, f"c{i}", [None, 2]) for i in range(rng.randint(1, 3))]
    order = [rng.randrange(len(classes)) for _ in range(rng.randint(8, 14))]
    faster, memory, per_host = rng.choice((1.02, 1.3, 2.0)), rng.choice((8e9, 4e9, 2e9)), rng.choice((1, 2))
    one = device(memory=memory, name="one", flops={"bf16": 100e12, "fp32": 50e12})
    other = device(memory=memory * rng.choice((1.0, 0.6)), name="other", flops={"bf16": faster * 100e12, "fp32": 50e12})
    network = Link(bandwidth=rng.choice((1e9, 50e9)), latency=1e-5)
    on = mixed(*((2, per_host, each) for each in rng.sample((one, other), 2)), network=network)
    batch = 4 * per_host * rng.choice((1, 2, 4))
    return profile(classes, order, 1e6), on, TrainingSpec(global_batch=batch, seq_len=64, memory_margin=0.0)


@pytest.mark.parametrize("seed", slow.but_first(range(12), 0))
def test_no_plan_of_a_longer_chain_on_unequal_devices_is_faster_than_its_bounds(seed: int) -> None:
    model, on, training = longer_instance(seed)
    explorer, space, rng = Explorer(model, on, training), Space(model, on, training, Pins()), random.Random(seed)
    families = [family for family in space.families() if family.pipeline > 1]
    checked = 0
    for family in rng.sample(families, min(30, len(families))):
        leaves = space.leaves(family).each
        mix = next((i for i, leaf in enumerate(leaves) if not leaf.kind_order), None)
        if mix is not None and not is_chunked(family.schedule):  # what it finds out must not count for the others
            explorer.bounds.of_prices(explorer.priced(family.shape(leaves[mix]), None), math.inf)
        own = np.array([i for i, leaf in enumerate(leaves) if leaf.kind_order])[:6]
        if not len(own):
            continue
        anywhere_s = max(explorer.bounds.anywhere_s(family, space), explorer.bounds.of_family(family))
        bounds = np.maximum(explorer.bounds.of_shapes(family, space)[own], anywhere_s)
        bounds = np.maximum(bounds, explorer.bounds.by_prices_s(family, space, own))
        for least_s, i in zip(bounds.tolist(), own.tolist(), strict=True):
            prices = explorer.priced(family.shape(leaves[i]), recompute_of(family, space.pins))
            found = explorer.solved(prices, family, None, math.inf, math.inf)
            if found is not None:
                checked += 1
                least_s = max(least_s, explorer.bounds.of_prices(prices, math.inf)[0])
                assert least_s <= found.seconds * (1 + 1e-9), family
    assert checked


def test_bounds_of_unequal_stages_come_near_the_best_plan() -> None:
    model, on, training = longer_instance(3)
    explorer, space = Explorer(model, on, training), Space(model, on, training, Pins(schedule="1f1b", pipeline=4))
    family = next(family for family in space.families() if family.micro_batch == 1)
    leaves = space.leaves(family).each
    own = next(i for i, leaf in enumerate(leaves) if leaf.kind_order)
    prices = explorer.priced(family.shape(leaves[own]), None)

    found = explorer.solved(prices, family, None, math.inf, math.inf)

    assert found is not None
    assert explorer.bounds.of_shapes(family, space)[own] >= 0.8 * found.seconds
    assert explorer.bounds.of_prices(prices, math.inf)[0] >= 0.98 * found.seconds


@pytest.mark.parametrize("seed", slow.but_these(range(0, 200, 16), (16, 32, 48)))
def test_a_plan_for_unequal_devices_passes_the_independent_check(seed: int) -> None:
    model, on, training = random_instance(2000 + seed)
    try:
        result = search(model, on, training)
    except InfeasibleError:
        assert Explorer(model, on, training).explore(Pins(), math.inf).best is None
        return

    assert check(result.plan, model) == []
    shapes = result.certificate.shapes
    assert shapes["total"] == shapes["rejected"] + shapes["pruned"] + shapes["solved"]


BLOCKS = profile([layer_class("block", 1e12, 10_000_000, 3e7, 1e6, heads=8)], [0] * 12)
JOB = TrainingSpec(global_batch=32, seq_len=64)


def test_a_device_twice_as_fast_takes_twice_the_layers() -> None:
    on = mixed((1, 2, FAST), (1, 2, SLOW), network=Link(bandwidth=500e9, latency=1e-6))

    result = search(BLOCKS, on, JOB, pins=Pins(pipeline=2, schedule="1f1b", data_replicate=2))

    names = [group.device.name for group in result.plan.cluster.hosts]
    layers = {name: len(stage.layers) for name, stage in zip(names, result.plan.stages, strict=True)}
    assert layers == {"fast": 8, "slow": 4}


@pytest.mark.slow
def test_stages_on_their_own_kind_are_faster_than_all_as_the_slowest() -> None:
    on = mixed((1, 8, FAST), (1, 8, SLOW))

    own = search(BLOCKS, on, JOB).estimate.step_time_s

    assert own < 0.8 * search(BLOCKS, as_the_slowest(on), JOB).estimate.step_time_s


@pytest.mark.parametrize("seed", slow.but_these(range(4), ()))
def test_faster_devices_in_half_of_the_hosts_make_no_plan_slower(seed: int) -> None:
    rng = random.Random(seed)
    classes = [random_class(rng, f"c{i}", [None, 2]) for i in range(rng.randint(1, 3))]
    model = profile(classes, [rng.randrange(len(classes)) for _ in range(rng.randint(6, 9))], 1e6)
    training = TrainingSpec(global_batch=8, seq_len=64, memory_margin=0.0)
    usual, faster = device(memory=8e9, name="usual"), device(memory=8e9, name="faster", flops=FAST.flops)
    network = Link(bandwidth=1e9, latency=1e-5)

    before = search(model, mixed((4, 1, usual), network=network), training).certificate
    after = search(model, mixed((2, 1, usual), (2, 1, faster), network=network), training).certificate

    assert after.bound <= before.fastest_s
    assert after.status != "optimal" or after.fastest_s <= before.fastest_s * (1 + TIE)


def test_each_stage_is_held_against_the_memory_of_its_own_device() -> None:
    small = device(name="small", memory=0.6e9)
    on = mixed((1, 2, small), (1, 2, device(name="large", memory=8e9)))

    result = search(BLOCKS, on, replace_margin(JOB), pins=Pins(pipeline=2, schedule="1f1b"))

    budgets = [stage.budget_bytes for stage in result.estimate.memory]
    memory_of = {group.device.memory for group in on.hosts}
    assert set(budgets) == memory_of
    assert result.estimate.fits
    assert result.estimate.peak_device_bytes > small.memory


def replace_margin(job: TrainingSpec) -> TrainingSpec:
    """The job with all of the memory."""
    return job.model_copy(update={"memory_margin": 0.0})


def two_stages(on: ClusterSpec, order: tuple[int, ...], replicas: int = 2) -> Plan:
    shape = Shape(replicas, 1, 1, 2, 1, 32 // replicas, schedule="1f1b", kind_order=order)
    return make_plan(BLOCKS, on, JOB, shape, [[LayerOption()] * 8, [LayerOption()] * 4])


def test_ranks_are_listed_with_the_hosts_of_the_cluster_file() -> None:
    on = mixed((1, 2, SLOW), (1, 2, FAST))

    listed = list(placements(two_stages(on, (1, 0))))

    assert [(p.rank, p.host, p.device, p.device_name, len(p.layers)) for p in listed] == [
        (0, 1, 0, "fast", 8),
        (1, 1, 1, "fast", 8),
        (2, 0, 0, "slow", 4),
        (3, 0, 1, "slow", 4),
    ]


def test_hosts_of_a_kind_that_lie_apart_are_brought_together() -> None:
    on = mixed((1, 2, SLOW), (1, 4, FAST), (1, 2, SLOW))

    plan = two_stages(on, (0, 1), replicas=4)

    assert [p.host for p in placements(plan)] == [0, 0, 2, 2, 1, 1, 1, 1]
    assert stage_kinds(plan.cluster, replace(two_stages_shape(4), kind_order=())) == (0, 1)


def two_stages_shape(replicas: int) -> Shape:
    return Shape(replicas, 1, 1, 2, 1, 32 // replicas, schedule="1f1b")


@pytest.mark.parametrize(
    ("on", "shape", "kinds"),
    [
        (mixed((1, 4, FAST), (1, 4, SLOW)), two_stages_shape(4), (0, 1)),
        (mixed((1, 4, FAST), (1, 4, SLOW)), replace(two_stages_shape(4), kind_order=(1, 0)), (0, 1)),
        (mixed((1, 4, FAST), (1, 4, SLOW)), Shape(8, 1, 1, 1, 1, 4), None),
        (mixed((1, 6, FAST), (1, 2, SLOW)), two_stages_shape(4), None),
        (mixed((1, 6, FAST), (1, 2, SLOW)), replace(two_stages_shape(2), pipeline=4), (0, 0, 0, 1)),
        (mixed((1, 4, FAST), (1, 4, FAST)), two_stages_shape(4), None),
        (
            mixed((1, 4, FAST), (1, 4, SLOW)),
            replace(two_stages_shape(4), mesh_axes=("data_replicate", "pipeline", "data_shard", "context", "tensor")),
            None,
        ),
    ],
)
def test_a_stage_has_a_kind_of_its_own_or_all_count_as_the_slowest(
    on: ClusterSpec, shape: Shape, kinds: tuple[int, ...] | None
) -> None:
    assert stage_kinds(on, shape) == kinds


def test_a_stage_of_several_kinds_is_priced_as_the_slowest_of_all() -> None:
    on = mixed((1, 6, FAST), (1, 2, SLOW))
    plan = two_stages(on, (), replicas=4)

    found = estimate(plan, BLOCKS)

    worst = estimate(plan.model_copy(update={"cluster": as_the_slowest(on)}), BLOCKS)
    assert found.stage_forward_s == worst.stage_forward_s


def test_mfu_counts_the_peak_of_every_device() -> None:
    on = mixed((1, 2, FAST), (1, 2, SLOW))
    plan = two_stages(on, (0, 1))

    found = estimate(plan, BLOCKS)

    peak = 2 * 200e12 + 2 * 100e12
    assert found.mfu == pytest.approx(BLOCKS.flops_per_sample() * 32 / found.step_time_s / peak)


def test_what_crosses_between_kinds_takes_the_network() -> None:
    on = mixed((1, 2, FAST), (1, 2, SLOW))
    slow_network = mixed((1, 2, FAST), (1, 2, SLOW), network=Link(bandwidth=1e6, latency=1e-5))

    near, far = (estimate(two_stages(cluster, (0, 1)), BLOCKS).step_time_s for cluster in (on, slow_network))

    assert far > near + 0.9 * 0.269 * 2 * 1e6 / (1e6 / 2)


def test_the_terminal_names_device_and_budget_of_every_stage() -> None:
    on = mixed((1, 2, replace_device(SLOW, 20e9)), (1, 2, FAST))
    plan = two_stages(on, (1, 0))
    console = Console(file=io.StringIO(), width=140)

    print_memory(console, plan, estimate(plan, BLOCKS).memory)
    print_placement(console, plan)

    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"0 +fast .* 70\.8 ", said)
    assert re.search(r"1 +slow .* 17\.7 ", said)
    assert "host 1: GPUs 0-1 (fast)" in said
    assert "host 0: GPUs 0-1 (slow)" in said


def replace_device(on: Device, memory: float) -> Device:
    """The device with another memory."""
    return on.model_copy(update={"memory": memory})


def test_the_reason_says_what_becomes_of_unequal_devices() -> None:
    on = mixed((1, 4, SLOW), (1, 4, FAST))
    own, shared = two_stages(on, (1, 0), replicas=4), search(BLOCKS, on, JOB, pins=Pins(pipeline=1)).plan

    reasons = [reason(plan, estimate(plan, BLOCKS)) for plan in (own, shared)]

    assert "8 layers in 1 stage on fast, 4 layers in 1 stage on slow" in reasons[0]
    assert "all count as the slowest (slow) with the least memory (74.5 GiB)" in reasons[1]
    assert "a pipeline of 2 stages, or a multiple, would give each its own kind" in reasons[1]


@pytest.mark.slow
def test_a_saved_plan_knows_the_budget_of_every_stage() -> None:
    on = mixed((1, 2, replace_device(SLOW, 20e9)), (1, 2, FAST))

    result = search(BLOCKS, on, JOB, pins=Pins(pipeline=2, schedule="1f1b"))

    assert result.plan.prediction is not None
    budgets = [result.plan.prediction.budget_of(position) for position in (0, 1)]
    assert budgets == [stage.budget_bytes for stage in result.estimate.memory]
    assert budgets[0] != budgets[1]


def test_stages_on_several_hosts_are_listed_by_the_numbers_of_the_cluster_file() -> None:
    on = mixed((1, 2, SLOW), (1, 4, FAST), (1, 2, SLOW))

    plan = two_stages(on, (1, 0), replicas=4)

    assert [gpus_of(plan, position) for position in (0, 1)] == ["host 1: GPUs 0-3 (fast)", "hosts 0, 2 (slow)"]
    assert [pattern.hosts for pattern in host_patterns(plan)] == [(1,), (0, 2)]


def test_prices_and_devices_of_a_cluster_count_every_kind() -> None:
    dear, cheap = FAST.model_copy(update={"price_per_hour": 4.0}), SLOW.model_copy(update={"price_per_hour": 1.0})
    on = mixed((1, 2, dear), (3, 2, cheap))

    assert on.price_per_hour == pytest.approx((2 * 4.0 + 6 * 1.0) / 8)
    assert on.devices == "2 x fast + 6 x slow"
    assert mixed((1, 2, dear), (3, 2, SLOW)).price_per_hour is None


def test_the_closest_that_does_not_fit_is_cut_by_memory() -> None:
    heavy = profile([layer_class("block", 1e12, 100_000_000, 3e7, 1e6, heads=8)], [0] * 12)
    on = mixed((1, 2, replace_device(SLOW, 3e9)), (1, 2, replace_device(FAST, 6e9)))

    closest = closest_plan(Explorer(heavy, on, JOB), Pins(pipeline=2, data_replicate=2))

    assert closest is not None
    assert closest.over_bytes > 0
    assert sorted(len(stage.layers) for stage in closest.plan.stages) == [4, 8]


def test_the_check_names_the_stage_whose_own_device_is_too_small() -> None:
    on = mixed((1, 2, replace_device(SLOW, 0.6e9)), (1, 2, replace_device(FAST, 8e9)))
    plan = search(BLOCKS, on, replace_margin(JOB), pins=Pins(pipeline=2, schedule="1f1b", micro_batch=2)).plan
    turned = plan.model_copy(update={"cluster": plan.cluster.in_order((1, 0))})
    heavy = max(range(2), key=lambda stage: len(plan.stages[stage].layers))

    found = check(turned, BLOCKS)

    assert check(plan, BLOCKS) == []
    assert len(found) == 1
    assert found[0].startswith(f"does not fit: stage {heavy} (slow) needs")
    assert "may use 572 MiB" in found[0]
