"""Set-up strings are read into the degrees people mean."""

import re

import pytest

from meshwright.planner.answers.guidance import LONG_SEQUENCE, NAMED_RULES, named_rules
from meshwright.planner.plan.setups import Setup, parse_limits, parse_pins, parse_setup
from meshwright.profiler.machine.cluster import cluster_of, load_device
from support.synthetic import layer_class, profile, with_attention, with_experts


def degrees(text: str, num_devices: int = 8, devices_per_host: int = 8) -> tuple[int, int, int, int]:
    setup = parse_setup(text, num_devices, devices_per_host)
    return setup.data_replicate, setup.data_shard, setup.tensor, setup.pipeline


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ddp", (8, 1, 1, 1)),
        ("fsdp", (1, 8, 1, 1)),
        ("FSDP", (1, 8, 1, 1)),
        ("hsdp:4", (2, 4, 1, 1)),
        ("tp=8", (1, 1, 8, 1)),
        ("tp=4 pp=2", (1, 1, 4, 2)),
        ("tp=4,pp=2", (1, 1, 4, 2)),
        ("fsdp + tp=2", (1, 4, 2, 1)),
        ("tp=2", (4, 1, 2, 1)),
        ("zero=1 tp=2", (1, 4, 2, 1)),
        ("fsdp=4 ddp=2", (2, 4, 1, 1)),
        ("fsdp=4", (2, 4, 1, 1)),
        ("dp=4 tp=2", (4, 1, 2, 1)),
        ("pipeline=8", (1, 1, 1, 8)),
    ],
)
def test_gpus_that_are_left_over_become_data_ranks(text: str, expected: tuple[int, int, int, int]) -> None:
    assert degrees(text) == expected


@pytest.mark.parametrize("text", ["ddp", "fsdp", "hsdp", "hsdp:4", "tp=4 pp=2", "tp=2 zero=1", "pp=4 fsdp", "tp=8"])
@pytest.mark.parametrize(("num_devices", "devices_per_host"), [(8, 8), (16, 8), (24, 8), (64, 4)])
def test_degrees_multiply_to_the_gpus(text: str, num_devices: int, devices_per_host: int) -> None:
    assert parse_setup(text, num_devices, devices_per_host).num_devices == num_devices


def test_hsdp_alone_shards_within_a_host() -> None:
    assert degrees("hsdp", num_devices=16) == (2, 8, 1, 1)
    assert degrees("hsdp tp=2", num_devices=16) == (2, 4, 2, 1)


@pytest.mark.parametrize(
    ("text", "reshard", "gradient_sync"),
    [("fsdp", True, "every"), ("zero=2", False, "every"), ("zero=1", False, "last"), ("ddp", False, "last")],
)
def test_zero_names_are_resharding_and_synchronisation(text: str, reshard: bool, gradient_sync: str) -> None:
    setup = parse_setup(text, 8, 8)

    assert (setup.reshard, setup.gradient_sync) == (reshard, gradient_sync)


def test_what_is_said_is_kept_and_the_rest_is_left_open() -> None:
    said = parse_setup("tp=4 pp=2 zero=1 mb=2 recompute=full schedule=1f1b sp=on", 16, 8)

    assert said == Setup(
        label="tp=4 pp=2 zero=1 mb=2 recompute=full schedule=1f1b sp=on",
        data_shard=2,
        tensor=4,
        pipeline=2,
        micro_batch=2,
        recompute="full",
        schedule="1f1b",
        sequence=True,
    )
    open_choices = parse_setup("tp=4 pp=2", 16, 8)
    assert (open_choices.micro_batch, open_choices.recompute, open_choices.schedule) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot read ''"),
        ("dpp", "cannot read 'dpp'"),
        ("tp=", "cannot read 'tp='"),
        ("tp=x", "tensor=x: give a whole number"),
        ("tp=0", "tensor=0: give a whole number"),
        ("tp=4pp=2", "a space between two words: tensor=4 pp=2"),
        ("tp=3", "does not divide 8 GPUs"),
        ("tp=8 pp=2", "does not divide 8 GPUs"),
        ("tp=2 tp=4", "says tensor twice"),
        ("ddp fsdp", "says kind twice"),
        ("ddp zero=3", "zero=3 contradicts ddp"),
        ("fsdp zero=0", "zero=0 contradicts fsdp"),
        ("hsdp:3", "choose degrees that multiply to 8"),
        ("hsdp:16", "choose degrees that multiply to 8"),
        ("dp=2 tp=2", "4 data ranks are left"),
        ("zero=4", "choose 0 or 1 or 2 or 3"),
        ("tp=8 schedule=1f1b", "needs a pipeline"),
        ("tp=8 v=2", "v=2 needs a pipeline"),
        ("recompute=some", "choose none or attention or selective or full"),
        ("pp=8 schedule=chimera", "choose gpipe or 1f1b"),
        ("pp=8 schedule=zbv", "did you mean zb-v"),
        ("fsdp sp=on", "goes beside tensor parallelism"),
        ("mb=1.5", "whole number"),
    ],
)
def test_a_wrong_word_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_setup(text, 8, 8)


def test_every_schedule_and_kind_of_recompute_can_be_said() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"):
        for recompute in ("none", "attention", "selective", "full"):
            said = parse_setup(f"pp=4 v=2 schedule={schedule} recompute={recompute}", 8, 8)
            pinned = parse_pins([f"pp=4 v=2 schedule={schedule.upper()} recompute={recompute}"])

            assert (said.schedule, said.virtual_stages, said.recompute) == (schedule, 2, recompute)
            assert pinned == {"pipeline": 4, "virtual_stages": 2, "schedule": schedule, "recompute": recompute}


@pytest.mark.parametrize("text", ["tp=2 recompute=parts:mlp+self_attn mb=2", "tp=2+recompute:Parts:mlp+self_attn+mb=2"])
def test_parts_of_layers_keep_their_plus_signs(text: str) -> None:
    said = parse_setup(text, 8, 8)

    assert (said.tensor, said.micro_batch, said.recompute) == (2, 2, "parts:mlp+self_attn")
    assert parse_pins(["recompute=parts:Attn.Core"]) == {"recompute": "parts:Attn.Core"}
    assert parse_pins(["recompute=parts"]) == {"parts": True}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("recompute=parts:", "is not one of none, attention, selective, full, or parts:NAME"),
        ("recompute=parts:mlp+mlp.up", "mlp.up runs again with mlp already"),
        ("recompute=part:mlp", "did you mean|choose none"),
    ],
)
def test_parts_that_cannot_be_read_are_named(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"--setup .*({sentence})"):
        parse_setup(text, 8, 8)


def test_a_sequence_takes_on_and_off_or_ranks_that_share_its_tokens() -> None:
    assert parse_pins(["sequence=on"]) == {"sequence": True}
    assert parse_pins(["sequence=8"]) == {"sequence_ways": 8}


def test_limits_take_the_same_words_but_only_numbers() -> None:
    assert parse_limits("tp=8 mb=2") == {"tensor": 8, "micro_batch": 2}
    with pytest.raises(ValueError, match="recompute has no largest value"):
        parse_limits("recompute=full")


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("tp=4 cp=2 ep=8 cp_kind=ring", 8, (1, 1, 4, 2, 8, "ring")),
        ("tp=4 cp=2 ep=8", 16, (1, 2, 4, 2, 8, None)),
        ("cp=2", 8, (4, 1, 1, 2, 1, None)),
        ("cp=4 fsdp cp_kind=all-to-all", 8, (1, 2, 1, 4, 1, "all_to_all")),
        ("cp=2 cp_kind=ulysses", 4, (2, 1, 1, 2, 1, "all_to_all")),
        ("ep=8", 8, (1, 8, 1, 1, 8, None)),
        ("hsdp cp=2", 16, (2, 4, 1, 2, 1, None)),
    ],
)
def test_context_and_expert_ranks_are_read(text: str, gpus: int, expected: tuple[object, ...]) -> None:
    said = parse_setup(text, gpus, 8)

    found = said.data_replicate, said.data_shard, said.tensor, said.context, said.expert, said.context_kind
    assert found == expected
    assert said.num_devices == gpus


def test_experts_are_spread_over_shards_that_keep_what_they_gather_unless_said_otherwise() -> None:
    said, sharded = parse_setup("ep=8", 8, 8), parse_setup("ep=8 fsdp", 8, 8)

    assert (said.data_shard, said.reshard, said.gradient_sync) == (8, False, "last")
    assert (sharded.data_shard, sharded.reshard, sharded.gradient_sync) == (8, True, "every")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cp=3", "context = 3 does not divide 8 GPUs, as 2 or 4 would"),
        ("cp_kind=ring", "needs context ranks; add cp=2"),
        ("cp=2 cp_kind=rings", "did you mean ring"),
        ("ep=4 ddp", "expert=4 does not divide the 1 ranks that hold tokens of their own"),
        ("tp=2 ep=16", "expert=16 does not divide the 8 ranks"),
    ],
)
def test_context_and_expert_ranks_that_cannot_be_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_setup(text, 8, 8)


def test_a_wrong_word_is_told_with_the_flag_it_came_by() -> None:
    with pytest.raises(ValueError, match="--why-not 'tp=3'"):
        parse_setup("tp=3", 8, 8, "--why-not")


def test_pins_take_the_same_words() -> None:
    pins = parse_pins(["tp=4", "recompute=full micro-batch=2", "sp=off"])

    assert pins == {"tensor": 4, "recompute": "full", "micro_batch": 2, "sequence": False}


@pytest.mark.parametrize("text", ["tensor=x", "zero=4", "colour=red", "schedule=fast", "fsdp"])
def test_a_wrong_pin_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=text.partition("=")[0]):
        parse_pins([text])


@pytest.mark.parametrize(("count", "per_host"), [(1, 1), (6, 6), (8, 8), (24, 8), (64, 8), (16384, 8)])
def test_every_attempt_of_a_framework_uses_all_gpus(count: int, per_host: int) -> None:
    rules = named_rules(cluster_of(load_device("h100-80gb"), count, per_host))

    assert tuple(rule.name for rule in rules) == NAMED_RULES
    for rule in rules:
        for pins in rule.attempts:
            assert (pins.data_shard or 1) * (pins.tensor or 1) * (pins.pipeline or 1) == count


def test_megatron_takes_as_little_model_parallelism_as_fits_tensor_first() -> None:
    megatron, torchtitan, *_ = named_rules(cluster_of(load_device("h100-80gb"), 64, 8))

    tried = [(pins.tensor, pins.pipeline) for pins in megatron.attempts]
    assert tried[:5] == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2)]
    assert all(pins.gradient_sync == "last" and pins.reshard is False for pins in megatron.attempts)
    assert [(pins.tensor, pins.pipeline) for pins in torchtitan.attempts[:3]] == [(1, 1), (8, 1), (4, 1)]


def test_zero_stages_are_resharding_and_synchronisation() -> None:
    zero = {rule.name: rule.attempts[0] for rule in named_rules(cluster_of(load_device("h100-80gb"), 8))}

    found = {name: (pins.reshard, pins.gradient_sync) for name, pins in zero.items() if name.startswith("deepspeed")}

    assert found == {
        "deepspeed-zero1": (False, "last"),
        "deepspeed-zero2": (False, "every"),
        "deepspeed-zero3": (True, "every"),
    }


def test_experts_are_spread_inside_the_node_by_those_who_know_mixtures() -> None:
    mixture = profile([with_experts(layer_class("mixture", 1e9, 1000, saved=1e6, inputs=1e5), 4)], [0, 0])
    on = cluster_of(load_device("h100-80gb"), 64, 8)

    megatron, torchtitan, *zero = named_rules(on, mixture)

    assert {pins.expert for rule in (megatron, torchtitan) for pins in rule.attempts if pins.pipeline == 1} == {4}
    assert all((pins.data_shard or 1) % (pins.expert or 1) == 0 for pins in megatron.attempts)
    assert {pins.expert for rule in zero for pins in rule.attempts} == {1}
    assert {pins.expert for rule in named_rules(on) for pins in rule.attempts} <= {None, 1}


@pytest.mark.parametrize(("tokens", "asked"), [(LONG_SEQUENCE // 2, []), (LONG_SEQUENCE, [2, 4, 8])])
def test_long_sequences_are_split_before_the_layers_are(tokens: int, asked: list[int]) -> None:
    block = with_attention(layer_class("block", 1e12, 1000, saved=1e6, inputs=1e5, heads=8), 8, 1e9)
    model = profile([block], [0, 0]).model_copy(update={"seq_len": tokens, "attention_modules": ("attention",)})

    megatron, *_ = named_rules(cluster_of(load_device("h100-80gb"), 64, 8), model)

    attempts = [(pins.context, pins.pipeline) for pins in megatron.attempts if pins.context or pins.pipeline != 1]
    assert [context for context, pipeline in attempts if context] == asked
    assert [pipeline for _, pipeline in attempts[: len(asked)]] == [1] * len(asked)
    for pins in megatron.attempts:
        assert (pins.data_shard or 1) * (pins.tensor or 1) * (pins.pipeline or 1) * (pins.context or 1) == 64


@pytest.mark.parametrize(
    ("text", "told"),
    [("contxt=2", "is it context=2?"), ("tensr=2", "is it tensor=2?"), ("colour=red", "; write data_replicate=2, ")],
)
def test_a_pin_that_cannot_be_read_is_told_what_pins_there_are(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        parse_pins([text])

    assert "megatron" not in str(refused.value)  # which is a set-up, and no pin
