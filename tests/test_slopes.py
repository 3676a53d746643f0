"""Slopes of errors by doublings of a size, within families of rows."""

import math

import pytest

from benchmarks.published.pricing import Priced
from benchmarks.published.settings import setting_of
from benchmarks.published.slopes import FEWEST, slopes
from support.published_rows import row


def priced(micro_batch: int, layers: int, error: float) -> Priced:
    """A row whose step is predicted wrong by an error, of a family of models of so many layers."""
    name = f"small-{layers}"
    made = row(config__micro_batch=micro_batch, config__global_batch=64, model__name=name, model__n_layers=layers)
    assert made.step_s is not None
    return Priced(made, step_s=made.step_s * math.exp(error), setting=setting_of(made))


def rows(slope: float) -> list[Priced]:
    """Families with errors of their own, to which each doubling of the micro-batch adds the same and a little noise."""
    found = []
    for layers in range(4, 10):
        for place, micro_batch in enumerate((1, 2, 4, 8)):
            noise = 0.002 * (-1) ** (place + layers)
            found.append(priced(micro_batch, layers, 0.1 * layers + slope * place + noise))
    return found


def test_a_planted_slope_is_found_whatever_families_err() -> None:
    found = {each.size: each for each in slopes(rows(0.05), lambda _: "dense")}

    assert found["micro-batch"].slope == pytest.approx(0.05, abs=0.003)
    assert found["micro-batch"].t > 3
    assert (found["micro-batch"].rows, found["micro-batch"].families) == (24, 6)
    assert "tensor" not in found


def test_errors_that_do_not_follow_a_size_have_no_slope() -> None:
    found = next(each for each in slopes(rows(0.0), lambda _: "dense") if each.size == "micro-batch")

    assert abs(found.slope) < 0.003
    assert abs(found.t) < 3


def test_a_size_that_differs_in_few_rows_has_no_slope() -> None:
    assert slopes(rows(0.05)[: FEWEST - 4], lambda _: "dense") == []
