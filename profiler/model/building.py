"""Modules as they are built: on the meta device where that goes, without torch.compile around them, and with the
parameters that lazy ones find out in their first forward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_map


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module, without memory. A constructor that looks at numbers it has made (`.item()`, an assertion) has none to
    look at on the meta device: then all but the parameters are real, or, if it looks at these, they are while it runs.
    """
    try:
        with torch.device("meta"):
            return _without_numbers(build())  # a module that names its device has some
    except Exception as error:
        if not _asks_for_numbers(error):
            raise
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            with parameters_on_meta():
                module = build()
        except Exception as error:
            if not _asks_for_numbers(error):
                raise
            module = build()
    return _without_numbers(module)


def in_training(module: nn.Module) -> nn.Module:
    """The module in the mode in which it is trained: as its constructor leaves it, so that what is frozen by .eval()
    inside of it stays so; all of it in training mode where it is handed over in evaluation mode, as by from_pretrained.
    """
    return module if module.training else module.train()


def _asks_for_numbers(error: BaseException) -> bool:
    return "meta" in str(error).lower()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While it lasts, modules move their parameters to the meta device as soon as they get them."""
    register = nn.Module.register_parameter

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = moved  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def replace_tensors(root: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put what `make` gives in the place of every tensor of a module: parameters, buffers, and attributes, also those
    in lists, tuples and dicts. What was one tensor stays one."""
    twins: dict[int, torch.Tensor] = {}
    kept = []

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in twins:
            kept.append(leaf)  # so that no other gets its id
            made = make(leaf)
            is_parameter = isinstance(leaf, nn.Parameter) and not isinstance(made, nn.Parameter)
            twins[id(leaf)] = nn.Parameter(made, leaf.requires_grad) if is_parameter else made
        return twins[id(leaf)]

    for tensors, name, value in tensors_of(root):
        tensors[name] = twin(value) if isinstance(value, torch.Tensor) else tree_map(twin, value)


def tensors_of(root: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """(where, name, value) of all that holds tensors in a module: value is one, or a list, tuple or dict of some."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for module in root.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for tensors in places:
            for name, value in list(tensors.items()):
                if isinstance(value, torch.Tensor) or (name not in OF_MODULES and holds_tensors(value)):
                    found.append((tensors, name, value))
    return found


OF_MODULES = frozenset(nn.Module().__dict__)
"""Attributes that torch gives every module."""


def holds_tensors(value: Any) -> bool:
    """Whether it is a list, tuple or dict with tensors inside."""
    if isinstance(value, list | tuple):
        return any(isinstance(x, torch.Tensor) or holds_tensors(x) for x in value)
    return isinstance(value, dict) and any(isinstance(x, torch.Tensor) or holds_tensors(x) for x in value.values())


def _without_numbers(module: nn.Module) -> nn.Module:
    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")

    replace_tensors(module, empty)
    return module


def without_compiler(root: nn.Module) -> nn.Module:
    """The module with those inside that were given to torch.compile as they were before: hooks, stages and fake tensors
    go between layers, where a compiled whole has no place for them. Layers are compiled by the plan's software."""
    modules = (torch._dynamo.OptimizedModule,) if "torch._dynamo" in _loaded() else ()
    while isinstance(root, modules):
        root = root._orig_mod
    for module in list(root.modules()):
        module._compiled_call_impl = None
        for name, child in module._modules.items():
            while isinstance(child, modules):
                child = child._orig_mod
                module._modules[name] = child
    return root


def with_dense_gradients(root: nn.Module) -> nn.Module:
    """The module, whose embeddings give gradients for all of their rows: shards, buckets and AdamW take no others."""
    for module in root.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            module.sparse = False
            module.__dict__[WAS_SPARSE] = True
    return root


WAS_SPARSE = "_was_sparse"
"""Attribute of embeddings that asked for sparse gradients."""


def _loaded() -> Any:
    import sys

    return sys.modules


def is_lazy(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no shape before the first forward."""
    lazy = (UninitializedParameter, UninitializedBuffer)
    return any(
        isinstance(tensor, lazy)
        for part in module.modules()
        for tensor in (*part._parameters.values(), *part._buffers.values())
    )


def initialised(module: nn.Module, forward: Callable[[nn.Module], Any]) -> nn.Module:
    """A module whose lazy parameters have been given their shapes by one forward, which changes nothing else."""
    was_training = {part: part.training for part in module.modules()}
    try:
        with torch.no_grad():
            forward(module.eval())
    finally:
        for part, training in was_training.items():
            part.training = training
    return module
