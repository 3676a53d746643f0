"""Which of two plans is the simpler one."""

from dataclasses import replace

import pytest

from meshwright.planner.answers.simplicity import mechanism, preference, simplicity
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from support.synthetic import cluster, device, layer_class, profile

MODEL = profile([layer_class("block", 1e11, 1_000_000, 1e7, 1e6, heads=8)], [0] * 8)
TRAINING = TrainingSpec(global_batch=16, seq_len=64)
DDP = Shape(8, 1, 1, 1, 2, 1)


def plan_of(shape: Shape, *options: LayerOption) -> Plan:
    """The plan of a shape with equally many layers on each stage; options: of the first layers, others have none."""
    stages = shape.pipeline * shape.virtual_stages
    each = [*options, *[LayerOption(reshard=shape.reshard)] * (8 - len(options))]
    return make_plan(
        MODEL, cluster(1, 8), TRAINING, shape, [each[s * 8 // stages : (s + 1) * 8 // stages] for s in range(stages)]
    )


def tuple_of(plan: Plan) -> tuple[float, ...]:
    """Its simplicity."""
    return simplicity(plan, estimate(plan, MODEL))


def test_mechanisms_are_in_the_order_in_which_people_reach_for_them() -> None:
    gathered_once = replace(DDP, data_replicate=1, data_shard=8)
    pipeline = Shape(2, 1, 1, 4, 1, 8, schedule="1f1b")
    shapes = [
        DDP,
        gathered_once,
        replace(DDP, data_replicate=2, data_shard=4),
        Shape(4, 1, 2, 1, 2, 2),
        Shape(4, 1, 1, 1, 4, 1, context=2),
        pipeline,
        replace(pipeline, schedule="interleaved", virtual_stages=2),
        replace(pipeline, schedule="zb-h1"),
    ]
    plans = [plan_of(shape) for shape in shapes]
    plans.insert(2, plan_of(gathered_once, *[LayerOption(reshard=True)] * 8))

    assert [mechanism(plan) for plan in plans] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sorted(plans, key=tuple_of) == plans


@pytest.mark.parametrize(
    ("simpler", "other"),
    [
        (plan_of(DDP), plan_of(DDP, LayerOption("full"))),
        (plan_of(DDP), plan_of(replace(DDP, micro_batch=1, num_microbatches=2))),
        (plan_of(Shape(4, 1, 2, 1, 4, 1)), plan_of(Shape(4, 1, 2, 1, 4, 1, sequence=True))),
    ],
)
def test_less_recompute_less_accumulation_and_fewer_kinds_are_simpler(simpler: Plan, other: Plan) -> None:
    assert tuple_of(simpler) < tuple_of(other)


def test_memory_counts_only_where_predictions_may_be_exceeded() -> None:
    plan = plan_of(DDP)
    used = max(stage.device_bytes for stage in estimate(plan, MODEL).memory)

    def on(memory: float) -> float:
        at = plan.model_copy(update={"cluster": cluster(1, 8, device(memory))})
        return tuple_of(at)[-1]

    assert on(2 * used) == on(4 * used) == 0.0
    assert on(used) > 0.0


def test_context_ranks_share_the_state_and_so_spare_no_kind() -> None:
    pipeline = Shape(1, 2, 2, 2, 1, 8, schedule="1f1b")

    assert tuple_of(plan_of(pipeline)) < tuple_of(
        plan_of(replace(pipeline, data_shard=1, num_microbatches=16, context=2))
    )


@pytest.mark.parametrize("faster", [0, 1])
def test_of_equally_simple_layouts_the_same_is_preferred_whichever_is_a_little_faster(faster: int) -> None:
    plans = [plan_of(Shape(4, 1, 2, 1, 2, 2)), plan_of(Shape(2, 1, 4, 1, 4, 2))]
    found = [estimate(plan, MODEL) for plan in plans]
    assert tuple_of(plans[0]) == tuple_of(plans[1])
    seconds = [1.0, 1.0]
    seconds[faster] = 0.999

    tuples = [
        preference(plan, each.model_copy(update={"step_time_s": step_s}))
        for plan, each, step_s in zip(plans, found, seconds, strict=True)
    ]

    assert min(tuples) == tuples[0]


def test_of_plans_of_one_layout_the_faster_is_preferred() -> None:
    plan = plan_of(DDP)
    found = estimate(plan, MODEL)

    assert preference(plan, found) < preference(plan, found.model_copy(update={"step_time_s": 2 * found.step_time_s}))
