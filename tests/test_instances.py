"""Cloud instance types, and the devices that people have: what they are, and what is refused."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.profiler.machine.cluster import device_names
from meshwright.profiler.machine.instances import instance, instances
from support.cli import run_plan, save_profile, small_profile


def test_instances_are_hosts_of_a_preset_behind_their_own_network() -> None:
    cluster = mw.plan(small_profile(), instance="p5.48xlarge", nodes=4).document.cluster

    assert (cluster.num_devices, cluster.num_hosts, cluster.device.name) == (32, 4, "h100-80gb")
    assert cluster.network.bandwidth == 3200e9 / 8
    assert instance("P5.48XLARGE") is instance("p5.48xlarge")
    assert instance("g5.48xlarge").bytes_per_s == pytest.approx(100e9 / 8 * 0.73)


def test_every_instance_has_a_preset_a_source_and_no_price() -> None:
    for each in instances().values():
        assert each.device in device_names()
        assert each.source.startswith("https://")
        assert each.cluster(2).price_per_hour is None


def test_a_price_is_what_is_said_and_costs_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_profile(tmp_path)
    words = [str(path), "--instance", "p5.48xlarge", "--price-per-hour", "2.5", "-o", str(tmp_path / "plan.json")]
    assert run_plan(*words) == 0

    assert "cost     $20.00 an hour" in capsys.readouterr().out
    assert mw.load(tmp_path / "plan.json").document.cluster.price_per_hour == 2.5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--instance", "p5.48xlarg"], "unknown instance 'p5.48xlarg': did you mean p5.48xlarge"),
        (["--instance", "p5.48xlarge", "--device", "h200"], "says which devices there are: leave out --device"),
        (["--instance", "p5.48xlarge", "--gpus", "12"], "--gpus 12, but p5.48xlarge has 8 GPUs"),
        (["--instance", "p5.48xlarge", "--gpus", "8", "--nodes", "2"], "--nodes 2 of p5.48xlarge are 16 GPUs"),
        (["--nodes", "2"], "--nodes 2 counts instances: give --instance"),
    ],
)
def test_what_contradicts_is_named(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(str(save_profile(tmp_path)), *flags) == 2
    assert words in capsys.readouterr().err
