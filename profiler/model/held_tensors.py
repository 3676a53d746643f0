"""Tensors that a module holds by anything but its parameters and buffers: attributes, containers, closures, hooks."""

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Visit = Callable[[str, torch.Tensor], torch.Tensor]

OF_MODULES = frozenset(nn.Module().__dict__)
"""Attributes that torch gives every module."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LEFT_ALONE = (str, bytes, int, float, complex, type(None), type, ModuleType, nn.Module)
_DEEPEST = 12


class HeldTensors:
    """Goes to every tensor that the modules of a model hold beside their parameters and buffers: in attributes, lists,
    dicts, tuples, partials, closures, objects, and what hooks on modules and gradients close over.

    visit: is given a tensor's place ("blocks.0.scales[1]") and the tensor, and returns what is to be there. A place is
    the same in every build of a model. What torch or this package has made is not entered, nor the lists of weights
    that recurrent modules renew by themselves.
    """

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._seen: dict[int, Any] = {}

    def enter(self, root: nn.Module) -> None:
        """Go through all modules of a model."""
        for prefix, module in root.named_modules():
            self._module(module, f"{prefix}." if prefix else "")

    def _module(self, module: nn.Module, prefix: str) -> None:
        own = vars(module)
        renewed = ("_flat_weights",) if isinstance(module, nn.RNNBase) else ()
        for name in [name for name in own if name not in OF_MODULES and name not in renewed]:
            kept = self._value(own[name], prefix + name, 0)
            if kept is not own[name]:
                own[name] = kept
        hooks = [(kind, hook) for kind in _HOOKS for hook in own.get(kind, {}).values()]
        hooks += [(name, hook) for name, p in module._parameters.items() for hook in gradient_hooks(p)]
        for i, (kind, hook) in enumerate(hooks):
            self._value(hook, f"{prefix}{kind}({i})", 0)

    def _value(self, value: Any, place: str, depth: int) -> Any:
        """What is to stand for a value: itself, unless it is a tensor or a tuple."""
        if isinstance(value, torch.Tensor):
            return self._visit(place, value)
        if isinstance(value, _LEFT_ALONE) or depth > _DEEPEST:
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = value  # kept, so that no other gets its id
            self._enter(value, place, depth + 1)
        return self._rebuilt(value, place, depth + 1) if isinstance(value, tuple) else value

    def _enter(self, value: Any, place: str, depth: int) -> None:
        """Replace tensors inside of what can be changed."""
        match value:
            case list():
                for i, one in enumerate(value):
                    _put(value, i, one, self._value(one, f"{place}[{i}]", depth))
            case dict():
                for i, (key, one) in enumerate(list(value.items())):
                    at = f"{place}.{key}" if isinstance(key, str) else f"{place}[{i}]"
                    _put(value, key, one, self._value(one, at, depth))
            case functools.partial():
                args = self._value(value.args, f"{place}.args", depth)
                self._value(value.keywords, place, depth)  # a dict, which it shares
                self._value(value.func, place, depth)
                if args is not value.args:
                    value.__setstate__((value.func, args, value.keywords, vars(value)))  # type: ignore[attr-defined]
            case MethodType():
                self._value(value.__self__, place, depth)
                self._value(value.__func__, place, depth)
            case FunctionType():
                if not _is_library(value.__module__):
                    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                        self._cell(cell, f"{place}.{name}", depth)
            case tuple():
                pass
            case _:
                if hasattr(value, "__dict__") and not _is_library(type(value).__module__):
                    self._enter(vars(value), place, depth)

    def _cell(self, cell: CellType, place: str, depth: int) -> None:
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        kept = self._value(held, place, depth)
        if kept is not held:
            cell.cell_contents = kept

    def _rebuilt(self, value: tuple[Any, ...], place: str, depth: int) -> tuple[Any, ...]:
        kept = [self._value(one, f"{place}[{i}]", depth) for i, one in enumerate(value)]
        if all(a is b for a, b in zip(kept, value, strict=True)):
            return value
        return type(value)(*kept) if hasattr(value, "_fields") else tuple(kept)


def gradient_hooks(tensor: torch.Tensor | None) -> list[Callable[..., Any]]:
    """What a tensor calls with its gradient (register_hook)."""
    return [] if tensor is None else list((tensor._backward_hooks or {}).values())


def keep_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let what stands in for a tensor give its gradient to the same hooks."""
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


def _put(container: Any, key: Any, old: Any, new: Any) -> None:
    if new is not old:
        container[key] = new


def _is_library(module: str | None) -> bool:
    """Whether what a module defines is torch's or our own, optimizers left aside."""
    top = (module or "").partition(".")[0]
    return top in ("torch", __name__.partition(".")[0]) and not (module or "").startswith("torch.optim")
