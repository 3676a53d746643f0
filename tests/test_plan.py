"""The plan document: what it accepts, how it is saved and read, and where it puts every rank."""

import json
from pathlib import Path

import pytest
from cli_support import some_plan
from pydantic import ValidationError

from meshwright.executor.report import axis_rows, rank_runs
from meshwright.planner.plan import AXES, Plan, load_plan, placement, placements

PIPELINE_INSIDE = ("data_replicate", "data_shard", "pipeline", "context", "tensor")


def test_a_saved_plan_reads_back_equal(tmp_path: Path) -> None:
    plan = some_plan(shard=2, tensor=2, pipeline=2)
    plan.save(tmp_path / "plan.json")

    assert load_plan(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"micro_batch": 3}, "samples, but global_batch is"),
        ({"degrees": {"data_shard": 2}}, "ranks, the cluster has 8 devices"),
        ({"mesh_axes": ["pipeline", "tensor"]}, "mesh_axes must order"),
        ({"schedule": "none"}, "does not go with pipeline=2"),
        ({"schedule": "1f1b", "num_microbatches": 1, "micro_batch": 4}, "at least as many micro-batches as stages"),
        ({"stages": []}, "at least 1 item"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(change: dict[str, object], sentence: str) -> None:
    data = json.loads(some_plan(shard=2, tensor=2, pipeline=2).model_dump_json())

    with pytest.raises(ValidationError, match=sentence):
        Plan.model_validate(data | change)


@pytest.mark.parametrize("axes", [AXES, PIPELINE_INSIDE])
def test_every_rank_has_its_own_coordinates_and_all_layers_are_held(axes: tuple[str, ...]) -> None:
    plan = some_plan(replicate=2, shard=2, tensor=2, pipeline=2, mesh_axes=axes)  # type: ignore[arg-type]
    all_placements = list(placements(plan))

    assert len({tuple(p.coordinates.items()) for p in all_placements}) == 16
    names = {layer.name for stage in plan.stages for layer in stage.layers}
    assert {name for p in all_placements for name in p.layers} == names
    assert [(p.host, p.device) for p in all_placements] == [divmod(rank, 8) for rank in range(16)]


def test_tensor_parallel_neighbours_share_a_host() -> None:
    plan = some_plan(shard=2, tensor=8)

    hosts = {}
    for p in placements(plan):
        hosts.setdefault(p.coordinates["data_shard"], set()).add(p.host)
    assert all(len(found) == 1 for found in hosts.values())
    assert [row.where for row in axis_rows(plan) if row.axis == "tensor"] == ["inside a host"]


@pytest.mark.parametrize("axes", [AXES, PIPELINE_INSIDE])
@pytest.mark.parametrize("degrees", [(1, 1, 1, 4), (2, 3, 1, 2), (1, 4, 2, 2), (2, 2, 2, 2)])
def test_runs_of_ranks_equal_listing_them(degrees: tuple[int, int, int, int], axes: tuple[str, ...]) -> None:
    replicate, shard, tensor, pipeline = degrees
    plan = some_plan(replicate, shard, tensor, pipeline, per_host=1, mesh_axes=axes)  # type: ignore[arg-type]
    for stage in range(pipeline):
        first, length, period = rank_runs(plan, stage)
        starts = range(first, plan.degrees.num_devices, period) if period else [first]
        listed = [rank for rank in range(plan.degrees.num_devices) if plan.coordinates(rank)["pipeline"] == stage]

        assert (period == 0) == (listed == list(range(listed[0], listed[-1] + 1)))
        assert [rank for start in starts for rank in range(start, start + length)] == listed


def test_a_placement_names_the_layers_of_its_stage() -> None:
    plan = some_plan(pipeline=2)

    assert placement(plan, 1).layers == tuple(layer.name for layer in plan.stages[1].layers)
