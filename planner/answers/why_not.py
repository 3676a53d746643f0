"""The best plan of a set-up, and why it is not the plan: it breaks a rule, exceeds the memory of a stage, or is
slower."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...profiler.machine.units import format_bytes, format_seconds, gpus_in_words
from ..cost.estimate import Estimate, estimate
from ..plan.document import Plan
from ..plan.making import shape_of
from ..plan.not_run import priced_mark
from ..plan.pins import Pins
from ..plan.setups import Setup
from ..solve.explore import SIMPLE, Explorer
from .candidate import Candidate
from .check import violations
from .explain import CAUSES, causes_apart, unless_measured
from .fitting import Closest, closest_plan
from .guidance import RuleOfThumb
from .infeasible import closest_verdict
from .search import pins_of
from .verdict import CUT_SHORT, FITS, VerdictKind, nearest

SMALL = 0.02
"""Share of the plan's step below which a cause is not mentioned."""


_SIMPLER = "is simpler or leaves more memory free"


@dataclass(frozen=True)
class Answer:
    """Why a set-up is not the plan. plan, estimate: the set-up at its best; None if it is not legal or does not fit."""

    asked: str
    kind: VerdictKind
    sentence: str
    plan: Plan | None = None
    estimate: Estimate | None = None


def best_of(
    explorer: Explorer, pins: Pins, deadline: float, cutoff_s: float = float("inf")
) -> tuple[Plan, Estimate] | None:
    """The fastest plan under these pins, with its estimate. None if none fits, none has a step below `cutoff_s`, or
    none was found before time.monotonic() reached `deadline`; at least a second is searched."""
    outcome = explorer.explore(pins, max(deadline, time.monotonic() + 1.0), near=0, cutoff_s=cutoff_s)
    if outcome.best is None:
        return None
    plan = explorer.plan_of(outcome.best)
    return plan, estimate(plan, explorer.profile)


def first_that_fits(explorer: Explorer, attempts: Sequence[Pins], deadline: float) -> tuple[Plan, Estimate] | None:
    """The fastest plan under the first of these pins that has any; None if none has."""
    found = (best_of(explorer, pins, deadline) for pins in attempts)
    return next((each for each in found if each is not None), None)


def followed(explorer: Explorer, rule: RuleOfThumb, deadline: float) -> Candidate:
    """What a rule of thumb leads to; without plan and estimate if none of its attempts fits."""
    for pins in rule.attempts:
        outcome = explorer.explore(pins, max(deadline, time.monotonic() + 1.0), near=0)
        if outcome.best is not None:
            plan = explorer.plan_of(outcome.best)
            verdict = FITS if outcome.complete else FITS.noted(CUT_SHORT)
            found = estimate(plan, explorer.profile)
            return Candidate(rule.name, plan, found, verdict, found.step_time_s, by_rule=True)
    verdict = nearest(closest_verdict(explorer, pins, {}) for pins in rule.attempts)
    return Candidate(rule.name, None, None, verdict, by_rule=True)


def why_not(
    explorer: Explorer, asked: str, attempts: Sequence[Pins], plan: Plan, found: Estimate, seconds: float = 30.0
) -> Answer:
    """Why the plan is not this set-up.

    attempts: the set-up as pins; if there are several, the first that fits counts. seconds: time limit for pricing it.
    """
    other = first_that_fits(explorer, attempts, time.monotonic() + seconds)
    if other is not None:
        return priced_answer(asked, *other, plan, found)
    answers = [_no_plan(explorer, asked, pins) for pins in attempts]
    return min(answers, key=lambda answer: answer.kind is VerdictKind.ILLEGAL)


def why_not_setup(explorer: Explorer, setup: Setup, plan: Plan, found: Estimate, seconds: float = 30.0) -> Answer:
    """Why the plan is not this set-up, where everything that the set-up says is fixed and the rest is chosen at its
    best.

    If it says nothing of data ranks they are taken as replicas, and the answer says so. If these do not fit, the answer
    also has the price of the same set-up with state sharded over them.
    """
    answer = why_not(explorer, setup.label, (pins_of(setup),), plan, found, seconds)
    if not setup.replicas_assumed or answer.kind is VerdictKind.ILLEGAL:
        return answer
    replicas = f"Nothing is said of the {setup.data_replicate} data ranks, so they are replicas"
    if answer.kind is not VerdictKind.DOES_NOT_FIT:
        return replace(answer, sentence=f"{answer.sentence}. {replicas}")
    sharding = replace(
        setup,
        label=f"{setup.label} fsdp",
        data_replicate=1,
        data_shard=setup.data_replicate,
        reshard=True,
        gradient_sync="every",
    )
    sharded = why_not(explorer, sharding.label, (pins_of(sharding),), plan, found, seconds)
    return replace(answer, sentence=f"{answer.sentence}. {replicas}. With shards instead, {sharded.sentence}")


def not_legal(asked: str, rule: str) -> Answer:
    """The answer for a set-up that no layout satisfies."""
    return Answer(asked, VerdictKind.ILLEGAL, f"{asked} is not legal: {rule}")


def why_not_plan(explorer: Explorer, asked: str, other: Plan, plan: Plan, found: Estimate) -> Answer:
    """Why the plan is not this other plan of the same model. The other one is priced as it is, on the plan's cluster
    and for its job.

    Raises ValueError if the other is for another model, number of GPUs or global batch.
    """
    count, batch = plan.cluster.num_devices, plan.training.global_batch
    if other.degrees.num_devices != count:
        raise ValueError(
            f"{asked} is for {gpus_in_words(other.degrees.num_devices)}, the plan for {count}: give one for as many "
            f"GPUs, or plan again with --gpus {other.degrees.num_devices}"
        )
    if other.training.global_batch != batch:
        raise ValueError(
            f"{asked} takes {other.training.global_batch} samples a step, the plan {batch}: steps compare at one batch "
            f"only; make it again with --global-batch {batch}"
        )
    here = other.model_copy(update={"cluster": plan.cluster, "training": plan.training})
    priced = estimate(here, explorer.profile)
    outside = [found.detail for found in violations(here, explorer.profile) if found.kind is VerdictKind.ILLEGAL]
    if outside:
        return Answer(asked, VerdictKind.ILLEGAL, f"{asked} is not legal: {outside[0]}", here, priced)
    closest = Closest(here, priced)
    if closest.over_bytes > 0:
        return _over(asked, "as it stands", closest)
    return priced_answer(asked, here, priced, plan, found)


_NOT_SEARCHED = "it was pinned away or not searched when this was planned"


def priced_answer(
    asked: str, other: Plan, priced: Estimate, plan: Plan, found: Estimate, left_out: str = _NOT_SEARCHED
) -> Answer:
    """The answer for a set-up that fits: how much slower it is, and where the time goes. left_out: why a faster set-up
    is not the plan."""
    ratio = priced.step_time_s / found.step_time_s - 1.0
    leads = f"{other.label}, micro-batch {other.micro_batch}{priced_mark(other)}"
    times = f"{format_seconds(priced.step_time_s)} against {format_seconds(found.step_time_s)}"
    if abs(ratio) < 0.0005:
        same = shape_of(other).layout == shape_of(plan).layout
        words = "is the plan" if same else f"is as fast as the plan ({times}), which {_SIMPLER}"
        return Answer(
            asked, VerdictKind.PLAN if same else VerdictKind.AS_FAST, f"{asked} ({leads}) {words}", other, priced
        )
    apart = causes_apart(priced, found)
    more = _causes_in_words(apart, found.step_time_s, more=True)
    less = _causes_in_words(apart, found.step_time_s, more=False)
    if ratio < 0:
        why = unless_measured(plan.measured, f"the plan {_SIMPLER}" if ratio >= -SIMPLE else left_out)
        sentence = f"{asked} ({leads}) is {-ratio:.1%} faster: {times}, but {why}"
        return Answer(asked, VerdictKind.FASTER, sentence, other, priced)
    pace = f"takes {1 + ratio:.1f} times as long as the plan" if ratio >= 1 else f"is {ratio:.1%} slower than the plan"
    spared = f"; it spares {less}" if less else ""
    return Answer(
        asked, VerdictKind.SLOWER, f"{asked} ({leads}) {pace}: {times}. It spends {more}{spared}", other, priced
    )


def _causes_in_words(apart: dict[str, float], step_s: float, *, more: bool) -> str:
    sign = 1.0 if more else -1.0
    shown = {name: sign * seconds for name, seconds in apart.items() if sign * seconds > 0}
    large = {name: seconds for name, seconds in shown.items() if seconds > SMALL * step_s}
    if more and not large:
        large = dict(list(shown.items())[:1])
    ranked = sorted(large.items(), key=lambda item: -item[1])
    return ", ".join(f"{format_seconds(s)}{' more' if more else ''} on {CAUSES[name]}" for name, s in ranked)


def _no_plan(explorer: Explorer, asked: str, pins: Pins) -> Answer:
    """The answer for pins without a plan."""
    closest = closest_plan(explorer, pins)
    if closest is None:
        return not_legal(asked, closest_verdict(explorer, pins, {}).detail)
    if closest.over_bytes <= 0:
        sentence = f"{asked} may fit, but no plan of it was found in time; try it with --setup"
        return Answer(asked, VerdictKind.NOT_FOUND, sentence)
    return _over(asked, f"at its leanest (micro-batch {closest.plan.micro_batch})", closest)


def _over(asked: str, how: str, closest: Closest) -> Answer:
    """The answer for a plan that does not fit: on which stage, by how much, and what that stage holds."""
    memory = closest.estimate.memory[closest.stage]
    items = sorted(memory.items.items(), key=lambda item: -item[1])[:3]
    return Answer(
        asked,
        VerdictKind.DOES_NOT_FIT,
        f"{asked} does not fit: {how} {closest.where} is over by {format_bytes(closest.over_bytes)}, needing "
        f"{format_bytes(memory.device_bytes)} where {format_bytes(memory.budget_bytes)} may be used ("
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in items)
        + ")",
    )
