"""Tests see no GPU but by `pytest -m gpu`, for ranks are forked from them; they neither read nor write the user's cache
of profiles, run torch on one thread (ranks share the cores, and one process that is compared with them rounds as they
do), draw the same examples every time, and wait as long as it takes on a machine that does other things, too."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from meshwright.profiler.garbage import without_garbage_collection

os.environ["MESHWRIGHT_CACHE"] = "off"
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("same everywhere", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("same everywhere")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test imports torch."""
    if "gpu" not in config.option.markexpr.split():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.set_threshold(*gc.get_threshold()[:2], SELDOM)


SELDOM = 100
"""Collections of younger garbage between two of all: those go through a million objects that were imported and are no
garbage, half a second each. Ranks begin with this, too."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage is not looked for meanwhile: what is imported and collected stays."""
    with without_garbage_collection():
        return (yield)
