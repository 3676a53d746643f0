"""What recompute keeps and runs again: planner and profile against torch.utils.checkpoint on real tensors, in bfloat16.

python -m benchmarks.accuracy.recompute
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from meshwright.planner.cost.layer_parts import kept_at
from meshwright.planner.plan.document import Recompute, parts_of, recompute_of_parts
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile

from . import cases, reality
from .predicted import Predicted, predicted, recomputable, repeated_flops
from .report import Check, off, publish, spread

SIZE = 2
Ways = dict[int, Recompute]
"""Layer -> what it recomputes."""

KEPT = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
"""Operators whose results selective recompute keeps, beside all fused attention."""


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matmuls and attention; run the rest again."""
    name = operator._overloadpacket.__name__
    keep = name in KEPT or "rnn_layer" in name or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def wrap(module: nn.Module, how: Recompute) -> None:
    """From now on the module's forward is checkpointed, or those of its parts."""
    for part in parts_of(how):
        wrap(module.get_submodule(part), "full")
    if parts_of(how):
        return
    contexts = partial(create_selective_checkpoint_contexts, policy) if how == "selective" else noop_context_fn
    forward = module.forward

    def repeated(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = repeated


def rows_of(name: str, loaded: LoadedModel, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """A row without recompute, with full and with selective recompute of every layer that can be, and with recompute
    of the part of each that gives up most, and of all of its parts."""
    profile = cases.profile_of(loaded)
    layers = recomputable(profile)
    every = {i: [part.name for part in profile.classes[profile.layers[i].layer_class].parts] for i in layers}
    largest = {i: recompute_of_parts([_largest(profile, i)]) for i, names in every.items() if names}
    ways: dict[str, Ways] = {how: dict.fromkeys(layers, how) for how in ("full", "selective")}
    ways["largest part"] = largest
    ways["all parts"] = {i: recompute_of_parts(every[i]) for i in largest}
    return rows_of_ways(name, loaded, {how: way for how, way in ways.items() if way}, dtype)


def rows_of_ways(
    name: str, loaded: LoadedModel, ways: Mapping[str, Ways], dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, Any]]:
    """A row without recompute, and one for each of these ways."""
    profile = cases.profile_of(loaded)
    batch = reality.batch_of(loaded, SIZE, dtype)
    plain = reality.build(loaded, dtype)
    real = reality.run(loaded, plain, batch)
    _, plain_flops = reality.flops(loaded, plain, batch)
    rows = [_row(name, "none", predicted(profile, SIZE, "bf16"), real, 0.0, 0.0)]
    for how, way in ways.items():
        module = reality.build(loaded, dtype)
        for root, kind in {profile.layers[i].root: kind for i, kind in way.items()}.items():
            wrap(module.get_submodule(root), kind)
        real = reality.run(loaded, module, batch)
        again = reality.flops(loaded, module, batch)[1] - plain_flops
        said_again = 0.0 if how == "selective" else repeated_flops(profile, way, SIZE)
        rows.append(_row(name, how, predicted(profile, SIZE, "bf16", way), real, said_again, again))
    return rows


def _largest(profile: ModelProfile, layer: int) -> str:
    """The part of a layer without which it keeps least."""
    layer_class = profile.classes[profile.layers[layer].layer_class]
    alone = {part.name: recompute_of_parts([part.name]) for part in layer_class.parts}
    return min(alone, key=lambda name: kept_at(layer_class, layer_class.whole, alone[name], SIZE, 2, 1))


def _row(name: str, how: str, said: Predicted, real: reality.Real, again: float, real_again: float) -> dict[str, Any]:
    return {
        "model": name,
        "recompute": how,
        "kept, planned": said.kept,
        "kept, real": real.kept,
        "kept off": off(said.kept, real.kept),
        "peak, planned": said.peak,
        "peak, real": real.peak,
        "peak off": off(said.peak, real.peak),
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
            "peak, planned": "B",
            "peak, real": "B",
            "peak off": "%",
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
