"""Activation memory: profile and planner against real forwards and backwards on this CPU, in bfloat16 and float32.

python -m benchmarks.accuracy.memory

Two witnesses: a log of the life of every real storage on small versions of all models, and the resident memory of a
process (VmHWM) on some of them at a larger batch.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.planner.plan.training import Precision
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile

from . import cases, reality
from .predicted import predicted
from .report import Check, off, publish, spread

SIZE = 2
DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

RESIDENT = ("train_gpt", "unet", "t5_small", "llama31_405b", "resnet50")
"""Models whose small versions are run at a batch that takes about this much, to see it in resident memory."""

_RESIDENT_BYTES = 300e6


def layers_alone(profile: ModelProfile) -> dict[str, int]:
    """Module -> class of the layers that are one module with no code after it, as far as a profile can tell."""
    alone: dict[str, int] = {}
    for i, layer in enumerate(profile.layers[:-1]):
        leaving = [t.producer for t in profile.tensors if t.made_by == i]
        if layer.modules == (layer.root,) and all(p.kind == "module" and p.name == layer.root for p in leaving):
            alone[layer.root] = layer.layer_class
    return alone


def rows_of(name: str, loaded: LoadedModel, precision: Precision) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(row of the whole model, rows of its layer classes)."""
    profile = cases.profile_of(loaded)
    alone = layers_alone(profile)
    dtype = DTYPES[precision]
    module, batch = reality.build(loaded, dtype), reality.batch_of(loaded, SIZE, dtype)
    producers = {t.producer.name for t in profile.tensors if t.producer.kind == "module"}
    real = reality.run(loaded, module, batch, list(alone), sorted(producers))
    first = {alone[root]: root for root in reversed(real.by_module)}
    said = predicted(profile, SIZE, precision)
    classes = [
        {
            "model": name,
            "class": profile.classes[index].name,
            "layer": root,
            "profile": profile.classes[index].whole.saved.at(SIZE, dtype.itemsize),
            "real": real.by_module[root],
        }
        for index, root in first.items()
    ]
    whole = {
        "model": name,
        "dtype": precision,
        "kept, planned": said.kept,
        "kept, real": real.kept,
        "kept off": off(said.kept, real.kept),
        "forward peak, real": real.forward_peak,
        "backward peak, real": real.backward_peak,
        "peak, planned": said.peak,
        "peak off": off(said.peak, real.peak),
    }
    return whole, classes


def checks(
    models: Mapping[str, LoadedModel], missing: Sequence[str] = (), precisions: Sequence[Precision] = ("bf16", "fp32")
) -> list[Check]:
    """Tables over models by name."""
    wholes: list[dict[str, Any]] = []
    classes: list[dict[str, Any]] = []
    notes = [*missing, *cases.remarks(models)]
    for name, loaded in models.items():
        for precision in precisions:
            try:
                whole, parts = rows_of(name, loaded, precision)
            except (RuntimeError, NotImplementedError) as error:
                notes.append(f"{name} does not run in {precision} on this CPU: {str(error).splitlines()[0][:100]}")
                continue
            wholes.append(whole)
            classes += parts if precision == "bf16" else []
    for row in classes:
        row["off"] = off(row["profile"], row["real"])
    worse = [max(abs(row["kept off"]), abs(row["peak off"])) for row in cases.judged(wholes)]
    sentence, passed = spread(worse, 0.03, 0.9, 0.08)
    kept, _ = spread([row["kept off"] for row in cases.judged(wholes)], 0.03, 0.9, 0.08)
    peak, _ = spread([row["peak off"] for row in cases.judged(wholes)], 0.03, 0.9, 0.08)
    differing = [row for row in classes if abs(row["off"]) > 0.001]
    by_class, classes_passed = spread([row["off"] for row in cases.judged(classes)], 0.03, 0.9, 0.08)
    return [
        Check(
            name="memory",
            title=f"Activations of small versions, {SIZE} samples",
            target="kept and peak within 3% for 90% of the models, none beyond 8%",
            columns={
                "model": "",
                "dtype": "",
                "kept, planned": "B",
                "kept, real": "B",
                "kept off": "%",
                "forward peak, real": "B",
                "backward peak, real": "B",
                "peak, planned": "B",
                "peak off": "%",
            },
            rows=wholes,
            verdict=f"{sentence} (kept alone: {kept}; peak alone: {peak})",
            passed=passed,
            notes=(
                "kept: alive between forward and backward. Parameters, their gradients and the batch are not counted",
                "planned: the planner's own account of one stage without parameters: what all layers keep, and the "
                "largest over layers of what is kept when it runs backward, gradients that wait for earlier layers, "
                "and its own transient",
                *notes,
            ),
        ),
        Check(
            name="memory",
            title="Saved for backward in bf16, by layer class: those that differ by more than 0.1%",
            target="within 3% for 90% of the classes, none beyond 8%",
            columns={"model": "", "class": "", "layer": "", "profile": "B", "real": "B", "off": "%"},
            rows=differing,
            verdict=f"classes of layers that are one module: {by_class}",
            passed=classes_passed,
            notes=(
                "not in fp32: there a copy to fp32 is no copy, so a layer whose first step that is saves its own input "
                "instead, which counts with the layer before",
            ),
        ),
    ]


def resident(models: Mapping[str, LoadedModel]) -> Check:
    """Growth of a process's resident memory over a forward and backward, of small versions of the zoo by name."""
    rows: list[dict[str, Any]] = []
    for source in cases.sources():
        name = cases.name_of(source)
        if name not in RESIDENT or name not in models:
            continue
        profile = cases.profile_of(models[name])
        size = round(_RESIDENT_BYTES / predicted(profile, 1, "fp32").peak)
        said = predicted(profile, size, "fp32", num_microbatches=2)
        grown = _grown(source, size)
        rows.append(
            {
                "model": name,
                "samples": size,
                "peak, planned": said.peak,
                "resident": grown,
                "off": off(said.peak, grown),
            }
        )
    sentence, passed = spread([row["off"] for row in rows], 0.03, 0.9, 0.08)
    return Check(
        name="memory",
        title="Resident memory of a process, small versions in fp32, second micro-batch",
        target="within 3% for 90%, none beyond 8%",
        columns={"model": "", "samples": "", "peak, planned": "B", "resident": "B", "off": "%"},
        rows=rows,
        verdict=sentence,
        passed=passed,
        notes=(
            "resident: VmHWM over a forward and backward less VmRSS before it; gradients are there before. Workspaces "
            "inside of kernels (those of convolutions, here) are in it, and in no prediction",
        ),
    )


def _grown(source: Path, size: int) -> int:
    command = [sys.executable, "-m", "benchmarks.accuracy.resident", str(source), str(size)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.split()[-1])


def main() -> int:
    """Print and write all tables."""
    models, missing = cases.small_models()
    return publish([*checks(models, missing), resident(models)])


if __name__ == "__main__":
    sys.exit(main())
