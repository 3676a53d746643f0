"""Attention to some of the keys: output and log-sum-exp of each query, and gradients from those of all keys.

Fused kernels of torch where they return and take the log-sum-exp (CPU; CUDA in half precision without a mask), else
plain products in fp32 of some queries at a time, so that memory grows with the length and not with its square. Backward
kernels multiply probabilities, exp(scores - log-sum-exp), so that given the log-sum-exp over all keys they find the
share of these keys.
"""

from collections.abc import Iterator

import torch

aten = torch.ops.aten

_SCORES = 2**26
"""Most scores that are held at once (256 MiB in fp32), unless those of a single query are more."""


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp in fp32, -inf where all keys are masked) of (batch, heads, tokens, width).

    Several query heads may share one of keys and values. mask: True or 0 where a query meets a key.
    """
    if _on_cpu_kernel(query, value):
        bias = _bias(mask, query)
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        if bias is not None:  # the kernel says 0 where all is masked
            lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
        return output, lse
    if _on_cuda_kernel(query, value, mask):
        found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
        return found[0], found[1]
    outputs, sums = [], []
    keys, values = _spread(key, query).float(), _spread(value, query).float()
    for block in _blocks(query, key):
        scores = _scores(query, keys, mask, is_causal, scale, block)
        lse = scores.logsumexp(-1)
        outputs.append((scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0) @ values)
        sums.append(lse)
    return torch.cat(outputs, -2).to(query.dtype), torch.cat(sums, -1)


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values, from these keys alone. output, lse: those of attention to all keys."""
    if mask is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a query that meets no key at all has probabilities of 0
    if _on_cpu_kernel(query, value):
        bias = _bias(mask, query)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse.contiguous(), 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return found[0], found[1], found[2]
    if _on_cuda_kernel(query, value, mask):
        length, others = query.shape[-2], key.shape[-2]
        none = torch.empty(0, dtype=torch.uint64, device=query.device)  # random state: nothing is dropped out
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, output, lse.contiguous(), None, None, length, others, 0.0, is_causal, state, none,
            scale=scale,
        )  # fmt: skip
        return found[0], found[1], found[2]
    keys, values = _spread(key, query).float(), _spread(value, query).float()
    key_grad, value_grad = torch.zeros_like(keys), torch.zeros_like(values)
    query_grads = []
    for block in _blocks(query, key):
        probabilities = (_scores(query, keys, mask, is_causal, scale, block) - lse[..., block].unsqueeze(-1)).exp()
        own = grad[..., block, :].float()
        from_output = (own * output[..., block, :].float()).sum(-1, keepdim=True)
        by_score = probabilities * (own @ values.transpose(-1, -2) - from_output) * scale
        query_grads.append(by_score @ keys)
        key_grad += by_score.transpose(-1, -2) @ query[..., block, :].float()
        value_grad += probabilities.transpose(-1, -2) @ own
    return torch.cat(query_grads, -2).to(query.dtype), _gathered(key_grad, key), _gathered(value_grad, value)


def _blocks(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Ranges of queries whose scores are held at once."""
    samples, heads, length, _ = query.shape
    each = max(1, _SCORES // max(1, samples * heads * key.shape[-2]))
    for start in range(0, max(1, length), each):
        yield slice(start, min(start + each, length))


def _on_cpu_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _on_cuda_kernel(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % 8 == 0 and width <= 256
    return query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16) and mask is None and fits


def _bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(query.dtype)
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)


def _scores(
    query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float, block: slice
) -> torch.Tensor:
    """Scores of a block of the queries, in fp32. keys: as many heads as the queries have, in fp32."""
    scores = query[..., block, :].float() @ keys.transpose(-1, -2) * scale
    if is_causal:
        rows = torch.arange(block.start, block.stop, device=query.device).unsqueeze(-1)
        scores = scores.masked_fill(torch.arange(keys.shape[-2], device=query.device) > rows, -torch.inf)
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., block, :]
    bias = _bias(mask, query)
    return scores if bias is None else scores + bias


def _spread(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, repeated so that there is one for every head of the queries."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _gathered(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gradients of keys or values, summed over the heads of queries that share one."""
    total: torch.Tensor = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    return total.to(like.dtype)
