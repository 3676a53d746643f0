"""The matrix of plans: what is drawn, that it gives the numbers of one process, and that a difference is found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.execution import drawn, matrix
from meshwright.planner.plan.making import shape_of
from support import slow


@pytest.mark.slow
def test_draws_differ_from_each_other_and_not_from_run_to_run() -> None:
    plans = drawn.draw("mlp", 8, 6)

    assert [plan.label for plan in drawn.draw("mlp", 8, 6)] == [plan.label for plan in plans]
    assert len({shape_of(plan.plan) for plan in plans}) == 6
    assert len({plan.plan.degrees.pipeline for plan in plans}) > 1


@pytest.mark.slow
def test_batches_grow_up_to_those_of_the_plan() -> None:
    (plan,) = drawn.draw("gpt", 4, 1, "growing")

    sizes = matrix._sizes(plan)

    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == drawn.GLOBAL_BATCH


@pytest.mark.parametrize(
    ("model", "ranks", "kind"),
    slow.but_first(
        [
            ("mlp", 2, "frozen"),
            ("lstm", 2, "plain"),
            ("mlp", 4, "unequal"),
            ("mlp", 8, "plain"),
            ("gpt", 4, "plain"),
            ("gpt", 2, "compiled"),
            ("gpt", 2, "parts"),
            ("gpt", 4, "lengths"),
            ("gpt", 4, "adapters"),
            ("gpt", 4, "Adafactor"),
            ("gpt2", 4, "dropout"),
            ("gpt", 4, "growing"),
        ],
        1,
    ),
)
def test_a_drawn_plan_gives_the_numbers_of_one_process(model: str, ranks: int, kind: drawn.Kind) -> None:
    row = matrix.run(drawn.draw(model, ranks, 1, kind)[0])

    assert row["failure"] is None
    assert row["ranks"] == ranks
    assert row["worst"] < matrix.TOLERANCE


@pytest.mark.slow
def test_what_has_been_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, file = drawn.draw("mlp", 2, 2), tmp_path / "matrix.json"
    *_, (first,) = matrix.run_all(plans[1:], file)
    ran: list[str] = []

    def noted(plan: drawn.Drawn) -> dict[str, Any]:
        ran.append(plan.label)
        return {**first, "key": matrix.key_of(plan)}

    monkeypatch.setattr(matrix, "run", noted)
    *_, rows = matrix.run_all(plans, file)

    assert ran == [plans[0].label]
    assert rows[1] == first
    assert len(rows) == 2

    *_, rows = matrix.run_all(plans, file, since="2999-01-01")

    assert ran == [plans[0].label, *(plan.label for plan in plans)]


def test_a_plan_that_computes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = drawn.small("mlp")
    assert loaded.loss is not None
    loss = loaded.loss
    wrong = replace(loaded, loss=lambda *given: loss(*given) * (1.001 if dist.is_initialized() else 1.0))
    monkeypatch.setattr(drawn, "small", lambda name, kind: wrong)

    row = matrix.run(drawn.draw("mlp", 2, 1)[0])

    assert row["failure"].startswith("DIFFERENT NUMBERS, first in loss of step 1")
    assert "0 of 1 plans" in matrix.summary([row])
