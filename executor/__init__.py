"""Doing it: a Plan applied with torch.distributed, checked, measured and compared."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .start_up import parallelize
    from .trainer import Metrics, Trainer

__all__ = ["Metrics", "Trainer", "parallelize"]


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    if name in __all__:
        from . import start_up, trainer

        return getattr(start_up if name == "parallelize" else trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
