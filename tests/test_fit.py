"""The fit to published step times: constants are tried where they apply, and planted factors come out again."""

import json
import math

import numpy as np
import pytest

from benchmarks.published.constants import CONSTANTS, SHARES, Constant, applies, factors_of, on_cluster, tried
from benchmarks.published.fit import Case, Fit
from benchmarks.published.fit_bands import FITTED
from meshwright.planner.cost.estimate import estimate, step_seconds
from meshwright.planner.cost.kept import kept
from meshwright.planner.cost.software import all_software
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, device_names, load_device
from support.published_rows import row
from support.synthetic import layer_class, profile

MODEL = profile([layer_class("block", 1e12, 10_000_000, saved=1e6, inputs=1e6, heads=8)], [0] * 4)


def plan_on(device: str, software: str = "fsdp2-eager", precision: Precision = "bf16", gpus: int = 1) -> Plan:
    shape = Shape(1, gpus, 1, 1, micro_batch=1, num_microbatches=1, gradient_sync="every" if gpus > 1 else "last")
    training = TrainingSpec(global_batch=gpus, seq_len=64, software=software, precision=precision)
    return make_plan(MODEL, cluster_of(load_device(device), gpus), training, shape, [[LayerOption()] * 4])


def named(name: str) -> Constant:
    return next(constant for constant in CONSTANTS if constant.name == name)


def case_of(plan: Plan, measured_s: float) -> Case:
    return Case(row(), plan, MODEL, measured_s, 1.0)


@pytest.mark.parametrize(
    ("name", "plan", "expected"),
    [
        ("A100: sustained", plan_on("a100-80gb"), True),
        ("A100: sustained", plan_on("h100-80gb"), False),
        ("megatron-core: casts", plan_on("b200", "megatron-core"), False),
        ("megatron-core: casts", plan_on("b200", "megatron-core", precision="fp8"), True),
        ("megatron-core: fusion", plan_on("h100-80gb", "megatron-core+graphs"), True),
        ("megatron-core: fusion", plan_on("h100-80gb", "megatron-2023"), False),
        ("Omni-Path bandwidth", plan_on("v100-32gb"), False),
        ("Omni-Path bandwidth", plan_on("h100-80gb", gpus=16), False),
        ("STRAGGLING", plan_on("h100-80gb", gpus=16), True),
    ],
)
def test_a_constant_applies_to_its_devices_stacks_and_precisions(name: str, plan: Plan, expected: bool) -> None:
    assert applies(named(name), plan) is expected


@pytest.mark.parametrize(
    "plan",
    [
        plan_on("a100-80gb"),
        plan_on("gb300", "megatron-core+part-graphs", "fp4"),
        plan_on("h100-80gb", "fsdp1-flash1", gpus=16),
    ],
)
def test_a_constant_that_does_not_apply_changes_nothing(plan: Plan) -> None:
    before = step_seconds(plan, MODEL)
    others = factors_of({constant.name: 0.5 for constant in CONSTANTS if not applies(constant, plan)})
    with tried(others):
        after = step_seconds(on_cluster(plan, others), MODEL)

    assert after == before


def test_the_seconds_of_a_step_are_those_of_the_estimate() -> None:
    plan = plan_on("h100-80gb", gpus=16)

    assert step_seconds(plan, MODEL) == estimate(plan, MODEL).step_time_s


def test_a_planted_factor_is_found_again() -> None:
    plans = [plan_on("a100-80gb", software) for software in ("fsdp2-eager", "megatron-core", "megatron-2023")] * 4
    planted = {"A100: sustained": 0.3}
    with tried(planted):
        cases = [case_of(plan, step_seconds(on_cluster(plan, planted), MODEL)) for plan in plans]
    fit = Fit(cases, {})

    point = fit.fitted(3, fit.weights)

    assert np.abs(fit.predict(np.zeros(len(CONSTANTS))) - fit.measured).min() > 0.1
    assert np.abs(point.predicted - fit.measured).max() < 0.03
    assert point.logarithms[CONSTANTS.index(named("A100: sustained"))] == pytest.approx(math.log(0.3), abs=0.2)


def test_without_rows_a_fit_goes_back_to_the_values_before_any() -> None:
    plan = plan_on("a100-80gb")
    fit = Fit([case_of(plan, 1.0)], {"A100: sustained": 1.3})

    moved = fit.move(fit.at(np.zeros(len(CONSTANTS))), np.zeros(1))

    assert moved[CONSTANTS.index(named("A100: sustained"))] == pytest.approx(-math.log(1.3))


@pytest.mark.slow
def test_a_group_out_does_not_see_its_own_rows() -> None:
    a100, h100 = plan_on("a100-80gb"), plan_on("h100-80gb")
    cases = [case_of(plan, 1.2 * step_seconds(plan, MODEL)) for plan in (a100, a100, a100, h100, h100, h100)]
    fit = Fit(cases, {})
    point = fit.at(np.zeros(len(CONSTANTS)))

    _, found = fit.groups_out(point, ["a100"] * 3 + ["h100"] * 3)

    own = CONSTANTS.index(named("A100: sustained"))
    assert found["a100"][own] == pytest.approx(0.0, abs=1e-9)
    assert found["h100"][own] < -0.02


def test_rows_given_back_pull_and_are_not_counted() -> None:
    plan = plan_on("a100-80gb")
    cases = [case_of(plan, 1.05 * step_seconds(plan, MODEL)) for _ in range(4)]
    fit = Fit(cases, {})
    point = fit.at(np.zeros(len(CONSTANTS)))

    alone, _ = fit.groups_out(point, ["one"] * 4)
    given, _ = fit.groups_out(point, ["one"] * 4, given=8)

    assert alone == pytest.approx(-math.log(1.05) * np.ones(4))
    assert np.isnan(given).sum() == 2
    assert np.nanmax(np.abs(given)) < 0.5 * math.log(1.05)


def test_what_is_kept_is_made_once_for_each_object_and_goes_with_it() -> None:
    class Document:
        """Equal to every other."""

        def __eq__(self, other: object) -> bool:
            return True

    made = []
    length = kept(lambda document: made.append(document.__class__) or len(made))
    first, second = Document(), Document()

    assert (length(first), length(second), length(first)) == (1, 2, 1)


# --- the fit that the project has ------------------------------------------------------------------------------------

FAR = 3.0
"""Spreads from what was likely before any data at which a constant stands in for a term that is missing."""


def test_no_constant_ends_far_from_what_was_likely() -> None:
    fitted = json.loads((FITTED / "fit.json").read_text())

    far = {
        name: factor
        for name, factor in fitted["factors"].items()
        if abs(math.log(factor)) > FAR * fitted["spreads"][name]
    }

    assert set(fitted["factors"]) == {constant.name for constant in CONSTANTS}
    assert far == {}


def test_no_fitted_share_is_all_or_nothing() -> None:
    holders = [*all_software().values(), *(load_device(name) for name in device_names() if name != "cpu")]

    found = {
        (holder.name, field): getattr(holder, field)
        for holder in holders
        for field in SHARES
        if field in holder.model_fields_set
    }

    assert len(found) > 20
    assert {where: value for where, value in found.items() if not 0.02 < value < 0.98} == {}
