"""Refitting memory: what processes held moves what a device holds beside tensors, and the counted rest stays."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.executor.telemetry import peak_memory_bytes, restart_peak_memory
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.refit import on_device
from meshwright.planner.cost.refit_memory import MeasuredMemory, refit_memory
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.calibrate import save_device
from meshwright.profiler.machine.cluster import Device, load_device
from support.synthetic import cluster, device, layer_class, profile

MODEL = profile([layer_class("block", 1e9, 20_000_000, 8e6, 1e6)], [0] * 8)
PRESET = device(context=300e6, fragmentation=0.06)
TRUTH = PRESET.model_copy(update={"context": 460e6, "communicators": {"data_shard": 320e6, "pipeline": 40e6}})

SHAPES = (
    Shape(8, 1, 1, 1, micro_batch=2, num_microbatches=1),
    Shape(8, 1, 1, 1, micro_batch=1, num_microbatches=2),
    Shape(1, 8, 1, 1, micro_batch=2, num_microbatches=1, reshard=True, gradient_sync="every"),
    Shape(2, 4, 1, 1, micro_batch=2, num_microbatches=1),
    Shape(2, 1, 1, 4, micro_batch=2, num_microbatches=4, schedule="1f1b"),
)


def seen(on: Device, noise: float = 0.0) -> list[MeasuredMemory]:
    """What processes of several plans hold on a device, at every pipeline coordinate."""
    found = []
    for number, shape in enumerate(SHAPES):
        count = len(MODEL.layers) // shape.pipeline
        stages = [[LayerOption("none", shape.reshard)] * count] * shape.pipeline
        plan = make_plan(MODEL, cluster(on=PRESET), TrainingSpec(global_batch=16, seq_len=64), shape, stages)
        for position, memory in enumerate(estimate(on_device(plan, on), MODEL).memory):
            held = memory.device_bytes * (1 + noise * (-1) ** (number + position))
            found.append(MeasuredMemory(shape.label, plan, MODEL, position, "resident", held))
    return found


def test_what_a_process_holds_beside_tensors_is_found() -> None:
    found = refit_memory(PRESET, seen(TRUTH))

    held = [each.bytes for each in seen(TRUTH)]
    assert max(abs(before / size - 1) for before, size in zip(found.before, held, strict=True)) > 0.2
    assert max(abs(after / size - 1) for after, size in zip(found.after, held, strict=True)) < 0.01
    assert found.context == pytest.approx(460e6, rel=0.1)
    assert found.communicators["data_shard"] == pytest.approx(320e6, rel=0.2)


def test_before_and_after_are_what_the_evaluator_says_with_these_constants() -> None:
    observed = seen(TRUTH, noise=0.01)

    found = refit_memory(PRESET, observed)

    fitted = found.of(PRESET, len(observed))
    for told, on in ((found.before, PRESET), (found.after, fitted)):
        for size, each in zip(told, observed, strict=True):
            memory = estimate(on_device(each.plan, on), MODEL).memory[each.position]
            assert size == pytest.approx(memory.device_bytes)
    assert "fitted to the measured memory of 8 processes" in fitted.sources["context"]


def test_one_wild_process_bends_little_and_no_constant_is_below_zero() -> None:
    observed = seen(TRUTH)
    wild = [replace(observed[0], bytes=3 * observed[0].bytes), *observed[1:]]

    bent = refit_memory(PRESET, wild)

    rest = [abs(after / each.bytes - 1) for after, each in zip(bent.after[1:], observed[1:], strict=True)]
    assert max(rest) < 0.03
    tiny = refit_memory(PRESET, [replace(each, bytes=1e6) for each in observed])
    assert min(tiny.context, tiny.fragmentation, *tiny.communicators.values()) == 0.0


def test_what_the_allocator_of_a_gpu_holds_tells_its_fragmentation_alone() -> None:
    observed = [
        replace(
            each,
            kind="reserved",
            bytes=1.15 * estimate(on_device(each.plan, PRESET), MODEL).memory[each.position].allocated_bytes,
        )
        for each in seen(PRESET)
    ]

    found = refit_memory(PRESET, observed)

    assert found.fragmentation == pytest.approx(0.15, abs=0.01)
    assert (found.context, found.communicators) == (pytest.approx(PRESET.context), {})


def test_fitted_memory_is_in_the_device_file(tmp_path: Path) -> None:
    fitted = refit_memory(PRESET, seen(TRUTH)).of(PRESET, 8)

    save_device(fitted, tmp_path / "device.toml")

    again = load_device(str(tmp_path / "device.toml"))
    assert again.communicators == pytest.approx(fitted.communicators, rel=1e-3)
    assert again.communicator_of("data_shard") > 2e8
    assert again.communicator_of("tensor") == PRESET.communicator


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no measured memory"):
        refit_memory(PRESET, [])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux forgets the peak of a process")
def test_peaks_before_a_lap_are_forgotten() -> None:
    cpu = torch.device("cpu")
    held = torch.ones(50_000_000)
    del held
    before = peak_memory_bytes(cpu)

    restart_peak_memory(cpu)

    assert before - peak_memory_bytes(cpu) > 150e6
