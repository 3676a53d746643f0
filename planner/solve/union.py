"""Searches several spaces as one: returns their plans together, and a lower bound for all of them."""

import time
from collections import Counter
from collections.abc import Sequence

from ..plan.pins import Pins
from .explore import MAX_NEAR, WINDOW, Explorer, Outcome, Progress


def explore_all(
    explorer: Explorer,
    spaces: Sequence[Pins],
    deadline_s: float,
    near: int = MAX_NEAR,
    progress: Progress | None = None,
    cutoff_s: float = float("inf"),
) -> Outcome:
    """What Explorer.explore finds in all of these spaces, which have no plan in common. Each gets an even share of the
    time that is left, and looks only for what comes near the best of the spaces before it."""
    found = Outcome()
    if len(spaces) == 1:
        return explorer.explore(spaces[0], deadline_s, near=near, progress=progress, cutoff_s=cutoff_s)
    rejected: Counter[str] = Counter()
    bounds, window = [], WINDOW if near > 0 else 0.0
    for place, pins in enumerate(spaces):
        now = time.monotonic()
        until_s = now + (deadline_s - now) / (len(spaces) - place)
        best = found.best
        least_s = cutoff_s if best is None else min(cutoff_s, best.seconds * (1 + window))
        told = None if progress is None else _part_of(progress, place, len(spaces))
        outcome = explorer.explore(pins, until_s, near=near, progress=told, cutoff_s=least_s)
        found.solved += outcome.solved
        rejected += Counter(outcome.rejected)
        bounds.append(outcome.bound)
        found.total += outcome.total
        found.pruned += outcome.pruned
        found.num_solved += outcome.num_solved
        found.complete &= outcome.complete
    found.rejected, found.bound = dict(rejected), min(bounds)
    return found


def _part_of(progress: Progress, place: int, count: int) -> Progress:
    """A progress that reports that of search number `place`, out of `count`, as that of all."""
    return lambda what, share: progress(what, (place + share) / count)
