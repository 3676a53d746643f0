"""Other layouts around a plan, priced for a picture of time against memory. Beside what the search weighed these are
rules of thumb and frameworks, other degrees of tensor and pipeline parallelism, and the plan's own degrees with less
memory."""

import time
from collections.abc import Iterator
from dataclasses import replace

from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import Estimate
from ..plan.document import Plan
from ..plan.legality import divisors
from ..plan.making import shape_of
from ..plan.pins import Pins
from ..solve.explore import Explorer
from .alternatives import ordered, restored
from .candidate import Candidate
from .explain import compared, unless_measured
from .guidance import named_rules, rules_of_thumb
from .verdict import THE_PLAN, VerdictKind
from .why_not import best_of, followed

LEANER = (0.3, 0.45, 0.6, 0.75, 0.85)
"""Shares of memory left free with which the plan's own degrees are planned again, to see what less memory costs in
time."""

_WHY_NOT = "pinned away, less simple, or not in the space when this was planned"


def weighed(plan: Plan, found: Estimate, profile: ModelProfile, seconds: float) -> tuple[Candidate, ...]:
    """The layouts that were weighed beside a plan: the list in its document. If that is empty (plans made by hand or
    imported), what rules of thumb lead to. seconds: time limit for pricing these."""
    kept = restored(plan, found, profile)
    if kept:
        return kept
    explorer, deadline = Explorer(profile, plan.cluster, plan.training), time.monotonic() + seconds
    rules = (followed(explorer, rule, deadline) for rule in rules_of_thumb(plan.cluster, plan.training))
    return ordered([_beside(each, plan, found) for each in rules], plan)


def _beside(candidate: Candidate, plan: Plan, found: Estimate) -> Candidate:
    """The candidate of a rule, with its verdict relative to the plan."""
    if candidate.plan is None or candidate.estimate is None:
        return candidate
    verdict = compared(candidate.estimate, found, unless_measured(plan.measured, _WHY_NOT))
    same = shape_of(candidate.plan).layout == shape_of(plan).layout and verdict.kind is VerdictKind.AS_FAST
    return replace(candidate, verdict=THE_PLAN if same else verdict)


def landscape(
    plan: Plan, found: Estimate, profile: ModelProfile, known: tuple[Candidate, ...], seconds: float
) -> Iterator[Candidate]:
    """What frameworks lead to; then other tensor and pipeline degrees, nearest first, each with its best choices; then
    the plan's own degrees with less memory. Layouts of the plan and of `known` candidates are left out.

    seconds: time limit for other degrees; frameworks are always priced.
    """
    explorer, deadline = Explorer(profile, plan.cluster, plan.training), time.monotonic() + seconds
    layouts = {shape_of(plan).layout} | {shape_of(each.plan).layout for each in known if each.plan is not None}
    labels = {each.label for each in known}
    seen = {_identity(each) for each in (plan, *(each.plan for each in known)) if each is not None}
    for rule in named_rules(plan.cluster, profile):
        candidate = _beside(followed(explorer, rule, deadline), plan, found)
        new = candidate.plan is None or shape_of(candidate.plan).layout not in layouts
        if rule.name not in labels and new:
            if candidate.plan is not None:
                seen.add(_identity(candidate.plan))
            yield candidate
        if candidate.plan is not None:
            layouts.add(shape_of(candidate.plan).layout)
    for pins in _neighbours(plan):
        if time.monotonic() > deadline:
            return
        other = best_of(explorer, pins, deadline)
        if other is not None and shape_of(other[0]).layout not in layouts:
            layouts.add(shape_of(other[0]).layout)
            seen.add(_identity(other[0]))
            yield _named(*other, plan, found)
    for margin in LEANER:
        training = plan.training.model_copy(update={"memory_margin": margin})
        other = best_of(Explorer(profile, plan.cluster, training), _degrees_of(plan), deadline)
        if other is not None and _identity(other[0]) not in seen:
            seen.add(_identity(other[0]))
            yield _named(*other, plan, found)


def _named(other: Plan, priced: Estimate, plan: Plan, found: Estimate) -> Candidate:
    label = f"{other.label}, micro-batch {other.micro_batch}"
    verdict = compared(priced, found, unless_measured(plan.measured, _WHY_NOT))
    return Candidate(label, other, priced, verdict, priced.step_time_s)


def _degrees_of(plan: Plan) -> Pins:
    degrees = plan.degrees
    return Pins(
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        data_shard=degrees.data_shard,
        data_replicate=degrees.data_replicate,
        context=degrees.context,
        context_kind=plan.context_kind if degrees.context > 1 else None,
        expert=degrees.expert,
    )


def _identity(plan: Plan) -> object:
    treatments = tuple(tuple((layer.recompute, layer.reshard) for layer in stage.layers) for stage in plan.stages)
    return shape_of(plan).layout, plan.gradient_sync, treatments


def _neighbours(plan: Plan) -> Iterator[Pins]:
    """Pins with other tensor degrees within a host and other pipeline degrees, those that differ least from the plan's
    first; each with shards over all data ranks, over those of a host, and without shards."""
    per_host, count = plan.cluster.devices_per_host, plan.degrees.num_devices
    layers = len(plan.layers)
    pairs = [
        (tensor, pipeline)
        for tensor in divisors(per_host)
        for pipeline in divisors(count // tensor)
        if pipeline <= min(layers, 64)
    ]

    def steps(pair: tuple[int, int]) -> int:
        return sum(
            max(a, b).bit_length() - min(a, b).bit_length()
            for a, b in zip(pair, (plan.degrees.tensor, plan.degrees.pipeline), strict=True)
        )

    for tensor, pipeline in sorted(pairs, key=steps):
        data = count // tensor // pipeline
        inside = max(size for size in divisors(data) if size <= max(1, per_host // tensor))
        for shard in dict.fromkeys((data, inside, 1)):
            yield Pins(tensor=tensor, pipeline=pipeline, data_shard=shard, data_replicate=data // shard)
