"""Devices of a declared speed: every layer takes as long as the cost model says that such a device would.

The arithmetic is done for real, on tensors so small that it hardly takes time; the rest of a layer's declared time is
slept. So step times depend on declared compute and on real schedules and collectives, not on this machine's kernels.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan import Plan
from meshwright.planner.refit import on_device
from meshwright.planner.strategy import LayerOption, shape_of
from meshwright.profiler.cluster import Device
from meshwright.profiler.model_profile import ModelProfile


@dataclass(frozen=True)
class Pad:
    """Seconds that a layer computes for one micro-batch: forward, backward with what it recomputes, and of that the
    part for gradients of weights, which zero-bubble schedules put off."""

    forward_s: float
    backward_s: float
    weight_s: float

    def __add__(self, other: "Pad") -> "Pad":
        return Pad(self.forward_s + other.forward_s, self.backward_s + other.backward_s, self.weight_s + other.weight_s)


@dataclass(frozen=True)
class PaddedLayer:
    """The modules where a layer begins and ends, and how long it takes."""

    first: str
    last: str
    pad: Pad


def pads(plan: Plan, profile: ModelProfile, device: Device) -> list[PaddedLayer]:
    """How long the layers of a plan compute on a device. What runs outside of modules counts with the layer before."""
    plan = on_device(plan, device)
    model, shape = CostModel(profile, plan.cluster, plan.training), shape_of(plan)
    found: list[PaddedLayer] = []
    options = [
        LayerOption(layer.recompute, layer.reshard, layer.offload) for stage in plan.stages for layer in stage.layers
    ]
    for layer, kind, option in zip(profile.layers, model.kinds, options, strict=True):
        cost = model.cost(kind, shape, option)
        pad = Pad(cost.forward_s, cost.backward_s + cost.recompute_s, cost.weight_s)
        if layer.modules:
            found.append(PaddedLayer(layer.modules[0], layer.modules[-1], pad))
        elif found:
            before = found[-1]
            found[-1] = PaddedLayer(before.first, before.last, before.pad + pad)
    return found


def padded(build: Callable[[], nn.Module], layers: list[PaddedLayer]) -> Callable[[], nn.Module]:
    """The model with layers that take their declared time."""

    def model() -> nn.Module:
        module = build()
        for layer in layers:
            _pad(module.get_submodule(layer.first), module.get_submodule(layer.last), layer.pad)
        return module

    return model


def _pad(first: nn.Module, last: nn.Module, pad: Pad) -> None:
    begun = [0.0]

    def begin(module: nn.Module, args: Any) -> None:
        begun[0] = time.thread_time()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not tensors or tensors[0].is_meta or type(tensors[0]).__name__ == "FakeTensor":
            return
        computed_s = time.thread_time() - begun[0]
        _sleep(pad.forward_s - computed_s)
        weight = max((p for p in last.parameters() if p.requires_grad), key=lambda p: p.numel(), default=None)
        later_s = 0.0 if weight is None else pad.weight_s
        if weight is not None and not hasattr(weight, _PADDED):
            weight.register_hook(lambda gradient: _sleep(later_s - computed_s))
            setattr(weight, _PADDED, True)  # one tensor for all micro-batches, gathered or not
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: _sleep(pad.backward_s - later_s - computed_s))
                break

    first.register_forward_pre_hook(begin)
    last.register_forward_hook(end)


_PADDED = "_padded"


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)
