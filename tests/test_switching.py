"""What going on under another plan costs, and when it pays: plan replan, plan report --run, and what a run measures."""

import json
from pathlib import Path

import pytest

from meshwright.executor import parallelize
from meshwright.executor.measuring.replanning import replanning
from meshwright.executor.reporting.switching import Switching, pays_after, read_rate, switching, whether_it_pays
from meshwright.executor.run_document import AxisSeconds, RunRestart, RunStep, load_restarts, load_run
from meshwright.executor.state.checkpoint_folder import Progress
from meshwright.planner.answers.search import SearchResult, search
from meshwright.planner.cost.refit import turned_hosts
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from support.cli import run_plan, save_profile, some_plan
from support.runs import header_of, write_lines
from support.synthetic import layer_class, profile
from support.tied_net import TiedNet, adamw, loss, plan_of, samples, tied_profile

PROFILE = profile(
    [layer_class("block", 1e8, 4_000_000, saved=1e6, inputs=1e5, heads=4, transient=1e5)], [0] * 2, crossing=1e5
)
CLUSTER = cluster_of(load_device("cpu"), 2)
COST = Switching(load_s=40.0, start_s=20.0, lost_steps=10, step_s=2.0, source="measured")
RESTART = RunRestart(steps=50, num_ranks=8, start_s=31.0, load_s=12.5, loaded_bytes=10**9)


def step(number: int, seconds: float, axis_s: dict[str, float]) -> RunStep:
    return RunStep(
        step=number,
        loss=1.0,
        grad_norm=1.0,
        step_time_s=seconds,
        between_s=0.0,
        tokens_per_s=1.0,
        mfu=None,
        peak_memory_bytes=(1,) * 8,
        communication_s={axis: AxisSeconds(mean=value, max=value) for axis, value in axis_s.items()},
    )


def write_run(
    path: Path, plan: Plan, step_s: float, last: int, axis_s: dict[str, float], restart: RunRestart | None
) -> Path:
    """The last six steps of a run, resumed before them or not."""
    steps = [step(last - 5 + i, step_s, axis_s) for i in range(6)]
    return write_lines(path, header_of(plan), *([] if restart is None else [restart]), *steps)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run on 8 GPUs that was saved after 120 steps."""
    saved = tmp_path / "run" / "step-00000120"
    saved.mkdir(parents=True)
    some_plan(shard=4, tensor=2, micro_batches=6).save(saved / "plan.json")
    (saved / "state.json").write_text(Progress(steps=120).model_dump_json())
    (saved / "__0_0.distcp").write_bytes(bytes(30_000_000))
    return tmp_path


def test_a_restart_is_start_and_load_and_the_steps_behind_the_checkpoint() -> None:
    assert COST.seconds == 40 + 20 + 10 * 2
    assert "10 steps since the checkpoint again, 20.0 s" in str(COST)


def test_with_fewer_devices_switching_back_counts_too() -> None:
    before, after = some_plan(shard=8), some_plan(shard=4)
    assert after.prediction is None
    step_s = 0.5
    priced = after.model_copy(update={"prediction": prediction(after, step_s)})

    told = whether_it_pays(before, priced, COST)

    assert "away for more than 140 s (280 steps of 500 ms)" in told  # 80 s now, 60 s when they are back


def prediction(plan: Plan, step_s: float) -> object:
    from meshwright.planner.plan.document import Prediction

    return Prediction(step_time_s=step_s, tokens_per_s=1.0, mfu=0.1, stage_memory_bytes=(1.0,), budget_bytes=2.0)


def test_a_faster_plan_pays_after_the_steps_that_make_up_for_the_restart() -> None:
    assert pays_after(2.0, 1.5, COST, measured=True).startswith("it pays after 160 steps")
    assert pays_after(2.0, 2.0, COST, measured=True).startswith("it does not pay")


def test_a_run_that_is_slower_than_predicted_makes_no_other_plan_faster() -> None:
    plan = some_plan(shard=8)
    priced = plan.model_copy(update={"prediction": prediction(plan, 0.2)})

    assert whether_it_pays(priced, priced, COST).startswith("it does not pay: 2.00 s a step beside 2.00 s measured")


def test_reading_a_checkpoint_is_timed(folder: Path) -> None:
    size, rate = read_rate(folder / "run")

    assert size > 30_000_000
    assert 1e6 < rate < 1e12


def test_a_run_that_was_resumed_says_what_a_restart_takes_and_how_many_steps_are_lost(folder: Path) -> None:
    run = write_run(folder / "run.jsonl", some_plan(shard=8), 0.25, 150, {}, RESTART)

    found = switching(folder / "run", 120, run)

    assert (found.load_s, found.start_s, found.lost_steps, found.step_s) == (12.5, 31.0, 30, 0.25)
    assert "measured by the run on 8 ranks" in str(found)
    assert switching(folder / "run", 120, None).lost_steps == 0


@pytest.mark.slow
def test_replan_says_what_switching_costs_and_when_it_pays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder / "run.jsonl", some_plan(shard=8), 0.25, 150, {}, RESTART)
    words = ["replan", "--checkpoint", str(folder / "run"), "--gpus", "6", "--model", str(save_profile(folder))]

    assert run_plan(*words, "--run", str(folder / "run.jsonl"), "-o", str(folder / "new.json")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert run_plan(*words, "-o", str(folder / "new.json"), "--json") == 0
    told = json.loads(capsys.readouterr().out)["switching"]

    assert "switching costs about 51.0 s: 31.0 s to start, 12.5 s to read the checkpoint" in shown
    assert "if the others are away for more than" in shown
    assert told["load_s"] > 0
    assert "timed here" in told["source"]
    assert told["seconds"] == pytest.approx(told["load_s"] + told["start_s"])


def test_a_run_file_that_is_none_is_refused_and_nothing_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replan", "--checkpoint", str(folder / "run"), "--gpus", "6", "--model", str(save_profile(folder))]

    assert run_plan(*words, "--run", str(folder / "none.jsonl"), "-o", str(folder / "new.json")) == 2

    assert "no such run" in capsys.readouterr().err
    assert not (folder / "new.json").exists()


@pytest.fixture(scope="module")
def chosen() -> SearchResult:
    training = TrainingSpec(global_batch=16, seq_len=64, precision="fp32")
    return search(PROFILE, CLUSTER, training, time_limit_s=5.0)


def slowed(chosen: SearchResult, truth: dict[str, float]) -> tuple[float, dict[str, float]]:
    """(seconds of the plan's step, of its axes' communication) where constants are so many times what was announced."""
    from meshwright.planner.cost.axis_seconds import axis_seconds
    from meshwright.planner.cost.estimate import estimate

    moved = chosen.plan.model_copy(update={"cluster": turned_hosts(chosen.plan.cluster, truth)})
    axes = {str(axis): seconds for axis, seconds in axis_seconds(moved, PROFILE).items()}
    return estimate(moved, PROFILE).step_time_s, axes


@pytest.mark.slow
def test_a_run_whose_links_became_slow_is_told_of_a_layout_that_needs_them_less(
    tmp_path: Path, chosen: SearchResult
) -> None:
    step_s, axis_s = slowed(chosen, {"link bandwidth": 0.05})
    assert axis_s

    unknown = replanning(chosen.plan, PROFILE, write_run(tmp_path / "a.jsonl", chosen.plan, step_s, 60, axis_s, None))
    known = replanning(chosen.plan, PROFILE, write_run(tmp_path / "b.jsonl", chosen.plan, step_s, 60, axis_s, RESTART))

    tells = [
        step(60 + i, step_s, axis_s).model_copy(update={"rank_compute_s": (step_s / 2,) * CLUSTER.num_devices})
        for i in range(6)
    ]
    told = replanning(chosen.plan, PROFILE, write_lines(tmp_path / "c.jsonl", header_of(chosen.plan), *tells))

    assert " and compute as this run has them" in told[-1]
    assert "it would bring" in unknown[-1]
    assert "was not resumed" in unknown[-1]
    assert "it pays after" in known[-1]
    assert "switching costs about" in known[-1]


def test_a_run_whose_compute_became_slow_is_told_that_no_layout_helps(tmp_path: Path, chosen: SearchResult) -> None:
    step_s, axis_s = slowed(chosen, {"matmul": 0.5, "memory traffic": 0.5, "optimizer": 0.5})

    told = replanning(chosen.plan, PROFILE, write_run(tmp_path / "a.jsonl", chosen.plan, step_s, 60, axis_s, None))

    assert told[1:] == [
        "replanning would not pay: with compute as this run has them no layout that was weighed beside the plan is "
        "more than 2% faster"
    ]


def test_a_resumed_run_measures_its_restart(tmp_path: Path) -> None:
    plan, run = plan_of(tied_profile()), tmp_path / "run.jsonl"
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, telemetry=run)
    share = next(iter(trainer.loader(samples)))
    trainer.step(share)
    trainer.save(tmp_path / "run")
    trainer.close()
    assert load_restarts(run) == []

    again = parallelize(TiedNet, plan, adamw, loss=loss, telemetry=run)
    again.resume(tmp_path / "run")
    again.step(share)
    again.close()

    (restart,) = load_restarts(run)
    assert (restart.steps, restart.num_ranks) == (1, 1)
    assert 0 < restart.load_s < 60
    assert restart.loaded_bytes > 1000
    assert restart.start_s is None or restart.start_s > 0
    assert [step.step for step in load_run(run)[1]] == [1, 2]
