"""Whether errors of step times rise or fall with the sizes of a run, within families of rows that share all else."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.plan.shape import Shape

from .metrics import time_error
from .pricing import Priced

Floats = NDArray[np.float64]

FEWEST = 12
"""Rows that differ from their family's others in a size, below which it has no slope."""


@dataclass(frozen=True)
class Slope:
    """How much the error of a kind of run changes with each doubling of a size, all other sizes held.

    rows: of families in which the size differs. t: the slope over its standard error, which allows rows of a family to
    err together.
    """

    kind: str
    size: str
    rows: int
    families: int
    slope: float
    t: float


AXES: dict[str, Callable[[Priced], float]] = {
    "micro-batch": lambda p: _shape(p).micro_batch,
    "sequence": lambda p: float(p.row.model["seq_len"]),
    "context": lambda p: _shape(p).context,
    "tensor": lambda p: _shape(p).tensor,
    "pipeline": lambda p: _shape(p).pipeline,
    "ranks": lambda p: float(p.row.cluster["n_gpus"]),
}


def _shape(priced: Priced) -> Shape:
    assert priced.setting is not None
    return priced.setting.shape


def family(priced: Priced) -> tuple[str, ...]:
    """Source, model, device, precision and software of a row."""
    row = priced.row
    software = "" if priced.setting is None else priced.setting.software
    precision = str(row.config["precision"]).split(" (")[0]
    return row.file, str(row.model["name"]), str(row.scoring["gpu"]), precision, software


def slopes(rows: Sequence[Priced], kind_of: Callable[[Priced], str]) -> list[Slope]:
    """The slopes of every kind of run, and of all, along every size, by least squares on all sizes at once with a mean
    for each family."""
    kinds: dict[str, list[Priced]] = defaultdict(list)
    for priced in rows:
        if time_error(priced) is not None and priced.setting is not None:
            kinds["all"].append(priced)
            kinds[kind_of(priced)].append(priced)
    return [slope for kind, part in kinds.items() for slope in _of_kind(kind, part)]


def _of_kind(kind: str, rows: Sequence[Priced]) -> list[Slope]:
    families = [family(priced) for priced in rows]
    weights = np.array([priced.row.weight for priced in rows])
    errors = _within(np.array([time_error(priced) or 0.0 for priced in rows])[:, None], families, weights)[:, 0]
    sizes = np.array([[math.log2(axis(priced)) for axis in AXES.values()] for priced in rows])
    sizes = _within(sizes, families, weights)
    differs = np.abs(sizes) > 1e-9
    told = [place for place in range(len(AXES)) if differs[:, place].sum() >= FEWEST]
    if not told:
        return []
    chosen = sizes[:, told]
    inverse = np.linalg.pinv(chosen.T @ (weights[:, None] * chosen))
    found = inverse @ chosen.T @ (weights * errors)
    left = (weights * (errors - chosen @ found))[:, None] * chosen
    names = sorted(set(families))
    together = np.array([left[[f == name for f in families]].sum(axis=0) for name in names])
    spread = np.sqrt(np.diag(inverse @ (together.T @ together) @ inverse) * len(names) / max(1, len(names) - 1))
    return [
        Slope(
            kind,
            list(AXES)[place],
            int(differs[:, place].sum()),
            len({f for f, there in zip(families, differs[:, place].tolist(), strict=True) if there}),
            float(found[i]),
            float(found[i] / spread[i]) if spread[i] > 0 else 0.0,
        )
        for i, place in enumerate(told)
    ]


def _within(values: Floats, families: Sequence[tuple[str, ...]], weights: Floats) -> Floats:
    """Values less the mean of their family."""
    found = values.copy()
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, name in enumerate(families):
        places[name].append(place)
    for members in places.values():
        found[members] -= np.average(values[members], axis=0, weights=weights[members])
    return found
