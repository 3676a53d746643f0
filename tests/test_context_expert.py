"""Context and expert parallelism, offload and partial recompute: priced by what is sent, held and computed again."""

import itertools
import statistics
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.published.single_modules import estimate_of, step_seconds_of
from meshwright.planner.answers.blame import blamed
from meshwright.planner.answers.check import check
from meshwright.planner.cost.comm_cost import ExpertGroups, GroupLinks, collective_s, places_reached
from meshwright.planner.cost.context_cost import attention_bytes, context_cost, exchanges
from meshwright.planner.cost.estimate import Estimate, estimate
from meshwright.planner.cost.expert_cost import SENDING_UNITS, exchange_of, network_share, spread
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.software import load_software
from meshwright.planner.plan.document import ContextKind, Plan
from meshwright.planner.plan.legality import context_rule, expert_rule
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import REFERENCE, TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, Group, Link
from meshwright.profiler.model.model_profile import (
    Bytes,
    LayerClass,
    ModelProfile,
    OpPart,
    OpProfile,
    ParameterProfile,
    TensorCut,
)
from support.strategies import ROUNDING, any_links, factors, log_floats, plans, priced, sizes
from support.synthetic import SEQ_LEN, cluster, device, layer_class, per_sample, profile, with_experts

KINDS: tuple[ContextKind, ...] = ("ring", "all_to_all", "all_gather")
WIDTH, TOP_K, COUNT, INNER = 32, 2, 16, 64
QUERIES, KEYS = 128, 64
"""Elements of queries, and of keys, of one token."""

FREE = Link(bandwidth=1e16, latency=0.0)


def block(attention_flops: float = 1e9) -> LayerClass:
    """Grouped attention and a feed-forward."""
    made = layer_class("block", 1e12, 1000, saved=1e6, inputs=1e5)
    moved = Bytes(elements=per_sample(SEQ_LEN * (2 * QUERIES + 2 * KEYS)))
    parts: tuple[tuple[OpPart, float], ...] = (("forward", 1.0), ("backward_input", 2.5))
    attention = tuple(
        OpProfile(name="sdpa", module="", kind="attention", part=p, flops=per_sample(n * attention_flops), moved=moved)
        for p, n in parts
    )
    names = ("q", "k", "v")
    cut = TensorCut(
        kind="attention", columns=names, rows=("o",), units=(4, 2), sharded={f"{name}.weight": 0 for name in names}
    )
    shapes = dict(zip(names, ((QUERIES, 8), (KEYS, 8), (KEYS, 8)), strict=True))
    return made.model_copy(
        update={
            "whole": made.whole.model_copy(update={"operators": made.whole.operators + attention}),
            "cuts": (cut,),
            "tensor": made.whole,
            "parameters": (*(ParameterProfile(name=f"{n}.weight", shape=s) for n, s in shapes.items()),),
        }
    )


def mixture(count: int = COUNT) -> LayerClass:
    """A bank of experts beside a weight that all tokens use."""
    return with_experts(layer_class("mixture", 1e9, 1000, saved=1e6, inputs=1e5), count, TOP_K, WIDTH, INNER)


def two_of(layer: LayerClass) -> ModelProfile:
    """A model of two such layers."""
    return profile([layer], [0, 0])


def planned(
    layer: LayerClass, shape: Shape, on: ClusterSpec, option: LayerOption | None = None, **training: object
) -> tuple[Plan, ModelProfile]:
    """A plan of two such layers, and their profile."""
    model = two_of(layer)
    job = {"global_batch": shape.micro_batch * shape.num_microbatches * shape.data, "seq_len": SEQ_LEN, **training}
    options = [[option or LayerOption()] * 2]
    return make_plan(model, on, TrainingSpec.model_validate(job), shape, options), model


def found(
    layer: LayerClass, shape: Shape, on: ClusterSpec, option: LayerOption | None = None, **training: object
) -> Estimate:
    """The estimate of that plan."""
    return estimate(*planned(layer, shape, on, option, **training))


# --- exchanges -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=100)
@given(any_links(), sizes, factors)
def test_an_exchange_of_more_bytes_never_takes_less_time(links: GroupLinks, size: float, factor: float) -> None:
    assert collective_s("all_to_all", size, links) <= collective_s("all_to_all", size * factor, links)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.integers(2, 8), sizes)
def test_each_rank_of_a_host_sends_all_but_its_own_part(ranks: int, size: float) -> None:
    links = GroupLinks(Group(ranks_per_host=ranks, hosts=1), Link(bandwidth=1e9, latency=0.0), FREE, 8)

    seconds = collective_s("all_to_all", size, links)

    assert seconds == pytest.approx((ranks - 1) / ranks * size / 1e9)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(2, 64), sizes)
def test_what_leaves_a_host_crosses_its_share_of_the_network(ranks: int, hosts: int, size: float) -> None:
    links = GroupLinks(Group(ranks_per_host=ranks, hosts=hosts), FREE, Link(bandwidth=8e9, latency=0.0), 8)

    seconds = collective_s("all_to_all", size, links)

    assert seconds == pytest.approx((hosts - 1) / hosts * size / 1e9)


def test_an_exchange_with_nobody_is_free() -> None:
    links = GroupLinks(Group(ranks_per_host=1, hosts=1), FREE, FREE, 8)

    assert collective_s("all_to_all", 1e9, links) == 0.0


# --- context ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60)
@given(plans(), st.sampled_from(KINDS))
def test_without_context_ranks_the_way_they_would_exchange_changes_nothing(case: tuple, kind: ContextKind) -> None:  # type: ignore[type-arg]
    model, on, training, shape, counts = case
    recomputes = ["none"] * len(model.layers)

    plain = priced(case, recomputes)
    same = priced((model, on, training, replace(shape, context=1, context_kind=kind, expert=1), counts), recomputes)

    assert same == plain


@pytest.mark.parametrize("context", [2, 4, 8])
def test_context_ranks_share_tokens_scores_and_what_is_kept(context: int) -> None:
    on = cluster(per_host=8, on=device(link=FREE))

    one, shared = (found(block(), Shape(8 // c, 1, 1, 1, 4, 1, context=c), on) for c in (1, context))

    assert shared.breakdown["compute"] == pytest.approx(one.breakdown["compute"] / context)
    assert shared.memory[0].items["activations"] == pytest.approx(one.memory[0].items["activations"] / context)


def test_parameters_are_sharded_over_context_ranks_too() -> None:
    on = cluster(per_host=8)

    apart, together = (
        found(block(), Shape(1, 8, 1, 1, 1, 1), on),
        found(block(), Shape(1, 2, 1, 1, 1, 1, context=4), on),
    )

    for item in ("parameters", "gradients", "optimizer"):
        assert together.memory[0].items[item] == apart.memory[0].items[item]


def test_grouped_heads_make_keys_and_values_smaller() -> None:
    bytes_of = attention_bytes(block(), block().whole, 3, 2, 1)

    assert bytes_of == pytest.approx((2 * 3 * SEQ_LEN * QUERIES, 2 * 3 * SEQ_LEN * 2 * KEYS))


@settings(max_examples=50)
@given(log_floats(1e3, 1e9), log_floats(1e3, 1e9), st.integers(2, 16))
def test_a_ring_sends_as_many_bytes_as_gathering_all_keys_and_values(queries: float, both: float, n: int) -> None:
    ring, gather = (exchanges((queries, both), n, kind) for kind in ("ring", "all_gather"))

    passed = [sum(e.calls * e.num_bytes for e in part) for part in ring]
    gathered = [sum(e.calls * (n - 1) / n * e.num_bytes for e in part) for part in gather]
    assert passed == pytest.approx(gathered)


def test_all_to_all_moves_queries_keys_values_and_the_output() -> None:
    forward, backward = exchanges((100.0, 50.0), 5, "all_to_all")

    assert sum(e.calls for e in forward) == 4
    assert sum(e.calls * e.num_bytes for e in forward) == pytest.approx((100 + 25 + 25 + 100) / 5)
    assert backward == forward


@settings(max_examples=50)
@given(log_floats(1e3, 1e15), st.integers(2, 8), st.floats(0, 1))
def test_what_shows_of_a_ring_lies_between_contention_and_all_of_it(flops: float, n: int, contention: float) -> None:
    links = GroupLinks(Group(ranks_per_host=n, hosts=1), Link(bandwidth=1e9, latency=1e-6), FREE, 8)
    on, layer = device(contention=contention), block(flops)

    cost = context_cost(layer, layer.whole, 1, 2, 1, n, "ring", links, on, "bf16")

    for exposed_s, passed in ((cost.forward_s, cost.forward), (cost.backward_s, cost.backward)):
        all_s = sum(e.calls * collective_s(e.kind, e.num_bytes, links) for e in passed)
        assert contention * all_s * (1 - ROUNDING) <= exposed_s <= all_s * (1 + ROUNDING)


def test_a_long_sequence_hides_its_ring() -> None:
    links = GroupLinks(Group(ranks_per_host=4, hosts=1), Link(bandwidth=1e12, latency=0.0), FREE, 8)
    short, long = block(1.0), block(1e15)

    shown, hidden = (
        context_cost(layer, layer.whole, 1, 2, 1, 4, "ring", links, device(contention=0.0), "bf16")
        for layer in (short, long)
    )

    assert shown.forward_s > 0
    assert hidden.forward_s == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_attention_exchanges_nothing(kind: ContextKind) -> None:
    plain = layer_class("plain", 1e12, 1000, saved=1e6, inputs=1e5)

    priced_plan = found(plain, Shape(1, 2, 1, 1, 1, 1, context=4, context_kind=kind), cluster(per_host=8))

    assert {traffic.axis for traffic in priced_plan.collectives} == {"data_shard"}


# --- experts ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    log_floats(1, 1e12),
    st.floats(0, 1),
    st.integers(0, 6),
    st.integers(0, 3),
    st.integers(0, 6),
    st.sampled_from((1, 2)),
)
def test_every_expert_is_stored_once_among_the_ranks_that_share_experts(
    elements: float, share: float, shard: int, context: int, expert: int, tensor: int
) -> None:
    shape = Shape(1, 2**shard, tensor, 1, 1, 1, context=2**context, sequence=tensor > 1, expert=2**expert)
    assume(shape.experts_over % shape.expert == 0 and shape.expert > 1)
    of_experts = share * elements

    parts = spread(elements, of_experts, shape)

    stored_experts = parts.stored - (elements - of_experts)
    assert stored_experts / shape.sharded_over * shape.experts_over == pytest.approx(of_experts, abs=elements * 1e-6)
    assert parts.gathered == pytest.approx(elements - of_experts + of_experts / shape.expert)
    assert parts.reduced <= parts.gathered * (1 + ROUNDING)


def test_what_experts_store_does_not_depend_on_data_ranks() -> None:
    spread_wide = Shape(1, 8, 2, 2, 1, 8, True, "1f1b", context=2, expert=8)
    fewer_ranks_than_parts = replace(spread_wide, data_replicate=8, data_shard=1)

    assert spread(1000.0, 800.0, fewer_ranks_than_parts).stored == spread(1000.0, 800.0, spread_wide).stored


def test_experts_that_no_two_ranks_share_are_not_reduced() -> None:
    parts = spread(1000.0, 800.0, Shape(1, 8, 1, 1, 1, 1, expert=8))

    assert parts.reduced == pytest.approx(200.0)


@settings(max_examples=60)
@given(plans(), st.floats(1, 2))
def test_models_without_experts_do_not_care_for_their_balance(case: tuple, imbalance: float) -> None:  # type: ignore[type-arg]
    model, on, training, shape, counts = case
    recomputes = ["none"] * len(model.layers)
    uneven = training.model_copy(update={"expert_imbalance": imbalance})

    assert priced((model, on, uneven, shape, counts), recomputes) == priced(case, recomputes)


def test_each_rank_sends_its_tokens_to_every_one_of_their_experts_and_back() -> None:
    on = cluster(per_host=8)

    sent = found(mixture(), Shape(1, 8, 1, 1, 3, 2, expert=4), on).collectives

    dispatch = next(traffic for traffic in sent if traffic.axis == "expert")
    layers, microbatches, passes, told = 2, 2, 4, 8 * COUNT
    assert dispatch.calls == layers * microbatches * (passes + 1)
    assert dispatch.bytes == layers * microbatches * (passes * 3 * SEQ_LEN * TOP_K * WIDTH * 2 + told)


def test_recompute_sends_the_tokens_round_again() -> None:
    on, shape = cluster(per_host=8), Shape(1, 8, 1, 1, 1, 1, expert=8)

    plain, again = (found(mixture(), shape, on, LayerOption(recompute)) for recompute in ("none", "full"))  # type: ignore[arg-type]

    assert again.breakdown["expert"] == pytest.approx(1.5 * plain.breakdown["expert"])


def test_more_expert_ranks_hold_fewer_gathered_parameters() -> None:
    on = cluster(per_host=8)

    held = [found(mixture(), Shape(1, 8, 1, 1, 1, 1, expert=e), on).memory[0].items for e in (1, 2, 4, 8)]

    gathered = [items["gathered"] for items in held]
    assert gathered == sorted(gathered, reverse=True)
    assert gathered[0] > gathered[-1]
    assert len({items["parameters"] for items in held}) == 1


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_the_busiest_rank_computes_and_waits_for_more(imbalance: float) -> None:
    on, shape = cluster(per_host=8), Shape(1, 8, 1, 1, 64, 1, expert=8)

    even, uneven = (found(mixture(), shape, on, expert_imbalance=i) for i in (1.0, imbalance))

    assert (uneven.breakdown["compute"] > even.breakdown["compute"]) == (imbalance > 1)
    assert (uneven.breakdown["expert"] > even.breakdown["expert"]) == (imbalance > 1)


def test_many_experts_with_few_tokens_each_are_slower_than_few() -> None:
    on = cluster(per_host=1, on=device(tile=(128, 128), compute_units=1))

    seconds = [found(mixture(count), Shape(1, 1, 1, 1, 64, 1), on).breakdown["compute"] for count in (2, 16, 128)]

    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_a_token_crosses_once_for_each_host_that_wants_it() -> None:
    assert network_share(8, hosts=1, once_per_host=True) == 1.0
    assert network_share(8, hosts=8, once_per_host=False) == 1.0
    assert network_share(8, hosts=2, once_per_host=True) == pytest.approx((1 - 0.5**8) * 2 / 8)


@pytest.mark.parametrize(
    ("places", "reached"),
    [
        pytest.param(1, 1.0, id="one host"),
        pytest.param(8, 4 * (1 - (3 / 4) ** 8), id="a host for each group"),
        pytest.param(64, 32 * (1 - (31 / 32) ** 8), id="eight ranks for each group"),
        pytest.param(3, 3 * (1 - (2 / 3) ** 8), id="hosts that share groups unevenly"),
    ],
)
def test_a_token_reaches_the_places_of_its_groups_alone(places: int, reached: float) -> None:
    assert places_reached(places, 8.0, ExpertGroups(8, 4)) == pytest.approx(reached)


def test_places_of_several_groups_are_reached_as_all_choices_of_groups_are_on_average() -> None:
    missed = [(1 - sum(group < 2 for group in chosen) / 3) ** 5 for chosen in itertools.combinations(range(8), 3)]

    assert places_reached(4, 5.0, ExpertGroups(8, 3)) == pytest.approx(4 * (1 - statistics.fmean(missed)))


@settings(max_examples=100)
@given(any_links(), sizes, st.floats(1, 16), st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))
def test_routing_to_some_groups_never_takes_longer(
    links: GroupLinks, size: float, num_copies: float, count: int, chosen: int
) -> None:
    groups = ExpertGroups(count, min(count, chosen))

    assert exchange_of(size, num_copies, links, True, groups=groups) <= exchange_of(size, num_copies, links, True) * (
        1 + ROUNDING
    )


@settings(max_examples=100)
@given(any_links(), sizes, st.floats(1, 16))
def test_sending_once_per_host_never_takes_longer(links: GroupLinks, size: float, num_copies: float) -> None:
    once, each = (exchange_of(size, num_copies, links, once_per_host) for once_per_host in (True, False))

    assert once <= each * (1 + ROUNDING)


def test_an_exchange_takes_multiprocessors_from_what_it_hides_behind() -> None:
    share, added = load_software(f"{REFERENCE}+overlapped-experts").expert_overlap, []
    for units in (1, 100, 1000):
        on, shape = cluster(per_host=8, on=device(compute_units=units)), Shape(1, 8, 1, 1, 64, 1, expert=8)
        plan, of_model = planned(mixture(), shape, on, software=f"{REFERENCE}+overlapped-experts")
        added.append(CostModel(of_model, on, plan.training).exposed_dispatch_s(1.0, 10.0))

    assert added == pytest.approx([1.0, *(1 - share * (1 - SENDING_UNITS / units) for units in (100, 1000))])


def test_gathers_in_fp8_are_half_as_large() -> None:
    on = cluster(per_host=8, on=device(flops={"bf16": 100e12, "fp8": 200e12}))
    shape = Shape(1, 8, 1, 1, 1, 1, reshard=True)

    usual, cast, in_bf16 = (
        found(mixture(), shape, on, software=f"{REFERENCE}{variant}", precision=precision)
        for variant, precision in (("", "fp8"), ("+low-precision-gathers", "fp8"), ("+low-precision-gathers", "bf16"))
    )

    gathers = [{t.kind: t.bytes for t in each.collectives}["all_gather"] for each in (usual, cast, in_bf16)]
    assert gathers == [gathers[0], gathers[0] / 2, gathers[0]]
    assert cast.breakdown["data"] < usual.breakdown["data"]


def test_a_loop_over_experts_adds_the_hosts_seconds_for_each() -> None:
    on, shape = cluster(per_host=8), Shape(1, 8, 1, 1, 1, 1, expert=4)

    grouped, looped = (
        found(mixture(), shape, on, software=f"{REFERENCE}{variant}") for variant in ("", "+looped-experts")
    )

    layers, passes, held = 2, 2, COUNT // 4
    added_s = layers * passes * held * load_software("fsdp2-eager+looped-experts").expert_s
    assert looped.breakdown["compute"] - grouped.breakdown["compute"] == pytest.approx(added_s)


# --- the host's memory -----------------------------------------------------------------------------------------------


def test_offloaded_activations_leave_two_layers_of_them_and_take_time() -> None:
    on, shape = cluster(per_host=1, on=device(host_bandwidth=1e9)), Shape(1, 1, 1, 1, 1, 1)

    kept, away = (found(block(), shape, on, LayerOption(offload=offload)) for offload in (False, True))

    plan, model = planned(block(), shape, on)
    prices = CostModel(model, on, plan.training)
    here, there = ([prices.cost(k, shape, LayerOption(offload=o)) for k in prices.kinds] for o in (False, True))
    saved = [cost.kept_bytes for cost in here]
    assert kept.memory[0].items["activations"] - away.memory[0].items["activations"] == pytest.approx(sum(saved))
    more = [b.transient_bytes - a.transient_bytes for a, b in zip(here, there, strict=True)]
    assert more == pytest.approx([2 * s for s in saved], rel=0.01)
    assert away.breakdown["offload"] > 0


def test_an_optimizer_on_the_host_frees_its_state_and_takes_longer() -> None:
    on, shape = cluster(per_host=1), Shape(1, 1, 1, 1, 1, 1)

    here, there = (found(block(), replace(shape, offload_optimizer=o), on) for o in (False, True))

    assert there.memory[0].items["optimizer"] == 0.0
    assert there.breakdown["optimizer"] > here.breakdown["optimizer"] > 0


# --- single modules of published runs ------------------------------------------------------------------------------


def test_a_module_is_run_again_and_what_it_returns_is_not_kept() -> None:
    plan, model = planned(mixture(), Shape(1, 1, 1, 1, 1, 1), cluster(per_host=1))

    plain, again = (estimate_of(plan, model, repeated) for repeated in ((), ("experts:matmul",)))

    returned = 2 * TOP_K * SEQ_LEN * INNER
    assert plain.memory[0].items["activations"] - again.memory[0].items["activations"] == pytest.approx(2 * returned)
    assert again.breakdown["recompute"] > plain.breakdown["recompute"] == 0
    assert step_seconds_of(plan, model, ("experts:matmul",)) == again.step_time_s


def test_single_modules_add_nothing_where_all_is_recomputed() -> None:
    plan, model = planned(mixture(), Shape(1, 1, 1, 1, 1, 1), cluster(per_host=1), LayerOption("full"))

    assert estimate_of(plan, model, ("experts",)) == estimate(plan, model)


# --- stacks, and what runs -------------------------------------------------------------------------------------------


def test_replayed_launches_cost_less_and_free_the_host() -> None:
    eager, replayed = load_software("megatron-core"), load_software("megatron-core+graphs")
    slow = device(launch=5e-6)

    assert replayed.on(slow).launch < eager.on(slow).launch == slow.launch
    assert replayed.host_layer_s == 0.0
    assert replayed.host_routing_s(8, 2) == 0.0 < eager.host_routing_s(8, 2)


@pytest.mark.parametrize("variant", ["once-per-host", "token-drop"])
def test_a_host_that_need_not_ask_for_counts_waits_less(variant: str) -> None:
    asking, knowing = load_software("megatron-core"), load_software(f"megatron-core+{variant}")

    assert knowing.host_routing_s(8, 2) < 0.5 * asking.host_routing_s(8, 2)
    assert knowing.host_routing_s(8, 1) == asking.host_routing_s(8, 1)


@pytest.mark.parametrize(
    ("context", "tensor", "kind", "told"),
    [
        (1, 4, "all_to_all", None),
        (4, 1, "ring", None),
        (64, 1, "ring", f"the sequence of {SEQ_LEN} into two chunks"),
        (2, 1, "all_to_all", None),
        (2, 2, "all_to_all", "context=2 x tensor=2 does not divide 2 heads"),
    ],
)
def test_context_needs_chunks_to_balance_and_heads_to_spread(
    context: int, tensor: int, kind: ContextKind, told: str | None
) -> None:
    model = two_of(block()).model_copy(update={"attention_modules": ("a",)})

    rule = context_rule(model, context, tensor, kind)

    assert rule is None if told is None else told in str(rule)


def test_context_without_attention_and_experts_without_a_bank_are_no_use() -> None:
    model = two_of(block())

    assert context_rule(model, 2, 1, "ring") == (
        "context: the model has no attention over a sequence by scaled_dot_product_attention, which context ranks "
        "share; scores that a model computes by itself stay whole"
    )
    of_a_bias = model.model_copy(update={"context_problem": "attention adds a bias that is learned to its scores"})
    assert context_rule(of_a_bias, 2, 1, "ring") == "context: attention adds a bias that is learned to its scores"
    without_length = model.model_copy(update={"attention_modules": ("block.attention",), "seq_len": None})
    assert "def batch(size, seq_len=2048)" in str(context_rule(without_length, 2, 1, "ring"))
    assert expert_rule(model, 2) == "expert: the model has no banks of experts"
    assert expert_rule(two_of(mixture(6)), 4) == "expert=4 does not divide 6 experts"
    assert expert_rule(two_of(mixture(6)), 3) is None


def test_experts_in_a_list_are_named_with_what_to_do() -> None:
    names = [f"moe.experts.{i}.{own}" for i in range(4) for own in ("up.weight", "down.weight")]
    own = tuple(ParameterProfile(name=name, shape=(8, 8)) for name in names)
    listed = block().model_copy(update={"parameters": (*block().parameters, *own)})
    model = two_of(listed).model_copy(update={"decides_by_values": "model.py:16"})

    found = blamed(model, cluster(1, 4), TrainingSpec(global_batch=8, seq_len=model.seq_len), Pins(expert=2))

    assert found is not None
    assert "moe.experts is a list of 4 modules" in found.rule
    assert "one tensor [experts, ...]" in found.rule


def test_an_unknown_variant_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no variant 'turbo' of software; there are"):
        load_software("megatron-core+turbo")


def test_what_is_only_priced_is_refused_by_the_check() -> None:
    plan, model = planned(mixture(), Shape(1, 8, 1, 1, 1, 1), cluster(per_host=8))
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "fp4"})})

    assert any("priced, not run yet: precision fp4" in violated for violated in check(plan, model))


@pytest.mark.parametrize(
    ("schedule", "recompute", "told"),
    [
        ("none", "selective", "with recompute=selective keeps on the device what it keeps"),
        ("zb-h1", "none", "each of which would bring back what waits on the host"),
    ],
)
def test_activations_that_could_not_wait_on_the_host_are_refused(schedule: str, recompute: str, told: str) -> None:
    option = LayerOption(recompute, offload=True)
    plan, model = planned(mixture(), Shape(1, 8, 1, 1, 1, 1), cluster(per_host=8), option)

    assert any(told in violated for violated in check(plan.model_copy(update={"schedule": schedule}), model))


@pytest.mark.parametrize(("called", "told"), [("routed", []), ("", ["no rank can run a part of it"])])
def test_only_experts_that_are_seen_to_be_routed_are_spread(called: str, told: list[str]) -> None:
    layer = mixture()
    layer = layer.model_copy(update={"experts": tuple(b.model_copy(update={"called": called}) for b in layer.experts)})
    plan, model = planned(layer, Shape(1, 8, 1, 1, 1, 1, expert=8), cluster(per_host=8), LayerOption())

    violated = check(plan, model)

    assert [[words in rule for rule in violated] for words in told] == [[True] for _ in told]
    assert len(violated) == len(told)
