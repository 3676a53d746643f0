"""Recompute keeps the bytes that the profile says, repeats what it must, and refuses what it cannot repeat."""

import random
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.executor.parallel.recompute import check_recompute, recompute
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import Recompute
from meshwright.planner.plan.legality import can_recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.parted import HEADS, LENGTH, SAMPLES, WIDTH, Parted, one_layer
from support.synthetic import cluster

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


_INPUT, _NORMED, _BUFFER = 4 * SAMPLES * LENGTH * WIDTH, 4 * 2 * SAMPLES * LENGTH, 4
GIVEN_UP = {
    "parts:norm": _NORMED,
    "parts:net": 8 * _INPUT,
    "parts:attention": 4 * _INPUT - _BUFFER,
    "parts:attention+net": 12 * _INPUT - _BUFFER,
    "parts:norm+attention+net": 12 * _INPUT + _NORMED - _BUFFER,
}
"""Bytes that a layer need not keep. A norm: mean and deviation of each token. The net: what its activation is given and
returns. Attention: queries, keys and values, and what its last product is given; its weights, which it returns, are
kept outside of it, and what its buffer held before is kept for the repetition. Inputs of all parts are kept."""


@pytest.mark.parametrize("mode", GIVEN_UP)
def test_parts_keep_their_inputs_and_no_more(mode: Recompute) -> None:
    kept = {}
    for how in ("none", mode):
        layer = Parted()
        recompute(layer, how)
        x = torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)
        own = {p.untyped_storage()._cdata for p in layer.parameters()}
        with Living() as living:
            output = layer(x)
        assert output.requires_grad
        kept[how] = sum(size for storage, size in living.sizes.items() if storage not in own)

    assert kept["none"] - kept[mode] == GIVEN_UP[mode]


def numbers(mode: Recompute, dropout: float) -> list[torch.Tensor]:
    """Outputs, gradients and buffers of two forwards, the second before the first backward."""
    torch.manual_seed(1)
    layer = Parted(dropout)
    recompute(layer, mode)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)
    outputs = [layer(x), layer(2 * x)]
    for output in outputs:
        output.square().sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    return [*outputs, x.grad, *grads, layer.attention.calls]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mode", [*GIVEN_UP, "parts:items.0+net.0"])
def test_parts_that_are_repeated_give_the_same_bit_for_bit(mode: Recompute, dropout: float) -> None:
    expected = numbers("none", dropout)

    found = numbers(mode, dropout)

    assert len(found) == len(expected) == 2 + 1 + 12 + 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("mode", "norms", "linears", "gelus", "softmaxes"),
    [("parts:norm", 1, 0, 0, 0), ("parts:net", 0, 1, 1, 0), ("parts:norm+attention", 1, 1, 0, 1)],
)
def test_a_part_is_repeated_as_far_as_something_is_needed(
    mode: Recompute, norms: int, linears: int, gelus: int, softmaxes: int
) -> None:
    layer = Parted()
    recompute(layer, mode)
    loss = layer(torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)).sum()

    with Operators() as operators:
        loss.backward()

    counts = [operators.names.count(name) for name in ("native_layer_norm", "addmm", "gelu", "_softmax")]
    assert counts == [norms, linears, gelus, softmaxes]


def test_hooks_that_a_part_has_are_repeated_with_it() -> None:
    layer, inside, outside = Parted(), [], []
    layer.net.register_forward_pre_hook(lambda module, args: 2 * args[0])
    layer.attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"dropout": 0.0}), with_kwargs=True
    )
    layer.net.register_forward_hook(lambda module, args, output: inside.append(args[0]) or output + 1)
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    expected = layer(x)
    recompute(layer, "parts:attention+net")
    layer.net.register_forward_hook(lambda module, args, output: outside.append(args[0]))

    found = layer(x)
    found.sum().backward()

    assert torch.equal(found, expected)
    assert len(inside) == 2, "the repetition ends with the last product, before this hook"
    assert torch.equal(inside[1], 2 * outside[0]), "what the part was given is what is kept"


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("parts:net+mlp", r"names mlp, but Parted has no such submodule; .*\(norm, attention, net\).*full"),
        ("parts:items", "names items, but Parted calls its items, not it"),
    ],
)
def test_parts_that_a_layer_does_not_have_are_refused(mode: Recompute, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_recompute(one_layer(mode), nn.Sequential(Parted()))


def test_parts_that_a_layer_has_are_not_refused() -> None:
    check_recompute(one_layer("parts:norm+items.0+net.2"), nn.Sequential(Parted()))


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


class Recurrent(nn.Module):
    """A linear layer, and one that goes step by step, by whole sequences or a step at a time."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.steps(self.linear(x))
        y: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return self.steps(y, y) if isinstance(self.steps, nn.GRUCell | nn.RNNCell) else y


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, partial(nn.LSTM, proj_size=4), nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_steps_that_the_cpu_makes_of_products_are_repeated_whole(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    module = Recurrent(kind)
    x = torch.randn(3, WIDTH)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    recompute(module, "selective")

    found = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))

    assert all(map(torch.equal, found, expected))


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


def test_layers_with_hooks_on_gradients_are_not_planned_with_selective_recompute() -> None:
    """A hook may ask for gradients of its own, for which the forward would be repeated once more."""
    offered = {}
    for hooks in (False, True):
        profile = profile_of(False).model_copy(update={"hooks_gradients": hooks})
        prices = CostModel(profile, cluster(1, 1), TrainingSpec(global_batch=SAMPLES, precision="fp32"))
        shape = Shape(1, 1, 1, 1, micro_batch=SAMPLES, num_microbatches=1)
        offered[hooks] = {option.recompute for kind in prices.kinds for option in prices.options(kind, shape)}

    assert offered[False] - offered[True] == {"selective"}
    assert "full" in offered[True]


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


@pytest.mark.slow
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


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())


@pytest.mark.parametrize("mode", ["full", "selective", "parts:norm"])
def test_running_statistics_are_written_once(mode: Recompute) -> None:
    torch.manual_seed(0)
    plain, repeated = Normed(), Normed()
    repeated.load_state_dict(plain.state_dict())
    recompute(repeated, mode)

    for module in (plain, repeated):
        torch.manual_seed(1)
        losses = [module(torch.randn(4, WIDTH)).sum() for _ in range(2)]  # two micro-batches are under way at once
        for loss in losses:
            loss.backward()

    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(repeated.named_buffers())[name], buffer), name


_calls = 0
_counts = {"calls": 0}


def twice(number: float) -> float:
    return 2 * number


class Counting(nn.Module):
    """exp of its parameter times a number that is another one at each call."""

    calls: ClassVar[int] = 0

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.weight, self.kept, self.numbers = nn.Parameter(torch.ones(())), kept, random.Random(0)

    def forward(self) -> torch.Tensor:
        return (self.weight * getattr(self, self.kept)()).exp()

    def of_class(self) -> int:
        type(self).calls += 1
        return self.calls

    def of_file(self) -> int:
        global _calls
        _calls += 1
        return _calls

    def in_dict(self) -> int:
        _counts["calls"] += 1
        return _counts["calls"]

    def of_function(self) -> float:
        twice.calls = getattr(twice, "calls", 0) + 1  # type: ignore[attr-defined]
        return twice(twice.calls)  # type: ignore[attr-defined]

    def of_python(self) -> float:
        return random.random()

    def of_numpy(self) -> float:
        return float(numpy.random.rand())

    def of_its_own(self) -> float:
        return self.numbers.random()


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(
    "kept", ["of_class", "of_file", "in_dict", "of_function", "of_python", "of_numpy", "of_its_own"]
)
def test_numbers_that_code_keeps_beside_modules_are_those_of_the_forward(kept: str, mode: Recompute) -> None:
    module = Counting(kept)
    recompute(module, mode)
    outputs = [module() for _ in range(2)]  # two micro-batches are under way at once
    after = (Counting.calls, _calls, _counts["calls"], module.numbers.getstate())

    (outputs[0] + outputs[1]).backward()

    given = [output.detach() for output in outputs]
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, sum(y * y.log() for y in given))
    assert after == (Counting.calls, _calls, _counts["calls"], module.numbers.getstate())


class Changing(nn.Module):
    """Puts what it makes into the dict that it is given, and lengthens a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        state["x"] = state["x"] + torch.tanh(self.linear(state["x"]))
        state["sizes"].append(state["x"].square().mean())
        return state


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_layer_that_changes_the_dict_it_is_given_is_repeated_on_what_it_was_given(mode: Recompute) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Changing() for _ in range(2))
    gradients = []

    for way in ("none", mode):
        for layer in layers:
            recompute(layer, way)
        state: dict[str, Any] = {"x": torch.ones(SAMPLES, WIDTH), "sizes": []}
        for layer in layers:
            state = layer(state)
        (state["x"].mean() + sum(state["sizes"])).backward()
        assert len(state["sizes"]) == 2
        gradients.append([parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None])
        layers.zero_grad()

    for kept, repeated in zip(*gradients, strict=True):
        assert torch.equal(kept, repeated)
