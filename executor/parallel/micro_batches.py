"""Cuts a batch into micro-batches, and finds the loss in what a model returns for one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ...planner.plan.document import Plan
from ...planner.plan.schedules import num_microbatches_rule
from ...profiler.model.batches import named_tensors
from ...profiler.model.loaded import unfit_in
from ...profiler.model.model_profile import BatchTensor
from ..torch_compat import source_of

Loss = Callable[[Any, Any], torch.Tensor]

Scale = float | torch.Tensor
"""Factor of a loss; a scalar on the device where reading it would mean to wait."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward of a stage. scale: the weight of its loss in the gradient of the step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any
    scale: Scale


def split_micro_batches(
    tree: Any, count: int, samples: int, planned: Sequence[BatchTensor] = (), batch: Any = None
) -> list[Any]:
    """`count` equal parts of every tensor along its samples; everything else is in every part.

    planned: the tensors of the batch that the profiler saw, which say along which dim samples lie, and how many rows
    each has (nodes of a graph, entries of a bag). A batch that is not like those has samples along its first dims.
    batch: where the planned tensors are found in the tree; default: the tree itself.
    Raises ValueError when no tensor has that many samples, and for what would go whole into every part: numpy arrays
    and objects with tensors.
    """
    leaves, spec = tree_flatten(tree)
    if unfit := unfit_in(tree):
        raise ValueError(f"the batch holds {unfit}")
    dims = _sample_dims(tree if batch is None else batch, samples, planned)
    cut: list[int | None] = [None] * len(leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            cut[i] = dims.get(id(leaf)) if dims else 0 if leaf.dim() and leaf.shape[0] == samples else None
    if count == 1 and dims:
        return [tree]
    if all(dim is None for dim in cut):
        sizes = sorted({leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0})
        raise ValueError(
            f"this rank's batch must hold {samples} samples (micro_batch x num_microbatches), found tensors of "
            f"{', '.join(map(str, sizes)) or 'no'} samples"
        )
    return [
        tree_unflatten([_part(leaf, dim, i, count) for leaf, dim in zip(leaves, cut, strict=True)], spec)
        for i in range(count)
    ]


def num_samples(batch: Any, most: int, planned: Sequence[BatchTensor]) -> int:
    """Number of samples in a batch; `most`, the plan's, if its tensors do not show it. It shows in tensors that the
    plan knows by name, or else in first dims that are all equal."""
    known = _like_planned(batch, planned)
    for tensor, leaf in known:
        growing = [dim for dim, kind in enumerate(tensor.dims) if kind == "batch" and not tensor.counts_rows]
        if leaf.dim() == len(tensor.dims) and len(growing) == 1:
            found, rest = divmod(leaf.shape[growing[0]], tensor.shape[growing[0]])
            if not rest:
                return found
    if known:
        return most
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else most


def check_length(plan: Plan, batch: Any) -> None:
    """Raise ValueError if a batch's sequences do not have the plan's length. Ranks that hold slices must know it: a
    sequence of half the length would be taken for the slice of one of two ranks."""
    for tensor, leaf in _like_planned(batch, plan.model.batch):
        for dim, kind in enumerate(tensor.dims if leaf.dim() == len(tensor.dims) else ()):
            if kind == "sequence" and leaf.shape[dim] != tensor.shape[dim]:
                raise ValueError(
                    f"{tensor.name} of the batch has {leaf.shape[dim]} tokens, but the plan gives ranks slices of "
                    f"sequences of {tensor.shape[dim]}: fill it up (trainer.loader(pad=...) does), or plan again with "
                    f"--seq-len {leaf.shape[dim]}"
                )


def num_microbatches(plan: Plan, samples: int) -> int:
    """Number of micro-batches in a data rank's share of a batch. Raises ValueError unless they are whole, no more than
    the plan's, and as many as its schedule can run."""
    count, rest = divmod(samples, plan.micro_batch)
    most = plan.num_microbatches
    if rest or not 0 < count <= most:
        fewer = f", or fewer by whole micro-batches of {plan.micro_batch}" if most > 1 else ""
        whole = ", the global batch" if samples == plan.training.global_batch and plan.degrees.data > 1 else ""
        raise ValueError(
            f"this rank's batch must hold {plan.micro_batch * most} samples (micro_batch x num_microbatches){fewer}, "
            f"found tensors of {samples} samples{whole}: every data rank gives its own share of a step's samples, as "
            "trainer.loader(dataset) deals them out"
        )
    rule = num_microbatches_rule(plan.schedule, plan.degrees.pipeline, count, plan.degrees.virtual_stages)
    if rule is not None:
        raise ValueError(
            f"{samples} samples are {count} micro-batches of {plan.micro_batch} for each of {plan.degrees.data} data "
            f"ranks, which the plan's schedule cannot run: {rule}"
        )
    return count


def share_of_batch(plan: Plan, global_batch: object, said: str) -> int:
    """Number of samples of a data rank in a global batch of this size. said: who gave the size, in words. Raises
    ValueError unless it is made of whole micro-batches, no more than the plan's, and as many as its schedule can
    run."""
    together = plan.micro_batch * plan.degrees.data
    most = plan.training.global_batch
    if not isinstance(global_batch, int) or not 0 < global_batch <= most or global_batch % together:
        raise ValueError(
            f"{said} is {global_batch!r}: give a multiple of {together} (micro-batches of {plan.micro_batch} on "
            f"{plan.degrees.data} data ranks) up to the plan's {most}"
        )
    share = global_batch // plan.degrees.data
    num_microbatches(plan, share)
    return share


def _sample_dims(batch: Any, samples: int, planned: Sequence[BatchTensor]) -> dict[int, int | None]:
    """Id of each tensor in a batch -> the dim that samples lie along; {} if the batch is not made like the planned
    one."""
    found = named_tensors(batch)
    dims: dict[int, int | None] = {}
    if not planned or found.keys() != {tensor.name for tensor in planned}:
        return {}
    if sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(batch)) != len(found):
        return {}
    for tensor in planned:
        leaf = found[tensor.name]
        growing = [dim for dim, kind in enumerate(tensor.dims) if kind == "batch"]
        if leaf.dim() != len(tensor.dims) or len(growing) > 1:
            return {}
        if growing and not tensor.counts_rows and leaf.shape[growing[0]] != samples * tensor.shape[growing[0]]:
            return {}
        dims[id(leaf)] = growing[0] if growing else None
    return dims if any(dim is not None for dim in dims.values()) else {}


def _like_planned(batch: Any, planned: Sequence[BatchTensor]) -> list[tuple[BatchTensor, torch.Tensor]]:
    """(planned tensor, tensor of the batch with the same name), for all names that are in both."""
    found = named_tensors(batch)
    return [(tensor, found[tensor.name]) for tensor in planned if tensor.name in found]


def _part(leaf: Any, dim: int | None, index: int, count: int) -> Any:
    if dim is None:
        return leaf
    size = leaf.shape[dim] // count
    part = leaf.narrow(dim, index * size, size)
    return part.contiguous() if dim else part


def shapes_in(micro_batch: MicroBatch) -> list[torch.Size]:
    """Shapes of all tensors that the model is given."""
    return [x.shape for x in tree_leaves((micro_batch.args, micro_batch.kwargs)) if isinstance(x, torch.Tensor)]


def own_copy(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch with copies of its tensors. All micro-batches are views of one batch, so if the model wrote into
    one of them, autograd would take the others for changed, too. Inputs and targets that are one tensor stay one."""
    copies: dict[Any, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return copies.setdefault((leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype), leaf.clone())

    args, kwargs, batch = tree_map(copied, (micro_batch.args, micro_batch.kwargs, micro_batch.batch))
    return replace(micro_batch, args=args, kwargs=kwargs, batch=batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in the output of a model that computes its own: .loss, ["loss"], or the first single number with a
    gradient. Without gradients it must be the only single floating-point number. Raises ValueError if there is none, or
    there are several."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    single = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.numel() == 1]
    if torch.is_grad_enabled():
        single = [x for x in single if x.requires_grad][:1]
    able = [x for x in single if x.is_floating_point()]
    if len(able) == 1:
        return able[0].reshape(())
    if able:
        raise ValueError(
            f"the module returned {len(able)} single numbers, and without gradients nothing says which of them is the "
            'loss; return it under a name, {"loss": loss, ...}'
        )
    raise ValueError("the module returned no loss; give a loss(output, batch), or targets in the batch")


def scaled(loss: torch.Tensor, scale: Scale) -> torch.Tensor:
    """The loss times a factor, in the dtype of the loss."""
    return loss * (scale if isinstance(scale, float) else scale.to(loss.dtype))


def counted(loss: torch.Tensor, scale: Scale) -> torch.Tensor:
    """The loss; 0 with a gradient of 0 if its micro-batch has no weight, for a mean over no tokens is not a number."""
    return loss if isinstance(scale, float) else loss.masked_fill(scale == 0, 0.0)


def guarded(output: Any, scale: Scale) -> Any:
    """What a model returned for a micro-batch. If the micro-batch has no weight, the gradients of its tensors become 0:
    a loss that divides by its number of tokens gives 0 / 0 in backward, too, and the model may have computed it
    itself."""
    if isinstance(scale, torch.Tensor):
        nothing = scale == 0
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                _clear_if(nothing, *source_of(tensor))
    return output


def _clear_if(nothing: torch.Tensor, source: Node, number: int) -> None:
    """Set the next gradient of a result to 0 if `nothing` is true; in place where it can be, for it may be as large as
    all logits."""

    def clear(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        hook.remove()  # else a returned parameter would keep the hook
        gradient = gradients[number]
        if gradient is None:
            return gradients
        dense = gradient.is_contiguous()
        cleared = gradient.masked_fill_(nothing, 0.0) if dense else gradient.masked_fill(nothing, 0.0)
        return *gradients[:number], cleared, *gradients[number + 1 :]

    hook = source.register_prehook(clear)
