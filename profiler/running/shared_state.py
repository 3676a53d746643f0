"""What several layers change in one forward besides the activations: counters of their files and classes, objects that
they share, sources of random numbers. A stage with only some of these layers would not see what the others change."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .code_state import Names
from .forward_state import Changeable, Reached, place_of, random_draws, version_of

ITERATOR = "an iterator that both hold"
_HELD = "an object that both hold"
_NONE = frozenset[str]()


class SharedState:
    """Follows what several modules can reach and change, and notes which of them do. Tensors that a module keeps are
    left out, for it is seen elsewhere who reads them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        found = {name: _shareable(Reached(module)) for name, module in modules.items()}
        counts = Counter(key for each in found.values() for key in each)
        self._places = {key: place for each in found.values() for key, place in each.items() if counts[key] > 1}
        self._places["dice"] = "Python's or numpy's random numbers", random_draws()
        self._reached = {name: {"dice", *each} for name, each in found.items()}
        self._changers: dict[Any, dict[str, None]] = defaultdict(dict)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, changes by the modules are noted."""
        handles: list[RemovableHandle] = []
        for name, module in self._modules.items():
            begun: list[dict[Any, Any]] = []
            handles.append(module.register_forward_pre_hook(partial(self._begins, begun), prepend=True))
            handles.append(module.register_forward_hook(partial(self._ends, name, begun)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def changed(self) -> dict[str, list[str]]:
        """What several modules have changed, in words -> these modules, in the order in which they ran."""
        return {self._places[key][0]: list(names) for key, names in self._changers.items() if len(names) > 1}

    def _begins(self, begun: list[dict[Any, Any]], module: nn.Module, args: Any) -> None:
        begun.append({key: place.take() for key, (_, place) in self._places.items()})

    def _ends(self, name: str, begun: list[dict[Any, Any]], module: nn.Module, args: Any, output: Any) -> None:
        for key, before in begun.pop().items():
            if key in self._reached[name] and self._places[key][1].differs(before):
                self._changers[key][name] = None


def _shareable(reached: Reached) -> dict[Any, tuple[str, Changeable]]:
    """Key of a thing that modules may share -> (the thing in words, how to see that it has changed)."""
    found: dict[Any, tuple[str, Changeable]] = {}
    for held, apart in reached.dicts:
        found[id(held)] = _HELD, _compared(partial(_entries, held, apart))
    for names in reached.names:
        if names.only is None:
            found[names.owner] = f"attributes of {names.whose}", _compared(partial(_entries, names.space, _NONE))
        for name in names.only or ():
            found[names.owner, name] = f"{name} of {names.whose}", _compared(partial(_bound, names, name))
    for holder in reached.holders:
        is_list = isinstance(holder, list | deque)
        found[id(holder)] = _HELD, _compared(partial(_items, holder)) if is_list else place_of(holder)
    for iterator in reached.iterators:  # how much was taken from one cannot be seen
        found[id(iterator)] = ITERATOR, Changeable(lambda: None, lambda _: True, lambda _: None)
    for number, tensor in reached.tensors.items():
        found[number] = "a tensor that both hold", _compared(partial(_version, tensor))
    return found


def _compared(take: Any) -> Changeable:
    return Changeable(take, lambda value: not _is_same(take(), value), lambda value: None)


def _is_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _entries(held: Mapping[Any, Any], apart: frozenset[str]) -> list[Any]:
    kept = {name: value for name, value in held.items() if name not in apart and not _is_of_tensors(value)}
    return [*kept, *kept.values()]


def _bound(names: Names, name: str) -> list[Any]:
    return _items([names.space[name]] if name in names.space else [])


def _items(holder: Any) -> list[Any]:
    return [value for value in holder if not _is_of_tensors(value)]


def _version(tensor: torch.Tensor) -> list[int]:
    return [version_of(tensor)]


def _is_of_tensors(value: Any) -> bool:
    inside = value if type(value) in (tuple, list) else (value,)
    return all(isinstance(each, torch.Tensor) for each in inside)
