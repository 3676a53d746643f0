"""Low-rank adapters under tensor parallelism: cut with their bases, and the numbers of one process."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.execution.adapters import LoraLinear, with_adapters
from meshwright.executor.measuring.one_process import Training
from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.layer_units import find_units
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import LayerClass, ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.synthetic import cluster

WIDTH, HEADS, VOCABULARY, SEQ_LEN, STEPS = 16, 4, 64, 8, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        q, k, v = (
            part.view(size, length, self.num_heads, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(size, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_hand(dropout: float) -> nn.Module:
    return with_adapters(Net(), dropout)


def by_peft(dropout: float) -> nn.Module:
    peft = pytest.importorskip("peft")
    targets = ["qkv", "out", "up", "down"]
    return peft.get_peft_model(Net(), peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets))


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (size, SEQ_LEN + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


@cache
def _model(build: Callable[[float], nn.Module], dropout: float = 0.0) -> tuple[LoadedModel, ModelProfile]:
    loaded = load_model(partial(build, dropout), batch=_batch, loss=_loss)
    return loaded, trace(loaded)


def _block(build: Callable[[float], nn.Module]) -> LayerClass:
    profile = _model(build)[1]
    return profile.classes[profile.layers[2].layer_class]


@pytest.mark.slow
@pytest.mark.parametrize("build", [by_hand, by_peft])
def test_adapters_are_cut_with_their_bases(build: Callable[[float], nn.Module]) -> None:
    attention, mlp = _block(build).cuts

    assert attention.columns == ("attention.qkv.base_layer", "attention.qkv.lora_B.default")
    assert attention.rows == ("attention.out.base_layer", "attention.out.lora_A.default")
    assert attention.parts == dict.fromkeys(attention.columns, (WIDTH, WIDTH, WIDTH))
    assert attention.attributes == {"attention": ("num_heads",)}
    assert mlp.columns == ("up.base_layer", "up.lora_B.default")
    assert mlp.rows == ("down.base_layer", "down.lora_A.default")
    assert mlp.sharded == {
        "up.base_layer.weight": 0,
        "up.base_layer.bias": 0,
        "up.lora_B.default.weight": 0,
        "down.base_layer.weight": 1,
        "down.lora_A.default.weight": 1,
    }
    assert not any("lora" in note for note in _model(build)[1].notes)


def test_a_wrapped_model_with_adapters_has_the_layers_of_the_model() -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def get_base_model(self) -> nn.Module:
            return self.model

    def stages() -> nn.Module:
        halves = (
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in "ab")) for _ in "cd"
        )
        return nn.Sequential(nn.Linear(8, 8), *halves, nn.Linear(8, 8))

    plain = find_units(stages())
    assert len(plain.names) == 6
    assert find_units(Wrapped(with_adapters(stages()))) == plain.inside("model")
    assert find_units(Wrapped(with_adapters(Net()))) == find_units(Net()).inside("model")


def test_a_layer_with_an_adapter_is_no_container_of_layers() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    adapted = Loose()
    adapted.first, adapted.second = LoraLinear(adapted.first), LoraLinear(adapted.second)  # type: ignore[assignment]

    assert find_units(adapted) == find_units(Loose())


def _report(
    build: Callable[[float], nn.Module], dropout: float, sequence: bool = False, data: int = 1, recompute: Any = "none"
) -> VerifyReport:
    loaded, profile = _model(build, dropout)
    shape = Shape(1, data, 2, 1, 2, 2, sequence=sequence)
    training = TrainingSpec(global_batch=4 * data, seq_len=SEQ_LEN, precision="fp32")
    inside = ["none" if "blocks" not in layer.name else recompute for layer in profile.layers]
    options = [LayerOption(kind, reshard=data > 1) for kind in inside]
    plan = make_plan(profile, cluster(1, 2 * data), training, shape, [options])
    torch.manual_seed(0)
    batches = [_batch(4 * data) for _ in range(STEPS)]
    return beside_one_process(VerifyReport("", (), {}), plan, loaded, batches, training=Training(dropout=True))


CASES = [
    (by_hand, 0.2, {}),
    (by_hand, 0.0, {"sequence": True, "data": 2}),
    (by_hand, 0.2, {"data": 2, "recompute": "full"}),
    (by_hand, 0.2, {"sequence": True, "recompute": "selective"}),
    (by_peft, 0.0, {}),
    (by_peft, 0.2, {"data": 2}),
    (by_peft, 0.2, {"sequence": True}),
]


@pytest.mark.parametrize(("build", "dropout", "layout"), slow.but_first(CASES, 1))
def test_cut_adapters_train_as_in_one_process(
    build: Callable[[float], nn.Module], dropout: float, layout: dict[str, Any]
) -> None:
    report = _report(build, dropout, **layout)

    assert report.ok, report.lines
    assert report.largest["parameters"].relative < 1e-5
