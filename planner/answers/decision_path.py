"""The path of yes/no questions that people are advised to walk, answered with a model's numbers: where the plan agrees,
and what the advice would cost where it does not."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from ...profiler.machine.units import format_bytes
from ...profiler.model.model_profile import ModelProfile, amount_at
from ..cost.estimate import Estimate
from ..plan.document import ContextKind, Plan, Recompute
from ..plan.legality import context_rule, divisors
from ..plan.pins import Pins
from ..solve.explore import Explorer
from .blame import blamed
from .fitting import Closest, closest_plan
from .guidance import (
    COMBINED,
    FEWER_SPLITS,
    IN_THE_NODE,
    LONG,
    LONG_SEQUENCE,
    MOST_STAGES,
    ONE_GPU,
    RECOMPUTED,
    REPLICAS,
    SHARDED,
    Question,
    rules_of_thumb,
)
from .why_not import best_of, first_that_fits, priced_answer


@dataclass(frozen=True)
class Step:
    """One question with its answer. agrees: whether the plan does what a yes leads to; None if the answer is no."""

    question: Question
    yes: bool
    numbers: str
    agrees: bool | None = None
    verdict: str = ""


@dataclass(frozen=True)
class _Case:
    """What all questions are asked about, and until when."""

    explorer: Explorer
    plan: Plan
    found: Estimate
    deadline: float

    def fits(self, pins: Pins) -> Closest | None:
        """The plan that holds least under these pins; None if none is legal."""
        return closest_plan(self.explorer, pins)

    def numbers(self, pins: Pins, closest: Closest | None, how: str) -> str:
        """What this plan needs, in words; if there is none, the rule that excludes it."""
        if closest is None:
            job = self.explorer
            found = blamed(job.profile, job.cluster, job.training, pins)
            return "no layout of these GPUs is legal" if found is None else found.rule
        memory = closest.estimate.memory[closest.stage]
        budget = format_bytes(memory.budget_bytes)
        return f"{how} the fullest GPU needs {format_bytes(memory.device_bytes)} and may use {budget}"

    def answered(self, question: Question, numbers: str, attempts: Sequence[Pins], agrees: bool) -> Step:
        """The step for a question whose answer is yes; unless the plan agrees, with what following the advice costs."""
        if agrees:
            return Step(question, True, numbers, True, "the plan agrees")
        other = first_that_fits(self.explorer, attempts, self.deadline)
        if other is None:
            return Step(question, True, numbers, False, "the plan does otherwise; no plan that follows it was found")
        cost = priced_answer("following it", *other, self.plan, self.found).sentence
        return Step(question, True, numbers, False, f"the plan does otherwise: {cost}")


def walk(plan: Plan, found: Estimate, profile: ModelProfile, seconds: float = 20.0) -> tuple[Step, ...]:
    """The questions in order, until a yes decides how to lay the model out. Then whether its sequences are long, and,
    unless the model fits on one GPU as it is, whether recompute would make splitting unnecessary.

    seconds: time limit for pricing what the advice leads to.
    """
    case = _Case(Explorer(profile, plan.cluster, plan.training), plan, found, time.monotonic() + seconds)
    layout = tuple(_layout(case))
    fits_whole = any(step.question == ONE_GPU and step.yes for step in layout)
    return (*layout, _long(case), *(() if fits_whole else _fewer_splits(case)))


def _layout(case: _Case) -> Iterator[Step]:
    count, per_host = case.plan.cluster.num_devices, case.plan.cluster.devices_per_host
    degrees = case.plan.degrees
    whole = degrees.tensor * degrees.context * degrees.pipeline == 1
    ways: tuple[tuple[Question, Recompute, str], ...] = (
        (ONE_GPU, "none", "with one sample and nothing recomputed"),
        (RECOMPUTED, "full", "with one sample and everything recomputed"),
    )
    for question, recompute, how in ways:
        pins = replace(REPLICAS, recompute=recompute)
        closest = case.fits(pins)
        numbers = case.numbers(pins, closest, how)
        if closest is not None and closest.over_bytes <= 0:
            yield case.answered(question, numbers, (REPLICAS,), whole and degrees.data_shard == 1)
            return
        yield Step(question, False, numbers)
    if count == 1:
        return
    rules = {rule.name: rule.attempts for rule in rules_of_thumb(case.plan.cluster, case.plan.training)}
    sharded = rules["FSDP"][0]
    closest = case.fits(sharded)
    numbers = case.numbers(sharded, closest, f"sharded over {count:,} GPUs")
    if closest is not None and closest.over_bytes <= 0:
        yield case.answered(SHARDED, numbers, rules["FSDP"], whole and degrees.data_shard > 1)
    else:
        yield Step(SHARDED, False, numbers)
    if per_host > 1:
        yield from _split(case, rules["TP in the node + DP"], rules["Megatron 3D"])


def _split(case: _Case, inside: Sequence[Pins], combined: Sequence[Pins]) -> Iterator[Step]:
    """Steps on tensor parallelism inside a host, and if that does not fit, on tensor parallelism with a pipeline."""
    degrees = case.plan.degrees
    leanest = [(pins, case.fits(pins)) for pins in inside]
    fitting = [(pins, closest) for pins, closest in leanest if closest is not None and closest.over_bytes <= 0]
    legal = [pair for pair in leanest if pair[1] is not None] or leanest[:1]
    pins, closest = (fitting or legal)[0]
    numbers = case.numbers(pins, closest, f"with tensor={pins.tensor}")
    if fitting:
        follows = degrees.tensor > 1 and degrees.pipeline == 1
        yield case.answered(IN_THE_NODE, numbers, [pins for pins, _ in fitting], follows)
        return
    yield Step(IN_THE_NODE, False, numbers)
    for pins in combined:
        closest = case.fits(pins)
        if closest is not None and closest.over_bytes <= 0:
            words = f"with tensor={pins.tensor} and pipeline={pins.pipeline}"
            follows = degrees.tensor > 1 and degrees.pipeline > 1
            yield case.answered(COMBINED, case.numbers(pins, closest, words), (pins,), follows)
            return
    yield Step(COMBINED, False, "with no number of stages, without sharding its state")


def _long(case: _Case) -> Step:
    profile = case.explorer.profile
    if profile.seq_len is None:
        return Step(LONG, False, "the model has no sequence")
    share = _attention_share(profile)
    numbers = f"{profile.seq_len:,} tokens; {share:.0%} of the FLOPs are attention, which grows with their square"
    if profile.seq_len < LONG_SEQUENCE:
        return Step(LONG, False, f"{numbers}; long begins at about {LONG_SEQUENCE:,}")
    per_host = case.plan.cluster.devices_per_host
    attempts = [Pins(tensor=t, sequence=True) for t in reversed(divisors(per_host)) if t > 1]
    agrees = case.plan.sequence_parallel or case.plan.degrees.context > 1
    legal = [pins for pins in attempts if case.fits(pins) is not None]
    if not (legal or agrees):
        rule = case.numbers(attempts[0], None, "") if attempts else "one GPU in a node"
        return Step(LONG, True, numbers, False, f"the plan cannot: {rule}{_with_context(case)}")
    step = case.answered(LONG, numbers, legal, agrees)
    return replace(step, verdict=step.verdict + _with_context(case))


def _with_context(case: _Case) -> str:
    """A sentence on what context=2 beside the plan's tensor and pipeline degrees would cost, or the rule that excludes
    it; empty if the plan has context ranks, or no ranks can be."""
    degrees, profile = case.plan.degrees, case.explorer.profile
    if degrees.context > 1 or degrees.num_devices // degrees.tensor // degrees.pipeline % 2:
        return ""
    rules = [context_rule(profile, 2, degrees.tensor, kind) for kind in get_args(ContextKind)]
    if all(rules):
        return f". {rules[0]}"
    pins = Pins(tensor=degrees.tensor, pipeline=degrees.pipeline, context=2)
    other = best_of(case.explorer, pins, case.deadline)
    if other is None:
        return ". With context=2 no plan of these degrees was found"
    return f". {priced_answer('With context=2 it', *other, case.plan, case.found).sentence}"


def _attention_share(profile: ModelProfile) -> float:
    """Attention's share of a sample's FLOPs, forward and backward. Of unfused attention only the operators marked as
    its core count."""
    attention = total = 0.0
    for layer in profile.layers:
        for operator in profile.classes[layer.layer_class].whole.operators:
            flops = amount_at(operator.flops, 2) - amount_at(operator.flops, 1)
            total += flops
            attention += flops if operator.kind == "attention" or operator.core else 0.0
    return attention / total if total else 0.0


def _fewer_splits(case: _Case) -> Iterator[Step]:
    """The step, for a plan that splits the model, on whether recompute would do with fewer splits."""
    degrees = case.plan.degrees
    ways = degrees.tensor * degrees.pipeline
    if ways == 1:
        return
    per_host, count = case.plan.cluster.devices_per_host, case.plan.cluster.num_devices
    fewer = sorted(
        (t * p, p, t)
        for t in divisors(per_host)
        for p in divisors(count // t)
        if t * p < ways and p <= MOST_STAGES and count % (t * p) == 0
    )
    for less, pipeline, tensor in fewer:
        pins = Pins(tensor=tensor, pipeline=pipeline, context=degrees.context, recompute="full")
        closest = case.fits(pins)
        if closest is not None and closest.over_bytes <= 0:
            how = "whole" if less == 1 else f"split {less} ways"
            numbers = case.numbers(pins, closest, f"{how} instead of {ways} ways, everything recomputed,")
            other = best_of(case.explorer, replace(pins, recompute=None), case.deadline)
            if other is None:
                continue
            cost = priced_answer("following it", *other, case.plan, case.found).sentence
            yield Step(FEWER_SPLITS, True, numbers, False, f"the plan splits more: {cost}")
            return
    yield Step(FEWER_SPLITS, False, f"no layout that splits the model fewer than {ways} ways fits")
