"""Experts spread over ranks give the numbers of one process: loss, gradient norm and, after five steps, parameters.

Each case against plain PyTorch on the whole global batch; errors are max|a - b| / max|a| per tensor. eps of AdamW is
1e-4, so that noise in gradients that are zero by mathematics makes no full-sized steps (see test_equal_numbers.py).
"""

import functools
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from synthetic import cluster
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.accuracy.counters import PeakMeter, Traffic
from benchmarks.accuracy.played import SMALLEST_BYTES, by_axis
from meshwright.executor import Trainer, parallelize
from meshwright.planner.estimate import estimate
from meshwright.planner.plan import AXES, Axis, Plan, Recompute
from meshwright.planner.strategy import LayerOption, Shape, expert_rule, make_plan
from meshwright.planner.training import Precision, TrainingSpec
from meshwright.profiler.load import LoadedModel, load_model
from meshwright.profiler.model_profile import ModelProfile
from meshwright.profiler.trace import trace

os.environ.setdefault("OMP_NUM_THREADS", "1")
transformers = pytest.importorskip("transformers")

GLOBAL_BATCH = 8
SEQ_LEN = 16
VOCABULARY = 256
NUM_STEPS = 5
MAX_NORM = 0.5
TOLERANCE = 1e-5
SEED = 3

SHARDS_INSIDE: tuple[Axis, ...] = ("data_replicate", "tensor", "pipeline", "data_shard", "context")


@dataclass(frozen=True)
class Case:
    """One plan for one of the models; stages: layers per stage."""

    model: str
    expert: int
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    stages: tuple[int, ...] = ()
    num_microbatches: int = 2
    virtual: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    recompute: Recompute = "none"
    reshard: bool = True
    precision: Precision = "fp32"

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan."""
        each = self.shard * self.tensor * self.more.get("context", 1)
        return self.replicate * each * max(1, len(self.stages) // self.virtual)


CASES = {
    "mixtral, experts over all shards": Case("mixtral", 2, shard=2),
    "qwen3, experts over all shards": Case("qwen3", 2, shard=2, num_microbatches=1),
    "deepseek, experts over all shards": Case("deepseek", 2, shard=2, reshard=False),
    "mixtral, full recompute": Case("mixtral", 2, shard=2, recompute="full"),
    "mixtral, selective recompute, reduced every micro-batch": Case(
        "mixtral", 2, shard=2, recompute="selective", more={"gradient_sync": "every"}
    ),
    "qwen3, experts over half of the shards": Case("qwen3", 2, shard=4),
    "deepseek, experts over all of four shards": Case("deepseek", 4, shard=4),
    "mixtral, hsdp": Case("mixtral", 2, replicate=2, shard=2),
    "mixtral, tensor, permuted": Case("mixtral", 2, shard=2, tensor=2, more={"mesh_axes": SHARDS_INSIDE}),
    "qwen3, pipeline": Case("qwen3", 2, shard=2, stages=(2, 3)),
    "mixtral, zero bubble": Case("mixtral", 2, shard=2, stages=(2, 3), more={"schedule": "zb-h1"}, reshard=False),
    "mixtral, tensor + sequence": Case("mixtral", 2, tensor=2, more={"sequence": True}),
    "qwen3, tensor + sequence, over all, recompute": Case(
        "qwen3", 4, shard=2, tensor=2, recompute="full", more={"sequence": True}
    ),
    "mixtral, tensor + sequence, over half, permuted": Case(
        "mixtral", 2, shard=2, tensor=2, more={"sequence": True, "mesh_axes": SHARDS_INSIDE}
    ),
    "deepseek, tensor, selective recompute": Case("deepseek", 2, shard=2, tensor=2, recompute="selective"),
    "deepseek, tensor + sequence": Case("deepseek", 2, tensor=2, more={"sequence": True}),
    "mixtral, context": Case("mixtral", 2, more={"context": 2}),
    "qwen3, context and shards, over half": Case(
        "qwen3", 2, shard=2, more={"context": 2, "context_kind": "all_gather"}
    ),
    "mixtral, context and shards": Case("mixtral", 4, shard=2, more={"context": 2, "context_kind": "all_to_all"}),
    "own, looked up, every token to one rank": Case("one-sided", 2, shard=2),
    "own, stacked, hybrid": Case("stacked", 2, replicate=2, shard=2),
    "own, stacked, over half of the shards, recompute": Case("stacked", 2, shard=4, recompute="full"),
    "deepseek, interleaved, recompute": Case(
        "deepseek", 2, shard=2, stages=(1, 1, 1, 2), virtual=2, more={"schedule": "interleaved"}, recompute="full"
    ),
}

SLOW = {
    "deepseek, experts over all of four shards",
    "deepseek, tensor, selective recompute",
    "mixtral, context and shards",
    "mixtral, selective recompute, reduced every micro-batch",
    "mixtral, tensor + sequence, over half, permuted",
    "mixtral, tensor, permuted",
    "own, stacked, over half of the shards, recompute",
    "qwen3, experts over all shards",
}
"""What other cases cover in part; run by pytest -m slow."""

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
        model: nn.Module = _Model(name)
    else:
        model = transformers.AutoModelForCausalLM.from_config(_config(name))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    return model


def _batch(size: int, seq_len: int = SEQ_LEN) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(output: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())


def _samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (NUM_STEPS * GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in tokens]


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


@functools.cache
def _loaded(name: str) -> LoadedModel:
    return load_model(functools.partial(_build, name), batch=_batch, loss=_loss)


@functools.cache
def _profile(name: str) -> ModelProfile:
    return trace(_loaded(name))


@dataclass(frozen=True)
class Numbers:
    """What training gave: per step, then the last step's clipped gradients and the final parameters."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


@functools.cache
def _reference(name: str) -> Numbers:
    """Plain PyTorch, one process, the whole global batch at once."""
    torch.manual_seed(SEED)
    model = _build(name)
    optimizer = _optimizer(model.parameters())
    losses, norms = [], []
    samples = _samples()
    for step in range(NUM_STEPS):
        batch = torch.utils.data.default_collate(samples[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        optimizer.zero_grad()
        loss = _loss(model(batch[0]), batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Numbers(losses, norms, gradients, model.state_dict())


def _plan(case: Case) -> Plan:
    profile = _profile(case.model)
    shape = Shape(
        data_replicate=case.replicate,
        data_shard=case.shard,
        tensor=case.tensor,
        expert=case.expert,
        pipeline=max(1, len(case.stages) // case.virtual),
        virtual_stages=case.virtual,
        micro_batch=GLOBAL_BATCH // (case.replicate * case.shard) // case.num_microbatches,
        num_microbatches=case.num_microbatches,
        **{"schedule": "1f1b" if case.stages else "none", "mesh_axes": AXES, **case.more},
    )
    layers = iter(profile.layers)
    option = LayerOption(reshard=case.reshard)
    stages = [
        [
            replace(option, recompute=case.recompute) if layer.modules == (layer.root,) else option
            for _, layer in zip(range(size), layers, strict=False)
        ]
        for size in case.stages or (len(profile.layers),)
    ]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, precision=case.precision, expert_imbalance=1.0)
    return make_plan(profile, cluster(1, case.num_ranks), training, shape, stages)


def _trainer(case: Case) -> Trainer:
    return parallelize(
        _loaded(case.model).build, _plan(case), _optimizer, loss=_loss, seed=SEED, max_grad_norm=MAX_NORM
    )


def _train(case: Case) -> Numbers:
    trainer = _trainer(case)
    metrics = [trainer.step(batch) for batch in trainer.loader(_samples())]
    losses, norms = [m.loss for m in metrics], [m.grad_norm for m in metrics]
    return Numbers(losses, norms, trainer.named_gradients(), trainer.full_state_dict())


def _errors(found: Numbers, expected: Numbers) -> dict[str, float]:
    """Relative errors: loss, norm, worst gradient and worst parameter (named)."""
    floor = 2e-3 * max(g.abs().max().item() for g in expected.gradients.values())
    errors = {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(expected.losses, found.losses, strict=True)),
        "norm": max(abs(a - b) / abs(a) for a, b in zip(expected.norms, found.norms, strict=True)),
    }
    assert found.state.keys() == expected.state.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    for kind, ours, theirs, least in (
        ("gradient", found.gradients, expected.gradients, floor),
        ("parameter", found.state, expected.state, 1e-9),
    ):
        worst = max(
            ((a - ours[name]).abs().max().item() / max(a.abs().max().item(), least), name) for name, a in theirs.items()
        )
        errors[f"{kind} {worst[1]}"] = worst[0]
    return errors


def _run_cases(names: list[str]) -> dict[str, dict[str, float]]:
    outcomes: dict[str, dict[str, float]] = {}
    for name in names:
        try:
            found = _train(CASES[name])
        except Exception as error:
            raise RuntimeError(f'case "{name}" failed') from error
        if dist.get_rank() == 0:
            outcomes[name] = _errors(found, _reference(CASES[name].model))
    return outcomes


@functools.cache
def _outcomes(num_ranks: int, slow: bool) -> dict[str, dict[str, float]]:
    """Errors of every case for that many ranks, slow or not; they run in one fork."""
    names = [n for n, case in CASES.items() if case.num_ranks == num_ranks and (n in SLOW) == slow]
    for name in names:  # before the fork, so that ranks inherit it
        _reference(CASES[name].model)
        _plan(CASES[name])
    return run_ranks(_run_cases, num_ranks, names, timeout=200)[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_spread_experts_give_the_numbers_of_one_process(name: str) -> None:
    errors = _outcomes(CASES[name].num_ranks, name in SLOW)[name]

    assert max(errors.values()) < TOLERANCE, errors


COUNTED = {
    "experts over all shards": Case("even", 4, shard=4),
    "over half of the shards, recompute": Case("even", 2, shard=4, recompute="full"),
    "bf16, selective recompute, kept": Case(
        "even", 2, shard=4, recompute="selective", reshard=False, precision="bf16", more={"gradient_sync": "every"}
    ),
    "stacked": Case("stacked", 4, shard=4),
    "hybrid, pipeline": Case("even", 2, replicate=2, shard=2, stages=(2, 3)),
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
            memory.restart()
            with Traffic(SMALLEST_BYTES) as traffic:
                trainer.step(next(batches))
        passed = {key: (each.bytes, each.calls) for key, each in by_axis(trainer, traffic).items()}
        found.append((trainer.mesh.coordinates["pipeline"], passed, memory.peak))
    return found


@functools.cache
def _counted(num_ranks: int) -> list[list[tuple[int, dict[Any, tuple[int, int]], int]]]:
    cases = [case for case in COUNTED.values() if case.num_ranks == num_ranks]
    for case in cases:
        _plan(case)
    return run_ranks(_counted_steps, num_ranks, cases, timeout=100)


@pytest.mark.parametrize("name", COUNTED)
def test_predicted_exchange_is_what_the_ranks_pass(name: str) -> None:
    """Where tokens spread evenly: bytes of the rank that passes most, its calls, and the peaks of all ranks."""
    case = COUNTED[name]
    predicted = estimate(_plan(case), _profile(case.model))
    place = [c for c in COUNTED.values() if c.num_ranks == case.num_ranks].index(case)
    ranks = [rank[place] for rank in _counted(case.num_ranks)]
    most: dict[Any, tuple[int, int]] = {}
    for _, passed, _ in ranks:
        for key, each in passed.items():
            most[key] = max(most.get(key, (0, 0)), each)

    assert {(i.axis, i.kind): (i.bytes, i.calls) for i in predicted.collectives} == {
        key: (pytest.approx(num_bytes, rel=0.01), calls) for key, (num_bytes, calls) in most.items()
    }
    for stage, _, peak in ranks:
        assert 0.9 < predicted.memory[stage].allocated_bytes / peak < 1.2


def _losses_in_bf16(spread: Case, whole: Case) -> list[list[float]]:
    return [
        [trainer.step(batch).loss for batch in trainer.loader(_samples())]
        for trainer in map(_trainer, (replace(spread, precision="bf16"), replace(whole, precision="bf16")))
    ]


def test_spread_experts_in_bf16_are_as_near_to_fp32_as_whole_ones() -> None:
    spread, whole = Case("mixtral", 2, shard=2), Case("mixtral", 1, shard=2)
    expected = _reference("mixtral").losses
    _plan(spread), _plan(whole)

    found, found_whole = run_ranks(_losses_in_bf16, 2, spread, whole)[0]

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
    metrics = [trainer.step(batch) for batch in trainer.loader(_samples())]
    losses, norms = [m.loss for m in metrics], [m.grad_norm for m in metrics]
    return Numbers(losses, norms, trainer.named_gradients(), trainer.full_state_dict())


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Case("qwen3", 2, shard=4), Case("qwen3", 2, shard=2, num_microbatches=1)),
        pytest.param(Case("qwen3", 2, shard=2), Case("qwen3", 4, shard=4), marks=pytest.mark.slow),
        pytest.param(Case("qwen3", 2, shard=2), Case("qwen3", 1, replicate=2), marks=pytest.mark.slow),
        (Case("qwen3", 1, shard=2), Case("qwen3", 2, shard=2, stages=(2, 3))),
    ],
)
def test_a_checkpoint_of_spread_experts_goes_on_under_another_plan(saved: Case, resumed: Case, tmp_path: Path) -> None:
    expected = _reference("qwen3")
    _plan(saved), _plan(resumed)
    run_ranks(_saved, saved.num_ranks, saved, tmp_path)

    found = run_ranks(_resumed, resumed.num_ranks, resumed, tmp_path)[0]

    errors = _errors(found, replace(expected, losses=expected.losses[2:], norms=expected.norms[2:]))
    assert max(errors.values()) < TOLERANCE, errors


def test_experts_that_scale_their_tokens_are_not_spread() -> None:
    build = functools.partial(_Model, "learned", scales_before=True)
    profile = trace(load_model(build, batch=_batch, loss=_loss))

    assert not any(c.experts for c in profile.classes)
    assert expert_rule(profile, 2) == "expert: the model has no banks of experts"


def test_experts_whose_tokens_see_each_other_are_not_spread() -> None:
    profile = trace(load_model(functools.partial(_Model, "stacked", mixes=True), batch=_batch, loss=_loss))

    assert [bank.called for c in profile.classes for bank in c.experts] == [""]
    assert "no rank can run a part of it" in str(expert_rule(profile, 2))


def test_experts_need_tokens_of_their_own_on_every_rank() -> None:
    assert expert_rule(_profile("mixtral"), 2) is None
    assert expert_rule(_profile("mixtral"), 3) == "expert=3 does not divide 4 experts"
    assert expert_rule(_profile("mixtral"), 2, sequence=True) is None
    assert "hold the same tokens in _Block" in str(expert_rule(_profile("learned"), 2, sequence=True))
