"""plan learn and plan report --run: constants out of runs of several models, and what of a run must be said."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.executor.measuring.learn import inliers, learn_runs, slow_rank, what_to_say
from meshwright.executor.reporting.run_diagnosis import diagnosis
from meshwright.executor.run_document import AxisSeconds, RunHeader, RunStep
from meshwright.planner.answers.search import prediction_of
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.refit import on_device, turned
from meshwright.planner.plan.document import MeasuredPlan, Plan
from meshwright.planner.plan.making import make_plan, shape_of
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile
from support.cli import run_plan
from support.synthetic import layer_class, profile

DEVICE = load_device("cpu")
TRUTH = {"matmul": 0.6, "link bandwidth": 0.4}
SHAPES = (
    Shape(2, 1, 1, 1, micro_batch=8, num_microbatches=1),
    Shape(1, 2, 1, 1, micro_batch=8, num_microbatches=1, reshard=True, gradient_sync="every"),
)


def model(flops: float, parameters: int) -> ModelProfile:
    layers = [layer_class("block", flops, parameters, saved=1e6, inputs=1e5, heads=4)]
    return profile(layers, [0] * 4, crossing=1e5)


MODELS = [model(flops, parameters) for flops, parameters in ((2e9, 100_000), (1e8, 4_000_000), (5e8, 1_000_000))]


def plan_of(made: ModelProfile, shape: Shape, name: str = "cpu") -> Plan:
    device = DEVICE.model_copy(update={"name": name})
    training = TrainingSpec(global_batch=16, seq_len=64, precision="fp32")
    plan = make_plan(made, cluster_of(device, 2), training, shape, [[LayerOption("none", shape.reshard)] * 4])
    return plan.model_copy(update={"prediction": prediction_of(estimate(plan, made))})


def true_s(plan: Plan, made: ModelProfile) -> float:
    return estimate(on_device(plan, turned(plan.cluster.device, TRUTH)), made).step_time_s


def step(
    number: int, seconds: float, between_s: float = 0.0, axis_s: float = 0.1, ranks: Sequence[float] = ()
) -> RunStep:
    return RunStep(
        step=number,
        loss=1.0,
        grad_norm=1.0,
        step_time_s=seconds,
        between_s=between_s,
        tokens_per_s=1.0,
        mfu=None,
        peak_memory_bytes=(1, 1),
        communication_s={"data_replicate": AxisSeconds(mean=axis_s, max=axis_s)},
        rank_communication_s=tuple(ranks),
    )


def write_run(path: Path, plan: Plan | None, seconds: Sequence[float]) -> Path:
    header = RunHeader(
        model="net",
        layout="DDP 2" if plan is None else shape_of(plan).label,
        num_ranks=2,
        device="cpu",
        torch_version="2",
        tokens_per_step=1,
        memory_kind="resident",
        plan=plan,
    )
    lines = [header, *(step(i + 1, value) for i, value in enumerate(seconds))]
    path.write_text("".join(line.model_dump_json() + "\n" for line in lines))
    return path


def profile_for(plan: Plan) -> ModelProfile:
    return next(made for made in MODELS if made.fingerprint == plan.model.fingerprint)


def test_runs_of_two_models_predict_a_third(tmp_path: Path) -> None:
    words = []
    for i, made in enumerate(MODELS[:2]):
        made.save(tmp_path / f"{i}.profile.json")
        for j, shape in enumerate(SHAPES):
            plan = plan_of(made, shape)
            source = plan.model.model_copy(update={"source": str(tmp_path / f"{i}.profile.json")})
            usual = [true_s(plan, made)] * 6
            run = write_run(tmp_path / f"{i}{j}.jsonl", plan.model_copy(update={"model": source}), [9.0, 9.0, *usual])
            words.append(str(run))

    assert run_plan("learn", *words, "-o", str(tmp_path / "device.toml"), "-q") == 0

    learned = load_device(str(tmp_path / "device.toml"))
    for shape in SHAPES:
        plan = plan_of(MODELS[2], shape)
        expected_s = true_s(plan, MODELS[2])
        before, after = (estimate(on_device(plan, d), MODELS[2]).step_time_s for d in (DEVICE, learned))
        assert abs(before / expected_s - 1) > 0.2
        assert after == pytest.approx(expected_s, rel=0.04)


def test_warm_up_and_outliers_are_left_out_and_told(tmp_path: Path) -> None:
    plan = plan_of(MODELS[0], SHAPES[0])
    run = write_run(tmp_path / "run.jsonl", plan, [9.0, 9.0, *[1.0, 1.01] * 4, 5.0])

    (found,) = learn_runs([run], profile_for)

    assert found.step.step_s == pytest.approx(1.005, abs=0.006)
    assert "1 of 9 steps are outliers, the longest 5.00 s" in found.notes[0]
    assert inliers((1.0, 1.0, 1.0)) == (1.0, 1.0, 1.0)


def test_runs_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    plan = plan_of(MODELS[0], SHAPES[0])
    for run, message in (
        (write_run(tmp_path / "old.jsonl", None, [1.0] * 9), "does not say by which plan it ran"),
        (write_run(tmp_path / "short.jsonl", plan, [1.0] * 4), "has 4 steps: 2 to warm up and at least 3 more"),
    ):
        with pytest.raises(ValueError, match=message):
            learn_runs([run], profile_for)
    both = [
        write_run(tmp_path / f"{name}.jsonl", plan_of(MODELS[0], SHAPES[0], name), [1.0] * 9) for name in ("a", "b")
    ]
    with pytest.raises(ValueError, match="the runs are of a, b"):
        learn_runs(both, profile_for)


def test_drift_is_told_and_noise_is_not() -> None:
    drifting = [step(i, 1.0 + 0.02 * i) for i in range(12)]
    steady = [step(i, 1.0 + 0.02 * (i % 2)) for i in range(12)]

    assert any("steps drift" in note for note in what_to_say(drifting))
    assert what_to_say(steady) == []


def test_the_rank_that_waits_least_is_the_slow_one() -> None:
    steps = [step(i, 1.0, ranks=(0.5, 0.52, 0.2, 0.5)) for i in range(5)]

    assert slow_rank(steps) == (2, pytest.approx(0.3))
    assert slow_rank([step(i, 1.0, ranks=(0.5, 0.52, 0.45)) for i in range(5)]) is None
    assert slow_rank([step(1, 1.0)]) is None


def test_a_run_that_is_slower_than_its_plan_allows_is_said_with_the_term() -> None:
    plan = plan_of(MODELS[0], SHAPES[0])
    assert plan.prediction is not None
    usual_s = plan.prediction.step_time_s
    predicted = {"data_replicate": 0.1}

    by_links = diagnosis(plan, [step(i, 2 * usual_s, axis_s=0.1 + usual_s) for i in range(5)], predicted)
    by_compute = diagnosis(plan, [step(i, 2 * usual_s) for i in range(5)], predicted)

    assert "2.00 times the expected" in by_links[0]
    assert "communication of data_replicate is under way" in by_links[0]
    assert "compute does" in by_compute[0]
    assert diagnosis(plan, [step(i, 1.05 * usual_s) for i in range(5)], predicted) == []
    assert "input takes long" in diagnosis(plan, [step(i, usual_s, between_s=usual_s) for i in range(5)], predicted)[0]


def test_a_plan_that_was_measured_allows_less_than_a_prediction() -> None:
    plan = plan_of(MODELS[0], SHAPES[0])
    assert plan.prediction is not None
    usual_s = plan.prediction.step_time_s
    measured = MeasuredPlan(
        step_time_s=usual_s,
        spread=0.005,
        num_steps=9,
        turns=3,
        peak_memory_bytes=(1, 1),
        memory_kind="resident",
        predicted_before_s=usual_s,
    )
    steps = [step(i, 1.06 * usual_s) for i in range(5)]

    assert diagnosis(plan, steps, {}) == []
    assert "1.06 times" in diagnosis(plan.model_copy(update={"measured": measured}), steps, {})[0]


def test_the_command_says_which_file_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.jsonl").write_text(json.dumps({"kind": "other"}) + "\n{}\n")

    assert run_plan("learn", str(tmp_path / "no.jsonl"), "-o", str(tmp_path / "device.toml")) == 2

    assert "no.jsonl line 1 is not of a run" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "device.toml").exists()
