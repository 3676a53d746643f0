"""Decorators that keep results. `kept` keeps them as long as the document lives that they were made from, because
profiles are large and priced many times; `memo` and `memo_by` as long as the object lives whose method made them."""

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

_Document = TypeVar("_Document")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self")
_Given = TypeVarTuple("_Given")

_UNKNOWN: Any = object()


def kept(make: Callable[[_Document], _Result]) -> Callable[[_Document], _Result]:
    """`make`, called once for each object. Equal objects do not share results, because comparing them would cost more
    than most results. What `make` returns must not hold the object itself, or neither is ever freed."""
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


def memo(method: Callable[[_Self, *_Given], _Result]) -> Callable[[_Self, *_Given], _Result]:
    """A method that is called once for each combination of arguments. Its results are stored in the object, and freed
    with it."""
    place = f"memo of {method.__qualname__}"

    @wraps(method)
    def found(self: _Self, *given: *_Given) -> _Result:
        known = self.__dict__.get(place)
        if known is None:
            known = self.__dict__[place] = {}
        result: _Result = known.get(given, _UNKNOWN)
        if result is _UNKNOWN:
            result = known[given] = method(self, *given)
        return result

    return found


def memo_by(
    key: Callable[[Any, *_Given], Hashable],
) -> Callable[[Callable[[_Self, *_Given], _Result]], Callable[[_Self, *_Given], _Result]]:
    """A decorator like `memo`, for a method whose results depend on less than its arguments. `key` returns what they
    depend on, and the method is called once for each key."""

    def decorated(method: Callable[[_Self, *_Given], _Result]) -> Callable[[_Self, *_Given], _Result]:
        place = f"memo of {method.__qualname__}"

        @wraps(method)
        def found(self: _Self, *given: *_Given) -> _Result:
            known = self.__dict__.get(place)
            if known is None:
                known = self.__dict__[place] = {}
            at = key(self, *given)
            result: _Result = known.get(at, _UNKNOWN)
            if result is _UNKNOWN:
                result = known[at] = method(self, *given)
            return result

        return found

    return decorated
