"""One rank with real kernels and no peers: it runs under every kind of plan, and its times make up a step."""

import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.utils import _to_kwargs

from benchmarks.one_gpu import proofs
from benchmarks.one_gpu.prepared import Failure
from benchmarks.one_gpu.rank import RankRun, run_rank
from benchmarks.one_gpu.table import Row, markdown, rows_of
from meshwright.executor import trainer
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.executor.measuring.one_rank import without_peers
from meshwright.planner.answers.search import price_setup
from meshwright.planner.cost.alone import composed_step_s, kernels_s
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.cli import small_profile, some_plan

GPT = Path(__file__).parent.parent / "benchmarks" / "models" / "gpt.py"


@cache
def gpt() -> tuple[LoadedModel, Any]:
    """The small GPT and its profile."""
    small = load_model(GPT).small
    assert small is not None
    return small(), trace(small())


def plan_of(words: str, device: str = "cpu", profile: ModelProfile | None = None) -> Plan:
    """The small GPT, or another model, on four devices."""
    profile = profile or gpt()[1]
    training = TrainingSpec(global_batch=8, seq_len=profile.seq_len)
    candidate = price_setup(parse_setup(words, 4, 4), profile, cluster_of(load_device(device), 4), training)
    assert candidate.plan is not None, candidate.verdict
    return candidate.plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rank", "stage"),
    [
        ("ddp", 0, 0),
        ("fsdp", 3, 0),
        ("tp=2 sp=on fsdp", 1, 0),
        ("cp=2 fsdp", 0, 0),
        ("pp=2 schedule=1f1b", 2, 1),
    ],
)
def test_a_rank_steps_without_its_peers(words: str, rank: int, stage: int) -> None:
    run = run_rank(gpt()[0], plan_of(words), rank, "cpu", steps=1)

    assert (run.rank, run.stage, run.peak_bytes) == (rank, stage, None)
    assert run.step_s > 0
    assert not dist.is_initialized()


def test_checks_that_are_left_out_keep_no_tensor() -> None:
    spoiled = torch.full((3,), torch.nan)
    kept = weakref.ref(spoiled)

    with without_peers(0, 1):
        trainer.check_finite(spoiled)  # type: ignore[arg-type, call-arg]
        del spoiled

        assert kept() is None


@pytest.mark.slow
def test_a_sharded_stage_steps_where_its_inputs_are_moved_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = FSDPState._root_pre_forward

    def as_on_a_gpu(state: Any, module: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = untouched(state, module, args, kwargs)
        if state._state_ctx.iter_forward_root is not state:
            return args, kwargs
        moved, named = _to_kwargs(args, kwargs, torch.device("cpu"), False)
        return moved[0], named[0]

    monkeypatch.setattr(FSDPState, "_root_pre_forward", as_on_a_gpu)

    run = run_rank(gpt()[0], plan_of("pp=2 schedule=1f1b fsdp"), 0, "cpu", steps=1)

    assert run.step_s > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's compiler
@pytest.mark.parametrize("name", proofs.PROOFS)
def test_proofs_that_need_no_gpu_hold_and_others_say_so(name: str) -> None:
    found = proofs.PROOFS[name]("cpu")

    needs_none = {"compiled layers", "save beside the next steps", "attention kernels"}
    needs_none.add("offload of activations and of the optimizer")
    assert (found == proofs.NEEDS_GPU) == (name not in needs_none)


@pytest.mark.slow
def test_a_wrong_gradient_of_attention_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    right = proofs.attention_backward
    monkeypatch.setattr(proofs, "attention_backward", lambda *given: [1.1 * grad for grad in right(*given)])

    with pytest.raises(proofs.FailedError, match="relative difference of an output or gradient"):
        proofs.attention("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("words", ["fsdp", "pp=2 schedule=1f1b"])
def test_memory_of_a_rank_on_a_gpu_is_what_is_predicted(words: str) -> None:
    profile = trace(load_model(GPT))
    plan = plan_of(words, "h100-80gb", profile)

    run = run_local_ranks(_on_gpu, 1, plan, timeout_s=300.0, device_type="cuda")[0]

    assert run.peak_bytes == pytest.approx(estimate(plan, profile).memory[0].allocated_bytes, rel=0.05)


def _on_gpu(plan: Plan) -> RankRun:
    """In a process of its own: what another rank has left would count."""
    return run_rank(load_model(GPT), plan, 0, "cuda", steps=2)


PLANS = {
    "FSDP": some_plan(shard=4),
    "GPipe": some_plan(shard=2, pipeline=2),
    "four stages": some_plan(tensor=2, pipeline=4),
}


@pytest.mark.parametrize("name", PLANS)
def test_predicted_kernels_make_up_the_predicted_step(name: str) -> None:
    plan, profile = PLANS[name], small_profile()
    found = estimate(plan, profile)
    same = dict.fromkeys(range(plan.degrees.pipeline), 1.0)

    assert composed_step_s(plan, profile, found, same) == pytest.approx(found.step_time_s, rel=1e-9)


def test_kernels_are_all_of_a_step_but_communication_and_waiting() -> None:
    plan, profile = PLANS["FSDP"], small_profile()
    found = estimate(plan, profile)
    items = [found.breakdown[name] for name in ("compute", "launch", "recompute", "optimizer")]

    assert kernels_s(plan, profile, found, 0) == pytest.approx(sum(items), rel=1e-9)


def test_slower_kernels_make_the_step_longer_by_what_they_take() -> None:
    plan, profile = PLANS["FSDP"], small_profile()
    found = estimate(plan, profile)

    step_s = composed_step_s(plan, profile, found, {0: 1.5})

    assert step_s == pytest.approx(found.step_time_s + 0.5 * kernels_s(plan, profile, found, 0), rel=1e-9)


def test_a_slow_stage_slows_the_whole_pipeline_and_a_missing_one_leaves_it_open() -> None:
    plan, profile = PLANS["GPipe"], small_profile()
    found = estimate(plan, profile)

    slower = composed_step_s(plan, profile, found, {0: 1.0, 1: 2.0})

    assert slower is not None
    assert 1.3 * found.step_time_s < slower < 2.0 * found.step_time_s
    assert composed_step_s(plan, profile, found, {0: 1.0}) is None


def test_the_table_has_every_rank_that_ran_and_why_others_did_not() -> None:
    plan, profile = PLANS["GPipe"], small_profile()
    found = estimate(plan, profile)
    runs = [
        RankRun(stage, stage, kernels_s(plan, profile, found, stage), None, 2**30, 2**31, 1.06 * 2**30)
        for stage in (0, 1)
    ]
    rows: list[Row] = rows_of("m", "pp=2", plan, profile, runs)

    table = markdown(rows, [Failure("m", "tp=3", "not legal: 3 heads")], "a device", 4)

    assert [row.composed_step_s for row in rows] == pytest.approx([found.step_time_s] * 2)
    assert table.count("| m | pp=2 | FSDP 2 + PP 2 (GPipe) |") == 2
    assert "- m, tp=3: not legal: 3 heads" in table
