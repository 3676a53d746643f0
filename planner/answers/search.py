"""The search for the best plan: takes profile, cluster and job, and returns the plan, its proof, runners-up and
baselines."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...profiler.garbage import without_garbage_collection
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.model.model_profile import ModelProfile
from ..cost.estimate import Estimate, estimate
from ..cost.layer_cost import CostModel
from ..plan.document import Certificate, Plan, Prediction
from ..plan.frameworks import Framework
from ..plan.legality import divisors
from ..plan.making import shape_of
from ..plan.not_run import priced_mark
from ..plan.pins import Pins
from ..plan.setups import Setup
from ..plan.training import TrainingSpec
from ..solve.explore import SIMPLE, TIE, WINDOW, Explorer, Outcome, Progress
from ..solve.nodes import Solved
from ..solve.solver import SolverError
from ..solve.union import explore_all
from .alternatives import SHOWN, family, kept, of_other_families, ordered
from .candidate import Candidate
from .explain import compared
from .fitting import filled_by_state, lean_plan
from .guidance import RuleOfThumb, rules_of_thumb
from .infeasible import InfeasibleError, closest_verdict, explain_infeasible
from .simplicity import preference
from .verdict import CUT_SHORT, FITS, THE_PLAN, VerdictKind, nearest

MORE_TIME = 0.05
"""Share of the time limit for which rules of thumb may be followed after it, all together; at least a second."""

USUAL, OTHERS = 0.96, 0.98
"""Shares of the progress bar at which rules of thumb are followed, and at which alternatives are brought to their
best."""

RULE_S = 2.0
"""Seconds to look for the plan of one rule of thumb."""

SO_SLOW = 1.25
"""Layouts without one of the plan's kinds of parallelism are looked for only if their step is at most so many times the
plan's."""

AGREES = 1e-6
"""Relative difference up to which the evaluator's step and the search's count as equal."""

SOLVER = "branch and bound, HiGHS"
"""What proves the bound: branch and bound over the tree of nodes.py, with bounds that HiGHS finds."""

__all__ = ["Candidate", "InfeasibleError", "SearchResult", "SolverError", "price_setup", "search"]


@dataclass(frozen=True)
class SearchResult:
    """The plan with its estimate and certificate, and all layouts that were weighed beside it, in the order of
    alternatives.py."""

    plan: Plan
    estimate: Estimate
    certificate: Certificate
    alternatives: tuple[Candidate, ...]

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        """Alternatives that the search found."""
        return tuple(each for each in self.alternatives if not each.by_rule)

    @property
    def baselines(self) -> tuple[Candidate, ...]:
        """Alternatives that rules of thumb lead to."""
        return tuple(each for each in self.alternatives if each.by_rule)


@dataclass(frozen=True)
class _Priced:
    """A plan with its estimate. in_time: the search that found it ended by itself; if not, it is only the best that was
    found in time."""

    plan: Plan
    estimate: Estimate
    in_time: bool = True


@without_garbage_collection()
def search(
    profile: ModelProfile,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    pins: Pins | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
    beside_open: bool = True,
) -> SearchResult:
    """The best plan with its proof.

    The space is searched best-first by simulated steps. Of all plans within 1% of the fastest that was found, those of
    rules of thumb included, the simplest is the plan. If only plans for a framework are asked for, the proof covers
    only those. beside_open: whether to look for what that restriction costs. Raises InfeasibleError if no legal plan
    fits, ValueError if none is legal, SolverError if the solver is missing or nothing is found in time.
    """
    start = time.monotonic()
    deadline = start + time_limit_s
    pins = pins or Pins()
    framework = pins.framework
    if framework is not None:
        _check_runs(framework, pins, profile, training)
    explorer = Explorer(profile, cluster, training, framework)
    if all(filled_by_state(explorer, each) >= 1 for each in pins.alternatives):
        raise explain_infeasible(explorer, pins, None)
    outcome = explore_all(explorer, pins.alternatives, deadline, progress=progress)
    if outcome.best is None:
        if outcome.complete:
            raise explain_infeasible(explorer, pins, outcome)
        outcome.solved += _by_rules(explorer, pins)
    if outcome.best is None:
        outcome.solved += filter(None, (lean_plan(explorer, each) for each in pins.alternatives))
    if outcome.best is None:
        raise SolverError(f"no plan found within {time_limit_s:g} s; give it longer with --time-limit")
    until = max(deadline, time.monotonic() + max(1.0, MORE_TIME * time_limit_s))
    told = progress or (lambda *_: None)
    rules = []
    for rule in (_as_said(rule, profile, pins) for rule in rules_of_thumb(cluster, training)):
        told(f"what people usually try: {rule.name}", USUAL)
        rules.append((rule, _follow(explorer, rule, until)))
    is_open = replace(pins, everything=False, parts=False, offload_activations=False) == Pins()
    there = (priced for _, priced in rules if priced is not None)
    followed = [priced for priced in there if is_open or is_allowed(explorer.model, pins, priced.plan)]
    near = [solved for solved in outcome.solved if solved.seconds <= outcome.best.seconds * (1 + WINDOW)]
    if framework is not None and framework.partly is not None:
        finalists = as_told(explorer, outcome.solved, until)
    else:
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
        status="optimal" if gap <= TIE and outcome.complete else "feasible",
        solver=SOLVER,
        search_seconds=time.monotonic() - start,
        shapes={
            "total": outcome.total,
            "rejected": sum(outcome.rejected.values()),
            "pruned": outcome.pruned,
            "solved": outcome.num_solved,
        },
        rejected=outcome.rejected,
        framework=None if framework is None else framework.target,
        open_s=_open_s(explorer, pins, fastest_s, time_limit_s) if framework is not None and beside_open else None,
    )
    told("alternatives", OTHERS)
    baselines = [_baseline(explorer, rule, priced, chosen, pins) for rule, priced in rules]
    by_rule = {shape_of(each.plan).layout for each in baselines if each.plan is not None}
    runners_up = _runners_up(explorer, outcome, chosen, baselines, pins, deadline)
    others = [each for each in runners_up if each.plan is None or shape_of(each.plan).layout not in by_rule]
    alternatives = ordered([*baselines, *others], chosen.plan)
    decided = {"certificate": certificate, "prediction": prediction_of(chosen.estimate)}
    plan = chosen.plan.model_copy(update=decided | {"alternatives": kept(alternatives, chosen.plan.cluster)})
    result = SearchResult(plan=plan, estimate=chosen.estimate, certificate=certificate, alternatives=alternatives)
    return adopted(result, runners_up)


@without_garbage_collection()
def price_setup(
    setup: Setup, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, time_limit_s: float = 30.0
) -> Candidate:
    """A manual set-up, priced by the same evaluator; what it leaves open is chosen as well as possible."""
    explorer = Explorer(profile, cluster, training)
    pins = pins_of(setup)
    outcome = explorer.explore(pins, time.monotonic() + time_limit_s, near=0)
    if outcome.best is None:
        return Candidate(setup.label, None, None, closest_verdict(explorer, pins, outcome.rejected))
    priced = price(explorer, outcome.best)
    verdict = FITS if outcome.complete else FITS.noted(CUT_SHORT)
    return Candidate(setup.label, priced.plan, priced.estimate, verdict, priced.estimate.step_time_s)


def adopted(result: SearchResult, candidates: Sequence[Candidate]) -> SearchResult:
    """The result; if one of these candidates is faster than everything that the search has found, with the fastest of
    them as its plan. So whatever has been priced can become the plan, even if the search ran out of time before it
    reached it."""
    priced = (
        _Priced(candidate.plan, candidate.estimate)
        for candidate in candidates
        if candidate.plan is not None
        and candidate.estimate is not None
        and (not priced_mark(candidate.plan) or priced_mark(result.plan))
    )
    best = min(priced, key=lambda found: found.estimate.step_time_s, default=None)
    if best is None or best.estimate.step_time_s >= result.certificate.fastest_s * (1 - TIE):
        return result
    fastest_s = best.estimate.step_time_s
    bound_s = min(result.certificate.bound, fastest_s)
    proven = {"step_s": fastest_s, "fastest_s": fastest_s, "bound": bound_s, "gap": (fastest_s - bound_s) / fastest_s}
    certificate = result.certificate.model_copy(update={**proven, "status": "feasible"})
    decided = {"certificate": certificate, "prediction": prediction_of(best.estimate)}
    judged = (
        each if each.estimate is None else replace(each, verdict=compared(each.estimate, best.estimate))
        for each in result.alternatives
    )
    known = ordered(list(judged), best.plan)
    plan = best.plan.model_copy(update=decided | {"alternatives": kept(known, best.plan.cluster)})
    return replace(result, plan=plan, estimate=best.estimate, certificate=certificate, alternatives=known)


def pins_of(setup: Setup) -> Pins:
    """The pins that a manual set-up stands for."""
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
        offload_activations=setup.offload_activations,
        offload_optimizer=setup.offload_optimizer,
    )


def _check_runs(framework: Framework, pins: Pins, profile: ModelProfile, training: TrainingSpec) -> None:
    """Raise ValueError if a framework runs no plan of this model, or none that agrees with the pins."""
    rule = framework.cannot_run(profile, training)
    if rule is None and pins.recompute is not None:
        rule = framework.recompute_rule(pins.recompute)
    if rule is None and pins.offered:
        rule = (
            f"--space full, recompute of any parts and offload of activations go beyond what {framework.name} is told: "
            "leave them out"
        )
    if rule is None and pins.offload_optimizer and not framework.offloads_optimizer:
        rule = f"offload=optimizer: {framework.name} moves parameters and gradients to the host, too: leave it out"
    if rule is not None:
        raise ValueError(f"--for {framework.target}: {rule}")


def _open_s(explorer: Explorer, pins: Pins, fastest_s: float, time_limit_s: float) -> float:
    """Seconds of the fastest step found, priced for the framework's software, if plans need not run on the framework;
    at most that of the framework's own plans."""
    wider = Explorer(explorer.profile, explorer.cluster, explorer.training)
    step_s = explorer.model.software.step_s
    until_s = time.monotonic() + time_limit_s / 2
    best = wider.explore(replace(pins, framework=None), until_s, near=0, cutoff_s=fastest_s - step_s).best
    return fastest_s if best is None else best.seconds + step_s


def price(explorer: Explorer, solved: Solved) -> _Priced:
    """The plan of a solved shape with its estimate, whose step agrees with the search's. If a framework's settings
    cannot express that plan, a plan that recomputes more is returned, which they can."""
    plan = explorer.plan_of(solved)
    told = _told(explorer, plan)
    if told is not None:
        return told
    found = estimate(plan, explorer.profile)
    passes_s = found.step_time_s - explorer.model.software.step_s
    difference = abs(passes_s - solved.seconds) / solved.seconds
    assert difference < AGREES, f"evaluator {passes_s} and search {solved.seconds} differ"
    plan = plan.model_copy(update={"prediction": prediction_of(found)})
    return _Priced(plan, found)


MOST_TOLD = 60
"""Most plans that are priced in the form in which a framework's settings express them."""


def as_told(explorer: Explorer, solved: list[Solved], until_s: float) -> list[_Priced]:
    """Solved shapes as plans of a framework that recomputes equally many of the first blocks of every stage: the fewest
    with which the plan fits. They are priced fastest first, and only as long as they may still be among the fastest,
    because this form makes none faster."""
    found: list[_Priced] = []
    for each in sorted(solved, key=lambda each: each.seconds)[:MOST_TOLD]:
        best_s = min((priced.estimate.step_time_s for priced in found), default=float("inf"))
        late = found and time.monotonic() > until_s
        if late or each.seconds + explorer.model.software.step_s > best_s * (1 + SIMPLE):
            break
        found.append(price(explorer, each))
    return found


def _told(explorer: Explorer, plan: Plan) -> _Priced | None:
    """A plan in the form in which its framework's settings express it, if stages recompute unequal numbers of blocks;
    None if the plan already has that form."""
    framework = explorer.framework
    if framework is None or framework.partly is None:
        return None
    counts = [sum(layer.recompute == framework.partly for layer in stage.layers) for stage in plan.stages]
    least, most = max(counts), max(len(stage.layers) for stage in plan.stages)
    if least == 0 or framework.as_told(plan, least) == plan:
        return None
    for count in range(least, most + 1):
        told = framework.as_told(plan, count)
        found = estimate(told, explorer.profile)
        if found.fits:
            return _Priced(told.model_copy(update={"prediction": prediction_of(found)}), found)
    raise AssertionError("a plan does not fit with all of its blocks recomputed, but with some")


def finalists_of(explorer: Explorer, near: list[Solved], followed: list[_Priced]) -> list[_Priced]:
    """Those of the solved shapes, priced and in their order, that may be the simplest plan among the fastest."""
    fastest_s = min((solved.seconds for solved in near), default=float("inf")) + explorer.model.software.step_s
    fastest_s = min([fastest_s, *(priced.estimate.step_time_s for priced in followed)])
    longest_s = fastest_s * (1 + SIMPLE + AGREES) - explorer.model.software.step_s
    return [price(explorer, solved) for solved in near if solved.seconds <= longest_s]


def prediction_of(found: Estimate) -> Prediction:
    """The figures of an estimate that a plan's document stores."""
    return Prediction(
        step_time_s=found.step_time_s,
        tokens_per_s=found.tokens_per_s,
        mfu=found.mfu,
        stage_memory_bytes=tuple(stage.device_bytes for stage in found.memory),
        budget_bytes=found.memory[0].budget_bytes,
        stage_budget_bytes=tuple(s.budget_bytes for s in found.memory) if found.memory[0].device else (),
        launch_share=found.breakdown.get("launch", 0.0) / found.step_time_s,
    )


def simplest(priced: list[_Priced]) -> _Priced:
    """The simplest of the plans whose simulated step is within 1% of the fastest."""
    fastest = min(p.estimate.step_time_s for p in priced)
    near = [p for p in priced if p.estimate.step_time_s <= fastest * (1 + SIMPLE)]
    return min(near, key=lambda p: preference(p.plan, p.estimate))


def _by_rules(explorer: Explorer, pins: Pins) -> Iterator[Solved]:
    """The best plan of each rule of thumb, if the pins allow it; each is looked for during a few seconds. They are used
    if the time for the whole space ends before the first plan is found."""
    for rule in rules_of_thumb(explorer.cluster, explorer.training):
        for attempt in rule.attempts:
            found = explorer.explore(attempt, time.monotonic() + RULE_S, near=0).best
            if found is not None and is_allowed(explorer.model, pins, explorer.plan_of(found)):
                yield found
                break


def _as_said(rule: RuleOfThumb, profile: ModelProfile, pins: Pins) -> RuleOfThumb:
    """A rule of thumb with the pinned micro-batch, if the loss couples samples, so that the micro-batch changes what is
    trained."""
    if not profile.coupling or pins.micro_batch is None:
        return rule
    return replace(rule, attempts=tuple(replace(each, micro_batch=pins.micro_batch) for each in rule.attempts))


def _follow(explorer: Explorer, rule: RuleOfThumb, deadline: float) -> _Priced | None:
    """The plan that a rule of thumb leads to; None if none of its attempts fits."""
    for pins in rule.attempts:
        outcome = explorer.explore(pins, min(deadline, time.monotonic() + RULE_S), near=0)
        if outcome.best is not None:
            return replace(price(explorer, outcome.best), in_time=outcome.complete)
    return None


def is_allowed(model: CostModel, pins: Pins, plan: Plan) -> bool:
    """Whether a plan agrees with the pins."""
    layers = plan.layers
    wanted = [layer.recompute if pins.recompute is None else model.pinned(kind, pins.recompute)
              for layer, kind in zip(layers, model.kinds, strict=True)]  # fmt: skip
    if pins.framework is not None or [layer.recompute for layer in layers] != wanted:
        return False
    reshards = pins.reshard is None or pins.reshard == any(layer.reshard for layer in layers)
    syncs = pins.gradient_sync in (None, plan.gradient_sync) or plan.num_microbatches == 1
    return pins.allows_shape(shape_of(plan)) and (plan.degrees.sharded_over == 1 or (reshards and syncs))


def _baseline(explorer: Explorer, rule: RuleOfThumb, priced: _Priced | None, chosen: _Priced, pins: Pins) -> Candidate:
    if priced is None:
        missed = nearest(closest_verdict(explorer, each, {}) for each in rule.attempts)
        return Candidate(rule.name, None, None, missed, by_rule=True)
    excluded, own = None, replace(pins, framework=None)
    if own != Pins() and not is_allowed(explorer.model, own, priced.plan):
        excluded = "excluded by --pin"
    elif pins.framework is not None:
        excluded = f"not known to be what {pins.framework.name} runs"
    verdict = compared(priced.estimate, chosen.estimate, *([excluded] if excluded else []))
    if shape_of(priced.plan).layout == shape_of(chosen.plan).layout and verdict.kind is VerdictKind.AS_FAST:
        verdict = THE_PLAN
    elif not priced.in_time:
        verdict = verdict.noted(CUT_SHORT)
    return Candidate(rule.name, priced.plan, priced.estimate, verdict, priced.estimate.step_time_s, by_rule=True)


def _at_its_best(explorer: Explorer, solved: Solved, pins: Pins, deadline: float) -> Solved:
    """The best plan with the degrees and schedule of a runner-up. The search solves shapes in the order of their
    bounds, so the micro-batch that it has solved for a runner-up need not be the best."""
    shape = solved.shape
    alike = replace(pins.as_in(shape), data_replicate=shape.data_replicate, data_shard=shape.data_shard)
    cutoff_s = solved.seconds * (1 + TIE)  # it is found again where it is the best, and its cuts are looked at
    found = explore_all(explorer, alike.alternatives, deadline, near=0, cutoff_s=cutoff_s).best
    return solved if found is None or found.seconds > solved.seconds else found


def _runners_up(
    explorer: Explorer,
    outcome: Outcome,
    chosen: _Priced,
    baselines: Sequence[Candidate],
    pins: Pins,
    deadline: float,
) -> list[Candidate]:
    """The best plan of each other family of layouts that the search has met, with the best micro-batch. If these and
    the rules of thumb are too few, also the best plan without one of the plan's kinds of parallelism, and then other
    layouts of its own family."""
    seen = {shape_of(chosen.plan).layout}
    families, found, step_s = {family(chosen.plan.degrees)}, list[Candidate](), chosen.estimate.step_time_s

    def add(first: Solved) -> None:
        best = _at_its_best(explorer, first, pins, deadline)
        solved = first if best.shape.layout in seen else best
        seen.update((first.shape.layout, solved.shape.layout))
        families.add(family(first.shape.degrees))
        found.append(_beside(explorer, solved, chosen))

    def too_few() -> bool:
        return len(of_other_families([*found, *baselines], chosen.plan)) < SHOWN

    ranked = sorted(outcome.solved, key=lambda s: s.seconds)
    for solved in ranked:
        if family(solved.shape.degrees) not in families and len(found) < SHOWN:
            add(solved)
    for attempts in _with_less(chosen.plan, pins):
        if too_few() and time.monotonic() < deadline:
            spaces = [each.alternatives for each in attempts]
            tried = [explore_all(explorer, each, deadline, near=0, cutoff_s=SO_SLOW * step_s).best for each in spaces]
            others = [each for each in tried if each is not None and family(each.shape.degrees) not in families]
            if others:
                add(min(others, key=lambda s: s.seconds))
    for solved in ranked:
        if too_few() and len(found) < SHOWN and solved.shape.layout not in seen:
            add(solved)
    return found


def _with_less(plan: Plan, pins: Pins) -> Iterator[list[Pins]]:
    """For each kind of parallelism that the plan has and the pins leave open: several pins without it. Its ranks become
    data ranks, or tensor ranks as far as a host has enough, or stages. If stages stay, the schedule stays, too."""
    degrees, per_host = plan.degrees, plan.cluster.devices_per_host
    had = {name: getattr(degrees, name) for name in ("context", "pipeline", "tensor", "expert")}
    tied = {
        "context": (pins.context, pins.context_kind, pins.sequence_ways),
        "pipeline": (pins.pipeline, pins.schedule, pins.virtual_stages),
        "tensor": (pins.tensor, pins.sequence, pins.sequence_ways),
        "expert": (pins.expert,),
    }
    for name, ways in had.items():
        if ways == 1 or any(each is not None for each in tied[name]):
            continue
        left = had | {name: 1}
        alike = replace(pins, schedule=plan.schedule, virtual_stages=degrees.virtual_stages)
        attempts = [replace(alike if left["pipeline"] > 1 else pins, **left)]
        for other, most in (("tensor", per_host), ("pipeline", plan.degrees.num_devices)):
            more = max(left[other] * part for part in divisors(ways) if left[other] * part <= max(most, left[other]))
            if name not in (other, "expert") and more > left[other] and all(each is None for each in tied[other]):
                kept_stages = left["pipeline"] > 1 and other != "pipeline"
                attempts.append(replace(alike if kept_stages else pins, **left | {other: more}))
        yield attempts


def _beside(explorer: Explorer, solved: Solved, chosen: _Priced) -> Candidate:
    """A solved shape as a candidate, with its layout as the label."""
    priced = price(explorer, solved)
    label = f"{priced.plan.label}, micro-batch {priced.plan.micro_batch}"
    verdict = compared(priced.estimate, chosen.estimate).noted(priced_mark(priced.plan))
    return Candidate(label, priced.plan, priced.estimate, verdict, priced.estimate.step_time_s)
