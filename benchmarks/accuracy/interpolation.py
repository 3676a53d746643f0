"""Profiles at batch sizes and lengths that were never run, against profiles made there and against reality; bfloat16.

python -m benchmarks.accuracy.interpolation
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.profiler.model.lengths import at_seq_len
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace

from . import cases, reality
from .predicted import flops, predicted
from .report import Check, off, publish, spread

SIZE = 3
"""Samples; profiles are fitted to runs at 1 and 2."""

MOST = 0.05


def _amounts(profile: ModelProfile) -> tuple[float, float, float]:
    """(FLOPs forward and backward, kept bytes, peak bytes)."""
    said = predicted(profile, SIZE, "bf16")
    return sum(flops(profile, SIZE)), said.kept, said.peak


def _real(loaded: LoadedModel) -> tuple[float, float, float]:
    dtype = torch.bfloat16
    module, batch = reality.build(loaded, dtype), reality.batch_of(loaded, SIZE, dtype)
    real = reality.run(loaded, module, batch)
    return sum(reality.flops(loaded, module, batch)), real.kept, real.peak


def row_of(name: str, loaded: LoadedModel) -> dict[str, Any]:
    """How far a model is off at a longer sequence, or a shorter one where its table of positions ends; models without
    a sequence have nothing but the batch size changed."""
    if loaded.seq_len is None:
        profile = cases.profile_of(loaded)
        return _row(name, loaded, None, profile, profile, _real(loaded))
    other = loaded.with_seq_len(loaded.seq_len * 3 // 2)
    try:
        real = _real(other)
    except IndexError:  # only real tensors tell where the table ends
        other = loaded.with_seq_len(loaded.seq_len * 3 // 4)
        real = _real(other)
    assert other.seq_len is not None
    derived = at_seq_len(trace(loaded, lengths=True), other.seq_len)
    return _row(name, other, loaded.seq_len, derived, trace(other), real)


def _row(
    name: str,
    loaded: LoadedModel,
    profiled: int | None,
    derived: ModelProfile,
    there: ModelProfile,
    real: tuple[float, float, float],
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "profiled at": profiled, "tokens": loaded.seq_len}
    said, made, names = _amounts(derived), _amounts(there), ("FLOPs", "kept", "peak")
    row |= {f"{n}, profile there": off(a, b) for n, a, b in zip(names, said, made, strict=True)}
    row |= {f"{n}, real": off(a, b) for n, a, b in zip(names, said, real, strict=True)}
    return row


def check(models: Mapping[str, LoadedModel], missing: Sequence[str] = ()) -> Check:
    """The table over models by name."""
    rows = [row_of(name, loaded) for name, loaded in models.items()]
    headings = [heading for heading in rows[0] if ", " in heading]
    there, there_passed = spread([r[h] for r in rows for h in headings if h.endswith("there")], MOST, 1.0, MOST)
    judged = cases.judged(rows)
    real, real_passed = spread([r[h] for r in judged for h in headings if h.endswith("real")], MOST, 1.0, MOST)
    return Check(
        name="interpolation",
        title=f"{SIZE} samples at other lengths, small versions, bf16: how far at_seq_len is off",
        target=f"within {MOST:.0%} of a profile made there, and of reality",
        columns={heading: "%" if heading in headings else "" for heading in rows[0]},
        rows=rows,
        verdict=f"profile there: {there}; real: {real}",
        passed=there_passed and real_passed,
        notes=(
            "profiled at: the length of the profile, run at two shorter ones, too; FLOPs: forward and backward",
            *missing,
            *cases.remarks(models),
        ),
    )


if __name__ == "__main__":
    sys.exit(publish([check(*cases.small_models())]))
