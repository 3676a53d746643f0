"""Where a model may be cut into layers, read off its module tree."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Units:
    """Where a model may be cut. names: outermost modules that are never cut, with parameters or with hooks on their
    backward. elements: those of them that are layers by themselves."""

    names: tuple[str, ...]
    elements: frozenset[str]
    opened: tuple[str, ...] = ()
    """Elements of a container that hold several blocks; these blocks are units, and not the element."""
    notes: tuple[str, ...] = ()

    def inside(self, name: str) -> "Units":
        """The same units, named as in a model that has this one as its submodule `name`."""
        own, opened = (tuple(f"{name}.{each}" for each in names) for names in (self.names, self.opened))
        return Units(own, frozenset(f"{name}.{each}" for each in self.elements), opened, self.notes)


def find_units(root: nn.Module, closed: frozenset[str] = frozenset()) -> Units:
    """Where the model may be cut, read off its module tree. closed: elements not to be opened. A model that PEFT has
    put adapters into is cut where it is without them."""
    inner = _wrapped(root)
    if inner:
        found = find_units(root.get_submodule(inner), frozenset(name.removeprefix(f"{inner}.") for name in closed))
        if found.names:
            return found.inside(inner)
    containers = _containers(root, closed) or _containers(root, closed, fewest=1)
    notes: tuple[str, ...] = ()
    if not containers:
        containers = [_branching(root)]
    opened = {""} | {".".join(name.split(".")[:i]) for name in containers for i in range(1, name.count(".") + 2)}
    names: list[str] = []
    _collect_units(root, "", opened, names, set())
    names += _hooked_between(root, names)
    elements = {name for name in names if _holder(root, name, containers) in containers}
    elements |= _repeated_types(root, [name for name in names if name not in elements])
    if len(names) < 2:
        notes = (f"{type(root).__name__} is one module without parts that could be cut, so all of it is one layer",)
    able = (name for name in sorted(opened) if _runs(root.get_submodule(name)))
    held = tuple(name for name in able if _holder(root, name, containers) in containers)
    return Units(tuple(names), frozenset(elements), held, notes)


def _wrapped(root: nn.Module) -> str:
    """The name of the model inside one of PEFT's; '' of any other."""
    base = getattr(root, "get_base_model", None)
    inner = None if base is None else base()
    return next((name for name, module in root.named_modules() if module is inner), "")


def _is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer with an adapter beside it, by PEFT's names. If its base_layer is itself made of
    modules, it is taken for the model's own, unless PEFT's class says otherwise."""
    base = dict(module.named_children()).get("base_layer")
    return base is not None and (hasattr(module, "adapter_layer_names") or next(base.children(), None) is None)


def _containers(root: nn.Module, closed: frozenset[str], fewest: int = 2) -> list[str]:
    """Outermost containers of layers; inside a Sequential root also the containers of blocks that it holds, and inside
    their elements those of blocks of one type."""
    found: list[str] = []
    adapted = None
    for name, module in root.named_modules():
        if adapted is not None and name.startswith(adapted):
            continue
        adapted = f"{name}." if _is_adapted(module) else None
        outer = [c for c in found if c == "" or name == c or name.startswith(c + ".")]
        element = _element(root, name, max(outer, key=len, default=""))
        if outer and element in closed:
            continue
        if outer and not (outer == [""] and _holds_blocks(module)) and not _holds_alike(module):
            continue
        deep_mlp = name.count(".") > 0 and isinstance(module, nn.Sequential) and not _holds_blocks(module)
        if _is_container(module, fewest) and not deep_mlp:
            found.append(name)
    return found


def _element(root: nn.Module, name: str, container: str) -> str:
    """The first module that has a forward on the way from a container to a module; the module itself if none has."""
    parts = name.split(".")
    count = container.count(".") + 2 if container else 1
    while count < len(parts) and not _runs(root.get_submodule(".".join(parts[:count]))):
        count += 1
    return ".".join(parts[:count])


def _holds_alike(module: nn.Module) -> bool:
    """Whether a container holds blocks of which several are of one type, as layers are; parts of a layer differ."""
    types = [type(child) for _, child in _with_parameters(module)]
    return _holds_blocks(module) and len(set(types)) < len(types)


def _is_container(module: nn.Module, fewest: int = 2) -> bool:
    """Whether a module holds layers: a list, dict or Sequential, or a stage, with at least `fewest` children that have
    parameters. (A model whose one block runs many times, as ALBERT's, has one.)"""
    container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) or _is_stage(module)
    return container and len(_with_parameters(module)) >= fewest


def _is_stage(module: nn.Module) -> bool:
    """Whether a module has nothing but blocks of one type, as RegNet's stages have. Blocks hold no containers, and more
    than leaves: Inception's branches, of a convolution and its norm each, are none."""
    blocks = list(module.children())
    deep = (any(_with_parameters(part) for _, part in _with_parameters(block)) for block in blocks)
    alike = len({type(block) for block in blocks}) == 1 and all(deep)
    lists = nn.ModuleList | nn.ModuleDict | nn.Sequential
    return alike and len(blocks) > 1 and not any(isinstance(part, lists) for part in module.modules())


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a container's elements are themselves made of modules, unlike the linear layers of an MLP."""
    children = _with_parameters(module)
    return _is_container(module) and all(_with_parameters(child) for _, child in children)


def _with_parameters(module: nn.Module) -> list[tuple[str, nn.Module]]:
    module = module.get_submodule("base_layer") if _is_adapted(module) else module
    return [(n, child) for n, child in module.named_children() if next(child.parameters(), None) is not None]


def _branching(root: nn.Module) -> str:
    """The outermost module with several children that have parameters."""
    name, module = "", root
    while len(children := _with_parameters(module)) == 1 and _with_parameters(children[0][1]):
        child_name, module = children[0]
        name = f"{name}.{child_name}" if name else child_name
    return name


def _runs(module: nn.Module) -> bool:
    """Whether a module has a forward. Lists and dicts of modules have none, nor have other classes that only hold
    modules."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _holder(root: nn.Module, name: str, containers: list[str]) -> str:
    """The module that a unit is in; where the unit is in an element that has no forward, the container of that
    element."""
    holder = name.rpartition(".")[0]
    while holder and holder not in containers and not _runs(root.get_submodule(holder)):
        holder = holder.rpartition(".")[0]
    return holder


def _collect_units(module: nn.Module, name: str, opened: set[str], names: list[str], seen: set[int]) -> None:
    for child_name, child in _with_parameters(module):
        full = f"{name}.{child_name}" if name else child_name
        if full in opened or (_with_parameters(child) and not _runs(child)):
            _collect_units(child, full, opened, names, seen)
        elif isinstance(child, torch.jit.ScriptModule):
            continue  # takes no hooks: what it does is code between layers
        elif id(child) not in seen:
            seen.add(id(child))
            names.append(full)


def _hooked_between(root: nn.Module, names: list[str]) -> list[str]:
    """Names of modules without parameters, outside of all units, that have hooks on their backward. Torch wraps what
    such a module does in functions of its own, so it cannot be treated as code between layers."""
    units = tuple(f"{name}." for name in names)
    return [
        name
        for name, module in root.named_modules()
        if has_backward_hooks(module)
        and _runs(module)
        and next(module.parameters(), None) is None
        and not f"{name}.".startswith(units)
    ]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its backward (register_full_backward_hook and the like)."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _repeated_types(root: nn.Module, names: list[str]) -> set[str]:
    """Loose modules made of modules, of which there are several of one type: blocks written as attributes."""
    by_type: dict[type, list[str]] = defaultdict(list)
    for name in names:
        module = root.get_submodule(name)
        if _with_parameters(module):
            by_type[type(module)].append(name)
    return {name for group in by_type.values() if len(group) >= 2 for name in group}
