"""What the code of a model reaches besides its modules: names of files that its functions use, and attributes of its
classes. A forward may change counters and tables there."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ..semantics.own_code import is_in_own_file, is_own_file

_LOOKED_INTO = (
    "argparse",
    "builtins",
    "collections",
    "functools",
    "itertools",
    "numpy.random",
    "random",
    "torch",
    "types",
)
"""Modules whose objects may hold what a forward changes, besides objects of the model's own files: beginnings of
names."""


@dataclass(frozen=True)
class Names:
    """The names in a file or a class that code may bind anew, and functions to bind and unbind one. owner: id of the
    file or class. whose: its name. only: the names that count; None: all of a class but those that Python sets."""

    owner: int
    whose: str
    space: Mapping[str, Any]
    bind: Callable[[str, Any], None]
    unbind: Callable[[str], Any]
    only: frozenset[str] | None = None

    def found(self) -> dict[str, Any]:
        """The names that are bound now, with their values."""
        if self.only is None:
            return {name: value for name, value in self.space.items() if not name.startswith("__")}
        return {name: self.space[name] for name in self.only if name in self.space}


class ReachedCode:
    """Follows the classes and functions of a model to all others that their code names, in files that are not installed
    as packages. names: is called with the names that code may bind anew. value: is called with each value found under a
    name, to look inside."""

    def __init__(self, names: Callable[[Names], None], value: Callable[[Any], None]) -> None:
        self._names = names
        self._value = value
        self._seen: set[type | FunctionType] = set()
        self._spoken: dict[int, frozenset[str]] = {}
        self._waiting: list[type | FunctionType] = []
        self._runs = False

    def enter(self, code: type | FunctionType) -> None:
        """Follow a class or a function, and all that it leads to."""
        self._waiting.append(code)
        if self._runs:  # what is found while it runs waits
            return
        self._runs = True
        while self._waiting:
            found = self._waiting.pop()
            if found not in self._seen and any(map(is_in_own_file, getattr(found, "__mro__", (found,)))):
                self._seen.add(found)
                if isinstance(found, type):
                    self._class(found)
                else:
                    self._function(found)
        self._runs = False

    def _class(self, kind: type) -> None:
        self._waiting += kind.__mro__[1:]
        self._names(Names(id(kind), kind.__name__, vars(kind), partial(setattr, kind), partial(delattr, kind)))
        for name, attribute in vars(kind).items():
            functions = list(_functions(attribute))
            for found in functions or ([] if name.startswith("__") else [attribute]):
                self._found(found)

    def _function(self, function: FunctionType) -> None:
        self._value(function)  # what it closes over
        self._in_file(function.__globals__, _words(function.__code__))

    def _in_file(self, space: dict[str, Any], spoken: frozenset[str]) -> None:
        before = self._spoken.get(id(space), frozenset())
        new = spoken - before
        if not new:
            return
        self._spoken[id(space)] = before | new
        whose = Path(space.get("__file__") or space["__name__"]).name
        self._names(Names(id(space), whose, space, space.__setitem__, space.pop, new))
        for name in new & space.keys():
            if isinstance(space[name], FunctionType):
                self._waiting.append(space[name])
            elif not isinstance(space[name], ModuleType):
                self._found(space[name])
            elif is_own_file(space[name]):
                self._in_file(vars(space[name]), spoken)

    def _found(self, value: Any) -> None:
        if isinstance(value, type):
            self._waiting.append(value)
        elif type(value).__module__.startswith(_LOOKED_INTO) or is_in_own_file(type(value)):
            self._value(value)


def _functions(attribute: Any) -> Iterator[FunctionType]:
    """The functions in an attribute of a class: it itself, or of a property, a static or a class method."""
    parts = (attribute.fget, attribute.fset) if isinstance(attribute, property) else (attribute,)
    for part in parts:
        function = getattr(part, "__func__", part) if isinstance(part, staticmethod | classmethod) else part
        if isinstance(function, FunctionType):
            yield function


@cache
def _words(code: CodeType) -> frozenset[str]:
    """Names that occur in a function's code, also in functions inside of it."""
    inside = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_words, inside))
