"""Every model of benchmarks/models has its published size, runs for real when small, and is profiled whole."""

import json
import runpy
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.accuracy.cases import whole
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel, split_inputs
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.zoo import MODELS, zoo_profile

PARAMETERS = {
    "albert_xlarge": 54_821_040,
    "bert_large": 335_174_458,
    "convnext_base": 88_591_464,
    "deepseek_v3": 671_026_419_200 - 58 * 256,  # the report counts the router's biases, which are buffers here
    "dit_xl2.py": 675_129_632 - 256 * 1152,  # the paper's code counts the fixed positions, which are a buffer here
    "dlrm.py": 24_036_595_969,
    "early_exit.py": 40_934_440,
    "gpt.py": 124_439_808,
    "gpt2": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "gpt3_175b": 174_604_259_328,
    "llama31_405b": 405_853_388_800,
    "llama3_70b": 70_553_706_496,
    "llama3_8b": 8_030_261_248,
    "lstm.py": 66_034_000,
    "mamba2.py": 2_702_599_680,
    "mixtral_8x7b": 46_702_792_704,
    "mlp.py": 25_191_440,
    "qwen3_30b_a3b": 30_532_122_624,
    "resnet50.py": 25_557_032,
    "t5_3b": 2_851_598_336,
    "t5_small": 60_506_624,
    "unet.py": 7_788_675,
    "vit_large": 304_326_632,
    "whisper_large_v3": 1_543_490_560,
}

QUICK = {"gpt.py", "gpt2", "lstm.py", "mlp.py"}
"""Small ones of most kinds; the others are built and profiled by `pytest -m slow`."""

EACH = slow.but_these(PARAMETERS, QUICK)
FILES = [name for name in PARAMETERS if name.endswith(".py")]


@cache
def _on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return whole(MODELS / name).build()


def _layers(profile: ModelProfile) -> list[tuple[str, int]]:
    """(layer class, how many layers in a row are of it) along the chain."""
    runs: list[tuple[str, int]] = []
    for layer in profile.layers:
        name = profile.classes[layer.layer_class].name
        count = runs.pop()[1] if runs and runs[-1][0] == name else 0
        runs.append((name, count + 1))
    return runs


def _real_loss(loaded: LoadedModel, size: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = loaded.build().float()
    batch = loaded.batch(size)
    args, kwargs = split_inputs(module, batch, loaded.loss is not None)
    output = module(*args, **kwargs)
    return module, output.loss if loaded.loss is None else loaded.loss(output, batch)


def _small(name: str) -> LoadedModel:
    small = load_model(MODELS / name).small
    assert small is not None
    return small()


def test_every_model_of_the_folder_is_in_the_table() -> None:
    files = {path.name for path in MODELS.glob("*.py") if "def small(" in path.read_text()}

    assert files | {path.parent.name for path in MODELS.glob("*/config.json")} == set(PARAMETERS)


@pytest.mark.parametrize("name", EACH)
def test_module_has_the_published_number_of_parameters(name: str) -> None:
    assert sum(p.numel() for p in _on_meta(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", EACH)
def test_profile_counts_the_parameters_of_the_module(name: str) -> None:
    assert zoo_profile(name).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", EACH)
def test_profile_holds_each_parameter_by_name_and_shape(name: str) -> None:
    profile = zoo_profile(name)
    held = {}
    for layer in profile.layers:
        prefix = f"{layer.root}." if layer.root else ""
        by_name = {f"{prefix}{p.name}": p for p in profile.classes[layer.layer_class].parameters}
        held.update({full: (by_name[full].shape, by_name[full].trainable) for full in layer.parameters})

    held.update({full: held[next(n for n in tie if n in held)] for tie in profile.ties for full in tie})
    real = _on_meta(name).named_parameters(remove_duplicate=False)
    assert held == {full: (tuple(p.shape), p.requires_grad) for full, p in real}


@pytest.mark.parametrize("name", EACH)
def test_profile_ties_what_the_module_ties(name: str) -> None:
    names = defaultdict(set)
    for full, parameter in _on_meta(name).named_parameters(remove_duplicate=False):
        names[id(parameter)].add(full)

    assert {frozenset(tie) for tie in zoo_profile(name).ties} == {frozenset(n) for n in names.values() if len(n) > 1}


@pytest.mark.parametrize("name", FILES)
def test_small_version_trains(name: str) -> None:
    module, loss = _real_loss(_small(name), 4)
    loss.backward()

    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "giga_flops"),
    [
        pytest.param("resnet50.py", 2 * 4.09, marks=pytest.mark.slow),  # torchvision
        pytest.param("vit_large", 2 * 61.6, marks=pytest.mark.slow),  # timm, vit_large_patch16_224
        pytest.param("dit_xl2.py", 2 * 118.6, marks=pytest.mark.slow),  # the paper, table 4
        pytest.param("dlrm.py", 2 * 2.36e-3, marks=pytest.mark.slow),  # the widths of its two towers, multiplied
        ("lstm.py", 2 * 35 * (4 * 2 * 2 * 1500**2 + 1500 * 10_000) / 1e9),
    ],
)
def test_flops_are_three_times_those_of_a_published_forward(name: str, giga_flops: float) -> None:
    assert zoo_profile(name).flops_per_sample() / 3e9 == pytest.approx(giga_flops, rel=0.05)


@pytest.mark.parametrize(
    ("name", "first", "block", "count"),
    [
        ("llama3_8b", "Embedding", "LlamaDecoderLayer", 32),
        pytest.param("mixtral_8x7b", "Embedding", "MixtralDecoderLayer", 32, marks=pytest.mark.slow),
        pytest.param("qwen3_30b_a3b", "Embedding", "Qwen3MoeDecoderLayer", 48, marks=pytest.mark.slow),
        pytest.param("bert_large", "BertEmbeddings", "BertLayer", 24, marks=pytest.mark.slow),
        pytest.param("vit_large", "ViTEmbeddings", "ViTLayer", 24, marks=pytest.mark.slow),
        ("gpt2", "embedding", "GPT2Block", 12),
        pytest.param("mamba2.py", "Embedding", "Block", 64, marks=pytest.mark.slow),
    ],
)
def test_transformer_is_an_embedding_equal_blocks_and_a_head(name: str, first: str, block: str, count: int) -> None:
    layers = _layers(zoo_profile(name))

    assert layers[:2] == [(first, 1), (block, count)]
    assert len(layers) == 3


@pytest.mark.slow
def test_first_three_blocks_of_deepseek_are_dense() -> None:
    profile = zoo_profile("deepseek_v3")

    assert [count for _, count in _layers(profile)] == [1, 3, 58, 1]
    assert [bool(c.experts) for c in profile.classes] == [False, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "routed"), [("mixtral_8x7b", 8, 2 * 8192), ("qwen3_30b_a3b", 128, 8 * 8192)])
def test_experts_are_found_with_the_tokens_that_reach_them(name: str, count: int, routed: int) -> None:
    (experts,) = (e for c in zoo_profile(name).classes for e in c.experts)

    assert (experts.count, experts.routed[1]) == (count, routed)


@pytest.mark.slow
def test_first_blocks_of_t5_differ_by_their_position_bias() -> None:
    profile = zoo_profile("t5_small")
    layers = {layer.name: layer for layer in profile.layers}

    for stack in ("encoder", "decoder"):
        classes = [layers[f"{stack}.block.{i}"].layer_class for i in range(6)]
        assert classes[0] not in classes[1:]
        assert len(set(classes[1:5])) == 1


@pytest.mark.slow
def test_whisper_decodes_after_it_has_encoded() -> None:
    profile = zoo_profile("whisper_large_v3")

    blocks = [run for run in _layers(profile) if run[1] > 1]
    assert blocks == [("WhisperEncoderLayer", 32), ("WhisperDecoderLayer", 32)]


@pytest.mark.slow
def test_stages_of_resnet_are_opened_into_blocks() -> None:
    profile = zoo_profile("resnet50.py")

    stages = Counter(layer.name.partition(".")[0] for layer in profile.layers[1:-1])
    assert stages == {"layer1": 3, "layer2": 4, "layer3": 6, "layer4": 3}
    assert (profile.layers[0].name, profile.layers[-1].name) == ("conv1+bn1", "head")


@pytest.mark.slow
def test_stages_of_convnext_are_opened_into_blocks() -> None:
    names = [layer.name for layer in zoo_profile("convnext_base").layers]

    assert [sum(f".stages.{i}.layers." in name for name in names) for i in range(4)] == [3, 3, 27, 3]
    assert [sum(f".stages.{i}.downsampling" in name for name in names) for i in range(4)] == [0, 1, 1, 1]


def test_linear_layers_of_the_tutorial_are_layers() -> None:
    assert [layer.name for layer in zoo_profile("mlp.py").layers] == ["fc1", "fc2", "fc3", "fc4"]


def test_lstm_is_a_layer_between_embedding_and_head() -> None:
    assert [layer.name for layer in zoo_profile("lstm.py").layers] == ["tokens", "lstm", "head"]


@pytest.mark.slow
def test_each_table_of_the_recommender_is_a_layer() -> None:
    names = [layer.name for layer in zoo_profile("dlrm.py").layers]

    assert [name for name in names if name.startswith("tables.")] == [f"tables.{i}" for i in range(26)]


def test_branch_on_numbers_is_told() -> None:
    profile = zoo_profile("early_exit.py")

    assert "early_exit.py" in profile.decides_by_values
    assert [layer.name for layer in profile.layers if layer.name.startswith("second.")]


def test_sure_classifier_exits_early() -> None:
    unsure = _small("early_exit.py")
    module = unsure.build()
    tokens, _ = unsure.batch(2)
    taken = len(module(tokens))
    module.sure = 0.0

    assert (taken, len(module(tokens))) == (2, 1)


@pytest.mark.parametrize("chunk", [4, 12, 24, 256])
def test_scan_in_chunks_is_the_recurrence(chunk: int) -> None:
    scan = runpy.run_path(str(MODELS / "mamba2.py"))["scan"]
    x, decay = torch.randn(2, 24, 3, 4).double(), -torch.rand(2, 24, 3).double()
    write, read = torch.randn(2, 2, 24, 5).double()
    state = torch.zeros(2, 3, 4, 5).double()
    expected = []
    for t in range(24):
        state = state * decay[:, t].exp()[..., None, None] + x[:, t].unsqueeze(-1) * write[:, t, None, None]
        expected.append((state * read[:, t, None, None]).sum(-1))

    torch.testing.assert_close(scan(x, decay, write, read, chunk), torch.stack(expected, dim=1))


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}

TINY_WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 12,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
}

HEADS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "WhisperForConditionalGeneration": (TINY_WHISPER, {"input_features": (3, 8, 40), "labels": (3, 12)}),
    "BertForMaskedLM": ({"model_type": "bert", **TINY}, {"input_ids": (3, 32), "labels": (3, 32)}),
    "BertForTokenClassification": ({"model_type": "bert", **TINY}, {"input_ids": (3, 32), "labels": (3, 32)}),
    "BertForSequenceClassification": ({"model_type": "bert", **TINY}, {"input_ids": (3, 32), "labels": (3,)}),
    "LlamaForCausalLM": ({"model_type": "llama", **TINY}, {"input_ids": (3, 32), "labels": (3, 32)}),
    "ViTForImageClassification": (
        {"model_type": "vit", **TINY, "image_size": 16, "patch_size": 8},
        {"pixel_values": (3, 3, 16, 16), "labels": (3,)},
    ),
}


def _of_config(folder: Path, config: dict[str, Any]) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)


@pytest.mark.parametrize("architecture", HEADS)
def test_head_of_a_config_gets_the_batch_it_takes(architecture: str, tmp_path: Path) -> None:
    config, shapes = HEADS[architecture]
    loaded = _of_config(tmp_path, {**config, "architectures": [architecture]})

    assert {name: tuple(tensor.shape) for name, tensor in loaded.batch(3).items()} == shapes
    assert _real_loss(loaded, 3)[1].isfinite()


@pytest.mark.parametrize(
    ("architecture", "by_default"),
    [
        ("WhisperForConditionalGeneration", "WhisperForConditionalGeneration"),
        ("BertForTokenClassification", "BertForMaskedLM"),
        ("LlamaForCausalLM", "LlamaForCausalLM"),
        ("ViTForImageClassification", "ViTForImageClassification"),
    ],
)
def test_config_without_an_architecture_gets_the_usual_one(architecture: str, by_default: str, tmp_path: Path) -> None:
    loaded = _of_config(tmp_path, HEADS[architecture][0])

    with torch.device("meta"):
        assert type(loaded.build()).__name__ == by_default


def test_head_without_a_known_loss_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "bert", **TINY, "architectures": ["BertForNextSentencePrediction"]}

    with pytest.raises(ValueError, match=r'"BertForNextSentencePrediction", whose batches are not known here'):
        _of_config(tmp_path, config)
