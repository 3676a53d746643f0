"""Modules as they are built: on the meta device where that goes, without torch.compile around them, and with the
parameters that lazy ones find out in their first forward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..running.held_tensors import HeldTensors, keep_hooks


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module, built without memory. A constructor that looks at numbers it has made (`.item()`, an assertion) finds
    none on the meta device: then all tensors but the parameters are real; if it looks at parameters, these are real,
    too, while it runs.
    """
    try:
        with torch.device("meta"):
            return _without_numbers(build())  # a module that names its device has numbers
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
    """The module in the mode in which it is trained. Modes are as its constructor leaves them, so that parts which
    .eval() has frozen stay so; a train() of its own (one that keeps batch norms frozen) is called, as every training
    loop does. A module that is handed over in evaluation mode, as by from_pretrained, is put into training mode as a
    whole. Raises ValueError for what has no modes.
    """
    if not module.training:
        return module.train()
    modes = [(part, part.training) for part in module.modules()]
    _train_own(modes)
    for part, training in modes:
        part.training &= training
    return module


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """While it lasts the module is in evaluation mode. Afterwards modes are as they were, and a train() of its own is
    called (one that takes merged adapters out of the weights again). Meanwhile torch's fast path of
    nn.TransformerEncoder is off: it hands nested tensors from layer to layer, which cannot be sent, and reads weights
    without calling the layers that gather them."""
    modes = [(part, part.training) for part in module.modules()]
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    module.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)
        _train_own(modes)
        for part, training in modes:
            part.training = training


def _train_own(modes: list[tuple[nn.Module, bool]]) -> None:
    """Call the train() of every part that is in training mode and has a train() of its own. Raises ValueError if that
    refuses."""
    for part, training in modes:
        if training and has_own_train(part):
            try:
                part.train(True)
            except NotImplementedError as error:
                raise ValueError(
                    f"{type(part).__name__} is in one mode for good ({error}), as what torch.export makes; hand over "
                    "the module that it was made of"
                ) from error


def has_own_train(part: nn.Module) -> bool:
    """Whether a module's train() is its own, and not torch's."""
    return "train" in vars(part) or type(part).train is not nn.Module.train


def _asks_for_numbers(error: BaseException) -> bool:
    return "meta" in str(error).lower()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While it lasts, modules move parameters to the meta device as soon as these are registered."""
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
    """Replace every tensor of a module (parameters, buffers, and all that it holds elsewhere) by what `make` returns
    for it. A tensor in several places is replaced by one; hooks on gradients go along."""
    twins: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def twin(leaf: torch.Tensor) -> torch.Tensor:
        if id(leaf) not in twins:
            made = make(leaf)
            if isinstance(leaf, nn.Parameter) and not isinstance(made, nn.Parameter):
                made = nn.Parameter(made, leaf.requires_grad)
            if made.is_meta and made is not leaf:
                keep_hooks(leaf, made)
            kept.extend((leaf, made))  # so that no others get their ids
            twins[id(leaf)] = twins[id(made)] = made
        return twins[id(leaf)]

    HeldTensors(lambda place, tensor: twin(tensor)).enter(root)
    for module in root.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in places:
            for name, value in list(tensors.items()):
                if value is not None:
                    tensors[name] = twin(value)


def _without_numbers(module: nn.Module) -> nn.Module:
    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")

    replace_tensors(module, empty)
    return module


def without_compiler(root: nn.Module) -> nn.Module:
    """The module without torch.compile around modules inside of it: hooks, stages and fake tensors go between layers,
    where a compiled whole has no place for them. If the plan's software compiles, it compiles layers."""
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
"""Attribute of embeddings whose gradients were to be sparse."""


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
    """The module, after one forward has given its lazy parameters their shapes; nothing else is changed."""
    was_training = {part: part.training for part in module.modules()}
    try:
        with torch.no_grad():
            forward(module.eval())
    finally:
        for part, training in was_training.items():
            part.training = training
    return module
