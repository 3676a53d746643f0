"""Parameters of a test of which some are left to pytest -m slow: those that others cover in part."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def but(values: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """The values, those of `slow` marked as such."""
    return [_marked(value, value in slow) for value in values]


def but_these(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The values, all but those of `quick` marked slow."""
    return [_marked(value, value not in quick) for value in values]


def but_first(values: Iterable[Any], count: int) -> list[Any]:
    """The values, all but the first `count` marked slow."""
    return [_marked(value, i >= count) for i, value in enumerate(values)]


def _marked(value: Any, is_slow: bool) -> Any:
    """A parameter; a tuple holds those of several."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow if is_slow else ())
