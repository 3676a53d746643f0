"""Calibration: fits recover what made the times, the file says what was measured, and the command measures here."""

import math
import os
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from meshwright.executor.measuring import reference_steps
from meshwright.executor.measuring.calibrate import calibrate
from meshwright.executor.measuring.reference_steps import references
from meshwright.executor.reporting.output_files import check_device_output
from meshwright.planner.cost.compute_cost import measured_efficiency, moving_s, operator_s, optimizer_s
from meshwright.profiler.machine import calibrate as profiler
from meshwright.profiler.machine.calibrate import (
    EFFORTS,
    OPTIMIZERS,
    Clock,
    Effort,
    Measured,
    Timing,
    fit_device,
    fit_factor,
    fit_line,
    fit_link,
    merged,
    save_device,
    summary,
)
from meshwright.profiler.machine.cluster import Device, load_device
from meshwright.profiler.model.model_profile import Bytes, OpProfile
from support.cli import run_plan, save_profile
from support.synthetic import device

PEAK = 2e11
BANDWIDTH = 3e10
SIDES = (32, 256, 2048)
SHARES = {"add": 0.8, "clone": 1.0, "native_layer_norm": 0.5, "adamw": 0.1}
"""Share of the bandwidth of some kernels; that of all others is one half."""

TINY = Effort(1, 1e-4, (8, 32), 1e9, 2**14, (2**12, 2**16), (16,), 2, (2**10, 2**14), 2, 64, 2)


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.02, 9)


def share_of(shape: tuple[int, int, int]) -> float:
    """A law of efficiency: sides of 2048 reach the peak, and every halving of a side costs 5%."""
    return 0.95 ** sum(11 - math.log2(side) for side in shape)


def synthetic(bandwidth: float = BANDWIDTH, ring_bytes_per_s: float = 1e9, hop_s: float = 1e-4) -> Measured:
    """What two ranks would measure on a machine with these constants."""
    names = {name for kinds in profiler._KINDS.values() for name in kinds} | set(OPTIMIZERS)
    sizes = (2.0**12, 2.0**18, 2.0**24)
    gather = [(size, hop_s + size / 2 / ring_bytes_per_s) for size in sizes]
    factors = {"all_gather": 1.0, "reduce_scatter": 1.5, "all_reduce": 2 * 0.8}
    return Measured(
        matmuls={
            "fp32": [
                (shape, timing(2 * math.prod(shape) / PEAK / share_of(shape))) for shape in product(SIDES, repeat=3)
            ]
        },
        traffic={name: (6e6, timing(6e6 / bandwidth / SHARES.get(name, 0.5))) for name in names},
        curve=[(size, timing(size / bandwidth / (0.8 if size < 1e8 else 0.08))) for size in (1e5, 6e6, 2e8)],
        attention={"forward": [(1e9, timing(1e9 / PEAK / 0.4))], "backward": [(2.5e9, timing(2.5e9 / PEAK / 0.3))]},
        launch=timing(4e-6),
        collectives={
            **{kind: [(size, timing(s * factor)) for size, s in gather] for kind, factor in factors.items()},
            "p2p": [(size, timing(0.9 * (hop_s + size / ring_bytes_per_s))) for size in sizes],
        },
    )


def fitted(measured: Measured | None = None) -> Device:
    return fit_device(load_device("cpu"), measured or synthetic(), 2, "cpu")


# --- statistics ------------------------------------------------------------------------------------------------------


def test_a_few_wild_samples_move_neither_median_nor_spread() -> None:
    calm = [1.0 + 0.001 * i for i in range(20)]

    wild = summary([*calm, 50.0, 900.0])

    assert wild.median_s == pytest.approx(summary(calm).median_s, rel=2e-3)
    assert wild.spread < 0.02
    assert wild.count == 22


def test_spread_is_the_distance_of_the_quartiles_over_the_median() -> None:
    assert summary([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(3.0, 2.0 / 3.0, 5)


def test_one_slow_round_of_three_leaves_no_trace() -> None:
    slow = replace(synthetic(bandwidth=BANDWIDTH / 50), launch=timing(4e-4))

    assert fitted(merged([synthetic(), slow, synthetic()])).launch == fitted().launch


def test_a_collective_of_ranks_takes_as_long_as_the_slowest() -> None:
    late = synthetic(hop_s=3e-4)

    together = merged([synthetic(), late], ranks=True)

    assert together.collectives["all_gather"][0][1].median_s == late.collectives["all_gather"][0][1].median_s
    assert together.launch.count == 18


def test_short_kernels_are_repeated_within_a_sample() -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1

    found = Clock("cpu").timing(run, budget_s=1e-3)

    assert calls > 50 * found.count
    assert 0 < found.median_s < 1e-5


# --- fits ------------------------------------------------------------------------------------------------------------


def test_a_line_gives_back_its_constant_and_slope() -> None:
    points = [(x, 2e-4 + 3e-9 * x) for x in (1e3, 1e5, 1e7)]

    assert fit_line(points) == pytest.approx((2e-4, 3e-9))


@pytest.mark.parametrize(
    "points", [[(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)], [(1.0, 0.5), (2.0, 2.0), (4.0, 5.0)], [(2.0, 4.0)]]
)
def test_neither_constant_nor_slope_is_ever_negative(points: list[tuple[float, float]]) -> None:
    constant, slope = fit_line(points)

    assert constant >= 0.0
    assert slope >= 0.0
    assert constant + slope > 0.0


def test_a_factor_is_what_the_model_lacks() -> None:
    assert fit_factor([1.0, 2.0, 400.0], [1.5, 3.0, 600.0]) == pytest.approx(1.5)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_link_and_the_factors_of_its_collectives_are_recovered(num_ranks: int) -> None:
    ring = [(s, (num_ranks - 1) * 2e-5 + (num_ranks - 1) / num_ranks * s / 5e9) for s in (1e4, 1e6, 1e8)]
    times = {
        "all_gather": [(s, timing(t)) for s, t in ring],
        "reduce_scatter": [(s, timing(1.5 * t)) for s, t in ring],
        "all_reduce": [(s, timing(2 * 0.7 * t)) for s, t in ring],
        "p2p": [(s, timing(1.2 * (2e-5 + s / 5e9))) for s, _ in ring],
    }

    link, factors = fit_link(times, num_ranks)

    assert (link.bandwidth, link.latency) == pytest.approx((5e9, 2e-5))
    assert factors == pytest.approx({"all_gather": 1.0, "reduce_scatter": 1.5, "all_reduce": 0.7, "p2p": 1.2})


def test_a_device_gets_the_constants_that_made_the_times() -> None:
    found = fitted()

    assert found.flops["fp32"] == pytest.approx(PEAK)
    assert found.bandwidth == pytest.approx(BANDWIDTH)
    assert found.kernel_efficiency["native_layer_norm"] == pytest.approx(0.5)
    assert found.kernel_efficiency["adamw"] == pytest.approx(0.1)
    assert found.attention_efficiency == pytest.approx(0.4)
    assert found.attention_backward_efficiency == pytest.approx(0.3)
    assert found.launch == 4e-6
    assert (found.link.bandwidth, found.link.latency) == pytest.approx((1e9, 1e-4))
    assert [share for _, share in found.size_efficiency] == pytest.approx([1.0, 1.0, 0.1])


def test_one_rank_leaves_the_link_as_it_was() -> None:
    found = fitted(replace(synthetic(), collectives={}))

    assert found.link == load_device("cpu").link
    assert found.sources["link.bandwidth"].startswith("not measured")


def test_every_number_says_whether_it_was_measured() -> None:
    found = fitted()

    assert {name for name, text in found.sources.items() if text.startswith("measured: ")} >= {
        "flops", "matmul_samples", "bandwidth", "kernel_efficiency", "size_efficiency", "launch", "link.bandwidth",
        "attention_efficiency", "attention_backward_efficiency", "collective_factors",
    }  # fmt: skip
    assert "torch 2" in found.sources["launch"]
    assert "median of 9 samples, quartiles 2% apart" in found.sources["launch"]
    assert all(text.startswith(("measured: ", "not measured, ")) for text in found.sources.values())


# --- prices ----------------------------------------------------------------------------------------------------------


def matmul(*shape: int) -> OpProfile:
    sides = tuple((float(side), 0.0, 0.0, 0.0) for side in shape)
    flops = (2.0 * math.prod(shape), 0.0, 0.0, 0.0)
    return OpProfile(name="mm", module="", kind="matmul", part="forward", flops=flops, shape=sides)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(32, 256, 2048), (256, 256, 256)])
def test_a_measured_product_is_priced_as_measured(shape: tuple[int, int, int]) -> None:
    expected = 2 * math.prod(shape) / PEAK / share_of(shape)

    assert operator_s(matmul(*shape), fitted(), "fp32", 4, 1, 1) == pytest.approx(expected, rel=1e-2)


def test_a_product_between_measured_ones_is_priced_between_them() -> None:
    samples = fitted().matmul_samples["fp32"]
    shape = (100, 100, 700)

    assert measured_efficiency(shape, samples) == pytest.approx(share_of(shape), rel=0.1)
    assert measured_efficiency((10**6, 10**6, 10**6), samples) == pytest.approx(1.0, rel=0.02)


def test_a_dtype_without_samples_is_priced_by_tiles() -> None:
    found = fitted()
    shape = 512, 512, 512
    usual = found.model_copy(update={"matmul_samples": {}})

    assert operator_s(matmul(*shape), found, "bf16", 2, 1, 1) == operator_s(matmul(*shape), usual, "bf16", 2, 1, 1)


def test_a_kernel_is_priced_by_its_name_then_by_its_kind_then_as_all() -> None:
    on = device(kernel_efficiency={"gelu": 0.5, "norm": 0.25}, bandwidth=1e9, bandwidth_efficiency=0.8)

    seconds = [moving_s(1e9, on, *names) for names in (("gelu", "norm"), ("other", "norm"), ("other", "loss"))]

    assert seconds == pytest.approx([2.0, 4.0, 1.25])


def test_large_kernels_are_slowed_down_as_measured_and_by_a_power_law_between() -> None:
    on = device(size_efficiency=((1e6, 1.0), (1e8, 0.01)), bandwidth=1e9, bandwidth_efficiency=1.0)

    assert [moving_s(size, on) / (size / 1e9) for size in (1e3, 1e7, 1e8, 1e10)] == pytest.approx([1, 10, 100, 100])


def test_attention_has_a_backward_of_its_own() -> None:
    flops = (1e9, 0.0, 0.0, 0.0)
    forward, backward = (
        OpProfile(name="a", module="", kind="attention", part=part, flops=flops)  # type: ignore[arg-type]
        for part in ("forward", "backward")
    )

    ratio = operator_s(backward, fitted(), "fp32", 4, 1, 1) / operator_s(forward, fitted(), "fp32", 4, 1, 1)

    assert ratio == pytest.approx(4 / 3)


def test_an_optimizer_that_was_measured_keeps_its_speed() -> None:
    assert optimizer_s(1e6, "adamw", fitted()) == pytest.approx(28e6 / BANDWIDTH / 0.1)


def test_a_preset_knows_none_of_this() -> None:
    norm = OpProfile(
        name="native_layer_norm", module="", kind="norm", part="forward", moved=Bytes(other_bytes=(1e9, 0, 0, 0))
    )
    preset = load_device("h100-80gb")

    expected = 1e9 / (preset.bandwidth * preset.bandwidth_efficiency)
    assert operator_s(norm, preset, "bf16", 2, 1, 1) == pytest.approx(expected)


# --- file and command ------------------------------------------------------------------------------------------------


def test_the_file_gives_back_the_device(tmp_path: Path) -> None:
    found = fitted()

    save_device(found, tmp_path / "mine.toml")

    again = load_device(str(tmp_path / "mine.toml"))
    assert again.sources == found.sources
    assert again.kernel_efficiency == pytest.approx(found.kernel_efficiency, rel=1e-3)
    assert again.bandwidth == pytest.approx(found.bandwidth, rel=1e-3)
    for sample, original in zip(again.matmul_samples["fp32"], found.matmul_samples["fp32"], strict=True):
        assert sample == pytest.approx(original, rel=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.fixture
def tiny_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EFFORTS, ("cpu", True), TINY)
    wide = references("cpu")["wide"]
    monkeypatch.setattr(reference_steps, "references", lambda _: {"wide": replace(wide, setups=("ddp", "fsdp"))})
    monkeypatch.setattr("meshwright.executor.measuring.calibrate.QUICK_REPETITIONS", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_effort")
def test_two_ranks_measure_a_link_and_reference_steps() -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")
    found = calibrate("cpu", 2, quick=True, dtypes=["fp32"])

    assert set(found.device.collective_factors) == {"all_gather", "reduce_scatter", "all_reduce", "p2p"}
    assert "2 cpu ranks at the same time" in found.device.sources["link.latency"]
    assert [step.label for step in found.steps] == ["wide, ddp", "wide, fsdp"]
    assert all(step.measured_s > 0 for step in found.steps)
    assert statistics.mean(abs(s.error) for s in found.steps) < statistics.mean(abs(s.before) for s in found.steps)


MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1))

def batch(size):
    return torch.randn(size, 16), torch.randn(size, 1)

def loss(output, batch):
    return (output - batch[1]).square().mean()
"""


@pytest.mark.usefixtures("tiny_effort")
def test_the_command_writes_a_device_that_plans_are_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)

    code = run_plan("calibrate", "model.py", "-o", "here.toml", "--ranks", "1", "--quick", "--device-kind", "cpu")

    assert code == 0
    assert "measured at the same time" in capsys.readouterr().out
    assert set(load_device("here.toml").matmul_samples) == {"fp32", "bf16"}
    assert run_plan("model.py", "--gpus", "1", "--device", "here.toml", "--quiet") == 0


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_effort")
def test_layers_of_a_model_are_priced_and_timed(tmp_path: Path) -> None:
    from meshwright.profiler.model.load import load_model
    from meshwright.profiler.model.trace import trace

    (tmp_path / "model.py").write_text(MODEL)
    loaded = load_model(str(tmp_path / "model.py"))
    profile = trace(loaded)

    found = calibrate("cpu", 1, quick=True, dtypes=["fp32"], loaded=loaded, profile=profile)

    assert sum(row.count for row in found.layers) == len([layer for layer in profile.layers if layer.modules])
    for row in found.layers:
        times = (row.predicted_forward_s, row.predicted_backward_s, row.measured_forward_s, row.measured_backward_s)
        assert all(0 < seconds < 1 for seconds in times)
        assert row.error == pytest.approx(sum(times[:2]) / sum(times[2:]) - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "nowhere/device.toml"], "nowhere does not exist"),
        (["-o", "device.json"], "a device file ends in .toml"),
        (["-o", "other.toml"], "other.toml exists and is no device file"),
        (["--dtype", "int3"], "--dtype int3: unknown; the dtypes are bf16, fp16, fp32"),
        (["--ranks", "4096"], "--ranks 4096: give 1 to "),
        (["--device-kind", "tpu"], "the kinds are auto, cpu, cuda"),
        (["profile.json"], "only its profile: give the model itself"),
    ],
)
def test_bad_input_is_told_in_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(tmp_path)
    (tmp_path / "other.toml").write_text("[tool]\n")

    code = run_plan("calibrate", *arguments)

    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "device.toml").exists()


def test_an_earlier_device_file_is_replaced(tmp_path: Path) -> None:
    save_device(fitted(), tmp_path / "device.toml")

    check_device_output(tmp_path / "device.toml")
