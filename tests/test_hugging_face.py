"""Models from a config.json: micro-batches that their heads take, and ids of models in the Hugging Face cache."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from meshwright.profiler.model.load import load_model  # noqa: E402
from meshwright.profiler.model.loaded import LoadedModel  # noqa: E402
from meshwright.profiler.model.trace import trace  # noqa: E402
from support import hub_models, slow  # noqa: E402
from support.cli import run_plan  # noqa: E402
from support.hub_models import NARROW  # noqa: E402

TEXT = {**NARROW, "vocab_size": 100, "max_position_embeddings": 24}
SIGHT = {**NARROW, "image_size": 28, "patch_size": 14}

CONFIGS: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "image_seq_length": 4,
        "image_token_id": 90,
        "vision_config": {**SIGHT, "model_type": "clip_vision_model"},
        "text_config": {**TEXT, "model_type": "llama", "num_key_value_heads": 2},
    },
    "CLIPModel": {
        "model_type": "clip",
        "projection_dim": 16,
        "text_config": {**TEXT, "eos_token_id": 99, "bos_token_id": 98},
        "vision_config": SIGHT,
    },
    "Wav2Vec2ForCTC": {
        "model_type": "wav2vec2",
        **NARROW,
        "vocab_size": 32,
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "layerdrop": 0.1,
    },
    "SamModel": {
        "model_type": "sam",
        "vision_config": {
            **NARROW,
            "mlp_dim": 64,
            "output_channels": 32,
            "num_pos_feats": 16,
            "image_size": 32,
            "patch_size": 4,
            "window_size": 4,
            "global_attn_indexes": [1],
        },
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "patch_size": 4, "mask_input_channels": 4},
        "mask_decoder_config": {**NARROW, "mlp_dim": 64, "iou_head_hidden_dim": 32},
    },
    "MiniCPMV4_7ForConditionalGeneration": {
        "model_type": "minicpmv4_7",
        "image_token_id": 90,
        "image_start_id": 91,
        "image_end_id": 92,
        "image_size": 56,
        "insert_layer_id": 0,
        "vision_config": {**NARROW, "image_size": 28, "patch_size": 7},
        "text_config": {
            **TEXT,
            "model_type": "qwen3_5_text",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "layer_types": ["full_attention", "full_attention"],
        },
    },
    "Qwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "image_token_id": 90,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
        "text_config": {
            **TEXT,
            "num_key_value_heads": 2,
            "max_position_embeddings": 320,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
    },
    "LlavaNextForConditionalGeneration": {
        "model_type": "llava_next",
        "image_token_index": 90,
        "image_grid_pinpoints": [[28, 56], [56, 28]],
        "vision_feature_layer": -1,
        "vision_config": {**SIGHT, "model_type": "clip_vision_model"},
        "text_config": {**TEXT, "model_type": "llama", "num_key_value_heads": 2},
    },
    "Idefics3ForConditionalGeneration": {
        "model_type": "idefics3",
        "image_token_id": 90,
        "pad_token_id": 0,
        "vision_config": {**NARROW, "image_size": 32, "patch_size": 8},
        "text_config": {**TEXT, "model_type": "llama", "num_key_value_heads": 2},
    },
    "InstructBlipVideoForConditionalGeneration": {
        "model_type": "instructblipvideo",
        "video_token_index": 90,
        "num_query_tokens": 4,
        "vision_config": SIGHT,
        "qformer_config": {**NARROW, "vocab_size": 50, "encoder_hidden_size": 32, "max_position_embeddings": 64},
        "text_config": {**TEXT, "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
    },
    "Kosmos2_5ForConditionalGeneration": {
        "model_type": "kosmos-2.5",
        "latent_query_num": 8,
        "vision_config": {
            **NARROW,
            "hidden_size": 32,
            "head_dim": 16,
            "patch_embed_hidden_size": 48,
            "max_num_patches": 16,
        },
        "text_config": {
            "vocab_size": 100,
            "max_position_embeddings": 40,
            "embed_dim": 32,
            "layers": 2,
            "ffn_dim": 64,
            "attention_heads": 2,
        },
    },
    "VisionEncoderDecoderModel": {
        "model_type": "vision-encoder-decoder",
        "encoder": {**SIGHT, "model_type": "vit"},
        "decoder": {**TEXT, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "EncoderDecoderModel": {
        "model_type": "encoder-decoder",
        "encoder": {**TEXT, "model_type": "bert"},
        "decoder": {**TEXT, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "MusicgenForCausalLM": {
        "model_type": "musicgen",
        "decoder": {
            **NARROW,
            "model_type": "musicgen_decoder",
            "vocab_size": 64,
            "max_position_embeddings": 24,
            "ffn_dim": 64,
            "num_codebooks": 2,
            "pad_token_id": 64,
            "bos_token_id": 64,
        },
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
    },
}


def written(folder: Path, architecture: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIGS[architecture], "architectures": [architecture]}))
    return path


@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")  # of every composed model that is given labels
@pytest.mark.parametrize("architecture", slow.but_first(CONFIGS, 0))
def test_a_config_brings_micro_batches_that_its_head_takes(architecture: str, tmp_path: Path) -> None:
    loaded = load_model(written(tmp_path, architecture))

    profile = trace(loaded)

    module, _, _ = hub_models.trained_once(loaded)
    trained = hub_models.with_gradients(module)
    assert trained  # what stays without a gradient is a vision tower's last norm, which its features leave out
    assert profile.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    assert profile.decides_by_values == ""
    assert any("layerdrop=0" in note for note in profile.notes) == (architecture == "Wav2Vec2ForCTC")
    assert bool(profile.coupling) == (architecture == "CLIPModel")


TRAINED_ONCE: dict[str, dict[str, Any]] = {
    "RobertaForMaskedLM": {**TEXT, "model_type": "roberta", "pad_token_id": 1},
    "Siglip2Model": {
        "model_type": "siglip2",
        "text_config": {**TEXT, "eos_token_id": 99, "bos_token_id": 98},
        "vision_config": {**NARROW, "patch_size": 4, "num_patches": 16},
    },
}


@pytest.mark.parametrize("architecture", TRAINED_ONCE)
def test_micro_batches_fit_positions_behind_padding_and_pictures_in_patches(architecture: str, tmp_path: Path) -> None:
    loaded = hub_models.loaded_from(tmp_path, TRAINED_ONCE[architecture], architecture)

    module, _, _ = hub_models.trained_once(loaded)

    assert hub_models.with_gradients(module)


MISTRAL = """
import torch, transformers

def model():
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, max_position_embeddings=64, attn_implementation="sdpa",
    )
    return transformers.MistralForCausalLM(config)

def batch(size, seq_len=24):
    tokens = torch.randint(64, (size, seq_len))
    return {"input_ids": tokens, "labels": tokens}
"""


def _loaded(kind: str, architecture: str, folder: Path) -> LoadedModel:
    config = transformers.CONFIG_MAPPING[kind]()
    return hub_models.loaded_from(folder, {**config.to_dict(), "model_type": kind}, architecture)


def test_recordings_that_a_forward_would_take_beside_text_are_said_to_be_left_out(tmp_path: Path) -> None:
    loaded = _loaded("voxtral", "VoxtralForConditionalGeneration", tmp_path)

    (assumed,) = loaded.assumes
    assert assumed.startswith("samples without input_features, which its forward would take: its configuration has no")


def test_a_decoder_without_a_token_to_begin_by_is_given_what_it_reads(tmp_path: Path) -> None:
    loaded = _loaded("t5", "T5ForConditionalGeneration", tmp_path)

    assert loaded.batch(2).keys() == {"input_ids", "labels", "decoder_input_ids"}


@pytest.mark.parametrize(
    ("kind", "architecture", "shape"),
    [
        ("whisper", "WhisperForConditionalGeneration", (2, 80, 3000)),
        ("speech_to_text", "Speech2TextForConditionalGeneration", (2, 1000, 80)),
        ("canary", "CanaryForConditionalGeneration", (2, 1000, 128)),
    ],
)
def test_spectrograms_are_of_the_form_that_their_encoder_takes(
    kind: str, architecture: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    batch: dict[str, Any] = _loaded(kind, architecture, tmp_path).batch(2)

    assert batch["input_features"].shape == shape


def test_a_configuration_that_does_not_run_is_to_be_mended_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {**TEXT, "model_type": "llama", "num_key_value_heads": 3, "architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps(config))

    with pytest.raises(
        ValueError, match=r"sdpa_attention\.py:\d+\)\. Make the numbers of the configuration fit together"
    ):
        trace(load_model(path))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_window_whose_mask_is_made_otherwise_for_one_sample_trains_in_stages(
    micro_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistral.py").write_text(MISTRAL)
    monkeypatch.chdir(tmp_path)

    words = ["--gpus", "2", "--device", "cpu", "-b", "8", "--pin", "pipeline=2", "--pin", f"micro_batch={micro_batch}"]
    assert run_plan("mistral.py", *words, "-q") == 0

    assert run_plan("verify", "plan.json") == 0


def test_a_model_of_the_hugging_face_cache_is_named_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    hub = tmp_path / "hub" / "models--someone--tiny-llama"
    snapshot = hub / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    config = {**TEXT, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (snapshot / "config.json").write_text(json.dumps(config))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    assert run_plan("someone/tiny-llama", "--gpus", "2", "--device", "h100-80gb", "-o", "plan.json", "-q") == 0
    assert json.loads((tmp_path / "plan.json").read_text())["model"]["source"] == "someone/tiny-llama"
    assert load_model("someone/tiny-llama").name == "tiny-llama"

    assert run_plan("someone/other", "--gpus", "2", "--device", "h100-80gb") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "nor is someone/other in the Hugging Face cache" in told
    assert "hf download someone/other" in told
