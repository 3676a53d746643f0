"""Profiles of the models in benchmarks/models, each made once."""

from functools import cache
from pathlib import Path

from meshwright.profiler.load import load_model
from meshwright.profiler.model_profile import ModelProfile
from meshwright.profiler.trace import trace

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"


@cache
def zoo_profile(name: str) -> ModelProfile:
    """Profile of a model of the zoo at its own sequence length."""
    return trace(load_model(MODELS / name))
