"""Models that once went wrong under some plan: now they give the numbers of one process, or the plan is not legal."""

from typing import Any, Literal

import pytest
import torch
from torch import nn

from meshwright.executor import parallelize
from meshwright.executor.parallel.recompute import recompute
from meshwright.planner.answers.check import check
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.legality import can_recompute, sharding_rule
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.planner.solve.space import Space
from support.ranks import run_ranks
from support.small_models import GLOBAL_BATCH, small_model, small_profile, verified
from support.synthetic import cluster

KEPT = LayerOption()
REPEATED = LayerOption(recompute="full")


def _plan(
    model: str,
    stages: list[list[LayerOption]],
    precision: Precision = "fp32",
    data_replicate: int = 1,
    data_shard: int = 1,
    parts: int = 4,
    gradient_sync: Literal["every", "last"] = "last",
) -> Plan:
    pipeline = len(stages)
    shape = Shape(
        data_replicate=data_replicate,
        data_shard=data_shard,
        tensor=1,
        pipeline=pipeline,
        micro_batch=GLOBAL_BATCH // parts // data_replicate // data_shard,
        num_microbatches=parts,
        schedule="1f1b" if pipeline > 1 else "none",
        gradient_sync=gradient_sync,
    )
    profile = small_profile(model)
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision=precision)
    return make_plan(profile, cluster(1, shape.degrees.num_devices), training, shape, stages)


@pytest.mark.slow
def test_micro_batches_in_flight_may_write_into_their_part_of_the_batch() -> None:
    report = verified("in place", _plan("in place", [[KEPT] * 3, [KEPT] * 3]))

    assert report.ok, report.lines


@pytest.mark.slow
def test_finding_unread_parameters_changes_no_batch() -> None:
    report = verified("in place", _plan("in place", [[KEPT] * 6], data_replicate=2))

    assert report.ok, report.lines


def _batches_tracked(plan: Plan) -> int:
    loaded = small_model("batch norm")
    trainer = parallelize(loaded.build, plan, torch.optim.AdamW, loss=loaded.loss)
    trainer.step(loaded.batch(trainer.samples_per_step))
    return int(trainer.model.get_buffer("0.1.num_batches_tracked"))


def test_finding_unread_parameters_changes_no_buffer() -> None:
    plan = _plan("batch norm", [[KEPT] * 4], data_replicate=2)

    counts = run_ranks(_batches_tracked, 2, plan)

    assert counts == [plan.num_microbatches] * 2


def test_replicas_that_decide_by_their_samples_go_different_ways() -> None:
    layers = [KEPT] * len(small_profile("decides").layers)

    report = verified("decides", _plan("decides", [layers], data_replicate=2, parts=1))

    assert report.ok, report.lines


def _clipped_by_hand(plan: Plan) -> str:
    loaded = small_model("decides")
    trainer = parallelize(loaded.build, plan, torch.optim.AdamW, loss=loaded.loss)
    batch = loaded.batch(trainer.samples_per_step)
    trainer.forward_backward(batch)
    trainer.optimizer_step()
    trainer.forward_backward(batch)
    nn.utils.clip_grad_value_(trainer.model.parameters(), 1e-4)
    try:
        trainer.optimizer_step()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_gradients_that_are_averaged_later_are_not_clipped_by_hand() -> None:
    layers = [KEPT] * len(small_profile("decides").layers)

    found = run_ranks(_clipped_by_hand, 2, _plan("decides", [layers], data_replicate=2, parts=1))

    assert all(said.endswith("give parallelize(max_grad_norm=...)") for said in found), found


@pytest.mark.slow
def test_a_sharded_stage_without_backward_keeps_its_parameters() -> None:
    report = verified("detached", _plan("detached", [[KEPT], [KEPT] * 4], data_shard=2))

    assert report.ok, report.lines


@pytest.mark.slow
def test_a_sharded_layer_of_several_modules_is_whole_for_the_backward_of_each() -> None:
    given_back = LayerOption(reshard=True)

    report = verified("stem", _plan("stem", [[given_back] * 5], data_shard=2))

    assert report.ok, report.lines


@pytest.mark.slow
def test_a_layer_of_several_modules_is_gathered_anew_once_a_pipeline_has_reduced_it() -> None:
    plan = _plan("stem", [[KEPT] * 3, [KEPT] * 2], data_shard=2, gradient_sync="every")

    report = verified("stem", plan)

    assert report.ok, report.lines


@pytest.mark.slow
def test_recompute_repeats_a_forward_with_the_buffers_it_had() -> None:
    report = verified("spectral norm", _plan("spectral norm", [[REPEATED] * 2, [REPEATED, KEPT]]))

    assert report.ok, report.lines


def test_recompute_counts_a_batch_once_in_running_statistics() -> None:
    norm = nn.BatchNorm1d(4)
    recompute(norm)

    for _ in range(2):
        norm(torch.randn(8, 4, requires_grad=True)).sum().backward()

    assert norm.num_batches_tracked == 2


@pytest.mark.slow
def test_batch_norms_run_beside_sharded_parameters_in_bf16() -> None:
    report = verified("batch norm", _plan("batch norm", [[KEPT] * 4], precision="bf16", data_shard=2))

    assert report.failure is None, report.lines
    assert report.largest["loss"].relative < 0.05


def test_layers_that_write_into_their_input_are_neither_sharded_nor_repeated() -> None:
    profile = small_profile("in place")

    assert sharding_rule(profile, "fp32") == (
        "data_shard: _InPlaceBlock writes into its input; use relu(x) for relu_(x), x + y for x += y"
    )
    assert [can_recompute(profile, layer) for layer in profile.layers] == [True, False, False, False, False, True]


def test_layers_whose_input_is_overwritten_later_are_sharded_but_not_repeated() -> None:
    profile = small_profile("overwritten")

    assert sharding_rule(profile, "fp32") is None
    assert [can_recompute(profile, layer) for layer in profile.layers] == [True, False, False, False, True]


def test_products_of_buffers_and_parameters_keep_bf16_from_being_sharded() -> None:
    profile = small_profile("buffers")

    assert sharding_rule(profile, "fp32") is None
    assert "addmm of bfloat16 and float32" in str(sharding_rule(profile, "bf16"))


def test_forwards_that_change_buffers_are_noted() -> None:
    notes = [note for note in small_profile("spectral norm").told if "in every forward" in note]

    assert len(notes) == 1
    assert "0.0.parametrizations.weight.0._u" in notes[0]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_rejections_of_sharding_are_counted(precision: Precision) -> None:
    profile = small_profile("buffers")
    space = Space(profile, cluster(1, 4), TrainingSpec(global_batch=16, precision=precision), Pins())

    families = list(space.families())

    sharded = any(shape.data_shard > 1 for family in families for shape in space.shapes(family))
    assert sharded == (precision == "fp32")
    assert any("addmm" in rule for rule in space.rejected) == (precision == "bf16")


@pytest.mark.parametrize(
    ("model", "stages", "changes", "rule"),
    [
        ("in place", [[KEPT] * 6], {"data_shard": 2}, "writes into its input"),
        ("overwritten", [[KEPT, REPEATED, *[KEPT] * 3]], {}, "written over"),
        ("buffers", [[KEPT] * 4], {"data_shard": 2, "precision": "bf16"}, "addmm"),
    ],
)
def test_check_knows_what_cannot_run(
    model: str, stages: list[list[LayerOption]], changes: dict[str, Any], rule: str
) -> None:
    found = check(_plan(model, stages, **changes), small_profile(model))

    assert len(found) == 1
    assert rule in found[0]


@pytest.mark.slow
def test_equal_layers_that_differ_in_what_crosses_may_be_repeated_in_any_order() -> None:
    # such layers are priced apart, so a search may repeat only the later ones
    plan = _plan("gpt2", [[KEPT], [KEPT, REPEATED], [KEPT, KEPT]])

    assert check(plan, small_profile("gpt2")) == []
