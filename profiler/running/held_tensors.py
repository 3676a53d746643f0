"""Tensors that a module holds besides parameters and buffers: in attributes, containers, closures and hooks."""

import copy
import functools
import operator
from collections import deque
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

Visit = Callable[[str, torch.Tensor], torch.Tensor]

OF_MODULES = frozenset(nn.Module().__dict__)
"""Attributes that torch gives every module."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LEFT_ALONE = (str, bytes, int, float, complex, type(None), type, ModuleType, nn.Module)
_DEEPEST = 12


class HeldTensors:
    """Goes to every tensor that the modules of a model hold beside their parameters and buffers: in attributes, lists,
    dicts, tuples, partials, closures, objects, what hooks on modules and gradients close over, and all that modules in
    such places hold, which nobody has registered.

    visit: is given a tensor's place ("blocks.0.scales[1]") and the tensor, and returns what is to be there. A place is
    the same in every build of a model. In objects, functions and unregistered modules, which others may have, too, only
    tensors without numbers are replaced: those that the constructor has made. What torch or this package has made is
    not entered, nor the lists of weights that recurrent modules renew by themselves. hold: is given whatever may come
    to hold others: modules, lists, dicts (of objects and functions, too), sets, cells of closures, functions, and
    objects, such as generators.
    """

    def __init__(self, visit: Visit, hold: Callable[[Any], None] = lambda holder: None) -> None:
        self._visit = visit
        self._hold = hold
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._modules: dict[int, nn.Module] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that were entered, registered or not."""
        return list(self._modules.values())

    def enter(self, root: nn.Module) -> None:
        """Go through all modules of a model."""
        self._modules |= {id(module): module for module in root.modules()}
        for prefix, module in root.named_modules():
            self._module(module, f"{prefix}." if prefix else "")

    def look_into(self, value: Any) -> None:
        """Enter a value that others hold, too; the value itself is not replaced."""
        self._value(value, "", 0, True)

    def _unregistered(self, root: nn.Module, place: str) -> None:
        new = {prefix: module for prefix, module in root.named_modules() if id(module) not in self._modules}
        self._modules |= {id(module): module for module in new.values()}
        for prefix, module in new.items():
            at = f"{place}.{prefix}." if prefix else f"{place}."
            self._value(module._parameters, at.removesuffix("."), 0, True)
            self._value(module._buffers, at.removesuffix("."), 0, True)
            self._module(module, at, True)

    def _module(self, module: nn.Module, prefix: str, shared: bool = False) -> None:
        self._hold(module)
        own = vars(module)
        renewed = ("_flat_weights",) if isinstance(module, nn.RNNBase) else ()
        for name in [name for name in own if name not in OF_MODULES and name not in renewed]:
            kept = self._value(own[name], prefix + name, 0, shared)
            if kept is not own[name]:
                own[name] = kept
        hooks = [(kind, hook) for kind in _HOOKS for hook in own.get(kind, {}).values()]
        hooks += [(name, hook) for name, p in module._parameters.items() for hook in gradient_hooks(p)]
        for i, (kind, hook) in enumerate(hooks):
            self._value(hook, f"{prefix}{kind}({i})", 0)

    def _value(self, value: Any, place: str, depth: int, shared: bool = False) -> Any:
        """What to put in the place of a value: itself, another tensor, or a list, tuple or dict with other tensors
        inside. shared: whether the value is inside of an object or a function, which others may hold, too."""
        if isinstance(value, torch.Tensor):
            kept = self._visit(place, value)
            return kept if not shared or value.is_meta or isinstance(value, FakeTensor) else value
        if isinstance(value, nn.Module):
            self._unregistered(value, place)
        if isinstance(value, _LEFT_ALONE) or depth > _DEEPEST:
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = (value, value)  # kept, so that no other gets its id
            self._seen[id(value)] = (value, self._entered(value, place, depth + 1, shared))
        return self._seen[id(value)][1]

    def _entered(self, value: Any, place: str, depth: int, shared: bool) -> Any:
        if not isinstance(value, tuple):
            self._hold(value)
        match value:
            case list() | tuple() | deque():
                kept = [self._value(one, f"{place}[{i}]", depth, shared) for i, one in enumerate(value)]
                return value if all(map(operator.is_, kept, value)) else _alike(value, kept)
            case dict():
                for i, key in enumerate(list(value)):
                    at = f"{place}.{key}" if isinstance(key, str) else f"{place}[{i}]"
                    kept_one = self._value(value[key], at, depth, shared)
                    if kept_one is not value[key]:
                        value = value if shared else copy.copy(value)
                        value[key] = kept_one
            case functools.partial():
                args = self._value(value.args, f"{place}.args", depth, True)
                keywords = self._value(value.keywords, place, depth, True)
                self._value(value.func, place, depth, True)
                if args is not value.args:
                    value.__setstate__((value.func, args, keywords, vars(value)))  # type: ignore[attr-defined]
            case MethodType():
                self._value(value.__self__, place, depth, True)
                self._value(value.__func__, place, depth, True)
            case FunctionType() if not _is_library(value.__module__):
                for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                    self._cell(cell, f"{place}.{name}", depth)
                value.__defaults__ = self._value(value.__defaults__, f"{place}.defaults", depth, True)
                self._value(vars(value), place, depth, True)
            case _:
                if hasattr(value, "__dict__") and not _is_library(type(value).__module__):
                    self._value(vars(value), place, depth, True)
        return value

    def _cell(self, cell: CellType, place: str, depth: int) -> None:
        self._hold(cell)
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        kept = self._value(held, place, depth, True)
        if kept is not held:
            cell.cell_contents = kept


def _alike(value: Any, elements: list[Any]) -> Any:
    """A list, tuple, named tuple or deque of the same kind with other elements."""
    if isinstance(value, tuple):
        return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)
    return deque(elements, value.maxlen) if isinstance(value, deque) else list(elements)


def gradient_hooks(tensor: torch.Tensor | None) -> list[Callable[..., Any]]:
    """The hooks that a tensor's gradient is given to (register_hook)."""
    return [] if tensor is None else list((tensor._backward_hooks or {}).values())


def keep_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Register the hooks of a tensor on the one that takes its place."""
    for hook in gradient_hooks(old):
        new.register_hook(hook)


def whole_because(root: nn.Module) -> str:
    """Why some parameter must stay the whole object that it is, in words; "" if none must. Raises ValueError for hooks
    that come after gradients are summed, which no plan keeps."""
    named = dict(root.named_parameters())
    for name, parameter in named.items():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has a hook for when its gradient has been added up (register_post_accumulate_grad_hook), "
                "which micro-batches and ranks do later than one process: change gradients in a hook of register_hook, "
                "or between forward_backward() and optimizer_step()"
            )
    for name, parameter in named.items():
        if gradient_hooks(parameter):
            return f"the gradient of {name} has a hook (register_hook), which would see a part of it"
    for name, place in kept_parameters(root):
        return f"{name} is kept in {place}, too, where no shard of it would be; read it from its module"
    return ""


def held_beside(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(place, tensor) of all tensors that are neither parameters nor buffers, each once."""
    known = {id(t) for t in (*root.parameters(), *root.buffers())}
    found: dict[int, tuple[str, torch.Tensor]] = {}

    def note(place: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            found.setdefault(id(tensor), (place, tensor))
        return tensor

    HeldTensors(note).enter(root)
    return list(found.values())


def unregistered_modules(root: nn.Module) -> list[nn.Module]:
    """Modules that a model holds in lists, closures and the like, without having registered them."""
    held = HeldTensors(lambda place, tensor: tensor)
    held.enter(root)
    own = set(root.modules())
    return [module for module in held.modules if module not in own]


def kept_parameters(root: nn.Module) -> list[tuple[str, str]]:
    """(name, place) of parameters that are held elsewhere, too, and where."""
    names = {id(p): name for name, p in root.named_parameters()}
    found: list[tuple[str, str]] = []

    def note(place: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in names:
            found.append((names[id(tensor)], place))
        return tensor

    HeldTensors(note).enter(root)
    return found


def _is_library(module: str | None) -> bool:
    """Whether a module is torch's or our own. torch.optim does not count."""
    top = (module or "").partition(".")[0]
    return top in ("torch", __name__.partition(".")[0]) and not (module or "").startswith("torch.optim")
