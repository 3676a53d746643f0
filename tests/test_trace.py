"""What a profile says equals what can be derived by hand."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo import zoo_profile

from meshwright.profiler.load import load_model
from meshwright.profiler.model_profile import ModelProfile, amount_at, load_profile
from meshwright.profiler.trace import trace


def _of_module(module: nn.Module, *shape: int) -> ModelProfile:
    loaded = load_model(
        module, batch=lambda size: (torch.ones(size, *shape),), loss=lambda output, batch: output.float().sum()
    )
    return trace(loaded)


def _block_flops(profile: ModelProfile, part: str = "forward") -> float:
    """FLOPs of the second layer, a transformer block, for one sample."""
    costs = profile.classes[profile.layers[1].layer_class].whole
    return sum(amount_at(op.flops, 1) for op in costs.operators if (op.part == "forward") == (part == "forward"))


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


@pytest.mark.parametrize(("name", "billions"), [("llama3_8b", 8.030261248), ("llama31_405b", 405.8533888)])
def test_parameters_add_up(name: str, billions: float) -> None:
    assert zoo_profile(name).num_parameters == round(billions * 1e9)


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


def test_encoder_output_crosses_the_decoder() -> None:
    profile = zoo_profile("t5_small")
    encoder_output = next(t for t in profile.tensors if t.made_by == 7 and t.last_used_by > 8)

    assert encoder_output.last_used_by == 13
    assert profile.num_parameters == 60_506_624
    assert profile.returns_loss


@pytest.mark.parametrize("name", ["gpt2", "bert_large"])
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


class _Odd(nn.Module):
    """A root parameter read by glue, one that nothing reads, and a tensor kept aside."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(8))
        self.unused = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return x


def test_every_parameter_has_a_layer() -> None:
    profile = _of_module(_Odd(), 8)

    assert "position" in profile.layers[0].parameters
    assert "unused" in profile.layers[-1].parameters
    assert any("never used" in note and "unused" in note for note in profile.notes)
    assert profile.num_parameters == 8 + 3 + 3 * 72


class _Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


def test_decisions_by_value_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="decides by the values of its tensors"):
        _of_module(_Decides(), 8)


def test_a_batch_of_the_wrong_shape_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="does not run with its own micro-batch"):
        _of_module(nn.Linear(8, 8), 5)


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


def test_layers_may_change_their_input_in_place() -> None:
    loaded = load_model(_InPlace(), batch=lambda size: (torch.randn(size, 8),), loss=lambda out, batch: out.sum())

    assert [len(trace(loaded).layers), trace(loaded).num_parameters] == [4, 4 * 72]


def test_classes_of_one_module_type_have_names_of_their_own() -> None:
    names = [c.name for c in zoo_profile("t5_small").classes]

    assert len(set(names)) == len(names)
    assert "T5Block" in names
    assert "T5Block.2" in names
