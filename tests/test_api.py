"""The names of `meshwright`: what they take, what they give, and what they do not import."""

import inspect
import json
import math
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.executor.cli import main
from meshwright.executor.commands.sweep import _sweep_command
from meshwright.planner.plan.document import load_plan
from support.cli import run_plan, save_profile, small_profile
from support.interpreter import modules_after

JOB = {"gpus": 8, "device": "h100-80gb", "global_batch": 64}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def planned() -> mw.Planned:
    return mw.plan(small_profile(), **JOB)


def test_every_name_is_there_and_is_the_one_below() -> None:
    assert len(mw.__all__) == len(set(mw.__all__)) == 17
    for name in mw.__all__:
        assert getattr(mw, name) is not None
    assert mw.Plan.model_fields["kind"].default == "meshwright-plan"
    assert set(mw.__all__) == set(dir(mw))
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = mw.plans


def test_importing_it_imports_almost_nothing(tmp_path: Path) -> None:
    loaded = modules_after("import meshwright", tmp_path)

    assert "meshwright" in loaded
    assert not {"torch", "pydantic", "numpy", "rich", "typer", "meshwright.planner"} & loaded


@pytest.mark.slow
def test_planning_from_a_profile_imports_no_torch(tmp_path: Path) -> None:
    save_profile(tmp_path)
    code = (
        "import meshwright as mw\n"
        "plan = mw.plan('profile.json', gpus=2, device='h100-80gb', pin='data_shard=2')\nplan.save()\n"
        "str(plan), plan._repr_html_(), plan.explain('tp=2'), plan.compare('ddp')\n"
        "mw.load('plan.json').export('torchtitan')"
    )

    loaded = modules_after(code, tmp_path)

    assert "meshwright.planner.solve.explore" in loaded
    assert "torch" not in loaded


@pytest.mark.slow
def test_a_profile_its_path_and_the_command_give_the_same_plan(planned: mw.Planned, tmp_path: Path) -> None:
    path = save_profile(tmp_path)
    assert run_plan(str(path), "--gpus", "8", "--device", "h100-80gb", "-b", "64", "-q", "-o", "cli.json") == 0

    plans = [
        planned.document,
        mw.plan(path, **JOB).document,
        mw.plan(str(path), **JOB).document,
        load_plan(Path("cli.json")),
    ]

    assert len({plan.model_dump_json(exclude={"certificate": {"search_seconds"}}) for plan in plans}) == 1


def test_what_a_plan_is_asked(planned: mw.Planned) -> None:
    explanation, comparison = planned.explain("tp=8"), planned.compare("ddp", "tp=8")

    assert [answer.asked for answer in explanation.answers] == ["tp=8"]
    assert explanation.answers[0].sentence in " ".join(str(explanation).split())
    assert [candidate.label for candidate in comparison.candidates] == ["planned", "ddp", "tp=8"]
    assert comparison.planned is planned.result
    assert "tp=8" in str(comparison)


def test_a_saved_plan_answers_as_it_did_when_it_was_made(planned: mw.Planned) -> None:
    small_profile().save(Path("profile.json"))
    planned.save("kept.json")

    again = mw.load("kept.json", model="profile.json")

    assert again.document == planned.document
    assert again.result is None
    assert again.estimate == planned.estimate
    assert again.step_time_s == planned.step_time_s
    assert again.explain("tp=8").answers == planned.explain("tp=8").answers
    usual = {candidate.label for candidate in again.compare().candidates}
    assert usual == {candidate.label for candidate in planned.compare().candidates}


def test_what_a_plan_writes(planned: mw.Planned, tmp_path: Path) -> None:
    assert planned.save().name == "plan.json"
    assert mw.load("plan.json").document == planned.document
    assert planned.report("page.html", trace="trace.json").read_text().startswith("<!doctype html>")
    assert "traceEvents" in (tmp_path / "trace.json").read_text()
    exported = mw.plan(small_profile(), **JOB, pin="pipeline=1").export("torchtitan", "flags.sh")
    assert (tmp_path / "flags.sh").read_text() == exported.text == str(exported)
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(ValueError, match=r"notes\.json exists and is no meshwright-plan"):
        planned.save("notes.json")
    assert (tmp_path / "notes.json").read_text() == "{}"


@pytest.mark.slow
def test_choices_are_taken_as_words_and_as_a_mapping() -> None:
    model = small_profile()
    said = [{"tensor": 2, "pipeline": 2}, "tensor=2 pipeline=2", ["tensor=2", "pp=2"]]

    plans = [mw.plan(model, **JOB, pin=pin).document for pin in said]

    assert {(plan.degrees.tensor, plan.degrees.pipeline) for plan in plans} == {(2, 2)}


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({"gpus": 0}, ["--gpus", "0"]),
        ({"gpus": 8, "device": "h10"}, ["--gpus", "8", "--device", "h10"]),
        ({"gpus": 8, "pin": "tensr=2"}, ["--gpus", "8", "--pin", "tensr=2"]),
        ({"gpus": 8, "software": "no-such"}, ["--gpus", "8", "--software", "no-such"]),
        ({"cluster": "none.toml"}, ["--cluster", "none.toml"]),
        (
            {"gpus": 8, "pin": "tensor=2", "forbid": "tensor"},
            ["--gpus", "8", "--pin", "tensor=2", "--forbid", "tensor"],
        ),
    ],
)
def test_mistakes_are_told_as_by_the_command(
    arguments: dict[str, object], flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_profile(tmp_path)
    with pytest.raises(ValueError, match=r".") as told:
        mw.plan(path, **arguments)  # type: ignore[arg-type]

    assert run_plan(str(path), *flags) == 2
    assert capsys.readouterr().err.strip() == f"error: {told.value}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "bf61"}, "--precision bf61: choose bf16, fp32"),
        ({"optimizer": "adam"}, "--optimizer adam: choose adamw, sgd"),
        ({"objective": "speed"}, "--objective speed: choose throughput, cost, min-gpus"),
        ({"space": "all"}, "--space all: choose run, full"),
        ({"global_batch": 0}, "--global-batch 0: give a whole number of at least 1"),
        ({"memory_margin": 1.5}, "--memory-margin 1.5 is no share from 0 to 0.9; write, for example, 0.1"),
        ({"memory_margin": "a tenth"}, "--memory-margin a tenth is no share from 0 to 0.9"),
        ({"price_per_hour": -1.0}, "--price-per-hour -1.0 is no number of at least 0; write, for example, 2.50"),
        ({"price_per_hour": math.nan}, "--price-per-hour nan is no number of at least 0"),
        ({"time_limit": 0}, "--time-limit 0 is no number of at least 0.1; write, for example, 60"),
        ({"time_limit": math.inf}, "--time-limit inf is no number of at least 0.1"),
        ({"pad_vocab": 0}, "--pad-vocab 0: give a whole number of at least 1"),
        ({"loss": len}, "batch= and loss= go with a module"),
    ],
)
def test_what_the_command_line_itself_would_refuse_is_refused(
    arguments: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        mw.plan(save_profile(tmp_path), gpus=8, device="h100-80gb", **arguments)  # type: ignore[arg-type]


def test_answers_refuse_what_the_command_line_would(planned: mw.Planned) -> None:
    with pytest.raises(ValueError, match=r"--steps 0: give a whole number of at least 1, for example --steps 3"):
        planned.verify(steps=0)
    with pytest.raises(ValueError, match=r"--time-limit -1 is no number of at least 0\.1"):
        planned.explain("tp=8", time_limit=-1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pad_vocab": 128}, "pad_vocab=128 pads the words of a config.json: give its path, no ModelProfile"),
        ({"batch": len}, "the profile has been made, with its own batch and loss"),
        ({"lora": "r=8"}, "the profile has been made, with the adapters that it has"),
    ],
)
def test_a_profile_is_made_already(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mw.plan(small_profile(), **JOB, **arguments)  # type: ignore[arg-type]


def test_numbers_of_a_sweep_are_said_alike() -> None:
    profile = small_profile()

    said = [[point.num_devices for point in mw.sweep(profile, gpus, device="h100-80gb")] for gpus in (2, [2], "2")]

    assert said == [[2], [2], [2]]
    with pytest.raises(ValueError, match=r"gpus=\[\] has no number"):
        mw.sweep(profile, [], device="h100-80gb")
    with pytest.raises(ValueError, match=r"seq_len=\[\] has no number"):
        mw.sweep(profile, 2, seq_len=[], device="h100-80gb")


def test_a_sweep_takes_all_that_its_command_takes() -> None:
    called_otherwise = {"made_for": "fits", "most": "at_most", "no_cache": "cache", "quiet": "progress"}
    by_methods = {"output", "as_json"}
    flags = inspect.signature(_sweep_command).parameters.keys() - by_methods

    assert {called_otherwise.get(flag, flag) for flag in flags} <= inspect.signature(mw.sweep).parameters.keys()


def test_a_sweep_from_python_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(save_profile(Path()))
    words = ["--gpus", "1,2", "--instance", "g6e.12xlarge", "--device", "h100-80gb"]
    assert run_plan("sweep", saved, *words) == 2
    assert "leave out --device" in capsys.readouterr().err
    with pytest.raises(ValueError, match="leave out --device"):
        mw.sweep(saved, [1, 2], instance="g6e.12xlarge", device="h100-80gb")
    words = ["--global-batch", "8", "--scale-batch", "--price-per-hour", "2", "--max", "tensor=1", "--micro-batch", "4"]
    assert run_plan("sweep", saved, "--gpus", "1,2", "--device", "h100-80gb", *words, "--prices", "--json") == 0
    told = json.loads(capsys.readouterr().out)

    found = mw.sweep(
        saved,
        [1, 2],
        device="h100-80gb",
        global_batch=8,
        scale_batch=True,
        price_per_hour=2,
        at_most="tensor=1",
        micro_batch=4,
        prices=True,
    )

    document = json.loads(json.dumps(found.document))
    for each in (*document["points"], *told["points"]):
        assert each.pop("search_seconds", 0) >= 0
    assert [point["global_batch"] for point in told["points"]] == [8, 16]
    assert document["points"] == told["points"]
    assert document["price_per_hour"] == told["price_per_hour"] == 2
    assert len(document["worth"]) == len(told["worth"]) == 2
    assert "$/M" in str(found)
    found.write("sweep.json")
    assert json.loads(Path("sweep.json").read_text())["kind"] == "meshwright-sweep"
    with pytest.raises(ValueError, match="3 numbers, --gpus has 2"):
        mw.sweep(saved, [1, 2], device="h100-80gb", global_batch=[1, 2, 4])


@pytest.mark.slow
def test_what_does_not_fit_is_an_error_of_its_own() -> None:
    with pytest.raises(mw.InfeasibleError, match="is over by"):
        mw.plan(small_profile(40), gpus=2, device="rtx-4090")


@pytest.mark.slow
def test_a_cluster_may_be_an_object(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('[[hosts]]\ncount = 2\ndevice = "a100-80gb"\ngpus = 4\n')
    machine = mw.ClusterSpec.model_validate(mw.plan(small_profile(), cluster="cluster.toml").document.cluster)

    assert mw.plan(small_profile(), cluster=machine).document.cluster == machine
    with pytest.raises(ValueError, match="leave out gpus and device"):
        mw.plan(small_profile(), cluster=machine, gpus=8)


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_point_where_nothing_fits() -> None:
    points = mw.sweep(small_profile(3), [1, 8], device="rtx-4090")

    assert [point.result is None for point in points] == [True, False]
    assert "is over by" in points[0].why


def test_a_module_is_planned_trained_by_what_was_planned_and_verified_with_itself() -> None:
    import torch

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 8), torch.randn(size, 4)

    def loss(output: torch.Tensor, micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output, micro_batch[1])

    plan = mw.plan(build, batch=batch, loss=loss, gpus=1, device="cpu", global_batch=8)
    trainer = mw.parallelize(build, plan, lambda p: torch.optim.SGD(p, lr=0.1), loss)
    torch.manual_seed(0)
    samples = batch(8)

    losses = [trainer.step(samples).loss for _ in range(3)]

    assert losses[2] < losses[1] < losses[0]
    assert plan.profile == mw.profile(build, batch=batch, loss=loss)
    saved = plan.save("object.json")
    with pytest.raises(ValueError, match=r"of a Python object: give it to mw.load.'object.json', model=build, bat"):
        mw.load(saved).explain("fsdp")
    with pytest.raises(ValueError, match="batch=, loss= and lora= go with a module"):
        mw.load(saved, batch=batch)
    again = mw.load(saved, model=build, batch=batch, loss=loss)
    assert again.estimate == plan.estimate
    assert str(again.verify()).splitlines()[-1].startswith("SAME NUMBERS")
    with pytest.raises(ValueError, match=r"model=Linear is not the model that .* was made for"):
        mw.load(saved, model=torch.nn.Linear(8, 4), batch=batch, loss=loss).explain()


def test_python_m_meshwright_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])

    assert capsys.readouterr().out == f"meshwright {mw.__version__}\n"
