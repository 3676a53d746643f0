"""Committed pictures are what would be drawn from what is committed now."""

from pathlib import Path

import pytest

from benchmarks import pictures


def test_every_chart_is_current_and_no_picture_is_drawn_by_nothing() -> None:
    assert pictures.stale_charts() == []


def test_a_chart_that_is_not_current_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    path = pictures.HERE / "planning_time" / "results" / "scaling.svg"
    monkeypatch.setattr(pictures, "CHARTS", {**pictures.CHARTS, path: lambda: "another", Path("none.svg"): str})

    assert pictures.stale_charts() == [path, Path("none.svg")]


@pytest.mark.slow
def test_the_picture_of_the_output_is_what_is_printed_now(tmp_path: Path) -> None:
    pictures.draw_terminal(tmp_path / "now.svg")

    assert pictures.words_of(tmp_path / "now.svg") == pictures.words_of(pictures.TERMINAL)
