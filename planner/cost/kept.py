"""Keeps what was made from a document for as long as that document lives: profiles are large, and priced many times."""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

_Document = TypeVar("_Document")
_Result = TypeVar("_Result")


def kept(make: Callable[[_Document], _Result]) -> Callable[[_Document], _Result]:
    """`make`, called once for each object. Equal objects do not share results: comparing them would cost more than
    most results. What `make` returns must not hold the object itself, or neither is ever freed."""
    known: dict[int, tuple[weakref.ref[_Document], _Result]] = {}

    @wraps(make)
    def found(document: _Document) -> _Result:
        key = id(document)
        entry = known.get(key)
        if entry is None:
            entry = weakref.ref(document, lambda _: known.pop(key, None)), make(document)
            known[key] = entry
        return entry[1]

    return found
