"""What waits in the host's memory: activations of layers, and the optimizer's state, in the numbers of one process."""

import gc
import weakref
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from meshwright.executor.parallel.offload import _Kept, offload
from meshwright.executor.parallel.recompute import recompute
from meshwright.planner.answers.check import check
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import Recompute
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace
from support import slow
from support.ranks import run_ranks
from support.same_numbers import TOLERANCE, Case, errors, numbers_of, plan_of, samples, trainer_of
from support.synthetic import cluster
from support.trained_models import NOISE, NUM_STEPS, VOCABULARY, loaded_model, profile_of, reference_of

WIDTH, LENGTH, SAMPLES, HEADS = 32, 8, 2, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    """Views of one tensor, dropout, a tensor that is written into, and a frozen weight."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + functional.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(functional.relu(self.up(x), inplace=True))


class Recurrent(nn.Module):
    """A recurrent net, batch norm, and numbers that are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.lstm(x)[0].transpose(1, 2)).transpose(1, 2)
        return torch.gather(y.cumsum(1), 1, y.argsort(1)) + x


CASES = {
    "one device": Case("gpt", offload=True, num_microbatches=4),
    "one device, optimizer on the host": Case("gpt", more={"offload_optimizer": True}),
    "ddp": Case("gpt", replicate=2, offload=True, more={"offload_optimizer": True}),
    "ddp, recompute": Case("gpt", replicate=2, offload=True, recompute=("full", "none")),
    "fsdp, tied": Case("gpt", shard=2, reshard=True, offload=True, more={"offload_optimizer": True}),
    "zero-1, tied": Case("gpt", shard=2, more={"offload_optimizer": True}),
    "fsdp, Llama, parts of layers": Case(
        "llama", shard=2, reshard=True, offload=True, recompute="parts:self_attn+mlp"
    ),
    "tensor 2 + sequence": Case(
        "llama", tensor=2, offload=True, recompute=("full", "none"),
        more={"sequence": True, "offload_optimizer": True},
    ),
    "tensor 2, fused qkv, tied, head": Case("gpt", tensor=2, offload=True, more={"offload_optimizer": True}),
    "context 2": Case("llama", offload=True, more={"context": 2, "offload_optimizer": True}),
    "pipeline 2, tied across stages": Case(
        "gpt", stages=(3, 3), num_microbatches=4, offload=True, more={"offload_optimizer": True}
    ),
    "zb-h1 2, optimizer on the host": Case(
        "gpt", stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h1", "offload_optimizer": True}
    ),
    "interleaved 2x2 x fsdp, recompute": Case(
        "gpt", shard=2, stages=(1, 2, 1, 2), virtual=2, offload=True, recompute=("full", "none"),
        more={"schedule": "interleaved", "offload_optimizer": True},
    ),
    "hsdp x tensor": Case(
        "gpt", 2, 2, 2, reshard=True, offload=True, more={"sequence": True, "offload_optimizer": True}
    ),
}  # fmt: skip

QUICK = {"fsdp, tied", "pipeline 2, tied across stages"}


def model_of(block: type[nn.Module], mode: Recompute = "none", away: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(4)))
    model[1].requires_grad_(False)
    for layer in model:
        if mode != "none":
            recompute(layer, mode)
    if away:
        offload([[layer] for layer in model], CPU)
    return model


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("block", [Block, Recurrent])
def test_gradients_are_those_of_what_stays_bit_for_bit(block: type[nn.Module], mode: Recompute) -> None:
    found = []
    for away in (False, True):
        model = model_of(block, mode, away)
        torch.manual_seed(1)
        losses = [model(torch.randn(SAMPLES, LENGTH, WIDTH)).square().mean() for _ in range(2)]  # as in a pipeline
        for loss in losses:
            loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])

    assert len(found[0]) == len(found[1])
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))


@pytest.fixture
def kept_now(monkeypatch: pytest.MonkeyPatch) -> WeakSet[_Kept]:
    """What forwards keep that are not forgotten."""
    found: WeakSet[_Kept] = WeakSet()

    class Known(_Kept):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.add(self)

    monkeypatch.setattr("meshwright.executor.parallel.offload._Kept", Known)
    return found


def bytes_here(kept: _Kept) -> int:
    """Bytes that the device holds of what a layer keeps."""
    held = {part.tensor.untyped_storage()._cdata: part.tensor for part in kept._parts if part.tensor is not None}
    arrived = sum(memory.here.numel() for memory in kept._memories.values() if memory.here is not None)
    return arrived + sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.slow
def test_the_device_keeps_the_last_layer_alone_and_two_in_backward(kept_now: WeakSet[_Kept]) -> None:
    model = model_of(Block, away=True).requires_grad_()
    loss = model(torch.randn(SAMPLES, LENGTH, WIDTH)).square().mean()
    layers = sorted(kept_now, key=lambda kept: kept.number)
    assert [bytes_here(kept) > 0 for kept in layers] == [False, False, False, True]
    seen: list[list[bool]] = []
    for layer in model:
        refs = [weakref.ref(kept) for kept in layers]
        layer.out.weight.register_hook(
            lambda _, refs=refs: seen.append([(kept := ref()) is not None and bytes_here(kept) > 0 for ref in refs])
        )
    del layers

    loss.backward()

    assert seen == [
        [False, False, True, True],
        [False, True, True, False],
        [True, True, False, False],
        [True, False, False, False],
    ]
    gc.collect()
    assert not kept_now


def test_weights_and_their_casts_stay(kept_now: WeakSet[_Kept]) -> None:
    model = model_of(Block, away=True).requires_grad_()

    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(SAMPLES, LENGTH, WIDTH)).float().square().mean()

    weights = {p.shape for p in model.parameters() if p.dim() == 2}
    weights |= {torch.Size(reversed(shape)) for shape in weights}
    assert len(kept_now) == len(model)
    for kept in kept_now:
        assert kept._parts
        assert not weights & {part.shape for part in kept._parts}
    loss.backward()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).sigmoid()
        z = self.down(y)
        y.add_(1.0)
        return z


@pytest.mark.parametrize("num_layers", [1, 2])
def test_writing_into_what_is_saved_is_found_as_without(num_layers: int) -> None:
    for away in (False, True):
        model = nn.Sequential(*(Writes() for _ in range(num_layers)))
        if away:
            offload([[layer] for layer in model], CPU)

        loss = model(torch.randn(SAMPLES, WIDTH)).sum()

        with pytest.raises(RuntimeError, match="written into" if away else "inplace operation"):
            loss.backward()


def test_what_is_sent_is_what_is_priced(kept_now: WeakSet[_Kept]) -> None:
    profile = trace(
        load_model(
            lambda: nn.Sequential(*(Block(0.0) for _ in range(3)), nn.Linear(WIDTH, 1)),
            batch=lambda size: (torch.randn(size, LENGTH, WIDTH),),
            loss=lambda output, batch: output.mean(),
        )
    )
    prices = CostModel(profile, cluster(1, 1), TrainingSpec(global_batch=SAMPLES, precision="fp32"))
    shape = Shape(1, 1, 1, 1, micro_batch=SAMPLES, num_microbatches=1)
    priced = prices.cost(prices.kinds[1], shape, LayerOption()).kept_bytes
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(0.0) for _ in range(3)))
    offload([[layer] for layer in model], CPU)

    loss = model(torch.randn(SAMPLES, LENGTH, WIDTH)).mean()

    (kept,) = (kept for kept in kept_now if kept.number == 1)
    sent = sum(memory.last - memory.first for memory in kept._memories.values())
    assert sent == priced
    loss.backward()


# --- whole plans -----------------------------------------------------------------------------------------------------


def trained(name: str) -> dict[str, float]:
    """Errors beside one process, on the first rank, of a case that is legal and sends away what it says."""
    case = CASES[name]
    profile = profile_of(case.model)
    plan = plan_of(case, profile)
    assert check(plan, profile) == []
    assert any(layer.offload for layer in plan.layers) == case.offload
    trainer = trainer_of(loaded_model(case.model).build, plan)
    names = [getattr(module.forward, "__qualname__", "") for module in trainer.model.modules()]
    assert any("_sent_away" in name for name in names) == case.offload
    own = {id(p) for p in trainer.model.parameters()}
    stepped = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert own.isdisjoint(stepped) == plan.offload_optimizer
    found = numbers_of(trainer, samples(VOCABULARY, NUM_STEPS))
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return errors(found, reference_of(case.model), NOISE / TOLERANCE) if is_first else {}


@pytest.mark.parametrize("name", slow.but_these(CASES, QUICK))
def test_the_numbers_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    reference_of(case.model)

    found = trained(name) if case.num_ranks == 1 else run_ranks(trained, case.num_ranks, name)[0]

    assert max(found.values()) < TOLERANCE, found
