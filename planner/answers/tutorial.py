"""Model parallelism as tutorials show it for two GPUs, as plans with a price: a half on each, or the last quarter back
on the first GPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import Estimate, estimate
from ..plan.document import Plan
from ..plan.legality import legal_cuts
from ..plan.making import make_plan
from ..plan.schedules import Schedule
from ..plan.shape import LayerOption, Shape
from .explain import does_not_fit
from .why_not import priced_answer

_FEWEST_LAYERS = 4
"""Fewest layers with which the end of the model can be put back on the first GPU."""

_LEFT_OUT = "where ranks hold several stages, the search tries cuts that balance the ranks"


@dataclass(frozen=True)
class Lesson:
    """A split that tutorials show, as a plan of the same job, and how it compares with the plan."""

    name: str
    sentence: str
    plan: Plan
    estimate: Estimate


def lessons(plan: Plan, found: Estimate, profile: ModelProfile) -> tuple[Lesson, ...]:
    """Splits that tutorials show for two GPUs, compared with the plan; empty for other numbers of GPUs, or if the model
    cannot be cut so. As in the tutorials the whole batch passes at once, so one GPU works while the other waits."""
    if plan.cluster.num_devices != 2:
        return ()
    return tuple(_priced(plan, found, profile, *each) for each in _splits(profile))


def _splits(profile: ModelProfile) -> Iterator[tuple[Schedule, tuple[int, ...]]]:
    """(schedule, first layer of every stage but the first) of each split: two halves; and a quarter and the last
    quarter on one GPU, with the two quarters between them on the other."""
    places, num_layers = legal_cuts(profile), len(profile.layers)
    if places:
        yield "gpipe", (min(places, key=lambda place: abs(place - num_layers / 2)),)
    quarters = [min(places, key=lambda place: abs(place - share * num_layers / 4)) for share in (1, 2, 3) if places]
    if num_layers >= _FEWEST_LAYERS and len(set(quarters)) == len(quarters) > 1:
        yield "zb-v", tuple(quarters)


def _priced(plan: Plan, found: Estimate, profile: ModelProfile, schedule: Schedule, cuts: tuple[int, ...]) -> Lesson:
    batch = plan.training.global_batch
    chunks = (len(cuts) + 1) // 2
    shape = Shape(1, 1, 1, 2, batch, 1, schedule=schedule, virtual_stages=chunks)
    bounds = (0, *cuts, len(profile.layers))
    sizes = [b - a for a, b in pairwise(bounds)]
    other = make_plan(profile, plan.cluster, plan.training, shape, [[LayerOption()] * size for size in sizes])
    priced = estimate(other, profile)
    names = [layer.name for layer in profile.layers]
    held = [_named(names[a:b]) for a, b in pairwise(bounds)]
    if chunks == 1:
        name = f"{held[0]} on GPU 0, {held[1]} on GPU 1"
    else:
        name = f"{held[0]} on GPU 0, {_named(names[bounds[1] : bounds[3]])} on GPU 1, {held[3]} back on GPU 0"
    if not priced.fits:
        return Lesson(name, f"{name}: {does_not_fit(other, priced)}", other, priced)
    return Lesson(name, priced_answer(name, other, priced, plan, found, _LEFT_OUT).sentence, other, priced)


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if len(names) > 2 else " and ".join(names)
