"""What eager mode adds to the kernels of a layer: the host's time to issue its passes, counted in operators, and the
memory traffic of autocast.

A GPU that has done what it was given waits for the host. So a pass takes as long as its kernels, or as long as issuing
it, if that is longer. But the queue of kernels goes on from layer to layer: while the GPU runs a long kernel the host
gets ahead, and that hides the waiting for short ones. `Device.dispatch` is the time of one operator in seconds, with
the views, casts and modules around it. How many operators a hook is worth does not depend on how fast a host is. All
numbers are fitted to single ranks without peers on an H100, each model predicted by the others:
benchmarks/one_gpu/results/host.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ..arrays import Floats

SHARDED_UNIT = 67.0
"""Operators that the hooks of fully_shard are worth, in both passes of a unit: parameters are gathered, copied to their
places and given back, twice, and gradients are copied together and sent."""

WHOLE_UNIT = 39.0
"""The same for a unit that is not sharded: parameters are only cast, and gradients averaged."""

FORWARD = 0.45
"""Share of a unit's hooks that belongs to the forward."""

AUTOCAST = 0.19
"""Operators that the casts of autocast are worth, for each operator: under DDP and on one device, in 16 bits."""

AUTOCAST_TRAFFIC = 1.4
"""Memory traffic that autocast adds to operators that it runs in fp32, over their traffic in 16 bits: twice the bytes,
and casts. 1.0 for GPT-2 and 1.8 for BERT on an H100 (busy seconds of DDP beside those of FSDP)."""

EXCHANGE = 2.6
"""Operators that one exchange with tensor ranks is worth, with the copies around it."""

CONTEXT_FORWARD, CONTEXT_BACKWARD = 27.0, 20.0
"""Operators that an attention's exchanges between context ranks are worth, with operators on slices of a sequence."""

RECOMPUTED = 57.0
"""Operators that the hooks of a checkpoint are worth, which packs and unpacks what is kept and restores random
states."""

SPLIT = 2.1
"""Operators that a divided backward (zero-bubble schedules) is worth, for each parameter of a layer and micro-batch:
torch looks for the operators that read it, catches their gradients, and begins a backward at each. Median of six models
(1.6 to 3.5) whose kernels take no time on a CPU, ZB-H1 beside 1F1B: `python -m benchmarks.execution.split_backward`."""

PARAMETER = 1.2
"""Operators that the gradients' norm and the optimizer's step are worth, for each parameter, once per step."""

STEP = 105.0
"""Operators that the beginning and the end of a step are worth: a batch is split, norms and losses are read."""


@dataclass(frozen=True)
class Issued:
    """Seconds of one pass through a layer by itself: of the device's kernels, and of the host that issues them."""

    device_s: float
    host_s: float

    @property
    def wait_s(self) -> float:
        """Seconds that the device waits for the host in this pass, if no other pass comes before or after it."""
        return max(0.0, self.host_s - self.device_s)

    @property
    def ahead_s(self) -> float:
        """Seconds by which the host gets ahead of the device in this pass."""
        return max(0.0, self.device_s - self.host_s)


NOTHING_ISSUED = Issued(0.0, 0.0)


def sum_of(each: Iterable[Issued]) -> Issued:
    """Seconds of all passes together."""
    return reduce(lambda a, b: Issued(a.device_s + b.device_s, a.host_s + b.host_s), each, NOTHING_ISSUED)


def left_in_queue(longer_s: Floats, shorter_s: Floats, layers: Floats) -> Floats:
    """[...] -> share, between 0 and 1, of the seconds by which one side (device or host) takes longer than the other in
    single passes that is left when the passes follow each other in one queue: all passes of a micro-batch together take
    as long as the device computes, or as the host issues, if that is longer. longer_s, shorter_s: [..., pass, kind of
    layer] -> seconds of either side. layers: [kind] -> number of layers."""
    single = (np.maximum(0.0, longer_s - shorter_s) @ layers).sum(axis=-1)
    left: Floats = ((longer_s - shorter_s) @ layers).sum(axis=-1)
    return np.maximum(0.0, left) / np.where(single > 0.0, single, 1.0)


@dataclass(frozen=True)
class Hooks:
    """Work of the host around a layer's own operators, counted in operators, for one micro-batch."""

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
    """Hooks of a layer for one micro-batch. What a step has once is shared out over the backwards of its micro-batches.
    wrapped: the layer is a unit of fully_shard. sharded: its parameters are. autocast_operators, exchanges: numbers in
    the forward and in the backward. context: its attention is spread over ranks. split: the backward is divided into
    one for inputs and one for weights."""
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
