"""The `plan` command: what it prints, writes and refuses, with its exit codes."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from pydantic import BaseModel

import meshwright.executor.cli as cli
import meshwright.executor.commands.inputs as inputs
from meshwright.executor.cli import route
from meshwright.executor.commands.options import MachineOptions, StackOptions
from meshwright.executor.measuring.measurement import Measurement
from meshwright.executor.reporting.report import collapse, comparison_rows, gpus_of, joined_notes
from meshwright.planner.answers import search as search_module
from meshwright.planner.answers.verdict import FITS
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import load_plan
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.cli import run_plan, save_profile, small_profile, some_plan

DEGREES = {"data_replicate", "data_shard", "tensor", "context", "expert", "pipeline", "virtual_stages"}

QUICK = ("--gpus", "2", "--pin", "fsdp=2")
"""Words of a search that ends at once, where any plan will do."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(inputs, "local_gpus", list)
    yield
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return save_profile(tmp_path).name


@pytest.mark.parametrize(
    ("words", "command", "rest"),
    [
        (["model.py", "--gpus", "8"], "", ["model.py", "--gpus", "8"]),
        (["--gpus", "8", "model.py"], "", ["--gpus", "8", "model.py"]),
        (["compare", "model.py", "--gpus", "8"], "compare", ["model.py", "--gpus", "8"]),
        (["--gpus", "8", "compare", "model.py"], "compare", ["--gpus", "8", "model.py"]),
        (["-o", "verify", "model.py"], "", ["-o", "verify", "model.py"]),
        (["compare", "--json", "model.py"], "compare", ["--json", "model.py"]),
        (["./compare", "--gpus", "2"], "", ["./compare", "--gpus", "2"]),
        (["devices"], "devices", []),
        ([], "", []),
    ],
)
def test_the_first_positional_word_decides(words: list[str], command: str, rest: list[str]) -> None:
    assert route(words) == (command, rest)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-gpus", "8"], "-gpus: write it with two dashes, --gpus"),
        (["-gpus=8"], "-gpus=8: write it with two dashes, --gpus=8"),
        (["--gpus", "8", "-json"], "-json: write it with two dashes, --json"),
        (["--gpus", "8", "-g", "4"], "-g is '8' and '4': give it once"),
        (["--gpus=8", "-q", "--gpus", "4"], "--gpus is '8' and '4': give it once"),
        (["-g8", "-qg", "4"], "-g is '8' and '4': give it once"),
    ],
)
def test_flags_that_would_be_read_as_others_or_passed_over_are_told(
    saved: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(saved, *words) == 2

    assert told in capsys.readouterr().err


def test_a_file_called_compare_is_a_model_where_nothing_else_is_named(tmp_path: Path) -> None:
    save_profile(tmp_path, "compare")

    assert route(["compare", "--gpus", "8"])[0] == ""
    assert route(["compare", "model.py", "--gpus", "8"])[0] == "compare"
    assert route(["compare", "--help"])[0] == "compare"
    assert run_plan("compare", *QUICK, "--quiet") == 0
    assert run_plan("./compare", *QUICK, "--quiet") == 0
    assert load_plan(Path("plan.json")).degrees.num_devices == 2


def test_planning_says_its_assumptions_and_writes_the_plan(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--gpus", "8", saved) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert "h100-80gb: no GPU here; --device changes it" in said
    assert "global batch 64: 8 samples per GPU; --global-batch changes it" in said
    assert "64 tokens per sample: the model's own; --seq-len changes it" in said
    for part in ("tokens/s", "MFU", "memory stage 0", "instead", "proof", "wrote plan.json", "run torchrun"):
        assert part in said


def test_verbosely_everything_is_told(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--gpus", "8", saved, "-v") == 0

    out = capsys.readouterr().out
    for part in ("step time", "tokens/s", "MFU", "Memory per GPU", "Layer -> GPU", "What people usually try", "proof"):
        assert part in out
    assert "wrote" in out
    assert "plan.json" in out
    plan = load_plan(Path("plan.json"))
    assert plan.certificate is not None
    assert plan.prediction is not None
    assert plan.training.global_batch == 64


@pytest.mark.parametrize("columns", slow.but([80, 100, 120, 200], [100, 120, 200]))
def test_nothing_is_wider_than_the_terminal(
    saved: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in ([saved], ["compare", saved, "--setup", "tp=4 pp=2"]):
        assert run_plan(*words, "--gpus", "16", "--gpus-per-node", "4") == 0
    run_plan("devices")

    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= min(columns, 120)
    assert "\x1b" not in out


def test_json_is_one_document_with_the_promised_keys(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(saved, "--gpus", "8", "--json") == 0

    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"plan", "not_run", "estimate", "certificate", "alternatives", "fewer_gpus", "assumed"}
    assert any("--seq-len changes it" in each for each in document["assumed"])
    degrees = document["plan"]["degrees"]
    assert set(degrees) == DEGREES
    product = 1
    for name in DEGREES - {"expert", "virtual_stages"}:
        product *= degrees[name]
    assert product == 8
    assert {"step_time_s", "tokens_per_s", "mfu", "memory", "collectives"} <= set(document["estimate"])
    assert {"step_s", "fastest_s", "bound", "gap", "status", "solver", "search_seconds", "shapes"} <= set(
        document["certificate"]
    )
    assert set(document["certificate"]["shapes"]) == {"total", "rejected", "pruned", "solved"}
    assert all({"label", "verdict", "ratio", "trade", "estimate"} <= set(c) for c in document["alternatives"])
    assert not Path("plan.json").exists()


def test_json_stays_one_document_when_the_model_file_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loud.py").write_text(
        "print('hello')\nimport torch\n"
        "def model():\n    print('building')\n    return torch.nn.Linear(8, 8)\n"
        "def batch(size):\n    return (torch.randn(size, 8), torch.randn(size, 8))\n"
        "def loss(output, batch):\n    return (output - batch[-1]).square().mean()\n"
    )

    assert run_plan("loud.py", "--gpus", "2", "--json", "-o", "out.json") == 0

    captured = capsys.readouterr()
    assert set(json.loads(captured.out)) >= {"plan", "estimate"}
    assert "hello" in captured.err
    assert load_plan(Path("out.json")).degrees.num_devices == 2


BAD_INPUT = [
    (["--gpus", "0"], "--gpus 0: give a whole number of at least 1"),
    (["--gpus", "-1"], "--gpus -1: give a whole number"),
    (["--gpus", "x"], "--gpus x: give a whole number"),
    (["--gpus", "10000000000"], "10,000,000,000 devices; a plan is for at most 10,000,000"),
    ([], "no GPU here, so say how many"),
    (["--gpus", "8", "--device", "h100-8gb"], "unknown device 'h100-8gb': did you mean h100-80gb"),
    (["--gpus", "8", "--device", "none.toml"], "no such device file: none.toml; `plan devices` lists the presets"),
    (["--gpus", "8", "--device", "@"], "unknown device '@': `plan devices` lists all"),
    (["--gpus", "8", "--gpus-per-node", "3"], "8 GPUs do not fill hosts of 3"),
    (["--gpus", "8", "--cluster", "none.toml"], "no such file: none.toml"),
    (["--cluster", "none.toml", "--device", "cpu"], "leave out --device"),
    (["--gpus", "8", "--seq-len", "7"], "holds 64 tokens per sample and no other length"),
    (["--gpus", "8", "--pin", "colour=red"], "--pin 'colour=red': cannot read"),
    (["--gpus", "8", "--pin", "tensor=x"], "tensor=x: give a whole number"),
    (["--gpus", "8", "-o", "nowhere/plan.json"], "nowhere does not exist"),
    (["--gpus", "8", "-o", "notes.json"], "notes.json exists and is no meshwright-plan"),
    (["--gpus", "8", "-o", "."], "is a folder"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD_INPUT, ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_one_sentence_and_exit_code_2(
    saved: str, words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.json").write_text('{"mine": true}')
    before = sorted(p.name for p in tmp_path.iterdir())

    assert run_plan(saved, *words) == 2

    captured = capsys.readouterr()
    assert sentence in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["modle.py", "--gpus", "8"], "no such file: modle.py; did you mean model.py?"),
        (["modle.py"], "no such file: modle.py; did you mean model.py?"),
        (["compre", "profile.json"], "no such command or file: compre; did you mean plan compare?"),
        (["glossary", "gatherd"], "no word 'gatherd' in the glossary; did you mean gathered"),
        (["nothing", "--gpus", "8"], "no such file: nothing"),
        (["broken.json", "--gpus", "8"], "broken.json is not JSON"),
        (["old.json", "--gpus", "8"], "old.json is not a profile this version reads"),
        (["plan.json", "--gpus", "8"], "plan.json is a plan, not a model"),
        (["explain", "sweep.json", "--gpus", "8"], "sweep.json is a sweep, not a model: MODEL is a model.py"),
        (["verify", "none.json"], "no such plan: none.json"),
        (["show", "profil.jsn"], "no such plan: profil.jsn; did you mean profile.json?"),
        (["plann.py", "--gpus", "8"], "no such file: plann.py; MODEL is a model.py"),
        (["explain", "plan.json", "tp 2"], "'tp 2' is a word more: ask about a layout with --why-not"),
        (["explain", "plam.json"], "no such file: plam.json; did you mean plan.json?"),
        (
            ["explain", "plan.json", "--gpus", "16", "--pin", "tensor=2"],
            "leave out --gpus and --pin, or give the model",
        ),
        (["explain", "plan.json", "-b", "12", "--optimizer", "sgd"], "leave out --global-batch and --optimizer"),
        (["explain", "profile.json", "--gpus", "8", "--model", "x.py"], "profile.json is a model: leave it out"),
        (["compare", "profil.json", "--setup", "ddp"], "no such file: profil.json; did you mean profile.json?"),
        (["sweep", "modle.py"], "no such file: modle.py; did you mean model.py?"),
        (["tune", "modle.py"], "no such file: modle.py; did you mean model.py?"),
        (["newer.json", "--gpus", "8"], "newer.json is not a profile this version reads"),
        (["show", "broken.json"], "broken.json is not JSON"),
        (["show", "profile.json"], "is not a Meshwright plan"),
        (["show", "future.json"], "schema_version 99"),
        (["show", "bent.json"], "is not a valid plan"),
        (["compare", "profile.json", "--gpus", "8", "--setup", "tp=x"], "tensor=x: give a whole number"),
        (["compare", "profile.json", "--gpus", "8", "--measure"], "only its profile: give the model itself"),
        (["compare", "profile.json", "--gpus", "8", "--steps", "3"], "--steps 3 is of measured runs: add --measure"),
        (["profile", "profile.json", "-o", "other.json"], "is a profile already"),
        (["verify", "plan.json"], "no such file: synthetic"),
    ],
)
def test_files_that_are_not_what_they_should_be(
    tmp_path: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(tmp_path)
    plan = some_plan(shard=8)
    plan.save(tmp_path / "plan.json")
    document = json.loads(plan.model_dump_json())
    (tmp_path / "future.json").write_text(json.dumps(document | {"schema_version": 99}))
    (tmp_path / "bent.json").write_text(json.dumps(document | {"micro_batch": 3}))
    (tmp_path / "old.json").write_text('{"kind": "meshwright-profile", "schema_version": 0}')
    profile = json.loads((tmp_path / "profile.json").read_text())
    (tmp_path / "newer.json").write_text(json.dumps(profile | {"schema_version": 99}))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "sweep.json").write_text('{"kind": "meshwright-sweep", "points": []}')
    (tmp_path / "model.py").write_text("")

    assert run_plan(*words) == 2

    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("flag", ["--global-batch", "--micro-batch", "--seq-len", "--gpus-per-node"])
@pytest.mark.parametrize("text", ["2.5", "0", "-8", "many"])
def test_what_must_be_whole_is_refused_by_name(
    saved: str, flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(saved, "--gpus", "8", f"{flag}={text}") == 2

    captured = capsys.readouterr()
    said = " ".join(captured.err.replace("│", " ").split())
    assert flag in said
    assert f"{text} is no whole number of at least 1" in said
    assert captured.out == ""


def test_an_unknown_option_is_refused(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(saved, "--gpu", "8") == 2
    assert "--gpu" in capsys.readouterr().err


def test_does_not_fit_is_exit_code_3_and_says_what_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(tmp_path, "huge.json", scale=40)

    assert run_plan("huge.json", "--gpus", "2", "--device", "rtx-4090") == 3

    err = capsys.readouterr().err
    assert err.startswith("does not fit: ")
    assert "is over by" in err
    assert "GPUs of this kind" in err
    assert not Path("plan.json").exists()


def test_a_solver_without_an_answer_is_exit_code_2(
    saved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_answer(*_: Any, **__: Any) -> None:
        raise search_module.SolverError("no plan found within 0.1 s; give it longer with --time-limit")

    monkeypatch.setattr(search_module, "search", no_answer)

    assert run_plan(saved, "--gpus", "8") == 2
    assert "--time-limit" in capsys.readouterr().err
    assert not Path("plan.json").exists()


class _Strict(BaseModel):
    count: int


@pytest.mark.parametrize("mistake", [lambda: {}["x"], lambda: _Strict.model_validate({}), lambda: 1 / 0])
def test_a_mistake_of_ours_is_not_called_bad_input(saved: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "search", lambda *_, **__: mistake())

    with pytest.raises((KeyError, ZeroDivisionError, ValueError)):
        cli.main([saved, "--gpus", "8"])


def test_an_old_plan_is_replaced(saved: str) -> None:
    some_plan(shard=8).save(Path("plan.json"))

    assert run_plan(saved, *QUICK, "--quiet") == 0
    assert load_plan(Path("plan.json")).degrees.num_devices == 2


def test_pins_are_kept(saved: str) -> None:
    assert run_plan(saved, "--gpus", "8", "--quiet", "--pin", "tensor=2", "--pin", "pp=2 recompute=full") == 0

    plan = load_plan(Path("plan.json"))
    assert (plan.degrees.tensor, plan.degrees.pipeline) == (2, 2)


@pytest.fixture
def of_gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The saved profile of the zoo's GPT; its parts are told."""
    monkeypatch.chdir(tmp_path)
    model = str(Path(__file__).parents[1] / "benchmarks" / "models" / "gpt.py")
    assert run_plan("profile", model, "-o", "gpt.json") == 0
    assert "norm1, attention, norm2 of Block, for recompute=parts:" in " ".join(capsys.readouterr().out.split())
    return "gpt.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [("--recompute", "parts:attention"), ("--pin", "recompute=parts:attention")],
)
def test_parts_of_layers_are_recomputed_as_they_are_said(of_gpt: str, said: tuple[str, str]) -> None:
    assert run_plan(of_gpt, "--gpus", "2", "--quiet", *said) == 0

    plan = load_plan(Path("plan.json"))
    blocks = [layer.recompute for layer in plan.layers if layer.layer_class == "Block"]
    assert set(blocks) == {"parts:attention"}


@pytest.mark.slow
def test_a_part_that_the_model_has_not_is_named_with_those_it_has(
    of_gpt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(of_gpt, "--gpus", "2", "--recompute", "parts:attn") == 2

    told = " ".join(capsys.readouterr().err.split())
    assert "has a part attn that can be run again by itself; there are norm1, attention, norm2" in told


def test_a_cluster_file_says_how_many_gpus(saved: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[[hosts]]\ncount = 2\ndevice = "a100-80gb"\ngpus = 4\n')

    assert run_plan(saved, "--cluster", "cluster.toml", "--pin", "fsdp=8", "--quiet") == 0
    assert load_plan(Path("plan.json")).cluster.num_hosts == 2
    assert run_plan(saved, "--cluster", "cluster.toml", "--gpus", "4") == 2


@pytest.mark.parametrize(
    ("here", "words", "device", "assumed"),
    [
        ([("NVIDIA H200", 143771.0)] * 8, [], "h200", "found 8 x NVIDIA H200 here"),
        ([("NVIDIA H200", 143771.0)], ["--gpus", "8"], "h200", "the others taken as alike"),
        ([("NVIDIA L4", 23034.0)], ["--gpus", "8"], "h100-80gb", "no preset for the NVIDIA L4 here"),
    ],
)
def test_gpus_that_are_here_are_used(
    saved: str,
    here: list[tuple[str, float]],
    words: list[str],
    device: str,
    assumed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(inputs, "local_gpus", lambda: here)

    assert run_plan(saved, *words, "--pin", "fsdp=8", "--quiet") == 0
    assert assumed in " ".join(capsys.readouterr().out.split())
    assert load_plan(Path("plan.json")).cluster.device.name == device


def test_the_cpu_preset_trains_in_fp32(saved: str) -> None:
    assert run_plan(saved, "--gpus", "2", "--device", "cpu", "--quiet", "--global-batch", "2") in (0, 3)
    machine = inputs.read_cluster(MachineOptions(gpus="2", device="cpu"))
    training, _ = inputs.read_training(small_profile(), machine, 2, StackOptions())
    assert training.precision == "fp32"


def test_memory_is_left_free_for_a_risk_where_it_is_known() -> None:
    machine, profile = inputs.read_cluster(MachineOptions(gpus="8", device="h100-80gb")), small_profile()

    def margin(of: ModelProfile, **said: float) -> float:
        return inputs.read_training(of, machine, 8, StackOptions(**said))[0].memory_margin  # type: ignore[arg-type]

    attending = profile.model_copy(update={"attention_modules": ("0",), "seq_len": 64})
    assert margin(attending, memory_risk=0.01) > margin(attending) > margin(attending, memory_risk=0.2)
    assert margin(profile.model_copy(update={"seq_len": None})) == margin(attending)
    assert margin(attending, memory_risk=0.05) == margin(attending)
    _, assumed = inputs.read_training(profile.model_copy(update={"seq_len": None}), machine, 8, StackOptions())
    assert any("so the risk to run out is not known; --memory-margin changes it" in each for each in assumed)
    assert margin(attending, memory_margin=0.3) == 0.3
    with pytest.raises(ValueError, match="both say how much memory is left free"):
        margin(attending, memory_margin=0.1, memory_risk=0.1)
    with pytest.raises(ValueError, match="the risk is not known; give --memory-margin"):
        margin(profile.model_copy(update={"seq_len": None}), memory_risk=0.1)


def test_show_prints_a_saved_plan_again(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_plan(saved, *QUICK, "--quiet")
    capsys.readouterr()

    assert run_plan("show", "plan.json") == 0
    short = capsys.readouterr().out
    assert run_plan("show", "plan.json", "--model", saved) == 0
    full = capsys.readouterr().out

    assert "Layer -> GPU" in short
    assert "proof" in short
    assert "optim" in full


def test_compare_sets_the_plan_beside_set_ups(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", saved, "--gpus", "8", "--setup", "ddp", "--setup", "tp=4 pp=2", "--json"]
    assert run_plan(*words) == 0

    rows = json.loads(capsys.readouterr().out)["setups"]
    assert [row["label"] for row in rows] == ["planned", "ddp", "tp=4 pp=2"]
    planned = rows[0]["estimate"]["step_time_s"]
    for row in rows[1:]:
        assert row["estimate"] is None or planned <= 1.01 * row["estimate"]["step_time_s"]
        assert row["verdict"]


def test_a_set_up_that_no_layout_agrees_with_is_a_row_beside_the_others(
    saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan("compare", saved, "--gpus", "8", "--setup", "tp=3", "--setup", "ddp", "--json") == 0

    planned, illegal, ddp = json.loads(capsys.readouterr().out)["setups"]
    assert planned["estimate"]["step_time_s"] > 0
    assert illegal["verdict"] == "not legal: tensor = 3 does not divide 8 GPUs, as 2 or 4 would"
    assert ddp["estimate"]["step_time_s"] > 0


def test_frameworks_and_saved_plans_are_set_ups_too(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(saved, "--gpus", "8", "--quiet") == 0
    capsys.readouterr()
    asked = ["--setup", "megatron", "--setup", "plan.json", "--setup", "DeepSpeed-ZeRO3"]
    assert run_plan("compare", saved, "--gpus", "8", *asked, "--json") == 0

    rows = json.loads(capsys.readouterr().out)["setups"]
    assert [row["label"] for row in rows] == ["planned", "megatron", "plan.json", "deepspeed-zero3"]
    assert rows[2]["verdict"] == "as fast as the plan"
    assert rows[3]["degrees"]["data_shard"] == 8


def test_all_baselines_come_once_each(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("compare", saved, "--gpus", "8", "--setup", "torchtitan", "--all-baselines", "--json") == 0

    labels = [row["label"] for row in json.loads(capsys.readouterr().out)["setups"]]
    assert {"planned", "torchtitan", "megatron", "deepspeed-zero1", "DDP", "FSDP", "Megatron 3D"} <= set(labels)
    assert len(labels) == len(set(labels))


def test_where_each_set_up_loses_is_a_table_and_a_picture(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", saved, "--gpus", "8", "--setup", "ddp", "--setup", "tp=4 pp=2", "--setup", "tp=8 mb=64"]
    assert run_plan(*words, "-o", "compare.html") == 0

    out = capsys.readouterr().out
    page = Path("compare.html").read_text()
    assert "Where the step goes, ms" in out
    for part in ("compute", "tensor", "data", "optimizer", "pipeline"):
        assert part in out
        assert part in page
    assert "tp=4 pp=2" in page


def test_a_price_is_turned_into_cost() -> None:
    plan = some_plan(shard=8)
    found = estimate(plan, small_profile())

    headings, (row,) = comparison_rows([search_module.Candidate("a", plan, found, FITS)], price_per_hour=2.5)

    assert headings[-2:] == ["$/hour", "$/step"]
    assert float(row[-2]) == 20.0
    assert float(row[-1]) == pytest.approx(20.0 * found.step_time_s / 3600, rel=0.01)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--setup", "plan.json"], "the plan is for 4 GPUs, the comparison for 8: give --gpus 4"),
        (["--setup", "eight.json"], "layouts are compared at equal work: give --global-batch 32"),
        (["--setup", "none.json"], "no such plan: none.json"),
        (["--setup", "megatrn"], "megatron, torchtitan"),
        (["-o", "compare.pdf"], "ends in .html, .png or .json"),
        (["-o", "nowhere/compare.html"], "a folder that exists"),
    ],
)
def test_a_set_up_that_cannot_be_compared_says_why(
    saved: str, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    some_plan(shard=4).save(Path("plan.json"))
    some_plan(shard=8).save(Path("eight.json"))

    assert run_plan("compare", saved, "--gpus", "8", *words) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_measured_times_stand_beside(
    tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took = Measurement(
        label="planned", model="m", layout="x", num_ranks=8, device="8 somethings", torch_version="2",
        steps_s=((0.0321,),), tokens_per_step=1, peak_memory_bytes=(1,) * 8, memory_kind="allocated",
    )  # fmt: skip
    monkeypatch.setattr(inputs, "read_model", lambda *_: (small_profile(), object()))
    fake = SimpleNamespace(measure=lambda *_, **__: {"planned": took, "ddp": "it takes 8 ranks: too many"})
    monkeypatch.setitem(sys.modules, "meshwright.executor.measuring.measure", fake)

    assert run_plan("compare", saved, "--gpus", "8", "--setup", "ddp", "--measure") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert run_plan("compare", saved, "--gpus", "8", "--setup", "ddp", "--measure", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["setups"]

    assert "32.1 ms" in out
    assert "ddp was not measured: it takes 8 ranks: too many" in out
    assert rows[0]["measured"] == took.model_dump(mode="json")
    assert rows[1]["measured"] == {"not_run": "it takes 8 ranks: too many"}


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_verify_reports_and_its_exit_code_says_whether_numbers_agree(
    tmp_path: Path, ok: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text("")
    some_plan(shard=2).save(tmp_path / "plan.json")
    report = SimpleNamespace(ok=ok, lines=["loss agrees [within 1e-4]"])
    fake = SimpleNamespace(verify=lambda *_, **__: report)
    monkeypatch.setitem(sys.modules, "meshwright.executor.measuring.verify", fake)
    monkeypatch.setattr("meshwright.profiler.model.load.load_model", lambda *_, **__: None)

    assert run_plan("verify", "plan.json", "--model", "model.py") == code
    assert "loss agrees [within 1e-4]" in capsys.readouterr().out


@pytest.mark.parametrize("command", slow.but(["plan", "report", "sweep", "compare"], {"sweep", "compare"}))
def test_quiet_leaves_out_tables_where_it_says_so(saved: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--gpus", "2", "--device", "h100-80gb", "-b", "8", "--time-limit", "2")
    assert run_plan(saved, *machine, "--pin", "fsdp=2", "-q") == 0
    told = capsys.readouterr().out
    if command != "plan":
        given = ("plan.json", "--model", saved) if command == "report" else (saved, *machine)
        assert run_plan(command, *given, "-q") == 0
        told = capsys.readouterr().out

    flags = typer.main.get_command(cli.SUBCOMMANDS[command]).params

    (quiet,) = (flag for flag in flags if flag.name == "quiet")
    assert ("no tables" in str(getattr(quiet, "help", ""))) == ("───" not in told)


def test_a_plan_may_go_nowhere(saved: str) -> None:
    assert run_plan(saved, *QUICK, "--device", "h100-80gb", "-b", "8", "-q", "-o", "/dev/null") == 0

    assert not Path("plan.json").exists()


def test_verify_of_a_profile_says_that_it_is_one(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    some_plan(shard=2).save(Path("plan.json"))

    assert run_plan("verify", "plan.json", "--model", saved) == 2

    assert f"plan verify runs the model, and {saved} is only its profile" in " ".join(capsys.readouterr().err.split())


def test_a_device_file_is_refused_by_the_name_of_its_flag(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("tune", saved, "--gpus", "2", "--device-output", "device.json") == 2

    assert "--device-output device.json: a device file ends in .toml" in " ".join(capsys.readouterr().err.split())


def test_notes_that_say_the_same_of_several_modules_are_joined() -> None:
    notes = [
        "a.0: not cut, it does not run (has 4, not 2)",
        "has no sequence",
        "a.1: not cut, it does not run (has 8, not 4)",
        "b: not cut, it reads too much",
        "a.2: not cut, it does not run (has 8, not 4)",
    ]

    assert joined_notes(notes) == [
        "a.0 and 2 others: not cut, it does not run (has 4, not 2)",
        "has no sequence",
        "b: not cut, it reads too much",
    ]


def test_counted_names_are_joined() -> None:
    names = ["embed", *[f"h.{i}.mlp" for i in range(3)], "norm", "h.7.mlp", "head"]

    assert collapse(names) == "embed, h.0-2.mlp, norm, h.7.mlp, head"


@pytest.mark.parametrize(
    ("plan", "stage", "where"),
    [
        (some_plan(shard=8), 0, "GPUs 0-7"),
        (some_plan(tensor=4, pipeline=2), 1, "GPUs 4-7"),
        (some_plan(pipeline=8), 3, "GPU 3"),
        (some_plan(shard=8, pipeline=2), 1, "host 1"),
        (some_plan(shard=32, pipeline=2), 1, "hosts 4-7"),
        (some_plan(tensor=4, pipeline=4), 1, "host 0: GPUs 4-7"),
        (some_plan(shard=2, pipeline=2, per_host=1), 1, "hosts 2-3"),
        (
            some_plan(2, 4, 1, 4, mesh_axes=("data_replicate", "pipeline", "data_shard", "context", "tensor")),
            1,
            "host 0: GPUs 4-7, host 2: GPUs 4-7",
        ),
        (
            some_plan(
                shard=4,
                pipeline=2,
                tensor=2,
                mesh_axes=("data_replicate", "data_shard", "pipeline", "context", "tensor"),
            ),
            1,
            "GPUs 2-3, 6-7 of every host",
        ),
    ],
)
def test_where_a_stage_sits_in_words(plan: Any, stage: int, where: str) -> None:
    assert gpus_of(plan, stage) == where


def test_two_hosts_are_a_page_as_readable_as_two_thousand(capsys: pytest.CaptureFixture[str]) -> None:
    plan = some_plan(replicate=128, shard=2, tensor=8, pipeline=8)
    plan.save(Path("plan.json"))

    assert run_plan("show", "plan.json") == 0

    lines = capsys.readouterr().out.splitlines()
    assert plan.degrees.num_devices == 16384
    assert len(lines) < 50
    assert any("hosts 0-255" in line for line in lines)


@pytest.mark.slow
def test_operators_are_listed_with_the_dims_they_run_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(Path(__file__).parents[1] / "benchmarks" / "models" / "mlp.py")

    assert run_plan("profile", model, "--operators", "-o", str(tmp_path / "profile.json")) == 0

    printed = capsys.readouterr().out
    assert "One layer of each class" in printed
    assert "Operators of Linear" in printed
    assert "backward_weight" in " ".join(printed.split()) or "backward_wei" in printed


@pytest.mark.parametrize(("batch", "told"), [(64, True), (66, False)])
def test_a_batch_that_does_not_split_over_the_gpus_is_told_with_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], batch: int, told: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(tmp_path, scale=0.01)

    assert run_plan("profile.json", "--gpus", "3", "--global-batch", str(batch)) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert ("64 samples do not split over 3 data ranks" in said) == told
    assert ("--global-batch 63 or 66 would" in said) == told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--svg", "profile.json"], "--svg profile.json: give a name that ends in .svg"),
        (["--svg", "none/a.svg"], "--svg none/a.svg lies in no folder: none does not exist"),
        (["--svg", "a.svg", "--json"], "--svg a.svg draws what is printed, which with --json is no picture"),
    ],
)
def test_a_picture_of_what_is_printed_is_refused_before_the_search(
    saved: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Path(saved).read_text()

    assert run_plan(saved, "--gpus", "8", *flags) == 2

    assert told in " ".join(capsys.readouterr().err.split())
    assert Path(saved).read_text() == kept
    assert not Path("plan.json").exists()


@pytest.mark.parametrize("columns", slow.but_these(["20", "40", "79", "500"], {"20"}))
def test_numbers_are_whole_on_terminals_of_any_width(
    saved: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run_plan(saved, "--gpus", "4", "--device", "h100-80gb", "-b", "16", "-v") == 0
    told = capsys.readouterr().out

    document = load_plan(Path("plan.json"))

    assert document.prediction is not None
    assert re.search(rf"\b{max(document.prediction.stage_memory_bytes) / 2**30:.1f} ", told)
    assert "…" not in told
    assert max(map(len, told.splitlines())) <= 120


def test_a_model_taken_for_a_plan_is_not_to_be_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("def model(): ...\n")

    assert run_plan("show", "model.py") == 2

    said = " ".join(capsys.readouterr().err.split())
    assert "plan model.py -o plan.json" in said
    assert "-o model.py" not in said


def test_help_lists_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--help") == 0

    listed = re.findall(r"^│ (\w[\w-]*)  ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == sorted(cli.SUBCOMMANDS)


def test_plan_plan_is_plan(saved: str) -> None:
    assert run_plan("plan", saved, *QUICK, "-q", "-o", "long.json") == 0
    assert run_plan(saved, *QUICK, "-q") == 0

    assert load_plan(Path("long.json")).stages == load_plan(Path("plan.json")).stages


def test_completion_names_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_PLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "plan re")
    monkeypatch.setenv("COMP_CWORD", "1")

    run_plan("re")

    assert capsys.readouterr().out.split() == ["report", "replan"]


def test_every_command_speaks_json(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(saved, *QUICK, "-q", "--device", "h100-80gb") == 0
    capsys.readouterr()
    for words in (
        ["devices"],
        ["glossary", "MFU"],
        ["show", "plan.json"],
        ["export", "plan.json", "--to", "torchtitan"],
        ["report", "plan.json", "--model", saved],
        ["diff", "plan.json", "plan.json", "--model", saved],
        ["explain", "plan.json", "--model", saved, "--why-not", "tp=2"],
        ["sweep", saved, "--gpus", "1,2"],
    ):
        assert run_plan(*words, "--json") == 0
        json.loads(capsys.readouterr().out)
    for name, app in cli.SUBCOMMANDS.items():
        flags = {flag for option in typer.main.get_command(app).params for flag in option.opts}
        assert "--json" in flags, name


@pytest.mark.slow
def test_a_bad_point_does_not_end_a_sweep(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", saved, "--gpus-per-node", "4", "--device", "h100-80gb", "--seq-len", "64,128"]
    assert run_plan(*words, "--gpus", "4,6,8", "--json") == 0

    document = json.loads(capsys.readouterr().out)
    assert [point["gpus"] for point in document["points"]] == [4, 8]
    left_out = {(each["num_devices"], each["seq_len"]) for each in document["left_out"]}
    assert left_out == {(6, None), (4, 128), (6, 128), (8, 128)}
    assert "6 GPUs do not fill hosts of 4" in document["left_out"][0]["why"]
    assert run_plan(*words, "--gpus", "6") == 2
    assert "6 GPUs do not fill hosts of 4" in capsys.readouterr().err
