"""Bands of predictions: what they are made of, where they apply, and that people see them."""

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks.published.fit_bands import band, time_bands
from meshwright.executor.reporting.terminal import print_memory, print_no_band, print_speed
from meshwright.planner.cost.bands import (
    Band,
    margin_at,
    memory_band,
    memory_risk,
    no_band,
    no_time_band,
    time_band,
    time_kind,
)
from meshwright.planner.cost.estimate import StageMemory
from meshwright.planner.plan.document import Plan, Prediction
from support.synthetic_plans import plan_by

GIB = 2**30


def test_a_band_holds_eight_of_ten_measurements() -> None:
    errors = [(math.log(predicted / 100), 1.0) for predicted in range(90, 111)]

    found = band(errors, wider=1.0)
    inside = [found.low <= math.exp(-error) <= found.high for error, _ in errors]

    assert sum(inside) / len(inside) == pytest.approx(0.8, abs=0.05)


def test_a_prediction_that_is_too_low_has_a_band_above_it() -> None:
    found = band([(math.log(0.5), 1.0), (math.log(0.6), 1.0)], wider=1.0)

    assert 1.0 < found.low < found.high


def test_twice_as_wide_is_the_square_of_the_factors() -> None:
    errors = [(0.1, 1.0), (-0.1, 1.0)]

    assert band(errors, 2.0).high == pytest.approx(band(errors, 1.0).high ** 2, abs=1e-3)


def test_kinds_with_few_runs_take_the_band_of_all_hosts_twice_as_wide() -> None:
    found = time_bands({"dense, 16 bit, one host": [(0.1, 1.0)] * 20})

    own, other = found["dense, 16 bit, one host"], found["dense, 16 bit, several hosts"]
    assert own.low == pytest.approx(math.exp(-0.1), abs=1e-3)
    assert other.low == pytest.approx(math.exp(-0.2), abs=1e-3)
    assert own.runs == other.runs == 20


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_every_kind_of_job_has_a_band(mixture: bool, precision: str, num_hosts: int) -> None:
    kind = time_kind(mixture, precision, num_hosts)

    assert kind in time_bands({"dense, 16 bit, one host": [(0.1, 1.0)]})


def transformer() -> Plan:
    """A plan of a model with attention over a sequence, as the published runs have."""
    plan = plan_by("fsdp2-eager")
    model = plan.model.model_copy(update={"attention_modules": ("attention",), "num_parameters": 8_000_000_000})
    return _on("h100-80gb", plan.model_copy(update={"model": model}))


def _on(device: str, plan: Plan) -> Plan:
    """A plan whose devices have another name."""
    host = plan.cluster.hosts[0]
    named = host.model_copy(update={"device": host.device.model_copy(update={"name": device})})
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"hosts": (named,)})})


def test_plans_on_gpus_have_bands_around_one() -> None:
    plan = transformer()
    time, memory = time_band(plan), memory_band(plan)

    assert time is not None
    assert memory is not None
    assert 0.5 < time.low < 1.0 < time.high < 2.0
    assert 0.8 < memory.low < 1.0 < memory.high < 1.25


def test_plans_on_cpus_have_none() -> None:
    plan = _on("cpu", transformer())

    assert time_band(plan) is None
    assert memory_band(plan) is None


@pytest.mark.parametrize(
    ("of_training", "of_model"),
    [({"seq_len": None}, {}), ({}, {"attention_modules": ()})],
    ids=["images", "no attention"],
)
def test_what_no_published_run_is_of_has_no_band_and_is_told_so(
    of_training: dict[str, object], of_model: dict[str, object]
) -> None:
    plan = transformer()
    training, model = plan.training.model_copy(update=of_training), plan.model.model_copy(update=of_model)
    other = plan.model_copy(update={"training": training, "model": model})
    console = Console(record=True, width=200, file=io.StringIO())
    print_no_band(console, other)

    assert time_band(other) is None
    assert memory_band(other) is None
    assert no_band(plan) == ""
    assert "published runs are of language models, none of a model of this kind" in console.export_text()


@pytest.mark.parametrize(
    ("device", "num_parameters", "why"),
    [
        ("rtx-4090", 8_000_000_000, "no published run is of rtx-4090"),
        ("h100-80gb", 115_000, "no published run is of a model of fewer than 124 M parameters"),
    ],
)
def test_devices_and_sizes_of_which_nothing_is_published_have_no_band_of_time(
    device: str, num_parameters: int, why: str
) -> None:
    plan = _on(device, transformer())
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"num_parameters": num_parameters})})

    assert time_band(plan) is None
    assert no_time_band(plan) == why


def test_step_time_is_shown_with_its_band() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    print_speed(console, 1.31, 100.0, 0.4, "tokens/s", "", Band(0.9, 1.11, 20))

    assert "1.31 s (1.18 s to 1.45 s)" in console.export_text()


def test_memory_of_the_fullest_gpu_is_shown_with_its_band() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    stages = [
        StageMemory(
            items={},
            allocated_bytes=0,
            reserved_bytes=0,
            max_reserved_bytes=0,
            device_bytes=gib * GIB,
            budget_bytes=80 * GIB,
        )
        for gib in (40, 20)
    ]
    print_memory(console, transformer(), stages, Band(0.95, 1.1, 20))

    assert "fullest GPU 40.0 (38.0 to 44.0" in console.export_text()


def test_a_mixture_has_the_band_of_experts_whether_they_are_spread_or_not() -> None:
    plan = transformer()
    mixture = plan.model_copy(update={"model": plan.model.model_copy(update={"expert_modules": ("experts",)})})

    dense, experts = time_band(plan), time_band(mixture)

    assert dense is not None
    assert experts is not None
    assert experts.high / experts.low > dense.high / dense.low


def test_half_of_a_band_is_a_tenth_of_the_risk_on_either_side() -> None:
    found = Band(0.9, 1.1, 100)

    assert found.risk(100.0, 110.0) == pytest.approx(0.1)
    assert found.risk(100.0, 90.0) == pytest.approx(0.9)
    assert found.room(0.1) == pytest.approx(1.1)
    assert found.room(0.05) > 1.1


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.3])
def test_a_plan_that_fills_what_a_risk_leaves_it_has_that_risk(risk: float) -> None:
    plan = transformer()
    told = {"attention_modules": plan.model.attention_modules, "num_parameters": plan.model.num_parameters}
    profile = SimpleNamespace(seq_len=plan.training.seq_len, **told)

    margin = margin_at(risk, profile, plan.cluster.device.name)  # type: ignore[arg-type]

    assert margin is not None
    full = Prediction(step_time_s=1, tokens_per_s=1, mfu=0.4, stage_memory_bytes=(7e10,), budget_bytes=7e10)
    training = plan.training.model_copy(update={"memory_margin": margin})
    filled = plan.model_copy(update={"prediction": full, "training": training})
    half = full.model_copy(update={"stage_memory_bytes": (3.5e10,)})
    assert memory_risk(filled) == pytest.approx(risk)
    assert memory_risk(filled.model_copy(update={"prediction": half})) == pytest.approx(0.0, abs=1e-9)
    assert margin_at(risk, profile, "cpu") is None  # type: ignore[arg-type]
