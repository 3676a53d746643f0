"""A small saved profile and a way to run the `plan` command in this process, for tests that need no torch."""

from pathlib import Path

import pytest

from meshwright.executor.cli import main
from meshwright.planner.plan.document import AXES, Axis, Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile
from support.synthetic import layer_class, profile

NUM_BLOCKS = 8


def small_profile(scale: float = 1.0) -> ModelProfile:
    """Embedding, equal blocks that tensor parallelism may cut, and a head; scale multiplies the parameters."""
    classes = [
        layer_class("embedding", 1e6, int(2e7 * scale), saved=1e5, inputs=0),
        layer_class("block", 5e10, int(1e8 * scale), saved=2e8, inputs=1e7, transient=1e7, heads=8),
        layer_class("head", 1e10, int(2e7 * scale), saved=5e7, inputs=1e7, transient=5e7),
    ]
    return profile(classes, [0, *[1] * NUM_BLOCKS, 2], crossing=1e7)


def save_profile(folder: Path, name: str = "profile.json", scale: float = 1.0) -> Path:
    """A saved profile in a folder."""
    path = folder / name
    small_profile(scale).save(path)
    return path


def some_plan(
    replicate: int = 1,
    shard: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    per_host: int = 8,
    mesh_axes: tuple[Axis, ...] = AXES,
    micro_batches: int = 4,
) -> Plan:
    """A legal plan of the small profile with the given degrees, layers cut evenly."""
    model = small_profile()
    num_layers = len(model.layers)
    shape = Shape(
        data_replicate=replicate,
        data_shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=1,
        num_microbatches=micro_batches,
        schedule="gpipe" if pipeline > 1 else "none",
        mesh_axes=mesh_axes,
    )
    ends = [(stage + 1) * num_layers // pipeline for stage in range(pipeline)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return make_plan(
        model,
        cluster_of(load_device("h100-80gb"), replicate * shard * tensor * pipeline, per_host),
        TrainingSpec(global_batch=micro_batches * replicate * shard, seq_len=model.seq_len),
        shape,
        [[LayerOption()] * size for size in sizes],
    )


def run_plan(*arguments: str) -> int:
    """Exit code of `plan` with these arguments."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    code = stopped.value.code
    return code if isinstance(code, int) else 0
