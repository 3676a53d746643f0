"""The weights of a model that is being trained, written by its ranks as others read them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..planner.plan.document import Plan
from .apply import AppliedModel
from .parallel.mesh import RankMesh
from .parallel.stage_module import stages_in
from .parallel.whole_matrices import whole_rows, whole_size
from .state.checkpoint import Checkpoints
from .state.weight_files import Piece, WeightFiles, WeightFormat, cast

PIECE_BYTES = 256 * 2**20
"""About how much of a parameter ranks gather at a time; what they gather it in takes up to three times as much."""

_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def export_model(
    model: AppliedModel,
    plan: Plan,
    mesh: RankMesh,
    ranks: Checkpoints,
    folder: Path,
    kind: WeightFormat,
    dtype: torch.dtype | None,
) -> None:
    """Write the weights; files are dealt out to the ranks of a stage, which gather for each other, a piece at a time.

    Every rank must call it. Raises OSError on every rank if one of them cannot write, and ValueError for what the
    format cannot hold.
    """
    tied = {name: names[0] for names in plan.model.ties for name in names}
    own_names = {tied.get(name, name): name for name in reversed(model.parameters)}
    present = model.module.state_dict().keys()
    elsewhere = ranks.buffers_elsewhere()
    named = {n.removeprefix(model.prefix): b for n, b in model.module.named_buffers() if n in present}
    buffers = {name: buffer for name, buffer in named.items() if name not in elsewhere}
    position = mesh.coordinates["pipeline"]
    mine: tuple[int, _Shapes, _Shapes] | None = None
    if mesh.is_first_of_stage:
        parameters = {
            stored: (tuple(whole_size(model, name, model.parameters[name])), model.parameters[name].dtype)
            for stored, name in reversed(own_names.items())
        }
        mine = position, parameters, {name: (tuple(b.shape), b.dtype) for name, b in buffers.items()}
    shapes = _by_stage([part for part in ranks.on_all(mine) if part is not None])
    every = {name: shape for held in shapes.values() for name, shape in held.items()}
    begins = [next(iter(held)) for held in shapes.values() if held]
    files = WeightFiles(folder, cast(every, dtype), kind, begins=begins)
    ranks.from_first(files.begin)

    def pieces(names: list[str]) -> Iterator[Piece]:
        for name in names:
            if name in own_names:
                own = own_names[name]
                found = whole_rows(model, mesh, own, model.parameters[own].detach(), PIECE_BYTES)
                yield from ((name, first, rows) for first, rows in found)
            elif mesh.is_first_of_stage:
                yield name, 0, buffers[name]

    stage_ranks = [rank for rank in range(plan.degrees.num_devices) if plan.coordinates(rank)["pipeline"] == position]
    error: Exception | None = None
    own_files = {file: names for file, names in files.files.items() if names[0] in shapes[position]}
    for i, (file, names) in enumerate(own_files.items()):
        gathered = pieces(names)
        has_buffers = not own_names.keys() >= set(names)  # of which replicas have their own; the first one's count
        is_writer = mesh.is_first_of_stage if has_buffers else stage_ranks[i % len(stage_ranks)] == mesh.rank
        if is_writer and error is None:
            try:
                files.write(file, gathered)
            except OSError as problem:
                error = problem
        for _ in gathered:  # in what is left the other ranks count on this one
            pass
    failed = [problem for problem in ranks.on_all(error) if problem is not None]
    if failed:
        raise OSError(f"the weights were not written to {folder}: {failed[0]}")
    ranks.from_first(files.finish)
    stages = stages_in(model.module)  # a rank's part is no model of its own where it has several stages
    config: Any = getattr(stages[0].model if stages else model.model, "config", None)
    if mesh.rank == 0 and hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)


def _by_stage(told: list[tuple[int, _Shapes, _Shapes]]) -> dict[int, _Shapes]:
    """Position in the pipeline, in order -> what is written there: its parameters, and its buffers, that no earlier one
    has. told: (position, parameters, buffers) of each."""
    stages = sorted(told, key=lambda stage: stage[0])
    found: dict[int, _Shapes] = {at: {} for at, _, _ in stages}
    known: set[str] = set()
    for at, held in [*((at, own) for at, own, _ in stages), *((at, own) for at, _, own in stages)]:
        found[at] |= {name: shape for name, shape in held.items() if name not in known}
        known |= held.keys()
    return found
