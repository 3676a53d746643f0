"""Norms of many tensors in a few calls."""

from collections.abc import Sequence

import torch

_NARROW = (torch.bfloat16, torch.float16, torch.complex32)


@torch.no_grad()
def norms_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[tensor] -> its Euclidean norm in float64, 0 if it is empty; not finite if an element is not. Integers are taken
    as numbers: there are parameters of them, which nothing trains.

    (Neither is it where squares overflow, beyond 1e19 in fp32. The largest element would tell the two apart, and takes
    twelve times as long on a CPU.)
    """
    held = [
        tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
        for tensor in tensors
        if tensor.numel()
    ]
    if not held:
        return torch.zeros(len(tensors), dtype=torch.float64, device=device)
    found: dict[int, torch.Tensor] = {}
    for is_narrow in (False, True):  # in 16 bits a norm has three digits, and ends at 65,504 in fp16
        which = [i for i, tensor in enumerate(held) if (tensor.dtype in _NARROW) == is_narrow]
        wide = (torch.float64 if device.type == "cpu" else torch.float32) if is_narrow else None
        if which:
            found |= zip(which, torch._foreach_norm([held[i] for i in which], dtype=wide), strict=True)
    norms = [found[i] for i in range(len(held))]
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    known = torch.stack(norms).double()
    if len(held) == len(tensors):
        return known
    every = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    every[[i for i, tensor in enumerate(tensors) if tensor.numel()]] = known
    return every
