"""torch.distributions on tensors that have no numbers of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.distributions import Distribution


@contextmanager
def unvalidated() -> Iterator[None]:
    """While it lasts, distributions do not check the numbers that they are given, unless they are told to. Such a check
    can only raise an error, and would always do so for fake tensors and for placeholders of other stages."""
    with patch.object(Distribution, "_validate_args", False):
        yield
