"""Compiles layers with torch.compile: each layer module by itself, inside of what wraps it (sharding, recompute)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...planner.plan.document import LayerPlan, Plan, parts_of
from ...planner.plan.schedules import ZERO_BUBBLE
from ...planner.plan.training import COMPILING
from .tensor_loss import keeps_logits_apart


class CompiledForward:
    """A layer's forward, compiled once `on` is set; eager before.

    Function modes are out of sight while it runs: the one that counts what is made between layers (producers.py) has
    nothing to do inside of one, and would have to be traced.
    """

    def __init__(self, forward: Callable[..., Any], backend: str) -> None:
        self.on = False
        self._forward = forward
        self._compiled = torch.compile(forward, backend=backend, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on:
            return self._forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._compiled(*args, **kwargs)


def backend_of(compile: bool | str | None, plan: Plan) -> str | None:
    """The backend that compiles layers; None if they are not compiled.

    compile: as parallelize takes it. Raises ValueError if the plan cannot run compiled layers.
    """
    if compile is None:
        compile = plan.training.software == COMPILING
    if compile is False:
        return None
    if plan.schedule in ZERO_BUBBLE:
        raise ValueError(
            f"{plan.schedule} does a layer's backward in two parts, which a compiled layer does in one: use the "
            "schedule 1f1b or interleaved, or compile=False"
        )
    if plan.degrees.context > 1:
        raise ValueError("context parallelism takes attention's place while a layer runs eagerly; use compile=False")
    return "inductor" if compile is True else compile


def compile_layers(model: nn.Module, layers: list[LayerPlan], backend: str) -> list[CompiledForward]:
    """Replace the forwards of layer modules, and of the parts that are recomputed of a layer; call it after tensor
    parallelism and before recompute, whose repetition runs what was compiled.

    What tensor parallelism has put into a layer (its products and collectives) runs as it is, in between. Layers that
    keep only a part of what operators return (selective recompute) stay eager: a compiler decides that by itself.
    """
    made = []
    for layer in layers:
        if layer.recompute in ("none", "full"):
            made += [_compiled(model.get_submodule(name), backend) for name in layer.modules]
        made += [_compiled(part, backend) for part in _parts(model, layer)]
    return [forward for forward in made if forward is not None]


def compile_around_parts(model: nn.Module, layers: list[LayerPlan], backend: str) -> list[CompiledForward]:
    """Compile the forwards of layers with recomputed parts, for what is outside of these parts. To be called after
    recompute is set up."""
    with_parts = dict.fromkeys(layer.modules[0] for layer in layers if parts_of(layer.recompute))
    made = [_compiled(model.get_submodule(name), backend) for name in with_parts]
    return [forward for forward in made if forward is not None]


def _parts(model: nn.Module, layer: LayerPlan) -> list[nn.Module]:
    return [model.get_submodule(f"{layer.modules[0]}.{part}") for part in parts_of(layer.recompute)]


def _compiled(module: nn.Module, backend: str) -> CompiledForward | None:
    if "forward" in module.__dict__:  # one cut module: nothing is left to compile
        return None
    if keeps_logits_apart(module):
        return None
    for inner in module.modules():
        if "forward" in inner.__dict__:
            inner.forward = torch.compiler.disable(inner.forward)
        if inner is not module:
            _leave_hooks(inner)
    forward = CompiledForward(module.forward, backend)
    module.forward = forward
    return forward


def _leave_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = torch.compiler.disable(hook)
