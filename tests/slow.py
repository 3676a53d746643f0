"""Parameters of a test of which some are left to pytest -m slow: those that others cover in part."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def but(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """The values, those of `slow` marked as such."""
    return [pytest.param(value, marks=pytest.mark.slow if value in slow else ()) for value in values]


def but_first(values: Iterable[Any], count: int) -> list[Any]:
    """The values, all but the first `count` marked slow."""
    return [pytest.param(value, marks=() if i < count else pytest.mark.slow) for i, value in enumerate(values)]
