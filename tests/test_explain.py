"""Pins are read and blamed by name; questions, objections and what-ifs are answered with numbers that add up."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import meshwright as mw
from meshwright.executor.reporting.sweep_report import sweep_rows
from meshwright.planner.answers.blame import blamed, is_legal
from meshwright.planner.answers.check import check
from meshwright.planner.answers.decision_path import Step, walk
from meshwright.planner.answers.explain import CAUSES, causes_apart, compared, does_not_fit, reason
from meshwright.planner.answers.fitting import closest_plan, grown
from meshwright.planner.answers.guidance import (
    FEWER_SPLITS,
    IN_THE_NODE,
    LONG,
    LONG_SEQUENCE,
    ONE_GPU,
    SHARDED,
    named_rules,
    no_candidates,
    rules_of_thumb,
)
from meshwright.planner.answers.search import (
    InfeasibleError,
    SearchResult,
    SolverError,
    pins_of,
    price_setup,
    search,
)
from meshwright.planner.answers.sweep import (
    Point,
    changes_of_kind,
    cluster_for,
    kind_in_words,
    marginal_prices,
    robustness,
    sweep,
)
from meshwright.planner.answers.tutorial import lessons
from meshwright.planner.answers.why_not import best_of, followed, why_not, why_not_plan, why_not_setup
from meshwright.planner.cost.estimate import Estimate, estimate
from meshwright.planner.plan.document import Plan, placement
from meshwright.planner.plan.frameworks import framework_of
from meshwright.planner.plan.legality import context_rule, tensor_rule
from meshwright.planner.plan.making import shape_of
from meshwright.planner.plan.pin_texts import read_pins
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import Objective, TrainingSpec
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.space import Space
from meshwright.profiler.machine.cluster import ClusterSpec
from meshwright.profiler.machine.units import format_seconds
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.cli import run_plan, save_profile, small_profile, some_plan
from support.exported import PROFILE
from support.synthetic import cluster, device, layer_class, profile

BATCH = 24


def chain(parameters: int = 10_000_000, heads: int = 4, layers: int = 4) -> ModelProfile:
    block = layer_class("block", 1e11, parameters, saved=2e8, inputs=1e7, transient=1e7, heads=heads)
    return profile([block], [0] * layers)


def job(batch: int = BATCH) -> TrainingSpec:
    return TrainingSpec(global_batch=batch, seq_len=64, memory_margin=0.0)


@cache
def short_of_memory(memory: float, layers: int = 4, heads: int = 4) -> tuple[ModelProfile, ClusterSpec, SearchResult]:
    """A model of 100M parameters a layer on 8 devices of little memory, and the plan for them."""
    model, on = chain(100_000_000, heads, layers), cluster(1, 8, device(memory=memory))
    return model, on, search(model, on, job())


def num_shapes(pins: Pins, on: ClusterSpec | None = None) -> tuple[int, int]:
    """Shapes of a space (legal, rejected)."""
    space = Space(chain(), on or cluster(2, 4), job(), pins)
    legal = sum(space.num_shapes(family) for family in list(space.families()))
    return legal, sum(space.rejected.values())


# Pins


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        ({"pin": ["tensor=4", "tensor=8"]}, "--pin tensor=4", "--pin tensor=8"),
        ({"pin": ["tensor=8"], "most": ["tensor=4"]}, "--pin tensor=8", "--max tensor=4"),
        ({"pin": ["tp=2"], "forbid": ["tensor"]}, "--pin tp=2", "--forbid tensor"),
        ({"pin": ["schedule=zb-v"], "recompute": "full"}, "--recompute full", "--pin schedule=zb-v"),
        ({"pin": ["recompute=full"], "recompute": "parts"}, "--pin recompute=full", "--recompute parts"),
        ({"pin": ["mb=4"], "micro_batch": 2}, "--pin mb=4", "--micro-batch 2"),
        ({"pin": ["schedule=1f1b"], "forbid": ["1f1b"]}, "--pin schedule=1f1b", "--forbid 1f1b"),
        ({"pin": ["schedule=zb-h1"], "forbid": ["zero-bubble"]}, "--pin schedule=zb-h1", "--forbid zero-bubble"),
        ({"pin": ["schedule=1f1b"], "forbid": ["pipeline"]}, "--forbid pipeline", "--pin schedule=1f1b"),
        ({"pin": ["pp=4", "schedule=none"]}, "--pin pp=4", "--pin schedule=none"),
        ({"pin": ["pp=1", "v=2"]}, "--pin pp=1", "--pin v=2"),
        ({"pin": ["v=2", "schedule=gpipe"]}, "--pin schedule=gpipe", "--pin v=2"),
        ({"pin": ["v=3", "schedule=zb-v"]}, "--pin schedule=zb-v", "--pin v=3"),
        ({"pin": ["sp=on", "tensor=1"]}, "--pin sp=on", "--pin tensor=1"),
        ({"pin": ["sp=on"], "forbid": ["sequence"]}, "--pin sp=on", "--forbid sequence"),
        ({"pin": ["sequence=8", "tensor=4"], "forbid": ["context"]}, "--pin tensor=4", "--pin sequence=8"),
        ({"pin": ["fsdp=2"], "forbid": ["data"]}, "--pin fsdp=2", "--forbid data"),
        ({"pin": ["context=2"], "forbid": ["context"]}, "--pin context=2", "--forbid context"),
        ({"pin": ["cp=8"], "most": ["context=4"]}, "--pin cp=8", "--max context=4"),
        ({"pin": ["ep=2"], "forbid": ["expert"]}, "--pin ep=2", "--forbid expert"),
        ({"pin": ["context_kind=ring"], "forbid": ["context"]}, "--pin context_kind=ring", "--forbid context"),
        ({"pin": ["cp_kind=ring", "context_kind=ulysses"]}, "--pin cp_kind=ring", "--pin context_kind=ulysses"),
        ({"pin": ["sequence=8", "context=3"]}, "--pin context=3", "--pin sequence=8"),
        ({"pin": ["sequence=8", "context=2", "tensor=2"]}, "--pin tensor=2", "--pin sequence=8"),
    ],
)
def test_two_pins_that_contradict_each_other_are_named(flags: dict[str, list[str]], first: str, second: str) -> None:
    with pytest.raises(ValueError, match="contradicts") as error:
        read_pins(**flags)  # type: ignore[arg-type]

    assert first in str(error.value)
    assert second in str(error.value)


def test_short_flags_say_what_long_pins_say() -> None:
    short = read_pins(forbid=["pipeline", "sequence"], recompute="full", micro_batch=2)

    assert short == replace(read_pins(["pp=1", "recompute=full", "mb=2"]), sequence_ways=1)


def test_a_sequence_over_four_ranks_is_tensor_four_with_sequence_parallelism() -> None:
    space = Space(chain(), cluster(1, 4), job(), read_pins(["sequence=4"]))

    assert {(family.tensor, family.sequence) for family in space.families()} == {(4, True)}


def test_a_space_that_counts_nothing_has_the_same_families() -> None:
    counting, quick = (Space(chain(), cluster(2, 4), job(), Pins(), counted=counted) for counted in (True, False))

    assert list(quick.families()) == list(counting.families())
    assert sum(counting.rejected.values()) > 0
    assert not quick.rejected


def test_a_largest_value_leaves_out_what_lies_above() -> None:
    space = Space(chain(), cluster(1, 8), job(), read_pins(most=["tensor=2", "micro-batch=2"]))

    families = list(space.families())

    assert {family.tensor for family in families} == {1, 2}
    assert {family.micro_batch for family in families} == {1, 2}


def test_gpipe_is_worth_a_try_where_1f1b_is_forbidden() -> None:
    def schedules(forbidden: list[str]) -> set[str]:
        space = Space(chain(), cluster(1, 2), job(), read_pins(forbid=forbidden))
        return {family.schedule for family in space.families() if family.num_microbatches >= family.pipeline > 1}

    assert schedules([]) == {"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"}
    assert schedules(["1f1b"]) == {"gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"}


PARTS: dict[str, Iterable[Pins]] = {
    "tensor": [Pins(tensor=n) for n in (1, 2, 4, 8)],
    "pipeline": [Pins(pipeline=n) for n in (1, 2, 4, 8)],
    "micro-batch": [Pins(micro_batch=n) for n in range(1, BATCH + 1)],
    "data_shard": [Pins(data_shard=n) for n in (1, 2, 4, 8)],
    "sequence beside tensor": [Pins(tensor=n, sequence=s) for n in (2, 4, 8) for s in (False, True)] + [Pins(tensor=1)],
    "ways of the sequence": [Pins(sequence_ways=n) for n in (1, 2, 4, 8)],
    "below and above": [
        Pins(most=(("tensor", 2),)),
        Pins(tensor=4),
        Pins(tensor=8),
    ],
    "schedules": [
        Pins(without=("interleaved", "zb-h1", "zb-h2", "zb-v")),
        *(Pins(schedule=s) for s in ("interleaved", "zb-h1", "zb-h2", "zb-v")),
    ],
}


@pytest.mark.parametrize("name", PARTS)
def test_pins_cut_the_space_into_parts_that_add_up(name: str) -> None:
    whole = sum(num_shapes(Pins()))

    parts = [sum(num_shapes(pins)) for pins in PARTS[name]]

    assert sum(parts) == whole


@pytest.mark.parametrize("name", ["tensor", "pipeline", "micro-batch", "sequence beside tensor"])
def test_what_a_rule_rejects_is_rejected_in_a_part_too(name: str) -> None:
    whole = num_shapes(Pins())[1]

    parts = [num_shapes(pins)[1] for pins in PARTS[name]]

    assert sum(parts) == whole


@pytest.mark.parametrize(
    ("pins", "named", "not_named"),
    [
        (Pins(tensor=8, micro_batch=1), ["tensor=8", "does not divide 4"], ["micro_batch"]),
        (Pins(tensor=4, data_shard=4, recompute="full"), ["tensor=4", "data_shard=4"], ["recompute"]),
        (Pins(tensor=3), ["tensor=3: 3 does not divide 8 GPUs, as 2 or 4 would"], []),
        (Pins(tensor=4, data_shard=4), ["4 x 4 does not divide 8 GPUs, as 8 would"], []),
        (Pins(micro_batch=5, pipeline=2), ["micro_batch=5", "global batch of 24, as 4 or 6 would"], ["pipeline=2"]),
        (Pins(sequence_ways=3), ["sequence=3", "or by context parallelism"], []),
        (Pins(context=2), ["context=2", "no attention over a sequence"], []),
        (Pins(expert=2, pipeline=2), ["expert=2", "no banks of experts"], ["pipeline=2"]),
        (Pins(tensor=4, most=(("tensor", 2),)), ["tensor=4", "tensor at most 2"], []),
    ],
)
def test_pins_without_a_legal_shape_are_named_and_no_others(pins: Pins, named: list[str], not_named: list[str]) -> None:
    found = blamed(chain(), cluster(1, 8), job(), pins)

    assert found is not None
    sentence = f"{' and '.join(found.pins)}: {found.rule}"
    assert all(words in sentence for words in named)
    assert not any(words in sentence for words in not_named)


def test_pins_are_not_blamed_for_what_is_illegal_without_them() -> None:
    no_split = TrainingSpec(global_batch=1, seq_len=64)
    model = profile([layer_class("block", 1e11, 1000, 1e6, 1e6)], [0])

    assert not is_legal(model, cluster(1, 8), no_split, Pins())
    assert blamed(model, cluster(1, 8), no_split, Pins(micro_batch=1)) is None


def test_of_rules_that_differ_in_a_number_only_one_is_told() -> None:
    with pytest.raises(ValueError, match="no layout of 3,600 GPUs is legal") as caught:
        search(chain(), cluster(450, 8), job())

    told = str(caught.value)
    assert told.count("has more stages than the model can be cut into") == 1
    assert re.search(r"pipeline=\d+ has more stages than the model can be cut into \(\d+\) \(and \d+ like it\);", told)


def test_a_search_under_hopeless_pins_says_which() -> None:
    with pytest.raises(ValueError, match="data_shard=4 and tensor=4"):
        search(chain(), cluster(1, 8), job(), pins=Pins(tensor=4, data_shard=4))


# Why, and why not


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Estimate]:
    result = search(chain(), cluster(1, 8), job())
    return result.plan, result.estimate


def test_every_item_of_a_breakdown_has_a_name() -> None:
    plan = some_plan(shard=2, tensor=2, pipeline=2)
    found = estimate(plan, small_profile())

    assert set(found.breakdown) | {"context", "expert", "offload"} <= set(CAUSES)


@pytest.mark.parametrize("cause", ["context", "expert", "offload"])
def test_a_cause_that_only_one_of_two_has_is_named(planned: tuple[Plan, Estimate], cause: str) -> None:
    _, best = planned
    other = best.model_copy(
        update={"step_time_s": 1.5 * best.step_time_s, "breakdown": best.breakdown | {cause: 0.5 * best.step_time_s}}
    )

    assert CAUSES[cause] in str(compared(other, best))


@pytest.mark.parametrize("kind", ["selective", "attention", "full", "parts:attention+norm2"])
def test_every_kind_of_recompute_is_a_reason(kind: str) -> None:
    plan = some_plan(shard=2)
    layers = tuple(layer.model_copy(update={"recompute": kind}) for layer in plan.stages[0].layers[:3])
    stage = plan.stages[0].model_copy(update={"layers": layers + plan.stages[0].layers[3:]})
    partly = plan.model_copy(update={"stages": (stage,)})

    words = reason(partly, estimate(plan, small_profile()))

    assert "2 of 8 layers" in words, "blocks only: people do not count the embedding, which is the third"
    assert ("recompute their attention + norm2" in words) == kind.startswith("parts:")


def answer(text: str, model: ModelProfile, on: ClusterSpec, plan: Plan, found: Estimate):  # type: ignore[no-untyped-def]
    pins = pins_of(parse_setup(text, on.num_devices, on.devices_per_host))
    return why_not(Explorer(model, on, job()), text, (pins,), plan, found)


def test_an_illegal_set_up_is_answered_by_its_rule(planned: tuple[Plan, Estimate]) -> None:
    found = answer("tp=8", chain(), cluster(1, 8), *planned)

    assert found.kind == "illegal"
    assert found.sentence.startswith("tp=8 is not legal: tensor=8 does not divide 4")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("hsdp:4", "global batch 12 is no multiple of 8 data ranks"),
        ("mb=3", "global batch 12 is no multiple of 8 data ranks"),
        ("mb=5", "micro-batches of 5 do not divide the global batch of 12, as 4 or 6 would"),
        ("tp=4 mb=4", "micro-batches of 4 do not divide the 6 samples of a data rank, as 3 or 6 would"),
        ("pp=4 v=2", "4 pipeline ranks of 2 stages each are 8 stages, and the model can be cut into 4"),
        ("pp=2 schedule=zb-h1 recompute=full", "zero-bubble schedules run without recompute"),
    ],
)
def test_a_set_up_is_told_the_same_rule_by_all_that_refuse_it(text: str, rule: str) -> None:
    """The rule that excludes the layout which was asked for, not one of those nearby that have as few of its words."""
    model, on, training = chain(), cluster(1, 8), job(12)
    setup = parse_setup(text, on.num_devices, on.devices_per_host)

    answered = why_not_setup(Explorer(model, on, training), setup, Mock(), Mock())

    assert answered.sentence == f"{text} is not legal: {rule}"
    assert price_setup(setup, model, on, training).verdict.detail == rule
    with pytest.raises(ValueError, match=f"^--setup '{text}': {re.escape(rule)}$"):
        mw.plan(model, cluster=on, global_batch=12, setup=text)


def test_a_frameworks_usual_set_up_is_the_same_plan_wherever_it_is_asked_for() -> None:
    """ZeRO-1 fits with all samples at once, as gradients are then reduced layer by layer; with more micro-batches they
    stay whole until the last."""
    large, small = (layer_class(name, 1e11, n * 10_000_000, saved=1e6, inputs=1e6) for name, n in (("a", 6), ("b", 1)))
    model, on = profile([large, small], [0, 1, 1, 1, 1, 1]), cluster(4, 1, device(memory=0.9e9))
    explorer = Explorer(model, on, job())
    rule = next(rule for rule in named_rules(on, model) if rule.name == "megatron")
    beside = followed(explorer, rule, math.inf)

    asked = mw.plan(model, cluster=on, global_batch=BATCH, memory_margin=0.0, setup="megatron").document

    assert beside.plan is not None
    assert asked.degrees == beside.plan.degrees
    closest = closest_plan(explorer, rule.attempts[0])
    assert closest is not None
    assert closest.over_bytes <= 0
    assert closest.plan.num_microbatches == 1


@pytest.mark.parametrize(
    ("target", "pins", "told"),
    [
        ("megatron", Pins(schedule="gpipe"), "schedule=gpipe is none of Megatron-LM's: it takes 1f1b, interleaved"),
        ("megatron", Pins(pipeline=2, reshard=True), "data_shard: Megatron-LM takes zero=1 beside a pipeline"),
        ("accelerate", Pins(schedule="interleaved"), "pipeline: Accelerate has stages in code, not in its settings"),
        ("torchtitan", Pins(context_kind="ring", context=2), "context_kind=ring is none of torchtitan's"),
        ("deepspeed", Pins(context=2), "context: DeepSpeed has no context parallelism in its settings"),
        ("deepspeed", Pins(tensor=2, reshard=True), "tensor: DeepSpeed's AutoTP goes with ZeRO up to 2"),
        ("deepspeed", Pins(sequence_ways=2), "sequence: DeepSpeed has no sequence parallelism beside its AutoTP"),
        ("deepspeed", Pins(data_replicate=2, data_shard=4), "data_replicate: ZeRO of DeepSpeed shards over all"),
    ],
)
def test_what_a_framework_does_not_run_is_told_of_what_was_pinned(target: str, pins: Pins, told: str) -> None:
    chosen = replace(pins, framework=framework_of(target))
    model = PROFILE.model_copy(update={"attention_modules": ("model.layers.0.self_attn",)})

    found = blamed(model, cluster(1, 8), job(), chosen)

    assert found is not None
    assert found.rule.startswith(told)


@pytest.mark.parametrize(
    ("kind", "units", "parts", "words"),
    [
        ("attention", (32, 8), {}, "tensor=16 does not divide 8 key-value heads"),
        ("attention", (12,), {}, "tensor=16 does not divide 12 heads"),
        ("attention", (16,), {"qkv": (24, 24, 24)}, "tensor=16 does not divide 24 features"),
        ("mlp", (64, 8), {}, "tensor=16 does not divide 8 groups"),
        ("mlp", (100,), {}, "tensor=16 does not divide 100 features"),
    ],
)
def test_a_rule_says_what_a_degree_does_not_divide(
    kind: str, units: tuple[int, ...], parts: dict[str, tuple[int, ...]], words: str
) -> None:
    block = layer_class("block", 1e11, 10_000_000, saved=2e8, inputs=1e7, transient=1e7, heads=4)
    cut = block.cuts[0].model_copy(update={"kind": kind, "units": units, "parts": parts})

    rule = tensor_rule(profile([block.model_copy(update={"cuts": (cut,)})], [0]), 16)

    assert (rule or "").startswith(words)


def test_a_slower_set_up_is_answered_by_where_the_time_goes(planned: tuple[Plan, Estimate]) -> None:
    plan, best = planned
    found = answer("tp=4 pp=2", chain(), cluster(1, 8), plan, best)

    assert found.kind == "slower"
    assert found.estimate is not None
    apart = causes_apart(found.estimate, best)
    assert sum(apart.values()) == pytest.approx(found.estimate.step_time_s - best.step_time_s, rel=1e-6)
    assert CAUSES[next(iter(apart))] in found.sentence


def test_the_plan_itself_is_recognised(planned: tuple[Plan, Estimate]) -> None:
    plan, best = planned
    shape = shape_of(plan)
    text = f"tp={shape.tensor} pp={shape.pipeline} fsdp={shape.data_shard} mb={shape.micro_batch}"
    own = Pins(tensor=shape.tensor, pipeline=shape.pipeline, data_shard=shape.data_shard, micro_batch=shape.micro_batch)

    found = why_not(Explorer(chain(), plan.cluster, job()), text, (own,), plan, best)

    assert found.kind == "the plan"


def test_a_set_up_over_memory_is_answered_by_how_much_and_where() -> None:
    model, on, result = short_of_memory(2.5e9)

    found = answer("ddp", model, on, result.plan, result.estimate)

    closest = closest_plan(Explorer(model, on, job()), pins_of(parse_setup("ddp", 8, 8)))
    assert closest is not None
    assert closest.over_bytes > 0
    assert found.kind == "does not fit"
    assert f"{closest.over_bytes / 2**30:.2f} GiB" in found.sentence
    assert "every GPU" in found.sentence


def test_data_ranks_that_nothing_is_said_of_are_replicas_and_shards_of_them_are_priced() -> None:
    model, on = chain(parameters=100_000_000), cluster(1, 8, device(memory=2.2e9))
    result = search(model, on, job())
    explorer = Explorer(model, on, job())

    silent, said = (
        why_not_setup(explorer, parse_setup(text, 8, 8), result.plan, result.estimate) for text in ("tp=2", "tp=2 ddp")
    )

    assert silent.kind == said.kind == "does not fit"
    assert "Nothing is said of the 4 data ranks, so they are replicas. With shards instead, tp=2 fsdp (" in (
        silent.sentence
    )
    assert "replicas" not in said.sentence


@pytest.mark.parametrize(("setup", "where"), [("pp=2", "stage 0"), ("pp=2 v=2", "pipeline rank 0")])
def test_the_stage_that_is_over_memory_is_named_with_what_it_holds(setup: str, where: str) -> None:
    model, on, result = short_of_memory(3e9, layers=8)

    found = answer(setup, model, on, result.plan, result.estimate)
    alone = closest_plan(Explorer(model, on, job()), read_pins(setup.split()))

    assert f"{where} (of 0 to 1) is over by" in found.sentence
    assert "optimizer" in found.sentence
    assert alone is not None
    assert does_not_fit(alone.plan, alone.estimate).detail.startswith(f"{where} needs ")


def test_the_leanest_zero_bubble_plan_recomputes_nothing_as_it_must() -> None:
    explorer = Explorer(chain(), cluster(1, 2), job())

    closest = closest_plan(explorer, Pins(pipeline=2, schedule="zb-h1"))

    assert closest is not None
    assert {layer.recompute for layer in closest.plan.layers} == {"none"}


def test_of_a_framework_s_attempts_the_first_that_fits_is_meant() -> None:
    model, on = chain(), cluster(1, 8)
    result = search(model, on, job())
    attempts = (Pins(tensor=8), Pins(tensor=2, pipeline=1))

    found = why_not(Explorer(model, on, job()), "ours", attempts, result.plan, result.estimate)

    assert found.plan is not None
    assert found.plan.degrees.tensor == 2


# The questions


def walked(model: ModelProfile, on: ClusterSpec, result: SearchResult | None = None) -> tuple[Plan, dict[str, Step]]:
    result = result or search(model, on, job())
    return result.plan, {step.question.asks: step for step in walk(result.plan, result.estimate, model)}


def test_a_small_model_is_told_to_replicate_and_the_walk_ends_there() -> None:
    plan, steps = walked(chain(), cluster(1, 8))

    first = steps[ONE_GPU.asks]
    assert first.yes
    assert first.agrees == (plan.degrees.data_replicate == 8)
    assert SHARDED.asks not in steps


@pytest.mark.slow
def test_a_large_model_is_asked_for_shards_and_tensor_parallelism() -> None:
    _, steps = walked(*short_of_memory(2.5e9, heads=8))

    assert not steps[ONE_GPU.asks].yes
    assert "may use 2.33 GiB" in steps[ONE_GPU.asks].numbers
    assert steps[SHARDED.asks].yes
    assert steps[IN_THE_NODE.asks].yes


def test_a_model_that_fits_is_not_asked_to_recompute() -> None:
    model, on = chain(), cluster(1, 2)
    split = search(model, on, job(), pins=Pins(pipeline=2))

    asked = [step.question for step in walk(split.plan, split.estimate, model)]

    assert ONE_GPU in asked
    assert FEWER_SPLITS not in asked


def test_context_ranks_make_no_model_fit_on_one_gpu() -> None:
    """They share the sharding of parameters, so a plan with them would have each GPU hold a part."""
    model = chain(parameters=100_000_000, heads=8).model_copy(update={"attention_modules": ("c0",)})
    on = cluster(1, 8, device(memory=2.5e9))

    _, steps = walked(model, on)

    assert context_rule(model, 8, 1, "ring") is None
    assert not steps[ONE_GPU.asks].yes


def test_advice_that_the_plan_does_not_follow_is_priced() -> None:
    _, steps = walked(*short_of_memory(2.5e9, heads=8))

    verdicts = [step for step in steps.values() if step.agrees is False]
    assert verdicts
    assert all("following it" in step.verdict and "against" in step.verdict for step in verdicts)


def test_sequences_are_long_from_what_people_call_long() -> None:
    def asked(seq_len: int) -> Step:
        model = chain().model_copy(update={"seq_len": seq_len})
        on, training = cluster(1, 4), TrainingSpec(global_batch=8, seq_len=seq_len)
        result = search(model, on, training)
        return next(s for s in walk(result.plan, result.estimate, model) if s.question == LONG)

    assert not asked(LONG_SEQUENCE - 64).yes
    assert asked(LONG_SEQUENCE).yes


def test_what_is_no_candidate_is_said_in_the_model_s_numbers() -> None:
    names = [each.name for each in no_candidates(4 * 2**30, 8)]
    server = no_candidates(4 * 2**30, 8)[1]

    assert names == ["nn.DataParallel", "parameter server", "asynchronous pipeline"]
    assert "64.0 GiB in all" in server.reason


# What if


def points_of(counts: tuple[int, ...], memory: float = 80e9) -> tuple[Point, ...]:
    model = chain(parameters=100_000_000, heads=8)
    return sweep([(model, cluster(1, count, device(memory=memory)), job()) for count in counts], Pins())


@cache
def point_of_four_gpus() -> Point:
    (point,) = points_of((4,))
    return point


def test_a_point_costs_its_gpus_hours_by_its_tokens() -> None:
    point = point_of_four_gpus()

    assert point.result is not None
    hours = point.result.estimate.step_time_s / 3600
    tokens = BATCH * 64
    assert point.cost_per_million(2.5) == pytest.approx(4 * 2.5 * hours / tokens * 1e6)


def test_where_nothing_fits_the_point_says_why_and_the_kind_changes() -> None:
    points = points_of((1, 8), memory=2.5e9)

    assert points[0].result is None
    assert "is over by" in points[0].why
    (sentence,) = changes_of_kind(points)
    assert "changes once: nothing fits at 1" in sentence


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InfeasibleError("it fits on no layout"), "nothing fits"),
        (InfeasibleError("no layout was found", shown=False), "nothing found"),
        (SolverError("no plan found within 0 s"), "nothing found"),
        (ValueError("no layout of 3 GPUs is legal"), "nothing legal"),
    ],
)
def test_a_point_without_a_plan_is_not_said_not_to_fit_where_that_is_not_known(
    error: Exception, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.planner.answers.sweep.search", Mock(side_effect=error))

    (point,) = points_of((4,))

    assert (point.kind, point.why) == (kind, str(error))
    assert sweep_rows([point], None)[1][0][-1] == kind


def test_a_kind_of_plan_has_no_degrees() -> None:
    plan = some_plan(replicate=2, shard=2, tensor=2, pipeline=2)

    assert kind_in_words(plan) == "HSDP + TP + PP"


@pytest.mark.slow
def test_more_of_a_resource_never_makes_the_step_longer_and_twice_the_compute_less_than_halves_it() -> None:
    (point,) = points_of((4,), memory=4e9)

    prices = {price.name: price.share for price in marginal_prices(point, Pins())}

    assert all(share <= 1e-9 for share in prices.values())
    assert -0.5 <= prices["2x compute"] < -0.05
    assert "2x network bandwidth" not in prices


def test_what_the_choice_gives_away_for_simplicity_is_no_worth_of_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    point = point_of_four_gpus()
    assert point.result is not None
    fastest_s = 0.99 * point.result.estimate.step_time_s
    certificate = point.result.certificate.model_copy(update={"fastest_s": fastest_s})
    found = (None, SimpleNamespace(step_time_s=fastest_s))
    monkeypatch.setattr(
        "meshwright.planner.answers.sweep.best_of", lambda *given: found if fastest_s < given[-1] else None
    )

    prices = marginal_prices(replace(point, result=replace(point.result, certificate=certificate)), Pins())

    assert {price.name: price.share for price in prices}["1 GiB more per GPU"] == 0.0


def test_a_choice_is_robust_or_says_what_overtakes_it() -> None:
    point = point_of_four_gpus()

    assert robustness(point).startswith(("robust: ", "not the best everywhere within +-20%: with "))


@pytest.mark.parametrize("memory", slow.but_first([80e9, 1.7e9, 0.9e9, 2.5e9, 3.2e9], 1))
def test_the_fewest_gpus_are_those_of_trying_all(memory: float) -> None:
    model, on = chain(parameters=100_000_000, heads=8), cluster(2, 4, device(memory=memory))
    training = job()

    chosen = cluster_for(Objective.MIN_GPUS, model, on, training, Pins())[0].num_devices

    fitting = [
        count
        for count in (1, 2, 3, 4, 6, 8)
        if best_of(Explorer(model, grown(on, count), training), Pins(), math.inf) is not None
    ]
    assert chosen == min(fitting, default=8)


def test_a_token_costs_least_where_gpus_times_step_is_least() -> None:
    model, on, training = chain(parameters=100_000_000, heads=8), cluster(1, 8), job()

    chosen = cluster_for(Objective.COST, model, on, training, Pins())[0].num_devices

    cost = {}
    for count in (1, 2, 4, 8):
        found = best_of(Explorer(model, grown(on, count), training), Pins(), math.inf)
        assert found is not None
        cost[count] = count * found[1].step_time_s
    assert cost[chosen] == min(cost.values())


# The commands


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_profile(tmp_path_factory.mktemp("explain"))


def some_saved(model: Path, folder: Path) -> tuple[str, ...]:
    """Words that name a saved plan for 8 GPUs, and its model."""
    some_plan(shard=8).save(folder / "plan.json")
    return str(folder / "plan.json"), "--model", str(model)


def test_explain_answers_for_a_saved_plan_and_for_a_model_alike(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    run_plan(str(model), "--gpus", "8", "-b", "64", "-o", str(plan), "-q")
    capsys.readouterr()
    said = []
    for source in ([str(plan), "--model", str(model)], [str(model), "--gpus", "8", "-b", "64"]):
        assert run_plan("explain", *source, "--why-not", "tp=8", "--why-not", "megatron", "--json") == 0
        said.append(json.loads(capsys.readouterr().out))

    assert said[0]["why_not"] == said[1]["why_not"]
    assert [each["asked"] for each in said[0]["why_not"]] == ["tp=8", "megatron"]
    assert said[0]["questions"] == []


def test_explain_prints_the_questions_and_what_is_no_candidate(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("explain", str(model), "--gpus", "8", "-b", "64") == 0

    shown = capsys.readouterr().out
    assert "Does it fit on one GPU?" in shown
    assert "nn.DataParallel" in shown
    assert "Excluded by rule" in shown


def test_explain_names_the_flag_of_a_wrong_word(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan("explain", *some_saved(model, tmp_path), "--why-not", "tp=x") == 2

    assert "--why-not 'tp=x'" in capsys.readouterr().err


def test_a_layout_of_other_gpus_is_illegal_and_the_next_is_answered(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--why-not", "tp=3", "--why-not", "pp=2 v=3 schedule=zb-h1", "--why-not", "ddp")
    assert run_plan("explain", *some_saved(model, tmp_path), *asked, "--json") == 0

    first, _, last = json.loads(capsys.readouterr().out)["why_not"]
    assert (first["kind"], first["sentence"]) == (
        "illegal",
        "tp=3 is not legal: tensor = 3 does not divide 8 GPUs, as 2 or 4 would",
    )
    assert last["step_time_s"] > 0


@pytest.mark.parametrize("suffix", slow.but_first(["html", "png", "json"], 1))
def test_a_sweep_writes_what_its_file_is_called(model: Path, tmp_path: Path, suffix: str) -> None:
    if suffix == "png":
        pytest.importorskip("matplotlib")
    target = tmp_path / f"sweep.{suffix}"

    assert run_plan("sweep", str(model), "--gpus", "2,8", "-b", "16", "-o", str(target), "--price-per-hour", "2") == 0

    content = target.read_bytes()
    if suffix == "json":
        points = json.loads(content)["points"]
        assert [point["gpus"] for point in points] == [2, 8]
        assert all(point["dollars_per_million"] > 0 for point in points)
    else:
        assert content.startswith(b"\x89PNG" if suffix == "png" else b"<!doctype html>")


@pytest.mark.slow
def test_a_batch_that_grows_with_the_gpus_is_said_to_change_convergence(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_plan("sweep", str(model), "--gpus", "2,4", "-b", "16,32")
    scaled = " ".join(capsys.readouterr().out.split())
    run_plan("sweep", str(model), "--gpus", "2,4", "-b", "16")
    fixed = " ".join(capsys.readouterr().out.split())

    assert "changes convergence" in scaled
    assert "changes convergence" not in fixed


def test_prices_are_printed_where_they_are_asked_for(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_plan("sweep", str(model), "--gpus", "2", "-b", "16", "--prices", "--json")

    (worth,) = json.loads(capsys.readouterr().out)["worth"]
    assert {"2x compute", "1 GiB more per GPU"} <= {price["name"] for price in worth["prices"]}
    assert worth["robustness"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpus", "2,x"), "--gpus x"),
        (("--gpus", "2,4", "-b", "1,2,3"), "3 numbers"),
        (("--gpus", "2", "-o", "sweep.txt"), "ends in .png, .html or .json"),
    ],
)
def test_a_wrong_sweep_is_refused_in_a_sentence(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert run_plan("sweep", str(model), *arguments) == 2

    assert sentence in capsys.readouterr().err


def test_an_objective_may_leave_gpus_unused_and_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    assert run_plan(str(model), "--gpus", "8", "-b", "16", "--objective", "min-gpus", "-o", str(target)) == 0

    assert "1 of 8 GPUs" in capsys.readouterr().out
    assert json.loads(target.read_text())["cluster"]["hosts"][0]["devices_per_host"] == 1


def test_the_short_flags_of_plan_reach_the_plan(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    flags = ("--max", "tensor=2", "--forbid", "pipeline", "--micro-batch", "2", "--recompute", "full")

    assert run_plan(str(model), "--gpus", "8", "-b", "16", *flags, "-o", str(target), "-q") == 0

    plan = json.loads(target.read_text())
    assert plan["degrees"]["tensor"] <= 2
    assert (plan["degrees"]["pipeline"], plan["micro_batch"]) == (1, 2)
    assert {layer["recompute"] for layer in plan["stages"][0]["layers"]} == {"full"}


def test_another_plan_is_answered_as_it_stands(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    for target, pins in ((plan, ("fsdp=8",)), (other, ("tensor=8", "recompute=full"))):
        flags = [word for pin in pins for word in ("--pin", pin)]
        assert run_plan(str(model), "--gpus", "8", *flags, "-o", str(target), "-q") == 0
    capsys.readouterr()

    assert run_plan("explain", str(plan), "--model", str(model), "--why-not", str(other), "--json") == 0

    (answer,) = json.loads(capsys.readouterr().out)["why_not"]
    assert answer["kind"] == "slower"
    assert "TP 8" in answer["sentence"]
    assert answer["step_time_s"] == pytest.approx(json.loads(other.read_text())["prediction"]["step_time_s"])


def test_another_plan_over_memory_is_told_its_stage() -> None:
    model, on, result = short_of_memory(2.5e9)
    roomy = search(model, cluster(1, 8), job(), pins=Pins(data_shard=1, tensor=1, pipeline=1)).plan

    found = why_not_plan(Explorer(model, on, job()), "other.json", roomy, result.plan, result.estimate)

    assert found.kind == "does not fit"
    assert "as it stands every GPU is over by" in found.sentence


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (some_plan(shard=4, micro_batches=8), "is for 4 GPUs, the plan for 8"),
        (some_plan(shard=8, micro_batches=5), "takes 40 samples a step"),
    ],
)
def test_plans_that_do_not_compare_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: Plan, sentence: str
) -> None:
    other.save(tmp_path / "other.json")

    assert run_plan("explain", *some_saved(model, tmp_path), "--why-not", str(tmp_path / "other.json")) == 2

    assert sentence in " ".join(capsys.readouterr().err.split())


def test_the_tutorials_splits_are_plans_with_a_price() -> None:
    model, on = chain(), cluster(1, 2)
    result = search(model, on, job())

    halves, back = lessons(result.plan, result.estimate, model)

    assert halves.name == "layer0 and layer1 on GPU 0, layer2 and layer3 on GPU 1"
    assert back.name == "layer0 on GPU 0, layer1 and layer2 on GPU 1, layer3 back on GPU 0"
    assert placement(back.plan, 0).layers == ("layer0", "layer3")
    assert placement(back.plan, 1).layers == ("layer1", "layer2")
    for lesson in (halves, back):
        assert lesson.plan.num_microbatches == 1
        assert lesson.estimate == estimate(lesson.plan, model)
        assert check(lesson.plan, model) == []
        assert format_seconds(lesson.estimate.step_time_s) in lesson.sentence


def test_tutorials_draw_two_gpus() -> None:
    result = search(chain(), cluster(1, 4), job())

    assert lessons(result.plan, result.estimate, chain()) == ()


@pytest.mark.slow
def test_a_cluster_file_is_swept_by_its_hosts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[network]\nbandwidth = "40 GB/s"\nlatency = "20 us"\n[[hosts]]\ncount = 3\ndevice = "h100-80gb"\ngpus = 4\n'
    )

    assert run_plan("sweep", str(model), "--cluster", str(file), "-b", "48", "--json") == 0

    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["gpus"] for point in points] == [4, 8, 12]


@pytest.mark.parametrize(
    ("gpus", "hosts", "sentence"),
    [
        ("24", "count = 2", "has 8 devices: ask for no more"),
        ("6", "count = 2", "give a multiple of that"),
        ("4", 'count = 1\ndevice = "h100-80gb"\ngpus = 4\n[[hosts]]\ncount = 2', "differ"),
    ],
)
def test_a_part_that_a_cluster_file_does_not_have_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: str, hosts: str, sentence: str
) -> None:
    file = tmp_path / "cluster.toml"
    device_of = "a100-80gb" if "[[hosts]]" in hosts else "h100-80gb"
    network = '[network]\nbandwidth = "40 GB/s"\nlatency = "20 us"\n'
    file.write_text(f'{network}[[hosts]]\n{hosts}\ndevice = "{device_of}"\ngpus = 4\n')

    assert run_plan("sweep", str(model), "--cluster", str(file), "--gpus", gpus) == 2

    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_scaled_batch_grows_with_the_gpus(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("sweep", str(model), "--gpus", "2,4", "-b", "16", "--scale-batch", "--json") == 0

    said = json.loads(capsys.readouterr().out)
    assert [point["global_batch"] for point in said["points"]] == [16, 32]
    assert any("changes convergence" in note for note in said["notes"])


def test_a_batch_that_does_not_scale_to_whole_samples_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan("sweep", str(model), "--gpus", "2,3", "-b", "5", "--scale-batch") == 2

    assert "5 samples on 2 GPUs are 7.5 on 3" in " ".join(capsys.readouterr().err.split())


def test_what_people_call_ddp_splits_neither_sequences_nor_experts() -> None:
    rules = rules_of_thumb(cluster(2, 8), TrainingSpec(global_batch=64))

    assert {(pins.context, pins.expert) for rule in rules for pins in rule.attempts} == {(1, 1)}


def test_a_weight_that_keeps_a_model_on_one_stage_is_named() -> None:
    block = layer_class("block", 1e11, 1000, 1e6, 1e6)
    layers = chain().layers[:4]
    shared = [
        layer.model_copy(update={"layer_class": 0, "parameters": (f"{i % 3}.weight",), "root": f"{i % 3}"})
        for i, layer in enumerate(layers)
    ]
    model = profile([block], [0, 0, 0, 0]).model_copy(update={"layers": tuple(shared)})

    with pytest.raises(ValueError, match=rf"\(1\): 0.weight is read by {layers[0].name} and by {layers[3].name}, so"):
        search(model, cluster(1, 8), job(), pins=Pins(pipeline=2))
