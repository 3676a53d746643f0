"""Which dims the work of an operator runs over: batch, sequence, heads, hidden, vocabulary, expert.

Batch and sequence are observed: what grows with them in runs at two batch sizes and three lengths. The others are
those of weights: which group of weights tensor parallelism may cut, or an expert bank holds, the operator belongs to.
"""

import math
from typing import Literal

from .model_profile import Bytes, LayerClass, ModelProfile, OpProfile, amount_at

Dimension = Literal["batch", "sequence", "heads", "hidden", "vocabulary", "expert"]

_OF_CUT: dict[str, Dimension] = {
    "attention": "heads",
    "mlp": "hidden",
    "head": "vocabulary",
    "embedding": "vocabulary",
}


def dimensions(profile: ModelProfile, layer_class: int, operator: int) -> dict[Dimension, float]:
    """Dim -> power with which the operator's work (FLOPs, or bytes moved where it has none) grows with it.

    Powers of a mixture lie in between: reading weights does not grow with the batch. "sequence" is there only in
    profiles of several lengths.
    """
    costs = profile.classes[layer_class].whole
    op = costs.operators[operator]
    found: dict[Dimension, float] = {}
    if (power := _power(_work(op, 1), _work(op, 2), 2)) > 0:
        found["batch"] = power
    for other in profile.other_lengths[:1]:
        like = other.classes[layer_class].whole.operators
        if operator < len(like) and like[operator].name == op.name and other.seq_len and profile.seq_len:
            power = _power(_work(like[operator], 1), _work(op, 1), profile.seq_len / other.seq_len)
            if power > 0:
                found["sequence"] = power
    for name in _of_weights(profile.classes[layer_class], op):
        found[name] = 1.0
    return found


def _work(op: OpProfile, batch: int) -> float:
    return amount_at(op.flops, batch) or _bytes(op.moved, batch)


def _bytes(moved: Bytes, batch: int) -> float:
    return moved.at(batch, 2)


def _power(less: float, more: float, times: float) -> float:
    """The power p with more = less x times^p, rounded to a tenth; 0 if either is 0."""
    return round(math.log(more / less, times), 1) if less > 0 and more > 0 else 0.0


def _of_weights(layer_class: LayerClass, op: OpProfile) -> list[Dimension]:
    found: list[Dimension] = []
    for cut in layer_class.cuts:
        between = cut.kind == "attention" and op.kind == "attention"
        if (op.kind in ("matmul", "embedding") and op.module in (*cut.columns, *cut.rows)) or between:
            found.append(_OF_CUT[cut.kind])
    if op.kind == "matmul" and any(f"{op.module}.".startswith(f"{bank.module}.") for bank in layer_class.experts):
        found.append("expert")
    return list(dict.fromkeys(found))
