"""What data ranks exchange for one layer, and how much of it is exposed: for one shape, or for tables of shapes at
once."""

from dataclasses import dataclass
from typing import Generic

from .comm_cost import RingTimes, exposed_s, ring_s
from .elementwise import Flag, Values, choose, most


@dataclass(frozen=True)
class DataRates(Generic[Values]):
    """Coefficients of the seconds to gather parameters, to scatter sums of gradients to the ranks that shard them, and
    to sum these shards over replicas."""

    gather: RingTimes[Values]
    scatter: RingTimes[Values]
    reduce: RingTimes[Values]


@dataclass(frozen=True)
class DataSeconds(Generic[Values]):
    """Exposed seconds of gathers and reductions: per micro-batch in the forward, in the backward, and once per step."""

    forward_s: Values
    backward_s: Values
    once_s: Values


def gather_s(elements: Values, element_bytes: float, rates: DataRates[Values]) -> Values:
    """Seconds to gather the parameters of a layer."""
    return ring_s(element_bytes * elements, rates.gather)


def reduce_s(trainable: Values, gradient_bytes: float, sharded_over: Values, rates: DataRates[Values]) -> Values:
    """Seconds to reduce the gradients of a layer to shards, and to sum the shards over replicas."""
    num_bytes = gradient_bytes * trainable
    return ring_s(num_bytes, rates.scatter) + ring_s(num_bytes / sharded_over, rates.reduce)


def exposed_data_s(
    gathers_s: Values,
    reduces_s: Values,
    forward_s: Values,
    backward_s: Values,
    resharded: Flag,
    every: Flag,
    overlap: Values,
    contention: float,
) -> DataSeconds[Values]:
    """Exposed seconds of the gathers and reductions of a layer that computes for `forward_s` and `backward_s`.

    resharded: parameters are given back after the forward, and gathered again for the backward. every: gradients are
    reduced after each micro-batch; else after the last one only, and parameters that stay gathered are gathered once a
    step.
    """
    repeated: Values = choose(resharded, gathers_s, 0.0)
    each: Values = choose(every, reduces_s, 0.0)
    ahead = exposed_s(gathers_s, forward_s, overlap, contention)
    last = exposed_s(reduces_s, most(backward_s - repeated, 0.0), overlap, contention)
    kept: Values = choose(every, 0.0, ahead)
    first: Values = choose(resharded, 0.0, kept)
    late: Values = choose(every, 0.0, last)
    return DataSeconds(ahead - first, exposed_s(repeated + each, backward_s, overlap, contention), late + first)


def added_elements(gathered: Values, sharded_over: Values, every: Flag) -> Values:
    """Elements of gradients that are added to those of earlier micro-batches: those of a shard if gradients are reduced
    first."""
    ways: Values = choose(every, sharded_over, 1.0)
    return gathered / ways


def added_share(num_microbatches: int) -> float:
    """Share of the micro-batches that add their gradients to those of earlier ones."""
    return 1 - 1 / num_microbatches
