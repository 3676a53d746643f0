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

    def made(original: Callable[..., Iterator[None]], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(partial(again, function), *args, **kwargs)

    def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with mode():
            return function(*args, **kwargs)

    with _around(made):
        yield


@contextmanager
def noting_repeated(begins: Callable[[], None], ends: Callable[[], None]) -> Iterator[None]:
    """Meanwhile it is told where a forward begins that backward will repeat, and where it ends."""

    def made(original: Callable[..., Iterator[None]], *args: Any, **kwargs: Any) -> Iterator[None]:
        begins()
        yield from original(*args, **kwargs)
        ends()

    with _around(made):
        yield


def _around(made: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Every checkpoint that is not reentrant goes through one function of torch's, by whatever name it was imported."""
    original = checkpoint._checkpoint_without_reentrant_generator
    return patch.object(checkpoint, "_checkpoint_without_reentrant_generator", partial(made, original))
