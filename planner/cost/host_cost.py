"""What eager mode adds to a layer's kernels: the host's time to issue its passes, in operators, and autocast's traffic.

A GPU that is done with what it was given waits for the host. So a pass takes what its kernels take, or what issuing it
takes if that is longer. (The queue of kernels goes on from layer to layer, which is not followed here: a long layer
after short ones hides what they wait for.) `Device.dispatch` has the seconds of one operator, with the views, casts and
modules around it; how many operators hooks are worth does not depend on how fast a host is. All numbers are fitted to
ranks without peers on an H100, each model predicted by the others: benchmarks/one_gpu/results/host.md.
"""

from dataclasses import dataclass

SHARDED_UNIT = 55.0
"""Hooks of fully_shard in both passes of a unit: parameters are gathered, copied to their places and given back, twice,
and gradients copied together and sent."""

WHOLE_UNIT = 37.0
"""The same where nothing is sharded, but parameters are cast and gradients averaged."""

FORWARD = 0.45
"""Share of a unit's hooks that is in the forward."""

AUTOCAST = 0.15
"""Casts of autocast, for each operator: DDP and one device in 16 bits."""

AUTOCAST_TRAFFIC = 1.4
"""Memory traffic of the device that autocast adds, over that in 16 bits of operators that run in fp32 with it: twice
the bytes, and casts. 1.0 of GPT-2 and 1.8 of BERT on an H100 (busy seconds of DDP beside FSDP)."""

EXCHANGE = 3.3
"""One exchange with tensor ranks, and the copies around it."""

CONTEXT_FORWARD, CONTEXT_BACKWARD = 33.0, 20.0
"""Exchanges of an attention between context ranks, with operators on slices of a sequence."""

RECOMPUTED = 30.0
"""Hooks of a checkpoint, which packs and unpacks what is kept and brings back random states."""

PARAMETER = 1.5
"""A parameter's share of the gradients' norm and of the optimizer's step."""

STEP = 110.0
"""What begins and ends a step: a batch is split, norms and losses are read."""


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
) -> Hooks:
    """Of one micro-batch. wrapped: in a unit of fully_shard. autocast_operators, exchanges: in the forward and in the
    backward. context: its attention is spread over ranks. What a step has once counts with the backward of each
    micro-batch for a share."""
    unit = (SHARDED_UNIT if sharded else WHOLE_UNIT) * wrapped
    once = (PARAMETER * num_parameters + STEP / num_layers) / num_microbatches
    return Hooks(
        FORWARD * unit + AUTOCAST * autocast_operators[0] + EXCHANGE * exchanges[0] + CONTEXT_FORWARD * context,
        (1 - FORWARD) * unit
        + AUTOCAST * autocast_operators[1]
        + EXCHANGE * exchanges[1]
        + CONTEXT_BACKWARD * context
        + once,
    )
