"""Dropout is that of one process under every plan, and ranks with other samples draw other numbers."""

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import dropout
from torch.nn.functional import dropout as leave_out
from torch.utils.checkpoint import checkpoint

from meshwright.executor import parallelize
from meshwright.executor.measuring.one_process import Training
from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.executor.parallel import random_numbers
from meshwright.executor.parallel.dropout_calls import drops, drops_by_itself
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.ranks import run_ranks
from support.same_numbers import GLOBAL_BATCH, Case, Numbers, errors, loss, next_tokens, plan_of, samples, trainer_of

WIDTH, HEADS, VOCABULARY, STEPS = 16, 4, 64, 3
TOLERANCE = 1e-5


class Attention(nn.Module):
    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads, self.attention_dropout = HEADS, attention_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        q, k, v = (
            part.view(size, length, self.num_heads, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        rate = self.attention_dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.out(y.transpose(1, 2).reshape(size, length, -1))


class Block(nn.Module):
    """Dropout of attention weights, between the cut halves of an MLP, and of what is added to the stream."""

    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(attention_dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.residual = nn.Dropout(0.2), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.residual(self.attention(self.norm1(x)))
        return x + self.residual(self.down(self.inner(functional.gelu(self.up(self.norm2(x))))))


class DropNet(nn.Module):
    """Dropout between layers, too, and of whole features."""

    def __init__(self, attention_dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.begin, self.end = nn.Dropout(0.1), nn.Dropout1d(0.1)
        self.blocks = nn.ModuleList(Block(attention_dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.begin(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.end(x))


class FusedDropNet(DropNet):
    """Attention as sequences can be split under it."""

    def __init__(self) -> None:
        super().__init__(attention_dropout=0.0)
        self.end = nn.Dropout(0.1)


class Repeating(DropNet):
    """Calls checkpoint itself, around its layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.begin(self.tokens(tokens))
        for block, by_hooks in zip(self.blocks, (True, False), strict=True):
            x = checkpoint(block, x, use_reentrant=not by_hooks)
        return self.head(self.end(x))


class ThinningNet(nn.Module):
    """Residual blocks; what each gives is thinned, in other ways by the classes derived. Says nothing of it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + self.thinned(block(x))
        return self.head(x)

    def thinned(self, x: torch.Tensor) -> torch.Tensor:
        return x


class CallingNet(ThinningNet):
    """Calls torch's dropout in its own code, at a rate that no attribute has."""

    def thinned(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.3, self.training)


class ImportingNet(ThinningNet):
    def thinned(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, 0.3, self.training)


class RenamingNet(ThinningNet):
    def thinned(self, x: torch.Tensor) -> torch.Tensor:
        return leave_out(x, 0.3, self.training)


class _HoldingBlock(nn.Sequential):
    """Has torch's dropout in a partial."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.held = partial(functional.dropout, p=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held(super().forward(x), training=self.training)


class HoldingNet(ThinningNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_HoldingBlock() for _ in range(2))


class MakingNet(ThinningNet):
    def __init__(self) -> None:
        super().__init__()
        self.made = lambda x: functional.dropout(x, 0.3, self.training)

    def thinned(self, x: torch.Tensor) -> torch.Tensor:
        return self.made(x)


class HelpedNet(ThinningNet):
    def thinned(self, x: torch.Tensor) -> torch.Tensor:
        return _help(x, self.training)


def _help(x: torch.Tensor, training: bool) -> torch.Tensor:
    return torch.dropout(x, 0.3, training)


class WritingNet(CallingNet):
    """Writes into what is dropped out of: in evaluation that is what the layer before has returned."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.thinned(self.tokens(tokens))
        x *= 0.5
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class LateNet(CallingNet):
    """Does not drop in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0

    def thinned(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.rate, self.training)


class NoisyNet(FusedDropNet):
    """Takes words in another order, leaves out layers sample by sample, and adds noise."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens[:, torch.randperm(tokens.shape[1])])
        for block in self.blocks:
            stays = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.6)
            x = x + stays * block(x) + 0.1 * torch.randn_like(x)
        return self.head(x)


NOTED: list[torch.Tensor] = []
"""Noise that layers have drawn."""


class _NoisyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(WIDTH)
        if type(noise) is torch.Tensor:  # and no fake one
            NOTED.append(noise)
        return x + self.linear(x + noise)


class NoisyLayersNet(nn.Module):
    """Layers that draw noise, and drop nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(_NoisyBlock() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Undropped(nn.Module):
    """Calls a module of its own that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(2, 2), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.layer(x))


MODELS: dict[str, type[nn.Module]] = {
    "drop": DropNet, "fused": FusedDropNet, "calls": CallingNet, "imports": ImportingNet, "is helped": HelpedNet,
    "holds": HoldingNet, "writes": WritingNet, "noisy": NoisyNet, "noisy layers": NoisyLayersNet
}  # fmt: skip


@cache
def profile_of(model: str) -> ModelProfile:
    return trace(load_model(MODELS[model], batch=next_tokens(VOCABULARY), loss=loss))


CASES = {
    "4 micro-batches": Case("drop", num_microbatches=4),
    "full recompute": Case("drop", recompute="full"),
    "selective recompute": Case("drop", recompute="selective", num_microbatches=4),
    "recompute of attention": Case("drop", recompute="attention", num_microbatches=1),
    "parts": Case("drop", recompute="parts:attention+down"),
    "ddp": Case("drop", replicate=2),
    "zero-3, recompute": Case("drop", shard=2, reshard=True, recompute="full"),
    "tensor 2": Case("drop", tensor=2),
    "tensor 2 + sequence, recompute": Case("drop", tensor=2, more={"sequence": True}, recompute="full"),
    "pipeline 2, recompute": Case("drop", stages=(2, 2), num_microbatches=4, recompute="full"),
    "interleaved": Case("drop", stages=(1, 1, 1, 1), virtual=2, num_microbatches=4, more={"schedule": "interleaved"}),
    "zb-v": Case("drop", stages=(1, 1, 1, 1), virtual=2, num_microbatches=4, more={"schedule": "zb-v"}),
    "pipeline x tensor + sequence": Case("drop", tensor=2, stages=(2, 2), num_microbatches=2, more={"sequence": True}),
    "ddp x fsdp x tensor": Case("drop", replicate=2, shard=2, tensor=2),
    "ddp in stages": Case("drop", replicate=2, stages=(1, 3)),
    "called, ddp": Case("calls", replicate=2),
    "called, tensor": Case("calls", tensor=2),
    "called, zb-v": Case("calls", stages=(1, 1, 1, 1), virtual=2, num_microbatches=4, more={"schedule": "zb-v"}),
    "imported, zero-3": Case("imports", shard=2, reshard=True),
    "in a helper, in stages": Case("is helped", stages=(2, 2)),
    "held, recompute, in stages": Case("holds", stages=(2, 2), num_microbatches=4, recompute="full"),
    "held, recompute": Case("holds", num_microbatches=4, recompute="full"),
    "written into, in stages": Case("writes", stages=(2, 2)),
    "context 2": Case("fused", more={"context": 2}),
    "noise, context 2": Case("noisy", more={"context": 2}, num_microbatches=1),
    "noise, context 2 x tensor 2": Case("noisy", tensor=2, more={"context": 2}, num_microbatches=1),
    "context 2 x tensor 2 + sequence": Case("fused", tensor=2, more={"context": 2, "sequence": True}),
}  # fmt: skip


def train(case: Case, build: type[nn.Module] | None = None) -> Numbers:
    trainer = trainer_of(build or MODELS[case.model], plan_of(case, profile_of(case.model)))
    metrics = [trainer.step(batch) for batch in trainer.loader(samples(VOCABULARY, STEPS))]
    return Numbers(
        [m.loss for m in metrics], [m.grad_norm for m in metrics], trainer.named_gradients(), trainer.full_state_dict()
    )


@cache
def one_process(model: str) -> Numbers:
    return train(Case(model, num_microbatches=1))


@pytest.mark.parametrize(
    "name", slow.but_these(CASES, ["4 micro-batches", "held, recompute", "tensor 2 + sequence, recompute"])
)
def test_dropout_is_that_of_one_process(name: str) -> None:
    case = CASES[name]
    expected = one_process(case.model)
    plan_of(case, profile_of(case.model))

    found = train(case) if case.num_ranks == 1 else run_ranks(train, case.num_ranks, case)[0]

    assert max(errors(found, expected, 2e-2, 1e-3).values()) < TOLERANCE, errors(found, expected, 2e-2, 1e-3)


@pytest.mark.slow
def test_the_process_beside_a_plan_finds_what_its_first_forward_will() -> None:
    loaded = load_model(HoldingNet, batch=next_tokens(VOCABULARY), loss=loss)
    case = Case("holds", stages=(2, 2), num_microbatches=4)
    torch.manual_seed(0)
    batches = [next_tokens(VOCABULARY)(GLOBAL_BATCH) for _ in range(2)]

    report = beside_one_process(
        VerifyReport("", (), {}), plan_of(case, profile_of("holds")), loaded, batches, training=Training(dropout=True)
    )

    assert report.ok, report.lines


def _noted(case: Case) -> list[float]:
    NOTED.clear()
    train(case)
    return [float(noise[0]) for noise in NOTED]


@pytest.mark.slow
def test_layers_of_later_stages_draw_noise_of_their_own() -> None:
    case = Case("noisy layers", stages=(2, 2))
    plan_of(case, profile_of(case.model))

    first, second = run_ranks(_noted, case.num_ranks, case)

    assert len(first) == len(second) == len(set(first)) == len(set(second))
    assert not set(first) & set(second)


def test_what_a_model_recomputes_by_itself_is_dropped_again() -> None:
    found = train(Case("drop", num_microbatches=4), Repeating)

    assert max(errors(found, one_process("drop"), 2e-2, 1e-3).values()) < TOLERANCE


def drawn_by_others() -> tuple[float, float]:
    trainer = trainer_of(MODELS["drop"], plan_of(Case("drop"), profile_of("drop")))
    found: list[float] = []

    def noting(output: Any, batch: Any) -> torch.Tensor:
        found.append(random.random() + numpy.random.rand())
        return loss(output, batch)

    for batch in trainer.loader(samples(VOCABULARY, 1)):
        trainer.forward_backward(batch, loss=noting)
    return found[0], random.random()


def test_pythons_and_numpys_numbers_follow_the_sample_and_leave_the_script_alone() -> None:
    random.seed(1)
    numpy.random.seed(1)
    first, behind = drawn_by_others()
    random.seed(2)
    again, _ = drawn_by_others()

    assert first == again
    assert behind == random.Random(1).random()


@pytest.mark.parametrize("fault", ["samples", "parts"])
@pytest.mark.slow
def test_masks_of_the_wrong_samples_or_heads_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["ddp x fsdp x tensor"]
    expected = one_process(case.model)
    plan_of(case, profile_of(case.model))
    if fault == "samples":  # all data ranks draw the same
        begins = random_numbers.RandomNumbers.micro_batch

        def first(self: random_numbers.RandomNumbers, index: int) -> None:
            begins(self, index)
            self._first = 0

        monkeypatch.setattr(random_numbers.RandomNumbers, "micro_batch", first)
    else:  # every tensor rank drops what the first one does
        own = random_numbers.RandomNumbers._own_part

        def first_part(self: random_numbers.RandomNumbers, mask: torch.Tensor, size: list[int], x: Any = None) -> Any:
            for dim, length in enumerate(size):
                mask = mask.narrow(dim, 0, length)
            return own(self, mask, size, x)

        monkeypatch.setattr(random_numbers.RandomNumbers, "_own_part", first_part)

    found = run_ranks(train, case.num_ranks, case)[0]

    assert max(errors(found, expected, 2e-2, 1e-3).values()) > 100 * TOLERANCE


def test_dropout_keeps_what_it_should_and_its_mean() -> None:
    case = Case("drop", num_microbatches=1)
    trainer = trainer_of(DropNet, plan_of(case, profile_of("drop")))
    ones = torch.ones(GLOBAL_BATCH, 64, 64, requires_grad=True)
    found = []
    for step in (1, 1, 2):
        with trainer._random.step(step):
            trainer._random.micro_batch(0)
            found.append(functional.dropout(ones, 0.25))
            assert functional.dropout(ones, 0.25, training=False) is ones
            assert functional.dropout(ones, 1.0).count_nonzero() == 0

    assert found[0].unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert found[0].mean(dim=(1, 2)).tolist() == pytest.approx([1.0] * GLOBAL_BATCH, abs=0.05)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0][0], found[0][1])


def noisy_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """A loss that draws, and tells what."""
    drawn.append(float(torch.rand(())))
    return loss(output, batch)


drawn: list[float] = []


def _drawn(case: Case) -> tuple[list[float], float]:
    torch.manual_seed(4)
    trainer = parallelize(
        DropNet, plan_of(case, profile_of("drop")), lambda p: torch.optim.SGD(p, lr=0.1), loss=noisy_loss
    )
    torch.manual_seed(4)
    drawn.clear()
    for batch in trainer.loader(samples(VOCABULARY, 2)):
        trainer.step(batch)
    return drawn[-4:], float(torch.rand(()))


@pytest.mark.slow
def test_noise_is_independent_by_data_and_alike_along_tensor_and_the_script_draws_its_own() -> None:
    case = Case("drop", shard=2, tensor=2)
    torch.manual_seed(4)
    expected = float(torch.rand(()))

    ranks = run_ranks(_drawn, 4, case)

    kinds = {tuple(noise) for noise, _ in ranks}
    assert len(kinds) == 2
    assert len({value for kind in kinds for value in kind}) == 8
    assert [own for _, own in ranks] == [expected] * 4


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (DropNet, "yes"),
        (ThinningNet, "no"),
        (CallingNet, "perhaps"),
        (ImportingNet, "perhaps"),
        (HelpedNet, "perhaps"),
        (RenamingNet, "perhaps"),
        (HoldingNet, "perhaps"),
        (MakingNet, "perhaps"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), "not now"),
        (Undropped, "not now"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU()), "no"),
    ],
)
def test_what_a_models_code_says_of_dropping_is_read(build: Callable[[], nn.Module], found: str) -> None:
    assert drops(build()) == found


def test_what_drops_within_an_operator_is_named() -> None:
    assert drops_by_itself(nn.Sequential(nn.LSTM(2, 2, 2, dropout=0.1))) == "LSTM 0"
    assert drops_by_itself(nn.Sequential(nn.AlphaDropout(0.1))) == "AlphaDropout 0"
    assert drops_by_itself(nn.Sequential(nn.LSTM(2, 2, 2), nn.Dropout(0.1))) == ""


@pytest.mark.slow
def test_a_dropout_that_begins_later_is_refused() -> None:
    profile = trace(load_model(LateNet, batch=next_tokens(VOCABULARY), loss=loss))
    trainer = trainer_of(LateNet, plan_of(Case("late", num_microbatches=2), profile))
    batches = trainer.loader(samples(VOCABULARY, 2))
    trainer.step(next(batches))
    trainer.model.rate = 0.2

    with pytest.raises(ValueError, match=r"a dropout of 0\.2 was met .* begin with a rate above 0"):
        trainer.step(next(batches))
