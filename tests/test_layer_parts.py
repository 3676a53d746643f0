"""Recompute of parts of a layer: what it costs, where it is offered, and that the search decides it layer by layer."""

import math
from dataclasses import replace

import pytest

from benchmarks.accuracy import cases
from benchmarks.planning_time.layer_wise import SHAPE, options_of_a_block
from benchmarks.planning_time.plain_profile import Part, with_parts
from meshwright.executor.reporting.report import choice_in_words
from meshwright.planner.answers.check import check
from meshwright.planner.answers.search import search
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.layer_parts import ways_of_parts
from meshwright.planner.plan.document import Recompute, parts_of
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.not_run import not_run
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.explore import Explorer
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import LayerClass, ModelProfile
from support.small_models import small_model
from support.synthetic import SEQ_LEN, cluster, device, layer_class, profile, with_attention, with_experts

NORM = Part("norm", freed=0.1, given=0.0, forward=0.05, reads_arriving=True)
MLP = Part("mlp", freed=0.5, given=0.05, forward=0.6)
SAVED = 1e8
ALONE = Shape(1, 1, 1, 1, micro_batch=2, num_microbatches=1)
OPEN = Pins(micro_batch=2)
PARTS = frozenset({"parts"})


def block(heads: int | None = None) -> LayerClass:
    plain = layer_class("block", 1e11, 1_000_000, saved=SAVED, inputs=1e6, transient=1e6, heads=heads)
    return with_parts(plain, (NORM, MLP))


def model_of(made: LayerClass, num_layers: int = 3) -> ModelProfile:
    return profile([made], [0] * num_layers)


def priced(
    made: LayerClass, recompute: Recompute, shape: Shape = ALONE, num_devices: int = 1
) -> tuple[CostModel, object]:
    model = model_of(made)
    costs = CostModel(model, cluster(1, num_devices), TrainingSpec(global_batch=2, seq_len=SEQ_LEN))
    return costs, costs.cost(costs.kinds[1], shape, LayerOption(recompute))


@pytest.mark.parametrize(
    ("recompute", "kept", "again"),
    [
        ("none", 1.0, 0.0),
        # A part's inputs are kept; an eighth of what the norm frees is given to the second part, which keeps it then.
        ("parts:norm", 1.0 - 0.1 - 0.1 / 8, 0.05),
        ("parts:mlp", 1.0 - 0.5 + 0.05, 0.6),
        ("parts:norm+mlp", 1.0 - 0.1 - 0.5 + 0.05, 0.65),
    ],
)
def test_a_part_keeps_its_inputs_and_runs_its_own_forward_again(recompute: str, kept: float, again: float) -> None:
    costs, found = priced(block(), recompute)

    forward_s = costs.compute(costs.kinds[1], ALONE).forward
    arriving = costs.arriving_bytes(costs.kinds[1], ALONE, False)
    assert found.kept_bytes == pytest.approx(2 * SAVED * kept + arriving)
    assert found.recompute_s == pytest.approx(again * forward_s)


@pytest.mark.parametrize(("recompute", "there"), [("parts:norm", NORM), ("parts:mlp", MLP), ("parts:norm+mlp", MLP)])
def test_what_a_part_gives_up_is_there_again_in_its_turn(recompute: str, there: Part) -> None:
    """Of several parts the last, whose backward comes first; what the first saves comes when that of the last is gone.
    The norm's own turn is no peak: without recompute all is there before."""
    none, some = (priced(block(), kind)[1] for kind in ("none", recompute))

    at_work = none.transient_bytes + (2 * SAVED * there.freed if there is MLP else 0.0)
    assert some.transient_bytes == pytest.approx(at_work)


def test_only_collectives_inside_of_a_part_are_called_again() -> None:
    shape = replace(ALONE, tensor=2, sequence=True)
    once, norm, full = (
        priced(block(heads=4), recompute, shape, 2)[1].tensor_backward_s for recompute in ("none", "parts:norm", "full")
    )

    both = priced(block(heads=4), "parts:norm+mlp", shape, 2)[1].tensor_backward_s
    assert once < norm < both == pytest.approx(full)


@pytest.mark.parametrize(("recompute", "sent"), [("parts:norm", 4.0), ("parts:mlp", 6.0), ("full", 6.0)])
def test_tokens_are_sent_again_by_the_part_that_holds_the_experts(recompute: str, sent: float) -> None:
    made = with_parts(with_experts(layer_class("moe", 1e11, 1_000_000, SAVED, 1e6), 4), (NORM, MLP))
    shape = replace(ALONE, data_shard=2, expert=2, micro_batch=1)

    _, found = priced(made, recompute, shape, 2)

    tokens = [item for item in found.traffic if item.axis == "expert" and item.bytes > 1e3]
    assert sum(item.calls for item in tokens) == sent


@pytest.mark.parametrize(("recompute", "again"), [("parts:norm", 0.0), ("parts:mlp", 1.0), ("full", 1.0)])
def test_context_ranks_exchange_again_where_attention_runs_again(recompute: str, again: float) -> None:
    plain = with_attention(layer_class("block", 1e11, 1_000_000, SAVED, 1e6, heads=4), 4, 1e10)
    model = model_of(with_parts(plain, (NORM, MLP))).model_copy(update={"attention_modules": ("layer0",)})
    costs = CostModel(model, cluster(1, 2), TrainingSpec(global_batch=2, seq_len=SEQ_LEN))
    shape = replace(ALONE, context=2, context_kind="all_gather")

    found = costs.cost(costs.kinds[1], shape, LayerOption(recompute))

    context = costs.context_of(costs.kinds[1], shape)
    assert context.forward_s > 0
    assert found.context_backward_s == pytest.approx(context.backward_s + again * context.forward_s)


def test_every_choice_of_parts_is_offered_only_when_asked() -> None:
    costs, _ = priced(block(), "none")
    kind = costs.kinds[1]

    usual, more = (costs.options(kind, ALONE, offered=offered) for offered in (frozenset(), PARTS))

    assert not any(parts_of(option.recompute) for option in usual)
    assert {option.recompute for option in more} - {option.recompute for option in usual} == set(ways_of_parts(block()))


@pytest.mark.slow
def test_a_block_of_llama_has_70_options() -> None:
    """None, selective, full and 15 choices of its two norms, attention and feed-forward; each with parameters given
    back or kept, and, but for selective recompute, with activations on the device or on the host."""
    llama = cases.profile_of(small_model("llama"))
    training = TrainingSpec(global_batch=64, seq_len=llama.seq_len)
    model = CostModel(llama, cluster_of(load_device("a100-80gb"), SHAPE.data), training)

    counts = [options_of_a_block(model, pins) for pins in (Pins(), Pins(parts=True), Pins(everything=True))]

    assert counts == [3 * 2, 18 * 2, 18 * 2 + 17 * 2]


def test_the_search_recomputes_other_parts_in_every_layer_as_memory_asks() -> None:
    """Three layers keep 200 MB each, and 110 MB without what their feed-forwards save, which do not fit all at once."""
    model, training = model_of(block()), TrainingSpec(global_batch=2, seq_len=SEQ_LEN, memory_margin=0.0)
    fixed = 3 * 16e6 + 50e6
    small = cluster(1, 1, device(memory=2 * SAVED * 3 * 0.56 + 2 * SAVED * 0.5 + fixed))

    usual, more = (search(model, small, training, pins=pins) for pins in (OPEN, replace(OPEN, parts=True)))

    chosen = {layer.recompute for layer in more.plan.layers}
    assert any(parts_of(recompute) for recompute in chosen)
    assert more.certificate.step_s < usual.certificate.step_s
    assert check(more.plan, model) == []
    assert not_run(more.plan) == {}
    assert "recompute of mlp in 1 of 3 layers, recompute of norm in 2 of 3 layers" in choice_in_words(more.plan)


def test_a_pinned_part_is_recomputed_in_every_layer_that_has_it() -> None:
    plain = layer_class("other", 1e11, 1_000_000, saved=SAVED, inputs=1e6)
    model = profile([block(), plain], [0, 1, 0])
    training = TrainingSpec(global_batch=2, seq_len=SEQ_LEN)

    found = search(model, cluster(1, 1), training, pins=Pins(recompute="parts:mlp"))

    recomputes = [layer.recompute for layer in found.plan.layers]
    assert recomputes == ["parts:mlp", "none", "parts:mlp"]


def test_a_part_that_no_layer_has_is_named() -> None:
    model, training = model_of(block()), TrainingSpec(global_batch=2, seq_len=SEQ_LEN)
    options = [[LayerOption("parts:attention")] * 3]
    plan = make_plan(model, cluster(1, 1), training, ALONE, options)

    with pytest.raises(ValueError, match=r"no layer of synthetic has a part attention .* there are norm, mlp"):
        Explorer(model, cluster(1, 1), training).explore(Pins(recompute="parts:attention"), math.inf)
    assert any("has no part attention" in sentence for sentence in check(plan, model))
