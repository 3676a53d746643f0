"""Joins columns into a pipeline by dynamic programming over candidate bottlenecks: exact, and the ILP's oracle."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .columns import Chain, Choice, Prices

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Assignment:
    """Stages of one shape: per stage its composition and options; `seconds` is the closed form of the step."""

    seconds: float
    compositions: tuple[int, ...]
    choices: tuple[Choice, ...]


def scan(prices: Prices, cutoff_s: float = float("inf")) -> Assignment | None:
    """The assignment of least closed-form step time, or None if nothing fits or nothing is faster than `cutoff_s`.

    For every candidate T of the slowest stage the cheapest way through the chain with no stage above T is a shortest
    path; T runs upwards from the least feasible one until (m - 1) T alone cannot win any more. The end of the step
    (the slowest stage's once_s) is bounded in turn, from the loosest bound down.
    """
    chain, shape = prices.chain, prices.shape
    stages, more = shape.pipeline, shape.num_microbatches - 1
    if stages > chain.num_layers:
        return None
    matrices = [_matrices(prices, chain, stage, cutoff_s) for stage in range(stages)]
    best: tuple[float, list[int]] | None = None
    cutoff = cutoff_s
    once_bound = float("inf")
    least_once = _least_bottleneck([once for _, once in matrices], [seconds for seconds, _ in matrices])
    if least_once is None:
        return None
    while True:
        allowed = [np.where(once <= once_bound, seconds, np.inf) for seconds, once in matrices]
        found = _cheapest(allowed, more, cutoff - least_once)
        if found is None:
            break
        cuts = found[1]
        once = max(float(matrices[s][1][cuts[s], cuts[s + 1]]) for s in range(stages))
        if found[0] + once < cutoff:
            cutoff = found[0] + once
            best = cutoff, cuts
        if once <= least_once:
            break
        once_bound = np.nextafter(once, -np.inf)
    if best is None:
        return None
    cuts = best[1]
    compositions = tuple(int(chain.composition_of[cuts[s], cuts[s + 1]]) for s in range(stages))
    choices = tuple(prices.on(s).choice(c, shape.in_flight(s)) for s, c in enumerate(compositions))
    return Assignment(best[0], compositions, choices)


def _matrices(prices: Prices, chain: Chain, stage: int, cutoff_s: float) -> tuple[Floats, Floats]:
    """([start][end] -> seconds per micro-batch, seconds once) of a stage; infinite where it does not fit."""
    seconds, once = prices.on(stage).price(stage, cutoff_s)
    table = chain.composition_of
    legal = table >= 0
    return np.where(legal, seconds[table], np.inf), np.where(legal, once[table], np.inf)


def _cheapest(matrices: list[Floats], more: int, cutoff: float) -> tuple[float, list[int]] | None:
    """Least (m - 1) max + sum over the stages' seconds below `cutoff`, and the cuts that give it."""
    free = _shortest(matrices, np.inf)
    if free is None:
        return None
    if more == 0:
        return free if free[0] < cutoff else None
    values = np.unique(np.concatenate([m[np.isfinite(m)] for m in matrices]))
    least = _least_bottleneck(matrices, matrices)
    assert least is not None
    best: tuple[float, list[int]] | None = None
    for bottleneck in values[np.searchsorted(values, least) :]:
        if more * bottleneck + free[0] >= cutoff:
            break
        path = _shortest(matrices, bottleneck)
        if path is not None and more * bottleneck + path[0] < cutoff:
            cutoff = more * bottleneck + path[0]
            best = cutoff, path[1]
    return best


def _shortest(matrices: list[Floats], bottleneck: float) -> tuple[float, list[int]] | None:
    """Shortest way through the chain, one interval per stage, none above `bottleneck`: (sum, cuts)."""
    num_positions = len(matrices[0])
    reached = np.full(num_positions, np.inf)
    reached[0] = 0.0
    parents = []
    for matrix in matrices:
        steps = reached[:, None] + np.where(matrix <= bottleneck, matrix, np.inf)
        parents.append(np.argmin(steps, axis=0))
        reached = np.min(steps, axis=0)
    if not np.isfinite(reached[-1]):
        return None
    cuts = [num_positions - 1]
    for parent in reversed(parents):
        cuts.append(int(parent[cuts[-1]]))
    return float(reached[-1]), cuts[::-1]


def _least_bottleneck(values: list[Floats], feasible: list[Floats]) -> float | None:
    """Least possible maximum of `values` over all ways through the chain along finite entries of `feasible`."""
    reached = np.full(len(values[0]), np.inf)
    reached[0] = -np.inf
    for value, seconds in zip(values, feasible, strict=True):
        step = np.maximum(reached[:, None], np.where(np.isfinite(seconds), value, np.inf))
        reached = np.min(step, axis=0)
    return float(reached[-1]) if np.isfinite(reached[-1]) else None
