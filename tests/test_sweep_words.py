"""What more would be worth, as a table of the points of a sweep."""

from typing import Any, cast

from meshwright.executor.reporting.sweep_report import Worth, robustness_in_words, worth_rows
from meshwright.planner.answers.sweep import Price


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
