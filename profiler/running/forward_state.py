"""What a forward may leave behind in a model: attributes and buffers that it binds anew or writes into, lists that it
fills, hooks that it puts on modules, generators that it draws from, and the same of the classes and files of its code.
So that a forward can be undone, or repeated from where it started."""

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from ..semantics.draws import dice, put_dice_back
from .code_state import Names, ReachedCode
from .gpu_kernel_emulation import Mode
from .held_tensors import OF_MODULES, HeldTensors

_EMPTY = object()
"""The value of a closure's cell that is not assigned yet."""

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Changeable:
    """One thing that a forward may change. take: returns what it holds now. differs: whether it holds something else by
    now. put: let it hold that again."""

    take: Callable[[], Any]
    differs: Callable[[Any], bool]
    put: Callable[[Any], None]


Taken = list[tuple[Changeable, Any]]


class Reached:
    """All that a call of a module, function or object can reach and change. dicts: each with the names in it that do
    not count. names: that code may bind anew. holders: other things that hold something. tensors: by id, without the
    module's parameters. iterators: they cannot be put back, once something was taken from them."""

    def __init__(self, root: Callable[..., Any]) -> None:
        self.dicts: list[tuple[dict[Any, Any], frozenset[str]]] = []
        self.names: list[Names] = []
        self.holders: list[Any] = []
        self.iterators: list[Any] = []
        self.tensors: dict[int, torch.Tensor] = {}
        held = HeldTensors(self._note, self._hold)
        self._code = ReachedCode(self.names.append, held.look_into)
        if isinstance(root, nn.Module):
            held.enter(root)
            self.tensors |= {id(buffer): buffer for buffer in root.buffers()}
        else:
            held.look_into(root)
        for module in held.modules:
            for parameter in module.parameters():
                self.tensors.pop(id(parameter), None)

    def _note(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.setdefault(id(tensor), tensor)
        return tensor

    def _hold(self, holder: Any) -> None:
        match holder:
            case nn.Module():
                self._code.enter(type(holder))
                self.dicts.append((vars(holder), OF_MODULES))
                self.dicts.extend((hooks, _NONE) for hooks in (holder._forward_pre_hooks, holder._forward_hooks))
                if holder._buffers:
                    self.dicts.append((holder._buffers, _NONE))
            case dict():
                self.dicts.append((holder, _NONE))
            case FunctionType():
                self._code.enter(holder)
            case list() | deque() | set() | CellType() | torch.Generator() | random.Random():
                self.holders.append(holder)
            case _ if type(holder).__module__.startswith("numpy.random"):
                self.holders.append(holder)
            case Iterator() if type(holder).__module__ in ("builtins", "itertools"):
                self.iterators.append(holder)
            case _:
                self._code.enter(type(holder))


def place_of(holder: Any) -> Changeable:
    """The content of a list, set, cell of a closure or source of random numbers."""
    match holder:
        case list() | deque():
            return _items(holder)
        case set():
            return _members(holder)
        case CellType():
            return _cell(holder)
        case torch.Generator():
            return draws_of(holder)
        case random.Random():
            return _state(holder.getstate, holder.setstate)
    bits = getattr(holder, "bit_generator", None) or holder._bit_generator
    return _state(lambda: bits.state, partial(setattr, bits, "state"))


def places_of(root: Callable[..., Any], keep_copies: bool = False) -> list[Changeable]:
    """All that a forward or a call may change, without parameters. keep_copies: keep copies of tensors, so that one
    that nobody writes into is copied once and not each time."""
    reached = Reached(root)
    silent = _running_statistics(root) if isinstance(root, nn.Module) else set()
    return [
        *map(place_of, reached.holders),
        _entries(reached.dicts),
        _bindings(reached.names),
        *(
            _numbers(tensor, id(tensor) in silent, keep_copies)
            for tensor in reached.tensors.values()
            if not tensor.is_meta and not isinstance(tensor, FakeTensor)
        ),
    ]


def random_draws() -> Changeable:
    """The state of Python's and numpy's own random numbers, whoever draws them."""
    return _state(dice, put_dice_back)


def taken(places: Iterable[Changeable]) -> Taken:
    """Each place with what it holds now."""
    return [(place, place.take()) for place in places]


def changed(before: Taken) -> Taken:
    """The places that no longer hold what was taken, with what was."""
    return [(place, value) for place, value in before if place.differs(value)]


def put_back(before: Taken) -> None:
    """Let places hold again what was taken from them."""
    for place, value in before:
        place.put(value)


@contextmanager
def undone(*roots: Callable[..., Any] | None) -> Iterator[None]:
    """When it ends, all that forwards and calls of these have changed meanwhile is put back. None stands for
    nothing."""
    before = taken(place for root in roots if root is not None for place in places_of(root))
    try:
        yield
    finally:
        put_back(changed(before))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written into; 0 for a tensor made in inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version


class TensorsRead(Mode):
    """Notes the places of those tensors, of the given ones, that operators read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors.values())  # kept, so that no other gets the id of one
        self._places = {id(tensor): place for place, tensor in tensors.items()}
        self.places: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = [self._places[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._places]
        self.places += [place for place in found if place not in self.places]
        return self.run(func, args, kwargs or {})


class ReadAside(Mode):
    """Notes modules that also keep elsewhere what they return (or a view of it), if anything reads it there. To see
    that, callers of a module are given copies. Hooks on modules are given copies, too, for they also run on
    stand-ins."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._running = 0
        self._fresh: set[int] = set()
        self._made: dict[int, tuple[str, torch.Tensor]] = {}
        self.names: dict[str, None] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, the modules are watched."""
        handles: list[RemovableHandle] = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._begins))
            handles.append(module.register_forward_hook(partial(self._ends, name), prepend=True, with_kwargs=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, module: nn.Module, args: Any) -> None:
        self._fresh = self._fresh if self._running else set()
        self._running += 1

    def _ends(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self._running -= 1
        if self._running:
            return output
        others = (*tree_leaves((args, kwargs)), *module.parameters(), *module.buffers())
        known = {_storage(x) for x in others if isinstance(x, torch.Tensor)}
        fresh = self._fresh - known
        own = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and _storage(x) in fresh]
        copies = {id(x): x.clone() for x in own}
        self._made |= {_storage(x): (name, x) for x in own}
        return tree_map(lambda x: copies.get(id(x), x), output)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)) if self._made else ():
            if isinstance(leaf, torch.Tensor) and (made := self._made.get(_storage(leaf))) is not None:
                self.names[made[0]] = None
        out = self.run(func, args, kwargs or {})
        if self._running:
            self._fresh |= {_storage(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _entries(holders: list[tuple[dict[Any, Any], frozenset[str]]]) -> Changeable:
    """The entries of these dicts, without those of some names. They are one place and are compared all at once, for a
    forward changes hardly any of the thousands in a model."""

    def differs(values: list[dict[Any, Any]]) -> bool:
        return any(_differ(holder, value, apart) for (holder, apart), value in zip(holders, values, strict=True))

    def put(values: list[dict[Any, Any]]) -> None:
        for (holder, apart), value in zip(holders, values, strict=True):
            if _differ(holder, value, apart):
                before = _but(apart, value)
                for name in _but(apart, holder).keys() - before.keys():
                    del holder[name]
                holder.update(before)

    return Changeable(lambda: [dict(holder) for holder, _ in holders], differs, put)


def _differ(now: dict[Any, Any], before: dict[Any, Any], apart: frozenset[str]) -> bool:
    if not now and not before:
        return False
    if len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
        return False
    now, before = _but(apart, now), _but(apart, before)
    return now.keys() != before.keys() or any(now[name] is not before[name] for name in now)


def _but(apart: frozenset[str], entries: dict[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in entries.items() if name not in apart}


def _bindings(spaces: list[Names]) -> Changeable:
    """The values that names of files and classes are bound to."""

    def differs(values: list[dict[str, Any]]) -> bool:
        return any(_differ(space.found(), value, _NONE) for space, value in zip(spaces, values, strict=True))

    def put(values: list[dict[str, Any]]) -> None:
        for space, before in zip(spaces, values, strict=True):
            now = space.found()
            for name in now.keys() - before.keys():
                space.unbind(name)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    space.bind(name, value)

    return Changeable(lambda: [space.found() for space in spaces], differs, put)


def _items(holder: list[Any] | deque[Any]) -> Changeable:
    def differs(value: list[Any]) -> bool:
        return len(value) != len(holder) or any(a is not b for a, b in zip(value, holder, strict=True))

    def put(value: list[Any]) -> None:
        holder.clear()
        holder.extend(value)

    return Changeable(lambda: list(holder), differs, put)


def _members(holder: set[Any]) -> Changeable:
    def put(value: set[Any]) -> None:
        holder.clear()
        holder.update(value)

    return Changeable(lambda: set(holder), lambda value: value != holder, put)


def _cell(cell: CellType) -> Changeable:
    def take() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return _EMPTY

    def put(value: Any) -> None:
        if value is _EMPTY:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    return Changeable(take, lambda value: take() is not value, put)


def _state(take: Callable[[], Any], put: Callable[[Any], None]) -> Changeable:
    """A state of random numbers of Python or numpy."""
    return Changeable(take, lambda value: pickle.dumps(value) != pickle.dumps(take()), put)


def draws_of(generator: torch.Generator) -> Changeable:
    """The state of a torch generator. It is read outside of all modes, for it is a tensor with numbers."""

    def take() -> torch.Tensor:
        with _disable_current_modes():
            return generator.get_state()

    def differs(value: torch.Tensor) -> bool:
        with _disable_current_modes():
            return not torch.equal(value, generator.get_state())

    def put(value: torch.Tensor) -> None:
        with _disable_current_modes():
            generator.set_state(value)

    return Changeable(take, differs, put)


def _numbers(tensor: torch.Tensor, silent: bool, keep_copy: bool) -> Changeable:
    """The numbers of a tensor. silent: whether writes into it do not change its version. For other tensors (written
    through .data) a look at the numbers after the first forward decides that. Autograd is not told what is put back."""
    known: list[tuple[int, torch.Tensor]] = []
    tells = False if silent else None

    def take() -> tuple[int, torch.Tensor]:
        if known and known[0][0] == version_of(tensor):
            return known[0]
        with unset_fake_temporarily():
            found = version_of(tensor), tensor.detach().clone()
        known[:] = [found] if keep_copy and tells is not False and not tensor.is_inference() else []
        return found

    def differs(value: tuple[int, torch.Tensor]) -> bool:
        nonlocal tells
        if value[0] != version_of(tensor):
            return True
        if tells is None:
            with _disable_current_modes():
                tells = torch.equal(_own_numbers(value[1]), _own_numbers(tensor))
            if not tells:
                known.clear()
        return not tells

    def put(value: tuple[int, torch.Tensor]) -> None:
        with unset_fake_temporarily():
            tensor.data.copy_(value[1])
        known[:] = [(version_of(tensor), value[1])] if known else []

    return Changeable(take, differs, put)


def _own_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that is spread over ranks: to compare it all would wait for those, of which some
    may not have it in their part of the model. Of a sparse or nested one the numbers that it holds, which alone torch
    compares."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if own.is_sparse:
        return own._values()
    return own if own.layout == torch.strided and not own.is_nested else own.values()


def _running_statistics(root: nn.Module) -> set[int]:
    """Buffers of norms, whose kernels write into them without a change of version (torch 2.13)."""
    norms = [module for module in root.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return {id(buffer) for norm in norms for buffer in norm.buffers()}
