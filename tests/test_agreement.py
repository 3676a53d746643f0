"""What an estimate says of traffic and memory is what ranks of large jobs do: played on fake tensors, alone."""

from functools import cache
from typing import Any

import pytest

from benchmarks.accuracy.agreement import Case, memory_rows, model_of, plan_of, traffic_rows
from benchmarks.accuracy.cases import profile_of
from benchmarks.accuracy.played import Played, play, ranks_to_play
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.memory_cost import MASTER_BYTES
from support import slow

MOST_BYTES = 0.01
LEAST, MOST = -0.08, 0.50
"""Planned over counted peak: more than the truth where the largest transient does not lie on top of all that is kept
(an embedding's gradient comes when a micro-batch's activations are gone)."""

CASES = {
    "one device": Case("gpt", num_microbatches=2),
    "ddp": Case("gpt", replicate=8, num_microbatches=2, precision="fp32"),
    "fsdp": Case("gpt", shard=8, reshard=True),
    "hsdp, 1024 ranks": Case("gpt", replicate=128, shard=8, reshard=True),
    "zero-2": Case("mlp", shard=64, micro_batch=4096, num_microbatches=3, sync="every"),
    "fsdp, recompute": Case("bert_large", shard=64, reshard=True, recompute="full"),
    "tensor": Case("gpt", tensor=4),
    "fsdp x tensor + sequence, 1024 ranks": Case(
        "llama3_8b", shard=128, tensor=8, sequence=True, reshard=True, micro_batch=2
    ),
    "pipeline x ddp": Case("gpt", replicate=4, pipeline=2, num_microbatches=4, precision="fp32"),
    "pipeline x fsdp, gpipe": Case("gpt", shard=16, pipeline=2, num_microbatches=2, schedule="gpipe"),
    "pipeline x fsdp x tensor": Case("bert_large", shard=8, tensor=2, pipeline=2, num_microbatches=2),
    "context in a ring x pipeline": Case("gpt", shard=2, context=4, pipeline=2, num_microbatches=2, recompute="full"),
    "context, heads for tokens": Case("gpt", shard=4, context=2, context_kind="all_to_all", reshard=True),
    "context, gathered x tensor + sequence": Case(
        "llama3_8b", shard=2, tensor=2, sequence=True, context=2, context_kind="all_gather", reshard=True, micro_batch=1
    ),
    "attention with biases, cut by heads": Case("t5_small", tensor=4, micro_batch=4, num_microbatches=2),
    "convolutions": Case("unet", shard=8, reshard=True, micro_batch=16, precision="fp32"),
}

TRAFFIC_CASES = CASES | {
    "fewer experts than shards": Case("mixtral_8x7b", shard=64, reshard=True, micro_batch=1, num_microbatches=2),
    "tied weights on one stage of two": Case("t5_small", shard=4, pipeline=2, num_microbatches=2),
    "an output that is made halfway": Case("t5_small", shard=4, reshard=True, num_microbatches=2),
    "skips across cuts": Case("unet", pipeline=3, micro_batch=8, num_microbatches=3, precision="fp32"),
}
"""Of those that are not in CASES only traffic is compared."""

QUICK = {"zero-2"}
"""Others are played by pytest -m slow; of ranks that run, test_predicted_against_counted.py counts some."""


@cache
def ranks(name: str) -> list[Played]:
    """What ranks of a plan do."""
    case = TRAFFIC_CASES[name]
    plan = plan_of(case)
    first_of_stages = ranks_to_play(plan)[: case.pipeline]
    return [play(model_of(case.model), plan, rank) for rank in first_of_stages]


def traffic(name: str) -> list[dict[str, Any]]:
    """Rows of its collectives."""
    case = TRAFFIC_CASES[name]
    return traffic_rows(estimate(plan_of(case), profile_of(model_of(case.model))), ranks(name))


@pytest.mark.parametrize("name", slow.but_these(TRAFFIC_CASES, QUICK))
def test_planned_traffic_is_what_ranks_pass(name: str) -> None:
    wrong = [row for row in traffic(name) if row["calls off"] or abs(row["off"]) > MOST_BYTES]

    assert wrong == []


@pytest.mark.parametrize("name", slow.but_these(CASES, QUICK))
def test_planned_memory_is_the_peak_of_ranks(name: str) -> None:
    case = CASES[name]

    rows = memory_rows(estimate(plan_of(case), profile_of(model_of(case.model))), ranks(name))

    assert [row for row in rows if not LEAST <= row["off"] <= MOST] == []


def test_every_rank_of_a_played_job_holds_its_share_of_the_parameters() -> None:
    few, many = (play(model_of("mlp"), plan_of(Case("mlp", shard=n, micro_batch=1)), 0) for n in (2, 64))
    elements = profile_of(model_of("mlp")).num_parameters

    assert few.peak_bytes - many.peak_bytes >= 4 * MASTER_BYTES * elements * (1 / 2 - 1 / 64) * 0.7
