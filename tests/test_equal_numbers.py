"""Every way to execute a plan gives the numbers of one process: loss, gradient norm, gradients, parameters.

Three AdamW steps with clipping in fp32, each case against plain PyTorch on the whole global batch, as same_numbers.py
does it. Where a gradient is mathematically zero (biases of attention keys) both sides hold rounding noise, so gradients
are compared down to 2e-7 of the model's largest.
"""

import functools
import gc
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from meshwright.executor import Trainer
from meshwright.executor.parallel.tensor_forwards import SharedInput
from meshwright.planner.plan.document import Axis, Plan, Recompute
from meshwright.planner.plan.shape import Cuts
from support import slow
from support.ranks import run_ranks
from support.same_numbers import (
    TOLERANCE,
    Case,
    Numbers,
    errors,
    numbers_of,
    plan_of,
    samples,
    trainer_of,
)
from support.trained_models import NOISE, NUM_STEPS, VOCABULARY, loaded_model, profile_of, reference_of

os.environ.setdefault("OMP_NUM_THREADS", "1")


TENSOR_OUTSIDE: tuple[Axis, ...] = ("pipeline", "tensor", "data_shard", "context", "data_replicate")
PIPELINE_INSIDE: tuple[Axis, ...] = ("data_shard", "tensor", "data_replicate", "context", "pipeline")


INTERLEAVED = {"schedule": "interleaved"}
ZB_V = {"schedule": "zb-v"}
EVERY_KIND: tuple[Recompute, ...] = ("full", "selective", "attention", "none")

ATTENTION, MLP = (
    Cuts((("LlamaDecoderLayer", (name,)),)) for name in ("attention:self_attn.o_proj", "mlp:mlp.down_proj")
)

CASES = {
    "one device": Case("gpt"),
    "one device, recompute": Case("gpt", recompute="full", num_microbatches=4),
    "ddp": Case("gpt", replicate=2),
    "ddp, reduced every micro-batch": Case("gpt", replicate=2, more={"gradient_sync": "every"}),
    "ddp, recompute": Case("gpt", replicate=2, recompute="full"),
    "fsdp, tied": Case("gpt", shard=2, reshard=True),
    "fsdp, Llama": Case("llama", shard=2, reshard=True),
    "ddp, unread parameter": Case("normed", replicate=2),
    "tensor 2, fused qkv, tied, head": Case("gpt", tensor=2),
    "tensor 2, Conv1D": Case("gpt2", tensor=2),
    "tensor 2, norms of heads": Case("normed", tensor=2),
    "tensor 2 + sequence": Case("gpt", tensor=2, more={"sequence": True}),
    "tensor 2 + sequence, norms of heads": Case("normed", tensor=2, more={"sequence": True}),
    "tensor 2 + sequence, Conv1D": Case("gpt2", tensor=2, more={"sequence": True}),
    "tensor 2 + sequence, Llama, recompute": Case("llama", tensor=2, more={"sequence": True}, recompute="full"),
    "tensor 2, attention cut, mlp whole": Case("llama", tensor=2, more={"cuts": ATTENTION}),
    "tensor 2, mlp cut, attention whole": Case("llama", tensor=2, more={"cuts": MLP}),
    "fsdp x tensor + sequence, mlp whole on slices": Case(
        "llama", shard=2, tensor=2, reshard=True, more={"sequence": True, "cuts": ATTENTION}
    ),
    "pipeline 2, tied across stages": Case("gpt", stages=(3, 3), num_microbatches=4),
    "pipeline 2, gpipe, uneven": Case("gpt", stages=(1, 5), more={"schedule": "gpipe"}),
    "ddp x4, no accumulation": Case("gpt", replicate=4, num_microbatches=1),
    "zero-3 x4, reduced every micro-batch": Case("gpt", shard=4, reshard=True, more={"gradient_sync": "every"}),
    "zero-2 x4": Case("gpt", shard=4, more={"gradient_sync": "every"}),
    "zero-1 x4": Case("gpt", shard=4),
    "hsdp 2x2": Case("gpt", 2, 2, reshard=True),
    "hsdp 2x2, recompute, permuted": Case(
        "gpt", 2, 2, recompute="full", reshard=True, more={"mesh_axes": TENSOR_OUTSIDE}
    ),
    "tensor 4, fused qkv, tied, head": Case("gpt", tensor=4),
    "tensor 4 + sequence": Case("gpt", tensor=4, more={"sequence": True}),
    "ddp x tensor": Case("gpt", replicate=2, tensor=2),
    "fsdp x tensor": Case("gpt", shard=2, tensor=2, reshard=True),
    "fsdp x tensor + sequence, Llama, permuted": Case(
        "llama", shard=2, tensor=2, reshard=True, more={"sequence": True, "mesh_axes": TENSOR_OUTSIDE}
    ),
    "pipeline 4, recompute": Case("gpt", stages=(1, 1, 2, 2), num_microbatches=4, recompute="full"),
    "pipeline x ddp": Case("gpt", replicate=2, stages=(2, 4)),
    "pipeline x fsdp": Case("gpt", shard=2, stages=(4, 2)),
    "pipeline x zero-3, reduced every micro-batch": Case(
        "gpt", shard=2, stages=(4, 2), num_microbatches=4, reshard=True, more={"gradient_sync": "every"}
    ),
    "pipeline x zero-3, reduced last": Case("gpt", shard=2, stages=(2, 4), num_microbatches=4, reshard=True),
    "naive model parallel": Case("gpt", stages=(3, 3), num_microbatches=1, more={"schedule": "gpipe"}),
    "pipeline x hsdp": Case("gpt", 2, 2, stages=(3, 3), num_microbatches=2, reshard=True),
    "pipeline x tensor, permuted": Case("gpt", tensor=2, stages=(2, 4), more={"mesh_axes": PIPELINE_INSIDE}),
    "pipeline x tensor + sequence, cut between slices": Case("gpt", tensor=2, stages=(3, 3), more={"sequence": True}),
    "hsdp x tensor + sequence, recompute, permuted": Case(
        "gpt", 2, 2, 2, reshard=True, recompute="full", more={"sequence": True, "mesh_axes": TENSOR_OUTSIDE}
    ),
    "pipeline x fsdp x tensor + sequence, recompute": Case(
        "gpt", shard=2, tensor=2, stages=(2, 4), recompute="full", more={"sequence": True, "mesh_axes": PIPELINE_INSIDE}
    ),
}

SCHEDULES = {
    "interleaved 2x2": Case("gpt", stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more=INTERLEAVED),
    "interleaved 2x3, recompute": Case(
        "gpt", stages=(1,) * 6, virtual=3, num_microbatches=2, recompute="full", more=INTERLEAVED
    ),
    "zb-h1 2, tied across stages": Case("gpt", stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h1"}),
    "zb-h1 2x2 (interleaved zero bubble)": Case(
        "gpt", stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more={"schedule": "zb-h1"}
    ),
    "zb-h2 2, uneven": Case("gpt", stages=(1, 5), num_microbatches=4, more={"schedule": "zb-h2"}),
    "zb-v 2x2, tied on one rank": Case("gpt", stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more=ZB_V),
    "zb-v 2x2, one micro-batch": Case("gpt", stages=(2, 1, 2, 1), virtual=2, num_microbatches=1, more=ZB_V),
    "interleaved 2x2 x ddp, selective recompute": Case(
        "gpt", 2, stages=(1, 2, 1, 2), virtual=2, recompute="selective", more=INTERLEAVED
    ),
    "interleaved 2x2 x zero-3, reduced every micro-batch": Case(
        "gpt", shard=2, stages=(1, 2, 1, 2), virtual=2, reshard=True, more={**INTERLEAVED, "gradient_sync": "every"}
    ),
    "zb-h1 2 x zero-3": Case(
        "gpt", shard=2, stages=(3, 3), num_microbatches=4, reshard=True, more={"schedule": "zb-h1"}
    ),
    "zb-h1 4, uneven": Case("gpt", stages=(1, 1, 2, 2), num_microbatches=8, more={"schedule": "zb-h1"}),
    "zb-h2 2 x tensor + sequence": Case(
        "gpt", tensor=2, stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h2", "sequence": True}
    ),
    "zb-v 2x2 x fsdp, reduced every micro-batch": Case(
        "gpt", shard=2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more={**ZB_V, "gradient_sync": "every"}
    ),
    "zb-v 2x2 x tensor, norms of heads, permuted": Case(
        "normed", tensor=2, stages=(1, 1, 1, 1), virtual=2, more={**ZB_V, "mesh_axes": PIPELINE_INSIDE}
    ),
    "interleaved 2x2 x fsdp x tensor + sequence, recompute": Case(
        "gpt", shard=2, tensor=2, stages=(1, 2, 1, 2), virtual=2, recompute="full",
        more={**INTERLEAVED, "sequence": True},
    ),
}  # fmt: skip

MORE_SCHEDULES = {
    "interleaved 2x2 x tensor + sequence": Case(
        "gpt", tensor=2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more={**INTERLEAVED, "sequence": True}
    ),
    "zb-h1 2 x ddp": Case("gpt", 2, stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h1"}),
    "zb-v 2x2 x fsdp": Case("gpt", shard=2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more=ZB_V),
    "zb-v 2x2 x hsdp": Case("gpt", 2, 2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=2, more=ZB_V),
    "zb-h1 2 x fsdp x tensor": Case(
        "gpt", shard=2, tensor=2, stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h1"}
    ),
}

RECOMPUTES = {
    "one device, selective recompute": Case("gpt", recompute="selective", num_microbatches=4),
    "one device, recompute of attention": Case("unfused", recompute="attention"),
    "one device, selective recompute of unfused attention": Case("unfused", recompute="selective"),
    "ddp, selective recompute": Case("gpt", replicate=2, recompute="selective"),
    "fsdp, recompute of attention": Case("unfused", shard=2, reshard=True, recompute="attention"),
    "fsdp, selective recompute": Case("gpt", shard=2, reshard=True, recompute="selective"),
    "tensor 2 + sequence, selective recompute": Case("gpt", tensor=2, recompute="selective", more={"sequence": True}),
    "tensor 2, recompute of attention": Case("unfused", tensor=2, recompute="attention"),
    "fsdp, every kind of recompute at once": Case("unfused", shard=2, reshard=True, recompute=EVERY_KIND),
    "pipeline 2 x fsdp, three kinds of recompute in a stage": Case(
        "gpt", shard=2, stages=(3, 3), recompute=("none", "full", "selective")
    ),
    "interleaved 2x2, recompute of attention": Case(
        "unfused", stages=(1, 1, 1, 1), virtual=2, num_microbatches=4, recompute="attention", more=INTERLEAVED
    ),
}

PARTS = {
    "one device, parts of layers": Case("gpt", recompute="parts:attention+up", num_microbatches=4),
    "ddp, parts of layers": Case("llama", replicate=2, recompute="parts:self_attn+mlp"),
    "fsdp, parts of layers": Case("llama", shard=2, reshard=True, recompute="parts:self_attn+post_attention_layernorm"),
    "zero-2, other parts of each layer": Case(
        "llama", shard=2, recompute=("parts:mlp", "parts:input_layernorm+self_attn", "none"),
        more={"gradient_sync": "every"},
    ),
    "fsdp, parts beside every kind of recompute": Case(
        "unfused", shard=2, reshard=True, recompute=("parts:attention", "attention")
    ),
    "tensor 2, parts of layers": Case("llama", tensor=2, recompute="parts:self_attn+mlp"),
    "tensor 2, parts between cuts": Case("normed", tensor=2, recompute="parts:norm+attention.q+attention.k_norm"),
    "tensor 2, parts with one input": Case("parallel", tensor=2, recompute=("parts:net", "parts:attention")),
    "tensor 2 + sequence, parts that gather": Case(
        "llama", tensor=2, more={"sequence": True}, recompute=("parts:mlp", "parts:self_attn", "parts:self_attn+mlp")
    ),
    "tensor 2 + sequence, fused qkv, parts of layers": Case(
        "gpt", tensor=2, more={"sequence": True}, recompute="parts:norm1+attention+up+down"
    ),
    "fsdp x tensor + sequence, parts, permuted": Case(
        "llama", shard=2, tensor=2, reshard=True, recompute="parts:self_attn+mlp",
        more={"sequence": True, "mesh_axes": TENSOR_OUTSIDE},
    ),
    "pipeline 2, parts of layers": Case("gpt", stages=(2, 4), num_microbatches=4, recompute="parts:norm1+attention"),
    "pipeline 2 x zero-3, parts of layers": Case(
        "gpt", shard=2, stages=(2, 4), num_microbatches=4, reshard=True, recompute="parts:attention+up"
    ),
    "interleaved 2x2, parts of layers": Case(
        "gpt", stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more=INTERLEAVED,
        recompute=("parts:attention", "parts:up+down", "full", "none"),
    ),
    "interleaved 2x2 x tensor + sequence, parts": Case(
        "gpt", tensor=2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more={**INTERLEAVED, "sequence": True},
        recompute="parts:attention+up",
    ),
}  # fmt: skip

CASES |= SCHEDULES | MORE_SCHEDULES | RECOMPUTES | PARTS

QUICK = {
    "one device, selective recompute of unfused attention",
    "ddp",
    "fsdp, every kind of recompute at once",
    "tensor 2, fused qkv, tied, head",
    "tensor 2 + sequence, Llama, recompute",
    "pipeline 2, tied across stages",
    "zb-v 2x2, tied on one rank",
    "hsdp 2x2, recompute, permuted",
    "pipeline x tensor + sequence, cut between slices",
}
"""Every mechanism, and some that meet; the others run by pytest -m slow."""

FAULTS = {
    "one gradient 1% too large": Case("gpt", shard=2, fault="gradient"),
    "one sample of 24 dropped": Case("gpt", replicate=2, fault="sample"),
    "sequence-parallel norms not summed": Case("gpt", tensor=2, more={"sequence": True}, fault="partial"),
    "norms of heads not summed": Case("normed", tensor=2, fault="partial"),
    "ties across stages not summed": Case("gpt", stages=(3, 3), num_microbatches=4, fault="ties"),
}

EVERYTHING = CASES | FAULTS


def _plan(case: Case) -> Plan:
    return plan_of(case, profile_of(case.model))


def _train(case: Case) -> Numbers:
    trainer = trainer_of(loaded_model(case.model).build, _plan(case))
    _plant(case.fault, trainer)
    given = samples(VOCABULARY, NUM_STEPS)
    if case.fault == "sample":
        given[5] = given[4]
    return numbers_of(trainer, given)


def _plant(fault: str, trainer: Trainer) -> None:
    gradients = trainer._gradients
    if fault == "ties":
        gradients._ties = []
    reduce = gradients.reduce

    def faulty() -> None:
        if fault == "partial":
            gradients._layout.partial.clear()
        reduce()
        if fault == "gradient":
            trainer.model.get_parameter("blocks.2.up.weight").grad *= 1.01

    gradients.reduce = faulty  # type: ignore[method-assign]


def _run_cases(names: list[str]) -> dict[str, dict[str, float] | str]:
    outcomes: dict[str, dict[str, float] | str] = {}
    for name in names:
        case = EVERYTHING[name]
        try:
            found = _train(case)
        except Exception as error:
            raise RuntimeError(f'case "{name}" failed') from error
        if not dist.is_initialized() or dist.get_rank() == 0:
            outcomes[name] = errors(found, reference_of(case.model), NOISE / TOLERANCE)
    return outcomes


@functools.cache
def _outcomes(num_ranks: int, quick: bool) -> dict[str, dict[str, float] | str]:
    """Errors of every case for that many ranks, the quick ones or the others; they run in one fork."""
    quickly = QUICK | FAULTS.keys()
    names = [n for n, case in EVERYTHING.items() if case.num_ranks == num_ranks and (n in quickly) == quick]
    for name in names:  # before the fork, so that ranks inherit it
        reference_of(EVERYTHING[name].model)
        _plan(EVERYTHING[name])
    if num_ranks == 1:
        return _run_cases(names)
    return run_ranks(_run_cases, num_ranks, names)[0]


@pytest.mark.parametrize("name", slow.but_these(CASES, QUICK))
def test_plan_gives_the_numbers_of_one_process(name: str) -> None:
    relative = _outcomes(CASES[name].num_ranks, name in QUICK)[name]

    assert max(relative.values()) < TOLERANCE, relative


@pytest.mark.slow
@pytest.mark.parametrize("data", [{"shard": 2, "reshard": True}, {"replicate": 2}], ids=["fsdp", "ddp"])
def test_recompute_of_parts_changes_no_number_in_bf16(data: dict[str, int]) -> None:
    plain = Case("llama", precision="bf16", **data)  # type: ignore[arg-type]
    cases = plain, replace(plain, recompute="parts:input_layernorm+self_attn+mlp")
    for case in cases:
        _plan(case)

    expected, found = (run_ranks(_train, 2, case)[0] for case in cases)

    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    assert all(torch.equal(found.state[name], value) for name, value in expected.state.items())


def _inputs_left_behind(case: Case) -> int:
    """Inputs that groups of columns share, and that a step has not let go."""
    trainer = trainer_of(loaded_model(case.model).build, _plan(case))
    trainer.step(next(iter(trainer.loader(samples(VOCABULARY, 1)))))
    # isinstance would ask what weak proxies point to, which may be gone
    return sum(len(x._entered) for x in gc.get_objects() if type(x) is SharedInput)


@pytest.mark.slow
def test_a_part_that_runs_again_alone_lets_go_of_what_it_shares() -> None:
    case = CASES["tensor 2, parts with one input"]
    _plan(case)

    assert run_ranks(_inputs_left_behind, 2, case) == [0, 0]


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str) -> None:
    relative = _outcomes(FAULTS[name].num_ranks, True)[name]

    assert max(relative.values()) > 10 * TOLERANCE, relative
