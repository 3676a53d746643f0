"""A batch cut into micro-batches, and the loss in what a model makes of one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward of a stage is given; scale: the weight of its loss in the step's gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any
    scale: float


def split_micro_batches(tree: Any, count: int, samples: int) -> list[Any]:
    """`count` equal parts of every tensor whose first dim is `samples`; everything else is in every part.

    Raises ValueError when no tensor has that many samples.
    """
    leaves, spec = tree_flatten(tree)
    batched = [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples for leaf in leaves]
    if not any(batched):
        sizes = sorted({leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0})
        raise ValueError(
            f"this rank's batch must hold {samples} samples (micro_batch x num_microbatches), found tensors of "
            f"{', '.join(map(str, sizes)) or 'no'} samples"
        )
    size = samples // count
    return [
        tree_unflatten(
            [leaf[i * size : (i + 1) * size] if cut else leaf for leaf, cut in zip(leaves, batched, strict=True)], spec
        )
        for i in range(count)
    ]


def shapes_in(micro_batch: MicroBatch) -> list[torch.Size]:
    """Of all tensors that the model is given."""
    return [x.shape for x in tree_leaves((micro_batch.args, micro_batch.kwargs)) if isinstance(x, torch.Tensor)]


def own_copy(micro_batch: MicroBatch) -> MicroBatch:
    """With tensors of its own: all micro-batches are parts of one batch, and writing into one would tell autograd that
    the others have changed, too. What inputs and targets share they go on sharing."""
    copies: dict[Any, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return copies.setdefault((leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype), leaf.clone())

    args, kwargs, batch = tree_map(copied, (micro_batch.args, micro_batch.kwargs, micro_batch.batch))
    return replace(micro_batch, args=args, kwargs=kwargs, batch=batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned that computes its own: .loss, ["loss"], or the first single number."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.requires_grad:
            return leaf.reshape(())
    raise ValueError("the module returned no loss; give a loss(output, batch), or targets in the batch")
