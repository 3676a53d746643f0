"""The benchmark of plan tune: what the planner is told wrong, and the figures of its table."""

import statistics

import pytest

from benchmarks.planned_vs_manual.jobs import Task, at_speed
from benchmarks.planned_vs_manual.models import CASES
from benchmarks.tuning.bench import CLUSTERS, WRONG, _everything_s, announced, true_device
from benchmarks.tuning.report import markdown, untried
from benchmarks.tuning.synthetic import field_of, fitted
from meshwright.executor.tuning.record import LapLine


def test_the_planner_is_told_of_a_faster_cluster_whose_hosts_and_links_are_alike() -> None:
    for cluster in CLUSTERS:
        spec = announced(cluster, 2**25)

        assert spec.num_devices == 4
        assert len(spec.kinds) == 1
        assert spec.network.bandwidth == pytest.approx(25e6 * WRONG["network bandwidth"])
        assert spec.device.launch < true_device().launch


def test_a_slow_hosts_devices_take_longer_for_everything() -> None:
    device = true_device()
    task = Task(None, None, device, (), (1.0, 2 / 3))  # type: ignore[arg-type]

    assert [task.device_of(rank, 4) == device for rank in range(4)] == [True, True, False, False]
    assert task.device_of(3, 4) == at_speed(device, 2 / 3)
    assert at_speed(device, 0.5).launch == 2 * device.launch


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [0, 3])
@pytest.mark.parametrize("case", [0, 1])
def test_where_the_model_is_right_untried_plans_are_predicted_within_the_target(case: int, cluster: int) -> None:
    field = field_of(CASES[case], CLUSTERS[cluster])

    by_steps, by_both = (field.errors(fitted(field, 0.01, with_compute)) for with_compute in (False, True))

    assert statistics.median(field.errors({})) > 0.2
    assert statistics.median(by_both) < 0.03
    assert max(by_both) < min(0.1, max(by_steps))


def lap(label: str, turn: int, started_s: float, steps: int = 2) -> LapLine:
    return LapLine(
        label=label,
        round=1,
        turn=turn,
        steps_s=(1.0,) * steps,
        started_s=started_s,
        peak_memory_bytes=(1,),
        memory_kind="resident",
        at_s=1.0,
    )


def test_measuring_everything_takes_each_plan_as_many_steps_as_the_leader_took() -> None:
    spent = [lap("a", 1, 10.0), lap("a", 2, 0.0), lap("b", 1, 20.0)]

    assert _everything_s({"a": 1.0, "b": 2.0, "c": 3.0}, spent) == 3 * 20.0 + 4 * 6.0


def test_the_table_has_a_row_for_each_race_and_errors_of_plans_not_tried_only() -> None:
    found = {
        "case": "net",
        "cluster": "two",
        "tuned_over_best": 1.0,
        "predicted_over_best": 1.25,
        "agreed": True,
        "tried": 1,
        "plans": 2,
        "rounds": 2,
        "tune_s": 60.0,
        "tune_laps_s": 20.0,
        "all_laps_s": 100.0,
        "load": "3",
        "errors": {
            "a": {"tried": True, "before": 9.0, "after": 9.0},
            "b": {"tried": False, "before": -0.3, "after": 0.02},
        },
    }

    assert untried(found, "before") == [0.3]
    table = markdown([found])
    assert "| two | net | 1.250 | 1.000 | 1 of 2 | 2 | 60 | 20% | 30.0% | 2.0% | 3 |" in table
    assert "median 30.0% -> 2.0%, worst 30.0% -> 2.0%" in table
