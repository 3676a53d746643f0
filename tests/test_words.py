"""What people read: one word for a layout in every output, shares said so that they can be written."""

import json
from pathlib import Path

import pytest

from meshwright.executor.api import load as load_planned
from meshwright.executor.reporting.report import hosts_in_order
from meshwright.planner.answers.explain import reason
from meshwright.planner.answers.sweep import kind_in_words
from meshwright.planner.cost.estimate import estimate
from meshwright.profiler.machine.cluster import cluster_of, load_device
from support.cli import run_plan, save_profile, small_profile, some_plan

JOB = ("--gpus", "4", "--device", "h100-80gb", "--global-batch", "16", "--precision", "fp32")
KEPT = "ZeRO-1 over 4"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a plan whose parameters stay gathered, by everything that names its layout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    save_profile(tmp_path)
    said = []
    for words in (
        ("profile.json", *JOB, "--setup", "dp=4 zero=1", "-v"),
        ("show", "plan.json"),
        ("explain", "plan.json", "--model", "profile.json", "--why-not", "dp=4 zero=1", "--time-limit", "1"),
        ("explain", "plan.json", "--model", "profile.json", "--json", "--time-limit", "1"),
        ("report", "plan.json", "--model", "profile.json", "-o", "plan.html"),
    ):
        assert run_plan(*words) == 0, words
        said.append(f"{words}: {' '.join(capsys.readouterr().out.split())}")
    said.append((tmp_path / "plan.html").read_text())
    said.append(str(load_planned("plan.json")))
    return "\n".join(said)


@pytest.mark.slow
def test_a_layout_is_called_by_one_word_everywhere(kept: str) -> None:
    plan_lines = kept.splitlines()

    assert [line[:60] for line in plan_lines if line.startswith("('") and KEPT not in line] == []
    assert kept.count(KEPT) > 10


def test_a_sweep_calls_kind_and_layout_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(tmp_path)
    words = [*JOB, "--pin", "zero=1", "--pin", "data_shard=4", "-o", "s.json", "-q"]

    assert run_plan("sweep", "profile.json", *words) == 0

    (point,) = json.loads((tmp_path / "s.json").read_text())["points"]
    assert (point["layout"], point["kind"]) == (KEPT, "ZeRO-1")


def test_the_kind_leaves_degrees_out() -> None:
    kept = some_plan(shard=4, tensor=2, pipeline=2)

    assert kept.label == "ZeRO-1 over 4 + TP 2 + PP 2 (GPipe)"
    assert kind_in_words(kept) == "ZeRO-1 + TP + PP"


def test_hosts_of_several_kinds_are_started_in_the_order_that_is_said() -> None:
    plan = some_plan(pipeline=2, shard=8)
    assert hosts_in_order(plan) == ""

    hosts = tuple(cluster_of(load_device(name), 8, 8).hosts[0] for name in ("a100-80gb", "h100-80gb"))
    unequal = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"hosts": hosts})})

    assert hosts_in_order(unequal) == (
        "node ranks in this order of hosts: 1 with 8 x a100-80gb, then 1 with 8 x h100-80gb"
    )


def test_a_plan_of_one_device_has_no_replicas_to_speak_of() -> None:
    plan = some_plan()

    assert reason(plan, estimate(plan, small_profile())) == "everything fits on the one GPU, and nothing is recomputed"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("--memory-risk", "5"), "5 is no share from 0.001 to 0.999; write, for example, 0.05, which is 5%"),
        (("--memory-risk", "5%"), "5% is no share"),
        (("--memory-margin", "nan"), "nan is no share from 0 to 0.9; write, for example, 0.1, which is 10%"),
        (("--price-per-hour", "-1"), "-1 is no number of at least 0; write, for example, 2.50"),
        (("--time-limit", "soon"), "soon is no number of at least 0.1; write, for example, 60"),
    ],
)
def test_a_number_that_is_out_of_range_is_answered_by_what_to_write(
    words: tuple[str, str],
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    save_profile(tmp_path)

    assert run_plan("profile.json", *JOB, *words) == 2

    assert answer in " ".join(capsys.readouterr().err.replace("│", " ").split())
