"""Does a model run on a part of its sequence, as ranks of context parallelism have it? Tried on fake tensors."""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch

from .fake import FakeModel
from .held_tokens import Held, mark_of
from .token_slices import TokenSlices, run_token_by_token

_RANKS = 2


def context_problem(fake: FakeModel, banks: Iterable[str]) -> str:
    """Why it does not, in a few words; '' if it does, or has no sequence. banks: modules that are banks of experts."""
    length = fake.loaded.seq_len
    if length is None:
        return ""
    if fake.mode is None:
        return "it decides by the values of tensors, of which each rank would have others"
    size = max(1, length // (2 * _RANKS))
    tokens = TokenSlices(length, ((0, size), (length - size, length)), _RANKS, rehearsed_attention)
    batch = fake.batch(1, None)
    try:
        with ExitStack() as stack:
            for name in banks:
                module = fake.module.get_submodule(name)
                stack.enter_context(patch.object(module, "forward", partial(run_token_by_token, module.forward)))
            stack.enter_context(fake.running())
            stack.enter_context(tokens)
            loss = fake.loss(batch)
    except ValueError as error:
        return str(error.__cause__ or error).partition("\n")[0]
    if not tokens.started:
        return "no ids of its sequence are looked up in a table, and no features of it meet a weight"
    return "its loss is not a mean over tokens" if isinstance(mark_of(loss), Held) else ""


def rehearsed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """A tensor like the output of attention."""
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
