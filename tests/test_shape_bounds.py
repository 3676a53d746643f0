"""Bounds of all shapes of a family at once are those of one shape at a time, and never above what a shape takes."""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from support import slow

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.planning_time.instances import Instance, instance
from meshwright.planner.cost.comm_cost import CollectiveKind, GroupLinks, collective_s, seconds_at_places
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.priced_layer import LayerCost
from meshwright.planner.plan.document import Recompute
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import ZERO_BUBBLE
from meshwright.planner.plan.shape import Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve import fluid_program
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.layer_lower_bounds import LeastWork
from meshwright.planner.solve.memory_bounds import MemoryBounds
from meshwright.planner.solve.scan import least_by_ranks
from meshwright.planner.solve.shape_bounds import ShapeBounds
from meshwright.planner.solve.space import Family, Space
from meshwright.profiler.machine.cluster import Group, Link
from support.mixtures import mixture_on
from support.synthetic import cluster, device, layer_class, profile, random_class

NETWORK = Link(bandwidth=5e10, latency=1e-5)
TABLES: dict[str, Callable[[LayerCost, int], float]] = {
    "microbatch_s": lambda cost, _: cost.microbatch_s,
    "forward_s": lambda cost, _: cost.forward_total_s,
    "once_s": lambda cost, _: cost.once_data_s,
    "step_s": lambda cost, num_microbatches: num_microbatches * cost.microbatch_s + cost.once_s,
}
"""Table -> what it holds of a layer at the option that is best there."""

LIKE_GLOO = {"flat_rings": True, "replica_overlap": 0.3}
SOFTWARE = ("fsdp2-eager", "megatron-core", "fsdp2-compile")


def asked_of(seed: int) -> Instance:
    """A random instance, by turns on several training stacks and with several pins, and on devices like NCCL's and like
    gloo's."""
    found = instance(seed)
    training = found.training.model_copy(update={"software": SOFTWARE[seed // 3 % len(SOFTWARE)]})
    if seed % 4 == 2:
        hosts = tuple(
            group.model_copy(update={"device": group.device.model_copy(update=LIKE_GLOO)})
            for group in found.cluster.hosts
        )
        found = replace(found, cluster=found.cluster.model_copy(update={"hosts": hosts}))
    return replace(found, training=training)


def families_of(asked: Instance) -> Iterator[tuple[Space, Family, Recompute | None]]:
    """Every family, with what its layers recompute."""
    space = Space(asked.profile, asked.cluster, asked.training, asked.pins, asked.choice.worth_trying)
    for family in list(space.families()):
        yield space, family, "none" if family.schedule in ZERO_BUBBLE else asked.pins.recompute


MIXTURES = [mixture_on(1e-3, "fsdp2-eager", pins) for pins in (Pins(), Pins(expert=2))]
"""Hosts issue so slowly that their wrappers and casts are waited for."""


@pytest.mark.parametrize(
    "asked", [*slow.but_first(map(asked_of, range(0, 120, 2)), 12), *MIXTURES], ids=lambda asked: str(asked.seed)
)
def test_tables_of_a_family_hold_what_each_of_its_shapes_costs_alone(asked: Instance) -> None:
    explorer = Explorer(asked.profile, asked.cluster, asked.training)
    bounds, model = ShapeBounds(explorer.chain), explorer.model
    reshard = asked.pins.reshard

    for space, family, recompute in families_of(asked):
        tables = bounds.fastest(family, space.leaves(family), recompute, reshard)
        for i, shape in enumerate(space.shapes(family)):
            costs = [
                [model.cost(kind, shape, option) for option in model.options(kind, shape, recompute or "none", reshard)]
                for kind in bounds.kinds
            ]
            for name, of_cost in TABLES.items():
                alone = [min(of_cost(cost, shape.num_microbatches) for cost in row) for row in costs]
                found = getattr(tables, name)[:, i]
                np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-15, err_msg=f"{name} {shape}")


def too_high(explorer: Explorer, asked: Instance, limit: int = 40) -> list[Shape]:
    """Shapes that take less than their bounds say, without memory or with it, by prices of others and by programs of
    their own, of up to so many families."""
    found, bounds = [], explorer.bounds
    for space, family, recompute in list(families_of(asked))[:limit]:
        leaves = space.leaves(family).each
        of_family = max(bounds.of_family(family), bounds.held_s(family, space))
        least = np.maximum(bounds.of_shapes(family, space), of_family)
        for i, leaf in enumerate(leaves):
            prices = explorer.priced(family.shape(leaf), recompute, asked.pins.reshard, asked.pins.offered)
            solved = explorer.solved(prices, family, None, float("inf"), float("inf"))
            if solved is None:
                continue
            bound = max(least[i], float(bounds.with_memory_s(family, space, [i])[0]))
            if family.pipeline > 1:
                bound = max(bound, bounds.of_prices(prices, float("inf"))[0])
                bound = max(bound, bounds.of_prices(prices, 1.001 * solved.seconds)[0])
            if family.pipeline > 1 and family.virtual_stages == 1:
                for times in (2, 1.001):  # what takes longer is left out
                    bound = max(bound, least_by_ranks(prices, times * solved.seconds)[0])
            if solved.seconds < bound * (1 - 1e-9):
                found.append(prices.shape)
    return found


@pytest.mark.parametrize("seed", slow.but_these([*range(0, 60, 3), 151], (3, 6, 9)))
def test_no_shape_takes_less_than_its_bound(seed: int) -> None:
    asked = asked_of(seed)

    assert too_high(Explorer(asked.profile, asked.cluster, asked.training), asked) == []


def test_a_planted_bound_that_is_too_high_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = ShapeBounds.fastest

    def planted(self: ShapeBounds, *arguments: object) -> object:
        found = fastest(self, *arguments)  # type: ignore[arg-type]
        return replace(found, **{each: getattr(found, each) * 1.2 for each in ("microbatch_s", "forward_s", "step_s")})

    monkeypatch.setattr(ShapeBounds, "fastest", planted)
    instances = map(asked_of, range(0, 30, 3))
    assert any(too_high(Explorer(a.profile, a.cluster, a.training), a) for a in instances)


def scarce(seed: int, memory: float) -> Instance:
    """Interleaved pipelines of equal blocks between a first and a last layer."""
    draw = random.Random(seed)
    parts = [(draw.uniform(0, 0.4), draw.uniform(0, 0.4))]
    first, block, last = (random_class(draw, name, [None], parts) for name in ("first", "block", "last"))
    chain = profile([first, block, last], [0, *[1] * draw.randint(6, 12), 2])
    training = TrainingSpec(global_batch=draw.choice((8, 16)), seq_len=128, memory_margin=0.0)
    return Instance(seed, chain, cluster(1, 4, device(memory)), training, Pins(schedule="interleaved"))


SCARCE = [(seed, memory) for seed in range(5) for memory in (1e9, 2e9, 4e9)]


@pytest.mark.parametrize(("seed", "memory"), slow.but_first(SCARCE, 1))
def test_no_interleaved_shape_takes_less_than_its_bound_where_memory_is_scarce(seed: int, memory: float) -> None:
    asked = scarce(seed, memory)

    assert too_high(Explorer(asked.profile, asked.cluster, asked.training), asked, limit=20) == []


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("software", SOFTWARE)
def test_bounds_know_what_memory_asks_of_layers_whatever_the_stack_keeps(software: str, offload: bool) -> None:
    asked = scarce(0, 1e9)
    training = asked.training.model_copy(update={"software": software})
    asked = replace(asked, training=training, pins=replace(asked.pins, offload_activations=offload))
    bounds, longer = Explorer(asked.profile, asked.cluster, asked.training).bounds, []

    for space, family, _ in families_of(asked):
        least = bounds.of_shapes(family, space)
        some = np.flatnonzero(np.isfinite(least))
        longer += (bounds.with_memory_s(family, space, some.tolist()) / least[some]).tolist()

    assert any(1.1 < more < np.inf for more in longer)


@pytest.mark.parametrize("times", [1, 3])
def test_waiting_in_the_hosts_memory_is_bounded_and_planted_too_dear_is_found(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    least_away_s = CostModel.least_away_s
    monkeypatch.setattr(CostModel, "least_away_s", lambda *asked: times * least_away_s(*asked))
    asked = scarce(0, 2e9)
    asked = replace(asked, pins=replace(asked.pins, recompute="none", offload_activations=True))

    found = too_high(Explorer(asked.profile, asked.cluster, asked.training), asked, limit=20)

    assert bool(found) == (times > 1)


@pytest.mark.parametrize("name", slow.but_first(["fixed", "again_s", "both_s"], 1))
def test_layers_that_are_planted_too_dear_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = MemoryBounds.layers

    def planted(self: MemoryBounds, *arguments: object) -> object:
        found = layers(self, *arguments)  # type: ignore[arg-type]
        if found is None:
            return None
        return [replace(run, **{name: 1.5 * getattr(run, name)}) for run in found[0]], *found[1:]

    monkeypatch.setattr(MemoryBounds, "layers", planted)
    asked = [scarce(seed, memory) for seed, memory in SCARCE]

    assert any(too_high(Explorer(a.profile, a.cluster, a.training), a, limit=20) for a in asked)


@pytest.mark.slow
def test_whole_layers_that_are_planted_to_run_too_much_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    least_again_s = fluid_program.least_again_s
    monkeypatch.setattr(fluid_program, "least_again_s", lambda *asked: 1.5 * least_again_s(*asked))
    asked = [scarce(seed, memory) for seed, memory in SCARCE]

    assert any(too_high(Explorer(a.profile, a.cluster, a.training), a, limit=20) for a in asked)


@pytest.mark.parametrize(
    ("pipeline", "readers", "twice"), [(1, (0, 5), 1), (2, (0, 5), 0), (2, (1, 5), 1), (3, (1, 4), 1), (4, (1, 4), 0)]
)
def test_weights_of_layers_that_no_stage_holds_together_are_not_counted_twice(
    pipeline: int, readers: tuple[int, int], twice: int
) -> None:
    block = layer_class("block", 1e12, 1000, saved=1e6, inputs=1e6)
    chain = profile([block], [0] * 6, ties=[readers])
    explorer = Explorer(chain, cluster(1, 4, device(1e9)), TrainingSpec(global_batch=8, seq_len=128))

    found = explorer.chain.counted_twice(Shape(1, 1, 1, pipeline, 1, 8))

    assert found == 1000 * twice


@pytest.mark.parametrize("order", [[0, 1, 1, 1, 2], [0, 0, 1, 1, 0, 0], [1] * 6, [0, 1, 0, 1, 0, 1, 2]])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_last_layer_of_a_stage_is_in_one_of_the_runs_that_its_neighbours_leave(
    order: list[int], num_stages: int
) -> None:
    classes = [layer_class(f"block{i}", 1e12 * (i + 1), 1000, saved=1e6, inputs=1e6) for i in range(3)]
    chain = Explorer(profile(classes, order), cluster(1, 8, device(1e9)), TrainingSpec(global_batch=8)).chain
    seen: list[set[int]] = [set() for _ in range(num_stages)]
    for inner in combinations(range(1, len(order)), num_stages - 1):
        for stage, end in enumerate((*inner, len(order))):
            seen[stage].add(int(chain.run_of[end - 1]))

    assert [set(chain.may_end(stage, num_stages)) for stage in range(num_stages)] == seen


@pytest.mark.parametrize("seed", slow.but_first([236, *range(0, 30, 3)], 5))
def test_shapes_that_are_left_out_for_memory_have_no_assignment(seed: int) -> None:
    asked = asked_of(seed)
    explorer = Explorer(asked.profile, asked.cluster, asked.training)

    for space, family, recompute in list(families_of(asked))[:40]:
        may_be_held = np.isfinite(explorer.bounds.of_shapes(family, space))
        for shape in (s for s, held in zip(space.shapes(family), may_be_held, strict=True) if not held):
            prices = explorer.priced(shape, recompute, asked.pins.reshard, asked.pins.offered)
            assert explorer.solved(prices, family, None, float("inf"), float("inf")) is None


@pytest.mark.slow
def test_a_family_anywhere_takes_no_more_than_any_of_its_shapes_and_comes_near_some() -> None:
    shares: dict[bool, list[float]] = {False: [], True: []}

    for asked in map(asked_of, range(0, 60, 6)):
        explorer = Explorer(asked.profile, asked.cluster, asked.training)
        for space, family, recompute in families_of(asked):
            anywhere = explorer.bounds.anywhere_s(family, space)
            for shape in space.shapes(family):
                prices = explorer.priced(shape, recompute, asked.pins.reshard, asked.pins.offered)
                solved = explorer.solved(prices, family, None, float("inf"), float("inf"))
                if solved is not None:
                    assert anywhere <= solved.seconds * (1 + 1e-9)
                    shares[family.pipeline > 1].append(anywhere / solved.seconds)

    assert max(shares[False]) > 0.999
    assert max(shares[True]) > 0.8


@pytest.mark.parametrize("seed", slow.but_first(range(0, 60, 6), 4))
def test_micro_batches_take_together_what_each_takes_alone(seed: int) -> None:
    asked = asked_of(seed)
    explorers = [Explorer(asked.profile, asked.cluster, asked.training) for _ in range(2)]
    together, alone = (LeastWork(each.chain, each.model) for each in explorers)
    families = {family.split: (space, family) for space, family, _ in families_of(asked)}

    for space, family in families.values():
        sizes = [size for size, _ in space.micro_batches(family.split)]
        shape = family.frugal
        each = [alone.passes_s(replace(shape, micro_batch=size)) for size in sizes]
        np.testing.assert_allclose(
            together.passes_at_s(shape, [size / shape.context for size in sizes]), each, rtol=1e-12
        )


@pytest.mark.parametrize(("inside", "hosts"), [(1, 1), (8, 1), (1, 16), (4, 2)])
def test_collectives_of_a_layer_cost_at_once_what_they_cost_one_by_one(inside: int, hosts: int) -> None:
    group, link, network = Group(ranks_per_host=inside, hosts=hosts), Link(bandwidth=1e11, latency=1e-6), NETWORK
    links = GroupLinks(group, link, network, 8, (("all_gather", 1.3),))
    traffic = [
        (kind, np.array(sizes)) for kind in get_args(CollectiveKind) for sizes in ((0.0, 1e6), (1e6, 0.0), (3e8, 2e7))
    ]

    found = seconds_at_places(traffic, [links], 2)

    alone = [sum(collective_s(kind, float(sizes[i]), links) for kind, sizes in traffic) for i in range(2)]
    np.testing.assert_allclose(found, [alone], rtol=1e-12)
    assert seconds_at_places([], [links, links], 3).tolist() == [[0.0] * 3] * 2
