"""Hugging Face models of pictures and of speech: each way to hand them over, run for real on the smallest of models."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from meshwright.profiler.model.load import load_model  # noqa: E402
from meshwright.profiler.model.loaded import LoadedModel  # noqa: E402
from support import hub_models, slow  # noqa: E402
from support.hub_models import NARROW, TEXT  # noqa: E402

SIGHT = {**NARROW, "image_size": 28, "patch_size": 14}
PATCHES = {**NARROW, "patch_size": 2}
VQ = {"embed_dim": 4, "latent_channels": 4, "base_channels": 32, "num_res_blocks": 1}
SPEECH_TOWER = {**NARROW, "num_mel_bins": 16, "vocab_size": 30, "subsampling_conv_channels": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "BlipForConditionalGeneration": {
        "model_type": "blip",
        "vision_config": SIGHT,
        "text_config": {
            **NARROW,
            "vocab_size": 100,
            "max_position_embeddings": 24,
            "encoder_hidden_size": 32,
            "bos_token_id": 1,
            "sep_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    },
    "Kosmos2ForConditionalGeneration": {
        "model_type": "kosmos-2",
        "latent_query_num": 4,
        "vision_config": SIGHT,
        "text_config": {
            "vocab_size": 100,
            "max_position_embeddings": 64,
            "embed_dim": 32,
            "layers": 2,
            "ffn_dim": 64,
            "attention_heads": 2,
        },
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral3",
        "image_token_index": 90,
        "spatial_merge_size": 2,
        "vision_config": {**PATCHES, "image_size": 64, "head_dim": 16, "model_type": "pixtral"},
        "text_config": {**TEXT, "model_type": "mistral"},
    },
    "MllamaForConditionalGeneration": {
        "model_type": "mllama",
        "image_token_index": 100,
        "vision_config": {
            **SIGHT,
            "num_global_layers": 1,
            "attention_heads": 2,
            "max_num_tiles": 2,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        "text_config": {**TEXT, "cross_attention_layers": [1]},
    },
    "MoonshineForConditionalGeneration": {
        "model_type": "moonshine",
        **NARROW,
        "encoder_num_hidden_layers": 1,
        "decoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 2,
        "decoder_num_attention_heads": 2,
        "vocab_size": 100,
    },
    "PaliGemmaForConditionalGeneration": {
        "model_type": "paligemma",
        "image_token_index": 90,
        "projection_dim": 32,
        "hidden_size": 32,
        "vision_config": {**SIGHT, "projection_dim": 32, "model_type": "siglip_vision_model"},
        "text_config": {**TEXT, "model_type": "gemma"},
    },
    "LlavaOnevisionForConditionalGeneration": {
        "model_type": "llava_onevision",
        "image_token_id": 90,
        "video_token_id": 91,
        "image_grid_pinpoints": [[28, 28], [28, 56]],
        "vision_feature_layer": -1,
        "vision_config": {**SIGHT, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": {**TEXT, "model_type": "qwen2"},
    },
    "Exaone4_5_ForConditionalGeneration": {
        "model_type": "exaone4_5",
        "image_token_id": 90,
        "video_token_id": 91,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_key_value_heads": 2,
            "patch_size": 2,
            "window_size": 8,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        "text_config": {**TEXT, "model_type": "exaone4", "layer_types": ["full_attention"] * 2},
    },
    "Kimi_K25ForConditionalGeneration": {
        "model_type": "kimi_k25",
        "image_token_id": 90,
        "video_token_id": 91,
        "projection_hidden_size": 32,
        "vision_config": {**PATCHES, "pos_emb_height": 8, "pos_emb_width": 8},
        "text_config": {**TEXT, "model_type": "llama"},
    },
    "VideoLlama3ForConditionalGeneration": {
        "model_type": "video_llama_3",
        "image_token_id": 90,
        "video_token_id": 91,
        "vision_config": PATCHES,
        "text_config": {**TEXT, "model_type": "qwen2"},
    },
    "Inkling2ForConditionalGeneration": {
        "model_type": "inkling2",
        "image_token_id": 90,
        "vision_config": {**PATCHES, "text_hidden_size": 32, "projection_hidden_dim": 32},
        "text_config": {**TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": 100},
    },
    "MiniCPMV4_6ForConditionalGeneration": {
        "model_type": "minicpmv4_6",
        "image_token_id": 90,
        "image_start_id": 91,
        "image_end_id": 92,
        "image_size": 56,
        "insert_layer_id": 0,
        "vision_config": {**NARROW, "image_size": 28, "patch_size": 7},
        "text_config": {**TEXT, "model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 2},
    },
    "Molmo2ForConditionalGeneration": {
        "model_type": "molmo2",
        "image_patch_id": 90,
        "vision_config": {
            **NARROW,
            "image_size": [30, 30],
            "patch_size": 10,
            "head_dim": 16,
            "num_key_value_heads": 2,
        },
        "adapter_config": {
            "hidden_size": 32,
            "text_hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vision_feature_layer": [0, 1],
        },
        "text_config": TEXT,
    },
    "Lfm2VlForConditionalGeneration": {
        "model_type": "lfm2_vl",
        "image_token_id": 90,
        "projector_hidden_size": 32,
        "vision_config": {**PATCHES, "num_patches": 64, "model_type": "siglip2_vision_model"},
        "text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    },
    "AriaForConditionalGeneration": {
        "model_type": "aria",
        "image_token_index": 90,
        "projector_patch_to_query_dict": {"4": 2},
        "vision_config": {**SIGHT, "model_type": "idefics3_vision"},
        "text_config": {
            **TEXT,
            "model_type": "aria_text",
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
    },
    "Idefics2ForConditionalGeneration": {
        "model_type": "idefics2",
        "image_token_id": 90,
        "pad_token_id": 0,
        "vision_config": SIGHT,
        "perceiver_config": {
            "hidden_size": 32,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        "text_config": {**TEXT, "model_type": "mistral"},
    },
    "GraniteDoclingForConditionalGeneration": {
        "model_type": "granite_docling",
        "image_token_id": 90,
        "pad_token_id": 0,
        "vision_config": {**NARROW, "image_size": 32, "patch_size": 8, "out_hidden_size": 32},
        "text_config": TEXT,
    },
    "Florence2ForConditionalGeneration": {
        "model_type": "florence2",
        "image_token_id": 90,
        "vision_config": {
            "depths": [1, 1],
            "embed_dim": [16, 32],
            "num_heads": [2, 2],
            "num_groups": [2, 2],
            "patch_size": [7, 3],
            "patch_stride": [8, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "window_size": 4,
            "projection_dim": 32,
        },
        "text_config": {
            "model_type": "bart",
            "vocab_size": 100,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "max_position_embeddings": 320,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
        },
    },
    "ChameleonForConditionalGeneration": {
        "model_type": "chameleon",
        **TEXT,
        "vocabulary_map": {"<image>": 80, **{f"IMGIMG{'ABCDEFGHIJ'[i]}Z": 81 + i for i in range(10)}},
        "vq_config": {**VQ, "num_embeddings": 10, "channel_multiplier": [1, 1], "resolution": 32},
    },
    "Emu3ForConditionalGeneration": {
        "model_type": "emu3",
        "vocabulary_map": {
            "<image>": 90,
            "<|extra_200|>": 91,
            **{f"<|visual token {i:06}|>": i for i in range(16)},
        },
        "vq_config": {
            **VQ,
            "codebook_size": 16,
            "channel_multiplier": [1] * 5,
            "attn_resolutions": [],
            "hidden_size": 32,
            "num_attention_heads": 1,
        },
        "text_config": {**TEXT, "max_position_embeddings": 1024},
    },
    "Pix2StructForConditionalGeneration": {
        "model_type": "pix2struct",
        "vision_config": {**NARROW, "d_ff": 64, "d_kv": 16, "patch_embed_hidden_size": 12},
        "text_config": {"vocab_size": 100, "hidden_size": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
    },
    "PerceiverForMaskedLM": {
        "model_type": "perceiver",
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "qk_channels": 16,
        "v_channels": 32,
        "max_position_embeddings": 64,
        "vocab_size": 50,
    },
    "Wav2Vec2BertForCTC": {
        "model_type": "wav2vec2-bert",
        **NARROW,
        "vocab_size": 30,
        "conv_depthwise_kernel_size": 3,
        "output_hidden_size": 32,
    },
    "ParakeetForCTC": {
        "model_type": "parakeet_ctc",
        "vocab_size": 30,
        "pad_token_id": 29,
        "encoder_config": {**SPEECH_TOWER, "conv_kernel_size": 3},
    },
    "LasrForCTC": {
        "model_type": "lasr_ctc",
        "vocab_size": 30,
        "encoder_config": {**SPEECH_TOWER, "conv_kernel_size": 5},
    },
    "GraniteSpeech5ForCTC": {"model_type": "granite_speech5_ctc", "vocab_size": 30, "encoder_config": SPEECH_TOWER},
    "SpeechT5ForSpeechToText": {
        "model_type": "speecht5",
        "vocab_size": 81,
        "hidden_size": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
}

QUICK = 5
"""How many of the first ones run by default: beside the text, by a mask, with sizes, seen from afar, and speech."""

BY_CODES = ("ChameleonForConditionalGeneration", "Emu3ForConditionalGeneration")
"""Models whose pictures become tokens of the vocabulary, so that what sees them gets no gradient."""


def loaded_from(folder: Path, architecture: str, **changed: Any) -> LoadedModel:
    return hub_models.loaded_from(folder, {**CONFIGS[architecture], **changed}, architecture)


@pytest.mark.parametrize("architecture", slow.but_first(CONFIGS, QUICK))
def test_what_is_handed_over_trains_the_model_for_real(architecture: str, tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, architecture)

    module, batch, kwargs = hub_models.trained_once(loaded)

    assert isinstance(batch, dict)
    assert kwargs.keys() == batch.keys() - {"targets"}  # no tensor is made for nothing
    trained = hub_models.with_gradients(module)
    if any("pixel" in name for name in batch) and architecture not in BY_CODES:
        assert any("vision" in name or "visual" in name for name in trained)
    assert trained


def test_a_picture_whose_patches_become_no_tokens_is_refused_with_what_the_model_said(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"AriaForConditionalGeneration of .* does not take pictures: .*Number of patches 4 not"
    ):
        loaded_from(tmp_path, "AriaForConditionalGeneration", projector_patch_to_query_dict={"9": 2})


def test_a_sample_shorter_than_its_picture_is_refused_in_our_words_alone(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, "Mistral3ForConditionalGeneration").with_seq_len(8)

    with pytest.raises(ValueError, match=r"^batch\(1\) of .*: a picture takes \d+ tokens, .* longer --seq-len$"):
        loaded.batch(1)


def test_a_token_of_pictures_that_no_embedding_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"by token 100, and its text_config has a vocabulary of 100, .* above 100"):
        loaded_from(tmp_path, "Mistral3ForConditionalGeneration", image_token_index=100)


def test_features_of_another_width_than_the_text_are_refused(tmp_path: Path) -> None:
    adapter = {**CONFIGS["Molmo2ForConditionalGeneration"]["adapter_config"], "text_hidden_size": 48}

    with pytest.raises(ValueError, match=r"it makes 48 numbers for each token of a picture, and 32 for one of text"):
        loaded_from(tmp_path, "Molmo2ForConditionalGeneration", adapter_config=adapter)


def test_a_config_that_names_no_token_of_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'has no "image_token_id", the token that stands in the text'):
        loaded_from(tmp_path, "MiniCPMV4_6ForConditionalGeneration", image_token_id=None)


def test_tokens_that_the_head_does_not_write_are_not_learnt(tmp_path: Path) -> None:
    batch = loaded_from(tmp_path, "MllamaForConditionalGeneration").batch(2)

    assert isinstance(batch, dict)
    assert batch["input_ids"][:, 0].tolist() == [100, 100]
    assert batch["labels"][:, 0].tolist() == [-100, -100]
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])


def test_the_blank_is_no_letter_that_is_said(tmp_path: Path) -> None:
    batch = loaded_from(tmp_path, "ParakeetForCTC", pad_token_id=3).batch(50)

    assert isinstance(batch, dict)
    assert set(batch["targets"].unique().tolist()) == set(range(30)) - {3}


def test_the_prompt_of_a_model_that_sees_it_whole_ends_with_the_picture(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, "PaliGemmaForConditionalGeneration")
    batch = loaded.batch(1)

    assert isinstance(batch, dict)
    assert (batch["token_type_ids"] == 0).tolist() == (batch["input_ids"] == 90).tolist()
    assert int((batch["token_type_ids"] == 0).sum()) == loaded.fewest_tokens - 1 == 4


@pytest.mark.slow
def test_parts_that_have_no_fused_attention_do_with_the_other(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    named = {"model_type": "apertus1p5", "architectures": ["Apertus1p5ForConditionalGeneration"]}
    path.write_text(json.dumps(named))
    loaded = load_model(path)

    with torch.device("meta"):
        module: Any = loaded.build()

    assert module.model.language_model.config._attn_implementation == "sdpa"
    assert module.model.vision_tokenizer.config._attn_implementation == "eager"
