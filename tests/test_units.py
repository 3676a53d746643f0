"""Quantities with units are read into SI units, and printed back for people."""

import pytest

from meshwright.profiler.machine.units import (
    counted,
    first_of,
    format_bytes,
    format_change,
    format_count,
    format_flops_per_s,
    format_seconds,
    gpus_in_words,
    parse_bytes,
    parse_bytes_per_s,
    parse_flops_per_s,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80 GiB", 80 * 2**30), ("80GB", 80e9), ("1.5 MiB", 1.5 * 2**20), ("512 kB", 512e3), ("0 B", 0), (4096, 4096)],
)
def test_sizes(text: str | int, num_bytes: float) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("900 GB/s", 9e11), ("200 Gbit/s", 25e9), ("3.35 TB/s", 3.35e12), ("1 GiB/s", 2**30), (1e9, 1e9)],
)
def test_rates_are_bytes_also_when_given_in_bits(text: str | float, bytes_per_s: float) -> None:
    assert parse_bytes_per_s(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(("text", "flops_per_s"), [("312 TFLOP/s", 312e12), ("5 GFLOP/s", 5e9)])
def test_compute_rates(text: str, flops_per_s: float) -> None:
    assert parse_flops_per_s(text) == flops_per_s


@pytest.mark.parametrize(("text", "seconds"), [("5 us", 5e-6), ("5 µs", 5e-6), ("1.2 ms", 1.2e-3), ("2 s", 2.0)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "12 parsecs", "80 Gib", "GiB", "1..5 GB", "5 GB/s"])
def test_a_size_that_cannot_be_read_is_quoted_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="give a size such as"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["900 GB", "10 Gib/s", "1 GB/ms"])
def test_a_rate_needs_its_unit(text: str) -> None:
    with pytest.raises(ValueError, match="give a rate such as"):
        parse_bytes_per_s(text)


def test_printed_values_have_three_digits_and_a_unit() -> None:
    assert format_bytes(80 * 2**30) == "80.0 GiB"
    assert format_bytes(-1.5 * 2**20) == "-1.50 MiB"
    assert format_bytes(0) == "0 B"
    assert format_flops_per_s(312e12) == "312 TFLOP/s"
    assert format_seconds(1.25) == "1.25 s"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(5e-6) == "5.00 us"
    assert format_count(8.03e9) == "8.03 B"
    assert format_count(512) == "512"


def test_what_rounds_up_to_the_next_unit_is_printed_in_it() -> None:
    assert format_seconds(0.9996e-3) == "1.00 ms"
    assert format_seconds(0.9994e-3) == "999 us"
    assert format_seconds(0.9996) == "1.00 s"
    assert format_bytes(1023.7 * 2**20) == "1.00 GiB"
    assert format_count(999.7e6) == "1.00 B"
    assert format_flops_per_s(9.997e12) == "10.0 TFLOP/s"
    assert format_seconds(0.09997) == "100 ms"


@pytest.mark.parametrize("num_bytes", [1.0, 1024.0, 5e6, 7.5e11])
def test_what_is_printed_can_be_read_again(num_bytes: float) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.005)


@pytest.mark.parametrize(("count", "words"), [(1, "1 GPU"), (2, "2 GPUs"), (1024, "1,024 GPUs")])
def test_one_gpu_is_not_gpus(count: int, words: str) -> None:
    assert gpus_in_words(count) == words


@pytest.mark.parametrize(("count", "words"), [(0, "0 passes"), (1, "1 pass"), (1200, "1,200 passes")])
def test_what_is_counted_is_one_or_several(count: int, words: str) -> None:
    assert counted(count, "pass", "passes") == words


@pytest.mark.parametrize(
    ("names", "noun", "words"),
    [(["a"], "layers", "a"), (["a", "b"], "", "a (and 1 more)"), (["a", "b", "c"], "layers", "a (and 2 more layers)")],
)
def test_one_name_has_no_others_beside_it(names: list[str], noun: str, words: str) -> None:
    assert first_of(names, noun) == words


@pytest.mark.parametrize(("share", "words"), [(0.012, "+1.2%"), (-0.0004, "0%"), (-0.0, "0%"), (-0.0006, "-0.1%")])
def test_a_change_that_rounds_to_none_has_no_sign(share: float, words: str) -> None:
    assert format_change(share) == words
