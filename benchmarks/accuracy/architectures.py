"""Architectures of transformers from their config.json alone: parameters, plans for 8 and 64 GPUs, time, tensor cuts.

    python -m benchmarks.accuracy.architectures

takes each architecture's default configuration, writes its config.json, and asks in a process of its own as a user
would. Fourteen are named, the others drawn, by a fixed seed, from all model types that transformers' auto classes know
how to train. Prints a line each and writes results/architectures.md. Exit code 1 if any ends in a traceback or has
another number of parameters than transformers counts.
"""

import argparse
import json
import multiprocessing
import random
import re
import resource
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NAMED = (
    ("clip", "CLIPModel"),
    ("llava", "LlavaForConditionalGeneration"),
    ("wav2vec2", "Wav2Vec2ForCTC"),
    ("whisper", "WhisperForConditionalGeneration"),
    ("sam", "SamModel"),
    ("mamba", "MambaForCausalLM"),
    ("rwkv", "RwkvForCausalLM"),
    ("jamba", "JambaForCausalLM"),
    ("zamba", "ZambaForCausalLM"),
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("dbrx", "DbrxForCausalLM"),
    ("gemma3", "Gemma3ForConditionalGeneration"),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    ("qwen3_moe", "Qwen3MoeForCausalLM"),
)
"""Model types that people ask for most beside Llama, with the class that trains them."""

_MINICPM_TOKENS = {"image_token_id": 248056, "image_start_id": 248053, "image_end_id": 248054}

_HALF_TURNED = {
    "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
}

_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "llava": {"text_config": {"model_type": "llama", "vocab_size": 32064}},
    "llava_next": {"text_config": {"model_type": "llama", "vocab_size": 32064}},
    "llava_next_video": {"text_config": {"model_type": "llama", "vocab_size": 32064}},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}},
    "idefics2": {"text_config": {"model_type": "mistral", "vocab_size": 32003}},
    "idefics3": {
        "vision_config": {"image_size": 364, "patch_size": 14},
        "text_config": {"model_type": "llama", "vocab_size": 128259},
    },
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    "deepseek_vl": {"text_config": {"model_type": "llama", "vocab_size": 102400}},
    "deepseek_vl_hybrid": {"text_config": {"model_type": "llama", "vocab_size": 102400}},
    "deepseek_ocr2": {
        "vision_config": {
            "encoder_config": {
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
            }
        },
        "text_config": {
            "vocab_size": 129280,
            "hidden_size": 1280,
            "intermediate_size": 6848,
            "moe_intermediate_size": 896,
            "num_hidden_layers": 12,
            "num_attention_heads": 10,
            "num_experts_per_tok": 6,
            "mlp_layer_types": ["dense", *["sparse"] * 11],
        },
    },
    "exaone4_5": {"vision_config": {"out_hidden_size": 4096}},
    "florence2": {"text_config": {"model_type": "bart", "vocab_size": 51328}},
    "glm4v": _HALF_TURNED,
    "glm46v": _HALF_TURNED,
    "glmga": _HALF_TURNED,
    "hyperclovax_vision_v2": {"text_config": {"model_type": "hyperclovax", "vocab_size": 128256}},
    **{kind: {"head_dim": 128} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    "instructblipvideo": {"video_token_index": 50271},
    "janus": {
        "text_config": {
            "model_type": "llama",
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        }
    },
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3", "vocab_size": 163840}},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "minicpmv4_6": _MINICPM_TOKENS,
    "minicpmv4_7": _MINICPM_TOKENS,
    "minicpm_ocr": _MINICPM_TOKENS,
    "molmo2": {"adapter_config": {"text_hidden_size": 4096}},
    "nemotron": {"num_key_value_heads": 8},
    "ovis2": {
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        }
    },
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3_omni_moe_thinker": {
        "vision_config": {"out_hidden_size": 2048},
        "text_config": {"vocab_size": 152064, "num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 48},
    },
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
}
"""By model type, where the default configuration does not run.

The token of a picture lies outside the vocabulary of LLaVA, LLaVA-NeXT, its video model, Idefics, DeepSeek-VL, Janus,
Florence-2, HyperCLOVA X, Kimi and Qwen3-Omni; InstructBLIP-Video has none. Pictures come out in another width than
words of EXAONE, Janus, Molmo 2, Ovis 2 and the Qwen-VLs. Gemma 3's pictures have fewer patches than tokens, Idefics3's
7 x 7 patches are not merged by 2 x 2, Aria's are none of the numbers that it has queries for. DeepSeek-OCR 2 does not
say which layers have experts, DBRX's attention no rope_theta, the GLM-Vs no part of a head that is turned, wav2vec
2.0's other encoders no number of letters; the heads of Qwen3-Omni are no whole part of its width. Hunyuan's heads have
no width, Nemotron no number of key-value heads, and LFM2's layers no types: every fourth attends here.

The values are those of the published google/gemma-3-4b-it, llava-hf/llava-1.5-7b-hf, llava-v1.6-mistral-7b-hf and
LLaVA-NeXT-Video-7B-hf, zai-org/GLM-4.1V-9B-Thinking, HuggingFaceM4/idefics2-8b and Idefics3-8B-Llama3, rhymes-ai/Aria,
deepseek-ai/deepseek-vl-7b-chat, DeepSeek-OCR-2 and Janus-Pro-1B, florence-community/Florence-2-base, naver's
HyperCLOVAX-SEED-Think-32B, moonshotai/Kimi-K2.5, allenai/Molmo2-8B, AIDC-AI/Ovis2-2B, Qwen2-VL-72B, Qwen2.5-VL-72B,
Qwen3-VL-8B and -30B-A3B, Qwen3-Omni-30B-A3B, tencent/Hunyuan-7B-Instruct, nvidia's Nemotron-4 15B and
databricks/dbrx-base, from memory: nothing could be looked up. For
InstructBLIP-Video it is the last token of the vocabulary, for EXAONE the width of its text, for the letters those of
wav2vec 2.0. MiniCPM-V names no tokens of pictures: those are the ones that its text model, Qwen3.5, has for them."""

_TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_TEXT_TO_TEXT",
)

RESULTS = Path(__file__).parent / "results"
_LONGEST_S = 900.0
_MOST_WORDS = 300
"""Characters of notes in the table."""

_MOST_OF_VALUE = 60
"""Characters of a changed value in the table."""

_BATCH = 512
"""Samples of a step."""


@dataclass
class Row:
    """What became of one architecture. said: what was planned on 8 and 64 GPUs, or the rule that refused. changed: of
    its default configuration."""

    name: str
    outcome: str = "failed"
    parameters: int = 0
    expected: int = 0
    said: tuple[str, ...] = ()
    changed: str = ""
    notes: tuple[str, ...] = ()
    profile_s: float = 0.0
    cpu_s: float = 0.0

    def as_markdown(self) -> str:
        """The row of the table."""
        counted = f"{self.parameters:,}" if self.parameters else ""
        if self.parameters and self.parameters != self.expected:
            counted += f" (transformers: {self.expected:,})"
        said = "; ".join(self.said).replace("|", "\\|").replace("\n", " ")
        notes = "; ".join(self.notes).replace("|", "\\|") or ("nothing" if self.parameters else "")
        notes = textwrap.shorten(notes, _MOST_WORDS, placeholder=" ...")
        outcome = self.outcome + (f", with {self.changed}" if self.changed else "")
        return f"| {self.name} | {outcome} | {counted} | {said} | {self.cpu_s:.1f} | {notes} |"


def drawn(count: int, seed: int) -> list[tuple[str, str]]:
    """(model type, class) of the named architectures and of others, `count` in all."""
    from transformers.models.auto import modeling_auto

    classes: dict[str, str] = {}
    for task in _TASKS:
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            classes.setdefault(kind, names if isinstance(names, str) else names[0])
    named = list(NAMED)[:count]
    others = sorted(set(classes) - {kind for kind, _ in named})
    return named + [(kind, classes[kind]) for kind in random.Random(seed).sample(others, count - len(named))]


def asked(kind: str, architecture: str) -> Row:
    """The row of an architecture, looked at in this process."""
    import torch
    import transformers

    from meshwright.executor import api

    changes = _CHANGES.get(kind, {})
    row = Row(architecture, changed=", ".join(_flat(changes)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / kind / "config.json"
        path.parent.mkdir()
        try:
            config = transformers.CONFIG_MAPPING[kind](**changes)
            path.write_text(json.dumps({**config.to_dict(), "model_type": kind, "architectures": [architecture]}))
            with torch.device("meta"):
                whole = _built(getattr(transformers, architecture), config)
        except Exception as error:
            row.said, row.outcome = (f"transformers raises {type(error).__name__}: {error}",), "not built"
            return row
        row.expected = sum(p.numel() for p in whole.parameters())
        del whole
        began = _cpu_s()
        try:
            profile = api.profile(path)
            row.profile_s = _cpu_s() - began
            row.parameters = profile.num_parameters
            row.notes = tuple(note.replace(f"{folder}/", "") for note in profile.notes)
            planned = [_planned(profile, gpus) for gpus in (8, 64)]
            row.said, row.outcome = tuple(planned), "planned"
        except ValueError as error:
            row.said, row.outcome = (str(error).replace(f"{folder}/", ""),), "refused"
        row.cpu_s = _cpu_s() - began
    return row


def _built(architecture: Any, config: Any) -> Any:
    """The model; of that part of a configuration that its class is for, as transformers' auto classes build it."""
    own = architecture.config_class
    parts = (getattr(config, name, None) for name in config.sub_configs)
    fits = config if isinstance(config, own) else next((part for part in parts if isinstance(part, own)), config)
    return architecture._from_config(fits)


def _flat(changes: dict[str, Any], within: str = "") -> Iterator[str]:
    for name, value in changes.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{within}{name}.")
        elif name != "model_type":
            yield f"{within}{name}={textwrap.shorten(str(value), _MOST_OF_VALUE, placeholder=' ...')}"


def _planned(profile: Any, gpus: int) -> str:
    """The plan, or that nothing fits; with the micro-batch pinned where a loss that couples samples asks for it."""
    from meshwright.executor import api
    from meshwright.planner.answers.infeasible import InfeasibleError

    pin = {"micro_batch": _BATCH // gpus} if profile.coupling else {}
    try:
        plan = api.plan(profile, gpus=gpus, device="h100-80gb", global_batch=_BATCH, pin=pin).document
    except InfeasibleError as error:
        return f"{gpus}: {str(error).split('. ')[0]}"
    assert plan.prediction is not None
    return f"{gpus}: {plan.label}, {plan.prediction.step_time_s:.3g} s"


def _cpu_s() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _send(sender: Connection, kind: str, architecture: str) -> None:
    warnings.simplefilter("ignore")
    try:
        sender.send(asked(kind, architecture))
    except Exception:
        sender.send(Row(architecture, said=(traceback.format_exc(),)))


def table(models: list[tuple[str, str]]) -> list[Row]:
    """A row for each, told as it comes."""
    rows, context = list[Row](), multiprocessing.get_context("fork")
    for kind, architecture in models:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(sender, kind, architecture))
        began = time.monotonic()
        process.start()
        sender.close()
        row = Row(architecture, said=(f"no answer within {_LONGEST_S:.0f} s",))
        try:
            row = receiver.recv() if receiver.poll(_LONGEST_S) else row
        except EOFError:
            row = Row(architecture, said=("the process ended without an answer",))
        process.kill()
        process.join()
        rows.append(row)
        print(f"{row.name}: {row.outcome}, {row.cpu_s:.1f} CPU s, {time.monotonic() - began:.0f} s", flush=True)
        if row.outcome != "planned":
            print("    " + "\n    ".join(row.said), flush=True)
    return rows


def main() -> int:
    """Ask the architectures of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.architectures", description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of those that are drawn (default 0)")
    parser.add_argument("--only", nargs="*", help="model types, of those alone, whose rows are written anew")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder (default: results beside this file)")
    given = parser.parse_args()
    import torch  # noqa: F401  # before the processes, which share it

    models = drawn(given.count, given.seed)
    rows = table([each for each in models if given.only is None or each[0] in given.only])
    wrong = [row for row in rows if row.outcome == "failed" or row.parameters not in (0, row.expected)]
    lines = {row.name: row.as_markdown() for row in rows}
    if given.only is not None:
        before = _lines(given.output / _FILE)
        lines = {name: (before | lines)[name] for _, name in models if name in before | lines}
    told = _told(list(lines.values()))
    print(told)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / _FILE).write_text(_document(list(lines.values()), told))
    return 1 if wrong else 0


_FILE = "architectures.md"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _lines(path: Path) -> dict[str, str]:
    """Rows of a table that is there, by architecture."""
    told = path.read_text().splitlines() if path.exists() else []
    return {_cells(line)[0]: line for line in told[told.index(_HEAD[-1]) + 1 :]} if _HEAD[-1] in told else {}


def _told(lines: list[str]) -> str:
    import transformers

    rows = [_cells(line) for line in lines]
    counted = Counter(row[1].partition(",")[0] for row in rows)
    changed = sum(", with " in row[1] for row in rows)
    wrong = sum(row[1].startswith("failed") or "transformers:" in row[2] for row in rows)
    return (
        f"{len(rows)} architectures of transformers {transformers.__version__}, default configurations but for "
        f"{changed} whose rows say what was changed: {counted['planned']} planned, {counted['refused']} refused by a "
        f"rule, {counted['not built']} that transformers does not build from its own default; {wrong} wrong. "
        f"{sum(float(row[4]) > 20 for row in rows)} took above 20 s of CPU."
    )


_HEAD = (
    "| architecture | outcome | parameters | 8 and 64 x H100, or the rule | CPU s | left whole by tensor cuts |",
    "|---|---|---|---|---|---|",
)


def _document(lines: list[str], told: str) -> str:
    about = (
        f"{told} Made by `python -m benchmarks.accuracy.architectures`; CPU seconds are of profiling and both plans, "
        "on cores that others used at the same time."
    )
    return "\n".join(["# Architectures of transformers from their config.json", "", about, "", *_HEAD, *lines]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
