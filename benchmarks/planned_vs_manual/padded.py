"""Devices of a declared speed: every layer takes as long as the cost model says that such a device would.

The arithmetic is done for real, on tensors so small that it takes a fraction of its declared time; the rest is slept.
So step times depend on declared compute and on real schedules and collectives, not on this machine's kernels.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from meshwright.executor.parallel.stage_module import stages_in
from meshwright.executor.trainer import Trainer
from meshwright.planner.cost.estimate import priced_stages
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.refit import on_device
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.schedules import ZERO_BUBBLE
from meshwright.planner.plan.shape import LayerOption
from meshwright.profiler.machine.cluster import Device
from meshwright.profiler.model.model_profile import ModelProfile


@dataclass(frozen=True)
class Pad:
    """Seconds that a layer computes for one micro-batch: forward, backward with what it recomputes, and of that the
    part for gradients of weights that a zero-bubble schedule puts off."""

    forward_s: float
    backward_s: float
    weight_s: float

    def __add__(self, other: "Pad") -> "Pad":
        return Pad(self.forward_s + other.forward_s, self.backward_s + other.backward_s, self.weight_s + other.weight_s)


NOTHING = Pad(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class PaddedLayer:
    """The module where a layer ends, "" if it is none, and how long it takes."""

    last: str
    pad: Pad


def pads(plan: Plan, profile: ModelProfile, device: Device) -> list[PaddedLayer]:
    """[layer] -> how long it computes on a device."""
    plan = on_device(plan, device)
    model, shape = CostModel(profile, plan.cluster, plan.training), shape_of(plan)
    options = [LayerOption(layer.recompute, layer.reshard, layer.offload) for layer in plan.layers]
    found = []
    for layer, kind, option in zip(profile.layers, model.kinds, options, strict=True):
        cost = model.cost(kind, shape, option)
        later_s = cost.weight_s if plan.schedule in ZERO_BUBBLE else 0.0
        pad = Pad(cost.forward_s, cost.backward_s + cost.recompute_s, later_s)
        found.append(PaddedLayer(layer.modules[-1] if layer.modules else "", pad))
    return found


def optimizer_pad_s(plan: Plan, profile: ModelProfile, device: Device, position: int) -> float:
    """Seconds of the optimizer step on a rank at this place of the pipeline."""
    stages = priced_stages(on_device(plan, device), profile)
    return sum(stages[stage][0].optimizer_s for stage in plan.stages_of(position))


class Clock:
    """What this rank's thread has really worked since the last pad, and so how much of the next one is left to sleep.

    Work is the time on a core and the time of waiting for one, for here all ranks share a few cores; not the time of
    waiting for other ranks. Python's own work between layers counts, too, as a real device's queue would hide it. Work
    beyond a pad is taken off the following ones.
    """

    def __init__(self) -> None:
        self._account: int | None = None
        with suppress(OSError):
            self._account = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._seen_s = 0.0
        self._owed_s = 0.0
        self.declared_s = self.worked_s = 0.0

    def begin(self) -> None:
        """A step begins here; nothing is owed."""
        self._seen_s, self._owed_s = self._work_s(), 0.0
        self.declared_s = self.worked_s = 0.0

    def pad(self, seconds: float) -> None:
        """Take so many seconds, those included that were worked since the last call."""
        now = self._work_s()
        self.declared_s += seconds
        self.worked_s += now - self._seen_s
        left_s = seconds - self._owed_s - (now - self._seen_s)
        self._seen_s, self._owed_s = now, max(0.0, -left_s)
        if left_s > 0.0:
            time.sleep(left_s)

    def _work_s(self) -> float:
        if self._account is None:
            return time.thread_time()
        on_core, in_queue = os.pread(self._account, 100, 0).split()[:2]  # nanoseconds
        return (int(on_core) + int(in_queue)) / 1e9


def pad_trainer(trainer: Trainer, plan: Plan, profile: ModelProfile, device: Device, clock: Clock) -> None:
    """Let the layers that this rank runs take their declared time, before its first step. (On a rank of a pipeline the
    layers of others are there, too, and return at once.)"""
    layers = pads(plan, profile, device)
    if plan.degrees.pipeline == 1:
        _pad_layers(trainer.model, layers, clock)
        return
    ends = [0, *itertools.accumulate(len(stage.layers) for stage in plan.stages)]
    for stage in stages_in(trainer.model):
        _pad_layers(stage.model, layers[ends[stage.stage] : ends[stage.stage + 1]], clock)


def _pad_layers(model: nn.Module, layers: list[PaddedLayer], clock: Clock) -> None:
    """What runs outside of modules counts with the layer before, or if there is none with the one after."""
    carried, last = NOTHING, ""
    joined: dict[str, Pad] = {}
    for layer in layers:
        last = layer.last or last
        if last:
            joined[last] = joined.get(last, NOTHING) + layer.pad + carried
            carried = NOTHING
        else:
            carried += layer.pad
    for name, pad in joined.items():
        _pad(model.get_submodule(name), pad, clock)


def padded_optimizer(
    make: Callable[[Iterable[nn.Parameter]], Optimizer], seconds: float, clock: Clock
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """The optimizer with a step that takes its declared time."""

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = make(parameters)
        made.register_step_post_hook(lambda *_: clock.pad(seconds))
        return made

    return optimizer


def _pad(last: nn.Module, pad: Pad, clock: Clock) -> None:
    def end(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not tensors or tensors[0].is_meta or type(tensors[0]).__name__ == "FakeTensor":
            return
        clock.pad(pad.forward_s)
        weight = max((p for p in last.parameters() if p.requires_grad), key=lambda p: p.numel(), default=None)
        later_s = 0.0 if weight is None else pad.weight_s
        if weight is not None and later_s and not hasattr(weight, _PADDED):
            weight.register_hook(lambda gradient: clock.pad(later_s))
            setattr(weight, _PADDED, True)  # one tensor for all micro-batches, gathered or not
        first = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if first is not None:
            left = [pad.backward_s - later_s]  # once: a backward for weights alone passes here again
            first.register_hook(lambda gradient: clock.pad(left.pop()) if left else None)

    last.register_forward_hook(end, prepend=True)  # while parameters that are gathered for the layer are there


_PADDED = "_padded"
