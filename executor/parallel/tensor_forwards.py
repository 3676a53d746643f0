"""Forwards of modules that tensor parallelism cuts: the local part of the work, and the collectives around it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...profiler.model.model_profile import TensorCut
from ...profiler.semantics.logit_shards import check_range
from ...profiler.tensor_cuts.tensor_rank import OwnHeads, OwnWidth
from .delayed_weights import DelayedWeights, Entered, is_linear, is_transposed, multiplied
from .shared_gradients import unwatched
from .tensor_collectives import GatherAlike, PendingCollective, Slice, SumAlike, call


def product(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x times the module's local weight, no bias."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    if is_linear(module):
        return multiplied(x, weight, is_transposed(module))
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        y: torch.Tensor = module._conv_forward(x, weight, None)
        return y
    raise ValueError(
        f"cannot cut a {type(module).__name__}; tensor parallelism knows Linear, Conv1D, convolutions, Embedding and "
        "EmbeddingBag"
    )


def with_bias(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """y and the module's local bias, if it has one."""
    if module.bias is None:
        return y
    bias: torch.Tensor = module.bias  # type: ignore[assignment]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        bias = bias.view(-1, *(1,) * len(module.kernel_size))
    return y + bias


Collective = Callable[[torch.Tensor, PendingCollective | None], torch.Tensor]
"""The collective on the input of columns; it sums in backward, where it may stay pending."""


class SharedInput:
    """The input of columns after its collective, which runs once for each tensor, though every column asks for it. It
    is forgotten once `num_rows` rows (or heads) of their groups have been reached. delayed: the columns, whose weight
    gradients may be put off. collective: None if all inputs have entered before."""

    def __init__(self, collective: Collective | None, delayed: DelayedWeights, num_rows: int = 1) -> None:
        self._collective = collective
        self._delayed = delayed
        self.num_rows = num_rows
        self._num_done = 0
        self._entered: list[tuple[torch.Tensor, Entered]] = []

    def __call__(self, x: torch.Tensor) -> Entered:
        for source, entered in self._entered:
            if source is x:
                return entered
        entered = Entered(x, {}) if self._collective is None else self._delayed.enter(x, self._collective)
        self._entered.append((x, entered))
        return entered

    def enter_early(self, x: torch.Tensor, collective: Collective) -> torch.Tensor:
        """x after the collective; columns will read the result without another one."""
        entered = self._delayed.enter(x, collective)
        self._entered.append((entered.tensor, entered))
        return entered.tensor

    def done(self) -> None:
        """Note that a row has been reached, so that the columns of its group have run; after the last one all is
        forgotten."""
        self._num_done += 1
        if self._num_done == self.num_rows:
            self.clear()

    def clear(self) -> None:
        """Forget all, for a forward that begins."""
        self._num_done = 0
        self._entered.clear()


def column_forward(module: nn.Module, shared: SharedInput, has_entered: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a column: this rank's output features. shared: the collective on its input, unless
    `has_entered`."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if has_entered:
            return with_bias(module, product(module, x))
        entered = shared(x)
        y = entered.product(module)
        return with_bias(module, product(module, entered.tensor) if y is None else y)

    return unwatched(forward, differs=True)


def whole_forward(
    column: Callable[[torch.Tensor], torch.Tensor], own: OwnWidth
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a column inside of a module whose inputs are shown with one rank's width: it reads the whole
    input."""
    return unwatched(lambda x: column(own.whole(x)), differs=True)


def gathered_forward(
    column: Callable[[torch.Tensor], torch.Tensor], shared: SharedInput, group: dist.ProcessGroup
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a column without a row: its features of all ranks, gathered."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = column(x)
        shared.done()
        return call(GatherAlike, y, y.ndim - 1, group)

    return unwatched(forward, differs=False)


def entry_forward(module: nn.Module, collective: Collective) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a module that is not cut. Each rank uses only what its own features need of the output, so
    gradients are shares, which `collective` sums."""
    forward = module.forward
    return unwatched(lambda x: collective(forward(x), None), differs=True)


def row_forward(
    module: nn.Module, shared: SharedInput, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a row: the sum over ranks of their products. reduce: the sum, of which each rank may keep a
    slice."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        shared.done()
        return with_bias(module, reduce(product(module, x)))

    return unwatched(forward, differs=False)


def embedding_forward(module: nn.Module, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of this rank's vocabulary, 0 for the others, summed over ranks."""
    if (
        not isinstance(module, nn.Embedding)
        or module.max_norm is not None
        or module.scale_grad_by_freq
        or module.sparse
    ):
        raise ValueError(f"cannot cut {module}: only a plain nn.Embedding can be cut by its vocabulary")
    rank, count, padding, whole = dist.get_rank(group), dist.get_world_size(group), module.padding_idx, module.forward

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        rows = module.weight.shape[0]
        check_range(tokens, None, rows * count, "tokens that the embedding is asked for")
        first = rank * rows
        elsewhere = (tokens < first) | (tokens >= first + rows)
        ours = (tokens - first).masked_fill(elsewhere, 0)
        if padding is None:
            y = whole(ours)
        else:
            module.padding_idx = padding - first if first <= padding < first + rows else None
            try:
                y = whole(ours)
            finally:
                module.padding_idx = padding
        return call(SumAlike, y.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)

    return unwatched(forward, differs=False)


def table_forward(module: nn.Module, group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Bags of this rank's features of the rows, then those of all ranks."""
    if (
        not isinstance(module, nn.EmbeddingBag)
        or module.max_norm is not None
        or module.scale_grad_by_freq
        or module.sparse
    ):
        raise ValueError(f"cannot cut {module}: only a plain nn.EmbeddingBag can be cut by its features")

    whole = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        y = whole(*args, **kwargs)
        return call(GatherAlike, y, y.ndim - 1, group)

    return unwatched(forward, differs=False)


def norm_forward(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A group norm of this rank's groups of channels."""
    if not isinstance(module, nn.GroupNorm):
        raise ValueError(f"cannot cut {module}: of norms between cut modules only nn.GroupNorm is known")
    return unwatched(module.forward, differs=True)


def heads_forward(module: nn.Module, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of an embedding that is not cut. It has a feature for each head; a rank goes on with those of its
    heads."""
    forward = module.forward

    def own(indices: torch.Tensor) -> torch.Tensor:
        y = forward(indices)
        return call(Slice, y, y.ndim - 1, group)

    return unwatched(own, differs=True)


def own_heads(cut: TensorCut, group: dist.ProcessGroup) -> OwnHeads:
    """Hooks of the module around a cut that is given tensors with a row for each head: inside it sees this rank's
    rows."""
    take = unwatched(lambda x, dim: call(Slice, x, dim, group), differs=True)
    join = unwatched(lambda x, dim: call(GatherAlike, x, dim, group), differs=False)
    return OwnHeads(cut, take, join)
