"""One layout under the stacks that could run it."""

import pytest

from meshwright.planner.answers.stacks import under_stacks
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from support.synthetic import layer_class, profile

CHAIN = profile([layer_class("block", 1e12, 10_000_000, saved=1e6, inputs=1e6, heads=8)], [0] * 4)
BLOCKS = [f"blocks.{i}" for i in range(4)]
MODEL = CHAIN.model_copy(
    update={
        "layers": tuple(
            layer.model_copy(update={"root": name, "modules": (name,), "parameters": (f"{name}.weight",)})
            for layer, name in zip(CHAIN.layers, BLOCKS, strict=True)
        )
    }
)
SHARDED = Shape(1, 8, 1, 1, micro_batch=1, num_microbatches=1, gradient_sync="every", reshard=True)


def plan_of(shape: Shape, software: str = "fsdp2-eager") -> Plan:
    training = TrainingSpec(global_batch=8, seq_len=64, software=software)
    cluster = cluster_of(load_device("h100-80gb"), 8)
    stage = [LayerOption(reshard=shape.reshard)] * (4 // shape.pipeline)
    return make_plan(MODEL, cluster, training, shape, [stage] * shape.pipeline)


def test_the_plans_own_stack_comes_first_and_costs_what_the_plan_does() -> None:
    plan = plan_of(SHARDED, "megatron-core+graphs")

    own, *others = under_stacks(plan, MODEL)

    assert own.software == "megatron-core+graphs"
    assert own.step_s == estimate(plan, MODEL).step_time_s
    assert {each.software for each in others} == {"fsdp2-eager", "fsdp2-compile"}
    assert others[0].step_s <= others[1].step_s
    assert "100% more" in others[0].in_words(others[0].step_s / 2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (SHARDED, {"fsdp2-eager", "fsdp2-compile", "megatron-core"}),
        (
            # Megatron's pipelines reduce gradients once a step
            Shape(1, 4, 1, 2, 1, 2, schedule="1f1b", gradient_sync="every", reshard=True),
            {"fsdp2-eager", "fsdp2-compile"},
        ),
    ],
)
def test_a_stack_that_could_not_run_a_layout_is_not_shown(shape: Shape, expected: set[str]) -> None:
    assert {each.software for each in under_stacks(plan_of(shape), MODEL)} == expected
