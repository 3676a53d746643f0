"""Sees which forwards a model repeats in backward by calling torch.utils.checkpoint itself."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import checkpoint


@contextmanager
def repeating_under(mode: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While it lasts, forwards that checkpoint repeats in backward run under a mode of their own for torch's functions,
    because outer modes are not active in backward."""

    def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with mode():
            return function(*args, **kwargs)

    with repeating_as(lambda function, given: partial(again, function)):
        yield


@contextmanager
def repeating_as(again: Callable[[Callable[..., Any], Any], Callable[..., Any]]) -> Iterator[None]:
    """While it lasts, checkpoint repeats again(forward, (args, kwargs)) instead of the forward. args begin with torch's
    own options."""

    def made(original: Callable[..., Iterator[None]], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(again(function, (args, kwargs)), *args, **kwargs)

    with _around(made), patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=_own_metadata):
        yield


def _own_metadata(x: torch.Tensor) -> dict[str, Any]:
    """What checkpoint compares of a tensor that is computed again, without what modes say of its shape."""
    with torch._C.DisableTorchFunction():
        return checkpoint._default_meta_extractor(x)


@contextmanager
def noting_repeated(begins: Callable[[bool], None], ends: Callable[[], None]) -> Iterator[None]:
    """While it lasts, begins(has_context) is called when a forward begins that checkpoint will repeat, and ends() when
    it ends. has_context: whether the checkpoint was given a context_fn, as selective ones are."""

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
    """Put `made` around every checkpoint that is not reentrant: all of them call one function of torch's, by whatever
    name they were imported."""
    original = checkpoint._checkpoint_without_reentrant_generator
    return patch.object(checkpoint, "_checkpoint_without_reentrant_generator", partial(made, original))
