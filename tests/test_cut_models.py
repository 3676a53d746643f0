"""Every kind of module that tensor parallelism cuts trains as in one process, and passes what the estimate says."""

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.accuracy.cases import small
from benchmarks.accuracy.counters import Traffic
from meshwright.executor import parallelize
from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import Cuts, LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile, TensorCut
from meshwright.profiler.model.trace import trace
from meshwright.profiler.tensor_cuts.tensor_rank import OwnHeads
from support import slow
from support.ranks import PATIENCE_S, run_ranks
from support.synthetic import cluster

os.environ.setdefault("OMP_NUM_THREADS", "1")

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"
GLOBAL_BATCH = 4
NUM_STEPS = 4
SMALLEST_BYTES = 64


@dataclass(frozen=True)
class Case:
    """A model of the zoo, small, on tensor ranks. cuts: only those of these names; (): all that are cut by default."""

    model: str
    tensor: int = 2
    sequence: bool = False
    cuts: tuple[str, ...] = ()
    shard: int = 1


CASES = {
    "latent attention": Case("deepseek_v3"),
    "latent attention on slices": Case("deepseek_v3", sequence=True),
    "tied vocabulary with a padding row": Case("whisper_large_v3"),
    "convolutions around a group norm": Case("unet.py"),
    "convolutions around a group norm, sharded, on four ranks": Case("unet.py", shard=2),
    "tables by features": Case("bags", tensor=4),
    "groups that read one tensor": Case("parallel"),
    "norms of heads beside experts": Case("qwen3_30b_a3b"),
    "slopes of all heads and samples": Case("slopes"),
    "widths off the shape of an input": Case("widths"),
    "one head of keys": Case("one head"),
    "one head of keys, on slices": Case("one head", sequence=True),
}


TRAINED = {"groups that read one tensor"}
"""A small one; the others are trained by pytest -m slow."""


class _Bags(nn.Module):
    """A small recommender with a table that is large enough to be cut, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode=mode) for rows, mode in ((1500, "sum"), (8, "mean")))
        self.top = nn.Linear(32, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = [table(rows % table.num_embeddings) for table in self.tables]
        return self.top(torch.cat(found, dim=1)).squeeze(1)


class _Activated(nn.GroupNorm):
    """A norm and its activation, as timm's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).tanh()


class _Parallel(nn.Module):
    """Attention's projections and a feed-forward beside it, all of one tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.value, self.groups, self.out = nn.Linear(width, width), _Activated(4, width), nn.Linear(width, width)
        self.up, self.down = _Product(width, 4 * width), nn.Linear(4 * width, width)
        self.widen, self.narrow = _Rounded(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.out(self.groups(self.value(y))) + self.down(nn.functional.gelu(self.up(y)))
        return x + self.narrow(self.widen(y))


class _Scaled(nn.Embedding):
    """As Gemma's and BART's."""

    def __init__(self, *args: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Buffer(torch.tensor(3), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale.to(self.weight.dtype)


class _Shifted(nn.Embedding):
    """As OPT's, of positions."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + 2)


class _Product(nn.Linear):
    """A linear layer in other words, as Falcon's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + self.bias


class _Rounded(nn.Linear):
    """A linear layer with rounded weights, as BitNet's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight + (self.weight.sign() * self.weight.abs().mean() - self.weight).detach()
        return nn.functional.linear(input, weight, self.bias)


class _Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = _Scaled(1024, 16, padding_idx=600), _Shifted(1028, 16)
        self.blocks = nn.ModuleList(_Parallel() for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = (self.words(words) + self.places(words)).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


class _Sloped(nn.Module):
    """Attention by bmm, which is given slopes with a row for each head of each sample (Bloom), of one projection for
    groups of two heads of queries, one of keys and one of values (Falcon)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.groups = 4, 2
        self.qkv, self.out = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        every = self.qkv(x).view(size, length, -1, self.heads // self.groups + 2, 4)
        q = every[..., :-2, :]
        k, v = (y.expand(q.shape) for y in (every[..., -2:-1, :], every[..., -1:, :]))
        q, k, v = (y.flatten(2, 3).transpose(1, 2).reshape(size * self.heads, length, 4) for y in (q, k, v))
        scores = torch.baddbmm(slopes, q, k.transpose(1, 2)).view(size, self.heads, length, length).softmax(-1)
        y = scores.flatten(0, 1) @ v
        return self.out(y.view(size, self.heads, length, 4).transpose(1, 2).flatten(2))


class _SlopedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = _Sloped()

    def forward(self, x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, slopes)


class _Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_SlopedBlock() for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes = torch.arange(1, 5, device=x.device)[:, None] * torch.arange(x.shape[1], device=x.device)
        slopes = slopes.to(x.dtype)[:, None].repeat(len(x), 1, 1)
        for block in self.blocks:
            x = block(x, slopes)
        return self.head(x).squeeze(-1)


class _Widths(nn.Module):
    """Attention that takes the number of its features off its input, to itself or to what it is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.query, self.keys, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, memory: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, keys = self.query(x), self.keys(memory).view(size, -1, self.heads, 2 * width // self.heads)
        k, v = keys.transpose(1, 2).chunk(2, -1)
        q = q.view(size, length, self.heads, width // self.heads).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(size, length, width))


class _OneHead(nn.Module):
    """Attention of all heads of queries to one of keys and values (Shazeer 2019, arXiv:1911.02150)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.key, self.value, self.norm = nn.Linear(16, 4), nn.Linear(16, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        given = (self.query(x), self.key(x), self.value(x))
        q, k, v = (y.view(size, length, -1, 4).transpose(1, 2) for y in given)
        y = nn.functional.scaled_dot_product_attention(q, self.norm(k), v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class _OneHeadBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = _OneHead()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x)


class _WidthsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.itself, self.other = nn.LayerNorm(16), _Widths(), _Widths()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = x + self.itself(self.norm(x), memory=self.norm(x))
        return x + self.other(self.norm(x), memory=memory)


class _OffInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(16, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(_WidthsBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x = self.enter(x)
        for block in self.blocks:
            x = block(x, memory)
        return self.head(x).squeeze(-1)


def _one_head() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), _OneHeadBlock(), _OneHeadBlock(), nn.Linear(16, 1), nn.Flatten())


def _places(size: int, seq_len: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, seq_len, 16), torch.randn(size, seq_len)


def _words(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(598, 1024, (size, 8)), torch.randn(size)


def _bags(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(1500, (size, 3)), torch.rand(size)


def _squares(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), batch[1].float())


@functools.cache
def _loaded(name: str) -> LoadedModel:
    own = {"bags": (_Bags, _bags), "parallel": (_Beside, _words), "slopes": (_Slopes, _places)}
    own |= {"widths": (_OffInputs, _places), "one head": (_one_head, _places)}
    loaded = load_model(own[name][0], batch=own[name][1], loss=_squares) if name in own else small(MODELS / name)
    build = loaded.build

    def noisy() -> nn.Module:
        model = build().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return model

    return replace(loaded, build=noisy, name=name)


@functools.cache
def _profile(name: str) -> ModelProfile:
    return trace(_loaded(name))


@functools.cache
def _plan(case: Case) -> Plan:
    profile = _profile(case.model)
    wanted = [(c.name, tuple(cut.name for cut in c.cuts if cut.name in case.cuts)) for c in profile.classes]
    shape = Shape(
        1,
        case.shard,
        case.tensor,
        1,
        GLOBAL_BATCH // case.shard // 2,
        2,
        sequence=case.sequence,
        cuts=Cuts(tuple(wanted)) if case.cuts else None,
    )
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision="fp32")
    options = [LayerOption() for _ in profile.layers]
    return make_plan(profile, cluster(1, case.tensor * case.shard), training, shape, [options])


def _cuts(case: Case) -> list[TensorCut]:
    return [cut for layer_class in _plan(case).classes for cut in layer_class.cuts]


@pytest.mark.parametrize("name", slow.but_these(CASES, TRAINED))
def test_a_cut_model_trains_as_in_one_process(name: str) -> None:
    case = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [_loaded(case.model).batch(GLOBAL_BATCH) for _ in range(NUM_STEPS)]

    report = beside_one_process(
        VerifyReport(name, (), {}), _plan(case), _loaded(case.model), batches, timeout_s=PATIENCE_S
    )

    assert report.ok, "\n".join(report.lines)


def _second_step(case: Case) -> dict[str, tuple[int, int]]:
    loaded = _loaded(case.model)
    trainer = parallelize(loaded.build, _plan(case), lambda ps: torch.optim.AdamW(ps, lr=1e-3), loss=loaded.loss)
    batch: Any = loaded.batch(trainer.samples_per_step)
    trainer.step(batch)
    with Traffic(SMALLEST_BYTES) as traffic:
        trainer.step(batch)
    return {kind: (passed.bytes, passed.calls) for (_, kind), passed in traffic.passed.items()}


@pytest.mark.parametrize("name", slow.but_these([name for name, case in CASES.items() if case.shard == 1], TRAINED))
def test_traffic_of_a_cut_model_is_as_planned(name: str) -> None:
    case = CASES[name]
    planned = {c.kind: c for c in estimate(_plan(case), _profile(case.model)).collectives if c.axis == "tensor"}

    counted = run_ranks(_second_step, case.tensor, case)[0]

    assert {kind: item.bytes for kind, item in planned.items()} == pytest.approx(
        {kind: num_bytes for kind, (num_bytes, _) in counted.items()}, rel=0.01
    )
    assert {kind: item.calls for kind, item in planned.items()} == {kind: calls for kind, (_, calls) in counted.items()}


@pytest.mark.slow
def test_channels_are_cut_with_the_groups_of_the_norm_between() -> None:
    cut = _cuts(CASES["convolutions around a group norm"])[0]

    assert (cut.columns, cut.between, cut.rows) == (("conv1",), ("norm1",), ("conv2",))
    assert cut.units == (8,)
    assert cut.sharded == {
        "conv1.weight": 0, "conv1.bias": 0, "norm1.weight": 0, "norm1.bias": 0, "conv2.weight": 1
    }  # fmt: skip


def test_groups_that_read_one_tensor_sum_its_gradient_once() -> None:
    profile = _profile("parallel")
    block = profile.classes[profile.layers[1].layer_class]

    backward = [c for c in (block.tensor or block.whole).collectives if c.part == "backward"]

    assert len(block.cuts) == 2
    assert [c.entry for c in backward] == ["value"]


def test_what_a_module_does_beside_its_class_of_torch_is_kept_or_forbids_its_cut() -> None:
    profile = _profile("parallel")
    first, block = (profile.classes[profile.layers[i].layer_class] for i in (0, 1))

    assert [cut.name for cut in (*first.cuts, *block.cuts)] == ["embedding:words", "mlp:out", "mlp:down"]
    assert any("places: not cut by tensor parallelism, because its forward does more" in note for note in profile.notes)
    assert any("widen not cut by tensor parallelism, because more than" in note for note in profile.notes)


def test_slopes_of_all_heads_and_samples_are_cut_with_the_groups_of_heads() -> None:
    cut = _cuts(CASES["slopes of all heads and samples"])[0]

    assert (cut.kind, cut.units, cut.door, cut.given) == ("attention", (4, 2), "attention", {1: 0})
    assert cut.attributes == {"attention": ("heads", "groups")}


def test_of_each_sample_a_rank_takes_its_heads() -> None:
    cut = _cuts(CASES["slopes of all heads and samples"])[0]
    own = OwnHeads(cut, lambda whole, dim: whole.narrow(dim, 2, 2), lambda part, dim: part)

    (_, slopes), _ = own.enter(nn.Identity(), (torch.zeros(()), torch.arange(12).view(12, 1, 1)), {})

    assert slopes.flatten().tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.slow
def test_latent_attention_enters_where_keys_and_queries_part() -> None:
    cut = next(cut for cut in _cuts(CASES["latent attention"]) if cut.kind == "attention")

    assert cut.columns == ("self_attn.q_b_proj", "self_attn.kv_b_proj")
    assert cut.entries == ("self_attn.kv_a_proj_with_mqa",)
    assert cut.partial == ("self_attn.kv_a_layernorm.weight",)
