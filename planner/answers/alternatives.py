"""The one list of layouts that were weighed beside a plan: made by the search, stored in the plan's document, and shown
everywhere.

First comes the best of each other family of layouts, fastest first; then what else fits; then what does not fit.
Terminal, report, `explain` and JSON all read this list, so they say the same of the same layout.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from pydantic import ValidationError

from ...profiler.document import in_a_sentence
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.machine.units import format_bytes
from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import Estimate, estimate
from ..plan.document import Alternative, Degrees, Plan, Stage, WeighedLayers, WeighedLayout
from ..plan.layer_counts import blocks_of
from ..plan.making import make_plan, shape_of
from ..plan.not_run import priced_mark
from ..plan.shape import Cuts, LayerOption, Shape
from .candidate import Candidate
from .explain import compared, unless_measured
from .verdict import THE_PLAN, Verdict, VerdictKind

SHOWN = 3
"""Number of alternatives that a terminal shows."""

WORTH_A_WORD = 0.01
"""Share of a GPU's budget from which on a difference in memory is mentioned."""

AGREES = 1e-9
"""Relative difference up to which a step that is priced again counts as equal to the stored one."""

_MECHANISMS = {
    "tensor": "tensor parallelism",
    "context": "context parallelism",
    "expert": "expert parallelism",
    "pipeline": "a pipeline",
}
"""Field of Degrees -> how people call it."""


def family(degrees: Degrees) -> tuple[bool, ...]:
    """Key of a layout's family: which kinds of parallelism it uses, whatever their degrees. HSDP (replicas of shards)
    is a kind of its own if nothing else splits the model."""
    split = tuple(getattr(degrees, name) > 1 for name in _MECHANISMS)
    shards = degrees.data_shard > 1
    return (*split, shards, shards and degrees.data_replicate > 1 and not any(split))


@dataclass(frozen=True)
class Trade:
    """What another layout would give and cost, compared with the plan. more_bytes: memory of the fullest GPU, less that
    of the plan's. budget_bytes: what a plan may use of that GPU. needs: what the layout does differently, in words."""

    more_bytes: float
    budget_bytes: float
    needs: tuple[str, ...]

    def __str__(self) -> str:
        words = list(self.needs)
        if abs(self.more_bytes) >= WORTH_A_WORD * self.budget_bytes:
            words.insert(0, f"{format_bytes(abs(self.more_bytes))} {'more' if self.more_bytes > 0 else 'less'} memory")
        return ", ".join(words)


def trade(candidate: Candidate, plan: Plan, found: Estimate) -> Trade | None:
    """What choosing a candidate would give and cost; None if it does not fit, is not legal, or is the plan."""
    if candidate.plan is None or candidate.estimate is None or candidate.verdict.kind is VerdictKind.PLAN:
        return None
    fullest = max(found.memory, key=lambda stage: stage.device_bytes)
    more = candidate.estimate.peak_device_bytes - fullest.device_bytes
    return Trade(more, fullest.budget_bytes, tuple(_needs(candidate.plan, plan)))


def _needs(other: Plan, plan: Plan) -> Iterable[str]:
    for name, words in _MECHANISMS.items():
        has, had = getattr(other.degrees, name) > 1, getattr(plan.degrees, name) > 1
        if has != had:
            yield f"{'with' if has else 'without'} {words}"
    shards, shards_here = other.degrees.sharded_over > 1, plan.degrees.sharded_over > 1
    if shards != shards_here:
        yield "state sharded" if shards else "state not sharded"
    again, again_here = _recomputed(other), _recomputed(plan)
    if again != again_here:
        yield f"{again} recomputed" if again else "nothing recomputed"


def _recomputed(plan: Plan) -> str:
    """How many of a plan's blocks recompute, as "10 of 32 layers"; of all layers, if no block does; "" if none does."""
    for layers in (blocks_of(plan), plan.layers):
        again = sum(layer.recompute != "none" for layer in layers)
        if again:
            return f"{again} of {len(layers)} layers"
    return ""


def ordered(candidates: Sequence[Candidate], plan: Plan) -> tuple[Candidate, ...]:
    """The candidates in the order of the list: the best of each family other than the plan's, then those that fit by
    their step, then those that do not fit."""
    first = of_other_families(candidates, plan, len(candidates))
    fitting = [c for c in candidates if c.plan is not None and c not in first]
    return (*first, *sorted(fitting, key=lambda c: c.seconds), *(c for c in candidates if c.plan is None))


def of_other_families(candidates: Sequence[Candidate], plan: Plan, most: int = SHOWN) -> tuple[Candidate, ...]:
    """The fastest candidate of each family other than the plan's, fastest first, at most `most`."""
    best: dict[tuple[bool, ...], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        if candidate.plan is not None and candidate.verdict.kind is not VerdictKind.PLAN:
            best.setdefault(family(candidate.plan.degrees), candidate)
    return tuple(candidate for key, candidate in best.items() if key != family(plan.degrees))[:most]


def shown(candidates: Sequence[Candidate], plan: Plan) -> tuple[Candidate, ...]:
    """The alternatives that a terminal shows: the best of other families, and if these are too few, other layouts, each
    once with its best choices."""
    others = of_other_families(candidates, plan)
    kept = list(others)
    layouts = {c.plan.label for c in others if c.plan is not None}
    for c in sorted(candidates, key=lambda c: c.seconds):
        if c.plan is None or c.verdict.kind is VerdictKind.PLAN or c.by_rule or c.plan.label in layouts:
            continue
        layouts.add(c.plan.label)
        kept.append(c)
    return tuple(sorted(kept[:SHOWN], key=lambda c: c.seconds))


def in_words(candidate: Candidate, plan: Plan, found: Estimate) -> str:
    """A candidate's verdict, and what choosing it would give and cost."""
    traded = str(trade(candidate, plan, found) or "")
    return f"{candidate.verdict}{f'; {traded}' if traded else ''}"


def kept(candidates: Iterable[Candidate], cluster: ClusterSpec) -> tuple[Alternative, ...]:
    """The list in the form in which a plan's document stores it. cluster: that of the plan."""
    return tuple(_kept(candidate, cluster) for candidate in candidates)


def _kept(candidate: Candidate, cluster: ClusterSpec) -> Alternative:
    verdict, found = candidate.verdict, candidate.estimate
    return Alternative(
        label=candidate.label,
        by_rule=candidate.by_rule,
        outcome=verdict.kind.value,
        detail=verdict.detail,
        note=verdict.note,
        ratio=verdict.ratio,
        stage=verdict.stage,
        over_bytes=verdict.over_bytes,
        step_time_s=None if found is None else found.step_time_s,
        device_bytes=None if found is None else found.peak_device_bytes,
        layout=None if candidate.plan is None else _layout(candidate.plan, cluster),
    )


def _layout(plan: Plan, cluster: ClusterSpec) -> WeighedLayout:
    shape, first = shape_of(plan), plan.cluster.first_hosts
    return WeighedLayout(
        degrees=plan.degrees,
        mesh_axes=plan.mesh_axes,
        schedule=plan.schedule,
        micro_batch=plan.micro_batch,
        num_microbatches=plan.num_microbatches,
        gradient_sync=plan.gradient_sync,
        sequence=shape.sequence,
        context_kind=plan.context_kind,
        offload_optimizer=plan.offload_optimizer,
        cuts=None if shape.cuts is None else dict(shape.cuts.by_class),
        first_hosts=() if first == cluster.first_hosts else first,
        stages=tuple(_runs(stage) for stage in plan.stages),
    )


def _runs(stage: Stage) -> tuple[WeighedLayers, ...]:
    options = (LayerOption(layer.recompute, layer.reshard, layer.offload) for layer in stage.layers)
    runs = ((option, len(list(same))) for option, same in groupby(options))
    return tuple(WeighedLayers(count=n, recompute=o.recompute, reshard=o.reshard, offload=o.offload) for o, n in runs)


def restored(plan: Plan, found: Estimate, profile: ModelProfile) -> tuple[Candidate, ...]:
    """The list that a plan's document stores, each layout with its plan and estimate; empty if it stores none.

    found: the plan's estimate. Verdicts are the stored ones, except where a step is now priced differently.
    """
    return tuple(_restored(each, plan, found, profile) for each in plan.alternatives)


def _restored(each: Alternative, plan: Plan, found: Estimate, profile: ModelProfile) -> Candidate:
    if each.outcome not in {*VerdictKind}:
        raise ValueError(f"an alternative of the plan has the outcome {each.outcome!r}, which there is not; plan again")
    verdict = Verdict(VerdictKind(each.outcome), each.detail, each.ratio, each.stage, each.over_bytes, each.note)
    if each.layout is None:
        return Candidate(each.label, None, None, verdict, by_rule=each.by_rule)
    other = _plan_of(each.layout, plan, profile)
    priced = estimate(other, profile)
    before = None if plan.prediction is None else plan.prediction.step_time_s
    if not (_agree(priced.step_time_s, each.step_time_s) and _agree(found.step_time_s, before)):
        the_plan = verdict.kind is VerdictKind.PLAN
        beside = compared(priced, found, unless_measured(plan.measured))
        verdict = THE_PLAN if the_plan else beside.noted(priced_mark(other))
    return Candidate(each.label, other, priced, verdict, priced.step_time_s, each.by_rule)


def _agree(seconds: float, before: float | None) -> bool:
    return before is not None and abs(seconds - before) <= AGREES * before


def _plan_of(layout: WeighedLayout, plan: Plan, profile: ModelProfile) -> Plan:
    degrees = layout.degrees
    reshards = any(run.reshard for stage in layout.stages for run in stage)
    shape = Shape(
        data_replicate=degrees.data_replicate,
        data_shard=degrees.data_shard,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        micro_batch=layout.micro_batch,
        num_microbatches=layout.num_microbatches,
        sequence=layout.sequence,
        schedule=layout.schedule,
        virtual_stages=degrees.virtual_stages,
        gradient_sync=layout.gradient_sync,
        reshard=degrees.pipeline > 1 and reshards,
        mesh_axes=layout.mesh_axes,
        context=degrees.context,
        context_kind=layout.context_kind,
        expert=degrees.expert,
        offload_optimizer=layout.offload_optimizer,
        cuts=None if layout.cuts is None else Cuts(tuple(layout.cuts.items())),
    )
    count = sum(run.count for stage in layout.stages for run in stage)
    if count != len(profile.layers):
        raise ValueError(f"an alternative of the plan has {count} layers, not {len(profile.layers)}; plan again")
    stages = [
        [LayerOption(run.recompute, run.reshard, run.offload) for run in stage for _ in range(run.count)]
        for stage in layout.stages
    ]
    cluster = plan.cluster if not layout.first_hosts else plan.cluster.ordered_by(layout.first_hosts)
    try:
        return make_plan(profile, cluster, plan.training, shape, stages)
    except ValidationError as error:
        raise ValueError(f"an alternative of the plan is none: {in_a_sentence(error)}; plan again") from None
