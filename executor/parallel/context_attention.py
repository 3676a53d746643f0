"""Attention over a sequence of which every rank of a group holds a part: ring, all-gather and all-to-all, exact.

Legend: c ranks, s tokens. For ring and all-gather rank r holds two chunks of s / 2c tokens, the r-th from the start and
the r-th from the end, so that all have equally many scores of causal attention (zig-zag: Brandon et al. 2023,
arXiv:2311.09431; Llama 3, arXiv:2407.21783, section 3.3.2). Of rank r's queries and rank k's keys there meet

    k = r: all, causally    k < r: all queries, the first chunk of keys    k > r: the second chunk of queries, all keys

in one call of a fused kernel each; outputs are merged by their log-sum-exp (Liu et al. 2023, arXiv:2310.01889). For
all-to-all (Jacobs et al. 2023, arXiv:2309.14509) rank r holds the r-th of c chunks, and changes tokens for heads.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, once_differentiable

from ...planner.plan.document import ContextKind
from ...profiler.semantics.token_marks import Held, Spans, joined, taken
from ..torch_compat import all_gather_single, group_of_name, reduce_scatter_single
from .attention_kernels import attention_backward, attention_forward
from .shared_gradients import hand_on_difference

Pair = tuple[torch.Tensor, torch.Tensor]


def own_spans(kind: ContextKind, length: int, rank: int, num_ranks: int) -> Spans:
    """The ranges of tokens of a sequence that a rank holds."""
    if kind == "all_to_all":
        size = length // num_ranks
        return ((rank * size, (rank + 1) * size),)
    size, last = length // (2 * num_ranks), 2 * num_ranks - 1 - rank
    return joined([(rank * size, (rank + 1) * size), (last * size, (last + 1) * size)])


class ContextAttention:
    """What attends in place of scaled_dot_product_attention: a profiler.token_slices.Attend."""

    def __init__(self, kind: ContextKind, group: dist.ProcessGroup) -> None:
        self._kind = kind
        self._group = group.group_name
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def spans(self, length: int) -> Spans:
        """The tokens of a sequence that this rank holds."""
        return own_spans(self._kind, length, self._rank, self._num_ranks)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """The output for this rank's queries."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if mask is not None and self._kind != "all_to_all" and mask.shape[-2] > 1:
            mask = taken(mask, Held(mask.ndim - 2, mask.shape[-2], self.spans(mask.shape[-2])))
        output: torch.Tensor = _Attention.apply(query, key, value, mask, is_causal, scale, self._kind, self._group)
        return hand_on_difference(output, query, key, value)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float,
        kind: ContextKind,
        group: str,
    ) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            ctx.options = is_causal, scale, kind, group
            # One operator, of which selective recompute keeps what it returns; its parts, where they are to be counted.
            run = _forward if isinstance(query, FakeTensor) else torch.ops.meshwright.scaled_dot_product_of_ranks
            output, *saved = run(query, key, value, mask, *ctx.options)
            if kind != "all_to_all":
                saved = [query, key, value, output, saved[-1]]
            ctx.save_for_backward(*saved, mask)
            return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch._C.DisableTorchFunction():
            query, key, value, output, lse, mask = ctx.saved_tensors
            is_causal, scale, kind, name = ctx.options
            group = group_of_name(name)
            backward = _BACKWARDS[kind]
            grads = backward(grad, query, key, value, output, lse, mask, is_causal, scale, group)
            return (*grads, None, None, None, None, None)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    kind: str,
    group: str,
) -> list[torch.Tensor]:
    """[output, log-sum-exp]; for all-to-all [output, and then queries, keys, values, output and log-sum-exp of this
    rank's heads]."""
    own = group_of_name(group)
    if kind == "all_to_all":
        query, key, value = (_to_heads(x, own) for x in (query, key, value))
        output, lse = attention_forward(query, key, value, _of_own_heads(mask, own), is_causal, scale)
        return [_to_tokens(output, own), query, key, value, output, lse]
    blocks = _passed_on(key, value, own) if kind == "ring" else _gathered(key, value, own)
    merged: _Merged | None = None
    for source, (keys, values) in blocks:
        part = _RingBlock(source, dist.get_rank(own), dist.get_world_size(own), query, is_causal)
        result = attention_forward(
            part.rows(query), part.columns(keys), part.columns(values), part.mask(mask), part.diagonal, scale
        )
        if merged is None:
            merged = _Merged(*result)
        else:
            merged.add(part.first_row, *result)
    assert merged is not None
    return [merged.output.to(query.dtype), merged.lse]


class _RingBlock:
    """Which of a rank's queries attend to which of another rank's keys, and whether causally."""

    def __init__(self, source: int, rank: int, num_ranks: int, query: torch.Tensor, is_causal: bool) -> None:
        count = query.shape[-2]
        self.diagonal = is_causal and source == rank
        self.first_row = count // 2 if is_causal and source > rank else 0
        self._columns = count // 2 if is_causal and source < rank else count
        self._spans = own_spans("ring", count * num_ranks, source, num_ranks)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x for these queries. x: a row for every query of the rank."""
        return x[..., self.first_row :, :]

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x for these keys. x: a row for every key of the other rank."""
        return x[..., : self._columns, :]

    def mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The columns of a mask for the other rank's keys. (There is no mask where attention is causal, so all keys
        count.)"""
        return None if mask is None else torch.cat([mask[..., start:end] for start, end in self._spans], -1)


class _Merged:
    """The result of attention to the keys seen so far, in fp32."""

    def __init__(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        self.output, self.lse = output.float(), lse

    def add(self, first_row: int, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the result of attention to further keys, for the queries from `first_row` on."""
        before, seen = self.lse[..., first_row:], self.output[..., first_row:, :]
        total = torch.logaddexp(before, lse)
        old, new = ((x - total).exp().nan_to_num(0.0).unsqueeze(-1) for x in (before, lse))
        seen.mul_(old).add_(output * new)
        before.copy_(total)


def _backward_blocks(
    blocks: Iterator[tuple[int, Pair]],
    returned: Callable[[int, Pair], None],
    grad: torch.Tensor,
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Gradient of the queries. returned: is called with (rank, gradients of its keys and values) for each block of
    keys."""
    query_grad = torch.zeros_like(query, dtype=torch.float32)
    grad = grad.contiguous()
    for source, (keys, values) in blocks:
        part = _RingBlock(source, dist.get_rank(group), dist.get_world_size(group), query, is_causal)
        rows = (part.rows(x) for x in (grad, query, output))
        own_grad, own_query, own_output = rows
        found = attention_backward(
            own_grad,
            own_query,
            part.columns(keys),
            part.columns(values),
            own_output,
            lse[..., part.first_row :],
            part.mask(mask),
            part.diagonal,
            scale,
        )
        query_grad[..., part.first_row :, :] += found[0]
        returned(source, (_padded(found[1], keys), _padded(found[2], values)))
    return query_grad.to(query.dtype)


def _padded(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient of keys or values, with zeros for those that no query attended to."""
    missing = like.shape[-2] - grad.shape[-2]
    return torch.nn.functional.pad(grad, (0, 0, 0, missing)) if missing else grad


def _ring_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Backward of ring attention. Keys and values go round once more, and their gradients after them: these start at
    the next rank, and end where the keys and values belong."""
    group: dist.ProcessGroup = rest[-1]
    own: list[Pair] = []
    travelling: list[Callable[[], torch.Tensor]] = []

    def returned(source: int, grads: Pair) -> None:
        if not own:
            own.append(grads)
            return
        packed = _packed(*grads)
        if travelling:
            packed += travelling.pop()()
        travelling.append(_shifted(packed, group, tag=1))

    query_grad = _backward_blocks(_passed_on(key, value, group), returned, grad, query, *rest)
    key_grad, value_grad = own[0]
    others = _unpacked(travelling[0](), key, value)
    return query_grad, key_grad + others[0], value_grad + others[1]


def _gather_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """Backward of attention to gathered keys. These are gathered again; their gradients are summed and scattered."""
    group: dist.ProcessGroup = rest[-1]
    packed = _for_each_rank(key, value, group)

    def returned(source: int, grads: Pair) -> None:
        for place, found in zip(_unpacked(packed[source], key, value), grads, strict=True):
            place.copy_(found)

    query_grad = _backward_blocks(_gathered(key, value, group), returned, grad, query, *rest)
    own = torch.empty_like(packed[0])
    reduce_scatter_single(own, packed.flatten(), group=group)
    return query_grad, *_unpacked(own, key, value)


def _heads_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Gradients, exchanged between tokens and heads as the tensors were that they belong to."""
    own = _to_heads(grad, group)
    grads = attention_backward(own, query, key, value, output, lse, _of_own_heads(mask, group), is_causal, scale)
    return tuple(_to_tokens(x.contiguous(), group) for x in grads)


_BACKWARDS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "ring": _ring_backward,
    "all_gather": _gather_backward,
    "all_to_all": _heads_backward,
}


def _passed_on(key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Pair]]:
    """(rank, its keys and values) for all ranks: this rank's own first, then as they come round the ring. The next ones
    are on their way meanwhile."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    held = _packed(key, value)
    for step in range(num_ranks):
        arrives = _shifted(held, group) if step < num_ranks - 1 else None
        yield (rank - step) % num_ranks, _unpacked(held, key, value)
        if arrives is not None:
            held = arrives()


def _shifted(block: torch.Tensor, group: dist.ProcessGroup, tag: int = 0) -> Callable[[], torch.Tensor]:
    """Begin to send a block to the next rank. Returns a function that waits for the block of the rank before, and
    returns that."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    arriving = torch.empty_like(block)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block, ranks[(rank + 1) % len(ranks)], group, tag),
            dist.P2POp(dist.irecv, arriving, ranks[(rank - 1) % len(ranks)], group, tag),
        ]
    )

    def arrived() -> torch.Tensor:
        for request in requests:
            request.wait()
        return arriving

    return arrived


def _gathered(key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Pair]]:
    """(rank, its keys and values) for all ranks, this rank's own first."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    gathered = _for_each_rank(key, value, group)
    all_gather_single(gathered.flatten(), _packed(key, value), group=group)
    for step in range(num_ranks):
        source = (rank - step) % num_ranks
        yield source, _unpacked(gathered[source], key, value)


def _packed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values in one flat tensor; values may be narrower than keys (latent attention)."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Keys and values out of one flat tensor, in the shapes of these."""
    return packed[: key.numel()].view(key.shape), packed[key.numel() :].view(value.shape)


def _for_each_rank(key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """An empty tensor with a row for the keys and values of every rank."""
    return key.new_empty(dist.get_world_size(group), key.numel() + value.numel())


def _to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, heads, own tokens, width) of all heads -> (batch, own heads, tokens, width) of all tokens."""
    return _exchanged(x, 1, 2, group)


def _to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(batch, own heads, tokens, width) of all tokens -> (batch, heads, own tokens, width) of all heads."""
    return _exchanged(x, 2, 1, group)


def _exchanged(x: torch.Tensor, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
    """x after an all-to-all: each rank gets its part of every rank's x along `split`, and joins these along `join`."""
    given = torch.stack(x.chunk(dist.get_world_size(group), split))
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    return torch.cat(taken.unbind(0), join)


def _of_own_heads(mask: torch.Tensor | None, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The part of a mask for the heads that this rank gets; all of it if it is the same for all heads."""
    if mask is None or mask.ndim < 4 or mask.shape[1] == 1:
        return mask
    return mask.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]


torch.library.define(
    "meshwright::scaled_dot_product_of_ranks",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, str kind, str group)"
    " -> Tensor[]",
)
torch.library.impl("meshwright::scaled_dot_product_of_ranks", "default", _forward)
