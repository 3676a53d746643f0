"""The plan document: what it accepts, how it is saved and read, and where it puts every rank."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from meshwright.executor.reporting.report import axis_rows, rank_runs
from meshwright.planner.answers.check import check
from meshwright.planner.plan.document import AXES, Plan, load_plan, parts_of, placement, placements, recompute_of_parts
from support.cli import some_plan

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
        (
            {"degrees": {"data_shard": 2, "tensor": 2, "pipeline": 2, "expert": 4}},
            "expert=4 does not divide the 2 ranks",
        ),
        (
            {
                "degrees": {"context": 2, "tensor": 2, "pipeline": 2},
                "num_microbatches": 8,
                "mesh_axes": ["pipeline", "context", "data_replicate", "data_shard", "tensor"],
            },
            "context must follow data_shard",
        ),
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
    names = {layer.name for layer in plan.layers}
    assert {name for p in all_placements for name in p.layers} == names
    assert [(p.host, p.device) for p in all_placements] == [divmod(rank, 8) for rank in range(16)]


def chunked(schedule: str, recompute: str = "none") -> Plan:
    """A plan of four stages on two ranks."""
    data = json.loads(some_plan(pipeline=2).model_dump_json())
    layers = [{**layer, "recompute": recompute} for stage in data["stages"] for layer in stage["layers"]]
    stages = [{"layers": layers[start : start + size]} for start, size in ((0, 1), (1, 2), (3, 3), (6, 4))]
    degrees = {**data["degrees"], "virtual_stages": 2}
    return Plan.model_validate({**data, "schedule": schedule, "degrees": degrees, "stages": stages})


@pytest.mark.parametrize(("schedule", "held"), [("interleaved", [[0, 2], [1, 3]]), ("zb-v", [[0, 3], [1, 2]])])
def test_a_rank_of_several_stages_holds_the_layers_of_all(schedule: str, held: list[list[int]]) -> None:
    plan = chunked(schedule)

    found = [placement(plan, rank) for rank in range(2)]

    names = [[layer.name for layer in stage.layers] for stage in plan.stages]
    assert [list(p.layers) for p in found] == [[name for stage in own for name in names[stage]] for own in held]
    assert [plan.position_of(stage) for own in held for stage in own] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("schedule", "recompute", "told"),
    [
        ("interleaved", "selective", []),
        ("zb-v", "none", []),
        ("zb-v", "full", ["a backward in two parts"]),
        ("zb-h1", "selective", ["a backward in two parts"]),
    ],
)
def test_only_zero_bubbles_without_recompute_are_run(schedule: str, recompute: str, told: list[str]) -> None:
    plan = chunked(schedule, recompute)

    found = check(plan)

    about_schedules = [sentence for sentence in found if "not one module" not in sentence]
    assert len(about_schedules) == len(told)
    assert all(words in sentence for words, sentence in zip(told, about_schedules, strict=True))


def test_parts_of_a_layer_can_be_recomputed_and_read_back() -> None:
    said = recompute_of_parts(("self_attn", "mlp.experts"))

    plan = chunked("interleaved", said)

    assert {layer.recompute for layer in plan.layers} == {"parts:self_attn+mlp.experts"}
    assert parts_of(said) == ("self_attn", "mlp.experts")
    assert [parts_of(kind) for kind in ("none", "attention", "selective", "full", recompute_of_parts(()))] == [()] * 5


@pytest.mark.parametrize(
    ("recompute", "told"),
    [
        ("some", "is not one of none, attention, selective, full, or parts:NAME"),
        ("parts:", "is not one of"),
        ("parts:mlp+", "is not one of"),
        ("parts:mlp+self_attn+mlp", "mlp runs again with mlp already"),
        ("parts:mlp.experts+mlp", "mlp.experts runs again with mlp already"),
    ],
)
def test_other_words_for_recompute_are_refused(recompute: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        chunked("interleaved", recompute)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 2), ("gpipe", 2), ("zb-v", 1), ("zb-v", 3)])
def test_a_schedule_with_another_number_of_stages_on_each_rank_is_refused(schedule: str, virtual: int) -> None:
    data = json.loads(chunked("interleaved").model_dump_json())
    changes = {"schedule": schedule, "degrees": {**data["degrees"], "virtual_stages": virtual}}
    stages = [data["stages"][i % 4] for i in range(2 * virtual)]

    with pytest.raises(ValidationError, match=r"gives each rank \d stage"):
        Plan.model_validate(data | changes | {"stages": stages})


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
