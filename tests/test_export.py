"""Plans go out to other frameworks and come back the same; what a target cannot say is refused or said aloud."""

import itertools
import json
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.exports.targets import torchtitan_job
from meshwright.planner.answers.search import SearchResult, search
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.exchange.accelerate import KEYS as ACCELERATE_KEYS
from meshwright.planner.exchange.accelerate import read_accelerate
from meshwright.planner.exchange.deepspeed import KEYS as DEEPSPEED_KEYS
from meshwright.planner.exchange.deepspeed import read_deepspeed
from meshwright.planner.exchange.export import export
from meshwright.planner.exchange.from_flags import read_document
from meshwright.planner.exchange.given import read_given
from meshwright.planner.exchange.imports import Layout, imported
from meshwright.planner.exchange.megatron import FLAGS as MEGATRON_FLAGS
from meshwright.planner.exchange.megatron import read_megatron
from meshwright.planner.exchange.megatron_layout import parse_layout
from meshwright.planner.exchange.targets import TARGETS, VERSIONS
from meshwright.planner.exchange.torchtitan import FLAGS as TORCHTITAN_FLAGS
from meshwright.planner.exchange.torchtitan import read_torchtitan
from meshwright.planner.plan.block_row import BlockRow, block_row
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.frameworks import DATA_OUTERMOST
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import Shape
from support.cli import run_plan, some_plan
from support.exported import NUM_BLOCKS, PROFILE, decoder, even_sizes, planned, read_back, value

EVEN = Shape(data_replicate=1, data_shard=2, tensor=2, pipeline=2, micro_batch=2, num_microbatches=4, schedule="1f1b")


MEGATRON_PLANS = {
    "DDP": planned(Shape(8, 1, 1, 1, 2, 4)),
    "ZeRO-1": planned(Shape(1, 8, 1, 1, 2, 4)),
    "ZeRO-1 in two instances": planned(Shape(2, 4, 1, 1, 2, 4)),
    "ZeRO-2": planned(Shape(1, 8, 1, 1, 2, 4, gradient_sync="every")),
    "ZeRO-3": planned(Shape(1, 8, 1, 1, 2, 4, gradient_sync="every"), reshard="all"),
    "TP": planned(Shape(1, 4, 2, 1, 2, 4)),
    "TP + SP": planned(Shape(1, 4, 2, 1, 2, 4, sequence=True)),
    "1F1B, even": planned(EVEN),
    "1F1B, uneven": planned(EVEN, (4, 6)),
    "interleaved, even": planned(replace(EVEN, schedule="interleaved", virtual_stages=2)),
    "interleaved, uneven": planned(replace(EVEN, schedule="interleaved", virtual_stages=2), (2, 3, 3, 2)),
    "data ranks outermost": planned(replace(EVEN, mesh_axes=DATA_OUTERMOST)),
    "recompute of all": planned(EVEN, again=(4, 4)),
    "recompute of some": planned(EVEN, again=(2, 2)),
    "recompute of attention": planned(EVEN, again=(4, 4), kind="attention"),
    "recompute of the feed-forward": planned(EVEN, again=(4, 4), kind="parts:mlp"),
    "context, all-gather": planned(Shape(1, 2, 2, 1, 2, 4, context=2, context_kind="all_gather")),
    "context, ring": planned(Shape(1, 4, 1, 1, 2, 4, context=2)),
}
TORCHTITAN_PLANS = {
    "DDP": planned(Shape(8, 1, 1, 1, 2, 1)),
    "FSDP, all given back": planned(Shape(1, 8, 1, 1, 2, 4, gradient_sync="every"), reshard="all"),
    "FSDP, head kept": planned(Shape(1, 8, 1, 1, 2, 4, gradient_sync="every"), reshard="inner"),
    "ZeRO-2": planned(Shape(1, 8, 1, 1, 2, 4, gradient_sync="every")),
    "HSDP": planned(Shape(2, 4, 1, 1, 2, 1), reshard="all"),
    "TP without SP": planned(Shape(1, 4, 2, 1, 2, 1)),
    "TP + SP": planned(Shape(1, 4, 2, 1, 2, 1, sequence=True)),
    "1F1B": planned(replace(EVEN, sequence=True)),
    "GPipe, uneven": planned(replace(EVEN, schedule="gpipe"), (4, 6)),
    "interleaved": planned(replace(EVEN, schedule="interleaved", virtual_stages=2), (2, 3, 3, 2)),
    "ZB-H1": planned(replace(EVEN, schedule="zb-h1", virtual_stages=2)),
    "ZB-V": planned(replace(EVEN, schedule="zb-v", virtual_stages=2)),
    "pipeline that gives back": planned(EVEN, reshard="all"),
    "recompute of all": planned(EVEN, again=(4, 4)),
    "context": planned(Shape(1, 2, 2, 1, 2, 1, context=2, context_kind="all_gather")),
}
ACCELERATE_PLANS = {
    "DDP": planned(Shape(8, 1, 1, 1, 2, 1)),
    "FSDP": planned(Shape(1, 8, 1, 1, 2, 1), reshard="all"),
    "FSDP, kept": planned(Shape(1, 8, 1, 1, 2, 4)),
    "HSDP with recompute": planned(Shape(2, 4, 1, 1, 2, 1), again=(8,), reshard="all"),
    "FSDP + TP": planned(Shape(1, 4, 2, 1, 2, 1), reshard="all"),
    "FSDP + CP": planned(Shape(1, 4, 1, 1, 2, 1, context=2, context_kind="all_to_all"), reshard="all"),
}
DEEPSPEED_PLANS = {
    "ZeRO-0": planned(Shape(8, 1, 1, 1, 2, 4)),
    "ZeRO-1": planned(Shape(1, 8, 1, 1, 2, 4)),
    "ZeRO-2": planned(Shape(1, 8, 1, 1, 2, 4, gradient_sync="every")),
    "ZeRO-3": planned(Shape(1, 8, 1, 1, 2, 4, gradient_sync="every"), again=(8,), reshard="all"),
    "ZeRO-1 + TP": planned(Shape(1, 4, 2, 1, 2, 4)),
    "optimizer on the host": planned(Shape(1, 8, 1, 1, 2, 4, offload_optimizer=True)),
}
ALL_PLANS = {
    "megatron": MEGATRON_PLANS,
    "torchtitan": TORCHTITAN_PLANS,
    "accelerate": ACCELERATE_PLANS,
    "deepspeed": DEEPSPEED_PLANS,
}
CASES = [pytest.param(t, plan, id=f"{t}: {name}") for t, plans in ALL_PLANS.items() for name, plan in plans.items()]


@pytest.mark.parametrize(("target", "plan"), CASES)
def test_a_plan_that_a_target_can_say_comes_back_the_same(target: str, plan: Plan) -> None:
    again = read_back(export(plan, target), plan)

    assert again == plan.model_copy(update={"prediction": None})


def every_shape() -> Iterator[tuple[Shape, str]]:
    """Layouts of eight GPUs: all splits, schedules, ways to shard and orders of ranks that the plan itself allows."""
    splits = [(r, s, t, 8 // (r * s * t)) for r, s, t in itertools.product((1, 2, 4, 8), repeat=3) if r * s * t <= 8]
    for r, s, t, p in splits:
        schedules = (
            [("none", 1)] if p == 1 else [("1f1b", 1), ("gpipe", 1), ("zb-h2", 1), ("zb-v", 2), ("interleaved", 2)]
        )
        for schedule, v in schedules:
            if p * v > NUM_BLOCKS:
                continue
            for sync, reshard in [("last", "none")] + [("every", "none"), ("last", "all"), ("every", "all")] * (s > 1):
                shape = Shape(r, s, t, p, 1, 8, t > 1, schedule, v, sync)  # type: ignore[arg-type]
                yield shape, reshard


@pytest.mark.parametrize("target", TARGETS)
def test_every_difference_between_a_plan_and_its_export_is_said_aloud(target: str) -> None:
    outcomes = {"same": 0, "said": 0, "refused": 0}
    silent = []
    for shape, reshard in every_shape():
        sizes = even_sizes(shape.pipeline * shape.virtual_stages)
        for again in ((), tuple(1 for _ in sizes), (1, *(0 for _ in sizes[1:])), tuple(-1 for _ in sizes)):
            plan = planned(shape, sizes, again=again, reshard=reshard)
            try:
                found = export(plan, target)
            except ValueError:
                outcomes["refused"] += 1
                continue
            same = read_back(found, plan) == plan
            outcomes["same" if same else "said"] += 1
            always = ("batches are said in the script",)
            if not same and not [note for note in found.notes if not note.startswith(always)]:
                silent.append(shape)

    assert silent == []
    assert min(outcomes.values()) > 0


REFUSED = [
    ("megatron", planned(replace(EVEN, schedule="zb-v", virtual_stages=2)), "schedule zb-v: .*--pin schedule=1f1b"),
    ("megatron", planned(EVEN, reshard="all"), "ZeRO-3 in a pipeline of 2: .*--pin pipeline=1"),
    ("megatron", planned(EVEN, again=(1, 4), kind="selective"), "--pin recompute=attention"),
    ("megatron", planned(replace(EVEN, num_microbatches=3, schedule="interleaved", virtual_stages=2)), "groups of 2"),
    ("megatron", planned(EVEN, again=(4, 4), kind="parts:self_attn"), "self_attn: not the feed-forward alone"),
    ("megatron", planned(EVEN, again=(4, 4), kind="parts:self_attn+mlp"), "self_attn \\+ mlp: not the feed-forward"),
    ("torchtitan", planned(EVEN, again=(1, 4), kind="parts:mlp"), "5 layers recompute parts of themselves"),
    ("accelerate", planned(Shape(1, 8, 1, 1, 2, 1), again=(8,), kind="parts:mlp"), "--pin recompute=full"),
    ("deepspeed", planned(Shape(1, 8, 1, 1, 2, 4), again=(8,), kind="parts:mlp"), "no option of DeepSpeed"),
    ("torchtitan", planned(Shape(1, 1, 8, 1, 2, 4)), "would run in fp32"),
    ("torchtitan", planned(replace(EVEN, gradient_sync="every")), "once, after the last micro-batch"),
    ("torchtitan", planned(replace(EVEN, schedule="zb-h2")), "schedule zb-h2"),
    ("torchtitan", planned(EVEN, again=(4, 4), kind="attention"), "recompute=attention is no mode"),
    ("torchtitan", planned(Shape(1, 8, 1, 1, 2, 4, offload_optimizer=True)), "optimizer runs on the host"),
    ("accelerate", planned(EVEN), "pipeline=2: Accelerate has stages in code"),
    ("accelerate", planned(Shape(1, 4, 2, 1, 2, 1, sequence=True)), "--pin sequence=off"),
    ("accelerate", planned(Shape(1, 1, 8, 1, 2, 1)), "tensor=8 without shards"),
    ("accelerate", planned(Shape(1, 8, 1, 1, 2, 1), again=(8,), kind="selective"), "--pin recompute=full"),
    ("deepspeed", planned(EVEN), "pipeline=2: DeepSpeed has stages in code"),
    ("deepspeed", planned(Shape(2, 4, 1, 1, 2, 1)), "2 replicas of 4 shards"),
    ("deepspeed", planned(Shape(1, 4, 2, 1, 2, 1), reshard="all"), "ZeRO-3 with tensor=2"),
]


@pytest.mark.parametrize(("target", "plan", "sentence"), REFUSED)
def test_what_a_target_cannot_do_is_refused_with_a_way_out(target: str, plan: Plan, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        export(plan, target)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "accelerate"])
def test_recompute_of_two_kinds_becomes_the_one_that_holds_least_and_says_so(target: str) -> None:
    plan = planned(EVEN if target != "accelerate" else Shape(1, 8, 1, 1, 2, 1), again=(3, 3))
    partly = [layer for layer in plan.stages[0].layers if layer.recompute == "full"][-1]
    layers = [x.model_copy(update={"recompute": "selective"}) if x == partly else x for x in plan.stages[0].layers]
    first = plan.stages[0].model_copy(update={"layers": tuple(layers)})
    mixed = plan.model_copy(update={"stages": (first, *plan.stages[1:])})

    found = export(mixed, target)

    again = {x.recompute for s in read_back(found, plan).stages for x in s.layers}
    held, kept = estimate(read_back(found, plan), PROFILE), estimate(mixed, PROFILE)
    assert any("selective recompute of 1 blocks becomes full" in note for note in found.notes)
    assert again <= {"full", "none"}
    assert held.peak_device_bytes <= kept.peak_device_bytes


def test_offload_is_refused_by_every_target() -> None:
    plan = planned(Shape(1, 8, 1, 1, 2, 1))
    layers = plan.stages[0].layers
    hosted = (layers[0].model_copy(update={"offload": True}), *layers[1:])

    for target in TARGETS:
        with pytest.raises(ValueError, match="1 layers keep their activations on the host"):
            export(plan.model_copy(update={"stages": (plan.stages[0].model_copy(update={"layers": hosted}),)}), target)


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(ValueError, match="cannot export to 'nemo': choose megatron, torchtitan, accelerate, deepspeed"):
        export(planned(EVEN), "nemo")


def test_recompute_that_differs_between_stages_takes_the_most_and_says_so() -> None:
    found = export(planned(EVEN, again=(3, 1)), "megatron")

    assert value(found, "--recompute-num-layers") == "3"
    assert any("3, 1 blocks of the stages becomes 3 of each" in note for note in found.notes)


def test_an_order_of_ranks_that_a_target_does_not_have_is_said_aloud() -> None:
    odd = replace(EVEN, mesh_axes=("tensor", "pipeline", "data_replicate", "data_shard", "context"))

    for target in ("megatron", "torchtitan"):
        notes = export(planned(odd), target).notes

        assert any("orders ranks tensor > pipeline > data_shard, outermost first" in note for note in notes)


def test_attention_that_a_plan_leaves_whole_is_said_aloud() -> None:
    plan = planned(EVEN)
    attention = tuple(f"model.layers.{i}.attention" for i in range(NUM_BLOCKS))
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"attention_modules": attention})})

    for target in ("megatron", "torchtitan"):
        notes = export(plan, target).notes

        assert any("the attention of 8 layers stays whole in the plan, on each of 2 tensor ranks" in n for n in notes)


def test_feed_forwards_and_whole_layers_that_a_target_cuts_are_said_aloud() -> None:
    plan = planned(EVEN)
    attention = plan.classes[0].cuts[0].model_copy(update={"kind": "attention"})
    plan = plan.model_copy(update={"classes": (plan.classes[0].model_copy(update={"cuts": (attention,)}),)})
    several_rows = some_plan(shard=2, tensor=2)

    assert any("of 8 layers only the attention is cut in the plan" in note for note in export(plan, "megatron").notes)
    for target in ("torchtitan", "accelerate"):
        notes = export(several_rows, target).notes

        assert any(
            note.startswith("layer0, layer9 stay whole in the plan, on each of 2 tensor ranks") for note in notes
        )


def test_stages_become_a_layout_string_only_where_they_are_uneven() -> None:
    even, uneven = export(planned(EVEN), "megatron"), export(planned(EVEN, (4, 6)), "megatron")

    assert "--pipeline-model-parallel-layout" not in even.words
    assert value(uneven, "--pipeline-model-parallel-layout") == "Et*3|t*5L"


def test_stages_of_torchtitan_carry_its_own_names() -> None:
    words = export(planned(EVEN, (4, 6)), "torchtitan").words
    first = words.index("--parallelism.module_fqns_per_model_part") + 1

    assert words[first] == "tok_embeddings,layers.0,layers.1,layers.2"
    assert words[first + 1] == "layers.3,layers.4,layers.5,layers.6,layers.7,norm,lm_head"


def test_a_model_of_several_rows_goes_to_torchtitan_and_not_to_megatron() -> None:
    plan = some_plan(shard=2, pipeline=4)

    assert block_row(plan.stages[0].layers) is None
    with pytest.raises(ValueError, match="no single row of numbered blocks"):
        export(plan, "megatron")
    first = export(plan, "torchtitan").words.index("--parallelism.module_fqns_per_model_part") + 1
    assert export(plan, "torchtitan").words[first] == "layer0,layer1"


def test_the_row_of_blocks_is_what_is_numbered_from_zero() -> None:
    assert block_row(PROFILE.layers) == BlockRow(1, NUM_BLOCKS, 1)
    assert block_row(PROFILE.layers[2:]) is None
    assert block_row([*PROFILE.layers[:-1], *PROFILE.layers[1:]]) is None


# The options themselves: against a table with the version named, and against the targets' own code where it is here.


@pytest.mark.parametrize(("target", "plan"), CASES)
def test_every_option_is_a_documented_one(target: str, plan: Plan) -> None:
    found = export(plan, target)
    options = {word for word in found.words if word.startswith("--")}

    if target == "megatron":
        assert options <= MEGATRON_FLAGS.known
    elif target == "torchtitan":
        assert {option.removeprefix("--").replace(".no-", ".") for option in options} <= TORCHTITAN_FLAGS.known
        modes = TORCHTITAN_FLAGS.words["activation_checkpoint.mode"]
        assert found.words[-1] in {f"activation_checkpoint:{mode}" for mode in modes}
    else:
        keys = ACCELERATE_KEYS if target == "accelerate" else DEEPSPEED_KEYS
        sections = {name: found.document.get(name, {}) for name in keys if name} | {"": found.document}
        assert all(set(section) <= keys[name] for name, section in sections.items())
    assert VERSIONS[found.target] in found.text


def theirs(name: str) -> ModuleType:
    """A module of a target, or a skip where it is not installed; its own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = pytest.importorskip(name)
    return module


def test_accelerate_reads_every_configuration(tmp_path: Path) -> None:
    config = theirs("accelerate.commands.config.config_args").ClusterConfig
    sizes = theirs("accelerate.parallelism_config").ParallelismConfig
    for plan in ACCELERATE_PLANS.values():
        (tmp_path / "config.yaml").write_text(export(plan, "accelerate").text)

        read = config.from_yaml_file(tmp_path / "config.yaml")

        assert read.num_processes == plan.degrees.num_devices
        if read.parallelism_config:
            names = {key.removeprefix("parallelism_config_"): v for key, v in read.parallelism_config.items()}
            names.pop("cp_comm_strategy", None)
            assert sizes(**names).total_size == plan.degrees.num_devices


def test_torchtitan_parses_every_command_line() -> None:
    for name in ("tyro", "torchtitan.config.configs"):
        theirs(name)
    for plan in TORCHTITAN_PLANS.values():
        read = torchtitan_job(export(plan, "torchtitan").words)

        found = read.parallelism
        assert found.tensor_parallel_degree == plan.degrees.tensor
        assert found.data_parallel_shard_degree == plan.degrees.data_shard
        assert len(found.module_fqns_per_model_part or [()]) == len(plan.stages)
        assert found.enable_sequence_parallel == (plan.sequence_parallel or plan.degrees.tensor == 1)


def test_megatron_reads_every_layout_string() -> None:
    layouts = theirs("megatron.core.transformer.pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    for text, counts in LAYOUTS:
        read = layouts.parse_str_to_list(text)

        assert tuple(sum(layer.name == "decoder" for layer in stage) for stage in read) == counts


def test_deepspeed_reads_every_zero_configuration() -> None:
    config = theirs("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    for plan in DEEPSPEED_PLANS.values():
        read = config(**export(plan, "deepspeed").document["zero_optimization"])

        assert int(read.stage) == plan.zero_stage


LAYOUTS = [
    ("Et*3|t*5L", (3, 5)),
    ("E|(tt|)*4L", (0, 2, 2, 2, 2, 0)),
    ("Ett|t,t|(t)*2|t*2,L", (2, 2, 2, 2)),
    ("E(t|)*8L", (1, 1, 1, 1, 1, 1, 1, 1, 0)),
]


@pytest.mark.parametrize(("text", "counts"), LAYOUTS)
def test_a_layout_string_is_the_blocks_of_each_stage(text: str, counts: tuple[int, ...]) -> None:
    assert parse_layout(text, 1, NUM_BLOCKS) == counts


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Et*7L", "7 blocks, the model has 8"),
        ("t*8L", "write E, then the blocks"),
        ("Et*8|LE", "write E, then the blocks"),
        ("Et*7|||tL", "stage 1 is empty"),
        ("Et*4|t*4|L", "3 stages are no multiple of the 2"),
        ("Et*4|(t*4L", "bracket is not closed"),
        ("Et*8|mL", "multi-token prediction"),
    ],
)
def test_a_wrong_layout_string_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_layout(text, 2, NUM_BLOCKS)


# Import


def megatron(text: str, num_devices: int = 8) -> Layout:
    return read_megatron(shlex.split(text), num_devices, PROFILE)


def torchtitan(text: str, num_devices: int = 8) -> Layout:
    return read_torchtitan(shlex.split(text), num_devices, PROFILE)


def test_what_is_no_part_of_the_layout_is_ignored_by_name() -> None:
    found = megatron("--tensor-model-parallel-size 2 --lr 1e-4 --swiglu --data-path a b --micro-batch-size 1 --fp16")

    assert found.ignored == ("--lr", "--swiglu", "--data-path")
    assert (found.tensor, found.data_replicate, found.micro_batch, found.precision) == (2, 4, 1, "fp16")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--hierarchical-context-parallel-sizes 2 4", "several levels are not priced"),
        ("--tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size"),
        ("--tensor-model-parallel-size 3", "does not divide 8 GPUs"),
        ("--tensor-model-parallel-size two", "whole number of at least 1"),
        ("--num-layers 12", "has 8 blocks"),
        ("--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 2", "do not spread evenly"),
        ("--recompute-modules layernorm", "core_attn and mlp and moe can be priced"),
        ("--recompute-granularity selective --recompute-modules moe", "decoder has no row of blocks with such a part"),
        ("--recompute-granularity full", "needs --recompute-method"),
        ("--sequence-parallel 1", "takes no value"),
        ("tensor 8", "cannot read 'tensor'"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--pipeline-model-parallel-layout Et*8|L",
            "takes one of them",
        ),
    ],
)
def test_a_megatron_argument_that_cannot_be_priced_is_refused_by_name(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        megatron(text)


def test_megatron_counts_blocks_as_its_arguments_say() -> None:
    accounted = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    pipelined = "--pipeline-model-parallel-size"

    assert megatron(f"{pipelined} 2").stage_sizes == (5, 5)
    assert megatron(f"{pipelined} 5 {accounted}", 10).stage_sizes == (2, 2, 2, 2, 2)
    assert megatron(f"{pipelined} 4 --decoder-first-pipeline-num-layers 2").stage_sizes == (3, 2, 2, 3)
    assert megatron(f"{pipelined} 4 --decoder-last-pipeline-num-layers 5").stage_sizes == (2, 1, 1, 6)
    assert megatron(f"{pipelined} 2 --num-layers-per-virtual-pipeline-stage 2").stage_sizes == (3, 2, 2, 3)


def test_torchtitan_cuts_as_its_own_rule_does() -> None:
    """torchtitan counts embedding and head as one layer each: 10 over 4 stages are 3, 3, 2 and 2."""
    found = torchtitan("--parallelism.pipeline_parallel_degree 4")

    assert found.stage_sizes == (3, 3, 2, 2)
    assert (found.schedule, found.recompute, found.reshard, found.micro_batch) == ("1f1b", "selective", "none", 1)


def test_both_spellings_of_torchtitan_are_read() -> None:
    old = torchtitan("--parallelism.tensor_parallel_degree=2 --activation_checkpoint.mode=full --training.steps 10")
    new = torchtitan("--parallelism.tensor-parallel-degree 2 --training.steps 10 activation-checkpoint:full")

    assert old == new
    assert (new.tensor, new.data_shard, new.recompute, new.sequence) == (2, 4, "full", True)
    assert new.ignored == ("--training.steps",)


def test_a_megatron_argument_that_is_priced_otherwise_is_said_with_its_value() -> None:
    text = "--tensor-model-parallel-size 2 --micro-batch-size 1 --bf16 --rampup-batch-size 16 16 5859375"

    found = read_megatron([*text.split(), "--grad-reduce-in-bf16"], 8, PROFILE)

    growing, halved = found.notes
    assert growing.startswith("--rampup-batch-size 16 16 5859375 is not priced: steps are priced at the whole global")
    assert halved.startswith("--grad-reduce-in-bf16 is not priced: gradients are priced as reduced in fp32")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--parallelism.pipeline_parallel_schedule DualPipeV", "ZBVZeroBubble can be priced"),
        ("--parallelism.data_parallel_shard_degree 4", "8 ranks are left"),
        ("--parallelism.hyper_degree 2", "is no flag of torchtitan's parallelism"),
        ("--training.enable_cpu_offload", "on the host are not priced"),
        ("--training.dtype bfloat16", "float32 can be priced"),
        ("--training.local_batch_sise 2", "did you mean training.local_batch_size"),
        (
            "--parallelism.pipeline_parallel_degree 2 --parallelism.module_fqns_per_model_part layers.0 layers.1",
            "must name blocks 0 to 7",
        ),
    ],
)
def test_a_torchtitan_flag_that_cannot_be_priced_is_refused_by_name(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        torchtitan(text)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"distributed_type": "XLA"}, "MULTI_GPU, NO are read"),
        ({"distributed_type": "FSDP", "num_processes": 4}, "give --gpus 4"),
        ({"distributed_type": "FSDP", "fsdp_confg": {}}, "did you mean fsdp_config"),
        ({"distributed_type": "FSDP", "colour": 1}, "colour is no key of Accelerate"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}}, "on the host are not priced"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "ALL"}}, "choose FULL_SHARD"),
        ({"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_sp_size": 2}}, "Ulysses"),
        ({"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_tp_size": "2"}}, "whole number"),
    ],
)
def test_an_accelerate_key_that_cannot_be_priced_is_refused_by_name(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_accelerate(document, 8)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"zero_optimization": {"stage": 4}}, "choose 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param: .*not priced"),
        ({"zero_optimisation": {"stage": 3}}, "did you mean zero_optimization"),
        ({"pipeline": {"stages": 2}}, "PipelineModule"),
        ({"kind": "meshwright-plan", "stages": []}, "none of its keys says a layout of DeepSpeed"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, "change one"),
    ],
)
def test_a_deepspeed_key_that_cannot_be_priced_is_refused_by_name(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_deepspeed(document, 8)


def test_two_of_deepspeeds_batch_numbers_give_the_third() -> None:
    steps = read_deepspeed({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8)
    sizes = read_deepspeed({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8)

    assert (steps.micro_batch, steps.global_batch) == (sizes.micro_batch, sizes.global_batch) == (2, 64)


def test_what_is_left_open_is_chosen_at_its_best() -> None:
    plan = planned(Shape(1, 8, 1, 1, 2, 4))
    open_layout = Layout("accelerate", data_shard=8)

    best = imported(open_layout, PROFILE, plan.cluster, plan.training)
    fixed = [
        imported(replace(open_layout, micro_batch=size, recompute=kind), PROFILE, plan.cluster, plan.training)
        for size in (1, 2, 4, 8)
        for kind in ("none", "full")
    ]

    fitting = [found.estimate.step_time_s for found in fixed if found.estimate.fits]
    assert best.estimate.step_time_s == min(fitting)
    assert len({found.estimate.step_time_s for found in fixed}) > 1


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout("megatron", tensor=16), "tensor=16 does not divide 8"),
        (Layout("megatron", data_replicate=8, micro_batch=3), "is no multiple of 24"),
        (Layout("megatron", data_shard=8, stage_sizes=(3, 3)), "the stages hold 6 layers, decoder has 10"),
        (Layout("megatron", data_shard=4, expert=3, tensor=2), "the model has no banks of experts"),
    ],
)
def test_a_layout_that_does_not_go_with_the_job_is_refused(layout: Layout, sentence: str) -> None:
    plan = planned(Shape(1, 8, 1, 1, 2, 4))

    with pytest.raises(ValueError, match=sentence):
        imported(layout, PROFILE, plan.cluster, plan.training)


# Files and commands


def test_a_file_of_arguments_is_read_as_it_was_written(tmp_path: Path) -> None:
    for target in ("megatron", "torchtitan"):
        found = export(planned(EVEN, (4, 6)), target)
        (tmp_path / "args.sh").write_text(found.text)

        assert read_given(found.target, str(tmp_path / "args.sh")).command.words == found.words


def test_a_yaml_and_a_json_are_read_as_they_were_written(tmp_path: Path) -> None:
    for target, name in (("accelerate", "a.yaml"), ("deepspeed", "d.json")):
        found = export(planned(Shape(1, 8, 1, 1, 2, 4)), target)
        (tmp_path / name).write_text(found.text)

        read = read_document(tmp_path / name)

        assert {key: item for key, item in read.items() if key != "_comment"} == found.document


def test_export_prints_what_a_shell_can_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(EVEN, (4, 6)).save(tmp_path / "plan.json")

    assert run_plan("export", str(tmp_path / "plan.json"), "--to", "megatron") == 0
    printed = capsys.readouterr().out
    assert "MEGATRON_ARGS=(\n" in printed
    assert "    --pipeline-model-parallel-layout 'Et*3|t*5L'\n" in printed


def test_export_says_what_the_file_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(EVEN, again=(3, 1)).save(tmp_path / "plan.json")
    target = tmp_path / "args.sh"

    assert run_plan("export", str(tmp_path / "plan.json"), "--to", "megatron", "-o", str(target)) == 0
    assert "becomes 3 of each" in " ".join(capsys.readouterr().out.split())
    assert "# Not said here: recompute of 3, 1 blocks" in target.read_text()


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "accelerate", "deepspeed"])
def test_export_replaces_its_own_files_and_no_others(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, exported = tmp_path / "plan.json", tmp_path / "exported"
    planned(Shape(8, 1, 1, 1, 2, 4)).save(plan)
    kept = plan.read_text()

    assert run_plan("export", str(plan), "--to", target, "-o", str(plan)) == 2

    assert "exists and is no exported plan, so it is not replaced" in " ".join(capsys.readouterr().err.split())
    assert plan.read_text() == kept
    for _ in range(2):
        assert run_plan("export", str(plan), "--to", target, "-o", str(exported)) == 0


def test_export_refuses_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(EVEN).save(tmp_path / "plan.json")

    assert run_plan("export", str(tmp_path / "plan.json"), "--to", "deepspeed") == 2
    assert "pipeline=2: DeepSpeed has stages in code" in capsys.readouterr().err


ARGS = "--tensor-model-parallel-size 4 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 32 --bf16"


def test_a_refusal_names_only_targets_that_take_the_plan() -> None:
    stages = planned(replace(EVEN, schedule="zb-h2"))

    with pytest.raises(ValueError, match=r"in its settings; plan with --pin pipeline=1$"):
        export(stages, "accelerate")
    with pytest.raises(ValueError, match=r"in its settings; export to megatron or torchtitan, or plan with"):
        export(planned(EVEN), "accelerate")


def test_check_prices_a_set_up_and_the_better_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PROFILE.save(tmp_path / "profile.json")
    words = ("check", str(tmp_path / "profile.json"), "--gpus", "8", "--device", "h100-80gb", "--json")

    assert run_plan(*words, "--megatron-args", ARGS + " --lr 1e-4", "-o", str(tmp_path / "mine.json")) == 0
    found = json.loads(capsys.readouterr().out)
    yours, better = found["setups"][1], found["setups"][0]
    assert found["fits"] is True
    assert found["ignored"] == ["--lr"]
    assert better["label"] == "planned"
    assert yours["label"] == "yours (Megatron-LM)"
    plan = Plan.model_validate_json((tmp_path / "mine.json").read_text())
    assert (plan.degrees.tensor, plan.degrees.data_shard, plan.training.software) == (4, 2, "megatron-core")


def test_what_check_plans_is_never_slower_than_the_set_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_early(*given: Any, pins: Pins, **more: Any) -> SearchResult:
        return search(*given, pins=replace(pins, pipeline=4, micro_batch=1), **more)

    PROFILE.save(tmp_path / "profile.json")
    monkeypatch.setattr("meshwright.planner.answers.search.search", ends_early)
    words = ("check", str(tmp_path / "profile.json"), "--gpus", "8", "--device", "h100-80gb", "--json")

    assert run_plan(*words, "--megatron-args", "--use-distributed-optimizer --micro-batch-size 4 --bf16") == 0
    better, yours = json.loads(capsys.readouterr().out)["setups"]

    assert better["degrees"] == yours["degrees"]
    assert yours["verdict"] == "as fast as the plan"


def test_check_says_what_does_not_fit_and_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder(3.0).save(tmp_path / "profile.json")
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    words = ("check", str(tmp_path / "profile.json"), "--gpus", "8", "--device", "rtx-4090")

    code = run_plan(*words, "--accelerate", str(tmp_path / "a.yaml"), "--global-batch", "8")

    printed = " ".join(capsys.readouterr().out.split())
    assert code == 3
    assert "does not fit: every GPU needs" in printed
    assert "yours DDP 8" in printed
    assert "planned nothing" not in printed


@pytest.mark.slow
def test_check_says_where_no_plan_fits_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder(30.0).save(tmp_path / "profile.json")
    (tmp_path / "d.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    words = ("check", str(tmp_path / "profile.json"), "--gpus", "8", "--device", "rtx-4090")

    code = run_plan(*words, "--deepspeed", str(tmp_path / "d.json"))

    printed = " ".join(capsys.readouterr().out.split())
    assert code == 3
    assert "planned nothing: " in printed


def test_check_takes_one_kind_of_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PROFILE.save(tmp_path / "profile.json")

    assert run_plan("check", str(tmp_path / "profile.json"), "--gpus", "8") == 2
    assert "give one of --megatron-args" in capsys.readouterr().err
