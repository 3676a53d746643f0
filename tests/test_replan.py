"""plan replan: from a checkpoint's plan to one for the GPUs that are left, without torch where the profile is known."""

from pathlib import Path

import pytest

from meshwright.executor.state.checkpoint_folder import Progress
from meshwright.planner.plan.document import load_plan
from meshwright.profiler.machine.cluster import load_device
from support.cli import run_plan, save_profile, some_plan
from support.interpreter import modules_after
from support.synthetic import mixed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run on 8 GPUs that was saved after 120 steps."""
    folder = tmp_path / "run"
    saved = folder / "step-00000120"
    saved.mkdir(parents=True)
    plan = some_plan(shard=4, tensor=2, micro_batches=6)
    plan.save(saved / "plan.json")
    (saved / "state.json").write_text(Progress(steps=120).model_dump_json())
    return folder


def test_a_run_that_lost_two_gpus_gets_a_plan_for_six(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, target = save_profile(tmp_path), tmp_path / "new.json"

    code = run_plan("replan", "--checkpoint", str(run), "--gpus", "6", "--model", str(profile), "-o", str(target))

    before, after = load_plan(run / "step-00000120" / "plan.json"), load_plan(target)
    assert code == 0
    assert after.degrees.num_devices == 6
    assert after.training == before.training
    assert after.cluster.device == before.cluster.device
    assert after.certificate is not None
    shown = " ".join(capsys.readouterr().out.split())
    assert "synthetic after 120 steps: 8 GPUs" in shown
    assert "-> 6 GPUs" in shown
    assert "goes on from step-00000120" in shown


@pytest.mark.slow
def test_replanning_from_a_saved_profile_needs_no_torch(run: Path, tmp_path: Path) -> None:
    words = ["replan", "--checkpoint", str(run), "--gpus", "6", "--model", str(save_profile(tmp_path))]

    loaded = modules_after(f"from meshwright.executor.cli import main\nmain({words!r})", tmp_path)

    assert "torch" not in loaded
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "nothing", "--gpus", "6"], "no checkpoint in nothing"),
        (["--checkpoint", "RUN"], "say how many GPUs there are now"),
        (["--checkpoint", "RUN", "--gpus", "6", "--model", "nowhere.py"], "no such file: nowhere.py"),
        (["--checkpoint", "RUN", "--gpus", "6", "--model", "OTHER"], "is not the model of the checkpoint"),
    ],
)
def test_what_is_missing_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    other = save_profile(tmp_path, "other.json", scale=2.0)
    text = (
        other.read_text()
        .replace('"fingerprint": "0000', '"fingerprint": "1111')
        .replace('"fingerprint":"0000', '"fingerprint":"1111')
    )
    other.write_text(text)
    given = [{"RUN": str(run), "OTHER": str(other)}.get(word, word) for word in words]

    code = run_plan("replan", *given, "-o", str(tmp_path / "new.json"))

    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "hosts", "price"),
    [
        (["--gpus", "8", "--price-per-hour", "2"], (2, 4), 2.0),
        (["--gpus", "6"], (2, 3), None),
        (["--instance", "p5.48xlarge", "--nodes", "2"], (2, 8), None),
    ],
)
def test_the_machine_is_what_is_said_of_it_and_else_as_before(
    run: Path, tmp_path: Path, flags: list[str], hosts: tuple[int, int], price: float | None
) -> None:
    saved, target = run / "step-00000120" / "plan.json", tmp_path / "new.json"
    some_plan(shard=8, tensor=2, micro_batches=6, per_host=4).save(saved)
    words = ["--checkpoint", str(run), "--model", str(save_profile(tmp_path)), "-o", str(target), "--time-limit", "1"]

    assert run_plan("replan", *words, *flags) == 0

    found = load_plan(target).cluster
    assert (found.num_hosts, found.devices_per_host, found.price_per_hour) == (*hosts, price)


def test_of_hosts_that_differ_it_is_asked_which_are_left(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = run / "step-00000120" / "plan.json"
    unequal = mixed((1, 4, load_device("h100-80gb")), (1, 4, load_device("a100-40gb")))
    load_plan(saved).model_copy(update={"cluster": unequal}).save(saved)

    code = run_plan("replan", "--checkpoint", str(run), "--gpus", "4", "--model", str(save_profile(tmp_path)))

    assert code == 2
    assert "which of them are left is open: say it by --device" in " ".join(capsys.readouterr().err.split())
