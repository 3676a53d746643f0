"""Our pick beside set-ups that people chose: which rows count, who is faster, and what is said about it."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.experts import Beside, answered, fastest, outside_of_space, questions, summary
from benchmarks.published.pricing import Pricer
from benchmarks.published.rows import Row
from meshwright.planner.plan.pins import Pins
from meshwright.planner.solve.explore import Explorer, Outcome
from support import slow
from support.published_rows import row


def chosen(**changes: object) -> Row:
    return replace(row(**changes), file="torchtitan")


@pytest.fixture(scope="module")
def found() -> Beside:
    (asked,) = questions([chosen()])
    return answered(asked, time_limit_s=60.0)


def test_of_one_question_the_fastest_per_gpu_is_what_people_chose() -> None:
    rows = [
        chosen(id="slow", measured__step_time_s=0.02),
        chosen(id="fast", measured__step_time_s=0.01),
        chosen(id="more", measured__step_time_s=0.015, config__global_batch=32),
        chosen(id="other", config__framework="Megatron-LM", cluster__n_gpus=4, config__global_batch=8, config__dp=4),
    ]

    assert [asked.row.id for asked in questions(rows)] == ["other", "more"]


def test_rows_of_sweeps_that_failed_or_do_not_count_are_left_out() -> None:
    rows = [
        chosen(measured__oom=True),
        replace(chosen(), quality="C"),
        replace(chosen(), file="llm_foundry"),
        chosen(measured__step_time_s=None),
    ]

    assert questions(rows) == []


def test_rows_that_no_time_ranks_are_each_asked() -> None:
    untimed = {"measured__step_time_s": None, "measured__tflops_per_gpu": 400}

    asked = questions([chosen(id="timed"), chosen(id="one", **untimed), chosen(id="other", **untimed)])

    assert sorted(each.row.id for each in asked) == ["one", "other", "timed"]


@pytest.mark.slow
def test_our_pick_is_no_slower_and_says_why_it_differs(found: Beside) -> None:
    assert found.proven
    assert 0.0 <= found.gap <= 1e-3
    assert found.our_s is not None
    assert found.ratio == pytest.approx(found.our_s / found.their_s)
    assert found.ratio <= 1.0 + 1e-6
    assert found.same or found.why


@pytest.mark.parametrize("bound_s", slow.but_first([1e-9, 0.0], 1))
def test_their_layout_is_the_answer_where_time_is_up_before_the_space_is_searched(bound_s: float) -> None:
    (asked,) = questions([chosen()])
    pricer = Pricer()
    priced, theirs = pricer.estimate(asked.setting, asked.cluster)
    explorer = Explorer(pricer.profile(asked.setting), asked.cluster, theirs.training)
    whole = explorer.explore

    def out_of_time(pins: Pins, deadline: float, **more: Any) -> Outcome:
        return whole(pins, deadline, **more) if pins.micro_batch is not None else Outcome(bound=bound_s, complete=False)

    explorer.explore = out_of_time  # type: ignore[method-assign]

    pick = fastest(explorer, theirs, priced, Pins(), time_limit_s=60.0)

    assert pick.solved is not None
    assert pick.solved.seconds <= priced.step_time_s * (1 + 1e-9)
    assert not pick.complete
    assert pick.gap == (pytest.approx(pick.solved.seconds / 1e-9 - 1.0) if bound_s else None)


@pytest.mark.slow
def test_a_device_is_taken_to_hold_what_ran_on_it() -> None:
    small = {"cluster__gpu": "of another kind", "cluster__gpu_mem_gb": 0.8}
    (asked,) = questions([chosen(**small)])

    over = answered(asked, time_limit_s=60.0)

    assert over.over_bytes > 0
    assert over.ratio is not None
    assert over.ratio <= 1.0 + 1e-6


@pytest.mark.slow
def test_what_the_space_does_not_hold_is_named() -> None:
    (asked,) = questions([chosen()])
    pricer = Pricer(planning=True)
    plan, profile = pricer.estimate(asked.setting, asked.cluster)[1], pricer.profile(asked.setting)
    torn = plan.model_copy(update={"degrees": plan.degrees.model_copy(update={"tensor": 3})})

    assert outside_of_space(plan, profile) == ()
    assert outside_of_space(plan, profile, ("mlp",)) == ("recompute of single modules",)
    assert "tensor=3" in outside_of_space(torn, profile)[0]


@pytest.mark.slow
def test_the_summary_counts_and_lists(found: Beside) -> None:
    slower = replace(found, id="other", ratio=1.2, our_s=1.2 * found.their_s, proven=False, gap=0.07)

    unknown = replace(found, id="unknown", proven=False, gap=None)
    nothing = replace(found, id="none", ratio=None, our_s=None, ours="", why="nothing fits")
    text = summary([found, slower, unknown, nothing])

    assert "4 questions" in text
    assert "more than 1% slower in 1" in text
    assert "the search for the other 2 was stopped, and they may be up to 7.0% above it (1: not known)" in text
    assert text.index("| other |") < text.index(f"| {found.id} |")
    assert "none (" in text.partition("Without an answer")[2]
