"""Describes the model and the machine. Imports nothing else of ours, and torch only where a model is traced."""

from typing import TYPE_CHECKING, Any

from .machine.cluster import ClusterSpec, cluster_of, load_cluster, load_device
from .model.model_profile import ModelProfile, load_profile

if TYPE_CHECKING:
    from .model.load import load_model
    from .model.loaded import LoadedModel

__all__ = [
    "ClusterSpec",
    "LoadedModel",
    "ModelProfile",
    "cluster_of",
    "load_cluster",
    "load_device",
    "load_model",
    "load_profile",
]


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    if name in ("LoadedModel", "load_model"):
        from .model import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
