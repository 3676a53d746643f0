"""Sides that tensor cores load in pieces: told with what padding would save, where that is measured and worth it."""

import pytest

from meshwright.planner.answers.padding import WORTH, padding
from meshwright.planner.answers.search import price_setup
from meshwright.planner.cost.kernels import family_of
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile, OpProfile
from support.synthetic import layer_class, profile


def head_of(outputs: int, inputs: int = 1024) -> ModelProfile:
    """Blocks, and a head with so many outputs on 512 tokens of a sample."""
    product = OpProfile(
        name="mm",
        module="out",
        kind="matmul",
        part="forward",
        flops=(0.0, 2.0 * 512 * inputs * outputs, 0.0, 0.0),
        shape=((0.0, 512.0, 0.0, 0.0), (float(inputs), 0.0, 0.0, 0.0), (float(outputs), 0.0, 0.0, 0.0)),
    )
    block = layer_class("block", 1e11, 1_000_000, saved=1e6, inputs=1e6)
    head = layer_class("head", 1e10, 1_000_000, saved=1e6, inputs=1e6)
    head = head.model_copy(update={"whole": head.whole.model_copy(update={"operators": (product,)})})
    return profile([block, head], [0, 0, 1], crossing=1e6)


def said(outputs: int, device: str = "h100-80gb", precision: str = "bf16", inputs: int = 1024) -> str:
    """What is said of the plan of two replicas."""
    model, cluster = head_of(outputs, inputs), cluster_of(load_device(device), 2)
    training = TrainingSpec(global_batch=32, seq_len=64, precision=precision)
    found = price_setup(parse_setup("ddp", 2, 2), model, cluster, training)
    assert found.plan is not None
    assert found.estimate is not None
    told = padding(found.plan, found.estimate, model)
    return "" if told is None else str(told)


def test_an_odd_vocabulary_is_told_with_what_padding_it_would_save() -> None:
    model, cluster = head_of(50_257), cluster_of(load_device("h100-80gb"), 2)
    found = price_setup(parse_setup("ddp", 2, 2), model, cluster, TrainingSpec(global_batch=32, seq_len=64))
    padded = price_setup(parse_setup("ddp", 2, 2), head_of(50_264), cluster, TrainingSpec(global_batch=32, seq_len=64))
    assert found.plan is not None
    assert found.estimate is not None
    assert padded.estimate is not None

    told = padding(found.plan, found.estimate, model)

    assert told is not None
    saved_s = found.estimate.step_time_s - padded.estimate.step_time_s
    assert told.seconds == pytest.approx(saved_s, rel=0.02)
    assert told.share > WORTH
    assert "50,257 is no multiple of 8" in str(told)
    assert "with 50,264 a step would take up to" in str(told)


def test_inputs_count_as_outputs_do() -> None:
    assert "1,023 is no multiple of 8" in said(50_264, inputs=1_023)


@pytest.mark.parametrize(
    ("outputs", "device", "precision"),
    [
        (50_264, "h100-80gb", "bf16"),
        (50_257, "a100-80gb", "bf16"),
        (50_257, "h100-80gb", "fp32"),
        (57, "h100-80gb", "bf16"),
    ],
    ids=["a multiple of 8", "not measured", "no tensor cores", "not worth it"],
)
def test_nothing_is_said_where_nothing_is_known_or_to_be_saved(outputs: int, device: str, precision: str) -> None:
    assert said(outputs, device, precision) == ""


def test_only_hopper_was_measured() -> None:
    measured = [n for n in ("h100-80gb", "a100-80gb", "b200", "l40s") if family_of(load_device(n)).unaligned.odd < 1]  # type: ignore[union-attr]

    assert measured == ["h100-80gb"]
