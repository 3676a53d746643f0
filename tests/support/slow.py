"""Parameters of a test of which some are left to pytest -m slow: those that others cover in part."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def but(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """The values, those of `slow` marked as such."""
    return [pytest.param(value, marks=pytest.mark.slow if value in slow else ()) for value in values]


def but_these(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The values, all but those of `quick` marked slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]


def but_first(values: Iterable[Any], count: int) -> list[Any]:
    """The values (a tuple holds those of several parameters), all but the first `count` marked slow."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if i < count else pytest.mark.slow)
        for i, value in enumerate(values)
    ]
