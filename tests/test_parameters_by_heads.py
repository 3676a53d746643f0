"""Parameters with an entry for each head are cut with the heads, and counts that a configuration keeps are divided."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.executor.parallel.shared_gradients import SharedGradients
from meshwright.executor.parallel.tensor_layout import ParameterCut, TensorLayout
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import TensorCut
from meshwright.profiler.model.trace import trace
from meshwright.profiler.tensor_cuts.tensor_modules import counts_of, divide_count
from support.synthetic import cluster

HEADS, WIDTH, LENGTH, GLOBAL_BATCH = 4, 32, 6, 4


class _ByHeads(nn.Module):
    """Attention with a sink for each head (gpt-oss), a norm with weights of its own for each (Cohere), a table of their
    biases (Swin), halves of them read from a fused projection, and a count that the configuration keeps (Phi-3)."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.scales = nn.Parameter(torch.ones(HEADS, WIDTH // HEADS))
        self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, HEADS))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        fused, width = self.qkv(x), self.config.heads * (WIDTH // HEADS)
        q, k, v = (
            part.reshape(size, length, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (fused[..., i * width : (i + 1) * width] for i in range(3))
        )
        q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scales[:, None]
        k = torch.cat([-k[..., WIDTH // HEADS // 2 :], k[..., : WIDTH // HEADS // 2]], -1)
        places = torch.arange(length, device=x.device)
        biases = self.table[(places[:, None] - places + LENGTH - 1).flatten()].view(length, length, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + biases.permute(2, 0, 1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(size, -1, length, 1)
        chances = self.dropout(functional.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1])
        return x + self.out((chances @ v).transpose(1, 2).reshape(size, length, -1))


def _loaded(block: type[nn.Module] = _ByHeads, **config: int) -> LoadedModel:
    def build() -> nn.Module:
        torch.manual_seed(0)
        kept = SimpleNamespace(heads=HEADS, **config)
        return nn.Sequential(nn.Linear(8, WIDTH), block(kept), block(kept), nn.Linear(WIDTH, 8))

    def batch(size: int) -> Any:
        return torch.randn(size, LENGTH, 8), torch.randn(size, LENGTH, 8)

    return load_model(build, batch=batch, loss=lambda output, batch: functional.mse_loss(output, batch[1]))


@functools.cache
def _cut() -> TensorCut:
    return next(cut for layer_class in trace(_loaded()).classes for cut in layer_class.cuts if cut.rows)


def test_parameters_with_an_entry_for_each_head_are_cut_with_the_heads() -> None:
    cut = _cut()

    assert cut.units == (HEADS,)
    assert {name: cut.sharded[name] for name in ("sinks", "scales", "table")} == {"sinks": 0, "scales": 0, "table": 1}
    assert cut.partial == ()


def test_counts_that_a_configuration_keeps_are_divided() -> None:
    assert _cut().attributes == {"": ("config.heads",)}


def test_halves_of_heads_make_no_parts_of_their_own() -> None:
    assert _cut().parts == {"qkv": (WIDTH, WIDTH, WIDTH)}


def test_a_configuration_that_others_keep_is_divided_for_one_module() -> None:
    kept = SimpleNamespace(heads=HEADS)
    module, other = _ByHeads(kept), _ByHeads(kept)

    undo = divide_count(module, "config.heads", 2)

    assert (counts_of(module)["config.heads"], counts_of(other)["config.heads"]) == (HEADS // 2, HEADS)
    undo()
    assert module.config is kept


def test_the_gradient_of_a_cut_parameter_is_whole_where_it_is() -> None:
    module = _ByHeads(SimpleNamespace(heads=HEADS))
    layout = TensorLayout(cuts={"sinks": ParameterCut(0, (HEADS,), 2)})

    with SharedGradients(module, layout) as watch:
        scores = torch.zeros(HEADS)
        watch.mark(scores, differs=True)
        (scores + module.sinks + module.scales[:, 0]).sum()

    assert layout.partial == {"scales"}


class _NormedWhole(nn.Module):
    """Attention with a norm over queries of all heads (OLMo 2)."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)
            for y in (self.q_norm(self.q(x)), self.k(x), self.v(x))
        )
        return x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_norm_over_all_heads_is_named() -> None:
    notes = trace(_loaded(_NormedWhole)).notes

    assert any("does not run (in q_norm: Given normalized_shape=[32]" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"shard": 2, "reshard": True}, {"pipeline": 2, "schedule": "1f1b"}], ids=str)
def test_parameters_by_heads_give_the_numbers_of_one_process(more: dict[str, Any]) -> None:
    loaded = _loaded()
    profile = trace(loaded)
    shards, stages = more.pop("shard", 1), more.pop("pipeline", 1)
    shape = Shape(1, shards, 2, stages, 2, GLOBAL_BATCH // 2 // shards, **more)
    options = [LayerOption("none", shape.reshard) for _ in profile.layers]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, precision="fp32", optimizer="adamw")
    split = [options] if stages == 1 else [options[:2], options[2:]]
    plan = make_plan(profile, cluster(1, shape.degrees.num_devices), training, shape, split)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [loaded.batch(GLOBAL_BATCH) for _ in range(3)]

    report = beside_one_process(VerifyReport("by heads", (), {}), plan, loaded, batches, timeout_s=120.0)

    assert report.ok, [*report.lines, report.detail]
