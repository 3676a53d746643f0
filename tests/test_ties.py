"""Set-ups that the noise does not tell apart are called a tie, and real differences are not."""

import math
import random
from collections.abc import Sequence

import pytest

from meshwright.executor.measuring.measurement import Measurement
from meshwright.executor.measuring.significance import standing, student_quantile, student_share
from meshwright.executor.reporting.measured_report import measured_document, measured_table, standing_document
from meshwright.planner.answers.candidate import Candidate
from meshwright.planner.answers.verdict import FITS
from meshwright.planner.cost.estimate import estimate
from support.cli import small_profile, some_plan


def measured(label: str, *steps_s: tuple[float, ...]) -> Measurement:
    """A measurement of these steps, [turn][step]."""
    return Measurement(
        label=label, model="m", layout="x", num_ranks=2, device="2 CPU processes over gloo", torch_version="2",
        steps_s=steps_s, tokens_per_step=100, peak_memory_bytes=(1, 1), memory_kind="resident",
    )  # fmt: skip


def drawn(true_s: Sequence[float], turns: int, noise: float, seed: int) -> dict[str, Measurement]:
    """Measurements of set-ups with these true steps: a machine that drifts by a fifth from turn to turn, runs that
    differ by `noise`, and steps inside a run that differ by half as much."""
    chance = random.Random(seed)
    steps: list[list[tuple[float, ...]]] = [[] for _ in true_s]
    for _ in range(turns):
        machine = math.exp(chance.gauss(0.0, 0.2))
        for runs, seconds in zip(steps, true_s, strict=True):
            run = seconds * machine * math.exp(chance.gauss(0.0, noise))
            runs.append(tuple(run * math.exp(chance.gauss(0.0, noise / 2)) for _ in range(5)))
    return {f"set-up {i}": measured(f"set-up {i}", *runs) for i, runs in enumerate(steps)}


@pytest.mark.parametrize(
    ("share", "freedom", "expected"),
    [(0.90, 1, 6.314), (0.95, 2, 4.303), (0.95, 4, 2.776), (0.99, 2, 9.925), (0.95, 9, 2.262), (0.99, 30, 2.750)],
)
def test_quantiles_are_those_of_printed_tables(share: float, freedom: int, expected: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(expected, abs=6e-4)
    assert student_share(student_quantile(share, freedom), freedom) == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize(("count", "turns"), [(2, 3), (2, 5), (5, 5)])
def test_equal_set_ups_are_called_ties_in_19_of_20_comparisons(count: int, turns: int) -> None:
    told_apart = 0
    for seed in range(400):
        found = standing(drawn([1.0] * count, turns, 0.03, seed), "set-up 0")
        assert found is not None
        told_apart += any(not apart.tie for apart in found.against) or len(found.ties) < count - 1

    assert told_apart / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize(("count", "turns", "least"), [(2, 5, 0.95), (3, 6, 0.95), (5, 8, 0.95)])
def test_a_real_difference_is_found_through_a_drifting_machine(count: int, turns: int, least: float) -> None:
    right = 0
    for seed in range(200):
        found = standing(drawn([1.0, *[1.1] * (count - 1)], turns, 0.02, seed), "set-up 0")
        assert found is not None
        right += found.fastest == "set-up 0" and not found.ties
        assert all(apart.ratio == pytest.approx(1.1, rel=0.12) for apart in found.against)

    assert right / 200 >= least


def test_the_interval_is_students_over_the_turns() -> None:
    found = standing({"a": measured("a", (1.0,), (1.0,), (1.0,)), "b": measured("b", (1.2,), (1.25,), (1.3,))}, "a")
    logs = [math.log(ratio) for ratio in (1.2, 1.25, 1.3)]
    mean = sum(logs) / 3
    half = 4.30265 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)

    assert found is not None
    (apart,) = found.against
    assert apart.ratio == pytest.approx(math.exp(mean))
    assert (apart.low, apart.high) == pytest.approx((math.exp(mean - half), math.exp(mean + half)), rel=1e-5)
    assert not apart.tie


def test_one_turn_calls_nothing_faster() -> None:
    found = standing({"a": measured("a", (1.0, 1.0)), "b": measured("b", (9.0, 9.0))}, "a")

    assert found is not None
    assert found.against[0].tie
    assert found.ties == ("b",)


def test_without_its_reference_the_fastest_is_compared_with() -> None:
    found = standing(drawn([1.2, 1.0], 3, 0.001, 0), "planned")

    assert found is not None
    assert found.reference == found.fastest == "set-up 1"


def test_what_took_no_turns_together_is_not_compared() -> None:
    assert standing({"a": measured("a", (1.0,), (1.0,)), "b": measured("b", (1.0,))}, "a") is None
    assert standing({"a": measured("a", (1.0,))}, "a") is None


def test_the_table_says_who_is_fastest_what_ties_and_what_failed() -> None:
    runs = drawn([1.0, 1.0, 2.0], 5, 0.01, 3)
    times = {**runs, "set-up 3": "it did not run: rank 1 of 2 failed"}
    plan = some_plan(shard=2)
    candidates = [Candidate(label, plan, estimate(plan, small_profile()), FITS) for label in times]

    found = measured_table(candidates, times, "set-up 0")
    document = standing_document(times, "set-up 0")

    assert [row[-1].rpartition(" ")[2] for row in found.rows] == ["", "tie", "slower"]
    assert all(sum(map(len, row[1:])) <= 60 for row in found.rows)  # with the set-up in a terminal of 80 columns
    assert any(sentence.startswith("fastest: a tie of set-up ") for sentence in found.sentences)
    assert found.sentences[-1] == "set-up 3 was not measured: it did not run: rank 1 of 2 failed"
    assert document is not None
    assert [each["tie"] for each in document["against"]] == [True, False]
    assert measured_document(times, "set-up 3") == {"not_run": times["set-up 3"]}
