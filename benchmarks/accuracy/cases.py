"""The models to check: those of benchmarks/models as they are, and small versions of them that run here for real."""

import re
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.executor.measuring.small_plan import small_model
from meshwright.planner.plan.document import Degrees, ModelReference, Plan
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace

MODELS = Path(__file__).parents[1] / "models"

_SEQ_LEN = 128
"""Tokens per sample of small versions."""

_CUT = Degrees(tensor=8, pipeline=3)
"""What a shrunken config must allow: eight key heads and three layers, so about 128 features."""


CPU_KERNELS = {
    "deepseek_v3": "attention whose values are narrower than its keys is fused on a GPU, not on a CPU: shown, but not "
    "judged",
    "lstm": "the CPU's LSTM kernel keeps a padded workspace (44 to 62 bytes per sample, step and feature) that no GPU "
    "has: shown, but not judged",
}
"""Models in which a CPU does something else than a GPU, so that this machine cannot judge them."""


def remarks(models: Iterable[str]) -> list[str]:
    """Notes on the models of a table."""
    return [f"{name}: {CPU_KERNELS[name]}" for name in models if name in CPU_KERNELS]


def judged(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows that this machine can judge."""
    return [row for row in rows if row["model"] not in CPU_KERNELS]


def sources() -> list[Path]:
    """Every model of the zoo: files with functions model and batch, and folders with a config.json."""
    files = [p for p in MODELS.glob("*.py") if {"def model(", "def batch("} <= _beginnings(p)]
    return sorted([*files, *(p.parent for p in MODELS.glob("*/config.json"))])


def _beginnings(path: Path) -> set[str]:
    return {line[: line.index("(") + 1] for line in path.read_text().splitlines() if line.startswith("def ")}


def name_of(source: Path) -> str:
    """What a table calls it."""
    return source.stem


@cache
@cache
def whole(source: Path) -> LoadedModel:
    """The model as it is."""
    return load_model(source)


def whole_models() -> dict[str, LoadedModel]:
    """All of the zoo by name."""
    return {name_of(source): whole(source) for source in sources()}


@cache
def small(source: Path) -> LoadedModel:
    """A version that this machine can train. Raises ValueError if there is none."""
    plan = Plan.model_construct(
        degrees=_CUT, model=ModelReference.model_construct(name=name_of(source), num_parameters=_parameters(source))
    )
    with tempfile.TemporaryDirectory() as folder:
        loaded, _ = small_model(plan, whole(source), Path(folder))
    if loaded.seq_len is None or whole(source).small is not None:
        return loaded
    return loaded.with_seq_len(_SEQ_LEN)


@cache
def small_models() -> tuple[dict[str, LoadedModel], tuple[str, ...]]:
    """Small versions of the zoo by name, and why others have none.

    Models whose small versions are the same (sizes of one architecture) are there once.
    """
    models: dict[str, LoadedModel] = {}
    missing = []
    seen = set()
    for source in sources():
        try:
            loaded = small(source)
            fingerprint = profile_of(loaded).fingerprint
        except ValueError as error:
            why = re.sub(r"/\S*/", "", str(error).splitlines()[0])
            missing.append(f"{name_of(source)} is not checked: {why[:200]}")
            continue
        if fingerprint not in seen:
            seen.add(fingerprint)
            models[name_of(source)] = loaded
    return models, tuple(missing)


def _parameters(source: Path) -> int:
    return 0 if source.is_dir() or whole(source).small is not None else profile_of(whole(source)).num_parameters


@cache
def profile_of(loaded: LoadedModel, seq_len: int | None = None) -> ModelProfile:
    """Its profile."""
    return trace(loaded, seq_len=seq_len)
