"""Parameters and tied weights of every profile against the module itself on the meta device: equal or not.

python -m benchmarks.accuracy.counts
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.profiler.model.loaded import LoadedModel

from . import cases
from .report import Check, publish


def tied_groups(module: nn.Module) -> set[frozenset[str]]:
    """Names that are one and the same parameter."""
    names: dict[int, set[str]] = defaultdict(set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def row(name: str, loaded: LoadedModel) -> dict[str, Any]:
    """What profile and module say of one model."""
    profile = cases.profile_of(loaded)
    with torch.device("meta"):
        module = loaded.build()
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    listed: dict[str, tuple[int, ...]] = {}
    for layer in profile.layers:
        prefix = f"{layer.root}." if layer.root else ""
        shapes = {p.name: p.shape for p in profile.classes[layer.layer_class].parameters}
        listed |= {name: shapes[name.removeprefix(prefix)] for name in layer.parameters}
    groups = tied_groups(module)
    unlisted = [n for n in parameters if n not in listed and not any(n in g and g & listed.keys() for g in groups)]
    wrong = [name for name, shape in listed.items() if parameters.get(name) != shape]
    kept = {b.name: (b.shape, f"torch.{b.dtype}") for b in profile.buffers}
    buffers = {name: (tuple(b.shape), str(b.dtype)) for name, b in module.named_buffers()}
    wrong += [name for name in kept.keys() | buffers.keys() if kept.get(name) != buffers.get(name)]
    return {
        "model": name,
        "layers": len(profile.layers),
        "classes": len(profile.classes),
        "profile": profile.num_parameters,
        "module": sum(p.numel() for p in module.parameters()),
        "tied groups, profile": len(profile.ties),
        "tied groups, module": len(groups),
        "same": not unlisted and not wrong and {frozenset(tie) for tie in profile.ties} == groups,
        "buffers": len(buffers),
        "buffer bytes": sum(b.numel() * b.element_size() for b in module.buffers()),
        "note": "; ".join([*(f"no layer has {n}" for n in unlisted[:2]), *(f"{n} differs" for n in wrong[:2])]),
    }


def check(models: Mapping[str, LoadedModel]) -> Check:
    """The table over models by name."""
    rows = [row(name, loaded) for name, loaded in models.items()]
    right = [r["same"] and r["profile"] == r["module"] for r in rows]
    for r in rows:
        r["same"] = "yes" if r["same"] else "NO"
    return Check(
        name="counts",
        title="Parameters, tied weights and buffers",
        target="equal",
        columns={heading: "B" if heading == "buffer bytes" else "" for heading in rows[0]},
        rows=rows,
        verdict=f"{sum(right)} of {len(rows)} equal in number, names, shapes and ties",
        passed=all(right),
        notes=(),
    )


if __name__ == "__main__":
    sys.exit(publish([check(cases.whole_models())]))
