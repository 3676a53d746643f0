"""What an estimate says of communication and memory is what the executor does: counted on real gloo ranks."""

import functools
import gc
import os
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.accuracy.counters import Passed, PeakMeter, Traffic
from meshwright.executor import Trainer, parallelize
from meshwright.planner.cost.comm_cost import CollectiveKind
from meshwright.planner.cost.estimate import Estimate, estimate
from meshwright.planner.plan.document import AXES, Axis, Plan, Recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import Cuts, LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.ranks import run_ranks
from support.synthetic import cluster
from support.zoo import zoo_module

os.environ.setdefault("OMP_NUM_THREADS", "1")

GLOBAL_BATCH = 8
SEQ_LEN = 64
VOCABULARY = 512
SMALLEST_BYTES = 64
LEAST, MOST = 0.97, 1.1
"""Predicted over counted peak. Seen: 0.978 to 1.084; the most in bf16 with recompute on one device."""

WARM_UP_STEPS = 2
"""The first makes optimizer state, in the second DDP puts its buckets in order."""


@dataclass(frozen=True)
class Case:
    """One plan; stages: layers per stage."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    stages: tuple[int, ...] = ()
    num_microbatches: int = 2
    reshard: bool = False
    recompute: Recompute = "none"
    precision: Precision = "fp32"
    global_batch: int = GLOBAL_BATCH
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan."""
        return self.replicate * self.shard * self.tensor * max(1, len(self.stages))


ATTENTION, MLP = (Cuts((("Block", (name,)),)) for name in ("attention:attention.out", "mlp:down"))

PARTS = "parts:norm1+attention+norm2"

CASES = {
    "one device": Case(),
    "one device, one micro-batch": Case(num_microbatches=1),
    "one device, recompute": Case(recompute="full"),
    "one device, bf16": Case(precision="bf16"),
    "one device, bf16, recompute": Case(precision="bf16", recompute="full"),
    "one device, parts": Case(recompute=PARTS),
    "one device, bf16, parts": Case(precision="bf16", recompute="parts:attention"),
    "ddp": Case(replicate=2),
    "ddp, bf16": Case(replicate=2, precision="bf16"),
    "fsdp": Case(shard=2, reshard=True, num_microbatches=1),
    "fsdp, bf16": Case(shard=2, reshard=True, precision="bf16"),
    "fsdp, recompute": Case(shard=4, reshard=True, recompute="full"),
    "fsdp, parts": Case(shard=2, reshard=True, recompute="parts:attention"),
    "fsdp, bf16, parts": Case(shard=2, reshard=True, precision="bf16", recompute=PARTS),
    "zero-2, every": Case(shard=2, more={"gradient_sync": "every"}),
    "zero-1, last": Case(shard=2),
    "hsdp": Case(2, 2, reshard=True, num_microbatches=1),
    "tensor 2": Case(tensor=2),
    "tensor 2, bf16": Case(tensor=2, precision="bf16"),
    "tensor 2 + sequence, bf16, recompute": Case(tensor=2, precision="bf16", recompute="full", more={"sequence": True}),
    "tensor 2 + sequence": Case(tensor=2, more={"sequence": True}),
    "tensor 2 + sequence, recompute": Case(tensor=2, recompute="full", more={"sequence": True}),
    "tensor 2, parts": Case(tensor=2, recompute="parts:attention"),
    "tensor 2 + sequence, parts": Case(tensor=2, recompute=PARTS, more={"sequence": True}),
    "tensor 2 + sequence, parts that gather": Case(tensor=2, recompute="parts:attention", more={"sequence": True}),
    "fsdp x tensor + sequence": Case(shard=2, tensor=2, reshard=True, more={"sequence": True}),
    "fsdp x tensor + sequence, bf16": Case(shard=2, tensor=2, reshard=True, precision="bf16", more={"sequence": True}),
    "tensor 2, attention cut, mlp whole": Case(tensor=2, more={"cuts": ATTENTION}),
    "tensor 2, mlp cut, attention whole": Case(tensor=2, more={"cuts": MLP}, precision="bf16"),
    "tensor 2 + sequence, mlp whole on slices": Case(tensor=2, more={"sequence": True, "cuts": ATTENTION}),
    "fsdp x tensor + sequence, mlp whole on slices, recompute": Case(
        shard=2, tensor=2, reshard=True, recompute="full", more={"sequence": True, "cuts": ATTENTION}
    ),
    "pipeline 2": Case(stages=(4, 4), num_microbatches=4),
    "pipeline 2, bf16": Case(stages=(4, 4), num_microbatches=4, precision="bf16"),
    "pipeline 4, recompute": Case(stages=(2, 2, 2, 2), num_microbatches=8, recompute="full"),
    "pipeline 2, parts": Case(stages=(4, 4), num_microbatches=4, recompute=PARTS),
    "pipeline x tensor + sequence, parts": Case(
        tensor=2, stages=(4, 4), recompute="parts:attention", more={"sequence": True}
    ),
    "pipeline x ddp": Case(2, stages=(4, 4)),
    "pipeline x fsdp": Case(shard=2, stages=(4, 4)),
    "pipeline x fsdp, parameters given back": Case(shard=2, stages=(4, 4), reshard=True),
    "pipeline x tensor + sequence": Case(tensor=2, stages=(4, 4), more={"sequence": True}),
    "pipeline x tensor + sequence, cut before the slices": Case(tensor=2, stages=(1, 7), more={"sequence": True}),
    "pipeline x tensor + sequence, cut behind the slices": Case(tensor=2, stages=(7, 1), more={"sequence": True}),
}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Counted:
    """What one rank did in its third step."""

    stage: int
    passed: dict[tuple[Axis, CollectiveKind], Passed]
    peak_bytes: int


def _build() -> nn.Module:
    gpt = zoo_module("gpt.py")
    model: nn.Module = gpt.GPT(gpt.Config(num_layers=6, num_heads=4, width=128, vocabulary=VOCABULARY, context=SEQ_LEN))
    return model


def _batch(size: int, seq_len: int = SEQ_LEN) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), batch[1].flatten())


@functools.cache
def _loaded() -> LoadedModel:
    return load_model(_build, batch=_batch, loss=_loss)


@functools.cache
def _profile() -> ModelProfile:
    return trace(_loaded())


def _plan(case: Case) -> Plan:
    profile = _profile()
    shape = Shape(
        data_replicate=case.replicate,
        data_shard=case.shard,
        tensor=case.tensor,
        pipeline=max(1, len(case.stages)),
        micro_batch=case.global_batch // (case.replicate * case.shard) // case.num_microbatches,
        num_microbatches=case.num_microbatches,
        reshard=case.reshard,
        **{"schedule": "1f1b" if case.stages else "none", "mesh_axes": AXES, **case.more},
    )
    layers = iter(profile.layers)
    option = LayerOption(reshard=case.reshard)
    stages = [
        [
            replace(option, recompute=case.recompute) if layer.name.startswith("blocks") else option
            for _, layer in zip(range(size), layers, strict=False)
        ]
        for size in case.stages or (len(profile.layers),)
    ]
    training = TrainingSpec(global_batch=case.global_batch, seq_len=SEQ_LEN, precision=case.precision)
    return make_plan(profile, cluster(1, case.num_ranks), training, shape, stages)


def _predicted(case: Case) -> Estimate:
    return estimate(_plan(case), _profile())


def _third_step(case: Case) -> Counted:
    with PeakMeter() as memory:
        trainer = parallelize(
            _loaded().build, _plan(case), lambda ps: torch.optim.AdamW(ps, lr=1e-3), loss=_loss, max_grad_norm=1.0
        )
        share = tuple(t.clone() for t in _batch(trainer.samples_per_step))
        for _ in range(WARM_UP_STEPS):
            trainer.step(share)
        memory.begin()
        with Traffic(SMALLEST_BYTES) as traffic:
            trainer.step(share)
    return Counted(
        stage=trainer.mesh.coordinates["pipeline"],
        passed={(_axis(trainer, ranks), kind): passed for (ranks, kind), passed in traffic.passed.items()},
        peak_bytes=memory.peak,
    )


def _axis(trainer: Trainer, ranks: tuple[int, ...]) -> Axis:
    """The axis that ranks lie on; those that hold tied weights are a part of their axis."""
    for axis in AXES:
        group = trainer.mesh.group(axis)
        if group is not None and set(ranks) <= set(dist.get_process_group_ranks(group)):
            return axis
    raise AssertionError(f"ranks {ranks} are on no axis of the mesh")


def _third_steps(cases: list[Case]) -> list[Counted]:
    found = []
    for case in cases:
        found.append(_third_step(case))
        gc.collect()  # or the trainer before counts, too
    return found


@functools.cache
def _counted_on(num_ranks: int) -> dict[str, list[Counted]]:
    """Case -> [rank] -> what it did; all cases for that many ranks run in one fork."""
    cases = {name: case for name, case in CASES.items() if case.num_ranks == num_ranks}
    for case in cases.values():
        _plan(case)
    ranks = (
        [_third_steps(list(cases.values()))]
        if num_ranks == 1
        else run_ranks(_third_steps, num_ranks, list(cases.values()))
    )
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(cases)}


def _counted(name: str) -> list[Counted]:
    return _counted_on(CASES[name].num_ranks)[name]


@pytest.mark.parametrize("name", CASES)
def test_predicted_traffic_is_what_the_ranks_pass(name: str) -> None:
    """Bytes per axis and collective of the rank that passes most, within 1%, and its calls."""
    collectives = _predicted(CASES[name]).collectives
    counted: dict[tuple[Axis, CollectiveKind], tuple[int, int]] = {}
    for rank in _counted(name):
        for key, passed in rank.passed.items():
            counted[key] = max(counted.get(key, (0, 0)), (passed.bytes, passed.calls))

    assert {(item.axis, item.kind): item.bytes for item in collectives} == pytest.approx(
        {key: num_bytes for key, (num_bytes, _) in counted.items()}, rel=0.01
    )
    assert {(item.axis, item.kind): item.calls for item in collectives} == {
        key: calls for key, (_, calls) in counted.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_predicted_memory_is_the_peak_of_the_ranks(name: str) -> None:
    """Peak of what is allocated, on every rank of every stage."""
    memory = _predicted(CASES[name]).memory

    for rank in _counted(name):
        assert LEAST <= memory[rank.stage].allocated_bytes / rank.peak_bytes <= MOST
