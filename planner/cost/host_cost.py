"""What eager mode adds to a layer's kernels: the host's time to issue its passes, in operators, and autocast's traffic.

A GPU that is done with what it was given waits for the host. So a pass takes what its kernels take, or what issuing it
takes if that is longer; but the queue of kernels goes on from layer to layer, and while the GPU is at a long one the
host comes ahead, which hides what short ones wait for. `Device.dispatch` has the seconds of one operator, with the
views, casts and modules around it; how many operators hooks are worth does not depend on how fast a host is. All
numbers are fitted to ranks without peers on an H100, each model predicted by the others:
benchmarks/one_gpu/results/host.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ..arrays import Floats

SHARDED_UNIT = 67.0
"""Hooks of fully_shard in both passes of a unit: parameters are gathered, copied to their places and given back, twice,
and gradients copied together and sent."""

WHOLE_UNIT = 39.0
"""The same where nothing is sharded, but parameters are cast and gradients averaged."""

FORWARD = 0.45
"""Share of a unit's hooks that is in the forward."""

AUTOCAST = 0.19
"""Casts of autocast, for each operator: DDP and one device in 16 bits."""

AUTOCAST_TRAFFIC = 1.4
"""Memory traffic of the device that autocast adds, over that in 16 bits of operators that run in fp32 with it: twice
the bytes, and casts. 1.0 of GPT-2 and 1.8 of BERT on an H100 (busy seconds of DDP beside FSDP)."""

EXCHANGE = 2.6
"""One exchange with tensor ranks, and the copies around it."""

CONTEXT_FORWARD, CONTEXT_BACKWARD = 27.0, 20.0
"""Exchanges of an attention between context ranks, with operators on slices of a sequence."""

RECOMPUTED = 57.0
"""Hooks of a checkpoint, which packs and unpacks what is kept and brings back random states."""

SPLIT = 2.1
"""What torch does for each parameter of a layer, and micro-batch, where a zero-bubble schedule divides the backward: it
looks for the operators that read one, catches their gradients, and begins a backward at each. Median of six models
(1.6 to 3.5) whose kernels take no time on a CPU, ZB-H1 beside 1F1B: `python -m benchmarks.execution.split_backward`."""

PARAMETER = 1.2
"""A parameter's share of the gradients' norm and of the optimizer's step."""

STEP = 105.0
"""What begins and ends a step: a batch is split, norms and losses are read."""


@dataclass(frozen=True)
class Issued:
    """A pass through a layer by itself: seconds of the device's kernels, and of the host that issues them."""

    device_s: float
    host_s: float

    @property
    def wait_s(self) -> float:
        """Seconds that the device waits for the host, nothing before it and nothing after."""
        return max(0.0, self.host_s - self.device_s)

    @property
    def ahead_s(self) -> float:
        """Seconds that the host comes ahead of the device."""
        return max(0.0, self.device_s - self.host_s)


NOTHING_ISSUED = Issued(0.0, 0.0)


def sum_of(each: Iterable[Issued]) -> Issued:
    """All of them, one after another."""
    return reduce(lambda a, b: Issued(a.device_s + b.device_s, a.host_s + b.host_s), each, NOTHING_ISSUED)


def left_in_queue(longer_s: Floats, shorter_s: Floats, layers: Floats) -> Floats:
    """In single passes one side, device or host, takes longer than the other: the share of those seconds that is left
    when the passes follow each other in one queue. All passes of a micro-batch together take what the device computes,
    or what the host issues if that is longer. longer_s, shorter_s: [..., pass, kind of layer] of either side. layers:
    [kind] -> how many there are. [...] -> between 0 and 1."""
    single = (np.maximum(0.0, longer_s - shorter_s) @ layers).sum(axis=-1)
    left: Floats = ((longer_s - shorter_s) @ layers).sum(axis=-1)
    return np.maximum(0.0, left) / np.where(single > 0.0, single, 1.0)


@dataclass(frozen=True)
class Hooks:
    """Operators' worth of what is around those of a layer."""

    forward: float
    backward: float


def hooks(
    wrapped: bool,
    sharded: bool,
    autocast_operators: tuple[float, float],
    exchanges: tuple[int, int],
    context: bool,
    num_parameters: int,
    num_layers: int,
    num_microbatches: int,
    split: bool = False,
) -> Hooks:
    """Of one micro-batch. wrapped: in a unit of fully_shard. autocast_operators, exchanges: in the forward and in the
    backward. context: its attention is spread over ranks. split: inputs and weights have backwards of their own. What a
    step has once counts with the backward of each micro-batch for a share."""
    unit = (SHARDED_UNIT if sharded else WHOLE_UNIT) * wrapped
    once = (PARAMETER * num_parameters + STEP / num_layers) / num_microbatches
    return Hooks(
        FORWARD * unit + AUTOCAST * autocast_operators[0] + EXCHANGE * exchanges[0] + CONTEXT_FORWARD * context,
        (1 - FORWARD) * unit
        + AUTOCAST * autocast_operators[1]
        + EXCHANGE * exchanges[1]
        + CONTEXT_BACKWARD * context
        + SPLIT * num_parameters * split
        + once,
    )
