"""Plans for unequal devices run: stages sit on the hosts that are meant, and training gives one process' numbers."""

import os
import socket
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist

from meshwright.executor import faults
from meshwright.executor.parallel.mesh import RankMesh, plan_ranks
from meshwright.planner.answers.search import search
from meshwright.planner.plan.document import Plan, Prediction, placement
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.units import GIB
from support import slow
from support.ranks import run_ranks
from support.same_numbers import GLOBAL_BATCH, SEQ_LEN, TOLERANCE, errors, numbers_of, samples, trainer_of
from support.synthetic import device, mixed
from support.synthetic_plans import plan_on
from support.trained_models import NOISE, NUM_STEPS, VOCABULARY, loaded_model, profile_of, reference_of

FAST = device(name="a100-80gb", memory=80e9, bandwidth=5e10, flops={"bf16": 5e10, "fp32": 5e10})
SLOW = device(name="a100-40gb", memory=40e9, bandwidth=1e10, flops={"bf16": 1e10, "fp32": 1e10})
CLUSTER = mixed((1, 2, SLOW), (1, 2, FAST))
JOB = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, precision="fp32")


def plan_in_order(order: tuple[int, ...], shape: Shape, sizes: tuple[int, ...]) -> Plan:
    stages = [[LayerOption(reshard=shape.reshard)] * size for size in sizes]
    whole = Shape(**{**shape.__dict__, "kind_order": order})
    return make_plan(profile_of("gpt"), CLUSTER, JOB, whole, stages)


PLANS = {
    "1f1b, replicas, tied across stages": (Shape(2, 1, 1, 2, 1, 4, schedule="1f1b"), (4, 2)),
    "gpipe, sharded and given back": (Shape(1, 2, 1, 2, 2, 2, schedule="gpipe", reshard=True), (2, 4)),
    "1f1b, tensor": (Shape(1, 1, 2, 2, 2, 4, schedule="1f1b"), (5, 1)),
    "interleaved": (Shape(2, 1, 1, 2, 1, 4, schedule="interleaved", virtual_stages=2), (2, 1, 2, 1)),
    "zb-h1, sharded": (Shape(1, 2, 1, 2, 1, 4, schedule="zb-h1"), (4, 2)),
    "zb-v": (Shape(2, 1, 1, 2, 1, 4, schedule="zb-v", virtual_stages=2), (2, 1, 2, 1)),
}


def _train(plan: Plan) -> dict[str, float] | None:
    """Errors on the process that plays the plan's first rank. Hosts a and b have two ranks each."""
    rank = dist.get_rank()
    socket.gethostname = lambda: "ab"[rank // 2]
    os.environ["LOCAL_RANK"] = str(rank % 2)
    trainer = trainer_of(loaded_model("gpt").build, plan)
    assert placement(plan, trainer.mesh.rank).host == rank // 2
    found = numbers_of(trainer, samples(VOCABULARY, NUM_STEPS))
    return errors(found, reference_of("gpt"), NOISE / TOLERANCE) if trainer.mesh.rank == 0 else None


def _train_all(plans: list[Plan]) -> list[dict[str, float] | None]:
    return [_train(plan) for plan in plans]


ORDERS = {"turned round": (1, 0), "as in the file": (0, 1)}

QUICK = {("1f1b, replicas, tied across stages", "turned round"), ("zb-v", "as in the file")}
"""The others run by pytest -m slow."""


@cache
def outcomes(quick: bool) -> dict[tuple[str, str], dict[str, float]]:
    """Errors of the quick plans, or of all others, with kinds in one of the two orders; they run in one fork."""
    reference_of("gpt")
    plans = {
        (name, order): plan_in_order(ORDERS[order], *PLANS[name])
        for name, order in product(PLANS, ORDERS)
        if ((name, order) in QUICK) == quick
    }
    by_rank = run_ranks(_train_all, 4, list(plans.values()))
    found = [next(e for e in of_plan if e is not None) for of_plan in zip(*by_rank, strict=True)]
    return dict(zip(plans, found, strict=True))


@pytest.mark.parametrize(("name", "order"), slow.but_these(product(PLANS, ORDERS), QUICK))
def test_a_plan_for_unequal_devices_gives_the_numbers_of_one_process(name: str, order: str) -> None:
    relative = outcomes((name, order) in QUICK)[name, order]

    assert max(relative.values()) < TOLERANCE, relative


@pytest.mark.slow
def test_a_searched_plan_with_uneven_stages_gives_the_numbers_of_one_process() -> None:
    reference_of("gpt")
    plan = search(profile_of("gpt"), CLUSTER, JOB, pins=Pins(pipeline=2, data_replicate=2)).plan

    relative = next(e for e in run_ranks(_train, 4, plan) if e is not None)

    assert len({len(stage.layers) for stage in plan.stages}) == 2
    assert max(relative.values()) < TOLERANCE, relative


@cache
def replicas() -> Plan:
    """A pipeline whose first stage is on the faster devices."""
    return plan_in_order((1, 0), *PLANS["1f1b, replicas, tied across stages"])


@pytest.mark.parametrize(
    ("seats", "devices", "ranks"),
    [
        ("aabb", [], [2, 3, 0, 1]),
        ("aabb", ["a100-40gb"] * 2 + ["a100-80gb"] * 2, [2, 3, 0, 1]),
        ("aabb", ["a100-80gb"] * 2 + ["a100-40gb"] * 2, [0, 1, 2, 3]),
        ("abab", ["a100-80gb", "a100-40gb"] * 2, [0, 2, 1, 3]),
        ("aabb", ["h200"] * 4, [2, 3, 0, 1]),
        ("aaaa", [], [0, 1, 2, 3]),
    ],
    ids=["order of the file", "devices in it", "devices against it", "dealt in turn", "unknown", "other hosts"],
)
def test_processes_play_the_ranks_of_their_kind_of_device(seats: str, devices: list[str], ranks: list[int]) -> None:
    places = [(host, seats[:i].count(host)) for i, host in enumerate(seats)]

    assert plan_ranks(replicas(), places, devices) == ranks


def test_hosts_of_unequal_size_are_matched_by_it() -> None:
    shape = Shape(1, 1, 1, 3, 1, 8, schedule="1f1b")
    on = mixed((1, 1, SLOW), (1, 2, FAST))
    plan = make_plan(profile_of("gpt"), on, JOB, shape, [[LayerOption()] * 2] * 3)

    assert plan_ranks(plan, [("a", 0), ("a", 1), ("b", 0)]) == [1, 2, 0]


class _Card:
    def __init__(self, gib: float) -> None:
        self.total_memory = gib * GIB


def test_each_rank_compares_its_own_stage_with_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    prediction = Prediction(
        step_time_s=1.0, tokens_per_s=1.0, mfu=0.1, stage_memory_bytes=(70 * GIB, 30 * GIB), budget_bytes=75 * GIB
    )
    plan = replicas().model_copy(update={"prediction": prediction})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Card(39.4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100-SXM4-40GB")

    faults.check_devices(plan, cuda)
    faults.check_own_device(RankMesh(plan, 2, cuda, None))
    with pytest.raises(ValueError, match=r"a100-80gb and needs 70.0 GiB on stage 0; the A100-SXM4-40GB here has 39.4"):
        faults.check_own_device(RankMesh(plan, 1, cuda, None))


def test_equal_devices_are_compared_with_the_fullest_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Card(39.4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    prediction = Prediction(
        step_time_s=1.0, tokens_per_s=1.0, mfu=0.1, stage_memory_bytes=(70 * GIB, 30 * GIB), budget_bytes=75 * GIB
    )

    with pytest.raises(ValueError, match="its fullest stage"):
        faults.check_devices(plan_on(2, 2).model_copy(update={"prediction": prediction}), torch.device("cuda", 0))
