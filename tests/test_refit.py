"""Refitting: measured steps move the constants that made them, priors hold the rest, and one wild run bends nothing."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.cost.alone import kernels_s
from meshwright.planner.cost.comm_cost import collective_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.refit import MeasuredCollective, MeasuredStep, most_open, on_device, refit, turned
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import Device
from support.synthetic import cluster, device, layer_class, profile

PRESET = device(matmul_efficiency=0.6, overlap=0.0)
TRUTH = {"matmul": 0.7, "link bandwidth": 0.5, "optimizer": 0.6}
"""What the real machine has, over the preset."""

SHAPES = (
    Shape(8, 1, 1, 1, micro_batch=2, num_microbatches=1),
    Shape(1, 8, 1, 1, micro_batch=2, num_microbatches=1, reshard=True, gradient_sync="every"),
    Shape(1, 8, 1, 1, micro_batch=1, num_microbatches=2),
    Shape(2, 4, 1, 1, micro_batch=2, num_microbatches=1),
    Shape(4, 1, 1, 2, micro_batch=1, num_microbatches=4, schedule="1f1b"),
    Shape(1, 1, 1, 8, micro_batch=1, num_microbatches=16, schedule="1f1b"),
)


def runs(on: Device, noise: float = 0.0) -> list[MeasuredStep]:
    """Steps of several shapes of two models, as long as they take on `on`."""
    found = []
    random = np.random.default_rng(0)
    for parameters, flops in ((4_000_000, 2e11), (40_000_000, 4e10)):
        model = profile([layer_class("block", flops, parameters, 2e6, 1e6)], [0] * 8)
        training = TrainingSpec(global_batch=16, seq_len=64)
        for shape in SHAPES:
            count = len(model.layers) // shape.pipeline
            option = LayerOption("none", shape.reshard)
            plan = make_plan(model, cluster(on=PRESET), training, shape, [[option] * count] * shape.pipeline)
            step_s = estimate(on_device(plan, on), model).step_time_s * float(np.exp(noise * random.standard_normal()))
            found.append(MeasuredStep(shape.label, plan, model, step_s))
    return found


@pytest.mark.slow
def test_constants_that_made_the_steps_are_found() -> None:
    found = refit(PRESET, runs(turned(PRESET, TRUTH)))

    assert max(map(abs, found.before)) > 0.3
    assert max(map(abs, found.after)) < 0.01
    assert found.factors["matmul"] == pytest.approx(0.7, rel=0.05)


@pytest.mark.slow
def test_a_fit_to_half_of_the_runs_predicts_the_other_half() -> None:
    truth = turned(PRESET, TRUTH)
    everything = runs(truth, noise=0.02)

    found = refit(PRESET, everything[::2])

    unseen = [abs(np.log(estimate(on_device(r.plan, found.device), r.profile).step_time_s / r.step_s))
              for r in everything[1::2]]  # fmt: skip
    assert float(np.median(unseen)) < 0.05


@pytest.mark.slow
def test_runs_as_predicted_change_nothing() -> None:
    found = refit(PRESET, runs(PRESET))

    assert found.factors == {}
    assert found.device.matmul_efficiency == PRESET.matmul_efficiency


@pytest.mark.slow
def test_a_share_that_is_told_to_be_one_is_lowered() -> None:
    told = PRESET.model_copy(update={"matmul_efficiency": 1.0})

    found = refit(told, runs(turned(told, {"matmul": 0.7})), ["matmul", "memory traffic", "optimizer"])

    assert found.device.matmul_efficiency == pytest.approx(0.7, rel=0.02)


def test_a_launch_that_is_told_too_short_to_show_is_found() -> None:
    first = runs(PRESET)[0]

    def step_s(launch: float) -> float:
        return estimate(on_device(first.plan, PRESET.model_copy(update={"launch": launch})), first.profile).step_time_s

    shows = next(seconds for seconds in np.geomspace(1e-6, 1.0, 100) if step_s(seconds) > 1.001 * first.step_s)
    told = PRESET.model_copy(update={"launch": 0.8 * shows})

    found = refit(told, runs(turned(told, {"launch": 2.5}))[:1], ["launch"])

    assert max(map(abs, found.before)) > 0.3
    assert max(map(abs, found.after)) < 0.02


def test_what_ranks_compute_tells_slow_links_from_slow_kernels() -> None:
    truth = turned(PRESET, {"link bandwidth": 0.5})
    step = runs(truth)[7]
    known = replace(step, compute_s=kernels_on(truth, step))

    by_step, by_both = (refit(PRESET, [each]) for each in (step, known))

    off = [abs(kernels_on(found.device, step)[0] / known.compute_s[0] - 1) for found in (by_step, by_both)]
    assert off[0] > 0.05
    assert off[1] < 0.01
    assert abs(by_both.after[0]) < 0.02


def kernels_on(on: Device, each: MeasuredStep) -> tuple[float, ...]:
    """[pipeline coordinate] what ranks compute of a step there."""
    plan = on_device(each.plan, on)
    return tuple(kernels_s(plan, each.profile, estimate(plan, each.profile), i) for i in range(plan.degrees.pipeline))


def test_only_constants_that_may_move_are_fitted() -> None:
    found = refit(PRESET, runs(turned(PRESET, TRUTH)), ["link bandwidth", "link latency"])

    assert found.factors.keys() <= {"link bandwidth", "link latency"}
    assert found.device.matmul_efficiency == PRESET.matmul_efficiency


@pytest.mark.slow
def test_how_far_replicas_hide_their_reduction_is_found() -> None:
    truth = PRESET.model_copy(update={"replica_overlap": 0.6})
    found = refit(truth.model_copy(update={"replica_overlap": 0.3}), runs(truth), ["replica overlap"])

    assert found.device.replica_overlap == pytest.approx(0.6, rel=0.1)


@pytest.mark.slow
def test_one_wild_run_bends_nothing() -> None:
    calm = runs(turned(PRESET, TRUTH))
    wild = [replace(calm[0], step_s=20 * calm[0].step_s), *calm[1:]]

    assert refit(PRESET, wild).factors["matmul"] == pytest.approx(refit(PRESET, calm).factors["matmul"], rel=0.05)


@pytest.mark.slow
def test_sources_tell_what_was_fitted_and_to_how_many_runs() -> None:
    found = refit(PRESET, runs(turned(PRESET, TRUTH)))

    assert "matmul x 0.7" in found.device.sources["matmul_efficiency"]
    assert "fitted to 12 measured steps" in found.device.sources["matmul_efficiency"]


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        refit(PRESET, [])


def priced(shape: Shape, on: Device) -> MeasuredStep:
    """A step of one shape, as long as it takes on `on`."""
    model = profile([layer_class("block", 4e10, 40_000_000, 2e6, 1e6)], [0] * 8)
    option = LayerOption("none", shape.reshard)
    training = TrainingSpec(global_batch=16, seq_len=64)
    plan = make_plan(model, cluster(on=PRESET), training, shape, [[option] * 8] * shape.pipeline)
    return MeasuredStep(shape.label, plan, model, estimate(on_device(plan, on), model).step_time_s)


@pytest.mark.slow
def test_collectives_that_are_timed_alone_tell_kinds_apart_that_all_runs_use_in_one_proportion() -> None:
    truth = turned(PRESET, {"all_gather": 0.6, "reduce_scatter": 2.5, "link bandwidth": 0.5})
    sharded = [
        priced(Shape(1, 8, 1, 1, micro_batch=2, num_microbatches=1, reshard=True, gradient_sync=sync), truth)
        for sync in ("every", "last")
    ]
    (first, *_) = sharded
    links = CostModel(first.profile, on_device(first.plan, truth).cluster, first.plan.training).links(8, 1)
    alone = [
        MeasuredCollective(kind, 1e8, collective_s(kind, 1e8, links), first.plan, first.profile)
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    names = ["link bandwidth", "all_reduce", "all_gather", "reduce_scatter"]
    kept = priced(Shape(1, 8, 1, 1, micro_batch=2, num_microbatches=1, reshard=False, gradient_sync="last"), truth)

    def off(device: Device) -> float:
        return abs(estimate(on_device(kept.plan, device), kept.profile).step_time_s / kept.step_s - 1)

    assert off(refit(PRESET, sharded, names, 0.02).device) > 0.1
    assert off(refit(PRESET, sharded, names, 0.02, alone).device) < 0.02


def test_what_collectives_tell_need_not_be_asked_of_runs() -> None:
    found = runs(PRESET)[len(SHAPES) :]  # of the model that has more to exchange
    model, (ddp, fsdp, *others) = found[0].profile, [run.plan for run in found]
    others.append(ddp)
    names = ["all_gather", "reduce_scatter", "link bandwidth"]
    timed = [
        MeasuredCollective(kind, size, np.nan, fsdp, model)
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (1e6, 1e8)
    ]

    before = most_open(PRESET, model, [fsdp], others, 9, names, 0.02)
    after = most_open(PRESET, model, [fsdp], others, 9, names, 0.02, timed)

    assert before
    assert len(after) < len(before)
