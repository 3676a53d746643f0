"""Sizes at both ends: models of one layer and of 5,000, clusters of odd numbers of GPUs and of a million."""

import time
from typing import Any

import numpy as np
import pytest

from meshwright.planner.answers.check import check
from meshwright.planner.answers.search import SearchResult, search
from meshwright.planner.cost.chain import Chain
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.legality import MOST_COUNTS, MOST_STARTS, stage_starts
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve import knapsack
from meshwright.planner.solve.explore import Explorer
from meshwright.profiler.machine.cluster import cluster_of
from meshwright.profiler.model.model_profile import ModelProfile
from support.synthetic import cluster, device, layer_class, profile

SMALL = layer_class("small", 1e9, 10_000, saved=1e4, inputs=1e3)
OTHER = layer_class("other", 2e9, 20_000, saved=1e4, inputs=1e3)


def job(batch: int) -> TrainingSpec:
    return TrainingSpec(global_batch=batch, seq_len=64)


def test_a_model_of_one_layer_has_a_plan_without_a_pipeline() -> None:
    model = profile([SMALL], [0])

    result = search(model, cluster(), job(64))

    assert check(result.plan, model) == []
    assert result.plan.degrees.pipeline == 1
    assert not any("pipeline" in rule for rule in result.certificate.rejected if "more stages" not in rule)


@pytest.mark.slow
def test_five_thousand_layers_are_planned_each_on_one_stage() -> None:
    model = profile([SMALL, OTHER], [1, *[0] * 4998, 1])

    result = search(model, cluster(), job(64), pins=Pins(micro_batch=4, data_shard=1, schedule="1f1b"))

    assert check(result.plan, model) == []
    assert [layer.name for layer in result.plan.layers] == [x.name for x in model.layers]
    assert Plan.model_validate_json(result.plan.model_dump_json()) == result.plan


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0] * 5000, marks=pytest.mark.slow),
        [i % 2 for i in range(5000)],
        pytest.param([0, 1, 0, 0] * 1250, marks=pytest.mark.slow),
    ],
    ids=["same", "in turn", "of four"],
)
def test_intervals_of_long_chains_stay_few(order: list[int]) -> None:
    model = profile([SMALL, OTHER], order)
    chain = Chain(CostModel(model, cluster(), job(64)))

    assert len(chain.places) <= MOST_STARTS + 1
    assert len(chain.compositions) * len(chain.runs) <= 1.1 * MOST_COUNTS


def of_layers(model: ModelProfile, a: int, b: int) -> list[int]:
    """[class] -> layers from a to b - 1."""
    return [sum(layer.layer_class == c for layer in model.layers[a:b]) for c in range(len(model.classes))]


@pytest.mark.parametrize("order", [[0] * 7, [0, 1, 1, 0, 1], [i // 3 % 2 for i in range(1100)]], ids=len)
def test_every_interval_between_places_holds_its_layers(order: list[int]) -> None:
    model = profile([SMALL, OTHER], order)
    chain = Chain(CostModel(model, cluster(), job(64)))
    kinds = np.array([model.layers[run.start].layer_class for run in chain.runs])

    for i, a in enumerate(chain.places):
        for j, b in list(enumerate(chain.places))[i + 1 :: 7]:
            counts = chain.counts[chain.composition_of[i, j]]
            assert [int(counts[kinds == c].sum()) for c in range(2)] == of_layers(model, a, b)
    assert chain.places == [0, *stage_starts(model), len(order)]


def test_short_chains_are_cut_everywhere() -> None:
    assert stage_starts(profile([SMALL, OTHER], [0, 1] * 60)) == list(range(1, 120))


def planned(gpus: int, pins: Pins) -> SearchResult:
    """The plan of eight layers on so many GPUs, which has passed the check."""
    model = profile([layer_class("block", 1e12, 50_000_000, 3e8, 1e7, heads=8)], [0] * 8)
    result = search(model, cluster_of(device(), gpus), job(gpus), pins=pins)
    assert check(result.plan, model) == []
    return result


@pytest.mark.parametrize("gpus", [3, 6, 12, 24, 100, 10_007])
def test_any_number_of_gpus_has_a_plan(gpus: int) -> None:
    result = planned(gpus, Pins(micro_batch=1))

    assert result.plan.degrees.num_devices == gpus
    assert result.certificate.status == "optimal"


@pytest.mark.slow
@pytest.mark.parametrize("pins", [Pins(micro_batch=1, tensor=8, pipeline=1), Pins()], ids=["few", "all"])
def test_a_million_gpus_have_a_plan_by_solving_few_shapes(pins: Pins) -> None:
    result = planned(1_000_000, pins)

    assert result.plan.degrees.num_devices == 1_000_000
    assert result.certificate.status == "optimal"
    assert result.certificate.shapes["solved"] < 200


def test_the_layer_wise_choice_is_no_more_work_with_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven billion parameters on 8 GPUs, from memory for some layers to memory for all; work: combinations of options
    that no other beats."""
    block = layer_class("block", 3e12, 218_000_000, saved=2.5e9, inputs=7e7, transient=5e8, parts=(0.2, 0.3))
    ends = layer_class("ends", 4e12, 500_000_000, saved=1e9, inputs=7e7, transient=5e8)
    model, looked_through = profile([block, ends], [1, *[0] * 32, 1], crossing=7e7), [0]
    counts_within, unbeaten_of_row = knapsack._counts_within, knapsack._unbeaten_of_row

    def counted(*arguments: Any) -> Any:
        table = counts_within(*arguments)
        looked_through[0] += len(table)
        return table

    def counted_of_row(*arguments: Any) -> Any:
        rows = unbeaten_of_row(*arguments)
        looked_through[0] += len(rows)
        return rows

    monkeypatch.setattr(knapsack, "_counts_within", counted)
    monkeypatch.setattr(knapsack, "_unbeaten_of_row", counted_of_row)
    work, seconds = {}, []
    for memory in (40, 56, 80, 112, 160):
        looked_through[0] = 0
        explorer = Explorer(model, cluster(on=device(memory=1e9 * memory)), job(64))
        best = explorer.explore(Pins(data_shard=8), time.monotonic() + 60, near=0).best
        work[memory] = looked_through[0]
        seconds.append(best.seconds if best is not None else float("inf"))

    assert 0 == work[160] < work[112] <= work[56] < 200_000
    assert work[80] <= work[40] < 200_000
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.05 * seconds[-1], "memory makes a difference"
