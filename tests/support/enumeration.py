"""All plans of a shape, enumerated without bounds, columns or compositions."""

import itertools
from collections.abc import Sequence

from meshwright.planner.plan.document import Plan, Recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.schedules import ZERO_BUBBLE
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec
from meshwright.profiler.model.model_profile import LayerClass, ModelProfile


def plans_of(shape: Shape, model: ModelProfile, on: ClusterSpec, training: TrainingSpec) -> "list[Plan]":
    """All cuts and all per-layer options of a shape; with zero bubbles nothing is recomputed."""
    num_layers = len(model.layers)
    reshards = (False, True) if shape.sharded_over > 1 and shape.pipeline == 1 else (shape.reshard,)
    ways = [ways_of([model.classes[layer.layer_class]]) for layer in model.layers]
    if shape.schedule in ZERO_BUBBLE:
        ways = [[] for _ in ways]
    options = [[LayerOption(r, s) for r in ("none", *each) for s in reshards] for each in ways]
    plans = []
    for cuts in itertools.combinations(range(1, num_layers), shape.pipeline * shape.virtual_stages - 1):
        bounds = (0, *cuts, num_layers)
        for choice in itertools.product(*options):
            stages = [choice[a:b] for a, b in itertools.pairwise(bounds)]
            plans.append(make_plan(model, on, training, shape, stages))
    return plans


def ways_of(classes: Sequence[LayerClass]) -> list[Recompute]:
    """Kinds of recompute that make a difference to one of the classes."""
    costs = [c.whole for c in classes]
    found: list[Recompute] = ["full"]
    found += ["selective"] if any(c.selective != c.saved for c in costs) else []
    return found + (["attention"] if any(c.attention != c.saved for c in costs) else [])
