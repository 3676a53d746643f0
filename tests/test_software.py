"""Training stacks change predictions as their constants say, and nothing where they are the reference."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.software import Software, StackMemory, all_software, load_software
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import REFERENCE, TrainingSpec
from meshwright.profiler.document import rule_of
from meshwright.profiler.machine.cluster import load_device
from support.synthetic import cluster, device, layer_class, profile
from support.synthetic_plans import plan_by


def _step_s(software: str, **changes: int) -> float:
    model = profile([layer_class("block", 1e12, 10_000_000, saved=1e6, inputs=1e6, heads=8)], [0] * 4)
    return estimate(plan_by(software, **changes), model).step_time_s


@pytest.fixture
def slow_host(tmp_path: Path) -> str:
    path = tmp_path / "slow.toml"
    path.write_text('[slow]\ndescription = "a slow host"\nlayer_s = 0.5\nstep_s = 3.0\nsource = "made up"\n')
    return str(path)


def test_the_reference_leaves_a_device_as_it_is() -> None:
    given = device()

    assert load_software(REFERENCE).on(given) is given


def test_fusion_speeds_up_memory_bound_kernels_only() -> None:
    given = load_device("h100-80gb")

    used = Software(name="x", description="", fusion=0.5, source="").on(given)

    assert used.kernel_efficiency["elementwise"] == 2 * given.bandwidth_efficiency
    assert used.bandwidth_efficiency == given.bandwidth_efficiency
    assert used.matmul_efficiency == given.matmul_efficiency


def test_a_host_adds_its_seconds_to_every_pass_and_step(slow_host: str) -> None:
    added = _step_s(slow_host) - _step_s(REFERENCE)

    assert added == pytest.approx(4 * 2 * 0.5 + 3.0)


def test_gradients_are_added_for_nothing_where_matmuls_do_it(tmp_path: Path) -> None:
    fused = tmp_path / "fused.toml"
    fused.write_text('[fused]\ndescription = "x"\naccumulates_in_matmul = true\nsource = "made up"\n')

    assert _step_s(str(fused), num_microbatches=4) < _step_s(REFERENCE, num_microbatches=4)
    assert _step_s(str(fused)) == pytest.approx(_step_s(REFERENCE))


def test_every_stack_says_what_it_is_and_where_its_numbers_come_from() -> None:
    assert all(stack.description and stack.source for stack in all_software().values())


def test_an_unknown_stack_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="there is no software 'deepspeed'; there are fsdp2-eager"):
        load_software("deepspeed")


def test_a_name_that_is_none_of_a_table_is_answered_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[mine]\ndescription = "mine"\n[mine.memory]\nactivations = 0.9\n')

    with pytest.raises(ValueError, match=r"memory.activations: there is nothing of that name; there are .*, fuses, "):
        load_software(str(path))


def test_a_file_that_holds_no_stack_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[mine]\nspeed = 3\n")

    with pytest.raises(ValueError, match="holds no table of one software"):
        load_software(str(path))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("overlap = 1.4", r"overlap: it should be from 0 to 1 \(found 1.4\)"),
        ("layer_s = -1e-3", r"layer_s: it should be from 0 to 60 \(found -0.001\)"),
        ('attention_kernel = "flash-9"', r"attention_kernel: .*'flash-2'.* \(found 'flash-9'\)"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_the_range(tmp_path: Path, line: str, rule: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'[mine]\ndescription = "x"\n{line}\nsource = "made up"\n')

    with pytest.raises(ValueError, match=rule):
        load_software(str(path))


def numbers_of(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if "float" in str(field.annotation)]


@pytest.mark.parametrize("beyond", [-1, 1e300, float("nan")])
@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model in (Software, StackMemory) for name in numbers_of(model)]
)
def test_each_number_of_software_out_of_its_range_is_refused_with_the_range(
    model: type[BaseModel], name: str, beyond: float
) -> None:
    required = {"name": "mine", "description": "x", "source": "made up"} if model is Software else {}

    with pytest.raises(ValidationError) as found:
        model.model_validate(required | {name: beyond})

    assert re.search(r"it should be (from|above) \S+ (to|and at most) \S+$", rule_of(found.value, model))


def test_a_precision_without_a_rate_is_refused_with_those_there_are() -> None:
    model = profile([layer_class("block", 1e12, 10_000_000, saved=1e6, inputs=1e6)], [0])
    training = TrainingSpec(global_batch=1, seq_len=64, precision="fp4")
    plan = make_plan(model, cluster(per_host=1), training, Shape(1, 1, 1, 1, 1, 1), [[LayerOption()]])

    with pytest.raises(ValueError, match="has no rate for fp4; its device file has"):
        estimate(plan, model)
