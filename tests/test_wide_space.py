"""Context and expert parallelism as dimensions of the space: counted exactly, bounded truly, and solved to the optimum
of brute force."""

import itertools
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from meshwright.executor.reporting.report import splits_in_words
from meshwright.planner.answers.check import check
from meshwright.planner.answers.decision_path import walk
from meshwright.planner.answers.guidance import LONG, LONG_SEQUENCE
from meshwright.planner.answers.search import pins_of, search
from meshwright.planner.answers.why_not import why_not
from meshwright.planner.cost.estimate import Estimate, estimate, memory_by
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import AXES, Axis, ContextKind, Plan
from meshwright.planner.plan.legality import context_rule, divisors, expert_rule, sequence_rule, tensor_rule
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.not_run import not_run
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import ZERO_BUBBLE, is_chunked
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.space import Space
from meshwright.profiler.machine.cluster import ClusterSpec, Link
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.enumeration import plans_of
from support.synthetic import (
    SEQ_LEN,
    cluster,
    device,
    layer_class,
    profile,
    random_class,
    with_attention,
    with_experts,
)

KINDS: tuple[ContextKind, ...] = ("ring", "all_to_all", "all_gather")
EVERYTHING = Pins(everything=True)


def wide_instance(seed: int) -> tuple[ModelProfile, ClusterSpec, TrainingSpec]:
    """Two or three layers with attention, experts or neither, on 2 to 8 devices over one or two hosts, memory from
    ample to hopeless."""
    rng = random.Random(seed)
    classes = []
    for i in range(rng.randint(1, 2)):
        made = random_class(rng, f"c{i}", [None, 4])
        if i == 0 or rng.random() < 0.5:
            made = with_attention(made, heads=4, flops=rng.uniform(1e9, 1e11))
        if rng.random() < 0.5:
            made = with_experts(made, rng.choice([2, 4, 6]))
        classes.append(made)
    order = [0, *(rng.randrange(len(classes)) for _ in range(rng.randint(1, 2)))]
    hosts, per_host = rng.choice([(1, 2), (2, 1), (1, 4), (2, 2), (1, 3), (2, 3)])
    on = device(memory=rng.choice([0.3e9, 0.6e9, 1e9, 2e9, 4e9]))
    network = Link(bandwidth=rng.choice([1e9, 50e9]), latency=1e-5)
    training = TrainingSpec(global_batch=rng.choice([1, 2, 4, 6]), seq_len=SEQ_LEN, memory_margin=0.0)
    model = profile(classes, order, rng.uniform(1e5, 5e7))
    return (
        model.model_copy(update={"attention_modules": ("attention",)}),
        cluster(hosts, per_host, on, network),
        training,
    )


def shapes_of(space: Space) -> list[Shape]:
    """All shapes of a space, family by family."""
    return [shape for family in list(space.families()) for shape in space.shapes(family)]


def by_hand(model: ModelProfile, on: ClusterSpec, training: TrainingSpec) -> tuple[int, int]:
    """(legal, all) shapes of everything, enumerated one by one; on one host, where axes have one order, for a model
    that may be sharded and cut after every layer, with fewer than 8 stages of a rank."""
    legal = total = 0
    num_devices, most = on.num_devices, len(model.layers)
    for tensor, context, pipeline, shard in itertools.product(divisors(num_devices), repeat=4):
        if num_devices % (tensor * context * pipeline * shard):
            continue
        data = num_devices // (tensor * context * pipeline)
        share = max(1, training.global_batch // data)
        chunks = range(2, max(1, most // pipeline) + 1)
        schedules = [("none", 1)] if pipeline == 1 else [(s, 1) for s in ("1f1b", "gpipe", "zb-h1", "zb-h2")]
        if pipeline > 1:
            schedules += [("interleaved", v) for v in chunks] + [("zb-v", 2)] * (2 in chunks)
        for sequence, kind in itertools.product((False, True)[: 1 + (tensor > 1)], KINDS if context > 1 else KINDS[:1]):
            experts = divisors(shard * context * (tensor if sequence else 1))
            for expert, micro_batch, (schedule, _) in itertools.product(
                experts if any(c.experts for c in model.classes) else [1], divisors(share), schedules
            ):
                count = share // micro_batch
                choices = (1 + (count > 1)) * (1 + (pipeline > 1)) if shard * context > 1 else 1
                total += choices
                rules = (
                    tensor_rule(model, tensor),
                    context_rule(model, context, tensor, kind),
                    expert_rule(model, expert),
                    sequence_rule(model, tensor, context) if sequence else None,
                )
                broken = (
                    any(rules)
                    or pipeline > most
                    or training.global_batch % data
                    or math.gcd(micro_batch, context) > 1
                    or (schedule == "gpipe" and count >= pipeline)
                    or (schedule == "1f1b" and count < pipeline)
                    or (schedule == "interleaved" and count % max(1, count // pipeline))
                )
                legal += 0 if broken else choices
    return legal, total


@pytest.mark.parametrize("seed", slow.but_first(range(12), 4))
def test_every_shape_is_counted_once(seed: int) -> None:
    model, on, training = wide_instance(seed)
    one_host = cluster(1, on.num_devices, on.device)
    space = Space(model, one_host, training, EVERYTHING)

    splits = list(space.splits())

    families = [family for split in splits for family in space.families_of(split)]
    shapes = [shape for family in families for shape in space.shapes(family)]
    legal, total = by_hand(model, one_host, training)
    assert len(shapes) == len(set(shapes)) == legal
    assert sum(map(space.num_shapes_of, splits)) == sum(map(space.num_shapes, families)) == legal
    assert legal + sum(space.rejected.values()) == total


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow.but_first(range(3), 1))
def test_every_place_of_context_and_expert_groups_is_tried_once(seed: int) -> None:
    model, on, training = wide_instance(seed)
    hosts = cluster(3, 4, on.device)
    space = Space(model, hosts, training.model_copy(update={"global_batch": 12}), EVERYTHING)

    def places(shape: Shape, order: tuple[Axis, ...]) -> tuple[object, ...]:
        placed = replace(shape, mesh_axes=order)
        groups = [hosts.group(shape.degree(axis), placed.stride(axis)) for axis in AXES if shape.degree(axis) > 1]
        sharded = hosts.group(shape.sharded_over, placed.shard_stride)
        return (*groups, sharded, hosts.group(shape.expert, placed.expert_stride) if shape.expert > 1 else None)

    found: dict[Shape, list[tuple[Axis, ...]]] = {}
    for shape in shapes_of(space):
        found.setdefault(replace(shape, mesh_axes=AXES), []).append(shape.mesh_axes)

    for shape, orders in found.items():
        legal = [
            order
            for order in itertools.permutations(AXES)
            if shape.context == 1 or order.index("context") == order.index("data_shard") + 1
        ]
        assert {places(shape, order) for order in orders} == {places(shape, order) for order in legal}
        assert len(orders) == len({places(shape, order) for order in orders})


@pytest.mark.parametrize("seed", slow.but_first(range(20), 2))
def test_data_ranks_with_smaller_micro_batches_are_never_slower_than_context_ranks_beside_them(seed: int) -> None:
    model, on, training = wide_instance(seed)
    training = training.model_copy(update={"global_batch": 8})
    shapes = shapes_of(Space(model, on, training, Pins(everything=True, context=2)))
    even = [shape for shape in shapes if shape.micro_batch % 2 == 0 and not is_chunked(shape.schedule)]
    for shape in random.Random(seed).sample(even, min(10, len(even))):
        fewer = {"micro_batch": shape.micro_batch // 2, "data_shard": 2 * shape.data_shard, "context": 1}
        instead = replace(shape, context_kind="ring", **fewer)
        plans = zip(*(plans_of(each, model, on, training) for each in (shape, instead)), strict=True)
        for with_context, without in itertools.islice(plans, 4):
            slow, fast = estimate(with_context, model), estimate(without, model)
            assert fast.step_time_s <= slow.step_time_s * (1 + 1e-9)
            for less, more in zip(fast.memory, slow.memory, strict=True):
                assert less.device_bytes <= more.device_bytes * (1 + 1e-9)


PARTS: dict[str, list[Pins]] = {
    "context": [Pins(everything=True, context=n) for n in (1, 2, 4)],
    "kind of context": [
        Pins(everything=True, context=1),
        *(Pins(everything=True, context=n, context_kind=kind) for n in (2, 4) for kind in KINDS),
    ],
    "below and above": [Pins(everything=True, most=(("context", 2),)), Pins(everything=True, context=4)],
    "expert": [Pins(everything=True, expert=n) for n in (1, 2, 4)],
    "ways of the sequence": [Pins(everything=True, sequence_ways=n) for n in (1, 2, 4)],
}


@pytest.mark.parametrize("name", PARTS)
def test_pins_that_leave_nothing_out_together_share_the_space(name: str) -> None:
    model, on, training = wide_instance(WITH_EXPERTS)
    hosts = cluster(2, 2, on.device)

    def size(pins: Pins) -> int:
        space = Space(model, hosts, training, pins)
        return sum(map(space.num_shapes_of, list(space.splits()))) + sum(space.rejected.values())

    assert sum(map(size, PARTS[name])) == size(EVERYTHING)


def test_context_ranks_of_all_kinds_and_experts_are_searched_unless_something_else_is_asked_for() -> None:
    model, on, training = wide_instance(WITH_EXPERTS)

    def found(**pins: object) -> set[tuple[int, ContextKind, int]]:
        space = Space(model, cluster(1, 4, on.device), training, Pins(**pins))  # type: ignore[arg-type]
        return {(split.context, split.context_kind, split.expert) for split in space.splits()}

    default = {kind for context, kind, _ in found() if context > 1}
    assert default == set(KINDS)
    assert any(expert > 1 for _, _, expert in found())
    assert {kind for context, kind, _ in found(everything=True) if context > 1} == set(KINDS)
    assert {context for context, _, _ in found(context=2)} == {2}
    assert {kind for context, kind, _ in found(context_kind="all_gather") if context > 1} == {"all_gather"}
    assert {expert for _, _, expert in found(expert=2)} == {2}


def test_a_model_with_neither_attention_nor_experts_has_the_space_it_had() -> None:
    model, on, training = wide_instance(WITH_EXPERTS)
    plain = model.model_copy(
        update={"attention_modules": (), "classes": tuple(c.model_copy(update={"experts": ()}) for c in model.classes)}
    )

    shapes = shapes_of(Space(plain, on, training, EVERYTHING))

    assert shapes == shapes_of(Space(plain, on, training, Pins()))
    assert all(shape.context == shape.expert == 1 for shape in shapes)


def best(pins: Pins, seed: int) -> tuple[Plan, Estimate]:
    """The fastest plan under pins, on one host of four roomy devices."""
    model, _, _ = wide_instance(seed)
    training = TrainingSpec(global_batch=4, seq_len=SEQ_LEN, memory_margin=0.0)
    found = search(model, cluster(1, 4, device(memory=64e9)), training, pins=pins)
    return found.plan, found.estimate


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        (Pins(context=2), {"context": 2}),
        (Pins(expert=2), {"expert": 2}),
        pytest.param(
            Pins(context=2, expert=2, pipeline=2), {"context": 2, "expert": 2, "pipeline": 2}, marks=pytest.mark.slow
        ),
        (Pins(context=4, context_kind="all_to_all", recompute="full"), {"context": 4}),
        (Pins(everything=True, data_shard=2, expert=2, gradient_sync="every"), {"data_shard": 2, "expert": 2}),
    ],
)
def test_a_pinned_plan_is_the_evaluators_and_says_what_is_not_run(pins: Pins, told: dict[str, int]) -> None:
    model, _, _ = wide_instance(WITH_EXPERTS)

    plan, found = best(pins, WITH_EXPERTS)

    assert {name: getattr(plan.degrees, name) for name in told} == told
    assert plan.certificate is not None
    assert found.step_time_s == pytest.approx(plan.certificate.step_s, rel=1e-6)
    assert estimate(plan, model).step_time_s == pytest.approx(found.step_time_s, rel=1e-6)
    assert check(plan, model, to_run=False) == []
    assert len(check(plan, model)) == len(not_run(plan))
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.slow
def test_why_not_answers_for_context_and_experts() -> None:
    model, _, _ = wide_instance(WITH_EXPERTS)
    plan, found = best(Pins(), WITH_EXPERTS)
    explorer = Explorer(model, plan.cluster, plan.training)

    answers = {text: why_not(explorer, text, [pins_of(parse_setup(text, 4, 4))], plan, found) for text in ASKED}

    assert [answer.kind in ("slower", "as fast", "faster") for answer in answers.values()] == [True, True, True, False]
    assert "CP 2" in answers["cp=2"].sentence
    assert "ring" in answers["cp=4 cp_kind=ring zero=1"].sentence
    assert "EP 2" in answers["ep=2"].sentence
    assert "does not divide" in answers["ep=4"].sentence


def test_words_say_how_sequences_and_experts_are_split() -> None:
    model, _, _ = wide_instance(WITH_EXPERTS)
    training = TrainingSpec(global_batch=8, seq_len=SEQ_LEN)
    shape = Shape(1, 2, 1, 1, 1, 4, context=2, context_kind="all_to_all", expert=4)
    plan = make_plan(model, cluster(1, 4), training, shape, [[LayerOption()] * len(model.layers)])

    assert splits_in_words(plan) == {
        "sequence": "context=2 (all-to-all)",
        "experts": "4 ways over data_shard and context",
    }


ASKED = ("cp=2", "cp=4 cp_kind=ring zero=1", "ep=2", "ep=4")
WITH_EXPERTS = next(
    seed
    for seed in range(100)
    if [bank.count for c in wide_instance(seed)[0].classes for bank in c.experts] == [2]
    and len(wide_instance(seed)[0].layers) == 3
)
"""An instance whose only bank has two experts."""


def num_plans(seed: int) -> int:
    """Shapes of an instance: few enough have all their plans enumerated in a test."""
    return len(shapes_of(Space(*wide_instance(seed), EVERYTHING)))


BRUTE_SEEDS = [seed for seed in range(70) if 0 < num_plans(seed) < 50][:30]


@pytest.mark.slow
@pytest.mark.parametrize("seed", BRUTE_SEEDS)
def test_search_over_everything_finds_the_optimum_of_brute_force(seed: int) -> None:
    model, on, training = wide_instance(seed)

    explorer = Explorer(model, on, training)
    outcome = explorer.explore(EVERYTHING, math.inf)

    shapes = shapes_of(Space(model, on, training, EVERYTHING))
    plans = itertools.chain.from_iterable(plans_of(shape, model, on, training) for shape in shapes)
    priced = (estimate(plan, model) for plan in plans)
    once_s = explorer.model.software.step_s
    expected = min((found.step_time_s - once_s for found in priced if found.fits), default=None)
    assert (outcome.best is None) == (expected is None)
    if outcome.best is not None and expected is not None:
        assert outcome.bound * (1 - 1e-9) <= expected <= outcome.best.seconds * (1 + 1e-9)
        assert outcome.best.seconds <= max(outcome.bound, expected) * (1 + 1e-3)


def test_the_question_of_long_sequences_prices_context_ranks() -> None:
    model, _, _ = wide_instance(WITH_EXPERTS)
    longer = model.model_copy(update={"seq_len": LONG_SEQUENCE})
    training = TrainingSpec(global_batch=8, seq_len=LONG_SEQUENCE, memory_margin=0.0)
    result = search(longer, cluster(1, 4, device(memory=64e9)), training, pins=Pins(tensor=1, pipeline=1, context=1))

    step = next(s for s in walk(result.plan, result.estimate, longer) if s.question == LONG)

    assert step.yes
    assert "With context=2 it (" in step.verdict
    assert "CP 2" in step.verdict


def schedules_of(model: ModelProfile, **job: object) -> set[str]:
    training = TrainingSpec.model_validate({"global_batch": 16, **job})
    return {family.schedule for family in Space(model, cluster(1, 4), training, Pins()).families()}


@pytest.mark.parametrize("seed", slow.but_first(range(60), 6))
def test_no_order_of_the_axes_takes_more_memory_than_another(seed: int) -> None:
    """So that one stands for all where it is only asked what fits."""
    model, on, training = wide_instance(seed)
    space = Space(model, on, training, EVERYTHING)
    one = Space(model, on, training, EVERYTHING, anywhere=True)
    costs, held = CostModel(model, on, training), defaultdict[Shape, set[tuple[float, ...]]](set)

    shapes = [shape for shape in shapes_of(space) if shape.pipeline * shape.virtual_stages <= len(model.layers)]
    for shape in shapes:
        num_stages = shape.pipeline * shape.virtual_stages
        ends = [*range(num_stages), len(model.layers)]
        options = [costs.options(kind, shape, None)[-1] for kind in costs.kinds]
        memory = memory_by(costs, shape, [options[a:b] for a, b in itertools.pairwise(ends)])
        held[replace(shape, mesh_axes=AXES)].add(tuple(each.device_bytes for each in memory))

    assert all(len(each) == 1 for each in held.values())
    assert Counter(replace(shape, mesh_axes=AXES) for shape in shapes_of(one)) == Counter(
        {replace(shape, mesh_axes=AXES) for shape in shapes_of(space)}
    )


def test_compiled_layers_come_without_zero_bubbles_and_context_ranks() -> None:
    model, *_ = wide_instance(3)
    training = TrainingSpec(global_batch=16, software="fsdp2-compile")

    families = list(Space(model, cluster(1, 4), training, Pins()).families())

    assert {family.context for family in families} == {1}
    assert not {family.schedule for family in families} & set(ZERO_BUBBLE)
    assert "zb-h1" in schedules_of(model)


def test_layers_that_share_weights_run_zero_bubbles_in_fp32_only() -> None:
    model, *_ = wide_instance(3)
    last = model.layers[-1]
    again = last.model_copy(update={"name": "again"})
    shared = model.model_copy(update={"layers": (*model.layers, again)})

    assert "zb-h1" in schedules_of(shared, precision="fp32")
    assert "1f1b" in schedules_of(shared, precision="bf16")
    assert not schedules_of(shared, precision="bf16") & set(ZERO_BUBBLE)


def test_a_plan_that_fits_only_with_activations_on_the_host_is_found() -> None:
    """Eight layers keep 500 MB each even if they are recomputed; the device has 3 GB."""
    model = profile(
        [layer_class("block", 1e12, 1_000_000, saved=1e9, inputs=5e8, transient=1e6)], [0] * 8, crossing=5e8
    )
    small = cluster(1, 1, device(memory=3e9))
    training = TrainingSpec(global_batch=1, seq_len=SEQ_LEN, memory_margin=0.0)

    found = Explorer(model, small, training).explore(Pins(everything=True), float("inf")).best

    assert found is not None
    options = {option for choice in found.assignment.choices for _, option, _ in choice.parts}
    assert any(option.offload for option in options)
    assert Explorer(model, small, training).explore(Pins(), float("inf")).best is None
