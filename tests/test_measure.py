"""measure: plans really run, in turns; what cannot run says why."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.executor.measuring import measure as measure_module
from meshwright.executor.measuring.measure import measure
from meshwright.executor.measuring.measurement import Measurement, quantile
from meshwright.executor.parallel.stage_module import StageModule
from meshwright.planner.plan.document import Plan, Prediction
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import synthetic

MLP = Path(__file__).parent.parent / "benchmarks" / "models" / "mlp.py"


@cache
def mlp() -> tuple[LoadedModel, ModelProfile]:
    """The small MLP and its profile."""
    small = load_model(MLP).small
    assert small is not None
    return small(), trace(small())


def plan_on(ranks: int = 1, **changes: Any) -> Plan:
    """8 samples a step: two micro-batches of 4, divided over data ranks."""
    _, profile = mlp()
    fields = {"data_replicate": ranks, "data_shard": 1, "tensor": 1, "pipeline": 1, "micro_batch": 4 // min(ranks, 4)}
    shape = Shape(**{**fields, "num_microbatches": 2, **changes})
    layers = len(profile.layers) // shape.pipeline
    batch = shape.micro_batch * shape.num_microbatches * shape.data
    return make_plan(
        profile,
        synthetic.cluster(1, shape.degrees.num_devices),
        TrainingSpec(global_batch=batch, precision="fp32"),
        shape,
        [[LayerOption()] * layers] * shape.pipeline,
    )


def measurement(*steps_s: tuple[float, ...]) -> Measurement:
    """A measurement of these steps, 100 tokens each."""
    return Measurement(
        label="x", model="m", layout="one device", num_ranks=1, device="cpu", torch_version="2", steps_s=steps_s,
        tokens_per_step=100, peak_memory_bytes=(1,), memory_kind="resident",
    )  # fmt: skip


@pytest.mark.slow
def test_every_plan_takes_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    run = measure_module.run_local_ranks

    def noted(function: Any, num_ranks: int, *args: Any, **kwargs: Any) -> list[Any]:
        turns.append(num_ranks)
        return run(function, num_ranks, *args, **kwargs)

    monkeypatch.setattr(measure_module, "run_local_ranks", noted)
    stages = plan_on(data_replicate=1, pipeline=2, schedule="gpipe")
    plans = {"one": plan_on(), "stages": stages}

    found = measure(plans, mlp()[0], steps=2, repetitions=2)

    assert turns == [1, 2, 1, 2]
    for label, plan in plans.items():
        result = found[label]
        assert isinstance(result, Measurement)
        assert [len(repetition) for repetition in result.steps_s] == [2, 2]
        assert all(seconds > 0 for seconds in result.step_times_s)
        assert len(result.peak_memory_bytes) == result.num_ranks == plan.degrees.num_devices
        assert min(result.peak_memory_bytes) > 2**20
        assert result.tokens_per_step == 8


def test_one_failure_leaves_the_others_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: StageModule, *_: Any) -> None:
        raise ValueError("no stage today")

    monkeypatch.setattr(StageModule, "forward", fail)
    plans = {"stages": plan_on(data_replicate=1, pipeline=2, schedule="gpipe"), "one": plan_on()}

    found = measure(plans, mlp()[0], steps=1, repetitions=1)

    reason = found["stages"]
    assert isinstance(reason, str)
    assert reason.startswith("it did not run: rank ")
    assert reason.endswith("of 2 failed: ValueError: no stage today")
    assert isinstance(found["one"], Measurement)


def test_more_ranks_than_this_machine_runs_are_not_tried() -> None:
    found = measure({"many": plan_on(32)}, mlp()[0], steps=1, repetitions=1)

    assert "it takes 32 ranks" in str(found["many"])


def test_runs_that_would_take_hours_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    prediction = Prediction(step_time_s=300.0, tokens_per_s=1.0, mfu=0.5, stage_memory_bytes=(1.0,), budget_bytes=2.0)
    on_cpu = synthetic.cluster(1, 1, synthetic.device(name="cpu"))
    slow = plan_on().model_copy(update={"prediction": prediction, "cluster": on_cpu})

    found = measure({"slow": slow}, mlp()[0], steps=1, repetitions=1)

    assert str(found["slow"]).startswith("3 steps of about 300 s each would take more than 600 s")


def test_median_and_spread() -> None:
    made = measurement((1.0, 2.0), (3.0, 4.0, 5.0))

    assert made.step_time_s == 3.0
    assert made.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)
    assert made.tokens_per_s == pytest.approx(100 / 3)


def test_quantiles_are_interpolated() -> None:
    assert quantile((4.0, 1.0), 0.5) == 2.5
    assert quantile((7.0,), 0.75) == 7.0


def test_a_saved_measurement_is_read_again(tmp_path: Path) -> None:
    made = measurement((1.0,))
    made.save(tmp_path / "m.json")

    assert Measurement.load(tmp_path / "m.json") == made


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"kind": "meshwright-measurement", "schema_version": 9}')

    with pytest.raises(ValueError, match=r"m\.json is not a measurement this version reads: it has schema_version 9"):
        Measurement.load(tmp_path / "m.json")
