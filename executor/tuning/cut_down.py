"""A candidate of a large job cut down to a few hosts: fewer data ranks and stages, each rank with the work it had.

How each layer is split stays (tensor, context and expert ranks), and what a rank holds of the pipeline: with fewer
stages the blocks of those that are gone are left out of the model. Micro-batches keep their size and become fewer, for
the steady state shows after a few. Needs no torch but for profiling models with fewer blocks, which is given to it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from ...planner.answers.check import check
from ...planner.answers.search import prediction_of
from ...planner.cost.estimate import Estimate, estimate
from ...planner.plan.document import Axis, Degrees, LayerPlan, Plan, Stage
from ...planner.plan.making import reference_of
from ...profiler.document import in_a_sentence
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile

ROUNDS = 4
"""Micro-batches of a job that was cut down, in lengths of its pipeline, at most: the first and the last length are its
fill and its end, what lies between is the steady state."""

HALVINGS = 4
"""Times that the blocks of every stage are halved where ranks that share parameters with fewer would be too full."""

_CUT_AXES: tuple[Axis, ...] = ("pipeline", "data_replicate", "data_shard")
_WORDS: dict[Axis, str] = {
    "pipeline": "pipeline",
    "data_replicate": "replicas",
    "data_shard": "shards",
    "context": "context ranks",
    "tensor": "tensor ranks",
}
_ITEMS: dict[Axis, str] = {
    "pipeline": "pipeline",
    "data_replicate": "data",
    "data_shard": "data",
    "context": "context",
    "tensor": "tensor",
}
"""Mesh axis -> what of a step its communication and waiting is."""

ProfileWithout = Callable[[tuple[str, ...]], ModelProfile]
"""The profile of the model without these blocks. Raises ValueError where it does not run so."""


class CannotCutError(ValueError):
    """A candidate has no smaller job that does the same work on each rank; the message says why."""


@dataclass(frozen=True)
class SmallerJob:
    """A job that runs in the place of a candidate. without: blocks of the model that it leaves out."""

    plan: Plan
    profile: ModelProfile
    without: tuple[str, ...]


@dataclass(frozen=True)
class Unseen:
    """What of a candidate's step no measured job shows, in words, and the predicted seconds of that step."""

    term: str
    seconds: float


def fewer_hosts(cluster: ClusterSpec, hosts: int) -> ClusterSpec:
    """The first hosts of a cluster of one kind. Raises ValueError where there are no fewer than in the job."""
    if cluster.num_hosts == 1:
        raise ValueError(f"--hosts {hosts}: the job is for 1 host, and cannot be cut down to fewer; leave --hosts out")
    if not 1 <= hosts < cluster.num_hosts:
        raise ValueError(
            f"--hosts {hosts}: the job is for {cluster.num_hosts} hosts, so give fewer, from 1 to "
            f"{cluster.num_hosts - 1}"
        )
    if len(cluster.kinds) > 1:
        raise ValueError(
            f"--hosts {hosts}: the job is for hosts of {len(cluster.kinds)} kinds, and each would have to be seen; "
            "leave --hosts out, or give a cluster of one kind"
        )
    first = cluster.hosts[0].model_copy(update={"count": hosts, "first": None})
    ranks = hosts * first.devices_per_host
    return cluster.model_copy(
        update={"name": f"{ranks} x {first.device.name}, of {cluster.name}", "hosts": (first,), "assumption": None}
    )


def cut_down(plan: Plan, profile: ModelProfile, small: ClusterSpec, profile_without: ProfileWithout) -> SmallerJob:
    """The job on the smaller cluster whose ranks do what those of `plan` do, and which shows most of what they wait
    for. Raises CannotCutError."""
    whole = estimate(plan, profile)
    why = ""
    for degrees in _smaller_degrees(plan, small.num_devices, whole):
        for halvings in range(HALVINGS + 1):
            stages = _layers_left(plan, profile, degrees.pipeline, halvings)
            if halvings and stages == _layers_left(plan, profile, degrees.pipeline, halvings - 1):
                break  # nothing is left that could be left out
            try:
                found = _smaller(plan, profile, small, degrees, stages, profile_without)
            except ValidationError as error:
                why = why or in_a_sentence(error)
                break
            except ValueError as error:
                why = why or str(error)
                break
            if isinstance(found, SmallerJob):
                return found
            why = found
    raise CannotCutError(f"{plan.label} cannot be cut down to {_ranks(small)}: {why}")


def unseen(plan: Plan, whole: Estimate, run: Plan | None) -> tuple[Unseen, ...]:
    """What of a plan's step stays predicted, the most first. run: the smaller job that was measured; None: one rank
    without its peers."""
    found = []
    for axis in plan.mesh_axes:
        degree, seen = plan.degrees.of(axis), 1 if run is None else run.degrees.of(axis)
        if degree > seen:
            ran = f"{seen} of {degree}" if seen > 1 else f"none of {degree}"
            what = "the fill and transfers of" if axis == "pipeline" else "communication of"
            found.append((_ITEMS[axis], f"{what} {degree} {_words(axis)} ({ran} ran)"))
    if plan.degrees.expert > 1 and run is None:
        found.append(("expert", f"communication of {plan.degrees.expert} expert ranks (none ran)"))
    shares = Counter(item for item, _ in found)
    told = [Unseen(term, whole.breakdown.get(item, 0.0) / shares[item]) for item, term in found]
    return tuple(sorted(told, key=lambda each: -each.seconds))


def _words(axis: Axis) -> str:
    return "pipeline stages' ranks" if axis == "pipeline" else _WORDS[axis]


def _ranks(cluster: ClusterSpec) -> str:
    hosts = cluster.num_hosts
    return f"{hosts} host{'s' if hosts > 1 else ''} of {cluster.devices_per_host} rank" + (
        "s" if cluster.devices_per_host > 1 else ""
    )


def _smaller_degrees(plan: Plan, ranks: int, whole: Estimate) -> list[Degrees]:
    """Degrees of so many ranks that split layers as the plan does. First come those that leave a pipeline one (the only
    stage of a model has both ends of it), then those with most axes at work, then with those that take most of a step.
    """
    degrees = plan.degrees
    kept = degrees.tensor * degrees.context
    if ranks % kept:
        split = [f"{degrees.of(axis)} {_WORDS[axis]}" for axis in ("tensor", "context") if degrees.of(axis) > 1]
        raise CannotCutError(
            f"{plan.label} splits every layer over {' x '.join(split)}, which {ranks} rank{'s' if ranks > 1 else ''} "
            f"cannot do without changing the work of each: --hosts must give a multiple of {kept} ranks"
        )
    found = []
    for pipeline in range(1, degrees.pipeline + 1):
        for replicas in range(1, degrees.data_replicate + 1):
            shards, rest = divmod(ranks // kept, pipeline * replicas)
            if rest or not 1 <= shards <= degrees.data_shard:
                continue
            changes = {"pipeline": pipeline, "data_replicate": replicas, "data_shard": shards}
            chunks = degrees.virtual_stages if pipeline > 1 else 1
            found.append(degrees.model_copy(update={**changes, "virtual_stages": chunks}))
    if not found:
        raise CannotCutError(
            f"{plan.label} cannot be cut down to {ranks} ranks: its pipeline, replicas and shards do not go into them"
        )

    def shown(each: Degrees) -> tuple[bool, int, float, int]:
        alive = [axis for axis in _CUT_AXES if each.of(axis) > 1]
        seconds = sum(whole.breakdown.get(item, 0.0) for item in {_ITEMS[axis] for axis in alive})
        return "pipeline" in alive, len(alive), seconds, each.pipeline

    return sorted(found, key=shown, reverse=True)


def _layers_left(plan: Plan, profile: ModelProfile, pipeline: int, halvings: int) -> list[list[int]]:
    """[stage of the smaller job] -> numbers of the layers that it holds.

    Ranks that are left are the first, the last and some in between, with the blocks that they had; of these every
    second one is left out, so many times. What is no block of a list (embeddings, heads), or the only layer of its
    class, stays, with the stage before it.
    """
    blocks = _blocks(profile)
    total = plan.degrees.pipeline
    positions = sorted({round(i * (total - 1) / max(1, pipeline - 1)) for i in range(pipeline)})
    if pipeline == 1:
        positions = [max(range(total), key=lambda p: sum(len(plan.stages[s].layers) for s in plan.stages_of(p)))]
    kept_stages = set(range(len(plan.stages)))
    if pipeline < total:
        kept_stages = {stage for position in positions for stage in plan.stages_of(position)}
    left: list[list[int]] = []
    first = 0
    classes = Counter(layer.layer_class for layer in profile.layers)
    waiting: list[int] = []
    for number, stage in enumerate(plan.stages):
        own = list(range(first, first + len(stage.layers)))
        first += len(own)
        dropped = [i for i in own if i in blocks] if number not in kept_stages else _every_other(own, blocks, halvings)
        for i in dropped:
            classes[profile.layers[i].layer_class] -= 1
        stays = [i for i in own if i not in dropped]
        for i in sorted(dropped):
            if classes[profile.layers[i].layer_class] == 0:
                classes[profile.layers[i].layer_class] = 1
                stays = sorted([*stays, i])
        if number in kept_stages and (pipeline > 1 or not left):
            left.append([*waiting, *stays])
            waiting = []
        elif left:
            left[-1] += stays
        else:
            waiting += stays
    return left


def _every_other(own: Sequence[int], blocks: Mapping[int, str], halvings: int) -> list[int]:
    """Blocks of a stage that are left out when they are halved so often; one stays."""
    inside = [i for i in own if i in blocks]
    kept = inside[:: 2**halvings]
    return [i for i in inside if i not in kept]


def _blocks(profile: ModelProfile) -> dict[int, str]:
    """Layer -> its module, of those that can be left out: numbered ones, used once, with parameters of their own."""
    times = Counter(layer.root for layer in profile.layers)
    shared = {name for names in profile.ties for name in names}
    readers = Counter(name for layer in profile.layers for name in layer.parameters)
    return {
        i: layer.root
        for i, layer in enumerate(profile.layers)
        if re.search(r"(^|\.)\d+$", layer.root)
        and times[layer.root] == 1
        and all(f"{name}.".startswith(f"{layer.root}.") for name in layer.modules)
        and not any(name in shared or readers[name] > 1 for name in layer.parameters)
    }


def _smaller(
    plan: Plan,
    profile: ModelProfile,
    small: ClusterSpec,
    degrees: Degrees,
    stages: Sequence[Sequence[int]],
    profile_without: ProfileWithout,
) -> SmallerJob | str:
    """The smaller job with these layers, or why it does not do. Raises ValueError where no layers would do."""
    if not all(stages) or len(stages) != degrees.pipeline * degrees.virtual_stages:
        raise ValueError(f"{degrees.pipeline} stages would hold no layers of their own")
    left = [i for own in stages for i in own]
    gone = [i for i in range(len(profile.layers)) if i not in set(left)]
    if degrees.pipeline < plan.degrees.pipeline and not gone:
        raise ValueError(
            "none of its layers can be left out (they are no blocks of a list, or share parameters), so each rank "
            "would do the work of several"
        )
    without = tuple(profile.layers[i].root for i in gone)
    less = profile_without(without) if without else profile
    names = _same_layers(profile, less, left)
    num_microbatches = _rounds(plan, degrees)
    per_microbatch = plan.micro_batch * degrees.data
    training = plan.training.model_copy(update={"global_batch": per_microbatch * num_microbatches})
    sharded = degrees.sharded_over > 1
    layers: Iterator[LayerPlan] = (
        old.model_copy(
            update={
                "name": new.name,
                "layer_class": less.classes[new.layer_class].name,
                "root": new.root,
                "modules": new.modules,
                "parameters": new.parameters,
                "reshard": old.reshard and sharded,
            }
        )
        for old, new in zip(_of_plan(plan, left), less.layers, strict=True)
    )
    made = Plan(
        model=reference_of(less),
        cluster=small,
        training=training,
        degrees=degrees,
        mesh_axes=plan.mesh_axes,
        schedule=plan.schedule if degrees.pipeline > 1 else "none",
        micro_batch=plan.micro_batch,
        num_microbatches=num_microbatches,
        gradient_sync=plan.gradient_sync,
        context_kind=plan.context_kind,
        offload_optimizer=plan.offload_optimizer,
        classes=tuple(c.model_copy(update={"name": names[c.name]}) for c in plan.classes if c.name in names),
        stages=tuple(Stage(layers=tuple(next(layers) for _ in own)) for own in stages),
        versions=plan.versions,
    )
    violations = check(made, less)
    if violations:
        return violations[0]
    found = estimate(made, less)
    if not found.fits:
        over = max(found.memory, key=lambda each: each.over_bytes)
        return f"a rank would need {over.device_bytes / 2**30:.1f} GiB, and may use {over.budget_bytes / 2**30:.1f}"
    return SmallerJob(made.model_copy(update={"prediction": prediction_of(found)}), less, without)


def _of_plan(plan: Plan, numbers: Sequence[int]) -> list[LayerPlan]:
    layers = plan.layers
    return [layers[i] for i in numbers]


def _same_layers(profile: ModelProfile, less: ModelProfile, left: Sequence[int]) -> dict[str, str]:
    """Class of the whole model -> that of the model with fewer blocks. Raises ValueError where layers that are left are
    not what they were."""
    if len(less.layers) != len(left):
        raise ValueError(f"without the other blocks the model has {len(less.layers)} layers, not {len(left)}")
    names: dict[str, str] = {}
    for i, new in zip(left, less.layers, strict=True):
        before, now = profile.classes[profile.layers[i].layer_class], less.classes[new.layer_class]
        if names.setdefault(before.name, now.name) != now.name or before.parameters != now.parameters:
            raise ValueError(f"without the other blocks {profile.layers[i].name} is another layer")
    return names


def _rounds(plan: Plan, degrees: Degrees) -> int:
    """Micro-batches of the smaller job: as many as the plan's, or a few lengths of the pipeline that is left."""
    most = min(plan.num_microbatches, ROUNDS * degrees.pipeline)
    return most if most < degrees.pipeline else most - most % degrees.pipeline
