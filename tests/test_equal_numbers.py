"""Every way to execute a plan gives the numbers of one process: loss, gradient norm, gradients, parameters.

Three AdamW steps with clipping in fp32, each case against plain PyTorch on the whole global batch. Errors are
max|a - b| / max|a| per tensor. Where a gradient is mathematically zero (biases of attention keys) both sides hold
rounding noise, so gradients are compared down to 2e-7 of the model's largest; and AdamW divides by |g| + eps, which
with the usual eps of 1e-8 makes full-sized steps of that noise, in the reference as well. eps is 1e-4 here: a tenth of
a typical gradient and 10^4 times the noise. Parameters start random throughout, so that no bias hides behind a zero.
"""

import functools
import importlib.util
import os
import sys
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from synthetic import cluster
from torch import nn

from meshwright.executor import Trainer, parallelize
from meshwright.planner.plan import AXES, Axis, Plan, Recompute
from meshwright.planner.strategy import Cuts, LayerOption, Shape, make_plan
from meshwright.planner.training import TrainingSpec
from meshwright.profiler.load import LoadedModel, load_model
from meshwright.profiler.model_profile import ModelProfile
from meshwright.profiler.trace import trace

os.environ.setdefault("OMP_NUM_THREADS", "1")

GLOBAL_BATCH = 8
SEQ_LEN = 16
VOCABULARY = 1024
NUM_STEPS = 3
MAX_NORM = 0.5
TOLERANCE = 1e-5
NOISE = 2e-7
SEED = 3

TENSOR_OUTSIDE: tuple[Axis, ...] = ("pipeline", "tensor", "data_shard", "context", "data_replicate")
PIPELINE_INSIDE: tuple[Axis, ...] = ("data_shard", "tensor", "data_replicate", "context", "pipeline")


@dataclass(frozen=True)
class Case:
    """One plan for one of the models; stages: layers per stage; recompute: of all layers, or of one after the other;
    fault: a mistake that must not go unseen."""

    model: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    stages: tuple[int, ...] = ()
    num_microbatches: int = 2
    virtual: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    recompute: Recompute | tuple[Recompute, ...] = "none"
    reshard: bool = False
    fault: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan."""
        return self.replicate * self.shard * self.tensor * max(1, len(self.stages) // self.virtual)


INTERLEAVED = {"schedule": "interleaved"}
ZB_V = {"schedule": "zb-v"}
EVERY_KIND: tuple[Recompute, ...] = ("full", "selective", "attention", "none")

ATTENTION, MLP = (
    Cuts((("LlamaDecoderLayer", (name,)),)) for name in ("attention:self_attn.o_proj", "mlp:mlp.down_proj")
)

CASES = {
    "one device": Case("gpt"),
    "one device, recompute": Case("gpt", recompute="full", num_microbatches=4),
    "ddp": Case("gpt", replicate=2),
    "ddp, reduced every micro-batch": Case("gpt", replicate=2, more={"gradient_sync": "every"}),
    "ddp, recompute": Case("gpt", replicate=2, recompute="full"),
    "fsdp, tied": Case("gpt", shard=2, reshard=True),
    "fsdp, Llama": Case("llama", shard=2, reshard=True),
    "ddp, unread parameter": Case("normed", replicate=2),
    "tensor 2, fused qkv, tied, head": Case("gpt", tensor=2),
    "tensor 2, Conv1D": Case("gpt2", tensor=2),
    "tensor 2, norms of heads": Case("normed", tensor=2),
    "tensor 2 + sequence": Case("gpt", tensor=2, more={"sequence": True}),
    "tensor 2 + sequence, norms of heads": Case("normed", tensor=2, more={"sequence": True}),
    "tensor 2 + sequence, Conv1D": Case("gpt2", tensor=2, more={"sequence": True}),
    "tensor 2 + sequence, Llama, recompute": Case("llama", tensor=2, more={"sequence": True}, recompute="full"),
    "tensor 2, attention cut, mlp whole": Case("llama", tensor=2, more={"cuts": ATTENTION}),
    "tensor 2, mlp cut, attention whole": Case("llama", tensor=2, more={"cuts": MLP}),
    "fsdp x tensor + sequence, mlp whole on slices": Case(
        "llama", shard=2, tensor=2, reshard=True, more={"sequence": True, "cuts": ATTENTION}
    ),
    "pipeline 2, tied across stages": Case("gpt", stages=(3, 3), num_microbatches=4),
    "pipeline 2, gpipe, uneven": Case("gpt", stages=(1, 5), more={"schedule": "gpipe"}),
    "ddp x4, no accumulation": Case("gpt", replicate=4, num_microbatches=1),
    "zero-3 x4, reduced every micro-batch": Case("gpt", shard=4, reshard=True, more={"gradient_sync": "every"}),
    "zero-2 x4": Case("gpt", shard=4, more={"gradient_sync": "every"}),
    "zero-1 x4": Case("gpt", shard=4),
    "hsdp 2x2": Case("gpt", 2, 2, reshard=True),
    "hsdp 2x2, recompute, permuted": Case(
        "gpt", 2, 2, recompute="full", reshard=True, more={"mesh_axes": TENSOR_OUTSIDE}
    ),
    "tensor 4, fused qkv, tied, head": Case("gpt", tensor=4),
    "tensor 4 + sequence": Case("gpt", tensor=4, more={"sequence": True}),
    "ddp x tensor": Case("gpt", replicate=2, tensor=2),
    "fsdp x tensor": Case("gpt", shard=2, tensor=2, reshard=True),
    "fsdp x tensor + sequence, Llama, permuted": Case(
        "llama", shard=2, tensor=2, reshard=True, more={"sequence": True, "mesh_axes": TENSOR_OUTSIDE}
    ),
    "pipeline 4, recompute": Case("gpt", stages=(1, 1, 2, 2), num_microbatches=4, recompute="full"),
    "pipeline x ddp": Case("gpt", replicate=2, stages=(2, 4)),
    "pipeline x fsdp": Case("gpt", shard=2, stages=(4, 2)),
    "pipeline x zero-3, reduced every micro-batch": Case(
        "gpt", shard=2, stages=(4, 2), num_microbatches=4, reshard=True, more={"gradient_sync": "every"}
    ),
    "pipeline x zero-3, reduced last": Case("gpt", shard=2, stages=(2, 4), num_microbatches=4, reshard=True),
    "naive model parallel": Case("gpt", stages=(3, 3), num_microbatches=1, more={"schedule": "gpipe"}),
    "pipeline x hsdp": Case("gpt", 2, 2, stages=(3, 3), num_microbatches=2, reshard=True),
    "pipeline x tensor, permuted": Case("gpt", tensor=2, stages=(2, 4), more={"mesh_axes": PIPELINE_INSIDE}),
    "pipeline x tensor + sequence, cut between slices": Case("gpt", tensor=2, stages=(3, 3), more={"sequence": True}),
    "hsdp x tensor + sequence, recompute, permuted": Case(
        "gpt", 2, 2, 2, reshard=True, recompute="full", more={"sequence": True, "mesh_axes": TENSOR_OUTSIDE}
    ),
    "pipeline x fsdp x tensor + sequence, recompute": Case(
        "gpt", shard=2, tensor=2, stages=(2, 4), recompute="full", more={"sequence": True, "mesh_axes": PIPELINE_INSIDE}
    ),
}

SCHEDULES = {
    "interleaved 2x2": Case("gpt", stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more=INTERLEAVED),
    "interleaved 2x3, recompute": Case(
        "gpt", stages=(1,) * 6, virtual=3, num_microbatches=2, recompute="full", more=INTERLEAVED
    ),
    "zb-h1 2, tied across stages": Case("gpt", stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h1"}),
    "zb-h1 2x2 (interleaved zero bubble)": Case(
        "gpt", stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more={"schedule": "zb-h1"}
    ),
    "zb-h2 2, uneven": Case("gpt", stages=(1, 5), num_microbatches=4, more={"schedule": "zb-h2"}),
    "zb-v 2x2, tied on one rank": Case("gpt", stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more=ZB_V),
    "zb-v 2x2, one micro-batch": Case("gpt", stages=(2, 1, 2, 1), virtual=2, num_microbatches=1, more=ZB_V),
    "interleaved 2x2 x ddp, selective recompute": Case(
        "gpt", 2, stages=(1, 2, 1, 2), virtual=2, recompute="selective", more=INTERLEAVED
    ),
    "interleaved 2x2 x zero-3, reduced every micro-batch": Case(
        "gpt", shard=2, stages=(1, 2, 1, 2), virtual=2, reshard=True, more={**INTERLEAVED, "gradient_sync": "every"}
    ),
    "zb-h1 2 x zero-3": Case(
        "gpt", shard=2, stages=(3, 3), num_microbatches=4, reshard=True, more={"schedule": "zb-h1"}
    ),
    "zb-h1 4, uneven": Case("gpt", stages=(1, 1, 2, 2), num_microbatches=8, more={"schedule": "zb-h1"}),
    "zb-h2 2 x tensor + sequence": Case(
        "gpt", tensor=2, stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h2", "sequence": True}
    ),
    "zb-v 2x2 x fsdp, reduced every micro-batch": Case(
        "gpt", shard=2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more={**ZB_V, "gradient_sync": "every"}
    ),
    "zb-v 2x2 x tensor, permuted": Case(
        "gpt", tensor=2, stages=(1, 2, 1, 2), virtual=2, more={**ZB_V, "mesh_axes": PIPELINE_INSIDE}
    ),
    "interleaved 2x2 x fsdp x tensor + sequence, recompute": Case(
        "gpt", shard=2, tensor=2, stages=(1, 2, 1, 2), virtual=2, recompute="full",
        more={**INTERLEAVED, "sequence": True},
    ),
}  # fmt: skip

SLOW = {
    "interleaved 2x2 x tensor + sequence": Case(
        "gpt", tensor=2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more={**INTERLEAVED, "sequence": True}
    ),
    "zb-h1 2 x ddp": Case("gpt", 2, stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h1"}),
    "zb-v 2x2 x fsdp": Case("gpt", shard=2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=4, more=ZB_V),
    "zb-v 2x2 x hsdp": Case("gpt", 2, 2, stages=(1, 2, 1, 2), virtual=2, num_microbatches=2, more=ZB_V),
    "zb-h1 2 x fsdp x tensor": Case(
        "gpt", shard=2, tensor=2, stages=(3, 3), num_microbatches=4, more={"schedule": "zb-h1"}
    ),
}

RECOMPUTES = {
    "one device, selective recompute": Case("gpt", recompute="selective", num_microbatches=4),
    "one device, recompute of attention": Case("unfused", recompute="attention"),
    "one device, selective recompute of unfused attention": Case("unfused", recompute="selective"),
    "ddp, selective recompute": Case("gpt", replicate=2, recompute="selective"),
    "fsdp, recompute of attention": Case("unfused", shard=2, reshard=True, recompute="attention"),
    "fsdp, selective recompute": Case("gpt", shard=2, reshard=True, recompute="selective"),
    "tensor 2 + sequence, selective recompute": Case("gpt", tensor=2, recompute="selective", more={"sequence": True}),
    "tensor 2, recompute of attention": Case("unfused", tensor=2, recompute="attention"),
    "fsdp, every kind of recompute at once": Case("unfused", shard=2, reshard=True, recompute=EVERY_KIND),
    "pipeline 2 x fsdp, three kinds of recompute in a stage": Case(
        "gpt", shard=2, stages=(3, 3), recompute=("none", "full", "selective")
    ),
    "interleaved 2x2, recompute of attention": Case(
        "unfused", stages=(1, 1, 1, 1), virtual=2, num_microbatches=4, recompute="attention", more=INTERLEAVED
    ),
}

CASES |= SCHEDULES | RECOMPUTES

FAULTS = {
    "one gradient 1% too large": Case("gpt", shard=2, fault="gradient"),
    "one sample of 24 dropped": Case("gpt", replicate=2, fault="sample"),
    "sequence-parallel norms not summed": Case("gpt", tensor=2, more={"sequence": True}, fault="partial"),
    "norms of heads not summed": Case("normed", tensor=2, fault="partial"),
    "ties across stages not summed": Case("gpt", stages=(3, 3), num_microbatches=4, fault="ties"),
}

EVERYTHING = CASES | FAULTS | SLOW


@dataclass(frozen=True)
class Numbers:
    """What training gave: per step, then the last step's clipped gradients and the final parameters."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def _gpt() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "models" / "gpt.py"
    spec = importlib.util.spec_from_file_location("benchmark_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["benchmark_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Attention(nn.Module):
    """Separate projections, queries and keys normed per head, and a parameter that nothing reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.q_scale = nn.Parameter(torch.ones(width // heads))
        self.k_norm = nn.LayerNorm(width // heads)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, len(self.q_scale)) for part in (self.q(x), self.k(x), self.v(x)))
        q, k = q * (1 + self.q_scale.float()), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class _UnfusedAttention(_Attention):
    """The same by products and a softmax, so that scores are kept for backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, 8).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: type[_Attention] = _Attention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = attention(width, heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class _Normed(nn.Module):
    def __init__(self, attention: type[_Attention] = _Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(_Block(32, 4, attention) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _constructor(name: str) -> nn.Module:
    if name == "gpt":
        gpt = _gpt()
        return gpt.GPT(gpt.Config(num_layers=4, num_heads=4, width=32, vocabulary=VOCABULARY, context=SEQ_LEN))
    if name == "normed":
        return _Normed()
    if name == "unfused":
        return _Normed(_UnfusedAttention)
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=SEQ_LEN, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def _build(name: str) -> nn.Module:
    model = _constructor(name)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    return model


def _batch(size: int, seq_len: int = SEQ_LEN) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(output: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def _samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(
        VOCABULARY, (NUM_STEPS * GLOBAL_BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1)
    )
    return [(row[:-1], row[1:]) for row in tokens]


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


@functools.cache
def _loaded(name: str) -> LoadedModel:
    return load_model(functools.partial(_build, name), batch=_batch, loss=_loss)


@functools.cache
def _profile(name: str) -> ModelProfile:
    return trace(_loaded(name))


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
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return Numbers(losses, norms, gradients, model.state_dict())


def _plan(case: Case) -> Plan:
    profile = _profile(case.model)
    num_data = case.replicate * case.shard
    shape = Shape(
        data_replicate=case.replicate,
        data_shard=case.shard,
        tensor=case.tensor,
        pipeline=max(1, len(case.stages) // case.virtual),
        virtual_stages=case.virtual,
        micro_batch=GLOBAL_BATCH // num_data // case.num_microbatches,
        num_microbatches=case.num_microbatches,
        **{"schedule": "1f1b" if case.stages else "none", "mesh_axes": AXES, **case.more},
    )
    layers = iter(profile.layers)
    option = LayerOption(reshard=case.reshard)
    kinds = cycle([case.recompute] if isinstance(case.recompute, str) else case.recompute)
    stages = [
        [
            replace(option, recompute=next(kinds)) if layer.modules == (layer.root,) else option
            for _, layer in zip(range(size), layers, strict=False)
        ]
        for size in case.stages or (len(profile.layers),)
    ]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, precision="fp32")
    return make_plan(profile, cluster(1, case.num_ranks), training, shape, stages)


def _train(case: Case) -> Numbers:
    trainer = parallelize(
        _loaded(case.model).build, _plan(case), _optimizer, loss=_loss, seed=SEED, max_grad_norm=MAX_NORM
    )
    _plant(case.fault, trainer)
    samples = _samples()
    if case.fault == "sample":
        samples[5] = samples[4]
    metrics = [trainer.step(batch) for batch in trainer.loader(samples)]
    return Numbers(
        [m.loss for m in metrics],
        [m.grad_norm for m in metrics],
        trainer.named_gradients(),
        trainer.full_state_dict(),
    )


def _plant(fault: str, trainer: Trainer) -> None:
    gradients = trainer._gradients
    if fault == "ties":
        gradients._ties = []
    reduce = gradients.reduce

    def faulty() -> None:
        if fault == "partial":
            gradients._layout.partial.clear()
        reduce()
        if fault == "gradient":
            trainer.model.get_parameter("blocks.2.up.weight").grad *= 1.01

    gradients.reduce = faulty  # type: ignore[method-assign]


def _errors(found: Numbers, expected: Numbers) -> dict[str, float]:
    """Relative errors: loss, norm, worst gradient and worst parameter (named)."""
    largest = max(g.abs().max().item() for g in expected.gradients.values())
    errors = {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(expected.losses, found.losses, strict=True)),
        "norm": max(abs(a - b) / abs(a) for a, b in zip(expected.norms, found.norms, strict=True)),
    }
    assert found.state.keys() == expected.state.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    for kind, ours, theirs, floor in (
        ("gradient", found.gradients, expected.gradients, NOISE / TOLERANCE * largest),
        ("parameter", found.state, expected.state, 0.0),
    ):
        worst = max(
            ((a - ours[name]).abs().max().item() / max(a.abs().max().item(), floor), name) for name, a in theirs.items()
        )
        errors[f"{kind} {worst[1]}"] = worst[0]
    return errors


def _run_cases(names: list[str]) -> dict[str, dict[str, float] | str]:
    outcomes: dict[str, dict[str, float] | str] = {}
    for name in names:
        case = EVERYTHING[name]
        try:
            found = _train(case)
        except Exception as error:
            raise RuntimeError(f'case "{name}" failed') from error
        if not dist.is_initialized() or dist.get_rank() == 0:
            outcomes[name] = _errors(found, _reference(case.model))
    return outcomes


@functools.cache
def _outcomes(num_ranks: int, slow: bool = False) -> dict[str, dict[str, float] | str]:
    """Errors of every case for that many ranks, slow or not; they run in one fork."""
    names = [n for n, case in EVERYTHING.items() if case.num_ranks == num_ranks and (n in SLOW) == slow]
    for name in names:  # before the fork, so that ranks inherit it
        _reference(EVERYTHING[name].model)
        _plan(EVERYTHING[name])
    if num_ranks == 1:
        return _run_cases(names)
    return run_ranks(_run_cases, num_ranks, names, timeout=200)[0]


@pytest.mark.parametrize("name", CASES)
def test_plan_gives_the_numbers_of_one_process(name: str) -> None:
    errors = _outcomes(CASES[name].num_ranks)[name]

    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_schedules_give_the_numbers_of_one_process(name: str) -> None:
    errors = _outcomes(SLOW[name].num_ranks, slow=True)[name]

    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str) -> None:
    errors = _outcomes(FAULTS[name].num_ranks)[name]

    assert max(errors.values()) > 10 * TOLERANCE, errors
