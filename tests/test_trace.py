"""What a profile says equals what can be derived by hand."""

import importlib
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.planner.plan.legality import legal_cuts, sharding_rule
from meshwright.profiler.garbage import without_garbage_collection
from meshwright.profiler.model import class_costs
from meshwright.profiler.model.dimensions import dimensions
from meshwright.profiler.model.lengths import at_seq_len
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile, OpKind, amount_at, load_profile
from meshwright.profiler.model.trace import trace
from meshwright.profiler.running.fused_kernels import FusedKernels
from meshwright.profiler.running.meters import Op, View
from support import slow
from support.zoo import zoo_profile


def _of_module(module: nn.Module, *shape: int) -> ModelProfile:
    loaded = load_model(
        module, batch=lambda size: (torch.ones(size, *shape),), loss=lambda output, batch: output.float().sum()
    )
    return trace(loaded)


def _block_flops(profile: ModelProfile, part: str = "forward") -> float:
    """FLOPs of the second layer, a transformer block, for one sample."""
    costs = profile.classes[profile.layers[1].layer_class].whole
    return sum(amount_at(op.flops, 1) for op in costs.operators if (op.part == "forward") == (part == "forward"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "kv_width", "hidden"),
    [("llama3_8b", 4096, 1024, 14336), ("llama31_405b", 16384, 1024, 53248)],
)
def test_llama_flops_equal_the_closed_form(name: str, width: int, kv_width: int, hidden: int) -> None:
    length = 8192
    weights = 2 * width * width + 2 * width * kv_width + 3 * width * hidden
    causal_attention = 2 * length * length * width  # q k^T and p v, each 2 T^2 d, halved by the causal mask

    profile = zoo_profile(name)

    assert _block_flops(profile) == 2 * length * weights + causal_attention
    assert _block_flops(profile, "backward") == 4 * length * weights + 2.5 * causal_attention


def test_gpt_block_saves_what_autograd_needs() -> None:
    length, width = 1024, 768
    profile = zoo_profile("gpt.py")
    block = profile.classes[profile.layers[1].layer_class].whole
    # norm1 out, q k v, attention out, residual, norm2 out, up, gelu: 1 + 3 + 1 + 1 + 1 + 4 + 4 times T d
    tokens = 15 * length * width + 2 * 2 * length  # and mean, 1/std of both norms
    log_sum_exp_bytes = 4 * 12 * length

    assert amount_at(block.saved.elements, 1) == tokens
    assert amount_at(block.saved.other_bytes, 1) == log_sum_exp_bytes
    assert amount_at(block.saved.elements, 3) == 3 * tokens
    assert amount_at(block.inputs.elements, 1) == length * width


def _op(name: str, kind: OpKind, reads: tuple[int, ...], makes: int, module: str = "", draws: bool = False) -> Op:
    inputs, output = (tuple(View(number, (1,), (1,), 0) for number in numbers) for numbers in (reads, (makes,)))
    return Op(name, kind, module, False, False, inputs, output, draws=draws)


_PRODUCT = _op("mm", "matmul", (0,), 1)


def _reads(number: int) -> Op:
    return _op("mm", "matmul", (number,), 99)


@pytest.mark.parametrize(
    ("forward", "saved", "kept"),
    [
        pytest.param(
            [_PRODUCT, _op("silu", "elementwise", (1,), 2), _op("mul", "elementwise", (2, 1), 3), _reads(3)],
            {1, 2, 3}, {1, 3}, id="a gate keeps its sides and their product",
        ),
        pytest.param(
            [_op("add", "elementwise", (0,), 1), _op("_to_copy", "copy", (1,), 2, "norm"),
             _op("mul", "elementwise", (2,), 3, "norm"), _reads(3)],
            {2, 3}, {1, 3}, id="a norm keeps what enters it, not its copy in fp32",
        ),
        pytest.param(
            [_PRODUCT, _op("relu", "elementwise", (1,), 2), _op("pow", "elementwise", (2,), 3), _reads(3)],
            {2, 3}, {1, 3}, id="a squared ReLU keeps what it is of",
        ),
        pytest.param(
            [_op("sdpa", "attention", (0,), 1), _op("clone", "copy", (1,), 2), _reads(2)],
            {1, 2}, {1}, id="another layout is no copy",
        ),
        pytest.param(
            [_PRODUCT, _op("rand", "elementwise", (1,), 2, draws=True), _op("mul", "elementwise", (2, 1), 3)],
            {2}, {2}, id="what is drawn comes but once",
        ),
        pytest.param(
            [_op("arange", "other", (), 1), _op("cos", "elementwise", (1,), 2), _op("mul", "elementwise", (2, 0), 3)],
            {2}, set(), id="a table that is made of nothing is made again",
        ),
    ],
)  # fmt: skip
def test_fused_kernels_keep_what_enters_them(forward: list[Op], saved: set[int], kept: set[int]) -> None:
    found = FusedKernels.of(forward, saved)

    assert saved - found.dropped | found.entering == kept


def test_head_keeps_fp32_log_probabilities() -> None:
    profile = zoo_profile("gpt.py")
    head = profile.classes[profile.layers[-1].layer_class].whole

    assert amount_at(head.saved.other_bytes, 1) == pytest.approx(4 * 1024 * 50257, rel=1e-3)
    assert amount_at(head.forward_transient.elements, 1) >= 1024 * 50257  # the logits in the compute dtype


def test_backward_is_split_into_inputs_and_weights() -> None:
    profile = zoo_profile("gpt.py")
    block = profile.classes[profile.layers[1].layer_class].whole
    matmuls = [op for op in block.operators if op.kind == "matmul" and op.part != "forward"]

    assert sorted(op.part for op in matmuls) == ["backward_input"] * 4 + ["backward_weight"] * 4
    assert {op.module for op in matmuls} == {"attention.qkv", "attention.out", "up", "down"}


def test_equal_blocks_are_one_class() -> None:
    profile = zoo_profile("gpt.py")

    assert [layer.layer_class for layer in profile.layers] == [0, *[1] * 12, 2]
    assert profile.layers[0].modules == ("tokens", "positions")
    assert profile.layers[-1].modules == ("norm", "head")


def test_tied_weights_are_listed_in_each_reader_and_counted_once() -> None:
    profile = zoo_profile("gpt.py")

    assert profile.ties == (("tokens.weight", "head.weight"),)
    assert "tokens.weight" in profile.layers[0].parameters
    assert "head.weight" in profile.layers[-1].parameters
    assert profile.num_parameters == 124_439_808


def test_one_hidden_state_crosses_between_blocks() -> None:
    profile = zoo_profile("gpt.py")

    assert [(t.made_by, t.last_used_by) for t in profile.tensors] == [(i, i + 1) for i in range(13)]
    assert profile.tensors[1].producer.name == "blocks.0"
    assert profile.tensors[1].dims == ("batch", "sequence", "other")
    assert profile.tensors[0].producer.kind == "glue"


def test_masks_and_rotary_tables_do_not_cross() -> None:
    assert len(zoo_profile("llama3_8b").tensors) == 33


@pytest.mark.slow
def test_unet_skips_cross_many_cuts() -> None:
    profile = zoo_profile("unet.py")
    skips = [t for t in profile.tensors if t.last_used_by > t.made_by + 1]

    assert [(t.producer.name, t.made_by, t.last_used_by) for t in skips] == [
        ("downs.0", 0, 6),
        ("downs.1", 1, 5),
        ("downs.2", 2, 4),
    ]
    assert profile.seq_len is None
    assert not any("sequence" in t.dims for t in profile.tensors)


def test_an_mlp_of_attributes_has_a_layer_per_linear() -> None:
    profile = zoo_profile("mlp.py")

    assert [layer.name for layer in profile.layers] == ["fc1", "fc2", "fc3", "fc4"]
    assert [t.producer.name for t in profile.tensors] == ["relu"] * 3


@pytest.mark.slow
def test_encoder_output_crosses_the_decoder() -> None:
    profile = zoo_profile("t5_small")
    encoder_output = next(t for t in profile.tensors if t.made_by == 7 and t.last_used_by > 8)

    assert encoder_output.last_used_by == 13
    assert profile.num_parameters == 60_506_624
    assert profile.returns_loss


@pytest.mark.parametrize("name", slow.but(["gpt2", "bert_large"], {"bert_large"}))
def test_flops_are_six_per_weight_and_token(name: str) -> None:
    """Within the attention's share and the embeddings' (which multiply nothing, but for the tied head)."""
    profile = zoo_profile(name)

    per_token = profile.flops_per_sample() / profile.tokens_per_sample

    assert per_token == pytest.approx(6 * profile.num_parameters, rel=0.15)


def test_the_profile_survives_its_file(tmp_path: Path) -> None:
    profile = zoo_profile("mlp.py")
    profile.save(tmp_path / "profile.json")

    assert load_profile(tmp_path / "profile.json") == profile


def test_fingerprint_follows_the_structure() -> None:
    def narrow() -> ModelProfile:
        return _of_module(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), 8)

    wide = _of_module(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), 8)

    assert narrow().fingerprint == narrow().fingerprint
    assert narrow().fingerprint != wide.fingerprint


class _Shared(nn.Module):
    """One block, run three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = functional.relu(self.block(functional.dropout(x, 0.0)) + x)
        return self.last(x)


def test_a_block_that_runs_thrice_is_one_layer_counted_thrice() -> None:
    profile = _of_module(_Shared(), 8)
    block = profile.classes[profile.layers[1].layer_class].whole

    assert [layer.name for layer in profile.layers] == ["first", "block", "last"]
    assert sum(amount_at(op.flops, 1) for op in block.operators if op.part == "forward") == 3 * 2 * 8 * 8


class _BackAndForth(nn.Module):
    """Two blocks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = functional.relu(block(x))
        return x


def test_blocks_that_take_turns_are_one_layer_with_a_note() -> None:
    profile = _of_module(_BackAndForth(), 8)

    assert len(profile.layers) == 1
    assert any("runs 2 times" in note for note in profile.notes)


class _Recorded(nn.Module):
    """Keeps what a module inside of each block returns, as transformers do with routers' logits for a loss on them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.recorded: list[torch.Tensor] = []
        for block in self.blocks:
            block[0].register_forward_hook(lambda module, args, output: self.recorded.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        recorded = [self.recorded.pop() for _ in self.blocks]
        return x + sum(each.to(x.device).softmax(-1) for each in recorded)


def test_what_is_kept_aside_and_handed_on_as_it_is_joins_layers() -> None:
    profile = trace(load_model(_Recorded, batch=lambda size: torch.ones(size, 8), loss=lambda y, batch: y.mean()))

    assert len(profile.layers) == 1
    assert any("keeps a tensor aside that" in note for note in profile.notes), profile.notes


class _Odd(nn.Module):
    """A root parameter read by glue, one that nothing reads, and a tensor kept aside."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(8))
        self.unused = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.tower = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return x


def test_every_parameter_has_a_layer() -> None:
    profile = _of_module(_Odd(), 8)

    assert "position" in profile.layers[0].parameters
    assert "unused" in profile.layers[-1].parameters
    assert any(note.endswith(": unused, tower (4 parameters)") for note in profile.notes)
    assert profile.num_parameters == 8 + 3 + 3 * 72 + 4


class _Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


def test_a_model_that_decides_by_values_is_run_on_real_ones() -> None:
    profile = _of_module(_Decides(), 8)

    assert "test_trace.py" in profile.decides_by_values
    assert "item" in profile.decides_by_values or "_local_scalar_dense" in profile.decides_by_values
    assert profile.flops_per_sample() == pytest.approx(2 * 2 * 8 * 8, rel=0.01)  # the input needs no gradient
    assert any("what the other branch costs" in note for note in profile.notes)


def test_a_model_that_decides_by_values_is_neither_sharded_nor_cut() -> None:
    profile = _of_module(_Decides(), 8)

    assert legal_cuts(profile) == []
    assert "decides by values" in (sharding_rule(profile, "fp32") or "")


def test_a_large_model_that_decides_by_values_is_refused_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.profiler.model.trace._MOST_REAL_ELEMENTS", 50)

    with pytest.raises(ValueError, match=r"test_trace.py:\d+ .*72 parameters are too many"):
        _of_module(_Decides(), 8)


LIBRARY = """
from torch import nn

class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x)
"""


def test_a_library_that_decides_is_named_by_its_package_not_by_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "a_library"
    package.mkdir(parents=True)
    (package / "deciding.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(package.parent))

    profile = _of_module(importlib.import_module("a_library.deciding").Decides(), 8)

    assert profile.decides_by_values.startswith("a_library/deciding.py:10 ")
    assert not any(str(tmp_path) in note for note in profile.notes)


def test_a_batch_of_the_wrong_shape_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="does not run with its own micro-batch"):
        _of_module(nn.Linear(8, 8), 5)


class _Raises(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("states cannot be None")


class _Casts(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), self.to(torch.float32).weight)


class _DropsOne(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.squeeze()[:, None]).flatten(1)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (_DropsOne, r"with several samples and not with one alone \(RuntimeError.*squeeze\(-1\)"),
        (_Raises, r"micro-batch: ValueError: states cannot be None \(.*test_trace\.py:\d+\)"),
        (_Casts, r"casts or moves the weights of a module in its forward \(.*test_trace\.py:\d+\)"),
    ],
)
def test_what_a_forward_refuses_or_may_not_do_is_told_with_the_line(module: type[nn.Linear], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _of_module(module(8, 8), 8)


def test_a_tensor_that_loses_its_dim_of_samples_at_one_sample_is_no_hindrance() -> None:
    class Squeezes(nn.Module):
        """Of two samples `last` has a dim, of one it has none; every sample is told apart in what it returns."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i > 0) for i in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last = x[:, :1].ne(0).squeeze()
            for layer in self.layers:
                x = layer(x.t().contiguous().t()) * last.view(-1, 1)  # one sample is not copied: three are run as well
            return x

    loaded = load_model(Squeezes, batch=lambda size: torch.randn(size, 8), loss=lambda output, batch: output.mean())
    profile = trace(loaded)

    assert len(profile.layers) == 3


class _CopiedBack(torch.autograd.Function):
    """Copies the gradient of two samples and more: a transposed one of one sample is as contiguous as before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.t().contiguous().t()


@pytest.mark.parametrize(
    ("between", "runs"),
    [
        pytest.param(lambda x: x.t().contiguous().t(), [(2, True), (3, True)], marks=pytest.mark.slow),
        (_CopiedBack.apply, [(2, True), (1, True), (3, True)]),
        (lambda x: x * 2, [(2, True), (1, True)]),
    ],
    ids=["copies forward", "copies backward", "copies nothing"],
)
def test_one_sample_counts_unless_it_is_copied_less_often(
    between: Any, runs: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run again where the forward in which cuts were looked for has shown that it does not count."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(between(x))

    class Run(class_costs.LayerRun):
        def run(self, *args: Any, backward: bool = True, **kwargs: Any) -> Any:
            if self.index == 1:
                ran.append((self.observation.size, backward))
            return super().run(*args, backward=backward, **kwargs)

    ran: list[tuple[int, bool]] = []
    monkeypatch.setattr(class_costs, "LayerRun", Run)
    trace(
        load_model(
            nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 8)),
            batch=lambda size: (torch.randn(size, 8),),
            loss=lambda output, batch: output.float().sum(),
        )
    )

    assert ran == runs


def test_runs_of_layers_are_freed_without_the_collector_of_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run(class_costs.LayerRun):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            if self.index == 0:  # autograd keeps some of the layer that ends in the loss
                left.append(weakref.ref(self))
            return super().run(*args, **kwargs)

    left: list[weakref.ref[Any]] = []
    monkeypatch.setattr(class_costs, "LayerRun", Run)
    with without_garbage_collection():
        _of_module(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), 8)
        still_there = [run for run in left if run() is not None]

    assert left
    assert not still_there


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        _of_module(nn.Linear(8, 8).requires_grad_(False), 8)


def test_a_model_without_a_loss_is_asked_for_one() -> None:
    with pytest.raises(ValueError, match="returned no single number to train on"):
        trace(load_model(nn.Linear(8, 8), batch=lambda size: (torch.ones(size, 8),)))


def test_flops_count_real_operators_of_a_convolution() -> None:
    profile = _of_module(nn.Conv2d(3, 16, 3, padding=1), 3, 10, 10)
    forward = next(op for op in profile.classes[0].whole.operators if op.part == "forward" and op.kind == "matmul")

    assert amount_at(forward.flops, 1) == 2 * 100 * 27 * 16
    assert forward.shape is not None
    assert [amount_at(size, 1) for size in forward.shape] == [100, 27, 16]


class _InPlace(nn.Module):
    """Blocks that begin in place, as nn.ReLU(inplace=True) does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(3))
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
def test_layers_may_change_their_input_in_place() -> None:
    loaded = load_model(_InPlace(), batch=lambda size: (torch.randn(size, 8),), loss=lambda out, batch: out.sum())

    assert [len(trace(loaded).layers), trace(loaded).num_parameters] == [4, 4 * 72]


@pytest.mark.slow
def test_classes_of_one_module_type_have_names_of_their_own() -> None:
    names = [c.name for c in zoo_profile("t5_small").classes]

    assert len(set(names)) == len(names)
    assert "T5Block" in names
    assert "T5Block.2" in names


class _Stage(nn.Module):
    """A level of a network, as in ResNet, Swin or ConvNeXt: blocks in a container of its own."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(_Residual(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        for layer in self.layers:
            x = layer(x)
        return x


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.relu(self.up(x)))


class _Based(nn.Module):
    """Layers, of which one has the name that PEFT gives to what its adapters stand beside, as in timm's DLA."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.level0, self.level1 = _Residual(8), _Residual(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.level1(self.level0(self.base_layer(x)))  # type: ignore[no-any-return]


def test_a_layer_of_the_name_of_a_layer_under_adapters_is_one_like_others() -> None:
    assert [layer.name for layer in _of_module(_Based(), 8).layers] == [
        "base_layer.0",
        "base_layer.2",
        "level0",
        "level1",
    ]


class _Mixture(nn.Module):
    """Experts side by side: as many tensors cross between them as there are sums under way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(_Residual(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        return x + sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class _Levels(nn.Module):
    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def test_blocks_within_stages_are_layers() -> None:
    profile = _of_module(_Levels(_Stage(8, 16, 3), _Stage(16, 16, 2)), 8)

    blocks = [layer.name for layer in profile.layers if ".layers." in layer.name]
    assert blocks == ["stages.0.layers.0", "stages.0.layers.1", "stages.0.layers.2", *blocks[3:]]
    assert blocks[3:] == ["stages.1.layers.0", "stages.1.layers.1"]


def test_blocks_of_stages_that_are_containers_themselves_are_layers() -> None:
    widening = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    profile = _of_module(
        _Levels(nn.Sequential(widening, _Residual(16), _Residual(16)), nn.Sequential(_Residual(16), _Residual(16))), 8
    )

    blocks = [f"stages.{stage}.{block}" for stage, block in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    assert [layer.name for layer in profile.layers] == [*blocks, "head"]


class _InTurn(nn.Module):
    """A stage that has nothing but its blocks, as RegNet's have."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        for i, block in enumerate(blocks):
            self.add_module(f"b{i + 1}", block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.children():
            x = block(x)
        return x


class _TwoStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.s1, self.s2 = (
            _InTurn(*(_InTurn(_Residual(16), _Residual(16)) for _ in range(num_blocks))) for num_blocks in (2, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.s2(self.s1(self.stem(x)))


def test_blocks_of_stages_that_have_nothing_else_are_layers() -> None:
    profile = _of_module(_TwoStages(), 16)

    assert [layer.name for layer in profile.layers] == ["stem", "s1.b1", "s1.b2", "s2.b1", "s2.b2", "s2.b3"]


def test_experts_side_by_side_stay_in_their_layer() -> None:
    profile = _of_module(_Levels(nn.Linear(16, 16), _Mixture(16), _Mixture(16)), 16)

    assert [layer.name for layer in profile.layers] == ["stages.0", "stages.1", "stages.2", "head"]


def test_blocks_around_experts_are_layers_of_their_stage() -> None:
    stage = nn.Sequential(_Mixture(16), _Mixture(16), _Mixture(16))
    profile = _of_module(_Levels(nn.Linear(16, 16), stage), 16)

    assert [layer.name for layer in profile.layers] == ["stages.0", "stages.1.0", "stages.1.1", "stages.1.2", "head"]


@cache
def _gpt_of_any_length() -> ModelProfile:
    return trace(load_model("benchmarks/models/gpt.py"), seq_len=256, lengths=True)


@pytest.mark.slow
def test_a_profile_holds_at_lengths_between_those_it_was_made_at() -> None:
    between = at_seq_len(_gpt_of_any_length(), 192)

    there = trace(load_model("benchmarks/models/gpt.py"), seq_len=192)
    assert between.flops_per_sample() == pytest.approx(there.flops_per_sample(), rel=1e-9)
    for ours, theirs in zip(between.classes, there.classes, strict=True):
        for amount in ("saved", "selective", "full", "forward_transient", "backward_transient"):
            found, expected = (getattr(c.whole, amount).at(3, 2) for c in (ours, theirs))
            assert found == pytest.approx(expected, rel=1e-6), (ours.name, amount)
    assert [t.shape for t in between.tensors] == [t.shape for t in there.tensors]
    assert between.fingerprint == there.fingerprint, "so that a plan made from it finds its model"


def test_a_profile_of_one_length_is_not_stretched() -> None:
    with pytest.raises(ValueError, match="of gpt holds 1024 tokens per sample and no other"):
        at_seq_len(zoo_profile("gpt.py"), 512)


class _Reads(nn.Module):
    """Words and a picture, whose tower does not know how many words there are."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(_Residual(32) for _ in range(2))
        self.words = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(_Residual(32) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, words: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        for block in self.tower:
            picture = block(picture)
        x = self.words(words) + picture.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _read(size: int, seq_len: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(64, (size, seq_len)), torch.randn(size, 24, 32)


@pytest.mark.slow
def test_layers_that_do_the_same_at_another_length_run_there_once_and_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(_Reads, batch=_read, loss=lambda output, batch: output.float().square().mean())
    cut: list[tuple[int | None, int]] = []
    runs = class_costs._cut_runs

    def counted(fake: Any, chain: Any, sizes: Any, index: int, *more: Any) -> Any:
        cut.append((sizes.seq_len, index))
        return runs(fake, chain, sizes, index, *more)

    class Run(class_costs.LayerRun):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            ran.append(self.layer.name)
            return super().run(*args, **kwargs)

    ran: list[str] = []
    monkeypatch.setattr(class_costs, "LayerRun", Run)
    monkeypatch.setattr(class_costs, "_cut_runs", counted)
    profile = trace(loaded, seq_len=64, lengths=True)

    names = [layer.name for layer in profile.layers]
    assert ran.count("tower.0") == 2 + len(profile.other_lengths)
    assert {names[index] for seq_len, index in cut if seq_len == 64} >= {"tower.0", "blocks.0"}
    assert {names[index] for seq_len, index in cut if seq_len == 32} == {"blocks.0", "head"}
    for other in profile.other_lengths:
        alone = trace(loaded, seq_len=other.seq_len)
        assert other.classes == alone.classes
        assert other.tensors == alone.tensors


def test_selective_recompute_keeps_what_matmuls_and_attention_return() -> None:
    profile = zoo_profile("gpt.py")
    block = profile.classes[profile.layers[1].layer_class].whole

    tokens, width, hidden, heads = 1024, 768, 3072, 12
    kept = tokens * (3 * width + width + width + hidden + width)  # qkv, attention, out, up, down

    assert amount_at(block.selective.elements, 1) == kept
    assert amount_at(block.selective.other_bytes, 1) == 4 * tokens * heads  # log-sum-exp of attention
    assert amount_at(block.full.elements, 1) == 0


def test_a_hidden_state_that_nobody_saves_is_not_kept() -> None:
    profile = zoo_profile("llama3_8b")

    assert all(not tensor.saved_by for tensor in profile.tensors)  # norms upcast it first, and save that


@pytest.mark.slow
def test_experts_are_found_by_their_stacked_weights() -> None:
    profile = zoo_profile("mixtral_8x7b")
    block = profile.classes[profile.layers[1].layer_class]

    assert [(e.count, amount_at(e.routed, 3)) for e in block.experts] == [(8, 3 * 2 * profile.tokens_per_sample)]
    assert set(block.experts[0].parameters) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def test_a_batch_norm_over_one_value_asks_for_two_samples() -> None:
    profile = _of_module(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), 4)

    assert profile.smallest_micro_batch == 2


def test_dropout_keeps_a_byte_per_element() -> None:
    with_dropout = _of_module(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)), 64)
    without = _of_module(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.0)), 64)

    def saved(profile: ModelProfile) -> float:
        return sum(layer_class.whole.saved.at(1, 2) for layer_class in profile.classes)

    assert saved(with_dropout) - saved(without) == 64


@pytest.mark.slow
def test_operators_name_the_dims_they_run_over() -> None:
    profile = _gpt_of_any_length()
    block = profile.layers[1].layer_class
    operators = profile.classes[block].whole.operators

    found = {(op.module, op.part): dimensions(profile, block, i) for i, op in enumerate(operators) if op.flops[1]}

    assert found["attention.qkv", "forward"] == {"batch": 1, "sequence": 1, "heads": 1}
    assert found["attention", "forward"] == {"batch": 1, "sequence": 2, "heads": 1}
    assert found["up", "backward_weight"] == {"batch": 1, "sequence": 1, "hidden": 1}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class _WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(_Square.apply(self.a(x)))


def test_a_custom_autograd_function_is_one_operation() -> None:
    profile = _of_module(_WithFunction(), 8)

    assert [t.producer.name for t in profile.tensors] == ["_Square"]
    assert profile.tensors[0].requires_grad
    assert sum(c.whole.saved.at(1, 2) for c in profile.classes[:1]) == 2 * 8  # what the function keeps


class _Careless(nn.Module):
    def __init__(self, deed: str) -> None:
        super().__init__()
        self.fc, self.deed = nn.Linear(8, 8), deed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.deed == "moves":
            x = x.cuda()
        if self.deed == "writes":
            with torch.no_grad():
                self.fc.weight.mul_(0.9)
        return self.fc(x)


def test_a_module_that_moves_itself_to_a_gpu_is_told_to_leave_that() -> None:
    with pytest.raises(ValueError, match=r"moves tensors to a GPU itself .*test_trace.py:\d+.* leave out .cuda"):
        _of_module(_Careless("moves"), 8)


def test_a_forward_that_writes_into_a_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"writes into the parameter fc\.weight"):
        _of_module(_Careless("writes"), 8)


def test_a_sequence_beyond_the_table_of_positions_is_refused_with_the_numbers() -> None:
    loaded = load_model("benchmarks/models/gpt.py")

    with pytest.raises(
        ValueError, match=r"reads row 1535 of positions.weight, which has 1024 rows: give --seq-len 1024"
    ):
        trace(loaded, seq_len=1536)


@pytest.mark.slow
def test_a_profile_is_not_stretched_beyond_the_table_of_positions() -> None:
    profile = _gpt_of_any_length()

    assert at_seq_len(profile, 1024).seq_len == 1024
    with pytest.raises(ValueError, match="--seq-len 1025, but the table of positions of gpt ends at 1024"):
        at_seq_len(profile, 1025)


def test_positions_that_begin_later_are_followed() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(32, 8), nn.Embedding(66, 8)
            self.head = nn.Linear(8, 32)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            positions = torch.ones(tokens.shape[1], dtype=torch.long).cumsum(0) + 1
            result: torch.Tensor = self.head(self.tokens(tokens) + self.positions(positions))
            return result

    def batch(size: int, seq_len: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(size, seq_len, dtype=torch.long), torch.zeros(size, seq_len, dtype=torch.long)

    loaded = load_model(
        Shifted, batch=batch, loss=lambda o, b: functional.cross_entropy(o.flatten(0, 1), b[1].flatten())
    )

    assert trace(loaded).longest_seq_len == 64


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (
            ["y = self.a(x)", "y = torch.sigmoid(y) if x.shape[0] > 1 else y", "return self.c(self.b(y) + y)"],
            r"sigmoid of .* makes \[2, 8\] of two samples.* and is not called for one",
        ),
        (
            ["y = [self.a(each) for each in x]", "return self.c(self.b(x) + torch.stack(y))"],
            r"a of .* makes 1 tensor.s. of one sample, and 2 of two: it is called for each by itself",
        ),
    ],
)
def test_what_is_made_of_two_samples_only_is_told(forward: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)\n"
        "    def forward(self, x):\n" + "".join(f"        {line}\n" for line in forward) + "model = Net\n"
        "def batch(size): return torch.randn(size, 8), torch.randint(4, (size,))\n"
        "def loss(output, batch): return nn.functional.cross_entropy(output, batch[1])\n"
    )

    with pytest.raises(ValueError, match=words):
        trace(load_model(tmp_path / "some.py"))


@pytest.mark.slow
def test_a_pair_of_cut_matrices_may_be_in_the_last_layer(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)\n"
        "    def forward(self, x): return x + self.down(torch.relu(self.up(x)))\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = nn.Embedding(64, 16)\n"
        "        self.blocks = nn.ModuleList(Block() for _ in range(3))\n"
        "        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 64)\n"
        "    def forward(self, x):\n"
        "        x = self.embed(x)\n"
        "        for block in self.blocks: x = block(x)\n"
        "        return self.down(torch.relu(self.up(x)))\n"
        "model = Net\n"
        "def batch(size, seq_len=8):\n"
        "    x = torch.randint(64, (size, seq_len + 1))\n"
        "    return x[:, :-1], x[:, 1:]\n"
        "def loss(output, batch): return output.square().mean()\n"
    )

    profile = trace(load_model(tmp_path / "some.py"))

    last = profile.classes[profile.layers[-1].layer_class]
    assert last.cuts
    assert last.cuts[0].rows
    assert last.sequence is None
