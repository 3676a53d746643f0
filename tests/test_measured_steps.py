"""`plan calibrate --from`: measured steps move the device of their plans; broken lists are refused by line."""

import json
from pathlib import Path

import pytest

from meshwright.executor.measuring.measured_steps import load_measured_steps
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.refit import on_device, turned
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import load_device
from support.cli import run_plan
from support.synthetic import cluster, device, layer_class, profile

MODEL = profile([layer_class("block", 2e11, 4_000_000, 2e6, 1e6)], [0] * 4)
DEVICE = device(matmul_efficiency=0.6, sources={"matmul_efficiency": "assumption: large matmuls"})
SHAPES = (
    Shape(8, 1, 1, 1, micro_batch=2, num_microbatches=1),
    Shape(1, 8, 1, 1, micro_batch=2, num_microbatches=1, reshard=True, gradient_sync="every"),
    Shape(4, 1, 1, 2, micro_batch=1, num_microbatches=4, schedule="1f1b"),
)


def write_list(folder: Path) -> Path:
    """Three plans, and steps as long as they take where matmuls are slower by 0.7."""
    (folder / "profile.json").write_text(MODEL.model_dump_json())
    lines = []
    for number, shape in enumerate(SHAPES):
        options = [[LayerOption("none", shape.reshard)] * (4 // shape.pipeline)] * shape.pipeline
        plan = make_plan(MODEL, cluster(on=DEVICE), TrainingSpec(global_batch=16, seq_len=64), shape, options)
        plan.save(folder / f"{number}.json")
        step_s = estimate(on_device(plan, turned(DEVICE, {"matmul": 0.7})), MODEL).step_time_s
        lines.append({"plan": f"{number}.json", "step_time_s": step_s, "model": str(folder / "profile.json")})
    path = folder / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_a_list_of_steps_makes_a_device_that_predicts_them(tmp_path: Path) -> None:
    steps, found = write_list(tmp_path), tmp_path / "mine.toml"

    assert run_plan("calibrate", "--from", str(steps), "-o", str(found)) == 0

    measured = load_device(str(found))
    assert measured.matmul_efficiency == pytest.approx(0.7 * 0.6, rel=0.1)
    assert "fitted to 3 measured steps" in measured.sources["matmul_efficiency"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no line"),
        ("{", "line 1 is not a measured step"),
        ('{"plan": "0.json", "step_time_s": -1}', "line 1 is not a measured step"),
        ('{"plan": "0.json"}', "needs either step_time_s or run"),
        ('{"plan": "none.json", "step_time_s": 1}', "no such plan"),
        ('{"plan": "0.json", "run": "none.jsonl"}', "no such run"),
    ],
)
def test_a_broken_list_is_refused_by_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = write_list(tmp_path)
    path.write_text(text)

    with pytest.raises(ValueError, match=message):
        load_measured_steps(path, lambda plan, source: MODEL)


def test_plans_of_two_devices_are_refused(tmp_path: Path) -> None:
    path = write_list(tmp_path)
    plan = json.loads((tmp_path / "1.json").read_text())
    plan["cluster"]["hosts"][0]["device"]["name"] = "square"
    (tmp_path / "1.json").write_text(json.dumps(plan))

    with pytest.raises(ValueError, match="round, square"):
        load_measured_steps(path, lambda plan, source: MODEL)
