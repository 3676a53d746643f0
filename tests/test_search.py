"""The search against brute force: scan, master ILP and exhaustive enumeration agree on small instances."""

import gc
import itertools
import math
import random
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.planning_time.instances import instance
from meshwright.executor.measuring.compare import _against
from meshwright.planner.answers.candidate import Candidate
from meshwright.planner.answers.check import check
from meshwright.planner.answers.search import (
    InfeasibleError,
    SearchResult,
    SolverError,
    adopted,
    price_setup,
    search,
)
from meshwright.planner.answers.verdict import FITS, VerdictKind
from meshwright.planner.cost.chain import Chain
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan, shape_of
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import is_chunked
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve import explore
from meshwright.planner.solve.bounds import recompute_of
from meshwright.planner.solve.columns import StagePrices
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.ilp import solve_master
from meshwright.planner.solve.nodes import FamilyNode, ShapeNode, ShapesNode, SplitNode, WorkNode
from meshwright.planner.solve.scan import scan, simulated_s
from meshwright.planner.solve.space import Space
from meshwright.planner.solve.tensor_choice import CutChoice
from meshwright.profiler.machine.cluster import ClusterSpec, Link
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.cli import small_profile
from support.enumeration import plans_of, ways_of
from support.synthetic import cluster, device, layer_class, profile, random_class

NUM_RANDOM = 200


def random_instance(seed: int) -> tuple[ModelProfile, ClusterSpec, TrainingSpec]:
    """A chain of up to 5 layers on 2 or 4 devices over one or two hosts, memory from ample to hopeless."""
    rng = random.Random(seed)
    classes = [
        random_class(rng, f"c{i}", [None, 2, 4, 4], [(0.0, 0.0), (0.0, 0.0), (0.0, 0.2), (0.1, 0.1), (0.2, 0.0)])
        for i in range(rng.randint(1, 3))
    ]
    order = [rng.randrange(len(classes)) for _ in range(rng.randint(2, 5))]
    same = [(a, b) for a in range(len(order)) for b in range(a + 1, len(order)) if order[a] == order[b]]
    ties = [rng.choice(same)] if same and rng.random() < 0.3 else []
    crossing = [rng.uniform(1e5, 5e7) for _ in order[1:]] if rng.random() < 0.5 else 1e6
    hosts, per_host = rng.choice([(1, 2), (2, 1), (1, 4), (2, 2)])
    on = device(memory=rng.choice([0.5e9, 1e9, 2e9, 4e9]))
    network = Link(bandwidth=rng.choice([1e9, 50e9]), latency=1e-5)
    training = TrainingSpec(global_batch=rng.choice([2, 4, 8]), seq_len=64, memory_margin=0.0)
    return profile(classes, order, crossing, ties), cluster(hosts, per_host, on, network), training


def space_of(model: ModelProfile, on: ClusterSpec, training: TrainingSpec) -> Space:
    """The whole space, with the cuts that are worth trying."""
    return Space(model, on, training, Pins(), CutChoice(CostModel(model, on, training)).worth_trying)


def every_plan(model: ModelProfile, on: ClusterSpec, training: TrainingSpec) -> "itertools.chain[Plan]":
    """All plans of the space, enumerated without bounds, columns or compositions."""
    space = space_of(model, on, training)
    shapes = [shape for family in list(space.families()) for shape in space.shapes(family)]
    return itertools.chain.from_iterable(plans_of(shape, model, on, training) for shape in shapes)


def brute_force(model: ModelProfile, on: ClusterSpec, training: TrainingSpec) -> float | None:
    """Least simulated step of all plans that fit, by the evaluator."""
    priced = (estimate(plan, model) for plan in every_plan(model, on, training))
    return min((found.step_time_s for found in priced if found.fits), default=None)


def small(seed: int) -> bool:
    """Whether an instance has few enough plans to enumerate in a test."""
    model, _, _ = random_instance(seed)
    ways = (1 + len(ways_of([model.classes[layer.layer_class]])) for layer in model.layers)
    return len(model.layers) <= 3 and math.prod(ways) <= 12


BRUTE_SEEDS = list(itertools.islice(filter(small, itertools.count()), 20))
"""Few: test_brute_force.py has more, of more kinds."""


@pytest.mark.parametrize("seed", slow.but_first(BRUTE_SEEDS, 2))
def test_search_finds_the_optimum_of_brute_force(seed: int) -> None:
    model, on, training = random_instance(seed)

    explorer = Explorer(model, on, training)
    outcome = explorer.explore(Pins(), math.inf)

    expected = brute_force(model, on, training)
    if expected is None:
        assert outcome.best is None
    else:
        assert outcome.best is not None
        once_s = explorer.model.software.step_s
        assert outcome.bound + once_s <= expected * (1 + 1e-9)
        assert expected * (1 - 1e-9) <= outcome.best.seconds + once_s
        assert outcome.best.seconds <= max(outcome.bound * (1 + 1e-3), expected * (1 + 1e-3))


@pytest.mark.parametrize("seed", slow.but_first(range(0, NUM_RANDOM, 10), 2))
def test_no_chunked_pipeline_is_faster_than_its_bound(seed: int) -> None:
    model, on, training = random_instance(1000 + seed)
    explorer, space = Explorer(model, on, training), space_of(model, on, training)

    solved = {found.shape: found.seconds for found in explorer.explore(Pins(), math.inf).solved}

    for family in (family for family in space.families() if is_chunked(family.schedule)):
        shapes = list(space.shapes(family))
        least = np.maximum(explorer.bounds.of_shapes(family, space), 0.0)
        least = np.maximum(least, explorer.bounds.with_memory_s(family, space, range(len(shapes))))
        for bound, shape in zip(least, shapes, strict=True):
            if shape in solved:
                prices = explorer.priced(shape, recompute_of(family, Pins()))
                assert max(bound, explorer.bounds.of_prices(prices, math.inf)[0]) <= solved[shape] * (1 + 1e-9)


@pytest.mark.parametrize("seed", slow.but_first(range(0, NUM_RANDOM, 5), 3))
def test_master_ilp_scan_and_search_agree(seed: int) -> None:
    """One ILP over all shapes at once, the scan shape by shape, and the pruned search: one optimum."""
    model, on, training = random_instance(1000 + seed)
    space = space_of(model, on, training)
    families = [family for family in space.families() if not is_chunked(family.schedule)]
    shapes = [shape for family in families for shape in space.shapes(family)]
    chain = Chain(CostModel(model, on, training))
    prices = [StagePrices(chain, shape) for shape in shapes]

    scanned = [found.seconds for found in map(scan, prices) if found is not None]
    solved = solve_master([StagePrices(chain, shape) for shape in shapes])
    explorer, deadline = Explorer(model, on, training), math.inf
    bests = [explorer.explore(Pins(schedule=s), deadline).best for s in ("none", "1f1b", "gpipe")]
    explored = min((best for best in bests if best is not None), key=lambda best: best.seconds, default=None)

    if not scanned:
        assert solved is None
        assert explored is None
        return
    assert solved is not None
    assert explored is not None
    assert solved[0].objective == pytest.approx(min(scanned), rel=1e-5)
    assert explored.seconds <= min(scanned) * (1 + 1e-9)
    played = [simulated_s(p, found) for p, found in zip(prices, map(scan, prices), strict=True) if found is not None]
    assert explored.seconds <= min(played) * (1 + 1e-3)


@pytest.mark.parametrize("seed", slow.but_first(range(0, NUM_RANDOM, 4), 2))
def test_emitted_plan_passes_the_independent_check(seed: int) -> None:
    model, on, training = random_instance(1000 + seed)
    if Explorer(model, on, training).explore(Pins(), math.inf).best is None:
        with pytest.raises(InfeasibleError):
            search(model, on, training)
        return

    result = search(model, on, training)

    assert check(result.plan, model) == []
    certificate = result.certificate
    assert certificate.step_s == pytest.approx(result.estimate.step_time_s, rel=1e-12)
    assert certificate.bound <= certificate.fastest_s <= certificate.step_s
    assert (certificate.status == "optimal") == (certificate.gap <= 1e-3)
    for baseline in result.baselines:
        if baseline.estimate is not None:
            assert result.estimate.step_time_s <= baseline.estimate.step_time_s * 1.01


@pytest.mark.parametrize("seed", slow.but_first([2002, 2003, 2043], 1))
def test_no_runner_up_is_beaten_by_another_micro_batch_of_its_degrees(seed: int) -> None:
    model, on, training = random_instance(seed)
    result = search(model, on, training)
    explorer, shown = Explorer(model, on, training), {shape_of(result.plan).layout}

    for candidate in result.runners_up:
        assert candidate.plan is not None
        assert candidate.estimate is not None
        shape = shape_of(candidate.plan)
        pins = replace(Pins().as_in(shape), data_replicate=shape.data_replicate, data_shard=shape.data_shard)
        best = explorer.explore(pins, math.inf, near=0).best
        shown.add(shape.layout)

        assert best is not None
        best_s = best.seconds + explorer.model.software.step_s
        assert best.shape.layout in shown or candidate.estimate.step_time_s <= best_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow.but_first([1, 9, 10], 1))
def test_a_set_up_that_leaves_cuts_open_is_priced_at_its_best(seed: int) -> None:
    """Of unequal layers, too: balanced cuts alone are 3 to 8% slower here."""
    rng = random.Random(seed)
    classes = [random_class(rng, f"c{i}", [None], [(0.0, 0.2), (0.1, 0.1)]) for i in range(3)]
    model = profile(classes, [rng.randrange(3) for _ in range(24)], 1e6)
    on, training = cluster(1, 4, device(memory=rng.choice([2e9, 4e9, 8e9]))), TrainingSpec(global_batch=8, seq_len=64)

    asked = price_setup(parse_setup("pp=4 schedule=interleaved v=2 mb=1", 4, 4), model, on, training)
    pins = Pins(pipeline=4, schedule="interleaved", virtual_stages=2, micro_batch=1)
    searched = search(model, on, training, pins=pins)

    assert asked.seconds <= searched.certificate.fastest_s * (1 + 1e-3)
    assert searched.certificate.gap < 0.03  # some 9% where not all cuts are looked at


def test_shapes_are_all_accounted_for() -> None:
    model, on, training = random_instance(7)

    result = search(model, on, training)

    shapes = result.certificate.shapes
    assert shapes["total"] == shapes["rejected"] + shapes["pruned"] + shapes["solved"]
    assert shapes["rejected"] == sum(result.certificate.rejected.values())


def test_a_shape_looks_once_at_prices_that_others_have_found() -> None:
    model, on, training = random_instance(1000)
    space = Space(model, on, training, Pins())
    family = next(space.families())
    node = ShapeNode(1.0, 1.0, next(iter(space.shapes(family))), family, space, mock.MagicMock(), known=2)
    bounds = node.search.bounds = mock.MagicMock()
    bounds.num_prices.return_value, bounds.by_prices_s.return_value = 5, np.array([3.0])

    assert node.learn()
    assert not node.learn()

    assert node.bound == 3.0
    (asked,) = bounds.by_prices_s.call_args_list
    assert asked.args[-1] == 3


def test_a_proof_has_its_time_however_long_before_it_the_plan_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = instance(27)
    gaps = []
    for share in (0.0, explore.PROOF):
        monkeypatch.setattr(explore, "PATIENCE", 0.0)
        monkeypatch.setattr(explore, "PROOF", share)
        outcome = Explorer(asked.profile, asked.cluster, asked.training).explore(asked.pins, time.monotonic() + 60)
        assert outcome.best is not None
        gaps.append(1 - outcome.bound / outcome.best.seconds)

    assert gaps[0] > 0.1
    assert gaps[1] < 0.001


def test_the_garbage_collector_rests_during_a_search_and_only_then() -> None:
    model, on, training = random_instance(3)
    runs: list[bool] = []

    search(model, on, training, progress=lambda *_: runs.append(gc.isenabled()))

    assert runs
    assert set(runs) == {False}
    assert gc.isenabled()


def test_time_over_before_the_first_plan_leaves_the_best_rule_of_thumb() -> None:
    model = profile([layer_class("a", 1e12, 10_000_000, 1e8, 1e6)], [0] * 4)
    training = TrainingSpec(global_batch=8, seq_len=64)

    found = search(model, cluster(1, 4), training, time_limit_s=0.0)

    assert found.certificate.status == "feasible"
    assert found.certificate.gap > 0
    assert found.plan.degrees.num_devices == 4
    assert check(found.plan, model) == []


@pytest.mark.slow
def test_a_first_plan_is_found_sooner_than_by_bounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = profile([layer_class("a", 4e11, 2_000_000_000, 1e9, 1e6, heads=16)], [0] * 32)
    training = TrainingSpec(global_batch=256, seq_len=64)

    def nodes_before_the_first(eager: float) -> int:
        monkeypatch.setattr(explore, "EAGER", eager)
        with ExitStack() as patched:
            opened = [
                patched.enter_context(mock.patch.object(kind, "children", autospec=True, side_effect=kind.children))
                for kind in (SplitNode, WorkNode, FamilyNode, ShapesNode)
            ]
            found = Explorer(model, cluster(8), training).explore(Pins(), math.inf, near=0, any_will_do=True)
        assert found.num_solved == 1
        return sum(each.call_count for each in opened)

    assert nodes_before_the_first(explore.EAGER) < 0.7 * nodes_before_the_first(1.0)


@pytest.mark.slow
def test_shapes_like_those_that_took_longer_than_guessed_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = profile([layer_class("a", 1e9, 4_000_000, saved=2e6, inputs=1e5, transient=1e5)], [0] * 24, crossing=1e5)
    training = TrainingSpec(global_batch=64, seq_len=64)

    def found() -> SearchResult:
        return search(model, cluster(2, 4, device(memory=1.2e9)), training, time_limit_s=60)

    learning = found()
    monkeypatch.setattr(explore._Search, "_guess_again", lambda *asked: False)
    trusting = found()

    assert is_chunked(shape_of(learning.plan).schedule)
    assert learning.certificate.shapes["solved"] < trusting.certificate.shapes["solved"]
    assert learning.certificate.fastest_s <= trusting.certificate.fastest_s


def test_time_over_with_pins_that_no_rule_of_thumb_keeps_is_said() -> None:
    model = profile([layer_class("a", 1e12, 10_000_000, 1e8, 1e6)], [0] * 4)
    training = TrainingSpec(global_batch=8, seq_len=64)

    with pytest.raises(SolverError, match="no plan found within 0 s"):
        search(model, cluster(1, 4), training, pins=Pins(schedule="zb-h1"), time_limit_s=0.0)


def test_where_time_is_over_before_the_first_plan_one_of_the_leanest_is_the_plan() -> None:
    model = profile([layer_class("a", 1e12, 10_000_000, 1e8, 1e6)], [0] * 4)
    training = TrainingSpec(global_batch=8, seq_len=64)

    found = search(model, cluster(1, 4), training, pins=Pins(schedule="gpipe", pipeline=2), time_limit_s=0.0)

    assert (found.plan.degrees.pipeline, found.plan.schedule) == (2, "gpipe")
    assert found.estimate.fits
    assert found.certificate.status == "feasible"


def test_whatever_is_priced_faster_becomes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = [layer_class("a", 1e10, int(1e7), 1e6, 1e5)]
    model, on = profile(classes, [0] * 4), cluster(1, 4)
    training = TrainingSpec(global_batch=8, seq_len=64)
    slow = Pins(data_replicate=1, data_shard=1, pipeline=4, schedule="gpipe")
    slow_one = search(model, on, training, pins=slow)
    fast_one = search(model, on, training)
    slow_set_up, fast_set_up = (Candidate("a set-up", each.plan, each.estimate, FITS) for each in (slow_one, fast_one))

    found = adopted(slow_one, [slow_set_up, fast_set_up])

    assert found.estimate == fast_one.estimate
    assert shape_of(found.plan) == shape_of(fast_one.plan)
    assert found.certificate.fastest_s == fast_one.estimate.step_time_s >= found.certificate.bound
    assert (found.certificate.gap, found.certificate.status) == (0.0, "feasible")
    assert check(found.plan, model) == []
    assert adopted(fast_one, [slow_set_up]) is fast_one
    monkeypatch.setattr("meshwright.planner.answers.search._runners_up", lambda *asked: [fast_set_up])
    assert search(model, on, training, pins=slow).estimate == fast_one.estimate


def test_slow_network_keeps_tensor_parallel_inside_a_node() -> None:
    big = layer_class("block", 2e12, 60_000_000, 4e8, 1e7, heads=8)
    model = profile([big], [0] * 8)
    on = cluster(num_hosts=2, per_host=4, on=device(memory=3e9), network=Link(bandwidth=1e9, latency=1e-4))

    result = search(model, on, TrainingSpec(global_batch=8, seq_len=64), pins=Pins(tensor=4))

    assert result.plan.stride("tensor") == 1
    group = on.group(4, result.plan.stride("tensor"))
    assert group.hosts == 1


@pytest.mark.slow
def test_infeasible_names_stage_excess_and_a_cluster_that_would_do() -> None:
    model = profile([layer_class("block", 1e12, 200_000_000, 1e8, 1e6, heads=8)], [0] * 8)
    on = cluster(on=device(memory=2e9), per_host=2)

    with pytest.raises(InfeasibleError, match="fits on no layout") as caught:
        search(model, on, TrainingSpec(global_batch=64, seq_len=64))

    assert caught.value.over_bytes > 0
    assert caught.value.smallest_gpus is not None
    enough = cluster(num_hosts=caught.value.smallest_gpus // 2, per_host=2, on=device(memory=2e9))
    assert check(search(model, enough, TrainingSpec(global_batch=64, seq_len=64)).plan, model) == []


def test_check_finds_planted_faults() -> None:
    model, on, training = random_instance(3)
    plan = search(model, on, training).plan
    assert check(plan, model) == []

    stages = plan.stages[0].model_copy(update={"layers": plan.stages[0].layers[:-1]})
    assert check(plan.model_copy(update={"stages": (stages, *plan.stages[1:])}), model)
    assert check(plan.model_copy(update={"micro_batch": plan.micro_batch + 1}), model)
    assert check(plan.model_copy(update={"cluster": cluster(8, 8)}), model)
    tight = on.model_copy(
        update={"hosts": tuple(g.model_copy(update={"device": device(memory=1e6)}) for g in on.hosts)}
    )
    assert any("does not fit" in line for line in check(plan.model_copy(update={"cluster": tight}), model))


def test_pins_are_kept() -> None:
    model, on, training = random_instance(3)

    result = search(model, on, training, pins=Pins(pipeline=2, recompute="full"))

    assert shape_of(result.plan).pipeline == 2
    assert all(layer.recompute == "full" for layer in result.plan.layers)


def test_a_rule_of_thumb_that_breaks_a_pin_is_not_the_plan() -> None:
    model, on = small_profile(), cluster(1, 4)
    training = TrainingSpec(global_batch=8, seq_len=model.seq_len)

    found = search(model, on, training, pins=Pins(offload_optimizer=True))

    assert found.plan.offload_optimizer
    faster = [each.verdict for each in found.baselines if each.verdict.kind is VerdictKind.FASTER]
    assert {each.detail for each in faster} == {"excluded by --pin"}


def test_worked_example_of_the_planners_readme() -> None:
    """Cut two and two with one recomputed layer: the first stage is busy for 4 x 7 ms, and waits for the second's 6 ms
    before its first backward, less the 2 ms of its own second forward, and once more before its last, less 5 ms."""
    model = profile([layer_class("layer", 1e11, 1, saved=1e9, inputs=0.0)], [0] * 4, crossing=0.0)
    on = cluster(per_host=2, on=device(memory=3.5e9 + 1e6))
    training = TrainingSpec(global_batch=4, seq_len=64, memory_margin=0.0)

    outcome = Explorer(model, on, training).explore(Pins(pipeline=2, micro_batch=1, schedule="1f1b"), math.inf)

    assert outcome.best is not None
    assert outcome.best.seconds == pytest.approx((4 * 7 + (6 - 2) + (6 - 5)) * 1e-3, rel=1e-3)
    choices = outcome.best.assignment.choices
    recomputed = [sum(count for _, option, count in c.parts if option.recompute == "full") for c in choices]
    assert [sum(count for _, _, count in c.parts) for c in choices] == [2, 2]
    assert recomputed == [1, 0]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_options_that_fit_are_found_even_when_time_is_over(pipeline: int) -> None:
    draw = random.Random(0)
    classes = [layer_class(f"l{i}", 1e12, int(1e7), draw.uniform(1e8, 6e8), 1e7) for i in range(24)]
    model, training = profile(classes, list(range(24))), TrainingSpec(global_batch=16, seq_len=64)
    chain = Chain(CostModel(model, cluster(per_host=2, on=device(memory=11e9)), training))
    shape = Shape(1, 2 // pipeline, 1, pipeline, 1, 8 * pipeline, schedule="none" if pipeline == 1 else "1f1b")
    best = scan(StagePrices(chain, shape))
    chain.deadline_s = 0.0
    quick_choice = StagePrices._quick_choice

    with mock.patch.object(StagePrices, "_quick_choice", autospec=True, side_effect=quick_choice) as quick:
        found = scan(StagePrices(chain, shape))

    assert best is not None
    assert found is not None
    assert quick.called
    assert best.seconds <= found.seconds < 1.2 * best.seconds
    stages = [[option for _, option, count in choice.parts for _ in range(count)] for choice in found.choices]
    assert estimate(make_plan(model, chain.model.cluster, training, shape, stages), model).fits


@pytest.mark.slow
def test_what_time_ended_on_is_not_the_bound_of_a_shape_of_one_stage() -> None:
    """Options found in no time are no best ones, so that the shape's own bound stays in the proof."""
    draw = random.Random(0)
    classes = [layer_class(f"l{i}", 1e12, int(1e7), draw.uniform(1e8, 6e8), 1e7) for i in range(24)]
    model, training = profile(classes, list(range(24))), TrainingSpec(global_batch=16, seq_len=64)
    asked = model, cluster(per_host=2, on=device(memory=11e9)), training
    pins = Pins(pipeline=1, tensor=1, micro_batch=8, data_shard=1)
    in_time = Explorer(*asked).explore(pins, math.inf, near=0)
    late = StagePrices._best_choice

    def slow_choice(self: StagePrices, composition: int, in_flight: int, cutoff: float) -> object:
        time.sleep(max(0.0, self.chain.deadline_s - time.monotonic()) + 0.01)
        return late(self, composition, in_flight, cutoff)

    with mock.patch.object(StagePrices, "_best_choice", slow_choice):
        found = Explorer(*asked).explore(pins, time.monotonic() + 1.0, near=0)

    assert in_time.best is not None
    assert found.best is not None
    assert not found.complete
    assert found.best.seconds > in_time.best.seconds >= found.bound


def test_a_shape_whose_bound_nothing_raises_is_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    classes = [layer_class(f"l{i}", draw.uniform(1e11, 3e12), int(1e7), draw.uniform(1e8, 6e8), 1e7) for i in range(24)]
    model, on = profile(classes, list(range(24))), cluster(per_host=4, on=device(memory=30e9))
    monkeypatch.setattr(explore, "NARROW", 1e-5)  # less than this chain leaves
    monkeypatch.setattr(explore._Search, "_try", lambda *asked: False)

    found = Explorer(model, on, TrainingSpec(global_batch=16, seq_len=64)).explore(
        Pins(pipeline=4, tensor=1, schedule="zb-h1"), time.monotonic() + 60
    )

    assert found.best is not None
    assert found.complete
    assert 0.999 * found.best.seconds < found.bound < (1 - 5e-5) * found.best.seconds


def test_what_a_rule_of_thumb_was_cut_short_at_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = profile([layer_class("block", 1e12, 10_000_000, 3e7, 1e6)], [0] * 8)
    explored = Explorer.explore

    def cut_short(explorer: Explorer, pins: Pins, deadline_s: float, **more: Any) -> explore.Outcome:
        found = explored(explorer, pins, deadline_s, **more)
        return replace(found, complete=found.complete and more.get("near") != 0)

    monkeypatch.setattr(Explorer, "explore", cut_short)
    result = search(model, cluster(per_host=4), TrainingSpec(global_batch=8, seq_len=64))

    by_rule = [each for each in result.alternatives if each.by_rule and each.plan is not None]
    said = [str(each.verdict).endswith("; the best of it that was found in time") for each in by_rule]
    assert said == [each.verdict.kind is not VerdictKind.PLAN for each in by_rule]
    assert any(said)
    set_up = price_setup(
        parse_setup("fsdp", 4, 4), model, cluster(per_host=4), TrainingSpec(global_batch=8, seq_len=64)
    )
    assert str(set_up.verdict) == "fits; the best of it that was found in time"
    assert str(_against(set_up, result.estimate).verdict).endswith("; the best of it that was found in time")


def test_a_set_up_that_was_not_searched_to_the_end_is_not_said_not_to_fit() -> None:
    block = layer_class("block", 1e12, 10_000_000, 3e7, 1e6)
    model, on, training = profile([block], [0] * 8), cluster(per_host=4), TrainingSpec(global_batch=8, seq_len=64)

    found = price_setup(parse_setup("fsdp", 4, 4), model, on, training, time_limit_s=-1.0)

    assert found.plan is None
    assert found.verdict.kind is VerdictKind.NOT_FOUND
    assert str(found.verdict) == "not found in the time there was; it may fit"


def test_layers_that_read_one_parameter_stay_on_one_stage() -> None:
    block = layer_class("block", 1e12, 10_000_000, 3e7, 1e6)
    model = profile([block], [0] * 4)
    shared = [layer.model_copy(update={"parameters": ("layer1.weight",), "root": "layer1"}) for layer in model.layers]
    layers = (model.layers[0], shared[1], shared[2], model.layers[3])
    model = model.model_copy(update={"layers": layers})

    plan = search(model, cluster(per_host=2), TrainingSpec(global_batch=4, seq_len=64), pins=Pins(pipeline=2)).plan

    assert check(plan, model) == []
    assert len(plan.stages[0].layers) in (1, 3)
    halves = [LayerOption()] * 2
    torn = make_plan(model, plan.cluster, plan.training, shape_of(plan), [halves, halves])
    assert any("only live on one" in line for line in check(torn, model))


def test_every_candidate_keeps_the_global_batch_and_what_cannot_is_named() -> None:
    model = profile([layer_class("block", 1e12, 10_000_000, 3e7, 1e6)], [0] * 4)

    result = search(model, cluster(per_host=4), TrainingSpec(global_batch=6, seq_len=64))

    candidates = [c.plan for c in result.alternatives if c.plan is not None]
    for plan in (result.plan, *candidates):
        assert plan.micro_batch * plan.num_microbatches * plan.degrees.data == 6
    assert any("6 is no multiple of 4 data ranks" in rule for rule in result.certificate.rejected)


def test_global_batch_that_no_layout_divides_is_a_sentence_with_a_batch_that_would_do() -> None:
    model = profile([layer_class("block", 1e12, 10_000_000, 3e7, 1e6)], [0] * 2)

    with pytest.raises(ValueError, match=r"global batch 5 is no multiple of 7 .* --global-batch 7"):
        search(model, cluster(per_host=7), TrainingSpec(global_batch=5, seq_len=64))


def test_a_stage_whose_optimizer_step_does_not_fit_is_no_answer() -> None:
    # few activations, large weights: the peak is the update, which no recompute makes smaller
    model = profile([layer_class("wide", 1e12, 50_000_000, saved=2e3, inputs=1e3)], [0] * 4, crossing=1e3)
    training = TrainingSpec(global_batch=4, seq_len=64, precision="fp32", memory_margin=0.0)
    roomy = search(model, cluster(1, 2), training, pins=Pins(pipeline=2))
    needed = roomy.estimate.peak_device_bytes

    with pytest.raises(InfeasibleError):
        search(model, cluster(1, 2, device(memory=0.99 * needed)), training, pins=Pins(pipeline=2))


def test_beside_a_known_plan_only_faster_ones_are_looked_for() -> None:
    model, on, training = random_instance(3)
    explorer, deadline = Explorer(model, on, training), math.inf
    best = explorer.explore(Pins(), deadline, near=0).best
    assert best is not None

    as_fast = explorer.explore(Pins(), deadline, near=0, cutoff_s=best.seconds)
    slower = explorer.explore(Pins(), deadline, near=0, cutoff_s=1.01 * best.seconds)

    assert as_fast.best is None
    assert as_fast.num_solved <= slower.num_solved
    assert slower.best is not None
    assert slower.best.seconds == best.seconds


def test_where_time_ends_before_all_shapes_are_counted_nothing_is_claimed_of_the_rest() -> None:
    explorer = Explorer(*random_instance(3))

    counted, uncounted = explorer.explore(Pins(), math.inf), explorer.explore(Pins(), -math.inf)

    assert counted.complete
    assert counted.bound > 0
    assert (uncounted.complete, uncounted.bound, uncounted.solved) == (False, 0.0, [])
