"""The models in benchmarks/models: as modules, and their profiles, each made once."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from benchmarks.accuracy.cases import profile_of, whole
from meshwright.profiler.model.model_profile import ModelProfile

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


def zoo_profile(name: str) -> ModelProfile:
    """Profile of a model of the zoo at its own sequence length."""
    return profile_of(whole(MODELS / name))


@cache
def zoo_module(name: str) -> ModuleType:
    """The Python module of a model file, for what it holds beyond the model."""
    module_name = f"zoo_{Path(name).stem}"
    spec = importlib.util.spec_from_file_location(module_name, MODELS / name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
