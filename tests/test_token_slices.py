"""What torch functions do to tokens: on a part of them the same as on all, or nothing at all."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from meshwright.profiler.semantics.token_marks import SHARE, Held, clipped, joined, mark_of, part_of, set_mark, taken
from meshwright.profiler.semantics.token_slices import MixedTokensError, TokenSlices

LENGTH, WIDTH, RANKS = 8, 6, 2
SPANS = ((0, 2), (6, 8))
OTHERS = ((2, 6),)
HELD = Held(1, LENGTH, SPANS)

Run = Callable[[torch.Tensor], torch.Tensor]


def written_in_parts(x: torch.Tensor) -> torch.Tensor:
    made = x.new_empty(*x.shape[:-1], 5)
    made[..., :3].copy_(x[..., :3])
    made[..., 3:].copy_(x[..., 4:])
    return made


def of_best_groups(x: torch.Tensor) -> torch.Tensor:
    scores = x.view(-1, WIDTH)
    best = scores.view(-1, 3, 2).sum(-1).topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(scores[:, :3]).scatter_(1, best, 1)
    kept = scores.masked_fill(~mask.unsqueeze(-1).expand(-1, 3, 2).reshape(-1, WIDTH).bool(), 0.0)
    return scores.gather(1, kept.topk(2, dim=-1)[1])


def attended(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query


def mode(spans: tuple[tuple[int, int], ...] = SPANS) -> TokenSlices:
    return TokenSlices(LENGTH, spans, RANKS, attended)


def on_part(run: Run, x: torch.Tensor, spans: tuple[tuple[int, int], ...] = SPANS) -> torch.Tensor:
    held = Held(1, LENGTH, spans)
    part = set_mark(taken(x, held), held)
    with mode(spans):
        return run(part)


def turned_in_complex_numbers(x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(x.size(1)).float(), torch.tensor([1.0, 0.1, 0.01]))
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], 3, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(2)


ALIKE: dict[str, Run] = {
    "positions": lambda x: x + torch.arange(x.shape[1]).unsqueeze(-1),
    "rotary": lambda x: (
        x * torch.linspace(0, 1, x.size(1)).cos()[None, :, None] - torch.cat((-x[..., 3:], x[..., :3]), dim=-1)
    ),
    "rotary in complex numbers": turned_in_complex_numbers,
    "norms": lambda x: functional.layer_norm(x, (WIDTH,)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "heads": lambda x: x.view(*x.shape[:-1], 2, 3).transpose(1, 2),
    "heads joined": lambda x: x.view(2, LENGTH, 2, -1).permute(0, 2, 1, 3).transpose(1, 2).reshape(2, LENGTH, -1),
    "products": lambda x: functional.linear(x, torch.ones(4, WIDTH)) @ torch.ones(4, 2),
    "Conv1D": lambda x: torch.addmm(torch.ones(3), x.view(-1, x.size(-1)), torch.ones(WIDTH, 3)).view(2, LENGTH, 3),
    "parts": lambda x: torch.stack(x.chunk(3, -1)).sum(0),
    "shared heads": lambda x: x[:, :, None].expand(2, x.shape[1], 3, WIDTH).flatten(2),
    "each number twice": lambda x: x.repeat_interleave(2, dim=-1),
    "each sample twice": lambda x: torch.repeat_interleave(x, 2, 0),
    "table": lambda x: torch.arange(12.0).view(4, 3)[x.argmax(-1) % 4],
    "masked": lambda x: x.masked_fill(torch.arange(LENGTH)[None, :, None] > 4, 0.0),
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "a cache filled in parts": written_in_parts,
    "the best groups": of_best_groups,
    "a table in the dtype of tokens": lambda x: x * torch.arange(LENGTH).unsqueeze(-1).expand(-1, WIDTH).type_as(x),
    "arguments by name": lambda x: functional.linear(input=torch.softmax(input=x, dim=-1), weight=torch.ones(4, WIDTH)),
    "batch first": lambda x: x.transpose(0, 1).contiguous().flatten(0, 1),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_treats_tokens_alike_gives_the_rows_of_the_whole(name: str) -> None:
    x = torch.randn(2, LENGTH, WIDTH)

    found = on_part(ALIKE[name], x)

    held = mark_of(found)
    assert isinstance(held, Held)
    torch.testing.assert_close(found, taken(ALIKE[name](x), held))


TARGETS = torch.tensor([[1, -100, 2, 3, -100, 4, 5, 0], [0, 1, 2, 3, 4, 5, -100, -100]])


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x[:, :-1].reshape(-1, WIDTH), TARGETS[:, 1:].reshape(-1))


LOSSES: dict[str, Run] = {
    "cross entropy": lambda x: functional.cross_entropy(x.flatten(0, 1), TARGETS.flatten()),
    "of the next token": _shifted,
    "by class first": lambda x: functional.cross_entropy(x.transpose(1, 2), TARGETS, label_smoothing=0.1),
    "weighed by hand": lambda x: (
        (functional.cross_entropy(x.flatten(0, 1), TARGETS.flatten(), reduction="none") * 0.5).sum()
        / (TARGETS >= 0).sum()
    ),
    "squares": lambda x: functional.mse_loss(x, torch.ones(2, LENGTH, WIDTH)),
    "squares of one row of targets": lambda x: functional.mse_loss(x, torch.ones(1, 1, WIDTH)),
    "of the last token": lambda x: x[:, -1:].square().mean(),
    "with an auxiliary": lambda x: _shifted(x).float() + 0.1 * x.square().mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_what_ranks_have_of_a_loss_is_the_loss(name: str) -> None:
    x = torch.randn(2, LENGTH, WIDTH)

    shares = [on_part(LOSSES[name], x, spans) for spans in (SPANS, OTHERS)]

    assert all(mark_of(share) == SHARE for share in shares)
    torch.testing.assert_close(sum(shares) / RANKS, LOSSES[name](x))


def test_the_mean_of_gradients_is_that_of_the_whole() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(2, LENGTH, WIDTH)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return _shifted(functional.linear(x, weight))

    shares = [torch.autograd.grad(on_part(loss, x, spans), weight)[0] for spans in (SPANS, OTHERS)]

    torch.testing.assert_close(sum(shares) / RANKS, torch.autograd.grad(loss(x), weight)[0])


def test_noise_like_tokens_is_a_part_of_the_noise_for_all() -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.randn_like(x)

    x = torch.randn(2, LENGTH, WIDTH)

    found = on_part(noise, x)

    torch.testing.assert_close(found, taken(noise(x), HELD))


MIXED: dict[str, tuple[Run, str]] = {
    "tokens repeated": (lambda x: x.repeat_interleave(2, dim=1), "lengthens the sequence"),
    "a class token": (lambda x: x[:, 0], "picks single tokens"),
    "convolution": (lambda x: functional.conv1d(x.transpose(1, 2), torch.ones(1, WIDTH, 3)), "conv1d is not known"),
    "running sum": (lambda x: x.cumsum(1), "goes over the tokens"),
    "pooling": (lambda x: torch.tanh(x.mean(1)), "share"),
    "scores": (lambda x: x @ x.transpose(1, 2), "fused"),
    "attention without softmax": (
        lambda x: x @ (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(1),
        "matmul joins tokens with a sum over tokens",
    ),
    "a bias of all tokens": (
        lambda x: functional.linear(x, torch.ones(WIDTH, WIDTH), x.mean((0, 1))),
        "linear joins tokens with a sum over tokens",
    ),
    "distance to the mean": (
        lambda x: functional.mse_loss(x, x.mean(1, keepdim=True).expand(-1, LENGTH, -1)),
        "mse_loss joins tokens with a sum over tokens",
    ),
    "a sum as divisor": (lambda x: torch.div(torch.ones(()), other=x.sum()), "div is done to a sum over tokens"),
    "a sum as a place": (lambda x: torch.arange(9.0)[x.mean().to(torch.long)], "rounds a sum over tokens"),
    "tokens as classes": (lambda x: functional.cross_entropy(x, torch.ones_like(x)), "goes over the tokens"),
    "an operator of aten": (lambda x: torch.ops.aten.roll.default(x, [1], [1]), "roll.default is not known"),
    "vmap": (lambda x: torch.vmap(lambda row: row.cumsum(0))(x), "cumsum is called within torch.func"),
    "words counted": (
        lambda x: functional.embedding(x.argmax(-1), torch.ones(WIDTH, 2), scale_grad_by_freq=True),
        "divides gradients by how often a word is in the batch",
    ),
    "the last token": (lambda x: x[:, -1:].squeeze(1), "picks a single token"),
    "cross attention": (
        lambda x: functional.scaled_dot_product_attention(x[:, None], torch.ones(2, 1, 3, 6), torch.ones(2, 1, 3, 6)),
        "cross attention",
    ),
    "dropout of attention": (
        lambda x: functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1),
        "drops out 0.1",
    ),
    "places of tokens": (lambda x: x.gather(1, torch.zeros(2, 1, WIDTH, dtype=torch.long)), "places among the tokens"),
    "patches": (lambda x: x.view(2, 4, 2, WIDTH), "over several dims"),
    "values": (lambda x: x[x > 0], "by the values"),
    "other positions": (lambda x: x + torch.ones(4, 1), "4 rows that are not tokens"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_tokens_is_refused(name: str) -> None:
    run, told = MIXED[name]

    with pytest.raises(MixedTokensError, match=told):
        on_part(run, torch.randn(2, LENGTH, WIDTH))


@pytest.mark.parametrize("size", [LENGTH, LENGTH - 1])
def test_slicing_begins_where_ids_of_whole_sequences_are_looked_up(size: int) -> None:
    with mode():
        found = functional.embedding(torch.zeros(2, size, dtype=torch.long), torch.ones(3, WIDTH))

    assert found.shape == (2, 4 if size == LENGTH else size, WIDTH)
    assert mark_of(found) == (HELD if size == LENGTH else None)


def test_tokens_are_counted_in_the_order_in_which_they_are_held() -> None:
    assert clipped(SPANS, 1, 7) == (((0, 1), (5, 6)), 1, 3)
    assert [part_of(((0, 2), (6, 10)), i, 2) for i in range(2)] == [((0, 2), (6, 7)), ((7, 10),)]
    assert joined([(0, 2), (2, 4), (6, 8)]) == ((0, 4), (6, 8))
