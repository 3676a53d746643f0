"""Initial values of large models: each rank makes those that it keeps, and they are those of one device."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.executor import apply
from meshwright.executor.measuring.one_rank import without_peers
from meshwright.executor.state import initialise
from meshwright.executor.state.initialise import Materialiser, OpRecording, initial_values
from meshwright.planner.cost.sharding import kept_rows
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.ranks import run_ranks
from support.same_numbers import Case, loss, next_tokens, plan_of, trainer_of
from support.tied_net import VOCABULARY, WIDTH, Block

NUM_EXPERTS = 8


class Experts(nn.Module):
    """A bank: all tokens of all experts at once, [experts, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * WIDTH, WIDTH))
        nn.init.normal_(self.up)
        nn.init.uniform_(self.down)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.bmm(nn.functional.gelu(torch.bmm(tokens, self.up)), self.down)


class Sparse(nn.Module):
    """Each expert gets the tokens that chose it, and zeros for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).flatten(0, 1)
        shares, chosen = self.gate(y).softmax(-1).topk(2)
        weights = torch.zeros(len(y), NUM_EXPERTS, device=x.device, dtype=y.dtype).scatter(1, chosen, shares)
        given = y.unsqueeze(0) * (weights > 0).T.unsqueeze(-1).to(y.dtype)
        return x + (self.experts(given) * weights.T.unsqueeze(-1)).sum(0).view_as(x)


class Mixed(nn.Module):
    """Of four ranks the last gets fewer rows of the tied weight, none of `five`, and columns of `start`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=7)
        self.start, self.five = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(5))
        self.blocks = nn.ModuleList([Block(), Sparse(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.orthogonal_(self.blocks[0].up.weight)  # type: ignore[union-attr, arg-type]
        nn.init.trunc_normal_(self.blocks[2].attention.qkv.weight)  # type: ignore[union-attr, arg-type]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.start * self.five.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def _profile(build: Callable[[], nn.Module]) -> ModelProfile:
    return trace(load_model(build, batch=next_tokens(VOCABULARY), loss=loss))


def _plan(case: Case, build: Callable[[], nn.Module] = Mixed) -> Plan:
    return plan_of(case, _profile(build))


CASES = {
    "fsdp": Case("mixed", shard=4),
    "hsdp": Case("mixed", replicate=2, shard=2),
    "fsdp and tensor": Case("mixed", shard=2, tensor=2),
    "experts over all shards": Case("mixed", shard=4, more={"expert": 4}),
    "experts over half of the shards": Case("mixed", shard=4, more={"expert": 2}, reshard=True),
    "experts, hsdp": Case("mixed", replicate=2, shard=2, more={"expert": 2}),
    "fsdp and context": Case("mixed", shard=2, more={"context": 2}),
    "fsdp in stages": Case("mixed", shard=2, stages=(2, 3)),
    "replicas": Case("mixed", replicate=4),
}


QUICK = "fsdp", "fsdp and tensor"
"""Cases that are tested by default."""


@functools.cache
def _begun(quick: bool) -> dict[str, tuple[dict[str, torch.Tensor], set[tuple[str, int]]]]:
    """Case -> parameters as they begin, and the dims that tensor parallelism and fully_shard divide; the quick cases or
    the others, in one fork."""
    plans = {name: _plan(case) for name, case in CASES.items() if (name in QUICK) == quick}

    def begin() -> dict[str, tuple[dict[str, torch.Tensor], set[tuple[str, int]]]]:
        found = {}
        for name, plan in plans.items():
            trainer = trainer_of(Mixed, plan)
            part = trainer._applied
            sharded = [p for p in part.parameters.values() if isinstance(p, DTensor)]
            dims = {("shard", p.placements[-1].dim) for p in sharded}  # type: ignore[attr-defined]
            dims |= {("tensor", cut.dim) for cut in part.layout.cuts.values()}
            found[name] = trainer.full_state_dict(), dims
        return found

    with pytest.MonkeyPatch.context() as patch:
        _as_large(patch)
        return run_ranks(begin, 4)[0]


def _as_large(patch: pytest.MonkeyPatch, block_elements: int = 40) -> None:
    patch.setattr(apply, "BUILD_LIMIT_BYTES", 0)
    patch.setattr(initialise, "BLOCK_ELEMENTS", block_elements)


@pytest.mark.parametrize("name", slow.but_these(CASES, QUICK))
def test_a_large_model_begins_with_the_numbers_of_one_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_large(monkeypatch)
    expected = trainer_of(Mixed, _plan(Case("mixed"))).full_state_dict()

    found, _ = _begun(name in QUICK)[name]

    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_the_cases_divide_rows_and_columns() -> None:
    assert _begun(True)["fsdp"][1] == {("shard", 0), ("shard", 1)}
    assert _begun(True)["fsdp and tensor"][1] >= {("shard", 0), ("tensor", 0), ("tensor", 1)}


class Wide(nn.Module):
    """Rows of all parameters divide by eight; the root has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, 256)
        self.scale = nn.Parameter(torch.randn(1024))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.tokens(tokens)).relu()) * self.scale[:256]


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_a_rank_of_eight_makes_an_eighth_of_the_values(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(Case("wide", shard=8, num_microbatches=1), Wide)
    made: list[int] = []
    play = OpRecording._play

    def counted(*args: Any) -> torch.Tensor:
        found = play(*args)
        made.append(found.numel())
        return found

    _as_large(monkeypatch, 256)
    monkeypatch.setattr(OpRecording, "_play", counted)

    with without_peers(rank, 8):
        trainer_of(Wide, plan)

    num_values = sum(p.numel() for p in Wide().parameters())
    assert num_values / 8 <= sum(made) <= num_values / 8 + 3 * 256  # three vectors, of which it makes a block each


def test_a_unit_is_freed_before_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(Case("wide", shard=8, num_microbatches=1), Wide)
    made: list[weakref.ref[torch.Tensor]] = []
    whole: list[list[tuple[int, ...]]] = []
    make = Materialiser._make

    def noted(*args: Any) -> nn.Parameter:
        whole.append([tuple(p.shape) for p in (ref() for ref in made) if p is not None])
        found = make(*args)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Materialiser, "_make", noted)

    with without_peers(0, 8):
        trainer_of(Wide, plan)

    assert whole == [[], [], [(256, WIDTH)], [], [(256, 256)], []]  # a bias is made beside its weight


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 9, 30, 63, 64, 65, 130])
def test_a_rank_keeps_the_rows_that_torch_gives_it(num_rows: int, num_shards: int) -> None:
    chunks = torch.arange(num_rows).chunk(num_shards)
    given = [chunk.tolist() for chunk in chunks] + [[]] * (num_shards - len(chunks))

    assert [list(kept_rows((num_rows,), num_shards, rank)) for rank in range(num_shards)] == given


def test_all_rows_are_kept_where_columns_are_divided() -> None:
    assert [kept_rows((1, 16), 4, rank) for rank in range(4)] == [range(1)] * 4


def test_values_made_of_others_are_those_of_their_time() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.full((4,), 3.0)
            base.mul_(2)
            more = base + 1
            base.add_(more)
            self.then = nn.Parameter(base + more)
            more.zero_()
            base.sub_(more).mul_(10)
            self.now = nn.Parameter(base)

    values = initial_values(Copies, is_large=True, seed=0)

    assert values.parameter("then").tolist() == [6 + 7 + 7] * 4
    assert values.parameter("now").tolist() == [130] * 4


def test_numbers_that_are_written_out_are_those_of_every_value_made_of_them() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.07))
            ones = torch.tensor([1.0, 2.0])
            ones += 1
            self.shift = nn.Parameter(ones)
            self.table = nn.Parameter(torch.from_numpy(np.arange(3.0)) * torch.tensor(2.0))

    values = initial_values(Written, is_large=True, seed=0)

    for name, parameter in Written().named_parameters():
        for _ in range(2):
            assert torch.equal(values.parameter(name), parameter.detach())


def test_values_are_made_without_what_came_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            work = torch.empty(4)
            for i in range(3):
                self.register_parameter(f"w{i}", nn.Parameter(work.fill_(i).clone()))

    values = initial_values(Reusing, is_large=True, seed=0)
    played: list[int] = []
    play = OpRecording._play

    def counted(recording: OpRecording, calls: list[Any], *args: Any) -> torch.Tensor:
        played.append(len(calls))
        return play(recording, calls, *args)

    monkeypatch.setattr(OpRecording, "_play", counted)

    found = [values.parameter(f"w{i}").tolist() for i in range(3)]

    assert found == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert played == [3, 4, 5]


def test_making_values_leaves_the_random_state_of_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    values = initial_values(Wide, is_large=True, seed=0)
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)

    values.parameter("head.weight")

    assert seeds == []
