"""Set-up strings are read into the degrees people mean."""

import pytest

from meshwright.planner.setups import Setup, parse_pins, parse_setup


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
        ("pp=8 schedule=chimera", "choose gpipe or 1f1b"),
        ("fsdp sp=on", "goes beside tensor parallelism"),
        ("mb=1.5", "whole number"),
    ],
)
def test_a_wrong_word_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_setup(text, 8, 8)


def test_pins_take_the_same_words() -> None:
    pins = parse_pins(["tp=4", "recompute=full micro-batch=2", "sp=off"])

    assert pins == {"tensor": 4, "recompute": "full", "micro_batch": 2, "sequence": False}


@pytest.mark.parametrize("text", ["tensor=x", "zero=1", "colour=red", "schedule=fast", "fsdp"])
def test_a_wrong_pin_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=text.partition("=")[0]):
        parse_pins([text])
