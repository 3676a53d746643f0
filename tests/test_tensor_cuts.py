"""Megatron's column-row pairs are found in the data flow, and nothing that would be wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import LayerClass, TensorCut, amount_at
from meshwright.profiler.model.trace import trace
from meshwright.profiler.tensor_cuts import tensor_cuts, tensor_rank
from support import slow
from support.zoo import zoo_profile


def _block(name: str) -> LayerClass:
    profile = zoo_profile(name)
    return profile.classes[profile.layers[1].layer_class]


def _pairs(block: LayerClass) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(cut.kind, cut.columns, cut.rows) for cut in block.cuts]


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        (
            "llama3_8b",
            [
                ("attention", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)),
                ("mlp", ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)),
            ],
        ),
        pytest.param(
            "gpt2",
            [("attention", ("attn.c_attn",), ("attn.c_proj",)), ("mlp", ("mlp.c_fc",), ("mlp.c_proj",))],
            marks=pytest.mark.slow,
        ),
        ("gpt.py", [("attention", ("attention.qkv",), ("attention.out",)), ("mlp", ("up",), ("down",))]),
        pytest.param(
            "bert_large",
            [
                (
                    "attention",
                    ("attention.self.query", "attention.self.key", "attention.self.value"),
                    ("attention.output.dense",),
                ),
                ("mlp", ("intermediate.dense",), ("output.dense",)),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_megatron_pairs_are_found(name: str, pairs: list[tuple[str, tuple[str, ...], tuple[str, ...]]]) -> None:
    assert _pairs(_block(name)) == pairs


def test_grouped_heads_limit_the_degree() -> None:
    assert _block("llama3_8b").cuts[0].units == (32, 8)


@pytest.mark.parametrize(("name", "column"), slow.but_first([("gpt.py", "attention.qkv"), ("gpt2", "attn.c_attn")], 1))
def test_fused_projections_are_cut_part_by_part(name: str, column: str) -> None:
    assert _block(name).cuts[0].parts == {column: (768, 768, 768)}


def test_attributes_that_count_what_is_cut_are_divided() -> None:
    assert _block("gpt.py").cuts[0].attributes == {"attention": ("num_heads",)}
    assert _block("gpt2").cuts[0].attributes == {"attn.c_attn": ("nf",), "attn": ("split_size",)}


def test_conv1d_weights_are_cut_on_the_other_dim() -> None:
    assert _block("gpt2").cuts[1].sharded == {"mlp.c_fc.weight": 1, "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 0}


def test_vocabulary_is_cut_at_both_ends() -> None:
    profile = zoo_profile("llama3_8b")
    first, last = (profile.classes[profile.layers[i].layer_class] for i in (0, -1))

    assert _pairs(first) == [("embedding", ("",), ())]
    assert _pairs(last) == [("head", ("lm_head",), ())]
    assert first.cuts[0].sharded == {"weight": 0}
    assert last.cuts[0].sharded == {"lm_head.weight": 0}
    assert first.sequence is None
    assert last.sequence is None


def test_an_odd_vocabulary_is_not_cut_and_noted() -> None:
    profile = zoo_profile("gpt2")

    assert profile.classes[profile.layers[-1].layer_class].cuts == ()
    assert any(note.startswith("lm_head") and "50257" in note for note in profile.notes)


@pytest.mark.slow
def test_attention_with_relative_biases_is_cut_by_heads() -> None:
    profile = zoo_profile("t5_small")
    cuts = [cut for layer in profile.layers[1:7] for cut in profile.classes[layer.layer_class].cuts]

    assert {(cut.kind, cut.rows) for cut in cuts} == {
        ("attention", ("layer.0.SelfAttention.o",)),
        ("mlp", ("layer.1.DenseReluDense.wo",)),
    }
    assert not any("SelfAttention.o: not cut" in note for note in profile.notes)


def test_matmuls_shrink_with_the_degree() -> None:
    block = _block("gpt.py")
    assert block.tensor is not None
    matmuls = [op for op in block.tensor.operators if op.kind == "matmul"]

    assert len(matmuls) == 12
    for op in matmuls:
        assert amount_at(op.flops, 1, 4) == pytest.approx(amount_at(op.flops, 1, 1) / 4)


def test_tensor_mode_reduces_twice_forward_and_twice_backward() -> None:
    block = _block("gpt.py")
    assert block.tensor is not None

    assert sorted((c.kind, c.part) for c in block.tensor.collectives) == [
        ("all_reduce", "backward"),
        ("all_reduce", "backward"),
        ("all_reduce", "forward"),
        ("all_reduce", "forward"),
    ]
    assert {c.tensor.at(1, 2) for c in block.tensor.collectives} == {2 * 1024 * 768}


def test_sequence_mode_gathers_and_scatters() -> None:
    block = _block("gpt.py")
    assert block.sequence is not None

    assert sorted((c.kind, c.part) for c in block.sequence.collectives) == sorted(
        2
        * [
            ("all_gather", "forward"),
            ("reduce_scatter", "forward"),
            ("all_gather", "backward"),
            ("reduce_scatter", "backward"),
        ]
    )


def test_sequence_mode_keeps_the_gathered_inputs_whole() -> None:
    """Of 15 T d, the two gathered norm outputs stay whole; q k v, attention, residual, up and gelu are divided."""
    block = _block("gpt.py")
    assert block.sequence is not None
    tokens = 1024 * 768

    for degree in (2, 4):
        saved = amount_at(block.sequence.saved.elements, 1, degree)
        assert saved == pytest.approx(tokens * (2 + 13 / degree) + 2 * 2 * 1024 / degree)


@pytest.mark.parametrize(
    ("name", "gathered_at"),
    [
        ("gpt.py", "attention"),
        ("llama3_8b", "self_attn"),
        pytest.param("bert_large", "attention.self", marks=pytest.mark.slow),
    ],
)
def test_attention_that_takes_shapes_from_its_input_is_gathered_at_its_door(name: str, gathered_at: str) -> None:
    block = _block(name)

    assert block.sequence is not None
    assert block.cuts[0].gather == gathered_at


class _Pair(nn.Module):
    """Column, something in between, row; with a residual."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.between = between
        self.down = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(x)))


def _cuts_between(between: Callable[[torch.Tensor], torch.Tensor], width: int = 32) -> tuple[TensorCut, ...]:
    model = nn.Sequential(_Pair(between, width), _Pair(between, width), nn.Flatten())
    profile = trace(
        load_model(model, batch=lambda size: (torch.ones(size, 4, 8),), loss=lambda output, batch: output.float().sum())
    )
    return profile.classes[profile.layers[0].layer_class].cuts


def test_tables_of_bags_of_one_size_are_cut_by_features() -> None:
    bags = nn.Sequential(nn.EmbeddingBag(1500, 16, mode="sum"), nn.Linear(16, 4))
    loaded = load_model(bags, batch=lambda size: torch.randint(1500, (size, 3)), loss=lambda y, batch: y.mean())

    assert "table" in [cut.kind for layer in trace(loaded).classes for cut in layer.cuts]


def test_elementwise_code_may_lie_between() -> None:
    assert [cut.units for cut in _cuts_between(lambda x: functional.gelu(x) * 2.0)] == [(32,)]


@pytest.mark.parametrize(
    "between",
    slow.but_first(
        [
            lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt(),
            lambda x: functional.softmax(x, -1),
            lambda x: functional.layer_norm(x, x.shape[-1:]),
            lambda x: x - x.sum(-1, keepdim=True),
        ],
        2,
    ),
)
def test_what_reduces_over_the_cut_features_forbids_the_cut(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert _cuts_between(between) == ()


@pytest.mark.parametrize(
    ("noise", "operator"),
    slow.but_first(
        [
            (lambda x: x * torch.empty_like(x).bernoulli_(0.9), "bernoulli_"),
            (lambda x: x + 0.1 * torch.randn_like(x), "randn_like"),
            (lambda x: torch.native_dropout(x, 0.1, True)[0], "native_dropout"),
            (lambda x: functional.alpha_dropout(x, 0.1, True), "bernoulli_"),
        ],
        1,
    ),
)
def test_noise_for_what_is_cut_forbids_the_cut_and_dropout_does_not(
    noise: Callable[[torch.Tensor], torch.Tensor], operator: str
) -> None:
    noisy = _Pair(noise)
    dropping = _Pair(lambda x: functional.dropout(functional.dropout1d(x, 0.1), 0.1, inplace=True), 64)

    model = nn.Sequential(noisy, dropping, nn.Flatten())
    profile = trace(
        load_model(model, batch=lambda size: (torch.ones(size, 4, 8),), loss=lambda output, batch: output.float().sum())
    )

    assert [profile.classes[layer.layer_class].cuts != () for layer in profile.layers[:2]] == [False, True]
    assert any(f"{operator} in the layer draws for what is cut, and every rank would" in n for n in profile.notes)


class _Centred(torch.autograd.Function):
    """Its gradient is that without its mean over all features."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - gradient.mean(-1, keepdim=True)


class _Halved(_Centred):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


def _hooked(hook: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def between(x: torch.Tensor) -> torch.Tensor:
        x = x.tanh()
        x.register_hook(hook)
        return x

    return between


def _hooked_module(hook: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    activation = nn.Tanh()
    activation.register_full_backward_hook(lambda module, given, of_output: (hook(given[0]),))
    return activation


@pytest.mark.parametrize(
    ("between", "is_cut"),
    [
        (_Halved.apply, True),
        (_hooked(lambda gradient: gradient * 0.5), True),
        (_Centred.apply, False),
        (_hooked(lambda gradient: gradient / gradient.norm(dim=-1, keepdim=True)), False),
        (_hooked(lambda gradient: gradient * gradient.shape[-1]), False),
        (_hooked_module(lambda gradient: gradient * 0.5), True),
        (_hooked_module(lambda gradient: gradient - gradient.mean(-1, keepdim=True)), False),
    ],
)
def test_what_a_model_does_to_gradients_by_itself_may_forbid_a_cut(
    between: Callable[[torch.Tensor], torch.Tensor], is_cut: bool
) -> None:
    assert bool(_cuts_between(between)) == is_cut


class _OverTokens(_Pair):
    """Its tokens are one dim with the samples, as in mixtures of experts with a shared one (Llama 4, Qwen2-MoE)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x.flatten(0, 1)))).view(x.shape)


def _runs_on_slices(block: Callable[[], nn.Module]) -> bool:
    """Whether a block with a cut runs on a slice of its sequence."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
            self.blocks = nn.ModuleList(block() for _ in range(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            for each in self.blocks:
                x = each(x)
            return self.head(x)

    def batch(size: int, seq_len: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(size, seq_len, dtype=torch.long), torch.ones(size, seq_len, dtype=torch.long)

    profile = trace(load_model(Embedded, batch=batch, loss=lambda y, _: y.float().mean()))

    middle = profile.classes[profile.layers[2].layer_class]
    assert [cut.rows for cut in middle.cuts] == [("down",)]
    assert any("on no slices of the sequence, " in note for note in profile.notes) == (middle.sequence is None)
    return middle.sequence is not None


@pytest.mark.parametrize(("block", "slices"), [(_Pair, True), (_OverTokens, False)])
def test_columns_whose_tokens_are_not_gathered_run_on_no_slice_of_the_sequence(
    block: Callable[..., nn.Module], slices: bool
) -> None:
    assert _runs_on_slices(lambda: block(torch.relu)) == slices


class _Before(_Pair):
    """It adds something to its tokens before its column."""

    def __init__(self, added: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(torch.relu)
        self.added = added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.added(x))


_POSITIONS = torch.randn(12, 8)


@pytest.mark.parametrize(
    ("added", "slices"),
    slow.but_first(
        [
            (lambda x: functional.pad(x, (0, 0, 1, -1)), False),
            (lambda x: torch.arange(x.shape[1])[:, None] / 12, False),
            (lambda x: functional.rms_norm(x, (8,)) * x.shape[-1], True),
            (lambda x: torch.randn_like(x), False),
            (lambda x: functional.dropout(x, 0.1), True),
            (lambda x: _POSITIONS.to(x.device)[: x.shape[1]], False),
            (lambda x: functional.one_hot(torch.arange(x.shape[1]), 12)[:, :8], False),
            (lambda x: x.roll(1, 1), False),
            (lambda x: x.flatten(0, 1).roll(1, 0).view_as(x), False),
            (lambda x: x.flip(1), False),
            (lambda x: x[:, :1], False),
            (lambda x: x[:, -1].unsqueeze(1), False),
            (lambda x: x[:, [0]], False),
            (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), False),
            (lambda x: functional.avg_pool1d(x.mT, 3, 1, 1).mT, False),
            (lambda x: functional.conv1d(x.mT, torch.ones(8, 1, 3), padding=1, groups=8).mT, False),
            (lambda x: functional.group_norm(x.mT, 4).mT, False),
            (lambda x: x / x.shape[1], False),
            (lambda x: x.view(-1, 2, x.shape[1] // 2, 8).mT.reshape(x.shape), False),
            (lambda x: x.view(-1, x.shape[1], 2, 4).mT.reshape(x.shape), True),
            (lambda x: functional.pad(x, (1, -1)), True),
        ],
        3,
    ),
)
def test_what_does_not_treat_all_tokens_alike_runs_on_no_slice_of_the_sequence(
    added: Callable[[torch.Tensor], torch.Tensor], slices: bool
) -> None:
    assert _runs_on_slices(lambda: _Before(added)) == slices


class _Unlinear(nn.Module):
    """Attention of parameters (XLNet), a linear that runs twice (ALBERT), one whose weight alone is read (WavLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = _OfParameters()
        self.twice, self.bare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "attention":
            return x + self.attention(x)
        return x + (self.twice(self.twice(x)) if kind == "twice" else x @ self.bare.weight)


class _OfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3, 8, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("bti,ihd->bhtd", x, weight) for weight in self.weights)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("attention", "0.attention: not cut by tensor parallelism, because no linear modules lie around its attention"),
        ("twice", "0: twice not cut by tensor parallelism, because they run more than once in it"),
        (
            "bare",
            "0: bare not cut by tensor parallelism, because their weights are read in another way than by calling",
        ),
    ],
)
def test_what_is_no_pair_of_modules_is_named(kind: str, note: str) -> None:
    class Block(_Unlinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x, kind)

    model = nn.Sequential(Block(), Block(), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 4, 8), loss=lambda y, batch: y.mean()))

    assert any(found.startswith(note) for found in profile.notes), profile.notes


class _BatchNormed(_Pair):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(32), nn.Unflatten(0, (-1, 4))))


def test_a_batch_norm_between_is_named_before_a_cut_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def run_cut(*args: Any, **kwargs: Any) -> Any:
        tried.extend(cut.kind for cut in args[6])
        return tensor_rank.run_cut(*args, **kwargs)

    monkeypatch.setattr(tensor_cuts, "run_cut", run_cut)
    model = nn.Sequential(_BatchNormed(), _BatchNormed())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 4, 8), loss=lambda y, batch: y.mean()))

    why = "because between.1, which lies between its columns and it, keeps statistics of every feature"
    assert f"0.down: not cut by tensor parallelism, {why}" in profile.notes, profile.notes
    assert set(tried) == {"head"}


class _Pooled(nn.Module):
    """Layers, and after them a norm and attention in one whose out_proj is read by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Pair(torch.tanh), _Pair(torch.tanh)])
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


def test_what_comes_after_all_layers_is_named_by_its_own() -> None:
    profile = trace(load_model(_Pooled(), batch=lambda size: torch.ones(size, 4, 8), loss=lambda y, batch: y.mean()))

    assert any(found.startswith("head: attention.out_proj not cut") for found in profile.notes), profile.notes


class _Router(nn.Linear):
    """A linear layer that returns scores and logits, as Llama 4's."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = super().forward(x)
        return logits.softmax(-1), logits


class _Routed(_Pair):
    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.router = _Router(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, _ = self.router(x)
        return super().forward(x) * scores[..., :1]


def test_a_linear_layer_that_returns_several_tensors_is_left_whole() -> None:
    model = nn.Sequential(_Routed(), _Routed(), nn.Flatten())
    loaded = load_model(model, batch=lambda size: torch.ones(size, 4, 8), loss=lambda output, batch: output.mean())

    assert [(cut.columns, cut.rows) for cut in trace(loaded).classes[0].cuts] == [(("up",), ("down",))]


class _Scaled(_Pair):
    """A factor that is trained lies in between."""

    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x) * self.factor)


class _Holder(nn.Module):
    """Layers of which the second holds the same module as the first, as Zamba2's do."""

    def __init__(self, scaled: nn.Module, width: int) -> None:
        super().__init__()
        self.own = nn.Linear(8, width)
        self.scaled = scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) + self.own(x).sum(-1, keepdim=True)


def test_what_lies_between_has_the_name_of_the_layer_that_reads_it() -> None:
    scaled = _Scaled()
    model = nn.Sequential(_Holder(scaled, 3), _Holder(scaled, 5), nn.Flatten())
    loaded = load_model(model, batch=lambda size: torch.ones(size, 4, 8), loss=lambda output, batch: output.sum())

    profile = trace(loaded)

    cuts = [cut for layer in profile.layers[:2] for cut in profile.classes[layer.layer_class].cuts]
    assert [(cut.columns, cut.partial) for cut in cuts] == [(("scaled.up",), ("scaled.factor",))] * 2


class _Grouped(nn.Module):
    """Attention of 4 heads of queries to 2 (or 1) of keys and values, which are repeated."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k, self.v = (nn.Linear(32, 8 * heads) for _ in range(2))
        self.times = 4 // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], -1, 8).transpose(1, 2)

        def repeated(y: torch.Tensor) -> torch.Tensor:
            size, count, length, width = y.shape
            return y[:, :, None].expand(size, count, self.times, length, width).flatten(1, 2)

        keys, values = repeated(heads(self.k(x))), repeated(heads(self.v(x)))
        y = functional.scaled_dot_product_attention(heads(self.q(x)), keys, values, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


def test_a_head_of_keys_that_a_rank_has_alone_is_repeated_without_a_copy() -> None:
    model = nn.Sequential(_Grouped(), _Grouped(), nn.Flatten())
    profile = trace(
        load_model(model, batch=lambda size: torch.ones(size, 6, 32), loss=lambda output, batch: output.mean())
    )

    assert _pairs(profile.classes[0]) == [("attention", ("k", "v", "q"), ("out",))]
    assert profile.classes[0].cuts[0].units == (4, 2)


def test_one_head_of_keys_for_all_queries_stays_whole_and_enters() -> None:
    model = nn.Sequential(_Grouped(1), _Grouped(1), nn.Flatten())
    cut = (
        trace(load_model(model, batch=lambda size: torch.ones(size, 6, 32), loss=lambda y, batch: y.mean()))
        .classes[0]
        .cuts[0]
    )

    assert (cut.kind, cut.columns, cut.entries, cut.rows, cut.units) == (
        "attention",
        ("q",),
        ("k", "v"),
        ("out",),
        (4,),
    )


def test_features_that_no_degree_divides_are_not_cut() -> None:
    assert _cuts_between(functional.gelu, width=31) == ()


class _Gated(nn.Module):
    """Fused gate and up projection: one after the other, or feature by feature (so that any slice holds pairs)."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.both = nn.Linear(8, 64)
        self.down = nn.Linear(32, 8)
        self.interleaved = interleaved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


@pytest.mark.parametrize(("interleaved", "parts"), [(False, {"both": (32, 32)}), (True, {})])
def test_fused_gates_are_cut_by_their_parts(interleaved: bool, parts: dict[str, tuple[int, ...]]) -> None:
    model = nn.Sequential(_Gated(interleaved), _Gated(interleaved))
    profile = trace(
        load_model(model, batch=lambda size: (torch.ones(size, 4, 8),), loss=lambda output, batch: output.float().sum())
    )

    assert [cut.parts for cut in profile.classes[0].cuts] == [parts]


@pytest.mark.parametrize(
    "between",
    slow.but_first(
        [
            lambda x: x.view(*x.shape[:-1], -1, 4).transpose(-1, -2).flatten(-2),
            lambda x: x.view(*x.shape[:-1], 4, -1).transpose(-1, -2).flatten(-2),
            lambda x: x.roll(1, -1),
            lambda x: torch.relu(x).flip(-1),
            lambda x: functional.pad(x, (1, -1)),
            lambda x: x * x[..., [0]],
            lambda x: x * x[..., :1],
        ],
        1,
    ),
)
def test_features_in_another_order_are_not_cut(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert _cuts_between(between) == ()


class _TurnedTogether(nn.Module):
    """Queries and keys of one fused projection, which are normed together before they are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv = 4, 2
        self.qkv, self.out = nn.Linear(64, 8 * 16), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both, v = self.qkv(x).split([(self.heads + self.kv) * 16, self.kv * 16], -1)
        both = functional.rms_norm(both.reshape(*x.shape[:2], -1, 16), (16,))
        q, k = both[:, :, : self.heads], both[:, :, self.heads :]
        v = v.reshape(*x.shape[:2], -1, 16)
        k, v = (y.repeat_interleave(2, 2).transpose(1, 2) for y in (k, v))
        y = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


def test_queries_and_keys_that_are_told_apart_late_are_not_cut_as_one() -> None:
    model = nn.Sequential(_TurnedTogether(), _TurnedTogether(), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 4, 64), loss=lambda y, batch: y.mean()))

    assert profile.classes[0].cuts == ()
    assert (
        "0.out: not cut by tensor parallelism, because slice in the layer takes some of what is cut" in profile.notes[0]
    )


class _Counting(nn.Module):
    """Attention of four heads whose scores, or result, a function of them and of the number of heads changes."""

    def __init__(self, scores: Callable[..., torch.Tensor], result: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads, self.scores, self.result = 4, scores, result
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y(x).view(*x.shape[:2], self.heads, 8).transpose(1, 2) for y in (self.q, self.k, self.v))
        y = torch.softmax(self.scores(q @ k.transpose(-1, -2), self.heads), -1) @ v
        return x + self.out(self.result(y, self.heads).transpose(1, 2).flatten(2))


def _same(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("scores", "result", "why"),
    slow.but_first(
        [
            (lambda x, heads: x * heads**0.5, _same, "mul in the layer takes a number that counts what is cut"),
            (_same, lambda x, heads: x / heads, "div in the layer takes a number that counts what is cut"),
            (
                lambda x, heads: x * torch.tensor(heads),
                _same,
                "torch.tensor in the layer takes a number that counts what is",
            ),
            (
                lambda x, heads: x * torch.arange(heads).view(-1, 1, 1),
                _same,
                "arange in the layer numbers what is cut, from its beginning on every rank",
            ),
            (
                lambda x, heads: x * torch.full((heads, 1, 1), 0.5, dtype=x.dtype).cumprod(0),
                _same,
                "cumprod in the layer would work on a slice of what it reduces",
            ),
            (
                lambda x, heads: x + functional.max_pool3d(x, (3, 1, 1), 1, (1, 0, 0)),
                _same,
                "max_pool3d_with_indices in the layer is not known to treat all of what is cut alike",
            ),
            (
                lambda x, heads: x.masked_fill(x < x.topk(6 // heads, -1).values[..., -1:], -9.0),
                _same,
                "topk in the layer takes a number that counts what is cut",
            ),
            (
                lambda x, heads: x * torch.linspace(0.5, 2.0, 9, dtype=x.dtype)[:heads].view(-1, 1, 1),
                _same,
                "slice in the layer takes a number that counts what is cut",
            ),
            (
                lambda x, heads: torch.where(x > 0, x, float(heads)),
                _same,
                "scalar_tensor in the layer takes a number that counts what is cut",
            ),
            (
                lambda x, heads: x * torch.linspace(0.5, 2.0, 2, dtype=x.dtype).repeat(heads // 2).view(-1, 1, 1),
                _same,
                "repeat in the layer takes a number that counts what is cut",
            ),
        ],
        1,
    ),
)
def test_what_counts_heads_or_mixes_neighbours_is_not_cut(
    scores: Callable[..., torch.Tensor], result: Callable[..., torch.Tensor], why: str
) -> None:
    model = nn.Sequential(_Counting(scores, result), _Counting(scores, result), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 6, 32), loss=lambda y, batch: y.mean()))

    assert profile.classes[0].cuts == ()
    assert f"0.out: not cut by tensor parallelism, because {why}" in profile.notes[0]


class _OffInput(nn.Module):
    """Attention that takes the number of its features off its input (nanoGPT's), before a function of the result, the
    input, and that number."""

    def __init__(self, then: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads, self.then = 4, then
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.size()
        of_heads = (size, length, self.heads, width // self.heads)
        q, k, v = (y.view(of_heads).transpose(1, 2) for y in self.qkv(x).split(width, 2))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(size, length, width)
        return self.out(self.then(y, x, width))


class _Added(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.module(x)


def _cut_off_input(then: Callable[..., torch.Tensor]) -> tuple[TensorCut, ...]:
    model = nn.Sequential(*(_Added(_OffInput(then)) for _ in range(2)), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 6, 32), loss=lambda y, batch: y.mean()))
    return profile.classes[0].cuts


def test_a_width_off_the_shape_of_an_input_is_that_of_a_rank() -> None:
    (cut,) = _cut_off_input(lambda y, x, width: y.view(len(x), -1, width))

    assert (cut.narrowed, cut.shown, cut.columns) == ("module", (0,), ("module.qkv",))


@pytest.mark.parametrize(
    "then",
    slow.but_first(
        [
            lambda y, x, width: y * x.detach(),
            lambda y, x, width: y * width,
            lambda y, x, width: y + torch.zeros_like(x),
            lambda y, x, width: y * x.new_ones(width).cumsum(0),
        ],
        2,
    ),
)
def test_an_input_that_is_read_beside_the_columns_is_never_shown_in_part(then: Callable[..., torch.Tensor]) -> None:
    assert _cut_off_input(then) == ()


class _Diagonal(_Counting):
    """Scores times the diagonal of a table with a row and a column for each head."""

    def __init__(self) -> None:
        super().__init__(_same, _same)
        self.table = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scores = lambda scores, heads: scores * self.table.diagonal().view(-1, 1, 1)
        return super().forward(x)


def test_a_diagonal_is_no_slice_of_rows() -> None:
    model = nn.Sequential(_Diagonal(), _Diagonal(), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 6, 32), loss=lambda y, batch: y.mean()))

    assert profile.classes[0].cuts == ()
    assert "because diagonal in the layer takes some of what is cut" in profile.notes[0]


class _Turned(_Counting):
    """Queries and keys of norm 1, turned as complex numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y(x).view(*x.shape[:2], self.heads, 8) for y in (self.q, self.k, self.v))
        turns = torch.polar(torch.ones(x.shape[1], 1, 4), torch.ones(x.shape[1], 1, 4))
        q, k = (torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2)) * turns for y in (q, k))
        q, k = (functional.normalize(torch.view_as_real(y).flatten(3).type_as(x), dim=-1) for y in (q, k))
        scores = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return x + self.out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2))


def test_complex_rotary_embeddings_and_norms_of_each_head_leave_a_cut() -> None:
    model = nn.Sequential(_Turned(_same, _same), _Turned(_same, _same), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 6, 32), loss=lambda y, batch: y.mean()))

    assert [(cut.kind, cut.rows) for cut in profile.classes[0].cuts] == [("attention", ("out",))]


def test_a_gate_over_halves_by_an_operator_of_torchs_does_not_break_off() -> None:
    assert _cuts_between(lambda x: functional.glu(x.repeat_interleave(2, -1))) == ()


def test_a_slope_that_all_features_share_may_lie_between() -> None:
    assert [cut.units for cut in _cuts_between(nn.PReLU())] == [(32,)]


class _ByPlaces(_Counting):
    """The same with places before heads in its scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y(x).view(*x.shape[:2], self.heads, 8) for y in (self.q, self.k, self.v))
        scores = torch.softmax(torch.einsum("bqhd,bkhd->bqhk", q, k), -1)
        return x + self.out(torch.einsum("bqhk,bkhd->bqhd", scores, v).flatten(2))


@pytest.mark.slow
def test_more_places_than_features_are_no_heads() -> None:
    model = nn.Sequential(_ByPlaces(_same, _same), _ByPlaces(_same, _same), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 48, 32), loss=lambda y, batch: y.mean()))

    assert all(cut.kind != "attention" for cut in profile.classes[0].cuts)


def test_what_counts_or_mixes_something_else_leaves_a_cut() -> None:
    of_others = (
        lambda x, heads: x.gather(-1, torch.zeros(x.shape, dtype=torch.long)).tril() / torch.tensor(x.shape[-1]),
        lambda x, heads: functional.max_pool2d(x, (3, 1), 1, (1, 0)) * x.shape[-1] ** -0.5,
    )
    model = nn.Sequential(_Counting(*of_others), _Counting(*of_others), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 6, 32), loss=lambda y, batch: y.mean()))

    assert [cut.kind for cut in profile.classes[0].cuts] == ["attention"]


class _InWindows(nn.Module):
    """Attention within two windows of a sequence, whose products torch takes by windows and heads in one dim (Swin)."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.unflatten(1, (2, -1)).flatten(0, 1)
        q, k, v = (y(windows).unflatten(-1, (-1, 8)).transpose(1, 2) for y in (self.q, self.k, self.v))
        scores = self.change((q @ k.transpose(-1, -2)).flatten(0, 1)).unflatten(0, (len(windows), -1))
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x + self.out(y).view(x.shape)


@pytest.mark.parametrize(
    ("change", "is_cut"),
    slow.but_first(
        [
            (lambda x: x * 0.5, True),
            (lambda x: functional.dropout(x, 0.5), False),
            (lambda x: x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1), False),
            (lambda x: x.flip(0), False),
            (lambda x: x.cumsum(0), False),
        ],
        3,
    ),
)
def test_heads_beside_windows_in_one_dim_are_cut_while_they_are_treated_alike(
    change: Callable[[torch.Tensor], torch.Tensor], is_cut: bool
) -> None:
    model = nn.Sequential(_InWindows(change), _InWindows(change), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 12, 32), loss=lambda y, batch: y.mean()))

    assert [cut.kind for cut in profile.classes[0].cuts] == ["attention"] * is_cut, profile.notes


class _Joined(nn.Module):
    """Two columns whose outputs are joined for one row, as attention and MLP of Flux's single-stream blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(48, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.cat([functional.relu(self.up(x)), self.gate(x)], -1))


def test_features_that_are_joined_with_others_are_not_cut() -> None:
    model = nn.Sequential(_Joined(), _Joined(), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 4, 8), loss=lambda y, batch: y.mean()))

    assert profile.classes[0].cuts == ()


class _Batched(nn.Module):
    """Attention by bmm, over samples and heads in one dim (Mvp, SpeechT5)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.width = 4, 32
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape
        q, k, v = (
            y.view(size, length, self.num_heads, 8).transpose(1, 2).reshape(size * self.num_heads, length, 8)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).view(size, self.num_heads, length, 8)
        return x + self.out(y.transpose(1, 2).reshape(size, length, self.width))


def test_heads_that_bmm_takes_as_samples_are_counted() -> None:
    model = nn.Sequential(_Batched(), _Batched(), nn.Flatten())
    profile = trace(load_model(model, batch=lambda size: torch.ones(size, 6, 32), loss=lambda y, batch: y.mean()))

    cut = profile.classes[0].cuts[0]
    assert (cut.kind, cut.units, cut.attributes) == ("attention", (4,), {"": ("num_heads", "width")})


class _First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.scale(x)


class _ScaledByGiven(_Pair):
    """Between column and row it reads something trained that an earlier layer has made."""

    def __init__(self) -> None:
        super().__init__(torch.relu)

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = given
        return x + self.down(self.up(x) * scale[..., :1]), scale


def test_what_reads_something_trained_that_arrives_is_not_cut() -> None:
    model = nn.Sequential(_First(), _ScaledByGiven(), _ScaledByGiven())
    loaded = load_model(model, batch=lambda size: torch.ones(size, 4, 8), loss=lambda y, batch: y[0].mean())

    assert all(not cut.rows for layer_class in trace(loaded).classes for cut in layer_class.cuts)
