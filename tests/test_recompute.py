"""Recompute keeps the bytes that the profile says, repeats what it must, and refuses what it cannot repeat."""

import weakref
from functools import cache, partial
from typing import Any

import pytest
import torch
from synthetic import cluster
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.executor.parallel.recompute import recompute
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan import Recompute
from meshwright.planner.strategy import LayerOption, Shape, can_recompute, make_plan
from meshwright.planner.training import TrainingSpec
from meshwright.profiler.load import load_model
from meshwright.profiler.model_profile import ModelProfile
from meshwright.profiler.trace import trace

SAMPLES, LENGTH, WIDTH, HEADS = 3, 16, 32, 4
MODES: tuple[Recompute, ...] = ("none", "attention", "selective", "full")


class Block(nn.Module):
    """Attention and a two-layer net. fused: scaled_dot_product_attention; else products, a mask, softmax, dropout."""

    def __init__(self, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.fused, self.dropout = fused, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / WIDTH**0.5
            hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            y = functional.dropout(weights, self.dropout) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(fused, dropout) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).mean()


@cache
def profile_of(fused: bool) -> ModelProfile:
    return trace(load_model(partial(Model, fused), batch=lambda size: (torch.randn(size, LENGTH, WIDTH),)))


class Living(TorchDispatchMode):
    """Bytes of every living storage that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.sizes:
                storage = x.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        return output


def kept_in_blocks(model: Model) -> int:
    """Bytes that living graphs hold of what the blocks made, counted on a real run; no parameters.

    The last block's output stands for the first one's input.
    """
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    before: set[int] = set()
    after: dict[int, int] = {}
    model.blocks[0].register_forward_pre_hook(lambda *_: before.update(living.sizes))
    model.blocks[-1].register_forward_hook(lambda *_: after.update(living.sizes))
    with Living() as living:
        loss = model(torch.randn(SAMPLES, LENGTH, WIDTH))
    assert loss.requires_grad
    return sum(size for storage, size in after.items() if storage not in before | own)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [True, False])
def test_blocks_keep_the_bytes_that_are_priced(fused: bool, mode: Recompute) -> None:
    profile = profile_of(fused)
    prices = CostModel(profile, cluster(1, 1), TrainingSpec(global_batch=SAMPLES, precision="fp32"))
    shape = Shape(1, 1, 1, 1, micro_batch=SAMPLES, num_microbatches=1)
    model = Model(fused)
    for block in model.blocks:
        recompute(block, mode)

    kept = kept_in_blocks(model)

    blocks = [k for k, layer in zip(prices.kinds, profile.layers, strict=True) if layer.root.startswith("blocks")]
    assert len(blocks) == 2
    assert kept == sum(prices.cost(kind, shape, LayerOption(mode)).kept_bytes for kind in blocks)


def test_modes_keep_less_and_less_of_unfused_attention() -> None:
    kept = {}
    for mode in MODES:
        model = Model(fused=False)
        for block in model.blocks:
            recompute(block, mode)

        kept[mode] = kept_in_blocks(model)

    assert kept["full"] < kept["attention"] < kept["none"]
    assert kept["full"] < kept["selective"] < kept["none"]


def gradients(mode: Recompute, dropout: float, steps: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = Model(fused=False, dropout=dropout)
    for block in model.blocks:
        recompute(block, mode)
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    losses = [model(x) for _ in range(steps)]  # the second forward before the first backward, as in a pipeline
    for loss in losses:
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mode", MODES[1:])
def test_what_is_repeated_is_the_same_bit_for_bit(mode: Recompute, dropout: float) -> None:
    expected = gradients("none", dropout, steps=2)

    found = gradients(mode, dropout, steps=2)

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Operators(TorchDispatchMode):
    """Names of operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "norms", "linears", "products", "softmaxes"),
    [("none", 0, 0, 0, 0), ("attention", 0, 0, 1, 1), ("selective", 1, 0, 0, 1), ("full", 1, 3, 2, 1)],
)
def test_backward_repeats_what_the_mode_says(
    mode: Recompute, norms: int, linears: int, products: int, softmaxes: int
) -> None:
    """A block has one norm, four linear layers (the last output is not needed again), two products and a softmax."""
    block = Block(fused=False)
    recompute(block, mode)
    loss = block(torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)).sum()

    with Operators() as operators:
        loss.backward()

    count = operators.names.count
    assert (count("native_layer_norm"), count("addmm"), count("_softmax")) == (norms, linears, softmaxes)
    assert count("bmm") == 4 + products, "four gradients of the two products"


class Writes(nn.Module):
    """Writes into what a matmul returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu_()


def test_writing_into_what_selective_recompute_keeps_is_refused_in_the_forward() -> None:
    module = Writes()
    recompute(module, "selective")

    with pytest.raises(ValueError, match=r"Writes writes by .*relu_.*recompute=full"):
        module(torch.randn(2, WIDTH, requires_grad=True))


class Masked(nn.Module):
    """Unfused attention with a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.zeros(LENGTH, LENGTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2) + self.mask).softmax(-1) @ x


def test_a_mask_that_is_written_into_before_backward_is_refused() -> None:
    module = Masked()
    recompute(module, "attention")
    loss = module(torch.randn(2, LENGTH, WIDTH, requires_grad=True)).sum()
    module.mask.fill_(1.0)

    with pytest.raises(RuntimeError, match=r"Masked has given attention a mask.*recompute=full"):
        loss.backward()


@pytest.mark.parametrize(("module", "kept", "attention"), [(Writes, True, False), (nn.Identity, False, False)])
def test_a_profile_says_where_selective_recompute_cannot_be(
    module: type[nn.Module], kept: bool, attention: bool
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), module())

    loaded = load_model(
        model,
        batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, WIDTH)),
        loss=lambda output, batch: functional.mse_loss(output, batch[1]),
    )

    classes = trace(loaded).classes

    assert any(c.writes_into_kept for c in classes) == kept
    assert any(c.writes_into_attention for c in classes) == attention


_CACHING: list[Any] = []


def _caching() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS
    )
    _CACHING.append(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _tokens(size: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(64, (size, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def test_a_model_that_would_keep_keys_for_generation_does_not_while_it_trains() -> None:
    loaded = load_model(_caching, batch=_tokens)
    profile = trace(loaded)
    options = [
        LayerOption("selective" if can_recompute(profile, layer) else "none", reshard=True) for layer in profile.layers
    ]
    training = TrainingSpec(global_batch=4, seq_len=LENGTH, precision="fp32")
    plan = make_plan(profile, cluster(1, 2), training, Shape(1, 2, 1, 1, 2, 1, reshard=True), [options])

    report = beside_one_process(VerifyReport("", (), {}), plan, loaded, [_tokens(4)], timeout_s=60.0)

    assert report.ok, [*report.lines, report.detail]
    assert all(config.use_cache for config in _CACHING)
