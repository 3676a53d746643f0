"""Telemetry: a line of JSON for every step, communication by axis, and the run beside its plan's prediction."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.executor import parallelize
from meshwright.executor.reporting.run_report import run_table
from meshwright.executor.run_document import load_run
from meshwright.executor.telemetry import CommunicationClock, covered_s
from meshwright.executor.trainer import computed_seconds
from meshwright.planner.plan.document import Plan, Prediction
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.ranks import run_ranks
from support.tied_net import GLOBAL_BATCH, TiedNet, adamw, loss, plan_of, samples, tied_profile


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return tied_profile()


def predicted(plan: Plan) -> Plan:
    prediction = Prediction(
        step_time_s=0.5,
        tokens_per_s=GLOBAL_BATCH / 0.5,
        mfu=0.4,
        stage_memory_bytes=(2.0**30,) * plan.degrees.pipeline,
        budget_bytes=2.0**31,
    )
    return plan.model_copy(update={"prediction": prediction})


def _run(plan: Plan, path: Path, steps: int = 4) -> list[tuple[float, float, float]]:
    """(loss, norm, seconds) of every step, as `step` gave them."""
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, telemetry=path)
    found = [trainer.step(share) for _, share in zip(range(steps), trainer.loader(samples), strict=False)]
    trainer.close()
    assert dist.ProcessGroup.allreduce.__name__ == "allreduce"  # torch is as it was
    return [(m.loss, m.grad_norm, m.step_time_s) for m in found]


@pytest.mark.parametrize(
    ("degrees", "axes"),
    slow.but_first(
        [
            ({}, set()),
            ({"replicate": 2}, {"data_replicate"}),
            ({"shard": 2, "tensor": 2}, {"data_shard", "tensor", "all"}),
            ({"replicate": 2, "shard": 2}, {"data_replicate", "data_shard", "all"}),
            ({"replicate": 2, "stages": (2, 2)}, {"data_replicate", "pipeline", "all"}),
        ],
        2,
    ),
    ids=["one", "ddp", "fsdp and tensor", "hsdp", "ddp in stages"],
)
def test_every_step_is_a_line_with_all_axes(
    profile: ModelProfile, tmp_path: Path, degrees: dict[str, Any], axes: set[str]
) -> None:
    plan, path = predicted(plan_of(profile, **degrees)), tmp_path / "run.jsonl"

    told = run_ranks(_run, plan.degrees.num_devices, plan, path)[0]

    header, steps = load_run(path)
    assert header.num_ranks == plan.degrees.num_devices
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [(step.loss, step.grad_norm, step.step_time_s) for step in steps] == told
    for step in steps:
        assert step.tokens_per_s == pytest.approx(GLOBAL_BATCH / step.step_time_s)
        assert step.mfu == pytest.approx(0.4 * 0.5 / step.step_time_s)
        assert len(step.peak_memory_bytes) == plan.degrees.num_devices
        assert min(step.peak_memory_bytes) > 50e6
        assert len(step.rank_compute_s) == plan.degrees.num_devices
        assert min(step.rank_compute_s) > 0
        assert step.communication_s.keys() == axes
        assert all(0 < axis.mean <= axis.max for axis in step.communication_s.values())
    # The first step of replicas also wraps them; later ones cannot take longer than the step.
    assert all(axis.mean < step.step_time_s for step in steps[1:] for axis in step.communication_s.values())


def test_numbers_are_those_of_a_run_without_telemetry(profile: ModelProfile, tmp_path: Path) -> None:
    def plain(plan: Plan) -> list[tuple[float, float]]:
        trainer = parallelize(TiedNet, plan, adamw, loss=loss)
        found = [trainer.step(share) for _, share in zip(range(4), trainer.loader(samples), strict=False)]
        return [(m.loss, m.grad_norm) for m in found]

    plan = plan_of(profile, replicate=2)
    watched = run_ranks(_run, 2, plan, tmp_path / "run.jsonl")[0]

    assert [(value, norm) for value, norm, _ in watched] == run_ranks(plain, 2, plan)[0]


LATE_S = 1.0


def _late(plan: Plan, waiting: Any) -> tuple[dict[str, float], dict[str, float], float, float]:
    """Seconds on the axes where rank 0 comes LATE_S later than rank 1, at least, to one of two all-reduces; the same
    where nothing is sent; how long it all took; and how much of it nothing was waited for."""
    trainer = parallelize(TiedNet, plan, adamw, loss=loss)
    clock = CommunicationClock(trainer.mesh)
    dist.barrier()
    began = time.monotonic()
    clock.start()
    if dist.get_rank() == 0:
        waiting.wait()
        time.sleep(LATE_S)
    if dist.get_rank() == 1:
        waiting.set()
    dist.all_reduce(torch.ones(4), group=trainer.mesh.group("tensor"))
    work = dist.all_reduce(torch.ones(4), group=trainer.mesh.group("data_shard"), async_op=True)
    assert work is not None
    work.wait()
    found = clock.stop()()
    assert found.computed_s is not None
    took_s = time.monotonic() - began
    clock.start()
    nothing = clock.stop()()
    clock.close()
    return found.axis_s, nothing.axis_s, took_s, found.computed_s


@pytest.mark.slow
def test_waiting_for_a_late_rank_counts_on_the_axis_that_waits(profile: ModelProfile) -> None:
    waiting = multiprocessing.get_context("fork").Event()

    ranks = run_ranks(_late, 4, plan_of(profile, shard=2, tensor=2), waiting)

    late, beside = ranks[0][0]["tensor"], ranks[1][0]["tensor"]
    assert beside - late > LATE_S / 2
    assert all(sum(found.values()) <= took_s for found, _, took_s, _ in ranks)
    assert all(nothing == {} for _, nothing, _, _ in ranks)
    late_s, *others_s = (computed_s for *_, computed_s in ranks)
    assert late_s > LATE_S > LATE_S / 2 > max(others_s)


SLOWER_S = 0.1


def _slow_second(plan: Plan, path: Path) -> None:
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, telemetry=path)
    if dist.get_rank() == 1:
        trainer.model.register_forward_hook(lambda *_: time.sleep(SLOWER_S))
    for _, share in zip(range(4), trainer.loader(samples), strict=False):
        trainer.step(share)
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"replicate": 2}, {"shard": 2}], ids=["ddp", "fsdp"])
def test_a_slower_rank_computes_longer_and_the_others_wait(
    profile: ModelProfile, tmp_path: Path, degrees: dict[str, int]
) -> None:
    plan, path = plan_of(profile, **degrees), tmp_path / "run.jsonl"
    run_ranks(_slow_second, 2, plan, path)

    _, steps = load_run(path)

    more = sorted(step.rank_compute_s[1] - step.rank_compute_s[0] for step in steps[1:])
    assert more[1] == pytest.approx(plan.num_microbatches * SLOWER_S, rel=0.5)


def _computed(plan: Plan) -> tuple[list[float | None], list[float | None], float]:
    """What a rank computes in each of three steps, what is told of none after them, and the longest step."""
    trainer = parallelize(TiedNet, plan, adamw, loss=loss)
    computed = computed_seconds(trainer)
    longest_s = max(
        trainer.step(share).step_time_s for _, share in zip(range(3), trainer.loader(samples), strict=False)
    )
    found = computed.taken(), computed.taken(), longest_s
    trainer.close()
    assert dist.ProcessGroup.allreduce.__name__ == "allreduce"  # torch is as it was
    return found


def test_without_a_file_a_trainer_tells_what_its_rank_computes(profile: ModelProfile) -> None:
    for computed, nothing, longest_s in run_ranks(_computed, 2, plan_of(profile, replicate=2)):
        assert len(computed) == 3
        assert all(seconds is not None and 0 < seconds < longest_s for seconds in computed)
        assert nothing == []


def test_spans_that_overlap_count_once() -> None:
    assert covered_s([(0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (5.0, 6.0)]) == 4.0
    assert covered_s([]) == 0.0


def test_a_run_that_goes_on_replaces_the_steps_it_repeats(profile: ModelProfile, tmp_path: Path) -> None:
    path, plan = tmp_path / "run.jsonl", plan_of(profile)
    _run(plan, path, steps=3)
    _run(plan, path, steps=2)
    with path.open("a") as file:
        file.write('{"step":3,"lo')  # killed while it wrote

    _, steps = load_run(path)

    assert [step.step for step in steps] == [1, 2]
    assert len(path.read_text().splitlines()) == 8


def test_the_run_stands_beside_the_prediction(profile: ModelProfile, tmp_path: Path) -> None:
    path, plan = tmp_path / "run.jsonl", predicted(plan_of(profile, stages=(2, 2)))
    run_ranks(_run, 2, plan, path, 5)
    _, steps = load_run(path)
    median_s = sorted(step.step_time_s for step in steps[2:])[1]

    table = run_table(plan, path, {"pipeline": 0.25})

    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["step time, ms"] == ("500.0", f"{median_s * 1e3:,.1f}", f"{median_s / 0.5 - 1:+.1%}")
    assert rows["samples/s"][0] == "16"
    assert rows["MFU, %"][0] == "40.0"
    peak = max(step.peak_memory_bytes[1] for step in steps[2:]) / 2**30
    assert rows["peak memory of pipeline rank 1, GiB"] == ("1.00", f"{peak:.2f}", f"{peak - 1:+.1%}")
    assert rows["communication pipeline, ms under way"][0] == "250.0"


def test_what_is_no_run_of_the_plan_is_refused(profile: ModelProfile, tmp_path: Path) -> None:
    path, plan = tmp_path / "run.jsonl", plan_of(profile)
    _run(plan, path, steps=2)
    (tmp_path / "broken.jsonl").write_text("{}\n{}\n")

    with pytest.raises(ValueError, match="has 2 steps"):
        run_table(plan, path)
    with pytest.raises(ValueError, match="is a run of TiedNet by one device, the plan is for TiedNet by DDP"):
        run_table(plan_of(profile, replicate=2), path)
    with pytest.raises(ValueError, match="no such run"):
        run_table(plan, tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="line 1 is not of a run"):
        run_table(plan, tmp_path / "broken.jsonl")
