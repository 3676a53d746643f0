"""Rules of thumb that people use, as data: questions with reasons, and the set-ups that they lead to."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ...profiler.machine.cluster import ClusterSpec
from ...profiler.machine.units import format_bytes
from ...profiler.model.model_profile import ModelProfile
from ..plan.legality import divisors, expert_rule, has_sequence_attention
from ..plan.pins import Pins
from ..plan.training import TrainingSpec

MOST_STAGES = 64
"""Most stages of a pipeline that people set up by hand."""


@dataclass(frozen=True)
class RuleOfThumb:
    """A set-up that people would try by hand. attempts: tried in order; the first that fits is the one they would
    take."""

    name: str
    reason: str
    attempts: tuple[Pins, ...]


_PLAIN: dict[str, Any] = {"context": 1, "expert": 1}
"""Pins of rules that speak of DDP, FSDP or 3D parallelism: neither sequences nor experts are split."""

REPLICAS = Pins(tensor=1, pipeline=1, data_shard=1, **_PLAIN)
"""Pins for the whole model on every GPU."""


def rules_of_thumb(cluster: ClusterSpec, training: TrainingSpec) -> Iterator[RuleOfThumb]:
    """Set-ups that people would try on a cluster, simplest first. What a rule leaves open (micro-batch, recompute) is
    chosen as well as possible, so that a plan is compared with the rule at its best."""
    count, per_host = cluster.num_devices, cluster.devices_per_host
    if count == 1:
        yield RuleOfThumb("one device", "fits on one GPU", (Pins(tensor=1, pipeline=1),))
        return
    yield RuleOfThumb("DDP", "the model fits on one GPU: replicate it", (REPLICAS,))
    yield RuleOfThumb(
        "FSDP",
        "the model state does not fit: shard it over all GPUs",
        (Pins(tensor=1, pipeline=1, data_shard=count, **_PLAIN),),
    )
    if cluster.num_hosts > 1:
        yield RuleOfThumb(
            "HSDP",
            "shard inside the node, replicate across nodes",
            (Pins(tensor=1, pipeline=1, data_shard=per_host, data_replicate=count // per_host, **_PLAIN),),
        )
    yield RuleOfThumb(
        "naive model parallel",
        "put consecutive layers on each GPU, the whole batch one after the other",
        (Pins(tensor=1, pipeline=count, micro_batch=training.global_batch, schedule="gpipe", **_PLAIN),),
    )
    if per_host > 1:
        yield RuleOfThumb(
            "TP in the node + DP",
            "tensor parallel inside the node, data parallel across",
            tuple(
                Pins(tensor=t, pipeline=1, data_shard=shard, **_PLAIN)
                for t in reversed(divisors(per_host))
                if t > 1
                for shard in (1, count // t)
            ),
        )
        yield RuleOfThumb(
            "Megatron 3D",
            "tensor parallel inside the node, as few pipeline stages as fit, data parallel for the rest",
            tuple(
                Pins(
                    tensor=t,
                    pipeline=p,
                    data_shard=count // (t * p),
                    gradient_sync="last",
                    reshard=False,
                    schedule="1f1b" if p > 1 else "none",
                    **_PLAIN,
                )
                for t in reversed(divisors(per_host))
                if t > 1
                for p in divisors(count // t)
            ),
        )


LONG_SEQUENCE = 8192
"""Tokens from which on people split sequences between GPUs (Megatron-LM's guide to context parallelism: 8K and up)."""

NAMED_RULES = ("megatron", "torchtitan", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
"""Names of the set-ups of well-known frameworks."""


def named_rules(cluster: ClusterSpec, profile: ModelProfile | None = None) -> tuple[RuleOfThumb, ...]:
    """The set-ups of well-known frameworks on a cluster, in the order of NAMED_RULES; for a model with what its experts
    and its sequences call for.

    Megatron-LM: the least model parallelism that fits, tensor parallel inside the node first, then 1F1B stages, the
    optimizer sharded over data ranks (Narayanan et al., SC21, takeaways 1 and 2; --use-distributed-optimizer).
    torchtitan: FSDP over all ranks, tensor parallel inside the node where that does not fit, then stages (its
    train_configs of Llama 3 at 8B, 70B and 405B). DeepSpeed: ZeRO over all ranks (Rajbhandari et al., SC20).
    What both guides say beyond that, as far as the executor runs it: experts are spread inside the node (Megatron
    Core's guide to mixtures prefers that to cutting them by tensor parallelism), and from LONG_SEQUENCE tokens on
    context ranks come before stages.
    """
    count, per_host = cluster.num_devices, cluster.devices_per_host
    inside = [t for t in reversed(divisors(per_host)) if t > 1]
    stages = [p for p in divisors(count) if 1 < p <= MOST_STAGES]
    fewest = [_ModelSplit(t) for t in divisors(per_host) if count % t == 0]
    longer = _context_splits(cluster, profile)
    deeper = [_ModelSplit(t, pipeline=p) for p in stages for t in inside or [1] if count % (t * p) == 0]

    def pins(split: _ModelSplit, **more: Any) -> Pins:
        ways = split.tensor * split.context * split.pipeline
        return Pins(
            tensor=split.tensor,
            pipeline=split.pipeline,
            context=split.context if split.context > 1 else None,
            data_shard=count // ways,
            expert=_experts_inside(cluster, profile, count // (split.tensor * split.pipeline)),
            **more,
        )

    def megatron(split: _ModelSplit) -> Pins:
        return pins(split, schedule="1f1b" if split.pipeline > 1 else "none", gradient_sync="last", reshard=False)

    def zero(stage: int) -> Pins:
        sync: Literal["every", "last"] = "last" if stage == 1 else "every"
        return Pins(tensor=1, pipeline=1, data_shard=count, gradient_sync=sync, reshard=stage == 3, **_PLAIN)

    sharded = [_ModelSplit(), *(_ModelSplit(t) for t in inside if count % t == 0), *longer, *deeper]
    return (
        RuleOfThumb(
            "megatron",
            "the least model parallelism that fits, tensor parallel in the node first; optimizer sharded",
            tuple(megatron(split) for split in (*fewest, *longer, *deeper)),
        ),
        RuleOfThumb(
            "torchtitan",
            "FSDP over all GPUs, then tensor parallel in the node, then stages",
            tuple(pins(split) for split in sharded),
        ),
        *(RuleOfThumb(f"deepspeed-zero{stage}", f"ZeRO-{stage} over all GPUs", (zero(stage),)) for stage in (1, 2, 3)),
    )


@dataclass(frozen=True)
class _ModelSplit:
    """Degrees by which the model and its sequences are split."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1


def _context_splits(cluster: ClusterSpec, profile: ModelProfile | None) -> list[_ModelSplit]:
    """Splits with tensor parallelism inside the node and 2 or more context ranks, fewest first; none unless sequences
    are long."""
    if profile is None or not has_sequence_attention(profile):
        return []
    if (profile.seq_len or 0) < LONG_SEQUENCE:
        return []
    tensor = cluster.devices_per_host
    return [_ModelSplit(tensor, context) for context in divisors(cluster.num_devices // tensor) if context > 1]


def _experts_inside(cluster: ClusterSpec, profile: ModelProfile | None, ranks: int) -> int | None:
    """Expert degree that spreads experts over ranks of one node; None if the model has no experts, or they cannot be
    spread so. ranks: number of ranks that hold different tokens."""
    counts = [bank.count for layer_class in profile.classes for bank in layer_class.experts] if profile else []
    if not (profile and counts):
        return None
    expert = math.gcd(cluster.devices_per_host, ranks, *counts)
    return expert if expert_rule(profile, expert) is None else None


@dataclass(frozen=True)
class Question:
    """One question of the path that people are advised to walk. advice: what a yes leads to, and why."""

    asks: str
    advice: str


ONE_GPU = Question(
    "Does it fit on one GPU?",
    "replicate it, data parallel (DDP): replicas talk once a step, and nothing else is as simple",
)
RECOMPUTED = Question(
    "Does it fit on one GPU if activations are recomputed?",
    "activation checkpointing before any splitting: it costs a third of the compute, and no communication",
)
SHARDED = Question(
    "Does it fit with its state sharded over all GPUs?",
    "FSDP: data parallel still, and each GPU holds its share of parameters, gradients and optimizer",
)
IN_THE_NODE = Question(
    "Does it fit with tensor parallelism inside the node?",
    "tensor parallel before a pipeline: it has fewer sequential dependencies, as all GPUs work on every micro-batch, "
    "but it talks in every layer and so belongs inside the node; data parallel across",
)
COMBINED = Question(
    "Does it fit with tensor parallelism inside the node and stages across?",
    "combine: tensor parallel inside the node, as few pipeline stages across as fit, data parallel for the rest",
)
LONG = Question(
    "Are its sequences long?",
    "split the sequence: sequence parallel beside tensor parallel, then context parallel",
)
FEWER_SPLITS = Question(
    "Would the model be split less if activations were recomputed?",
    "activation checkpointing before more splitting",
)


@dataclass(frozen=True)
class NoCandidate:
    """A way to use several GPUs that the search does not consider, and why not."""

    name: str
    reason: str


def no_candidates(parameter_bytes: float, num_devices: int) -> tuple[NoCandidate, ...]:
    """Further ways to use several GPUs that tutorials name, with reasons, in this model's numbers, why none of them can
    be the plan."""
    size, workers = format_bytes(parameter_bytes), max(2, num_devices)
    return (
        NoCandidate(
            "nn.DataParallel",
            f"one process and one Python lock drive all GPUs of one host, and copy {size} of parameters from the first "
            "to each of the others before every forward; DDP computes the same with one process per GPU and one "
            "all-reduce (torch's own documentation advises it instead)",
        ),
        NoCandidate(
            "parameter server",
            f"{workers} workers would push {size} of gradients and pull as much through the server's link in every "
            f"step, {format_bytes(2 * workers * parameter_bytes)} in all, where a ring passes under "
            f"{format_bytes(2 * parameter_bytes)} through each GPU however many there are; without waiting for each "
            "other workers train on stale parameters",
        ),
        NoCandidate(
            "asynchronous pipeline",
            "PipeDream and its kin fill the bubble by updating with stale weights and keep a copy of them for every "
            "micro-batch in flight; the numbers are then not those of one device, which every plan here keeps",
        ),
    )
