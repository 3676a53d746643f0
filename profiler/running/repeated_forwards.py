"""What a model repeats in its backward by calling torch.utils.checkpoint itself, seen from outside."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import checkpoint


@contextmanager
def repeating_under(mode: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Meanwhile forwards that are repeated are so under a mode for torch's functions, as they first ran: an outer mode
    is not there in backward."""

    def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with mode():
            return function(*args, **kwargs)

    with repeating_as(lambda function, given: partial(again, function)):
        yield


@contextmanager
def repeating_as(again: Callable[[Callable[..., Any], Any], Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile what is repeated is what `again` makes of a forward and of (args, kwargs) that it is first given, which
    torch's options come before."""

    def made(original: Callable[..., Iterator[None]], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(again(function, (args, kwargs)), *args, **kwargs)

    with _around(made), patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=_own_metadata):
        yield


def _own_metadata(x: torch.Tensor) -> dict[str, Any]:
    """What a tensor that is computed again is compared by, whatever modes say of its shape meanwhile."""
    with torch._C.DisableTorchFunction():
        return checkpoint._default_meta_extractor(x)


@contextmanager
def noting_repeated(begins: Callable[[bool], None], ends: Callable[[], None]) -> Iterator[None]:
    """Meanwhile it is told where a forward begins that backward will repeat, whether in contexts of its own
    (context_fn, as selective checkpoints are), and where it ends."""

    def made(
        original: Callable[..., Iterator[None]],
        function: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Callable[[], Any] = checkpoint.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        begins(context_fn is not checkpoint.noop_context_fn)
        yield from original(function, preserve_rng_state, context_fn, *args, **kwargs)
        ends()

    with _around(made):
        yield


def _around(made: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Every checkpoint that is not reentrant goes through one function of torch's, by whatever name it was imported."""
    original = checkpoint._checkpoint_without_reentrant_generator
    return patch.object(checkpoint, "_checkpoint_without_reentrant_generator", partial(made, original))
