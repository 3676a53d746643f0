"""What more would be worth, as a table of the points of a sweep."""

import io
from typing import Any, cast

import pytest
from rich.console import Console

import meshwright as mw
from meshwright.executor.reporting.sweep_report import Worth, robustness_in_words, worth_rows
from meshwright.planner.answers.sweep import Price
from support.cli import small_profile


class _Point:
    """A point's size."""

    def __init__(self, gpus: int) -> None:
        self.num_devices, self.profile = gpus, type("Unsized", (), {"seq_len": None})


def test_a_row_for_each_point_with_a_plan_and_one_sentence_for_all_of_which_it_is_true() -> None:
    points = cast(Any, [_Point(8), _Point(16), _Point(32)])
    worth = [
        Worth((Price("2x compute", -0.4), Price("1 GiB more per GPU", 0.0001)), "robust"),
        Worth((), ""),
        Worth((Price("2x network bandwidth", -0.02), Price("2x compute", -0.3)), "robust"),
    ]

    headings, rows = worth_rows(points, worth)

    assert headings == ["point", "2x compute", "1 GiB more per GPU", "2x network bandwidth"]
    assert rows == [("8 GPUs", "-40.0%", "0%", "-"), ("32 GPUs", "-30.0%", "-", "-2.0%")]
    assert robustness_in_words(points, worth) == ["8 GPUs; 32 GPUs: robust"]


@pytest.mark.parametrize(("width", "beside"), [(60, False), (80, False), (100, True)])
def test_no_plan_is_folded_inside_of_a_word_where_the_screen_is_narrow(width: int, beside: bool) -> None:
    pins = ["data_replicate=2", "zero=3", "pipeline=2", "tensor=2", "schedule=1f1b"]
    found = mw.sweep(small_profile(8), 32, device="h100-80gb", price_per_hour=2.0, pin=pins)
    assert found[0].result is not None
    label = found[0].result.plan.label
    console = Console(file=io.StringIO(), width=width)

    found.show(console)

    lines = cast(io.StringIO, console.file).getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert [word for word in label.split() if not any(word in line.split() for line in lines)] == []
    assert any(line.endswith("plan") for line in map(str.rstrip, lines)) == beside
    assert any(line.startswith("plan ") for line in lines) != beside
