"""Code of a model's own, beside torch's and this package's."""

from typing import Any

_NOT_OF_MODELS = ("torch", __name__.partition(".")[0])


def is_own(code: Any) -> bool:
    """Whether a function, method or class is the model's own. Of fully_shard's hooks and ours it is not."""
    return str(getattr(code, "__module__", "")).partition(".")[0] not in _NOT_OF_MODELS
