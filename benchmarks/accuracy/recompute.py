"""What recompute keeps and runs again: planner and profile against torch.utils.checkpoint on real tensors, in bfloat16.

python -m benchmarks.accuracy.recompute
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from meshwright.profiler.load import LoadedModel
from meshwright.profiler.model_profile import ModelProfile

from . import cases, reality
from .predicted import predicted, recomputable, repeated_flops
from .report import Check, off, publish, spread

SIZE = 2
How = Literal["full", "selective"]

KEPT = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
"""Operators whose results selective recompute keeps, beside all fused attention."""


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matmuls and attention; run the rest again."""
    name = operator._overloadpacket.__name__
    keep = name in KEPT or "rnn_layer" in name or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def wrap(module: nn.Module, how: How) -> None:
    """From now on the module's forward is checkpointed."""
    contexts = partial(create_selective_checkpoint_contexts, policy) if how == "selective" else noop_context_fn
    forward = module.forward

    def repeated(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = repeated


def rows_of(name: str, loaded: LoadedModel, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """A row without recompute, with full and with selective recompute of every layer that can be."""
    profile = cases.profile_of(loaded)
    layers = recomputable(profile)
    batch = reality.batch_of(loaded, SIZE, dtype)
    plain = reality.build(loaded, dtype)
    real = reality.run(loaded, plain, batch)
    _, plain_flops = reality.flops(loaded, plain, batch)
    rows = [_row(name, "none", predicted(profile, SIZE, "bf16").kept, real.kept, 0.0, 0.0)]
    ways: tuple[How, ...] = ("full", "selective")
    for how in ways if layers else ():
        module = reality.build(loaded, dtype)
        for root in dict.fromkeys(profile.layers[i].root for i in layers):
            wrap(module.get_submodule(root), how)
        real = reality.run(loaded, module, batch)
        again = reality.flops(loaded, module, batch)[1] - plain_flops
        rows.append(_row(name, how, _kept(profile, layers, how), real.kept, _again(profile, layers, how), again))
    return rows


def _kept(profile: ModelProfile, layers: list[int], how: How) -> float:
    kept = predicted(profile, SIZE, "bf16", layers).kept
    if how == "full":
        return kept
    costs = [profile.classes[profile.layers[i].layer_class].whole for i in layers]
    return kept + sum((c.selective.at(SIZE, 2) - c.full.at(SIZE, 2) for c in costs), 0.0)


def _again(profile: ModelProfile, layers: list[int], how: How) -> float:
    return repeated_flops(profile, layers, SIZE) if how == "full" else 0.0


def _row(name: str, how: str, kept: float, real_kept: float, again: float, real_again: float) -> dict[str, Any]:
    return {
        "model": name,
        "recompute": how,
        "kept, planned": kept,
        "kept, real": real_kept,
        "kept off": off(kept, real_kept),
        "run again, profile": again,
        "run again, counted": real_again,
        "run again off": off(again, real_again),
    }


def check(models: Mapping[str, LoadedModel], missing: Sequence[str] = ()) -> Check:
    """The table over models by name."""
    rows = []
    for name, loaded in models.items():
        rows += rows_of(name, loaded)
    kept, kept_passed = spread([row["kept off"] for row in cases.judged(rows)], 0.03, 0.9, 0.08)
    again, again_passed = spread([row["run again off"] for row in cases.judged(rows)], 0.005, 1.0, 0.005)
    return Check(
        name="recompute",
        title=f"Recompute of every layer that can be, small versions, {SIZE} samples, bf16",
        target="kept bytes within 3% for 90% of the rows, none beyond 8%; FLOPs run again within 0.5%",
        columns={
            "model": "",
            "recompute": "",
            "kept, planned": "B",
            "kept, real": "B",
            "kept off": "%",
            "run again, profile": "FLOP",
            "run again, counted": "FLOP",
            "run again off": "%",
        },
        rows=rows,
        verdict=f"kept: {kept}; run again: {again}",
        passed=kept_passed and again_passed,
        notes=(
            "selective keeps what matmuls and attention return; run again: FLOPs of the backward less those of a "
            "backward without recompute",
            *missing,
            *cases.remarks(models),
        ),
    )


if __name__ == "__main__":
    sys.exit(publish([check(*cases.small_models())]))
