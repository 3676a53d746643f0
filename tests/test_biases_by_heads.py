"""Attention with a learned bias for each head, made in one layer and read by all (T5), is cut by its heads."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.planner.plan.document import Plan, Recompute
from meshwright.planner.plan.legality import can_recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import Cuts, LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.model_profile import TensorCut
from meshwright.profiler.tensor_cuts.tensor_rank import OwnHeads
from support.same_numbers import has_parts
from support.small_models import GLOBAL_BATCH, small_model, small_profile
from support.synthetic import cluster

NUM_STEPS = 5
HEADS, LENGTH = 4, 16


def _attention_cuts() -> dict[str, list[TensorCut]]:
    return {c.name: [cut for cut in c.cuts if cut.kind == "attention"] for c in small_profile("t5").classes if c.cuts}


@pytest.mark.slow
def test_attention_of_every_block_is_cut_with_its_bias() -> None:
    found = {
        name: [(cut.rows[0].rpartition(".")[0], cut.tables, cut.given, cut.returned) for cut in cuts]
        for name, cuts in _attention_cuts().items()
    }

    own, cross = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    table = (f"{own}.relative_attention_bias",)
    assert found == {
        "T5Block": [(own, table, {}, {1: 1})],
        "T5Block.2": [(own, (), {2: 1}, {1: 1})],
        "T5Block.3": [(own, table, {}, {1: 1}), (cross, (), {}, {1: 1})],
        "T5Block.4": [(own, (), {2: 1}, {1: 1}), (cross, (), {3: 1}, {1: 1})],
    }


@pytest.mark.slow
def test_a_bias_is_gathered_where_it_is_made_and_its_gradient_where_it_is_read() -> None:
    profile = small_profile("t5")
    first, second = (next(c for c in profile.classes if c.name == name) for name in ("T5Block", "T5Block.2"))
    assert first.tensor is not None
    assert second.tensor is not None

    gathers = [
        [(c.part, c.tensor.at(1, 4)) for c in costs.collectives if c.kind == "all_gather"]
        for costs in (first.tensor, second.tensor)
    ]

    bias = 4 * HEADS * LENGTH * LENGTH
    assert gathers == [[("backward", bias), ("forward", bias)], [("backward", bias)]]


def _planned(shape: Shape, recompute: Recompute = "none") -> Plan:
    profile = small_profile("t5")
    options = [
        LayerOption(
            recompute if can_recompute(profile, layer) and has_parts(layer, recompute) else "none", shape.reshard
        )
        for layer in profile.layers
    ]
    ends = [round(i * len(options) / shape.pipeline) for i in range(shape.pipeline + 1)]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision="fp32", optimizer="adamw")
    stages = [options[first:last] for first, last in pairwise(ends)]
    return make_plan(profile, cluster(1, shape.degrees.num_devices), training, shape, stages)


def _shape(shard: int = 1, tensor: int = 2, pipeline: int = 1, **more: Any) -> Shape:
    return Shape(1, shard, tensor, pipeline, 2, GLOBAL_BATCH // (2 * shard), **more)


PIPELINE = {"pipeline": 2, "schedule": "1f1b"}

SOME = Cuts(
    (
        ("T5Block", ("mlp:layer.1.DenseReluDense.wo",)),
        ("T5Block.2", ("attention:layer.0.SelfAttention.o",)),
        ("T5Block.3", ("attention:layer.1.EncDecAttention.o",)),
    )
)

TRAINED: dict[str, tuple[Shape, Recompute]] = {
    "every head on a rank of its own, selective recompute": (_shape(tensor=4), "selective"),
    "some cut and others whole": (_shape(cuts=SOME), "none"),
    "shards, stages, full recompute": (_shape(shard=2, reshard=True, **PIPELINE), "full"),
    "stages, parts that attend": (_shape(**PIPELINE), "parts:layer.0+layer.1"),
    "shards, a part that makes the bias": (_shape(shard=2, reshard=True), "parts:layer.0"),
    "stages, recompute of attention": (_shape(**PIPELINE), "attention"),
    "stages alone, tied by a name that no layer reads": (_shape(tensor=1, **PIPELINE), "none"),
}


@pytest.mark.slow
def test_heads_of_a_repetition_that_ends_early_are_let_go() -> None:
    cut = next(cut for cut in _attention_cuts()["T5Block.2"] if cut.given)
    own = OwnHeads(cut, lambda whole, dim: whole, lambda part, dim: part)
    args = tuple(torch.zeros(()) for _ in range(1 + max(cut.given)))

    for _ in range(3):
        own.enter(torch.nn.Identity(), args, {})

    assert len(own._taken) == len(cut.given) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_attention_with_biases_gives_the_numbers_of_one_process(case: str) -> None:
    loaded, plan = small_model("t5"), _planned(*TRAINED[case])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [loaded.batch(GLOBAL_BATCH) for _ in range(NUM_STEPS)]

    report = beside_one_process(VerifyReport(case, (), {}), plan, loaded, batches, timeout_s=120.0)

    assert report.ok, [*report.lines, report.detail]
