"""FLOPs of every profile against counts that do not come from it: closed forms, and torch's counter on real tensors.

python -m benchmarks.accuracy.flops
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.profiler.model.loaded import LoadedModel

from . import cases, reality
from .predicted import flops
from .report import Check, off, publish, spread

SIZE = 2
MOST = 0.005


def product(rows: float, inner: float, columns: float) -> float:
    """FLOPs of one matrix product: a multiplication and an addition each."""
    return 2.0 * rows * inner * columns


def llama(config: Mapping[str, Any], tokens: int, length: int) -> tuple[float, float]:
    """(matmuls, attention) FLOPs forward: q, k, v, o; gate, up, down; causal q k^T and p v at half; the head."""
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_width = config.get("head_dim") or width // heads
    block = 2 * product(tokens, width, heads * head_width) + 2 * product(tokens, width, kv_heads * head_width)
    block += 3 * product(tokens, width, inner)
    attention = 2 * product(tokens * heads, head_width, length) / 2
    return layers * block + product(tokens, width, config["vocab_size"]), layers * attention


def gpt2(config: Mapping[str, Any], tokens: int, length: int) -> tuple[float, float]:
    """(matmuls, attention) FLOPs forward: fused qkv, out, two of the MLP; causal attention at half; the head."""
    width, layers = config["n_embd"], config["n_layer"]
    inner = config.get("n_inner") or 4 * width
    block = product(tokens, width, 3 * width) + product(tokens, width, width) + 2 * product(tokens, width, inner)
    attention = 2 * product(tokens, width, length) / 2
    return layers * block + product(tokens, width, config["vocab_size"]), layers * attention


def bert(config: Mapping[str, Any], tokens: int, length: int) -> tuple[float, float]:
    """(matmuls, attention) FLOPs forward: q, k, v, o; two of the MLP; attention in full; the head's transform and
    decoder."""
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    block = 4 * product(tokens, width, width) + 2 * product(tokens, width, inner)
    head = product(tokens, width, width) + product(tokens, width, config["vocab_size"])
    return layers * block + head, layers * 2 * product(tokens, width, length)


CLOSED_FORMS: dict[str, Callable[[Mapping[str, Any], int, int], tuple[float, float]]] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "gpt2": gpt2,
    "bert": bert,
}
"""model_type of a config.json -> closed form."""

ATTENTION_BACKWARD = 2.5
"""Fused attention runs five products backward for its two forward: it makes q k^T again."""


def closed_form_rows(sources: Sequence[Path]) -> list[dict[str, Any]]:
    """Models as they are whose config.json has a closed form."""
    rows = []
    for source in sources:
        config = json.loads((source / "config.json").read_text()) if source.is_dir() else {}
        form = CLOSED_FORMS.get(config.get("model_type", ""))
        if form is None:
            continue
        loaded = cases.whole(source)
        assert loaded.seq_len is not None
        matmuls, attention = form(config, SIZE * loaded.seq_len, loaded.seq_len)
        said = flops(cases.profile_of(loaded), SIZE)
        real = matmuls + attention, 2 * matmuls + ATTENTION_BACKWARD * attention
        rows.append(_row(cases.name_of(source), said, real) | {"tokens": loaded.seq_len})
    return rows


def counted_rows(models: Mapping[str, LoadedModel]) -> list[dict[str, Any]]:
    """Models by name, run on real tensors under torch's counter."""
    rows = []
    for name, loaded in models.items():
        module, batch = reality.build(loaded, torch.float32), reality.batch_of(loaded, SIZE, torch.float32)
        rows.append(_row(name, flops(cases.profile_of(loaded), SIZE), reality.flops(loaded, module, batch)))
    return rows


def _row(name: str, said: tuple[float, float], real: tuple[float, float]) -> dict[str, Any]:
    return {
        "model": name,
        "forward, profile": said[0],
        "forward, counted": real[0],
        "forward off": off(said[0], real[0]),
        "backward, profile": said[1],
        "backward, counted": real[1],
        "backward off": off(said[1], real[1]),
    }


def check(title: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> Check:
    """A table of rows."""
    errors = [abs(row[f"{part} off"]) for row in cases.judged(rows) for part in ("forward", "backward")]
    sentence, passed = spread(errors, MOST, 1.0, MOST)
    units = {"profile": "FLOP", "counted": "FLOP", "off": "%"}
    return Check(
        name="flops",
        title=title,
        target=f"within {MOST:.1%}",
        columns={heading: units.get(heading.split()[-1], "") for heading in rows[0]},
        rows=rows,
        verdict=sentence,
        passed=passed,
        notes=notes,
    )


def checks() -> list[Check]:
    """Both tables over the zoo."""
    models, missing = cases.small_models()
    return [
        check(
            f"FLOPs of whole models against closed forms, {SIZE} samples",
            closed_form_rows(cases.sources()),
            (
                "causal attention counts half, elementwise work nothing; fused attention's backward is 2.5 times its "
                "forward",
            ),
        ),
        check(
            f"FLOPs of small versions against FlopCounterMode on real tensors, {SIZE} samples",
            counted_rows(models),
            (
                "formulas that torch lacks on a CPU (fused attention, LSTM, grouped matmul) are added, and that of "
                "convolution_backward, which takes no account of groups, is replaced",
                *missing,
                *cases.remarks(models),
            ),
        ),
    ]


if __name__ == "__main__":
    sys.exit(publish(checks()))
