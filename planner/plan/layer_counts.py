"""How many layers of a plan are treated in a way, counted as people count them: without embedding and head."""

from collections import Counter
from collections.abc import Iterable

from .document import LayerPlan, Plan, Recompute, parts_of


def blocks_of(plan: Plan) -> list[LayerPlan]:
    """The layers that people count as a model's: those of a module of which there are several, of whatever sizes; all,
    where each is another."""
    layers = plan.layers
    sizes = Counter(_module(layer) for layer in layers)
    return [layer for layer in layers if sizes[_module(layer)] > 1] or layers


def _module(layer: LayerPlan) -> str:
    """The module's class: profiles number the layer classes of one from the second on ("Bottleneck.2")."""
    name, _, number = layer.layer_class.rpartition(".")
    return name if number.isdigit() else layer.layer_class


def blocks_at(plan: Plan, position: int) -> int:
    """How many of a plan's blocks a pipeline rank holds."""
    blocks = {layer.name for layer in blocks_of(plan)}
    return sum(layer.name in blocks for stage in plan.stages_of(position) for layer in plan.stages[stage].layers)


def recompute_shares(plan: Plan, kinds: Iterable[Recompute]) -> dict[Recompute, str]:
    """Kind of recompute -> how many layers have it, in words, of those that some have: "10 of 32 layers"."""
    return {kind: share for kind in kinds if (share := _share(plan, kind))}


def parts_kinds(plan: Plan) -> list[Recompute]:
    """The recomputes of submodules that the plan has, each once."""
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
