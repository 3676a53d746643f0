"""Lower bounds, in many shapes of a family, on the bytes that are there only during a layer's turn. Under fully_shard
these are its gathered parameters, those that are gathered ahead, and its gradients until they are sharded.

A layer of experts gathers gigabytes for its turn, and what a stage keeps must leave room for them. The numbers are at
most LayerCost.transient_bytes; at most ending_bytes, if every pass reduces gradients; and with a layer after them in
their stage, at most LayerCost.reducing_bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Flags, Floats
from ..cost.kinds import Kind
from ..cost.layer_cost import CostModel
from ..cost.memory_cost import MASTER_BYTES
from ..cost.transient_cost import Turn, Working, transients
from ..plan.shape import LayerOption, Shape


@dataclass(frozen=True)
class Gathered:
    """Columns of what one kind of layer gathers and reduces: elements of all its parameters, of trainable ones, of
    those whose gradients are reduced, and of what is gathered ahead; number of ranks that shard them; whether copies
    stay until the last micro-batch; and whether fully_shard handles the layers at all."""

    gathered: Floats
    trainable: Floats
    reduced: Floats
    ahead: Floats
    sharded_over: Floats
    copies_stay: Flags
    sharded: Flags


def passing_bytes(
    model: CostModel,
    kind: Kind,
    shape: Shape,
    ways: Sequence[LayerOption],
    kept: Floats,
    columns: Gathered,
    resharded: Flags,
) -> tuple[Floats, Floats]:
    """([way to recompute][shape] -> bytes; the same for a layer with one of its kind after it in its stage, whose
    gradients are being reduced). shape: one shape of the family; kept: [way] -> least bytes that the layer keeps of a
    micro-batch; resharded: the column of whether it gives its gathered parameters back."""
    forward, backward, passed = np.array([model.working_bytes(kind, shape, way) for way in ways]).T[:, :, None]
    least = np.broadcast_to(np.maximum(forward, backward), (len(ways), len(columns.sharded)))
    if model.ends_in_loss(kind, shape):
        return least, least
    element_bytes, whole = model.training.compute_bytes, columns.reduced * MASTER_BYTES
    turn = Turn(
        copy=columns.gathered * element_bytes,
        fetched=columns.ahead * element_bytes,
        new=columns.trainable * element_bytes,
        whole=whole,
        sharded_over=columns.sharded_over,
        resharded=resharded,
        copies_stay=columns.copies_stay,
        in_root=kind.is_in_root(shape),
    )
    found = transients(Working(forward, backward, passed, 0.0), turn, kept[:, None], model.profile.returns_loss)
    most = np.where(columns.copies_stay, found.transient, found.ending)  # gradients that wait are not reduced each time
    paired = np.maximum(found.transient, found.waiting + (0.0 if turn.in_root else whole))
    return np.where(columns.sharded, most, least), np.where(columns.sharded, np.maximum(most, paired), least)
