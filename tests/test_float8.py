"""Plans in fp8 beside torchao and fully_shard by hand; products of fp8 numbers are emulated on the CPU."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.executor import Trainer, parallelize
from meshwright.executor.parallel import float8
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.space import Space
from meshwright.profiler.machine.cluster import cluster_of, load_device
from support.exported import mixture
from support.ranks import run_ranks
from support.same_numbers import (
    GLOBAL_BATCH,
    MAX_NORM,
    SEED,
    SEQ_LEN,
    Case,
    adamw,
    loss,
    numbers_of,
    plan_of,
    samples,
    trainer_of,
)
from support.trained_models import NUM_STEPS, VOCABULARY, loaded_model, profile_of

pytest.importorskip("torchao", reason="torchao is not here: pip install torchao")

CASES = {
    "fsdp": Case("llama", shard=2, reshard=True, precision="fp8", num_microbatches=4),
    "fsdp, recompute": Case("llama", shard=2, reshard=True, precision="fp8", num_microbatches=4, recompute="full"),
    "fsdp, optimizer on the host": Case(
        "llama", shard=2, precision="fp8", num_microbatches=4, offload=True, more={"offload_optimizer": True}
    ),
    "pipeline x fsdp": Case("llama", shard=2, stages=(2, 3), precision="fp8", num_microbatches=4),
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "EMULATED", True)


def float8_layers(trainer: Trainer) -> int:
    from torchao.float8.float8_linear import Float8Linear

    return sum(isinstance(module, Float8Linear) for module in trainer.model.modules())


def by_plan(name: str) -> tuple[list[float], list[float], int]:
    trainer = trainer_of(loaded_model("llama").build, plan_of(CASES[name], profile_of("llama")))
    found = numbers_of(trainer, samples(VOCABULARY, NUM_STEPS))
    return found.losses, found.norms, float8_layers(trainer)


def by_hand() -> tuple[list[float], list[float]]:
    """fully_shard over one rank, one sample after the other."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(SEED)
    model: nn.Module = loaded_model("llama").build()
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model.parameters())
    losses, norms, given = [], [], samples(VOCABULARY, NUM_STEPS)
    for start in range(0, len(given), GLOBAL_BATCH):
        optimizer.zero_grad()
        total = 0.0
        for sample in given[start : start + GLOBAL_BATCH]:
            batch = torch.utils.data.default_collate([sample])
            value = loss(model(batch[0]), batch) / GLOBAL_BATCH
            value.backward()
            total += value.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append(float(norm.full_tensor()))  # type: ignore[attr-defined]
        optimizer.step()
        losses.append(total)
    return losses, norms


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_in_fp8_is_what_one_would_write_by_hand(name: str) -> None:
    losses, norms = run_ranks(by_hand, 1)[0]

    found = run_ranks(by_plan, CASES[name].num_ranks, name)

    assert all(layers > 0 for *_, layers in found)
    assert found[0][0] == pytest.approx(losses, rel=1e-4)
    assert found[0][1] == pytest.approx(norms, rel=1e-3)


@pytest.mark.slow
def test_replicas_in_fp8_are_what_one_device_is() -> None:
    CASES.update({
        "one device": Case("llama", precision="fp8", num_microbatches=8),
        "ddp": Case("llama", replicate=2, precision="fp8", num_microbatches=4),
    })  # fmt: skip

    (losses, norms, _), *_ = run_ranks(by_plan, 1, "one device")
    found = run_ranks(by_plan, 2, "ddp")[0]

    assert found[0] == pytest.approx(losses, rel=1e-4)
    assert found[1] == pytest.approx(norms, rel=1e-3)


@pytest.mark.slow
def test_fp8_is_not_bf16() -> None:
    case = CASES["fsdp"]
    CASES["bf16"] = replace(case, precision="bf16")

    rough, fine = (run_ranks(by_plan, 2, name)[0][0] for name in ("fsdp", "bf16"))

    assert rough == pytest.approx(fine, rel=0.05)
    assert rough != pytest.approx(fine, rel=1e-4)


def test_layers_stay_the_objects_that_they_are() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    first, weight, seen = model[0], model[0].weight, []
    first.register_forward_hook(lambda *_: seen.append(1))

    float8.linear_in_float8(model)

    from torchao.float8.float8_linear import Float8Linear

    assert [isinstance(layer, Float8Linear) for layer in model] == [True, False, False]  # 8 is not a multiple of 16
    assert model[0] is first
    assert model[0].weight is weight
    model(torch.randn(4, 32)).sum().backward()
    assert seen == [1]
    assert weight.grad is not None


def test_what_cannot_run_in_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(Case("llama", precision="fp8"), profile_of("llama"))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torchao.float8", None)
        with pytest.raises(ValueError, match="needs torchao's float8 layers: pip install torchao"):
            float8.check_float8(torch.device("cpu"))
    monkeypatch.setattr(float8, "EMULATED", False)

    with pytest.raises(ValueError, match="the CPU multiplies no fp8; run it on GPUs"):
        parallelize(loaded_model("llama").build, plan, adamw, loss=loss)
    tensor = plan_of(Case("llama", tensor=2, precision="fp8"), profile_of("llama"))
    with pytest.raises(ValueError, match="precision fp8 with tensor parallelism, which is priced, not run yet"):
        parallelize(loaded_model("llama").build, tensor, adamw, loss=loss)


def test_only_what_runs_in_fp8_is_searched() -> None:
    training = TrainingSpec(global_batch=8, seq_len=SEQ_LEN, precision="fp8")
    hosts = cluster_of(load_device("h100-80gb"), 4)

    space = Space(profile_of("llama"), hosts, training, Pins())
    experts = Space(mixture(), hosts, training, Pins())

    assert {split.tensor for split in space.splits()} == {1}
    assert any("tensor parallelism cuts are run in bf16 only" in rule for rule in space.rejected)
    assert list(experts.splits()) == []
    assert any("experts that share one tensor are run in bf16 only" in rule for rule in experts.rejected)
    elsewhere = training.model_copy(update={"software": "megatron-core"})
    assert {split.tensor for split in Space(profile_of("llama"), hosts, elsewhere, Pins()).splits()} != {1}
