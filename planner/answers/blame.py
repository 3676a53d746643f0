"""Which of the user's pins exclude every legal shape, and the rule that makes them do so."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...profiler.machine.cluster import ClusterSpec
from ...profiler.machine.units import gpus_in_words
from ...profiler.model.model_profile import ModelProfile
from ..plan.legality import (
    expert_rule,
    fp8_rule,
    held_together,
    pipeline_rule,
    sharding_rule,
    stage_starts,
    tensor_rule,
)
from ..plan.pin_texts import in_words
from ..plan.pins import Pins
from ..plan.setups import nearest_divisors
from ..plan.training import TrainingSpec
from ..solve.space import Space

_COULD_BE_ONE = ("tensor", "sequence", "context", "expert")
"""Degrees that may be 1. A rule about one of these has excluded only shapes that use it, so it is named last."""


def is_legal(profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, pins: Pins) -> bool:
    """Whether some shape agrees with the pins and breaks no rule."""
    return next(Space(profile, cluster, training, pins, counted=False).families(), None) is not None


@dataclass(frozen=True)
class Blame:
    """The few pins, in words, that together leave no legal shape, and the rule that excludes the shapes which they
    allow."""

    pins: tuple[str, ...]
    rule: str


def blamed(profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, pins: Pins) -> Blame | None:
    """The pins that leave no legal shape, and why; None if pins are not to blame."""

    def said(some: Pins) -> Pins:
        """The pins; if the loss couples samples and no micro-batch is pinned, with one, so that its absence is not
        blamed for everything."""
        return replace(some, micro_batch=1) if profile.coupling and some.micro_batch is None else some

    beyond = replace(Pins(), everything=pins.everything, parts=pins.parts, offload_activations=pins.offload_activations)
    anything = said(beyond)
    if not in_words(pins) or not is_legal(profile, cluster, training, anything):
        return None
    if is_legal(profile, cluster, training, said(pins)):
        return None
    left = pins
    for pin in in_words(pins):
        fewer = in_words(left)[pin]
        if not is_legal(profile, cluster, training, said(fewer)):
            left = fewer
    words = tuple(in_words(left))
    of_all, of_left = (_rejected(profile, cluster, training, said(each)) for each in (pins, left))
    own = _of_a_framework(left) or _of_a_pin(profile, training, left, cluster.num_devices)
    why = own or _first(of_all, words) or _numbers_rule(pins, cluster, training) or _first(of_left, words)
    return Blame(words, why or _unreachable(left, cluster, training))


def _rejected(profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, pins: Pins) -> Mapping[str, int]:
    """Rule -> number of shapes that it excludes, for pins without legal shapes."""
    space = Space(profile, cluster, training, pins)
    assert next(space.families(), None) is None
    return space.rejected


def _first(rejected: Mapping[str, int], pinned: Sequence[str]) -> str | None:
    """The rule to name: one that begins with the name of a pin, else one without a name, else one on what every layout
    has (such as a micro-batch), else one on what layouts need not have. Of several such rules the one that excludes
    most shapes; None if there are no rules."""
    names = {words.partition("=")[0] for words in pinned}

    def rank(rule: str) -> tuple[int, int]:
        name, mark, _ = rule.partition(": ")
        if name in names:
            return 0, -rejected[rule]
        if not mark or not name.isidentifier():
            return 1, -rejected[rule]
        return 3 if name in _COULD_BE_ONE else 2, -rejected[rule]

    return min(rejected, key=rank, default=None)


def _of_a_framework(left: Pins) -> str | None:
    """Why the framework runs no plan with the schedule, sharding or context ranks that are pinned; None if that is not
    the reason."""
    framework = left.framework
    if framework is None:
        return None
    if left.context not in (None, 1) or left.context_kind is not None:
        by_context = framework.context_rule(left.context_kind)
        if by_context is not None:
            return by_context
    if left.pipeline not in (None, 1) or left.schedule not in (None, "none"):
        return framework.pipeline_rule(left.schedule, left.gradient_sync, left.reshard)
    return None


def _of_a_pin(profile: ModelProfile, training: TrainingSpec, left: Pins, num_devices: int) -> str | None:
    """The rule that excludes what a single pin asks for, whatever the other pins are, even if other rules exclude more
    shapes; None if there is none."""
    if left.expert not in (None, 1):  # where no ranks may be shards there is no shape that could be rejected for it
        by_experts = expert_rule(profile, left.expert) or _with_shards(profile, training, left, "expert")
        if by_experts is not None:
            return by_experts
    if left.tensor is not None and num_devices % left.tensor:
        return None
    places = len(stage_starts(profile)) + 1
    if left.pipeline not in (None, 1) and (by_stages := pipeline_rule(profile, left.pipeline, places)) is not None:
        return by_stages
    if left.schedule not in (None, "none") and left.pipeline != 1:
        ranks = left.pipeline or 2
        stages = ranks * ((left.virtual_stages or 2) if left.schedule in ("interleaved", "zb-v") else 1)
        if profile.decides_by_values:
            return pipeline_rule(profile, ranks, places)
        if places < stages:
            return (
                f"{left.schedule} on {ranks} pipeline ranks takes at least {stages} stages, and the model can be cut "
                f"into {places}{held_together(profile)}"
            )
    if left.virtual_stages not in (None, 1) and left.pipeline != 1:
        ranks, each = left.pipeline or 2, left.virtual_stages
        if places < ranks * each:
            return (
                f"{ranks} pipeline ranks of {each} stages each are {ranks * each} stages, and the model can be cut "
                f"into {places}{held_together(profile)}"
            )
    if left.tensor not in (None, 1):
        by_tensor = tensor_rule(profile, left.tensor) or fp8_rule(profile, training, left.tensor)
        if by_tensor is not None:
            return by_tensor
    if left.data_shard not in (None, 1):
        return sharding_rule(profile, training.precision)
    others = ("tensor", "context", *(["pipeline"] if training.is_mixed else []))
    return next(
        (_with_shards(profile, training, left, name) for name in others if getattr(left, name) not in (None, 1)), None
    )


def _with_shards(profile: ModelProfile, training: TrainingSpec, left: Pins, name: str) -> str | None:
    """The rule that excludes fully_shard, which the pin `name` needs without saying so; None if nothing does."""
    rule = sharding_rule(profile, training.precision)
    return None if rule is None else f"{rule}; {name}={getattr(left, name)} is run with fully_shard, too"


def _numbers_rule(pins: Pins, cluster: ClusterSpec, training: TrainingSpec) -> str | None:
    """Which of the pinned degrees or the micro-batch does not divide the GPUs or the batch, in words; None if all
    do."""
    degrees = ("tensor", "context", "pipeline", "data_replicate", "data_shard")
    pinned = {name: value for name in degrees if (value := getattr(pins, name)) is not None}
    product, count = math.prod(pinned.values()), cluster.num_devices
    if count % product:
        near = nearest_divisors(count, product)
        return f"{' x '.join(map(str, pinned.values()))} does not divide {gpus_in_words(count)}, as {near} would"
    size, batch = pins.micro_batch, training.global_batch
    if size is not None and batch % size:
        near = nearest_divisors(batch, size)
        return f"micro-batches of {size} do not divide the global batch of {batch}, as {near} would"
    if not {"tensor", "context", "pipeline"} <= pinned.keys():
        return None
    data = count // math.prod(pinned[name] for name in degrees[:3])
    if batch % data:
        return f"global batch {batch} is no multiple of {data} data ranks"
    if size is not None and batch // data % size:
        near = nearest_divisors(batch // data, size)
        return f"micro-batches of {size} do not divide the {batch // data} samples of a data rank, as {near} would"
    return None


def _unreachable(pins: Pins, cluster: ClusterSpec, training: TrainingSpec) -> str:
    """Why no shape at all has these pins, not even one that a rule excludes."""
    if pins.sequence_ways not in (None, 1):
        ways = pins.sequence_ways
        return f"tokens are split {ways} ways by tensor={ways} with sequence parallelism, or by context parallelism"
    if pins.expert not in (None, 1):
        return (
            f"experts can be spread {pins.expert} ways only over so many ranks that hold tokens of their own: "
            "data_shard x context, and x tensor under sequence parallelism"
        )
    return (
        f"tensor x pipeline x data ranks must be the {cluster.num_devices} GPUs, and data ranks x micro-batch x "
        f"micro-batches the global batch of {training.global_batch}"
    )
