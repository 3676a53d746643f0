"""What fused kernels keep of a forward for its backward: what enters a chain of elementwise kernels, not what they make
on the way, which their backward makes again.

A norm that is written out in fp32, a gate's activation, rotary positions: each is one such chain, from the tensors that
a product, attention, or another module has made, to those that the next product reads. (Transformer Engine's norms and
Megatron's fused SwiGLU keep no more, nor does torch.compile's partitioner where it makes again what it can fuse.)
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from .meters import Op

_LIGHT = ("elementwise", "copy")
"""Kinds of operators that a fused kernel takes in."""

_LAYOUT = "clone"
"""An operator that only changes the layout: a fused kernel writes the layout that its reader needs."""


@dataclass(frozen=True)
class FusedKernels:
    """The storages of a forward that fused kernels treat otherwise. dropped: of those that are saved, what chains make
    on the way; entering: what they keep instead, saved by nobody so far."""

    dropped: frozenset[int]
    entering: frozenset[int]

    @classmethod
    def of(cls, forward: Sequence[Op], saved: Collection[int]) -> "FusedKernels":
        """Of a forward's operators in order."""
        made_by: dict[int, Op] = {}
        needed: set[int] = set()
        for op in forward:
            if not op.is_view:
                for view in op.outputs:
                    made_by.setdefault(view.storage, op)
                if not _is_light(op):
                    needed.update(view.storage for view in op.inputs)
        light = {number for number in saved if number in made_by and _is_light(made_by[number])}
        dropped = {number for number in light if number not in needed or made_by[number].name == _LAYOUT}
        kept = set(saved) - dropped
        return cls(frozenset(dropped), frozenset(_entering(dropped, kept, made_by)) - kept)


def _is_light(op: Op) -> bool:
    """Whether the backward of a fused kernel would compute the operator's results again; not if they are drawn at
    random."""
    return op.kind in _LIGHT and not op.draws


def _entering(dropped: Collection[int], kept: Collection[int], made_by: dict[int, Op]) -> Iterator[int]:
    """Storages that enter the chains of these: results of other kinds of operators and of other modules, tensors that
    no operator made, and copies in another layout. Results of operators without input (arange) are not kept either."""
    waiting, seen = list(dropped), set(dropped)
    while waiting:
        maker = made_by[waiting.pop()]
        for number in {view.storage for view in maker.inputs} - seen:
            seen.add(number)
            before = made_by.get(number)
            inside = before is not None and _is_light(before) and before.module == maker.module
            if inside and number not in kept and maker.name != _LAYOUT:
                waiting.append(number)
            elif before is None or before.inputs:
                yield number
