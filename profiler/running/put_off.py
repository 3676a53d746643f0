"""What a layer holds between its backward for inputs and its backward for weights, which zero-bubble schedules put off.

torch's pipelining goes back to the inputs of a stage, and catches on the way the gradients that weights need: those of
every operator that reads a weight, or what is made of one (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024). The
graph behind these operators stays, with all that it has saved. What lies between the loss and the first of them does
not.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch


class PutOff:
    """The operators of one layer whose gradients of weights are put off. outputs: tensors that the backward begins at;
    inputs: leaves in place of what comes from other layers; weights: parameters.

    note: called in the backward with each gradient that waits.
    """

    def __init__(
        self,
        outputs: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        weights: Iterable[torch.Tensor],
        note: Callable[[torch.Tensor], None],
    ) -> None:
        self._note = note
        nodes = _from_last_to_first([node for output in outputs if (node := output.grad_fn) is not None])
        arriving, own = ({id(tensor) for tensor in tensors} for tensors in (inputs, weights))
        reaches_input, reaches_weight = _reaching(nodes, arriving), _reaching(nodes, own)
        waiting = [
            node
            for node in nodes
            if node in reaches_input
            and any(next_ in reaches_weight and next_ not in reaches_input for next_ in _next(node))
        ]
        self._spent = {node._sequence_nr() for node in set(nodes) - set(_from_last_to_first(waiting))}
        self._handles = [node.register_prehook(self._wait) for node in waiting]

    def spent(self, savers: Collection[int]) -> bool:
        """Whether a tensor saved by these nodes (their numbers in autograd's sequence) is freed once the gradients of
        inputs are there."""
        return bool(savers) and self._spent.issuperset(savers)

    def end(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _wait(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None:
                self._note(gradient)


def _next(node: Any) -> list[Any]:
    return [next_ for next_, _ in node.next_functions if next_ is not None]


def _from_last_to_first(nodes: Sequence[Any]) -> list[Any]:
    """These nodes of autograd's graph and all nodes after them, each behind all those that lead to it."""
    order: list[Any] = []
    seen = set(nodes)
    stack = [(node, iter(_next(node))) for node in nodes]
    while stack:
        node, others = stack[-1]
        following = next((other for other in others if other not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(_next(following))))
    return order[::-1]


def _reaching(nodes: Sequence[Any], leaves: Collection[int]) -> set[Any]:
    """The nodes that lead to one of these leaves. nodes: in the order of `_from_last_to_first`; leaves: by id."""
    found: set[Any] = set()
    for node in reversed(nodes):
        if id(getattr(node, "variable", None)) in leaves or any(next_ in found for next_ in _next(node)):
            found.add(node)
    return found
