"""Where nothing fits: every way out that is offered was tried, does fit, and costs what is said."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.answers import fitting, infeasible
from meshwright.planner.answers import search as answers_search
from meshwright.planner.answers.check import check
from meshwright.planner.answers.fitting import (
    PRECISE,
    Fewest,
    closest_of_all,
    closest_plan,
    fewest,
    fits,
    grown,
    spread_evenly,
    state_and_room,
)
from meshwright.planner.answers.infeasible import InfeasibleError, offloaded
from meshwright.planner.answers.search import search
from meshwright.planner.answers.sweep import cluster_for
from meshwright.planner.answers.why_not import best_of
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.pin_texts import read_pins
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import Objective, TrainingSpec
from meshwright.planner.solve.explore import Explorer, Outcome
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of, load_device
from meshwright.profiler.machine.instances import instance
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.synthetic import cluster, device, layer_class, profile


def chain(parameters: int = 100_000_000, layers: int = 4) -> ModelProfile:
    block = layer_class("block", 1e11, parameters, saved=1e7, inputs=1e6, transient=1e6, heads=8)
    return profile([block], [0] * layers)


def job(**changes: object) -> TrainingSpec:
    return TrainingSpec.model_validate({"global_batch": 24, "seq_len": 64, "memory_margin": 0.05} | changes)


def refused(
    on: ClusterSpec, training: TrainingSpec | None = None, pins: Pins | None = None, model: ModelProfile | None = None
) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        search(model or chain(), on, training or job(), pins=pins)
    return caught.value


@pytest.mark.parametrize("first", [1, 2, 5, 24, 25, 90, 256, 300])
def test_the_fewest_that_does_is_found_whatever_the_place(first: int) -> None:
    assert fewest(range(1, 301), lambda count: count >= first).count == first


@pytest.mark.parametrize(
    ("counts", "does", "found"),
    [
        ([1, 2, 3], lambda count: False, Fewest(None, False)),
        (range(1, 9), lambda count: count >= 6, Fewest(6, True)),
        ([5, 6, 7, 8], lambda count: count == 8, Fewest(8, True)),
        (range(1, 9), lambda count: count >= 6 or (None if count == 3 else False), Fewest(6, False)),
        ([8, *range(16, 513, 8)], lambda count: count >= 136, Fewest(136, False)),  # 24 to 56 were left out
        (range(1, 9), lambda count: count in (3, 8), Fewest(3, True)),  # more need not do
    ],
)
def test_it_is_only_shown_where_each_smaller_number_was_tried(
    counts: list[int], does: Callable[[int], bool | None], found: Fewest
) -> None:
    assert fewest(counts, does) == found


@pytest.mark.parametrize("memory", slow.but_first([1.6e9, 0.8e9, 1.1e9], 1))
def test_the_smallest_number_of_gpus_has_a_plan_and_fewer_have_none(memory: float) -> None:
    on, training = cluster(1, 2, device(memory=memory)), job()

    told = refused(on, training).smallest_gpus

    assert told is not None
    for count in spread_evenly(on, told)[1:]:  # of one, the state alone is too much
        explorer = Explorer(chain(), grown(on, count), training)
        assert (best_of(explorer, Pins(), math.inf) is not None) == (count == told)


def test_a_host_is_filled_before_another_is_asked_for() -> None:
    assert grown(cluster(1, 2), 8).num_hosts == 1
    assert grown(cluster(2, 2), 8).num_hosts == 4
    assert grown(cluster(4, 1), 2).num_hosts == 2
    assert spread_evenly(cluster(1, 2), 24) == [*range(1, 9), 10, 12, 14, 16, 18, 21, 24]


def test_a_host_has_as_many_gpus_as_the_user_says() -> None:
    """--gpus 2 --gpus-per-node 2, of a device whose hosts usually have eight."""
    on = cluster_of(device(memory=0.8e9), 2, 2)

    told = refused(on, job()).smallest_gpus

    assert told is not None
    assert told % 2 == 0
    assert grown(on, told).devices_per_host == 2


@pytest.mark.slow
def test_a_margin_that_would_do_is_named_and_does() -> None:
    training = job(memory_margin=0.2)
    needed = refused(cluster(1, 2, device(memory=2e9)), training)
    device_bytes = needed.over_bytes + 0.8 * 2e9
    on = cluster(1, 2, device(memory=1.1 * device_bytes))

    error = refused(on, training)

    (told,) = (float(n) for change in error.changes for n in re.findall(r"--memory-margin ([\d.]+)", change))
    assert check(search(chain(), on, job(memory_margin=told)).plan, chain()) == []


def test_an_optimizer_on_the_host_is_the_last_resort_and_is_found_when_asked_for() -> None:
    on = cluster(1, 2, device(memory=3e9))

    error = refused(on)

    away = offloaded(Explorer(chain(), on, job()), Pins())
    assert away is not None
    assert error.changes[-1] == away.sentence
    assert away.estimate == estimate(away.plan, chain())
    assert away.estimate.fits
    assert away.plan.offload_optimizer
    assert check(away.plan, chain()) == []
    found = search(chain(), on, job(), pins=read_pins(["offload=optimizer"]))
    assert "--pin offload=optimizer" in away.sentence
    assert found.plan.offload_optimizer
    assert found.estimate.step_time_s <= away.estimate.step_time_s * 1.01  # simplicity's
    assert found.certificate.status == "optimal"
    assert away.host_bytes == pytest.approx(8 * chain().num_parameters, rel=0.01)


def test_an_optimizer_without_state_cannot_be_sent_away() -> None:
    assert offloaded(Explorer(chain(), cluster(1, 2, device(memory=3e9)), job(optimizer="sgd")), Pins()) is None


def test_the_search_itself_never_sends_the_optimizer_away() -> None:
    result = search(chain(), cluster(1, 4, device(memory=3e9)), job(), pins=Pins(everything=True))

    plans = [result.plan, *(each.plan for each in result.alternatives if each.plan is not None)]
    assert not any(plan.offload_optimizer for plan in plans)


def test_what_is_not_recomputed_is_not_said_to_be() -> None:
    error = refused(cluster(1, 2, device(memory=1e9)), pins=Pins(recompute="none"))

    assert "nothing recomputed" in str(error)


@pytest.mark.parametrize(
    ("pins", "way_out"),
    [
        (Pins(recompute="none"), "allow recompute"),
        (Pins(micro_batch=12), "a smaller micro-batch"),
        (Pins(data_shard=1), "other degrees"),
    ],
)
def test_the_pin_that_stands_in_the_way_is_the_first_way_out(pins: Pins, way_out: str) -> None:
    wide = layer_class("wide", 1e11, 100_000_000, saved=4e8, inputs=1e6)
    model, training = profile([wide], [0] * 4), job()
    leanest = Pins(pipeline=1, tensor=1, recompute="full", micro_batch=1, data_shard=2, reshard=True)
    room = search(model, cluster(1, 2), training, pins=leanest).estimate.memory[0].device_bytes
    on = cluster(1, 2, device(memory=1.06 * room))

    with pytest.raises(InfeasibleError) as caught:
        search(model, on, training, pins=replace(pins, pipeline=1, tensor=1))

    assert caught.value.changes[0].startswith(way_out)
    assert "GPUs of this kind with other degrees" not in str(caught.value)  # those here would do


def units(*sizes: int) -> ModelProfile:
    """Layers of so many times ten million parameters."""
    kinds = sorted(set(sizes))
    classes = [layer_class(f"of{size}", 1e10 * size, 10_000_000 * size, saved=1e5, inputs=1e4) for size in kinds]
    return profile(classes, [kinds.index(size) for size in sizes], crossing=1e4)


PIPELINE_ONLY = Pins(most=(("data_replicate", 1), ("data_shard", 1), ("tensor", 1)))


@pytest.mark.slow
def test_the_smallest_number_of_gpus_is_that_of_uneven_stages() -> None:
    """Of 4 layers of 8 and 32 of 1, as many layers on each of 4 stages are 37 on the first, where 16 would do."""
    model, on = units(*[8] * 4, *[1] * 32), cluster(1, 1, device(memory=17 * 10_000_000 * 20.0))

    with pytest.raises(InfeasibleError) as caught:
        search(model, on, job(), pins=PIPELINE_ONLY)

    assert caught.value.smallest_gpus == 4
    assert "perhaps" not in str(caught.value)
    assert check(search(model, grown(on, 4), job(), pins=PIPELINE_ONLY).plan, model) == []
    with pytest.raises(InfeasibleError):
        search(model, grown(on, 3), job(), pins=PIPELINE_ONLY)


def test_uneven_stages_that_fit_are_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model, on = units(*[8] * 4, *[1] * 32), cluster(1, 4, device(memory=17 * 10_000_000 * 20.0))
    even = closest_plan(Explorer(model, on, job()), PIPELINE_ONLY)
    assert even is not None
    assert even.over_bytes > 0
    monkeypatch.setattr(Explorer, "explore", None)

    assert fits(Explorer(model, on, job()), PIPELINE_ONLY, math.inf)


def test_a_number_of_gpus_is_searched_however_long_the_leanest_took(monkeypatch: pytest.MonkeyPatch) -> None:
    model, on = units(3, 3, 1, 1), cluster(1, 2, device(memory=0.8e9))
    explorer, until = Explorer(model, on, job()), 0.0

    def took_long(*_: object) -> None:
        nonlocal until
        until = explorer.chain.deadline_s
        time.sleep(0.1)

    monkeypatch.setattr(fitting, "_first_solved", took_long)
    limit = time.monotonic() + 0.05

    assert fits(explorer, PIPELINE_ONLY, limit) is False
    assert time.monotonic() > limit
    assert until <= limit + fitting.LEAN_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (units(3, 3, 1, 1), PIPELINE_ONLY),
        (units(2, 5, 1, 2), Pins()),
        (units(3, 3, 1, 1), replace(PIPELINE_ONLY, schedule="1f1b")),
        (units(8, 1, 1, 1, 1, 1, 1), PIPELINE_ONLY),
    ],
    ids=["by pairs", "uneven, any layout", "by pairs, 1f1b", "one large"],
)
def test_no_plan_of_any_kind_is_over_by_less_than_the_closest(model: ModelProfile, pins: Pins) -> None:
    def on(memory: float) -> ClusterSpec:
        return cluster(1, 2, device(memory=memory))

    explorer = Explorer(model, on(1e8), job())
    even = closest_plan(explorer, pins)
    assert even is not None

    closest = closest_of_all(explorer, pins, even, time.monotonic() + 60)

    enough = 1e8 * closest.more_memory
    assert closest.over_bytes <= even.over_bytes
    assert check(search(model, on(enough * 1.0001), job(), pins=pins).plan, model) == []
    with pytest.raises(InfeasibleError):
        search(model, on(enough / (1 + 2 * PRECISE)), job(), pins=pins)


@pytest.mark.slow
def test_the_closest_is_only_called_so_where_all_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model, on = units(3, 3, 1, 1), cluster(1, 2, device(memory=0.8e9))
    monkeypatch.setattr(infeasible, "CLOSEST_S", 60.0)  # time enough on a busy machine, too

    with pytest.raises(InfeasibleError, match=r"\. The closest, "):
        search(model, on, job(), pins=PIPELINE_ONLY)
    monkeypatch.setattr(infeasible, "CLOSEST_S", 0.0)
    with pytest.raises(InfeasibleError, match=r"\. The closest that was found, "):
        search(model, on, job(), pins=PIPELINE_ONLY)


def test_state_that_no_layout_has_room_for_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 million elements of 16 bytes, 1.28 GB, on two devices of 95 MB."""
    model, on = units(3, 3, 1, 1), cluster(1, 2, device(memory=1e8))
    monkeypatch.setattr(answers_search, "explore_all", None)  # nothing has to be searched

    with pytest.raises(InfeasibleError) as caught:
        search(model, on, job(), pins=replace(PIPELINE_ONLY, offload_optimizer=False))

    state, room = state_and_room(Explorer(model, on, job()), PIPELINE_ONLY)
    assert (state, room) == (pytest.approx(80e6 * 16), pytest.approx(2 * 95e6))
    said = "optimizer state alone take 1.19 GiB, and all GPUs together may use 181 MiB. The closest with even stages, "
    assert said in str(caught.value)


@pytest.mark.slow
def test_layouts_that_are_not_decided_are_not_said_not_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, on = units(3, 3, 1, 1), cluster(1, 2, device(memory=0.8e9))
    whole = Explorer.explore

    def undecided(*asked: Any, **more: Any) -> Outcome:
        return replace(whole(*asked, **more), bound=1.0)

    monkeypatch.setattr(Explorer, "explore", undecided)
    with pytest.raises(InfeasibleError) as caught:
        search(model, on, job(), pins=PIPELINE_ONLY)

    assert "no layout of test was found on which synthetic fits, but not all are shown not to fit." in str(caught.value)
    assert fits(Explorer(model, on, job()), PIPELINE_ONLY, math.inf) is None


@pytest.mark.slow
def test_stages_that_go_there_and_back_may_be_over_by_less() -> None:
    """Layers of 3, 3, 1 and 1 on two ranks: 3 + 1 each in ZB-V, at least 3 + 1 + 1 on one of them in a row."""
    explorer = Explorer(units(3, 3, 1, 1), cluster(1, 2, device(memory=1e8)), job())
    even = closest_plan(explorer, PIPELINE_ONLY)
    assert even is not None

    closest = closest_of_all(explorer, PIPELINE_ONLY, even, time.monotonic() + 60)

    assert closest.plan.schedule == "zb-v"
    assert closest.more_memory < 0.85 * even.more_memory


def test_the_objective_of_fewest_gpus_finds_uneven_stages() -> None:
    model, on = units(*[8] * 4, *[1] * 32), cluster(1, 8, device(memory=17 * 10_000_000 * 20.0))

    assert cluster_for(Objective.MIN_GPUS, model, on, job(), PIPELINE_ONLY)[0].num_devices == 4


def test_flags_are_told_only_where_they_say_all_of_the_cluster() -> None:
    """--gpus and --device do not go with a cluster file, and --device not with an instance."""
    by_flags = cluster_of(load_device("h100-80gb"), 8)
    model = chain(parameters=12_500_000_000)

    told, told_of_instances = (
        refused(on, job(), model=model).changes for on in (by_flags, instance("p5.48xlarge").cluster(1))
    )

    flags = [flag for change in told for flag in ("--gpus", "--device") if flag in change]
    assert flags == ["--gpus", "--device"]
    assert len(told_of_instances) == len(told)
    assert not [change for change in told_of_instances if "--gpus" in change or "--device" in change]


@pytest.mark.parametrize(("pins", "other"), [(Pins(tensor=1, pipeline=1, data_shard=1), True), (Pins(tensor=8), False)])
def test_more_gpus_that_do_only_with_other_degrees_are_told_so(pins: Pins, other: bool) -> None:
    model, on = chain(parameters=12_500_000_000), cluster_of(load_device("h100-80gb"), 8)

    (change,) = [change for change in refused(on, job(), pins, model).changes if "--gpus" in change]

    assert ("with other degrees than are pinned" in change) == other
    assert ("without the --pin or --setup of degrees" in change) == other
    more = cluster_of(load_device("h100-80gb"), int(change.partition(" ")[0]))
    assert fits(Explorer(model, more, job()), pins, math.inf) is not other
