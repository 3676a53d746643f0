"""The row of numbered blocks that most models are made of. Flags of other frameworks count, cut and recompute these
blocks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...profiler.model.model_profile import LayerProfile
from .document import LayerPlan

_NUMBERED = re.compile(r"(.+)\.(\d+)")


@dataclass(frozen=True)
class BlockRow:
    """Number of layers before the blocks (embeddings), number of blocks, and number of layers after them (norm,
    head)."""

    before: int
    blocks: int
    after: int

    def holds(self, layer: int) -> bool:
        """Whether the layer with this number in the chain is one of the blocks."""
        return self.before <= layer < self.before + self.blocks


def block_row(layers: Sequence[LayerPlan] | Sequence[LayerProfile]) -> BlockRow | None:
    """The blocks of a chain; None if its numbered layers are not one row (T5 has two rows, a U-Net several)."""
    found = [_NUMBERED.fullmatch(layer.root) if layer.modules == (layer.root,) else None for layer in layers]
    places = [place for place, match in enumerate(found) if match]
    names = [(match[1], int(match[2])) for match in found if match]
    if not names or names != [(names[0][0], number) for number in range(len(names))]:
        return None
    if places != list(range(places[0], places[0] + len(places))):
        return None
    return BlockRow(places[0], len(places), len(layers) - places[-1] - 1)
