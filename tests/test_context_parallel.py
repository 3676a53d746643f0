"""Ranks that hold parts of the same sequences train as one process does."""

import warnings
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from meshwright.executor import parallelize
from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.executor.parallel import attention_kernels
from meshwright.executor.parallel.attention_kernels import attention_backward, attention_forward
from meshwright.executor.parallel.context_attention import ContextAttention, own_spans
from meshwright.planner.plan.document import ContextKind, Plan, Recompute
from meshwright.planner.plan.legality import can_recompute, context_rule
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace
from meshwright.profiler.semantics.token_marks import Held, num_tokens, taken
from support import slow
from support.ranks import PATIENCE_S, run_ranks
from support.same_numbers import has_parts
from support.small_models import GLOBAL_BATCH, small_model, small_profile
from support.synthetic import cluster

KINDS: tuple[ContextKind, ...] = ("ring", "all_gather", "all_to_all")
NUM_STEPS = 3
TOKENS = 16


def planned(name: str, shape: Shape, recompute: Recompute = "none", precision: Precision = "fp32") -> Plan:
    """A plan for a small model whose stages hold equally many layers, all of one option."""
    profile = small_profile(name)
    count, num_stages = len(profile.layers), shape.pipeline * shape.virtual_stages
    layers = [
        LayerOption(
            recompute if can_recompute(profile, layer) and has_parts(layer, recompute) else "none", shape.reshard
        )
        for layer in profile.layers
    ]
    ends = [round(i * count / num_stages) for i in range(num_stages + 1)]
    stages = [layers[first:last] for first, last in pairwise(ends)]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision=precision, optimizer="adamw")
    return make_plan(profile, cluster(1, shape.degrees.num_devices), training, shape, stages)


def beside_one(name: str, plan: Plan) -> VerifyReport:
    """What differs after NUM_STEPS steps."""
    loaded = small_model(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [loaded.batch(GLOBAL_BATCH) for _ in range(NUM_STEPS)]
    return beside_one_process(VerifyReport(name, (), {}), plan, loaded, batches, timeout_s=PATIENCE_S)


# --- attention --------------------------------------------------------------------------------------------------------


def worst_differences() -> list[tuple[str, float]]:
    """Of outputs and gradients, for every kind and form of attention, on this rank."""
    found = []
    forms = [(heads, causal, mask) for heads, causal, mask in product((4, 8), (True, False), ("", "bool", "heads"))]
    for kind, (heads, causal, form) in product(KINDS, [f for f in forms if not (f[1] and f[2])]):
        torch.manual_seed(0)
        query, grad = torch.randn(2, 8, TOKENS, 8, requires_grad=True), torch.randn(2, 8, TOKENS, 8)
        key, value = (torch.randn(2, heads, TOKENS, 8, requires_grad=True) for _ in range(2))
        masks = {
            "": None,
            "bool": (torch.rand(2, 1, TOKENS, TOKENS) > 0.4) | torch.eye(TOKENS, dtype=torch.bool),
            "heads": torch.randn(1, 8, TOKENS, TOKENS),
        }
        whole = functional.scaled_dot_product_attention(
            query, key, value, masks[form], is_causal=causal, enable_gqa=True
        )
        grads = torch.autograd.grad(whole, (query, key, value), grad)
        attend = ContextAttention(kind, dist.group.WORLD)  # type: ignore[arg-type]
        held = Held(2, TOKENS, attend.spans(TOKENS))
        own = [taken(x.detach(), held).clone().requires_grad_() for x in (query, key, value)]
        output = attend(*own, masks[form], causal, None)
        own_grads = torch.autograd.grad(output, own, taken(grad, held))
        gaps = [(a - taken(b, held)).abs().max() for a, b in zip((output, *own_grads), (whole, *grads), strict=True)]
        found.append((f"{kind}, {heads} heads, causal {causal}, mask {form!r}", float(max(gaps))))
    return found


@pytest.mark.parametrize("num_ranks", slow.but_first([2, 4], 1))
def test_attention_of_ranks_is_that_of_one_process(num_ranks: int) -> None:
    differences = [rank for found in run_ranks(worst_differences, num_ranks) for rank in found]

    assert len(differences) == num_ranks * len(KINDS) * 8
    assert [(what, gap) for what, gap in differences if gap > 1e-5] == []


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("form", ["causal", "all", "mask"])
def test_plain_products_give_what_the_fused_kernel_gives(
    heads: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, grad = torch.randn(2, 4, TOKENS, 8), torch.randn(2, 4, TOKENS, 8)
    key, value = torch.randn(2, heads, TOKENS, 8), torch.randn(2, heads, TOKENS, 8)
    mask = torch.rand(2, 1, TOKENS, TOKENS) > 0.7 if form == "mask" else None
    if mask is not None:
        mask[:, :, 3] = False  # a query that meets no key at all

    def run() -> tuple[torch.Tensor, ...]:
        output, lse = attention_forward(query, key, value, mask, form == "causal", 0.3)
        found = attention_backward(grad, query, key, value, output, lse, mask, form == "causal", 0.3)
        return output, lse, *found

    fused = run()
    monkeypatch.setattr(attention_kernels, "_on_cpu_kernel", lambda *_: False)

    torch.testing.assert_close(run(), fused)

    monkeypatch.setattr(attention_kernels, "_SCORES", 2 * 4 * TOKENS * 5)
    with _Largest() as largest:
        torch.testing.assert_close(run(), fused)
    assert largest.numel == 2 * 4 * TOKENS * 8  # keys of all heads, but scores of five queries only


class _Largest(TorchDispatchMode):
    """Sees the largest real tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_every_token_once(kind: ContextKind) -> None:
    spans = [own_spans(kind, 24, rank, 3) for rank in range(3)]

    assert sorted(place for own in spans for start, end in own for place in range(start, end)) == list(range(24))
    assert {num_tokens(own) for own in spans} == {8}


def test_ranks_of_a_ring_have_equally_many_causal_scores() -> None:
    scores = [sum(i + 1 for a, b in own_spans("ring", 32, rank, 4) for i in range(a, b)) for rank in range(4)]

    assert len(set(scores)) == 1


# --- training ---------------------------------------------------------------------------------------------------------


def shape(replicate: int = 1, shard: int = 1, tensor: int = 1, pipeline: int = 1, **more: Any) -> Shape:
    """A shape of two context ranks with micro-batches of four samples."""
    count = GLOBAL_BATCH // (4 * replicate * shard)
    return Shape(replicate, shard, tensor, pipeline, 4, count, **{"context": 2, **more})


TRAINED: dict[str, tuple[str, Shape, Recompute]] = {
    "own GPT, ring": ("gpt", shape(), "none"),
    "additive mask with a row of keys, blocks that the model repeats": (
        "padding",
        shape(context_kind="all_gather"),
        "full",
    ),
    "GPT-2 with HSDP": ("gpt2", shape(2, context_kind="all_gather"), "selective"),
    "BERT, heads for tokens, pipeline": (
        "bert",
        shape(pipeline=2, schedule="1f1b", context_kind="all_to_all"),
        "full",
    ),
    "Llama with tensor and sequence parallelism": ("llama", shape(tensor=2, sequence=True), "full"),
    "DeepSeek-V3, values narrower than keys, shards, pipeline": (
        "deepseek",
        shape(shard=2, pipeline=2, schedule="1f1b", reshard=True),
        "full",
    ),
    "DeepSeek-V3 with tensor and sequence parallelism": (
        "deepseek",
        shape(tensor=2, sequence=True, context_kind="all_gather"),
        "selective",
    ),
    "Llama, ring, parts of layers": ("llama", shape(), "parts:self_attn+mlp"),
    "Llama, parts that gather slices of slices, pipeline": (
        "llama",
        shape(tensor=2, pipeline=2, sequence=True, schedule="1f1b", context_kind="all_gather"),
        "parts:self_attn+mlp",
    ),
    "DeepSeek-V3, heads for tokens, shards, parts of layers": (
        "deepseek",
        shape(shard=2, context_kind="all_to_all", reshard=True),
        "parts:input_layernorm+self_attn",
    ),
    "Mixtral, experts over context ranks, parts of layers": (
        "mixtral",
        shape(shard=2, reshard=True, expert=2),
        "parts:self_attn+mlp",
    ),
}

QUICK = {"own GPT, ring"}
"""On two ranks; the others run by pytest -m slow."""


@pytest.mark.parametrize("case", slow.but_these(TRAINED, QUICK))
def test_a_plan_that_splits_sequences_gives_the_numbers_of_one_process(case: str) -> None:
    name, chosen, recompute = TRAINED[case]

    report = beside_one(name, planned(name, chosen, recompute))

    assert report.ok, [*report.lines, report.detail]


def told_by_step(plan: Plan, lengths: tuple[int, ...]) -> str:
    """What the last of several steps on batches of these lengths says."""
    loaded = small_model("llama")
    trainer = parallelize(loaded.build, plan, torch.optim.AdamW, loaded.loss, device="cpu")
    told = ""
    for length in lengths:
        assert told == ""
        try:
            trainer.step(tree_map(lambda x, length=length: x[:, :length], loaded.batch(GLOBAL_BATCH)))
        except ValueError as error:
            told = str(error)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(8,), (16, 8)])
@pytest.mark.parametrize("chosen", [shape(), shape(pipeline=2, schedule="1f1b")], ids=["alone", "pipeline"])
def test_a_batch_of_another_length_than_planned_is_refused(chosen: Shape, lengths: tuple[int, ...]) -> None:
    for message in run_ranks(told_by_step, chosen.degrees.num_devices, planned("llama", chosen), lengths):
        assert "splits sequences of 16 tokens over 2 ranks" in message


def losses(plan: Plan, steps: range, folder: Path | None = None, save: bool = False) -> list[float]:
    """Losses of some steps of a run, which go on from a folder, or are saved in it."""
    loaded = small_model("root parameter")
    trainer = parallelize(loaded.build, plan, torch.optim.AdamW, loaded.loss, max_grad_norm=0.5, device="cpu")
    if folder is not None and not save:
        trainer.resume(folder)
    torch.manual_seed(1)
    batches = [loaded.batch(GLOBAL_BATCH) for _ in range(steps.stop)]
    share = GLOBAL_BATCH // trainer.data_size
    place = slice(trainer.data_rank * share, (trainer.data_rank + 1) * share)
    found = [trainer.step(tuple(x[place] for x in batches[i])).loss for i in steps]
    if folder is not None and save:
        trainer.save(folder)
    trainer.close()
    return found


@pytest.mark.slow
def test_runs_go_on_with_and_without_context_ranks(tmp_path: Path) -> None:
    name, split = "root parameter", shape(tensor=2)
    plans = [planned(name, split), planned(name, Shape(1, 2, 1, 1, 4, GLOBAL_BATCH // 8))]
    [straight] = run_ranks(losses, 1, planned(name, Shape(1, 1, 1, 1, 4, GLOBAL_BATCH // 4)), range(4))
    for i, plan in enumerate(plans):
        run_ranks(losses, plan.degrees.num_devices, plan, range(2), tmp_path / str(i), True)

    resumed = [
        run_ranks(losses, plan.degrees.num_devices, plan, range(2, 4), tmp_path / str(1 - i))[0]
        for i, plan in enumerate(plans)
    ]

    assert resumed == [pytest.approx(straight[2:], rel=1e-5)] * 2


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param("llama", "", marks=pytest.mark.slow),
        pytest.param("mixtral", "", marks=pytest.mark.slow),
        pytest.param("mask", "", marks=pytest.mark.slow),
        pytest.param("auxiliary", "", marks=pytest.mark.slow),
        pytest.param("gpt2", "attention drops out 0.1 of its weights", marks=pytest.mark.slow),
        ("lstm", "lstm is not known to treat the tokens of a sequence alike"),
        ("stock", "multi_head_attention_forward is not known"),
    ],
)
def test_a_profile_says_what_would_mix_tokens(name: str, problem: str) -> None:
    found = small_profile(name)

    assert found.context_problem.startswith(problem)
    assert bool(found.context_problem) == bool(problem)


class Repeating(nn.Module):
    """A layer that is repeated in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(8, 8), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_checkpoints_keep_sequences_whole(reentrant: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 8), Repeating(False), Repeating(reentrant), nn.Linear(8, 8))

    found = trace(load_model(build, batch=words, loss=next_word)).context_problem

    assert found.startswith("a reentrant checkpoint repeats a forward in backward") == reentrant
    assert bool(found) == reentrant


class Acting(nn.Module):
    """Words, to which something is done."""

    def __init__(self, act: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.words, self.layer, self.act = nn.Embedding(8, 4), nn.Linear(4, 8), act
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, words: torch.Tensor) -> Any:
        return self.layer(self.act(self, self.words(words)))


def words(size: int, seq_len: int = 16) -> torch.Tensor:
    return torch.randint(8, (size, seq_len))


def next_word(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch.flatten())


def hooked(hook: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def act(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        x.register_hook(hook)
        return x

    return act


def hooked_layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not model.layer._backward_hooks:
        model.layer.register_full_backward_hook(lambda module, given, of_output: (given[0] - given[0].mean(1, True),))
    return x


def kept(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.mean.add_(x.mean((0, 1)))
    return x


def scripted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_doubled)(x)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


class Centred(torch.autograd.Function):
    """Its gradient is that without its mean along a dim."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad - grad.mean(ctx.dim, keepdim=True), None


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda model, x: Centred.apply(x, 2), ""),
        (
            lambda model, x: Centred.apply(x, 1),
            "mean in a backward of the model's own (between modules) may join tokens",
        ),
        (hooked(lambda grad: grad * 0.5 * torch.arange(grad.shape[1])[:, None]), ""),
        (hooked(lambda grad: grad - grad.mean(1, keepdim=True)), "sub joins tokens with a sum over tokens"),
        (hooked_layer, "mean in a backward of the model's own (between modules) may join tokens"),
        (kept, "buffer mean keeps what is made of tokens"),
        (scripted, "is called by what torch's functions do not show"),
    ],
    ids=[
        "features in a backward",
        "tokens in a backward",
        "a hook on each gradient",
        "a hook on all",
        "a hook on a module",
        "a buffer",
        "a script",
    ],
)
def test_what_is_done_beside_the_forward_is_looked_at(act: Any, problem: str) -> None:
    found = trace(load_model(lambda: Acting(act), batch=words, loss=next_word))

    assert problem in found.context_problem
    assert bool(found.context_problem) == bool(problem)


class Attending(nn.Module):
    """Words, to which attention is done as `lay` has them lie."""

    def __init__(self, lay: Callable[[torch.Tensor], torch.Tensor], masked: bool) -> None:
        super().__init__()
        self.words, self.layer, self.lay, self.masked = nn.Embedding(8, 4), nn.Linear(4, 8), lay, masked

    def forward(self, words: torch.Tensor) -> Any:
        x = self.words(self.lay(words)).view(words.shape[0], -1, 2, 2).transpose(1, 2)
        mask = torch.ones(2, words.shape[1], words.shape[1]) if self.masked else None
        return self.layer(functional.scaled_dot_product_attention(x, x, x, mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("lay", "masked", "problem"),
    [
        (lambda words: words, True, ""),
        (lambda words: words.flatten(), False, "attention goes over whole sequences, before"),
    ],
    ids=["a mask of heads", "one row of all samples"],
)
def test_attention_is_shared_where_tokens_follow_samples(
    lay: Callable[[torch.Tensor], torch.Tensor], masked: bool, problem: str
) -> None:
    found = trace(load_model(lambda: Attending(lay, masked), batch=words, loss=next_word))

    assert found.attention_modules
    assert found.context_problem.startswith(problem)
    assert bool(found.context_problem) == bool(problem)


class ManyExperts(nn.Module):
    """All experts run on all tokens, and what tokens have of each is one of several things."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.router, self.weight = kind, nn.Linear(4, 2), nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        share = self.router(rows).softmax(-1)
        if self.kind == "experts have room":
            share = share * ((share >= 0.5).cumsum(0) <= len(rows) // 8)
        if self.kind == "so many":
            rows = x.unflatten(1, (16, 1)).flatten(0, 2)
        if self.kind == "kept":
            self.balance = share.mean(0).square().sum()
        found = torch.bmm(rows.expand(2, -1, -1), self.weight) * share.t().unsqueeze(-1)
        return found.sum(0).view_as(x)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("tokens choose", ""),
        ("experts have room", "bank makes something else of a token where it is given others with it"),
        ("kept", "bank keeps balance aside, as of a loss"),
        ("so many", "unflatten"),
    ],
)
def test_a_bank_that_looks_at_several_tokens_keeps_sequences_whole(kind: str, problem: str) -> None:
    class Model(Acting):
        def __init__(self) -> None:
            super().__init__(lambda model, x: x + model.bank(x))
            self.bank = ManyExperts(kind)

    found = trace(load_model(Model, batch=words, loss=next_word))

    assert found.expert_modules == ("bank",)
    assert problem in found.context_problem
    assert bool(found.context_problem) == bool(problem)


def test_gradients_that_are_bounded_within_the_model_keep_sequences_whole() -> None:
    bounded = small_profile("padding").model_copy(update={"gradient_problem": "the gradient of x is bounded"})

    assert "each rank has the gradient of its own part" in str(context_rule(bounded, 2, 1, "ring"))


@pytest.mark.slow
def test_the_rule_tells_what_would_mix_tokens() -> None:
    found = context_rule(small_profile("gpt2"), 2, 1, "ring")

    assert found is not None
    assert "set attention dropout to 0" in found
