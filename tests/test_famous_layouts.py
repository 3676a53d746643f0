"""Ten famous set-ups: each can be put in the planner's words, and the committed page is of them."""

import pytest

from benchmarks.published.famous_layouts import FOLDER, LAYOUTS, measured_s, page, rows_by_id
from benchmarks.published.settings import setting_of

ROWS = rows_by_id()


@pytest.mark.parametrize("row_id", LAYOUTS.values())
def test_each_is_expressed_exactly_and_has_a_measured_step(row_id: str) -> None:
    setting = setting_of(ROWS[row_id])

    assert setting.dropped == ()
    assert setting.shape.degrees.num_devices == ROWS[row_id].cluster["n_gpus"]
    assert 0.5 < measured_s(ROWS[row_id]) < 120
    assert ROWS[row_id].source


def test_a_step_of_published_flops_is_that_of_its_tokens() -> None:
    """Meta's 400 TFLOP/s of each of 16,384 GPUs, for 2,048 samples of 8,192 tokens."""
    assert measured_s(ROWS["llama3-405b-n16384-cp1"]) == pytest.approx(6.46, abs=0.01)


def test_the_committed_page_tells_of_each() -> None:
    told = (FOLDER / "famous.md").read_text()

    assert told.splitlines()[2] == page([]).splitlines()[2]
    assert [line.split(" | ")[0].removeprefix("| ") for line in told.splitlines() if line.startswith("| ")][1:] == [
        *LAYOUTS
    ]
