"""Experts spread over ranks give the numbers of one process: loss, gradient norm and, after five steps, parameters.

Each case against plain PyTorch on the whole global batch (see same_numbers.py).
"""

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.accuracy.counters import PeakMeter, Traffic
from benchmarks.accuracy.played import SMALLEST_BYTES, by_axis
from meshwright.executor import Trainer
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Axis, Plan
from meshwright.planner.plan.legality import expert_rule
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.ranks import run_ranks
from support.same_numbers import (
    SEQ_LEN,
    TOLERANCE,
    Case,
    Numbers,
    Samples,
    errors,
    loss,
    next_tokens,
    numbers_of,
    numbers_of_one_process,
    plan_of,
    randomised,
    samples,
    trainer_of,
)
from support.small_models import small_profile

os.environ.setdefault("OMP_NUM_THREADS", "1")
transformers = pytest.importorskip("transformers")

VOCABULARY = 256
NUM_STEPS = 5

SHARDS_INSIDE: tuple[Axis, ...] = ("data_replicate", "tensor", "pipeline", "data_shard", "context")


def spread(model: str, expert: int, **more: Any) -> Case:
    """A case whose experts lie on so many ranks; parameters are given back, if not said otherwise."""
    return Case(model, **{"reshard": True, **more, "more": {"expert": expert, **more.get("more", {})}})


CASES = {
    "mixtral, experts over all shards": spread("mixtral", 2, shard=2),
    "qwen3, experts over all shards": spread("qwen3", 2, shard=2, num_microbatches=1),
    "deepseek, experts over all shards": spread("deepseek", 2, shard=2, reshard=False),
    "mixtral, full recompute": spread("mixtral", 2, shard=2, recompute="full"),
    "mixtral, selective recompute, reduced every micro-batch": spread(
        "mixtral", 2, shard=2, recompute="selective", more={"gradient_sync": "every"}
    ),
    "mixtral, parts of layers": spread("mixtral", 2, shard=2, recompute=("parts:self_attn+mlp", "parts:mlp")),
    "deepseek, parts of layers, reduced every micro-batch": spread(
        "deepseek", 2, shard=2, recompute="parts:mlp", more={"gradient_sync": "every"}
    ),
    "mixtral, the bank alone": spread("mixtral", 2, shard=2, recompute="parts:mlp.experts"),
    "qwen3, tensor + sequence, over all, parts": spread(
        "qwen3", 4, shard=2, tensor=2, recompute="parts:self_attn+mlp", more={"sequence": True}
    ),
    "qwen3, experts over half of the shards": spread("qwen3", 2, shard=4),
    "deepseek, experts over all of four shards": spread("deepseek", 4, shard=4),
    "mixtral, hsdp": spread("mixtral", 2, replicate=2, shard=2),
    "mixtral, tensor, permuted": spread("mixtral", 2, shard=2, tensor=2, more={"mesh_axes": SHARDS_INSIDE}),
    "qwen3, pipeline": spread("qwen3", 2, shard=2, stages=(2, 3)),
    "mixtral, zero bubble": spread("mixtral", 2, shard=2, stages=(2, 3), more={"schedule": "zb-h1"}, reshard=False),
    "mixtral, tensor + sequence": spread("mixtral", 2, tensor=2, more={"sequence": True}),
    "qwen3, tensor + sequence, over all, recompute": spread(
        "qwen3", 4, shard=2, tensor=2, recompute="full", more={"sequence": True}
    ),
    "mixtral, tensor + sequence, over half, permuted": spread(
        "mixtral", 2, shard=2, tensor=2, more={"sequence": True, "mesh_axes": SHARDS_INSIDE}
    ),
    "deepseek, tensor, selective recompute": spread("deepseek", 2, shard=2, tensor=2, recompute="selective"),
    "deepseek, tensor + sequence": spread("deepseek", 2, tensor=2, more={"sequence": True}),
    "mixtral, context": spread("mixtral", 2, more={"context": 2}),
    "qwen3, context and shards, over half": spread(
        "qwen3", 2, shard=2, more={"context": 2, "context_kind": "all_gather"}
    ),
    "mixtral, context and shards": spread("mixtral", 4, shard=2, more={"context": 2, "context_kind": "all_to_all"}),
    "own, looked up, every token to one rank": spread("one-sided", 2, shard=2),
    "own, stacked, hybrid": spread("stacked", 2, replicate=2, shard=2),
    "own, stacked, over half of the shards, recompute": spread("stacked", 2, shard=4, recompute="full"),
    "own, stacked, over half of the shards, parts": spread("stacked", 2, shard=4, recompute="parts:norm+experts"),
    "deepseek, interleaved, recompute": spread(
        "deepseek", 2, shard=2, stages=(1, 1, 1, 2), virtual=2, more={"schedule": "interleaved"}, recompute="full"
    ),
}

QUICK = {"own, stacked, hybrid"}
"""The others run by pytest -m slow."""

_CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ_LEN,
    "use_cache": False,
}  # fmt: skip
_DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


class _Experts(nn.Module):
    """Weights of every token's experts looked up one by one; scaled before: a convention that cannot be spread."""

    def __init__(self, count: int, width: int, scales_before: bool) -> None:
        super().__init__()
        self.num_experts = count
        self.scales_before = scales_before
        self.up = nn.Parameter(torch.empty(count, width, 2 * width))
        self.down = nn.Parameter(torch.empty(count, 2 * width, width))
        self.bias = nn.Parameter(torch.empty(count, width))

    def forward(self, share: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        which, x = experts.flatten(), tokens.repeat_interleave(experts.shape[1], 0)
        if self.scales_before:
            x = x * share.flatten().unsqueeze(-1)
        hidden = torch.bmm(x.unsqueeze(1), self.up[which]).relu()
        y = torch.bmm(hidden, self.down[which]).squeeze(1) + self.bias[which]
        if not self.scales_before:
            y = y * share.flatten().unsqueeze(-1)
        return y.view(*experts.shape, -1).sum(1)


class _StackedExperts(nn.Module):
    """All tokens of all experts at once, [experts, tokens, width]; mixes: they see each other, so stay together."""

    def __init__(self, count: int, width: int, mixes: bool) -> None:
        super().__init__()
        self.count, self.mixes = count, mixes
        self.up = nn.Parameter(torch.empty(count, width, 2 * width))
        self.down = nn.Parameter(torch.empty(count, 2 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(torch.bmm(tokens, self.up))
        if self.mixes:
            hidden = hidden - hidden.mean(1, keepdim=True)
        return torch.bmm(hidden, self.down.view(self.count, -1, tokens.shape[2]))


class _StackedBlock(nn.Module):
    """Each expert gets the tokens that chose it, and zeros for the others."""

    def __init__(self, count: int, width: int, mixes: bool) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = _StackedExperts(count, width, mixes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).flatten(0, 1)
        shares, chosen = self.gate(y).softmax(-1).topk(2)
        weights = torch.zeros(len(y), self.gate.out_features, device=x.device, dtype=y.dtype).scatter(1, chosen, shares)
        given = y.unsqueeze(0) * (weights > 0).T.unsqueeze(-1).to(y.dtype)
        return x + (self.experts(given) * weights.T.unsqueeze(-1)).sum(0).view_as(x)


class _Block(nn.Module):
    """route: "even": every expert gets as many tokens; "one-sided": all go to the first half; "learned"."""

    def __init__(self, count: int, width: int, route: str, scales_before: bool = False) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = _Experts(count, width, scales_before)
        self.route, self.count = route, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).flatten(0, 1)
        shares = self.gate(y).softmax(-1)
        shares, chosen = shares[:, : self.count // (2 if self.route == "one-sided" else 1)].topk(2)
        if self.route == "even":
            chosen = torch.arange(chosen.numel(), device=x.device).view_as(chosen) % self.count
        return x + self.experts(shares, tokens=y, experts=chosen).view_as(x)


class _Model(nn.Module):
    def __init__(
        self, route: str, count: int = 8, width: int = 32, scales_before: bool = False, mixes: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            _StackedBlock(count, width, mixes) if route == "stacked" else _Block(count, width, route, scales_before)
            for _ in range(3)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _config(name: str) -> Any:
    if name == "mixtral":
        return transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **_CONFIG)
    if name == "qwen3":
        more = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        return transformers.Qwen3MoeConfig(norm_topk_prob=True, **more, **_CONFIG)
    return transformers.DeepseekV3Config(**{**_CONFIG, **_DEEPSEEK})


def _build(name: str) -> nn.Module:
    if name in ("even", "one-sided", "learned", "stacked"):
        return randomised(_Model(name))
    return randomised(transformers.AutoModelForCausalLM.from_config(_config(name)))


def _samples() -> Samples:
    return samples(VOCABULARY, NUM_STEPS)


@functools.cache
def _loaded(name: str) -> LoadedModel:
    return load_model(functools.partial(_build, name), batch=next_tokens(VOCABULARY), loss=loss)


@functools.cache
def _profile(name: str) -> ModelProfile:
    return trace(_loaded(name))


@functools.cache
def _reference(name: str) -> Numbers:
    return numbers_of_one_process(functools.partial(_build, name), _samples())


def _plan(case: Case) -> Plan:
    return plan_of(case, _profile(case.model))


def _trainer(case: Case) -> Trainer:
    return trainer_of(_loaded(case.model).build, _plan(case))


def _errors(found: Numbers, expected: Numbers) -> dict[str, float]:
    return errors(found, expected, gradient_floor=2e-3, parameter_floor=1e-9)


def _run_cases(names: list[str]) -> dict[str, dict[str, float]]:
    outcomes: dict[str, dict[str, float]] = {}
    for name in names:
        try:
            found = numbers_of(_trainer(CASES[name]), _samples())
        except Exception as error:
            raise RuntimeError(f'case "{name}" failed') from error
        if dist.get_rank() == 0:
            outcomes[name] = _errors(found, _reference(CASES[name].model))
    return outcomes


@functools.cache
def _outcomes(num_ranks: int, quick: bool) -> dict[str, dict[str, float]]:
    """Errors of every case for that many ranks, the quick ones or the others; they run in one fork."""
    names = [n for n, case in CASES.items() if case.num_ranks == num_ranks and (n in QUICK) == quick]
    for name in names:  # before the fork, so that ranks inherit it
        _reference(CASES[name].model)
        _plan(CASES[name])
    return run_ranks(_run_cases, num_ranks, names)[0]


@pytest.mark.parametrize("name", slow.but_these(CASES, QUICK))
def test_spread_experts_give_the_numbers_of_one_process(name: str) -> None:
    relative = _outcomes(CASES[name].num_ranks, name in QUICK)[name]

    assert max(relative.values()) < TOLERANCE, relative


COUNTED = {
    "experts over all shards": spread("even", 4, shard=4),
    "over half of the shards, recompute": spread("even", 2, shard=4, recompute="full"),
    "bf16, selective recompute, kept": spread(
        "even", 2, shard=4, recompute="selective", reshard=False, precision="bf16", more={"gradient_sync": "every"}
    ),
    "over half of the shards, the bank alone": spread("even", 2, shard=4, recompute="parts:norm+experts"),
    "bf16, parts, kept": spread("even", 2, shard=4, recompute="parts:experts", reshard=False, precision="bf16"),
    "stacked": spread("stacked", 4, shard=4),
    "hybrid, pipeline": spread("even", 2, replicate=2, shard=2, stages=(2, 3)),
}


def _counted_steps(cases: list[Case]) -> list[tuple[int, dict[Any, tuple[int, int]], int]]:
    """Of each case, in the third step: (stage, what was passed by axis and collective, peak)."""
    found = []
    for case in cases:
        with PeakMeter() as memory:
            trainer = _trainer(case)
            batches = trainer.loader(_samples())
            for _ in range(2):
                trainer.step(next(batches))
            memory.begin()
            with Traffic(SMALLEST_BYTES) as traffic:
                trainer.step(next(batches))
        passed = {key: (each.bytes, each.calls) for key, each in by_axis(trainer, traffic).items()}
        found.append((trainer.mesh.coordinates["pipeline"], passed, memory.peak))
    return found


@functools.cache
def _counted(num_ranks: int) -> dict[str, list[tuple[int, dict[Any, tuple[int, int]], int]]]:
    """Case -> [rank] -> what it did; all cases for that many ranks run in one fork."""
    cases = {n: c for n, c in COUNTED.items() if c.num_ranks == num_ranks}
    for case in cases.values():
        _plan(case)
    ranks = run_ranks(_counted_steps, num_ranks, list(cases.values()))
    return {name: [rank[place] for rank in ranks] for place, name in enumerate(cases)}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_predicted_exchange_is_what_the_ranks_pass(name: str) -> None:
    """Where tokens spread evenly: bytes of the rank that passes most, its calls, and the peaks of all ranks."""
    case = COUNTED[name]
    predicted = estimate(_plan(case), _profile(case.model))
    ranks = _counted(case.num_ranks)[name]
    most: dict[Any, tuple[int, int]] = {}
    for _, passed, _ in ranks:
        for key, each in passed.items():
            most[key] = max(most.get(key, (0, 0)), each)

    assert {(i.axis, i.kind): (i.bytes, i.calls) for i in predicted.collectives} == {
        key: (pytest.approx(num_bytes, rel=0.01), calls) for key, (num_bytes, calls) in most.items()
    }
    for stage, _, peak in ranks:
        assert 0.9 < predicted.memory[stage].allocated_bytes / peak < 1.2


def _losses(*cases: Case) -> list[list[float]]:
    return [[trainer.step(batch).loss for batch in trainer.loader(_samples())] for trainer in map(_trainer, cases)]


@pytest.mark.slow
def test_spread_experts_in_bf16_are_as_near_to_fp32_as_whole_ones() -> None:
    cases = spread("mixtral", 2, shard=2, precision="bf16"), spread("mixtral", 1, shard=2, precision="bf16")
    expected = _reference("mixtral").losses
    for case in cases:
        _plan(case)

    found, found_whole = run_ranks(_losses, 2, *cases)[0]

    assert found == pytest.approx(expected, rel=5e-3)
    assert found == pytest.approx(found_whole, rel=5e-3)


def _saved(case: Case, folder: Path) -> None:
    trainer = _trainer(case)
    for _, batch in zip(range(2), trainer.loader(_samples()), strict=False):
        trainer.step(batch)
    trainer.save(folder)


def _resumed(case: Case, folder: Path) -> Numbers:
    trainer = _trainer(case)
    trainer.resume(folder)
    return numbers_of(trainer, _samples())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (spread("qwen3", 2, shard=4), spread("qwen3", 2, shard=2, num_microbatches=1)),
        (spread("qwen3", 2, shard=2), spread("qwen3", 4, shard=4)),
        (spread("qwen3", 2, shard=2), spread("qwen3", 1, replicate=2)),
        (spread("qwen3", 1, shard=2), spread("qwen3", 2, shard=2, stages=(2, 3))),
    ],
)
def test_a_checkpoint_of_spread_experts_goes_on_under_another_plan(saved: Case, resumed: Case, tmp_path: Path) -> None:
    expected = _reference("qwen3")
    _plan(saved), _plan(resumed)
    run_ranks(_saved, saved.num_ranks, saved, tmp_path)

    found = run_ranks(_resumed, resumed.num_ranks, resumed, tmp_path)[0]

    relative = _errors(found, replace(expected, losses=expected.losses[2:], norms=expected.norms[2:]))
    assert max(relative.values()) < TOLERANCE, relative


@pytest.mark.slow
def test_experts_that_scale_their_tokens_are_not_spread() -> None:
    build = functools.partial(_Model, "learned", scales_before=True)
    profile = trace(load_model(build, batch=next_tokens(VOCABULARY), loss=loss))

    assert not any(c.experts for c in profile.classes)
    assert expert_rule(profile, 2) == "expert: the model has no banks of experts"


@pytest.mark.parametrize(("name", "groups"), slow.but_first([("deepseek", (4, 2)), ("mixtral", (1, 1))], 0))
def test_the_groups_that_a_router_chooses_from_are_found(name: str, groups: tuple[int, int]) -> None:
    banks = [bank for c in small_profile(name).classes for bank in c.experts]

    assert {(bank.groups, bank.chosen_groups) for bank in banks} == {groups}


@pytest.mark.slow
def test_experts_whose_tokens_see_each_other_are_not_spread() -> None:
    profile = trace(
        load_model(functools.partial(_Model, "stacked", mixes=True), batch=next_tokens(VOCABULARY), loss=loss)
    )

    assert [bank.called for c in profile.classes for bank in c.experts] == [""]
    assert "no rank can run a part of it" in str(expert_rule(profile, 2))


@pytest.mark.slow
def test_experts_need_tokens_of_their_own_on_every_rank() -> None:
    assert expert_rule(_profile("mixtral"), 2) is None
    assert expert_rule(_profile("mixtral"), 3) == "expert=3 does not divide 4 experts"
    assert expert_rule(_profile("mixtral"), 2, sequence=True) is None
    assert "hold the same tokens in _Block" in str(expert_rule(_profile("learned"), 2, sequence=True))
