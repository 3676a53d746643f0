"""The search against brute force: on random small problems scan, ILPs, search and plain enumeration agree.

`python -m benchmarks.planning_time.brute_force` does the same with hundreds of larger ones.
"""

import math
from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.planning_time.brute_force import Agreement, agreement, every_plan, every_shape, instances, num_plans
from benchmarks.planning_time.instances import Instance, chunked_instance, instance
from meshwright.planner.answers.fitting import filled_by_state
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.schedules import Schedule, is_chunked
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.space import Space
from support import slow
from support.instances import FEW


@pytest.mark.parametrize("asked", slow.but_first(FEW, 3), ids=lambda asked: str(asked.seed))
def test_all_ways_to_the_optimum_agree(asked: Instance) -> None:
    found = agreement(asked)

    assert found.agrees, found


@pytest.mark.slow
@pytest.mark.parametrize("asked", FEW[::2], ids=lambda asked: str(asked.seed))
@pytest.mark.parametrize("away", ["offload_optimizer", "offload_activations"])
def test_all_ways_agree_where_something_waits_on_the_host(asked: Instance, away: str) -> None:
    found = agreement(replace(asked, pins=replace(asked.pins, **{away: True})))

    assert found.agrees, found


@pytest.mark.slow
def test_ranks_are_bounded_at_their_best_place_and_not_as_neighbours() -> None:
    """On these hosts the network is faster than the links inside."""
    found = agreement(instance(69))

    assert found.agrees, found


@pytest.mark.parametrize(("schedule", "seed", "memory"), [("zb-v", 0, 3.4e9), ("zb-v", 0, 4e9), ("zb-v", 1, 3.5e9)])
def test_chunked_pipelines_have_the_best_of_all_cuts(schedule: Schedule, seed: int, memory: float) -> None:
    asked = chunked_instance(seed, schedule, memory)

    explorer = Explorer(asked.profile, asked.cluster, asked.training)
    outcome = explorer.explore(asked.pins, math.inf)

    priced = (estimate(plan, asked.profile) for plan in every_plan(asked))
    assert outcome.best is not None
    expected = min(each.step_time_s for each in priced if each.fits) - explorer.model.software.step_s
    assert outcome.best.seconds == pytest.approx(expected, rel=1e-9)
    assert outcome.bound == pytest.approx(expected, rel=1e-3)


def test_the_instances_meet_every_dimension() -> None:
    shapes = [shape for asked in FEW for shape in every_shape(asked)]

    for axis in ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert", "virtual_stages"):
        assert any(getattr(shape, axis) > 1 for shape in shapes), axis
    for value in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"):
        assert any(shape.schedule == value for shape in shapes), value
    assert {shape.gradient_sync for shape in shapes} == {"every", "last"}
    assert {shape.reshard for shape in shapes} == {shape.sequence for shape in shapes} == {False, True}
    assert {shape.context_kind for shape in shapes if shape.context > 1} == {"ring", "all_to_all", "all_gather"}
    assert len({shape.mesh_axes for shape in shapes}) > 2
    assert any(asked.profile.ties for asked in FEW)


@pytest.mark.parametrize("asked", FEW[::10], ids=lambda asked: str(asked.seed))
def test_the_space_holds_no_shape_that_the_plain_loops_do_not(asked: Instance) -> None:
    space = Space(asked.profile, asked.cluster, asked.training, asked.pins)

    shapes = {shape for family in list(space.families()) for shape in space.shapes(family)}

    long_enough = {s for s in shapes if s.pipeline * s.virtual_stages <= len(asked.profile.layers)}
    assert {replace(s, mesh_axes=()) for s in long_enough} <= {replace(s, mesh_axes=()) for s in every_shape(asked)}


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("asked", slow.but(FEW, FEW[3:]), ids=lambda asked: str(asked.seed))
def test_devices_are_never_filled_by_less_than_the_state(asked: Instance, away: bool) -> None:
    pins = replace(asked.pins, offload_optimizer=away)
    filled = filled_by_state(Explorer(asked.profile, asked.cluster, asked.training), pins)

    for plan in islice(every_plan(replace(asked, pins=pins)), 0, None, 5):
        memory = estimate(plan, asked.profile).memory
        total = sum(stage.device_bytes for stage in memory) / sum(stage.budget_bytes for stage in memory)
        assert filled <= total, plan.label


def test_the_number_of_plans_is_that_of_the_plans() -> None:
    asked = next(each for each in FEW if not any(is_chunked(shape.schedule) for shape in every_shape(each)))

    assert num_plans(asked) == sum(1 for _ in every_plan(asked))


def test_the_same_seed_is_the_same_instance() -> None:
    assert instance(5) == instance(5)
    assert instance(5) != instance(6)


def test_what_is_said_wrongly_is_told() -> None:
    found = Agreement(1, 10, "DDP 2", 1.0, 1.001, 0.99, 1.0, 1.0, 1.0 + 1e-7, 1.0)

    assert found.agrees
    assert found.gap == pytest.approx(0.011, rel=1e-2)
    assert not replace(found, bound=1.0 + 1e-7).agrees  # above a plan
    assert not replace(found, search=1.0 - 1e-7).agrees  # below all plans
    assert not replace(found, search=None).agrees
    assert not replace(found, cbc=1.1).agrees
    assert not replace(found, scan=None).agrees


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_all_ways_agree_in_five_hundred_instances() -> None:
    wrong = [found for found in map(agreement, instances(500, most_plans=3000)) if not found.agrees]

    assert wrong == []
