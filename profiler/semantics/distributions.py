"""Distributions (torch.distributions) where tensors have no numbers of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.distributions import Distribution


@contextmanager
def unvalidated() -> Iterator[None]:
    """Meanwhile distributions look at no number of what they are given, unless they are told to: the only thing that
    comes of looking is an error, which fake tensors and placeholders of other stages would always make."""
    with patch.object(Distribution, "_validate_args", False):
        yield
