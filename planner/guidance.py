"""The rules of thumb people use, as data: each with its reason, and the set-up it leads to."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..profiler.cluster import ClusterSpec
from .strategy import Pins, divisors
from .training import TrainingSpec


@dataclass(frozen=True)
class RuleOfThumb:
    """A set-up people would try by hand. `attempts`: in order; the first that fits is theirs."""

    name: str
    reason: str
    attempts: tuple[Pins, ...]


def rules_of_thumb(cluster: ClusterSpec, training: TrainingSpec) -> Iterator[RuleOfThumb]:
    """Set-ups for a cluster, simplest first. What a rule leaves open (micro-batch, recompute) is chosen at its best,
    so that a plan is compared with the rule well used."""
    count, per_host = cluster.num_devices, cluster.devices_per_host
    if count == 1:
        yield RuleOfThumb("one device", "fits on one GPU", (Pins(tensor=1, pipeline=1),))
        return
    yield RuleOfThumb("DDP", "the model fits on one GPU: replicate it", (Pins(tensor=1, pipeline=1, data_shard=1),))
    yield RuleOfThumb(
        "FSDP", "the model state does not fit: shard it over all GPUs", (Pins(tensor=1, pipeline=1, data_shard=count),)
    )
    if cluster.num_hosts > 1:
        yield RuleOfThumb(
            "HSDP",
            "shard inside the node, replicate across nodes",
            (Pins(tensor=1, pipeline=1, data_shard=per_host, data_replicate=count // per_host),),
        )
    yield RuleOfThumb(
        "naive model parallel",
        "put consecutive layers on each GPU, the whole batch one after the other",
        (Pins(tensor=1, pipeline=count, micro_batch=training.global_batch, schedule="gpipe"),),
    )
    if per_host > 1:
        yield RuleOfThumb(
            "TP in the node + DP",
            "tensor parallel inside the node, data parallel across",
            tuple(
                Pins(tensor=t, pipeline=1, data_shard=shard)
                for t in reversed(divisors(per_host))
                if t > 1
                for shard in (1, count // t)
            ),
        )
        yield RuleOfThumb(
            "Megatron 3D",
            "tensor parallel inside the node, as few pipeline stages as fit, data parallel for the rest",
            tuple(
                Pins(tensor=t, pipeline=p, data_shard=1, schedule="1f1b" if p > 1 else "none")
                for t in reversed(divisors(per_host))
                if t > 1
                for p in divisors(count // t)
            ),
        )
