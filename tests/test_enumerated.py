"""All cuts and options of short chains: the best of them is found, and what no plan is said to beat none does."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.planning_time.brute_force import every_plan
from benchmarks.planning_time.instances import chunked_instance, random_layers
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import ZERO_BUBBLE, Schedule
from meshwright.planner.plan.shape import Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.chunked import Known
from meshwright.planner.solve.enumerated import Enumerated, unbeaten
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.polish import all_cuts, best_of_all, least_of_cuts_s
from meshwright.profiler import load_device
from meshwright.profiler.machine.cluster import cluster_of
from support import slow

SHORT = 5
"""Layers: so few that every plan can be priced."""


def first_layers(plan: Plan) -> tuple[int, ...]:
    """[stage] -> its first layer, and the one after the last."""
    found = [0]
    for stage in plan.stages:
        found.append(found[-1] + len(stage.layers))
    return tuple(found)


@pytest.mark.parametrize(
    ("schedule", "seed", "share"),
    slow.but_first(
        [
            *(("interleaved", 3, 0.9), ("zb-v", 0, 0.9), ("1f1b", 0, 0.9)),
            *(("interleaved", 0, 0.75), ("interleaved", 1, 0.75), ("interleaved", 2, 0.9), ("interleaved", 3, 1.1)),
            *(("1f1b", 0, 0.75), ("1f1b", 0, 1.1), ("gpipe", 0, 0.9), ("gpipe", 1, 0.75), ("zb-v", 0, 0.75)),
            *(("zb-v", 0, 1.1), ("zb-h1", 0, 0.9), ("zb-h1", 1, 1.1), ("zb-h2", 0, 0.75), ("zb-h2", 1, 0.9)),
        ],
        1,
    ),
)
def test_the_best_options_of_given_cuts_are_those_of_all_plans(schedule: Schedule, seed: int, share: float) -> None:
    ample = chunked_instance(seed, schedule, 1e12, num_layers=SHORT)
    priced = [estimate(plan, ample.profile) for plan in every_plan(ample)]
    used = sorted(found.peak_device_bytes for found in priced)
    asked = chunked_instance(seed, schedule, share * used[len(used) // 2], num_layers=SHORT)
    explorer = Explorer(asked.profile, asked.cluster, asked.training)
    expected: dict[tuple[Shape, tuple[int, ...]], float] = {}
    for plan in every_plan(asked):
        found, key = estimate(plan, asked.profile), (shape_of(plan), first_layers(plan))
        step_s = found.step_time_s - explorer.model.software.step_s if found.fits else math.inf
        expected[key] = min(step_s, expected.get(key, math.inf))

    for shape in {shape for shape, _ in expected}:
        prices = explorer.priced(shape, "none" if shape.schedule in ZERO_BUBBLE else None)
        known, places, whole = Known(prices), explorer.chain.places, []
        options, nearest = Enumerated(known, math.inf), 0.0
        for cuts in all_cuts(len(places) - 2, shape.pipeline * shape.virtual_stages):
            least_s = expected[shape, tuple(places[number] for number in cuts)]
            best, best_s = options.best(cuts, math.inf)
            assert best_s == pytest.approx(least_s, rel=1e-9)
            assert (best is None) == math.isinf(least_s)
            assert known.least_s(cuts) <= least_s * (1 + 1e-9)
            whole.append(least_s)
            if best is not None:
                assert options.best(cuts, best.seconds) == (None, best.seconds)
                assert options.best(cuts, best.seconds * 1.001) == (best, best_s)
                heuristic = known.fastest(cuts, math.inf)
                assert heuristic is None or heuristic.seconds >= least_s * (1 - 1e-9)
            compositions = [int(explorer.chain.composition_of[a, b]) for a, b in pairwise(cuts)]
            for stages in known.stages_of:
                held = known.held(stages, compositions)
                rank = options._rank(held)
                assert rank is not None
                fits_s = rank.seconds.sum(axis=(1, 2)).min(initial=math.inf)
                assert known.least_busy_s(held) <= fits_s * (1 + 1e-9)
                nearest = max(nearest, known.least_busy_s(held) / fits_s if math.isfinite(fits_s) else 0.0)
        assert nearest > 0.9 or math.isinf(min(whole))
        best, best_s = best_of_all(prices, math.inf, math.inf)
        assert best_s == pytest.approx(min(whole), rel=1e-9)
        assert least_of_cuts_s(prices, 0.0, 1e3) <= min(whole) * (1 + 1e-9)


def test_of_rows_those_remain_that_no_other_beats() -> None:
    table = np.array([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, 2.0], [0.5, 9.0]])

    assert unbeaten(table).tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("seed", [7, 11])
def test_uneven_layers_get_the_best_of_all_cuts_before_anything_is_proven(seed: int) -> None:
    chain, card = random_layers(random.Random(seed), 12), load_device("h100-80gb")
    cluster = cluster_of(card.model_copy(update={"memory": card.memory / 4}), 2)
    explorer = Explorer(chain, cluster, TrainingSpec(global_batch=8, seq_len=chain.seq_len, memory_margin=0.0))

    found = explorer.explore(Pins(schedule="zb-v", pipeline=2, micro_batch=2), math.inf, near=0, cutoff_s=1e3).best

    assert found is not None
    assert found.seconds == pytest.approx(best_of_all(found.prices, math.inf, math.inf)[1])
    assert 0.95 * found.seconds < least_of_cuts_s(found.prices, 0.0, 1e3) <= found.seconds * (1 + 1e-9)


def test_without_time_nothing_is_said() -> None:
    asked = chunked_instance(0, "interleaved", 1e12, num_layers=SHORT)
    explorer = Explorer(asked.profile, asked.cluster, asked.training)
    shape = next(iter(shape_of(plan) for plan in every_plan(asked)))
    prices = explorer.priced(shape, None)
    cuts = all_cuts(SHORT - 1, 4)[0]

    assert Enumerated(Known(prices), -math.inf).best(cuts, math.inf) == (None, 0.0)
    assert best_of_all(prices, math.inf, -math.inf)[0] is None
    assert best_of_all(prices, math.inf, -math.inf)[1] < best_of_all(prices, math.inf, math.inf)[1]
