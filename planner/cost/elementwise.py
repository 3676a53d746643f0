"""The few operations that formulas need for numbers and for arrays alike. With them one formula prices one shape, or
bounds all shapes of a family at once."""

import math
from typing import Any, TypeVar

import numpy as np

from ..arrays import Flags, Floats

Values = TypeVar("Values", float, Floats)
"""A number, or a table of them."""

Flag = bool | Flags
"""True or false, or a table of such."""


def least(first: Values, second: Values | float) -> Values:
    """The smaller of two values, entry by entry."""
    found: Any = np.minimum(first, second) if _are_tables(first, second) else min(first, second)
    result: Values = found
    return result


def most(first: Values, second: Values | float) -> Values:
    """The larger of two values, entry by entry."""
    found: Any = np.maximum(first, second) if _are_tables(first, second) else max(first, second)
    result: Values = found
    return result


def root(values: Values) -> Values:
    """The square root, entry by entry."""
    found: Any = np.sqrt(values) if isinstance(values, np.ndarray) else math.sqrt(values)
    result: Values = found
    return result


def choose(flag: Flag, then: Values | float, otherwise: Values | float) -> Values:
    """The first where the flag is set, else the second."""
    found: Any = np.where(flag, then, otherwise) if isinstance(flag, np.ndarray) else then if flag else otherwise
    result: Values = found
    return result


def _are_tables(first: object, second: object) -> bool:
    return isinstance(first, np.ndarray) or isinstance(second, np.ndarray)
