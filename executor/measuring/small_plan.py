"""A small version of a plan and of its model, which the processes of one machine can train.

What is small: the model file's `small()`, else a shrunken Hugging Face config, else the model itself if it is small
enough. The plan is scaled with it: cuts in proportion, every kind of parallelism kept at a degree of at least 2.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from ...planner.cost.layer_parts import within
from ...planner.plan.document import Degrees, LayerPlan, Plan, Recompute, Stage, parts_of
from ...planner.plan.legality import (
    can_recompute,
    context_rule,
    divisors,
    expert_rule,
    legal_cuts,
    sequence_rule,
    tensor_rule,
)
from ...planner.plan.making import make_plan, shape_of
from ...planner.plan.shape import LayerOption, Shape
from ...profiler.machine.cluster import cluster_of
from ...profiler.model.coupling import upcast
from ...profiler.model.load import load_model
from ...profiler.model.loaded import LoadedModel
from ...profiler.model.model_profile import ModelProfile
from ...profiler.model.source import file_of, with_adapters_of
from ...profiler.tensor_cuts.tensor_cuts import SMALLEST_VOCABULARY
from .shrink import full_config, shrunken_config

MAX_RANKS = 8
"""Most processes that a plan is run on; a plan with four kinds of parallelism at once takes 16."""

MAX_PARAMETERS = 20_000_000
"""A model up to this size is run as it is, if there is no small version of it."""


def small_model(plan: Plan, loaded: LoadedModel, folder: Path) -> tuple[LoadedModel, tuple[str, ...]]:
    """A version of the model that this machine can train, and notes on it. folder: for a shrunken config.

    Raises ValueError if the model is too large and has no small version.
    """
    if loaded.small is not None:
        return _short(loaded.small(), plan), ()
    source = file_of(loaded.source)
    if source.suffix == ".json":
        config = full_config(source)
        shrunken = shrunken_config(config, plan.degrees, MAX_RANKS)
        (folder / "config.json").write_text(json.dumps(shrunken))
        small = replace(load_model(with_adapters_of(str(folder), loaded.source)), name=f"{loaded.name}-small")
        return _short(small, plan), ("its config.json shrunken: fewer and narrower layers, small vocabulary",)
    if plan.model.num_parameters <= MAX_PARAMETERS:
        return _short(loaded, plan), ()
    raise ValueError(
        f"{plan.model.name} has {plan.model.num_parameters:,} parameters, too many to train here (at most "
        f"{MAX_PARAMETERS:,}): add to {loaded.source} a function small() that returns a small version of the model, "
        "and small_batch(size) if batch(size) does not suit it"
    )


def small_plan(plan: Plan, profile: ModelProfile) -> tuple[Plan, tuple[str, ...]]:
    """The plan for a small model on at most MAX_RANKS ranks, and what was changed, in words.

    Raises ValueError if the small model cannot be split into two where the plan splits.
    """
    notes: list[str] = []
    places = legal_cuts(profile)
    degrees = shrunken_degrees(plan.degrees, MAX_RANKS)
    degrees = degrees.model_copy(
        update={
            "tensor": _tensor_degree(plan, degrees.tensor, profile),
            "pipeline": min(degrees.pipeline, len(places) + 1),
        }
    )
    if degrees.pipeline == 1 < plan.degrees.pipeline:
        raise ValueError(f"{profile.name} can be cut nowhere, so it cannot run {plan.degrees.pipeline} stages")
    virtual = min(degrees.virtual_stages, (len(places) + 1) // degrees.pipeline)
    if plan.schedule == "zb-v" and virtual < 2:
        raise ValueError(
            f"{profile.name} can be cut at {len(places)} places, but {plan.schedule} on {degrees.pipeline} ranks takes "
            f"{2 * degrees.pipeline - 1}; give small() more layers"
        )
    degrees = degrees.model_copy(update={"virtual_stages": virtual})
    degrees = degrees.model_copy(update={"context": _context_degree(plan, degrees, profile)})
    for axis in ("data_replicate", "data_shard", "context", "tensor", "pipeline", "virtual_stages"):
        old, new = getattr(plan.degrees, axis), getattr(degrees, axis)
        if old != new:
            notes.append(f"{axis} is {new} here instead of {old}")
    num_microbatches = 1 if profile.batch_problem else min(plan.num_microbatches, max(2 * degrees.pipeline, 4))
    micro_batch = min(plan.micro_batch, 2 * profile.smallest_micro_batch)
    shape = replace(
        shape_of(plan),
        data_replicate=degrees.data_replicate,
        data_shard=degrees.data_shard,
        tensor=degrees.tensor,
        context=degrees.context,
        pipeline=degrees.pipeline,
        virtual_stages=degrees.virtual_stages,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
    )
    shape = replace(shape, expert=_expert_degree(shape, profile))
    if shape.expert != plan.degrees.expert:
        notes.append(f"expert is {shape.expert} here instead of {plan.degrees.expert}")
    training = plan.training.model_copy(
        update={
            "global_batch": micro_batch * num_microbatches * degrees.data,
            "seq_len": profile.seq_len,
            "precision": "fp32",
            "optimizer": "adamw",
        }
    )
    stages = _merged(plan.stages, degrees.pipeline * degrees.virtual_stages)
    options = small_stages(stages, [can_recompute(profile, layer) for layer in profile.layers], places)
    options = _with_parts_there_are(options, profile)
    lost = _parts_in(layer for stage in stages for layer in stage) - _parts_in(o for stage in options for o in stage)
    if lost:
        notes.append(f"{', '.join(sorted(lost))} is not recomputed here: no such part is in the small model's layers")
    cluster = cluster_of(plan.cluster.device, degrees.num_devices)
    small = make_plan(profile, cluster, training, shape, options)
    if whole := sorted(_kinds_of_cuts(plan) - _kinds_of_cuts(small)):
        few = f" (cut from {SMALLEST_VOCABULARY:,} rows on)" if {"embedding", "table"} & {*whole} else ""
        notes.append(f"the tensor cut of {' and '.join(whole)} is not run here: the small model has that whole{few}")
    return small, tuple(notes)


def _kinds_of_cuts(plan: Plan) -> set[str]:
    """Kinds of what a plan cuts by tensor parallelism."""
    return {cut.kind for layer_class in plan.classes for cut in layer_class.cuts}


def shrunken_degrees(degrees: Degrees, max_ranks: int) -> Degrees:
    """Degrees whose product is at most max_ranks, or as close to that as it gets: a degree above 1 does not fall below
    2."""
    axes = ("data_replicate", "data_shard", "context", "pipeline", "tensor")
    while degrees.num_devices > max_ranks:
        axis = max(axes, key=lambda a: getattr(degrees, a))
        degree: int = getattr(degrees, axis)
        if degree <= 2:
            break
        smallest_factor = next(f for f in range(2, degree + 1) if degree % f == 0)
        degrees = degrees.model_copy(update={axis: max(2, degree // smallest_factor)})
    return degrees


def small_stages(
    stages: Sequence[Sequence[LayerPlan]], recomputable: Sequence[bool], places: Sequence[int]
) -> list[list[LayerOption]]:
    """[stage][layer] options for a model of fewer layers: cuts in proportion, every choice of a stage kept once.

    recomputable: by layer of the small model. places: where a stage may begin, at least as many as there are cuts.
    """
    total, count = sum(len(stage) for stage in stages), len(recomputable)
    firsts = [0]
    for i, stage in enumerate(stages[:-1]):
        end = sum(len(s) for s in stages[:i]) + len(stage)
        wanted = round(end * count / total)
        ahead = [place for place in places if place > firsts[-1]]
        firsts.append(min(ahead[: len(ahead) - (len(stages) - 2 - i)], key=lambda place: abs(place - wanted)))
    options = []
    for stage, first, end in zip(stages, firsts, [*firsts[1:], count], strict=True):
        chosen = [stage[i * len(stage) // (end - first)] for i in range(end - first)]
        able = [i for i in range(end - first) if recomputable[first + i]]
        recompute: dict[int, Recompute] = {i: chosen[i].recompute for i in able if chosen[i].recompute != "none"}
        reshard = {i for i in range(end - first) if chosen[i].reshard}
        missed = [layer.recompute for layer in stage if layer.recompute not in ("none", *recompute.values())]
        free = [i for i in able if i not in recompute]
        recompute |= dict(zip(free, dict.fromkeys(missed), strict=False))
        if any(layer.reshard for layer in stage):
            reshard = reshard or {0}
        options.append(
            [LayerOption(recompute=recompute.get(i, "none"), reshard=i in reshard) for i in range(end - first)]
        )
    return options


def _with_parts_there_are(options: Sequence[Sequence[LayerOption]], profile: ModelProfile) -> list[list[LayerOption]]:
    """[stage][layer] options, without parts that the layers do not have: a layer may stand for one of another class."""
    layers = iter(profile.layers)
    return [
        [
            replace(option, recompute=within(profile.classes[layer.layer_class], option.recompute))
            for option, layer in zip(stage, layers, strict=False)
        ]
        for stage in options
    ]


def _parts_in(layers: Iterable[LayerPlan | LayerOption]) -> set[str]:
    return {part for layer in layers for part in parts_of(layer.recompute)}


def _merged(stages: Sequence[Stage], count: int) -> list[list[LayerPlan]]:
    """The layers of `count` stages, made by joining consecutive ones of these."""
    places = [round(i * len(stages) / count) for i in range(count + 1)]
    return [[layer for stage in stages[start:end] for layer in stage.layers] for start, end in pairwise(places)]


def _tensor_degree(plan: Plan, degree: int, profile: ModelProfile) -> int:
    rule = None
    for smaller in range(degree, 1, -1):
        rule = tensor_rule(profile, smaller)
        if rule is None and plan.sequence_parallel:
            rule = sequence_rule(profile, smaller)
        if rule is None:
            return smaller
    if degree > 1:
        raise ValueError(f"{profile.name} cannot be cut by tensor parallelism ({rule}); give small() divisible sizes")
    return 1


def _context_degree(plan: Plan, degrees: Degrees, profile: ModelProfile) -> int:
    rule = None
    for smaller in range(degrees.context, 1, -1):
        rule = context_rule(profile, smaller, degrees.tensor, plan.context_kind)
        if rule is None and plan.sequence_parallel:
            rule = sequence_rule(profile, degrees.tensor, smaller)
        if rule is None:
            return smaller
    if degrees.context > 1:
        raise ValueError(f"{profile.name} cannot be split over context ranks ({rule}); give small() divisible sizes")
    return 1


def _expert_degree(shape: Shape, profile: ModelProfile) -> int:
    """The largest degree, up to the shape's, by which the bank of experts can be spread. Raises ValueError if there is
    none."""
    if shape.expert == 1:
        return 1
    rules = {e: expert_rule(profile, e, shape.sequence) for e in divisors(shape.experts_over) if 1 < e <= shape.expert}
    able = [expert for expert, rule in rules.items() if rule is None]
    if not able:
        why = next(iter(rules.values()), None) or f"{shape.experts_over} ranks hold tokens of their own here"
        raise ValueError(f"{profile.name} cannot be run with spread experts ({why}); give small() more experts")
    return able[-1]


def _short(loaded: LoadedModel, plan: Plan) -> LoadedModel:
    """The model with short sequences, which every degree of the plan divides after it was made smaller; in fp32 at
    least."""
    length = 8 * min(plan.degrees.tensor, MAX_RANKS) * min(plan.degrees.context, MAX_RANKS)
    length *= -(-loaded.fewest_tokens // length)
    if loaded.seq_len is not None and loaded.seq_len > length:
        loaded = loaded.with_seq_len(length)
    build = loaded.build
    return replace(loaded, build=lambda: upcast(build()))
