"""The question and its answer: profile, cluster and job in; the plan, its proof, runners-up and baselines out."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...profiler.garbage import without_garbage_collection
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import Estimate, estimate
from ..cost.layer_cost import CostModel
from ..plan.document import Certificate, Plan, Prediction
from ..plan.making import shape_of
from ..plan.not_run import priced_mark
from ..plan.pins import Pins
from ..plan.setups import Setup
from ..plan.training import TrainingSpec
from ..solve.explore import ALTERNATIVES, SIMPLE, TIE, WINDOW, Explorer, Outcome, Progress
from ..solve.nodes import Solved
from ..solve.solver import SolverError
from .explain import compared
from .guidance import RuleOfThumb, rules_of_thumb
from .infeasible import InfeasibleError, closest_verdict, explain_infeasible
from .simplicity import simplicity
from .verdict import FITS, THE_PLAN, Verdict, VerdictKind, nearest

MORE_TIME = 0.05
"""Of the time limit: how long rules of thumb may be followed beyond it, all together; at least a second."""

USUAL, OTHERS = 0.96, 0.98
"""Of the whole bar, when rules of thumb are followed, and when alternatives are brought to their best."""

RULE_S = 2.0
"""Seconds to look for the plan of a rule of thumb where the search of the whole space found none in its time."""

AGREES = 1e-6
"""The evaluator and the search may differ by as much, relative to the step."""

SOLVER = "branch and bound, HiGHS"
"""Who proves: the tree of nodes.py, with bounds that HiGHS finds."""

__all__ = ["Candidate", "InfeasibleError", "SearchResult", "SolverError", "price_setup", "search"]


@dataclass(frozen=True)
class Candidate:
    """One layout beside the plan; without plan and estimate it does not fit or is not legal, as the verdict says.

    by_rule: whether it is what a rule of thumb or a framework leads to.
    """

    label: str
    plan: Plan | None
    estimate: Estimate | None
    verdict: Verdict
    seconds: float = field(default=float("inf"), compare=False)
    by_rule: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class SearchResult:
    """The plan with its account, and everything it was measured against."""

    plan: Plan
    estimate: Estimate
    certificate: Certificate
    runners_up: tuple[Candidate, ...]
    baselines: tuple[Candidate, ...]


@dataclass(frozen=True)
class _Priced:
    plan: Plan
    estimate: Estimate


@without_garbage_collection()
def search(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    pins: Pins | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> SearchResult:
    """The best plan with its proof.

    The space is searched best-first by simulated steps; of the plans within 1% of the fastest that was found, those
    that rules of thumb lead to among them, the simplest is the plan.
    Raises InfeasibleError when no legal plan fits, ValueError when none is legal, SolverError when the solver is
    missing or nothing is found in time.
    """
    start = time.monotonic()
    deadline = start + time_limit_s
    pins = pins or Pins()
    explorer = Explorer(profile, cluster, training)
    outcome = explorer.explore(pins, deadline, progress=progress)
    if outcome.best is None:
        if outcome.complete:
            raise explain_infeasible(explorer, pins, outcome.rejected)
        outcome.solved += _by_rules(explorer, pins)
    if outcome.best is None:
        raise SolverError(f"no plan found within {time_limit_s:g} s; give it longer with --time-limit")
    until = max(deadline, time.monotonic() + max(1.0, MORE_TIME * time_limit_s))
    told = progress or (lambda *_: None)
    rules = []
    for rule in rules_of_thumb(cluster, training):
        told(f"what people usually try: {rule.name}", USUAL)
        rules.append((rule, _follow(explorer, rule, until)))
    is_open = replace(pins, everything=False, parts=False) == Pins()
    followed = [priced for _, priced in rules if priced is not None and is_open]
    near = [solved for solved in outcome.solved if solved.seconds <= outcome.best.seconds * (1 + WINDOW)]
    finalists = finalists_of(explorer, near, followed) + followed
    chosen = simplest(finalists)
    fastest_s = min(priced.estimate.step_time_s for priced in finalists)
    bound_s = min(outcome.bound + explorer.model.software.step_s, fastest_s)
    gap = (fastest_s - bound_s) / fastest_s
    step_s = chosen.estimate.step_time_s
    certificate = Certificate(
        step_s=step_s,
        fastest_s=fastest_s,
        bound=bound_s,
        gap=gap,
        status="optimal" if gap <= TIE and outcome.complete and not explorer.was_late else "feasible",
        solver=SOLVER,
        search_seconds=time.monotonic() - start,
        shapes={
            "total": outcome.total,
            "rejected": sum(outcome.rejected.values()),
            "pruned": outcome.pruned,
            "solved": outcome.num_solved,
        },
        rejected=outcome.rejected,
    )
    told("alternatives", OTHERS)
    plan = chosen.plan.model_copy(update={"certificate": certificate, "prediction": _prediction(chosen.estimate)})
    return SearchResult(
        plan=plan,
        estimate=chosen.estimate,
        certificate=certificate,
        runners_up=_runners_up(explorer, outcome, chosen, pins, deadline),
        baselines=tuple(_baseline(explorer, rule, priced, chosen, pins) for rule, priced in rules),
    )


@without_garbage_collection()
def price_setup(
    setup: Setup, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, time_limit_s: float = 30.0
) -> Candidate:
    """A manual set-up, priced by the same evaluator; what it leaves open is chosen at its best."""
    explorer = Explorer(profile, cluster, training)
    pins = pins_of(setup)
    outcome = explorer.explore(pins, time.monotonic() + time_limit_s, near=0)
    if outcome.best is None:
        return Candidate(setup.label, None, None, closest_verdict(explorer, pins, outcome.rejected))
    priced = price(explorer, outcome.best)
    return Candidate(setup.label, priced.plan, priced.estimate, FITS, priced.estimate.step_time_s)


def pins_of(setup: Setup) -> Pins:
    """What a manual set-up decides."""
    pipelined = setup.pipeline > 1
    return Pins(
        data_replicate=setup.data_replicate,
        data_shard=setup.data_shard,
        tensor=setup.tensor,
        pipeline=setup.pipeline,
        micro_batch=setup.micro_batch,
        sequence=setup.sequence if setup.tensor > 1 else None,
        schedule=setup.schedule if pipelined else None,
        virtual_stages=setup.virtual_stages if pipelined else None,
        gradient_sync=setup.gradient_sync,
        recompute=setup.recompute,
        reshard=setup.reshard,
        context=setup.context,
        context_kind=setup.context_kind,
        expert=setup.expert,
    )


def price(explorer: Explorer, solved: Solved) -> _Priced:
    """The plan of a solved shape with its estimate, whose step is the search's own number."""
    plan = explorer.plan_of(solved)
    found = estimate(plan, explorer.profile)
    passes_s = found.step_time_s - explorer.model.software.step_s
    difference = abs(passes_s - solved.seconds) / solved.seconds
    assert difference < AGREES, f"evaluator {passes_s} and search {solved.seconds} differ"
    plan = plan.model_copy(update={"prediction": _prediction(found)})
    return _Priced(plan, found)


def finalists_of(explorer: Explorer, near: list[Solved], followed: list[_Priced]) -> list[_Priced]:
    """Those of what was solved that may be the simplest of the fastest, in their order."""
    fastest_s = min((solved.seconds for solved in near), default=float("inf")) + explorer.model.software.step_s
    fastest_s = min([fastest_s, *(priced.estimate.step_time_s for priced in followed)])
    longest_s = fastest_s * (1 + SIMPLE + AGREES) - explorer.model.software.step_s
    return [price(explorer, solved) for solved in near if solved.seconds <= longest_s]


def _prediction(found: Estimate) -> Prediction:
    return Prediction(
        step_time_s=found.step_time_s,
        tokens_per_s=found.tokens_per_s,
        mfu=found.mfu,
        stage_memory_bytes=tuple(stage.device_bytes for stage in found.memory),
        budget_bytes=found.memory[0].budget_bytes,
        stage_budget_bytes=tuple(s.budget_bytes for s in found.memory) if found.memory[0].device else (),
    )


def simplest(priced: list[_Priced]) -> _Priced:
    """The simplest of those within 1% of the fastest by simulation."""
    fastest = min(p.estimate.step_time_s for p in priced)
    near = [p for p in priced if p.estimate.step_time_s <= fastest * (1 + SIMPLE)]
    return min(near, key=lambda p: (*simplicity(p.plan, p.estimate), p.estimate.step_time_s))


def _by_rules(explorer: Explorer, pins: Pins) -> Iterator[Solved]:
    """The best that each rule of thumb leads to, of those that what is pinned allows; a few seconds for each: what is
    there when the time for the whole space is over before its first plan."""
    for rule in rules_of_thumb(explorer.cluster, explorer.training):
        for attempt in rule.attempts:
            found = explorer.explore(attempt, time.monotonic() + RULE_S, near=0).best
            if found is not None and _allowed(explorer.model, pins, explorer.plan_of(found)):
                yield found
                break


def _follow(explorer: Explorer, rule: RuleOfThumb, deadline: float) -> _Priced | None:
    """The plan that a rule of thumb leads to, or None if none of its attempts fits."""
    for pins in rule.attempts:
        outcome = explorer.explore(pins, deadline, near=0)
        if outcome.best is not None:
            return price(explorer, outcome.best)
    return None


def _allowed(model: CostModel, pins: Pins, plan: Plan) -> bool:
    """Whether a plan agrees with what is pinned."""
    layers = [layer for stage in plan.stages for layer in stage.layers]
    wanted = [layer.recompute if pins.recompute is None else model.pinned(kind, pins.recompute)
              for layer, kind in zip(layers, model.kinds, strict=True)]  # fmt: skip
    return pins.allows_shape(shape_of(plan)) and [layer.recompute for layer in layers] == wanted


def _baseline(explorer: Explorer, rule: RuleOfThumb, priced: _Priced | None, chosen: _Priced, pins: Pins) -> Candidate:
    if priced is None:
        missed = nearest(closest_verdict(explorer, each, {}) for each in rule.attempts)
        return Candidate(rule.name, None, None, missed, by_rule=True)
    excluded = "excluded by --pin" if pins != Pins() and not _allowed(explorer.model, pins, priced.plan) else None
    verdict = compared(priced.estimate, chosen.estimate, *([excluded] if excluded else []))
    if shape_of(priced.plan).layout == shape_of(chosen.plan).layout and verdict.kind is VerdictKind.AS_FAST:
        verdict = THE_PLAN
    return Candidate(rule.name, priced.plan, priced.estimate, verdict, priced.estimate.step_time_s, by_rule=True)


def _at_its_best(explorer: Explorer, solved: Solved, pins: Pins, deadline: float) -> Solved:
    """The best plan of the same degrees and schedule. Of runners-up the search solves what has the least bound first,
    which need not be the micro-batch that suits them."""
    shape = solved.shape
    alike = replace(pins.as_in(shape), data_replicate=shape.data_replicate, data_shard=shape.data_shard)
    return explorer.explore(alike, deadline, near=0, cutoff_s=solved.seconds).best or solved


def _runners_up(
    explorer: Explorer, outcome: Outcome, chosen: _Priced, pins: Pins, deadline: float
) -> tuple[Candidate, ...]:
    """The best five others, each of other degrees, schedule or micro-batch, and none beaten by another micro-batch."""
    seen = {shape_of(chosen.plan).layout}
    result = []
    for first in sorted(outcome.solved, key=lambda s: s.seconds):
        if first.shape.layout in seen:
            continue
        best = _at_its_best(explorer, first, pins, deadline)
        solved = first if best.shape.layout in seen else best
        seen |= {first.shape.layout, solved.shape.layout}
        priced = price(explorer, solved)
        label = f"{solved.shape.label}, micro-batch {solved.shape.micro_batch}"
        verdict = compared(priced.estimate, chosen.estimate).noted(priced_mark(priced.plan))
        result.append(Candidate(label, priced.plan, priced.estimate, verdict, priced.estimate.step_time_s))
        if len(result) == ALTERNATIVES:
            break
    return tuple(sorted(result, key=lambda c: c.seconds))
