"""Memory of training stacks: buffers, shares, and variants, on models whose bytes are known."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.published.fit_memory import SHARES, tried
from benchmarks.published.models import Block, Sizes, loaded
from meshwright.planner.answers.search import search
from meshwright.planner.cost import software
from meshwright.planner.cost.estimate import Estimate, StageMemory, estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.memory_cost import state_bytes
from meshwright.planner.cost.software import load_software
from meshwright.planner.plan.document import Recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import REFERENCE, TrainingSpec
from meshwright.profiler.model.model_profile import Bytes, ModelProfile
from meshwright.profiler.model.trace import trace
from support.synthetic import cluster, device, layer_class, profile

VOCABULARY = 96

ELEMENTS, SAVED, CROSSING, LAYERS = 10_000_000, 1e6, 1e6, 4

MODEL = profile([layer_class("block", 1e12, ELEMENTS, saved=SAVED, inputs=CROSSING, heads=8)], [0] * LAYERS)


def _estimate(stack: str, shape: Shape) -> Estimate:
    training = TrainingSpec(global_batch=shape.num_microbatches * shape.data, seq_len=64, software=stack)
    options = [[LayerOption(reshard=shape.reshard)] * (LAYERS // shape.pipeline)] * shape.pipeline
    plan = make_plan(MODEL, cluster(per_host=shape.data * shape.pipeline), training, shape, options)
    return estimate(plan, MODEL)


def _shape(data: int, num_microbatches: int = 2) -> Shape:
    return Shape(1, data, 1, 1, micro_batch=1, num_microbatches=num_microbatches)


def _states(found: Estimate) -> float:
    items = found.memory[0].items
    return sum(items[name] for name in ("parameters", "gradients", "optimizer", "gathered"))


@pytest.mark.parametrize("data", [1, 2, 8])
@pytest.mark.parametrize(
    ("stack", "whole", "shared"),
    [
        ("megatron-2023", 2 + 4, 12),  # bf16 weights, fp32 gradients; master weights and two moments
        ("megatron-2021+half-gradients", 2 + 2, 12),
        ("megatron-2021+half-gradients+deepspeed", 2 + 2, 12 + 4),
        ("megatron-2021+deepspeed+deepspeed-bf16", 2 + 4 + 2, 12 + 4),
        ("megatron-core+half-moments", 2 + 2, 4 + 4),
    ],
)
def test_buffers_hold_weights_and_gradients_whole_and_the_optimizer_in_shards(
    stack: str, whole: int, shared: int, data: int
) -> None:
    found = _estimate(stack, _shape(data))

    assert _states(found) == pytest.approx(LAYERS * ELEMENTS * (whole + shared / data), rel=1e-3)


def test_buffers_are_as_full_with_one_micro_batch_as_with_many() -> None:
    one, many = (_states(_estimate("megatron-2023", _shape(4, count))) for count in (1, 8))

    assert one == pytest.approx(many)


def test_layers_that_are_gathered_one_by_one_need_no_buffers() -> None:
    shape = replace(_shape(8), reshard=True, gradient_sync="every")

    assert not state_bytes(shape, TrainingSpec(global_batch=8, software="megatron-core")).buffers


def _fused(saved: float, arriving: float) -> ModelProfile:
    """MODEL where fused kernels keep so many bytes of what they save, and of what arrives; in bf16."""

    def size(num_bytes: float) -> Bytes:
        return Bytes(elements=(0.0, num_bytes / 2, 0.0, 0.0))

    (block,) = MODEL.classes
    whole = block.whole.model_copy(update={"fused": size(saved), "fused_inputs": size(arriving)})
    return MODEL.model_copy(update={"classes": (block.model_copy(update={"whole": whole}),)})


def _kept(stack: str, model: ModelProfile, recompute: Recompute = "none") -> float:
    training = TrainingSpec(global_batch=2, seq_len=64, software=stack)
    costs = CostModel(model, cluster(per_host=2), training)
    return costs.activation_bytes(costs.kinds[1], _shape(2, 1), recompute)[0]


@pytest.mark.parametrize(
    ("stack", "kept"), [(REFERENCE, SAVED), ("megatron-core", 0.7 * SAVED), ("fsdp2-compile+saves-all", SAVED)]
)
def test_fused_kernels_keep_what_the_profile_lists_of_them(stack: str, kept: float) -> None:
    inputs = _kept(REFERENCE, MODEL) - SAVED

    assert _kept(stack, _fused(0.6 * SAVED, 0.1 * SAVED)) == pytest.approx(kept + inputs)


def test_a_recomputed_layer_keeps_no_more_for_fused_kernels() -> None:
    assert _kept("megatron-core", _fused(0.6 * SAVED, 0.1 * SAVED), "full") == _kept("megatron-core", MODEL, "full")


def test_low_precision_keeps_less_still() -> None:
    memory = load_software("megatron-core").memory

    assert memory.kept("none", "fp8") == memory.low_precision < 1.0
    assert memory.kept("none", "bf16") == 1.0
    assert memory.kept("full", "fp8") == 1.0


LLAMA = Sizes(1, 32, 2, 1, 16, 48, VOCABULARY, 8, True, True, False, tied=False, positions="rope")
"""A block 32 wide with a feed-forward of 48, 8 tokens at a time."""


@cache
def _llama() -> ModelProfile:
    return trace(loaded("llama", LLAMA), cuts=False)


@pytest.mark.slow
def test_a_llama_block_keeps_what_is_counted_by_hand_where_kernels_are_fused() -> None:
    """What enters and leaves the norms; queries, keys, values, attention's output and statistics; the gate's two sides
    and their product."""
    costs = CostModel(_llama(), cluster(per_host=1), TrainingSpec(global_batch=1, seq_len=8, software="megatron-core"))

    kept = costs.activation_bytes(costs.kinds[1], _shape(1, 1), "none")[0]

    norms, attention, feed_forward = 4 * 32, 2 * 32 + 2 * 16, 3 * 48
    statistics = 4 * (2 + 2)  # of each norm, and of each head
    assert kept == 8 * (2 * (norms + attention + feed_forward) + statistics)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of the compiler's own imports
def test_torchs_partitioner_keeps_what_fused_kernels_are_said_to_keep() -> None:
    """It makes the same again, and keeps attention's output in two layouts."""
    block = Block(LLAMA, dense=True).to(torch.bfloat16)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    compiled = torch.compile(block, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(torch.ones(1, 8, 32, dtype=torch.bfloat16, requires_grad=True))
    kept = sum(storage.nbytes() for place, storage in saved.items() if place not in own)

    costs = _llama().classes[_llama().layers[1].layer_class].whole
    assert costs.fused is not None
    listed = costs.fused.at(1, 2) + costs.fused_inputs.at(1, 2)
    assert listed <= kept <= listed + 2 * 8 * 32 + 8 * 8  # and a few numbers for each token


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [1, 2])
def test_layers_of_one_shape_share_the_gradient_that_nobody_reads(virtual: int) -> None:
    """An embedding's is no linear layer's, and the head's is there in its backward alone."""
    shape = Shape(1, 2, 1, 1, micro_batch=1, num_microbatches=2, virtual_stages=virtual)
    model = _llama()
    costs = CostModel(model, cluster(per_host=2), TrainingSpec(global_batch=2, seq_len=8, software="megatron-core"))
    block = model.classes[model.layers[1].layer_class]
    weights = sum(p.num_elements for p in block.parameters if len(p.shape) > 1)
    of_model = sum(math.prod(b.shape) * 4 for b in model.buffers)

    assert virtual * (costs.buffer_bytes(shape) - of_model) == 2 * weights


@pytest.mark.slow
def test_a_head_returns_a_gradient_beside_that_of_its_logits() -> None:
    shape, training = _shape(2, 1), TrainingSpec(global_batch=2, seq_len=8, software="megatron-core+loss-in-place")
    costs = CostModel(_llama(), cluster(per_host=2), training)
    logits, head = 8 * VOCABULARY, VOCABULARY * 32

    working = costs.activation_bytes(costs.kinds[-1], shape, "none")[1]

    assert working.forward == 2 * logits
    assert working.backward == 2 * (logits + head + 32)  # and the norm's


def test_weights_in_16_bit_alone_need_eight_bytes_each() -> None:
    found = state_bytes(_shape(1), TrainingSpec(global_batch=2, software="fsdp2-eager+pure-16-bit"))

    assert found.sharded_parameters + found.sharded_gradients + found.optimizer + found.gathered == 8


def test_a_stack_says_what_lies_outside_of_the_allocator() -> None:
    plain = cluster(per_host=2).device

    assert load_software("megatron-2021+deepspeed").on(plain).context > plain.context
    assert load_software("megatron-2021").on(plain).fragmentation == 0.037


def test_a_stage_of_megatrons_frees_what_it_has_sent() -> None:
    """In a pipeline of two the first stage has two micro-batches in flight when the first gradient arrives."""
    shape = Shape(1, 1, 1, 2, micro_batch=1, num_microbatches=8, schedule="1f1b")
    frees, keeps = (_estimate(f"megatron-2021{variant}", shape).memory for variant in ("", "+flat-optimizer"))
    first, last = (keeps[stage].items["activations"] - frees[stage].items["activations"] for stage in (0, 1))

    assert (first, last) == (pytest.approx((2 + 1) * CROSSING), 0.0)


def _at_ease(stack: str) -> StageMemory:
    shape = replace(_shape(2, 1), reshard=True, gradient_sync="every")
    return _estimate(stack, shape).memory[0]


def test_an_allocator_at_ease_holds_gradients_beside_all_that_went_before() -> None:
    """In the middle of the backward some layers' gradients are still to come, to a stream of their own."""
    found = _at_ease(REFERENCE)
    later = LAYERS * ELEMENTS * 4 / 2 - found.items["gradients"]

    assert later > 0
    assert found.max_reserved_bytes == pytest.approx(found.reserved_bytes + later, rel=1e-6)


def test_segments_that_do_not_grow_are_spoilt_for_the_largest_transient() -> None:
    grows, fixed = (_at_ease(stack) for stack in (REFERENCE, f"{REFERENCE}+fixed-segments"))

    assert fixed.max_reserved_bytes == pytest.approx(grows.max_reserved_bytes + grows.items["transient"], rel=1e-6)


def test_a_device_without_room_makes_its_allocator_give_back() -> None:
    training = TrainingSpec(global_batch=2, seq_len=64, software=f"{REFERENCE}+fixed-segments", memory_margin=0.0)
    shape = replace(_shape(2, 1), reshard=True, gradient_sync="every")
    options = [[LayerOption(reshard=True)] * LAYERS]

    def held(memory: float) -> StageMemory:
        small = cluster(per_host=2, on=device(memory))
        return estimate(make_plan(MODEL, small, training, shape, options), MODEL).memory[0]

    at_ease = held(1e12)
    outside = at_ease.device_bytes - at_ease.reserved_bytes
    between = (at_ease.reserved_bytes + at_ease.max_reserved_bytes) / 2

    assert held(between + outside).max_reserved_bytes == pytest.approx(between)
    assert held(at_ease.reserved_bytes / 2).max_reserved_bytes == at_ease.reserved_bytes


def test_the_reference_holds_what_the_profile_says() -> None:
    assert load_software(REFERENCE).memory == software.StackMemory()


@pytest.mark.parametrize("stack", ["megatron-core", "fsdp2-compile"])
def test_the_search_finds_what_fits_by_a_stacks_own_memory(stack: str) -> None:
    training = TrainingSpec(global_batch=8, seq_len=64, software=stack)

    found = search(MODEL, cluster(per_host=4), training)

    assert estimate(found.plan, MODEL).fits


def test_a_tried_value_is_gone_afterwards() -> None:
    before = load_software("megatron-core").memory
    values = {share.name: 2 * share.before for share in SHARES}

    with tried(values):
        inside = load_software("megatron-core").memory.low_precision

    assert inside == pytest.approx(2 * 0.75)
    assert load_software("megatron-core").memory == before
