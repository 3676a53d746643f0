"""Whether a layer has sides that tensor cores load in pieces (a vocabulary of 50,257, say), and what padding them would
save."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ...profiler.machine.units import format_seconds
from ...profiler.model.model_profile import ModelProfile
from ..cost.compute_cost import HALVES, amounts_of, batches_at, operators_s, table_of
from ..cost.estimate import Estimate
from ..cost.kernels import SIDES_ALIGNED, family_of
from ..cost.layer_cost import CostModel
from ..plan.document import Plan
from ..plan.making import shape_of

WORTH = 0.03
"""Share of a step that padding must save, at most, to be mentioned."""


@dataclass(frozen=True)
class Padding:
    """A module whose products are slow because a side is no multiple of 8. seconds: upper bound on what padding would
    save of a step, which may be waiting for something else. share: the same, over the step."""

    module: str
    side: int
    seconds: float
    share: float

    def __str__(self) -> str:
        padded = -(-self.side // SIDES_ALIGNED) * SIDES_ALIGNED
        return (
            f"{self.module}: {self.side:,} is no multiple of {SIDES_ALIGNED}, for which tensor cores are slow: with "
            f"{padded:,} a step would take up to {format_seconds(self.seconds)} less ({self.share:.0%})"
        )


def padding(plan: Plan, found: Estimate, profile: ModelProfile) -> Padding | None:
    """The module that would gain most from padding; None if no module would gain enough. Layers that tensor parallelism
    cuts are left out, because their slices are what counts."""
    device, training = plan.cluster.device, plan.training
    family = family_of(device)
    if family is None or training.precision not in HALVES or not family.unaligned.model_fields_set:
        return None
    model, shape = CostModel(profile, plan.cluster, training), shape_of(plan)
    lost, sides = defaultdict[str, float](float), dict[str, int]()
    for kind, layer in zip(model.kinds, profile.layers, strict=True):
        mode, costs, tensor = model.mode(kind, shape)
        if mode != "whole":
            continue
        table = table_of(costs.operators)
        rows, inner, columns = amounts_of(table, batches_at([shape.samples], tensor)).sides[..., 0]
        weights = table.parts[2] > 0.0
        share = family.unaligned.share((np.where(weights, rows, inner), columns))
        seconds = operators_s(table, model.device, training.precision, training.compute_bytes, shape.samples, tensor)
        for place in np.flatnonzero(table.is_of_weights & (share < 1.0)):
            module = ".".join(filter(None, (layer.root, costs.operators[place].module)))
            lost[module] += plan.num_microbatches * float(seconds[place] * (1.0 - share[place]))
            first, second = int(rows[place] if weights[place] else inner[place]), int(columns[place])
            sides[module] = second if second % SIDES_ALIGNED else first
    if not lost:
        return None
    module = max(lost, key=lambda name: lost[name])
    seconds_lost = lost[module]
    found_share = seconds_lost / found.step_time_s
    return Padding(module, sides[module], seconds_lost, found_share) if found_share >= WORTH else None
