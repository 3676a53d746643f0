"""Context and expert ranks go out to other frameworks and come back the same, or are refused with a way out."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.exports import targets
from meshwright.planner.exchange.export import export
from meshwright.planner.exchange.imports import Layout, imported
from meshwright.planner.exchange.megatron import read_megatron
from meshwright.planner.exchange.targets import TARGETS
from meshwright.planner.exchange.torchtitan import read_torchtitan
from meshwright.planner.plan.document import ContextKind
from meshwright.planner.plan.shape import Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile
from support.exported import MIXTURE, NUM_BLOCKS, PROFILE, planned, read_back, value


def attending() -> ModelProfile:
    """The decoder with attention over its sequence in each block."""
    return PROFILE.model_copy(update={"attention_modules": tuple(f"model.layers.{i}.a" for i in range(NUM_BLOCKS))})


FSDP = Shape(1, 8, 1, 1, 1, 4, gradient_sync="every")
COMES_BACK = {
    "megatron: ZeRO-1 + EP": planned(Shape(1, 8, 1, 1, 1, 4, expert=4), model=MIXTURE),
    "megatron: TP + SP + EP": planned(Shape(1, 4, 2, 1, 1, 4, sequence=True, expert=8), model=MIXTURE),
    "megatron: TP + SP, experts whole": planned(Shape(1, 4, 2, 1, 1, 4, sequence=True), model=MIXTURE),
    "megatron: PP + EP": planned(Shape(1, 4, 1, 2, 1, 4, schedule="1f1b", expert=4), model=MIXTURE),
    "megatron: two instances + EP": planned(Shape(2, 4, 1, 1, 1, 4, expert=4), model=MIXTURE),
    "megatron: ZeRO-3 + CP + EP": planned(
        Shape(1, 4, 1, 1, 1, 4, gradient_sync="every", context=2, expert=8), model=MIXTURE, reshard="all"
    ),
    "megatron: context ranks alone share state": planned(Shape(1, 1, 1, 1, 2, 4, context=8)),
    "megatron: replicas of context ranks": planned(Shape(2, 1, 1, 1, 2, 4, context=4)),
    "torchtitan: FSDP + EP": planned(replace(FSDP, expert=8), model=MIXTURE, reshard="all"),
    "torchtitan: TP + SP + EP": planned(
        Shape(1, 4, 2, 1, 1, 4, True, gradient_sync="every", expert=8), model=MIXTURE, reshard="all"
    ),
    "torchtitan: PP + EP": planned(Shape(1, 4, 1, 2, 1, 4, schedule="1f1b", expert=4), model=MIXTURE),
    "torchtitan: CP + EP": planned(
        Shape(1, 4, 1, 1, 1, 1, context=2, context_kind="all_gather", expert=8), model=MIXTURE, reshard="all"
    ),
    "torchtitan: context ranks alone share state": planned(
        Shape(1, 1, 1, 1, 2, 1, context=8, context_kind="all_gather"), reshard="all"
    ),
    "accelerate: context ranks alone share state": planned(
        Shape(1, 1, 1, 1, 2, 1, context=8, context_kind="all_gather"), reshard="all"
    ),
}


@pytest.mark.parametrize("name", COMES_BACK)
def test_a_plan_with_context_or_expert_ranks_comes_back_the_same(name: str) -> None:
    plan, target = COMES_BACK[name], name.partition(":")[0]
    model = MIXTURE if plan.model.expert_modules else PROFILE

    found = export(plan, target)

    assert read_back(found, plan, model) == plan


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "accelerate"])
def test_the_targets_own_parsers_take_context_and_expert_ranks(target: str) -> None:
    if targets.version(target) is None:
        pytest.skip(f"{targets.PACKAGES[target]} is not installed")
    for name, plan in COMES_BACK.items():
        if name.startswith(target):
            found = export(plan, target)

            assert targets.undocumented(found) == []
            targets.parse(found)


def test_context_ranks_share_state_as_data_ranks_do() -> None:
    alone = planned(Shape(1, 1, 1, 1, 2, 4, gradient_sync="every", context=8), reshard="all")

    assert alone.zero_stage == 3
    assert value(export(alone, "megatron"), "--data-parallel-sharding-strategy") == "optim_grads_params"
    assert export(alone, "accelerate").document["fsdp_config"]["fsdp_reshard_after_forward"] is True


@pytest.mark.parametrize("target", TARGETS)
def test_every_difference_of_plans_with_context_and_experts_is_said_aloud(target: str) -> None:
    kinds: tuple[ContextKind, ...] = ("ring", "all_to_all", "all_gather")
    outcomes = {"same": 0, "said": 0, "refused": 0}
    silent = []
    for shard, tensor, context, expert, kind in itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4), (1, 2, 8), kinds):
        pipeline = 8 // (shard * tensor * context)
        for sequence, sync, reshard in itertools.product((False, True), ("every", "last"), ("all", "none")):
            over = shard * context * (tensor if sequence else 1)
            shards = shard * context > 1
            legal = pipeline >= 1 and over % expert == 0 and (tensor > 1 or not sequence)
            if not legal or (not shards and (sync == "every" or reshard == "all")) or (context == 1 and kind != "ring"):
                continue
            shape = Shape(
                1, shard, tensor, pipeline, 1, 8, sequence, "none" if pipeline == 1 else "1f1b", gradient_sync=sync,
                context=context, context_kind=kind, expert=expert,
            )  # type: ignore[arg-type]  # fmt: skip
            plan = planned(shape, reshard=reshard, model=MIXTURE)
            try:
                found = export(plan, target)
            except ValueError:
                outcomes["refused"] += 1
                continue
            try:
                same = read_back(found, plan, MIXTURE) == plan
            except ValueError:
                same = False
            outcomes["same" if same else "said"] += 1
            if not same and not [note for note in found.notes if not note.startswith("batches are said in the script")]:
                silent.append((shape, reshard))

    assert silent == []
    assert outcomes["said"] + outcomes["same"] > 0
    assert outcomes["refused"] > 0


@pytest.mark.parametrize(
    ("target", "shape", "sentence"),
    [
        ("megatron", Shape(1, 4, 2, 1, 1, 4), "without sequence parallelism: .*--pin sequence=on"),
        (
            "accelerate",
            Shape(1, 8, 1, 1, 1, 4, expert=8),
            "no expert ranks; export to megatron or torchtitan, or plan with --pin expert=1",
        ),
        ("deepspeed", Shape(1, 8, 1, 1, 1, 4, expert=8), "DeepSpeed says that in code"),
        ("deepspeed", Shape(1, 4, 1, 1, 1, 4, context=2), "DeepSpeed says that in code"),
    ],
)
def test_what_a_target_cannot_do_with_experts_and_context_is_refused(target: str, shape: Shape, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        export(planned(shape, model=MIXTURE), target)


def test_torchtitan_says_that_it_cuts_experts_that_the_plan_keeps_whole() -> None:
    notes = export(planned(Shape(1, 4, 2, 1, 1, 1, True), model=MIXTURE, reshard="all"), "torchtitan").notes

    assert any("experts stay whole in the plan, on each of 2 tensor ranks; torchtitan cuts each" in n for n in notes)


MEGATRON = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MEGATRON + "--use-distributed-optimizer", r"parallel-size 2 \(the default\): experts that are cut are not"),
        (MEGATRON + "--expert-tensor-parallel-size 2", "parallel-size 2: experts that are cut are not priced"),
        ("--expert-model-parallel-size 8", "--expert-model-parallel-size 8 without --use-distributed-optimizer"),
        ("--context-parallel-size 2", "--context-parallel-size 2 without --use-distributed-optimizer"),
    ],
)
def test_experts_that_megatron_cuts_are_refused_by_name(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_megatron(text.split(), 8, MIXTURE)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--parallelism.tensor_parallel_degree 2", "torchtitan cuts each expert"),
        (
            "--parallelism.tensor_parallel_degree 2 --parallelism.expert_parallel_degree 2 "
            "--parallelism.no-enable_sequence_parallel",
            "tensor ranks that hold the same tokens",
        ),
    ],
)
def test_experts_that_torchtitan_cuts_are_refused_by_name(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_torchtitan(text.split(), 8, MIXTURE)


@pytest.mark.parametrize(
    ("layout", "model", "sentence"),
    [
        (Layout("megatron", data_shard=4, context=2), PROFILE, "no attention over a sequence"),
        (Layout("megatron", data_shard=8, expert=8), PROFILE, "no banks of experts"),
        (Layout("torchtitan", data_shard=16, expert=16), MIXTURE, "expert=16 does not divide 8 experts"),
        (
            Layout("megatron", context=8, tensor=2, context_kind="all_to_all"),
            attending().model_copy(update={"seq_len": 24}),
            "context=8 does not divide the sequence of 24",
        ),
    ],
)
def test_context_and_expert_ranks_that_the_model_does_not_allow_are_refused(
    layout: Layout, model: ModelProfile, sentence: str
) -> None:
    count = layout.data_shard * layout.context * layout.tensor
    machine = cluster_of(load_device("h100-80gb"), count, 8)

    with pytest.raises(ValueError, match=sentence):
        imported(layout, model, machine, TrainingSpec(global_batch=16, seq_len=model.seq_len))
