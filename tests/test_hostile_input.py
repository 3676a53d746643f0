"""Careless and hostile input is answered, or refused in one sentence with exit code 2; nothing is left half-written."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from benchmarks.abuse import words
from meshwright.executor import cli
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.model_profile import load_profile
from support.cli import run_plan, save_profile, small_profile, some_plan

MACHINE = ("--gpus", "4", "--device", "h100-80gb", "-b", "16", "--time-limit", "1")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A saved profile."""
    return save_profile(tmp_path)


@pytest.fixture(scope="module")
def found_plan() -> Plan:
    """A pipeline that was searched for."""
    choice = {"pipeline": 2, "schedule": "1f1b"}
    return mw.plan(small_profile(), gpus=4, device="h100-80gb", global_batch=16, time_limit=5, pin=choice).document


def changed(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON document in place."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_drawn_documents_and_command_lines_are_answered_or_refused() -> None:
    wrong: list[words.Found] = []

    words.run(0, 12, wrong.append)

    assert wrong == []


@pytest.mark.slow
def test_more_documents_and_command_lines_are_answered_or_refused() -> None:
    wrong: list[words.Found] = []

    words.run(1000, 300, wrong.append)

    assert wrong == []


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda d: d["layers"][1].update(layer_class=99), "layer 1 is of class 99"),
        (lambda d: d["layers"][1].update(layer_class=-1), "greater than or equal to 0"),
        (lambda d: d.update(classes=[]), "and there are 0 classes"),
        (lambda d: d.update(layers=[]), "at least 1 item"),
        (lambda d: d.update(seq_len=0), "greater than 0"),
        (lambda d: d.update(seq_len=-8), "greater than 0"),
        (lambda d: d.update(global_batch=-1), "greater than 0"),
        (lambda d: d["classes"][0]["whole"]["saved"].update(elements=[float("nan")] * 4), "finite number"),
        (lambda d: d["classes"][0]["whole"]["saved"].update(elements=[float("inf")] * 4), "finite number"),
        (lambda d: d["classes"][0]["parameters"][0].update(shape=[-4, 4]), "greater than or equal to 0"),
        (lambda d: d["classes"][0]["parameters"][0].update(name="another"), "a parameter .* its class does not know"),
        (lambda d: d["tensors"][0].update(made_by=10**6), "names layer 1000000, and there are"),
        (lambda d: d["tensors"][0].update(same_as=10**6), "the same as tensor 1000000"),
    ],
)
def test_a_corrupt_profile_is_refused_with_what_is_wrong(
    profile: Path, change: Callable[[Any], None], rule: str
) -> None:
    changed(profile, change)

    with pytest.raises(ValueError, match=rule):
        load_profile(profile)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000])
@pytest.mark.parametrize("command", [("show",), ()])
def test_what_is_nested_too_deep_is_refused(
    tmp_path: Path, text: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.json"
    path.write_text(text)

    assert run_plan(*command, str(path), *(() if command else MACHINE)) == 2

    assert "Traceback" not in capsys.readouterr().err


def test_a_plan_whose_layers_are_in_another_order_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    some_plan().save(path)
    changed(path, lambda d: d["stages"][0]["layers"].reverse())

    assert run_plan("show", str(path)) == 2

    assert "do not hold the model's modules in its order" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda layout: layout["degrees"].update(virtual_stages=10**6), "1000000 stages on each rank"),
        (lambda layout: layout["stages"][0][0].update(count=10**12), "layers, not 10"),
    ],
)
def test_an_alternative_that_is_none_is_refused(
    profile: Path,
    tmp_path: Path,
    change: Callable[[Any], None],
    rule: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = tmp_path / "plan.json"
    assert run_plan(str(profile), *MACHINE, "-q", "-o", str(plan)) == 0
    changed(plan, lambda d: change(next(each["layout"] for each in d["alternatives"] if each["layout"])))

    assert run_plan("report", str(plan), "--model", str(profile), "-o", str(tmp_path / "out.html")) == 2

    assert rule in " ".join(capsys.readouterr().err.split())


class _Full(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_full_output_is_told_in_a_sentence(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    some_plan().save(path)
    monkeypatch.setattr("sys.stdout", _Full())

    assert run_plan("show", str(path), *flags) == 2

    assert "the output cannot be written: No space left on device" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda d: d["stages"][0]["layers"].append(d["stages"][1]["layers"][0]), "which stage 0 holds"),
        (lambda d: d["stages"][0]["layers"][1].update(name="other"), "layers once and in order; missing layer1"),
        (lambda d: d["stages"][0]["layers"][1].update(layer_class="other"), "layers once and in order"),
        (
            lambda d: d["stages"][0]["layers"][1].update(recompute="parts:none"),
            "has no part none that can be run again",
        ),
        (lambda d: d["training"].update(seq_len=None), "seq_len is None, and {profile} has 64 tokens per sample"),
        (
            lambda d: d["cluster"]["hosts"][0]["device"].update(flops={}),
            "flops: Dictionary should have at least 1 item",
        ),
        (lambda d: d["certificate"].update(gap=-1), "gap=-1, but fastest_s and bound leave "),
        (lambda d: d["certificate"].update(bound=10), "bound <= fastest_s <= step_s; found 10 and "),
        (lambda d: d["alternatives"][0].update(outcome="other"), "has the outcome 'other', which there is not"),
    ],
)
def test_what_was_changed_in_a_plan_is_told(
    change: Callable[[Any], None],
    rule: str,
    profile: Path,
    tmp_path: Path,
    found_plan: Plan,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = tmp_path / "plan.json"
    found_plan.save(plan)
    changed(plan, change)

    assert run_plan("report", str(plan), "--model", str(profile), "-o", str(tmp_path / "page.html")) == 2

    told = " ".join(capsys.readouterr().err.split())
    assert rule.format(profile=profile) in told


def test_a_plan_that_does_not_fit_is_shown_with_the_words(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    some_plan(shard=2).save(plan)
    changed(plan, lambda d: d["cluster"]["hosts"][0]["device"].update(memory=4e9))

    assert run_plan("show", str(plan), "--model", str(profile)) == 0

    assert "does not fit: the fullest GPU needs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_picture_that_cannot_be_written_is_told(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, picture = str(tmp_path / "out.json"), tmp_path / "full.svg"
    picture.symlink_to("/dev/full")

    assert run_plan(str(profile), *MACHINE, "-q", "-o", plan, "--svg", str(picture)) == 2

    assert f"{picture} cannot be written: No space left on device" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words_of", [("/dev/full", *MACHINE), ("show", "/dev/full"), ("model.json", "--cluster", "/dev/full", "-b", "16")]
)
def test_a_device_without_an_end_is_not_read(
    profile: Path, words_of: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(*(str(profile) if word == "model.json" else word for word in words_of)) == 2

    assert "/dev/full is a device, which has no end" in " ".join(capsys.readouterr().err.split())


def test_a_name_of_5000_characters_is_refused_briefly(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("a" * 5000, *MACHINE) == 2

    assert len(capsys.readouterr().err) < 1000


@pytest.mark.parametrize("outside", [False, True])
def test_only_a_model_file_beside_the_plan_is_run(
    tmp_path: Path, outside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    ran = tmp_path / "ran"
    model = (tmp_path if outside else folder) / "model.py"
    model.write_text(f"open({str(ran)!r}, 'w').close()\n")
    made = some_plan()
    reference = made.model.model_copy(update={"source": str(model)})
    made.model_copy(update={"model": reference}).save(folder / "plan.json")

    for command in ("explain", "report"):
        assert run_plan(command, str(folder / "plan.json"), "--no-cache") == 2

        said = " ".join(capsys.readouterr().err.split())
        assert ("lies outside of the plan's folder" in said) == outside
    assert ran.exists() != outside


def test_an_interrupt_while_the_command_is_imported_ends_in_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshwright import __main__ as entry

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    monkeypatch.setattr("sys.unraisablehook", None)

    with pytest.raises(SystemExit, match="130"):
        entry.main()

    assert capsys.readouterr().err == "interrupted\n"
