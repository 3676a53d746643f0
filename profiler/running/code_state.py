"""What the code of a model reaches beside its modules: names of its files that functions speak of, attributes of its
classes. Counters and tables that a forward changes are kept there, too."""

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
"""Where classes of objects come from that may hold what a forward changes, beside files of the model's own."""


@dataclass(frozen=True)
class Names:
    """Names of a file or a class that code may bind anew, with ways to bind one and to take it out again. owner: by id.
    whose: by name. only: those that count; None: all of a class but what Python puts there."""

    owner: int
    whose: str
    space: Mapping[str, Any]
    bind: Callable[[str, Any], None]
    unbind: Callable[[str], Any]
    only: frozenset[str] | None = None

    def found(self) -> dict[str, Any]:
        """What is bound now."""
        if self.only is None:
            return {name: value for name, value in self.space.items() if not name.startswith("__")}
        return {name: self.space[name] for name in self.only if name in self.space}


class ReachedCode:
    """Goes from classes and functions of a model to all others that they speak of, in files that are not installed as
    packages. names: is told which they may bind anew. value: is given what is found under names, to look inside."""

    def __init__(self, names: Callable[[Names], None], value: Callable[[Any], None]) -> None:
        self._names = names
        self._value = value
        self._seen: set[type | FunctionType] = set()
        self._spoken: dict[int, frozenset[str]] = {}
        self._waiting: list[type | FunctionType] = []
        self._runs = False

    def enter(self, code: type | FunctionType) -> None:
        """Go to a class or a function, and from there on."""
        self._waiting.append(code)
        if self._runs:  # what is found on the way waits
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
    """Names that code speaks of, with those of functions inside of it."""
    inside = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_words, inside))
