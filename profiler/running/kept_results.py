"""What a model's code keeps for its next call outside of its modules: results of functions (functools.lru_cache), and
entries in dicts and lists of its files and classes. What a run on fake tensors keeps there must not reach other
runs."""

import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..semantics.own_code import is_own_file

_LRU: type = type(functools.lru_cache(int))
_TABLES = (dict, OrderedDict, defaultdict)
_LISTS = (list, deque)
_KEEPING = (*_TABLES, *_LISTS, _LRU, FunctionType, staticmethod, classmethod)

_functions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Function that keeps its results -> how many it had computed when it was last looked at."""

_has_run = False
"""Whether anything has run on fake tensors since kept results were last forgotten."""

_num_installed = 0
"""Number of imported modules that are not the user's, when all functions were last searched."""


@contextmanager
def fakes_forgotten() -> Iterator[None]:
    """When it ends, results that code has kept of runs on fake tensors are forgotten."""
    try:
        yield
    finally:
        forget_fakes()


def note_run() -> None:
    """Note that something runs on fake tensors, or builds a model on the meta device: its code may keep such
    tensors."""
    global _has_run
    _has_run = True


def forget_other_runs() -> None:
    """Before a run on fake tensors: forget what was kept of other runs, whose tensors must not mix with its own."""
    if _has_run:
        forget_fakes()
    note_run()


def forget_fakes() -> None:
    """Clear functions that have kept fake tensors or tensors on the meta device, and take fake tensors out of dicts and
    lists in files and classes that are not installed as packages. A run on real tensors would be given them."""
    global _has_run
    _has_run = False
    files = [module for module in list(sys.modules.values()) if is_own_file(module)]
    all_held = _held_by(files)
    for function in _with_new_results(all_held, len(sys.modules) - len(files)):
        if _has_fakes(_results(function), or_meta=True):
            function.cache_clear()
            _functions[function] = 0
    for held in all_held:
        if type(held) in _TABLES and _has_fakes(held.values()):
            for key in [key for key, value in held.items() if _has_fakes([value])]:
                del held[key]
        elif type(held) in _LISTS and _has_fakes(held):
            kept = [value for value in held if not _has_fakes([value])]
            held.clear()
            held.extend(kept)


def _held_by(files: Iterable[ModuleType]) -> list[Any]:
    """The values in files and their classes that may keep something, each once: all files share one __builtins__."""
    spaces = (vars(holder) for file in files for holder in _holders(file))
    held = (held for space in spaces for held in list(space.values()) if type(held) in _KEEPING)
    return list({id(each): each for each in held}.values())


def _with_new_results(all_held: Iterable[Any], num_installed: int) -> Iterator[Any]:
    """Functions that have kept results since they were last looked at, of those that the user's files hold. If packages
    were imported since, all objects are searched, which takes 50 to 100 ms; but not those that a process has from the
    one it was copied from (gc.freeze)."""
    global _num_installed
    found = [x for held in all_held for x in _keeping(held)]
    if _num_installed != num_installed:
        _num_installed = num_installed
        found += [x for x in gc.get_objects() if type(x) is _LRU]
    for function in found:
        _functions.setdefault(function, 0)
    for function, before in list(_functions.items()):
        now = function.cache_info().misses
        if now != before:
            _functions[function] = now
            yield function


def _keeping(held: Any, depth: int = 2) -> Iterator[Any]:
    """Functions that keep results: the value itself, or functions that it wraps, as decorators do."""
    held = getattr(held, "__func__", held) if isinstance(held, staticmethod | classmethod) else held
    if type(held) is _LRU:
        yield held
    elif depth and isinstance(held, FunctionType) and held.__closure__:
        for inside in gc.get_referents(*held.__closure__):
            yield from _keeping(inside, depth - 1)


def _results(function: Any) -> Iterator[Any]:
    """All results that a function keeps. The garbage collector finds them in a dict, or beside one if their number is
    limited."""
    for held in gc.get_referents(function):
        yield from held.values() if type(held) is dict else (held,)


def _holders(file: ModuleType) -> Iterator[ModuleType | type]:
    """A file and its classes: where code of a model may keep something."""
    yield file
    for held in list(vars(file).values()):
        if isinstance(held, type) and held.__module__ == file.__name__:
            yield held


def _has_fakes(values: Iterable[Any], or_meta: bool = False, depth: int = 2) -> bool:
    """Whether one of the values is a fake tensor, or a tuple, list or dict that holds one. or_meta: a tensor on the
    meta device counts, too; not for files, which may hold some for themselves."""
    for value in values:
        if isinstance(value, FakeTensor) or (or_meta and isinstance(value, torch.Tensor) and value.is_meta):
            return True
        inside = value.values() if type(value) in _TABLES else value if type(value) in (list, tuple) else ()
        if depth and inside and _has_fakes(inside, or_meta, depth - 1):
            return True
    return False
