"""How many layers of a plan have some property, counted as people count layers: without embedding and head."""

from collections import Counter
from collections.abc import Iterable

from .document import LayerPlan, Plan, Recompute, parts_of


def blocks_of(plan: Plan) -> list[LayerPlan]:
    """The layers that people count as a model's: those whose module class occurs several times, whatever their sizes;
    all layers if every one has a class of its own."""
    layers = plan.layers
    sizes = Counter(_module(layer) for layer in layers)
    return [layer for layer in layers if sizes[_module(layer)] > 1] or layers


def _module(layer: LayerPlan) -> str:
    """Class of the layer's module. Profiles number several layer classes of one module class from the second on
    ("Bottleneck.2")."""
    name, _, number = layer.layer_class.rpartition(".")
    return name if number.isdigit() else layer.layer_class


def blocks_at(plan: Plan, position: int) -> int:
    """Number of the plan's blocks that a pipeline rank holds."""
    blocks = {layer.name for layer in blocks_of(plan)}
    return sum(layer.name in blocks for stage in plan.stages_of(position) for layer in plan.stages[stage].layers)


def recompute_shares(plan: Plan, kinds: Iterable[Recompute]) -> dict[Recompute, str]:
    """Kind of recompute -> how many layers have it, in words ("10 of 32 layers"); without kinds that no layer has."""
    return {kind: share for kind in kinds if (share := _share(plan, kind))}


def parts_kinds(plan: Plan) -> list[Recompute]:
    """All different recomputes of parts in the plan."""
    return list(dict.fromkeys(layer.recompute for layer in plan.layers if parts_of(layer.recompute)))


def _share(plan: Plan, kind: Recompute) -> str:
    blocks = blocks_of(plan)
    among = sum(layer.recompute == kind for layer in blocks)
    in_all = sum(layer.recompute == kind for layer in plan.layers)
    if not in_all:
        return ""
    if not among:
        return f"{in_all} layer{'s' if in_all > 1 else ''} outside of the blocks"
    return "every layer" if among == len(blocks) else f"{among} of {len(blocks)} layers"
