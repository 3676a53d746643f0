"""Hugging Face models of recordings in text: each way to hand them over, run for real on the smallest of models."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import hub_models, slow  # noqa: E402
from support.hub_models import NARROW  # noqa: E402

WRITING = {**hub_models.TEXT, "max_position_embeddings": 1024}
HEARING = {**NARROW, "num_mel_bins": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "VoxtralForConditionalGeneration": {
        "model_type": "voxtral",
        "audio_token_id": 90,
        "hidden_size": 32,
        "audio_config": {**HEARING, "intermediate_size": 128, "max_source_positions": 40},
        "text_config": {**WRITING, "model_type": "llama"},
    },
    "AudioFlamingo3ForConditionalGeneration": {
        "model_type": "audioflamingo3",
        "audio_token_id": 90,
        "audio_config": {**HEARING, "max_source_positions": 40},
        "text_config": {**WRITING, "model_type": "qwen2"},
    },
    "GlmAsrForConditionalGeneration": {
        "model_type": "glmasr",
        "audio_token_id": 90,
        "audio_config": {**HEARING, "intermediate_size": 128, "num_key_value_heads": 2},
        "text_config": {**WRITING, "model_type": "llama"},
    },
    "Qwen3ASRForConditionalGeneration": {
        "model_type": "qwen3_asr",
        "audio_token_id": 90,
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": 32,
            "downsample_hidden_size": 8,
        },
        "text_config": {**WRITING, "model_type": "qwen3"},
    },
    "Qwen2AudioForConditionalGeneration": {
        "model_type": "qwen2_audio",
        "audio_token_index": 90,
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "max_source_positions": 40,
        },
        "text_config": {**WRITING, "model_type": "qwen2"},
    },
    "GraniteSpeechForConditionalGeneration": {
        "model_type": "granite_speech",
        "audio_token_index": 90,
        "has_lora_adapter": False,
        "encoder_config": {"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "dim_head": 16},
        "projector_config": {**NARROW, "encoder_hidden_size": 32},
        "text_config": {**WRITING, "model_type": "granite"},
    },
    "FunAsrNanoForConditionalGeneration": {
        "model_type": "fun_asr_nano",
        "audio_token_id": 90,
        "adaptor_config": {**NARROW, "intermediate_size": 8, "projector_hidden_size": 32},
        "audio_config": {**HEARING, "num_stacked_frames": 2, "num_timestamp_prediction_layers": 1},
        "text_config": {**WRITING, "max_position_embeddings": 2048, "model_type": "qwen3"},
    },
}


@pytest.mark.parametrize("architecture", slow.but_first(list(CONFIGS), 2))
def test_a_recording_trains_what_hears_it(architecture: str, tmp_path: Path) -> None:
    loaded = hub_models.loaded_from(tmp_path, CONFIGS[architecture], architecture)

    module, batch, kwargs = hub_models.trained_once(loaded)

    assert isinstance(batch, dict)
    assert kwargs.keys() == batch.keys()
    tokens = int((batch["input_ids"][0] == 90).sum())
    assert any(f"s in each sample, which takes {tokens} tokens" in said for said in loaded.assumes)
    trained = hub_models.with_gradients(module)
    assert any("audio" in name or "encoder" in name for name in trained)


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        (100, "token 100 marks recordings, and its vocabulary of 100 has no embedding for it"),
        (None, 'its configuration has no "audio_token_id", the token that stands in the text in the places of one'),
    ],
)
def test_a_mark_that_no_embedding_has_or_nobody_says_leaves_text_alone(
    mark: int | None, said: str, tmp_path: Path
) -> None:
    config = {**CONFIGS["VoxtralForConditionalGeneration"], "audio_token_id": mark}

    loaded = hub_models.loaded_from(tmp_path, config, "VoxtralForConditionalGeneration")

    assert loaded.assumes == (f"samples without input_features, which its forward would take: {said}",)
