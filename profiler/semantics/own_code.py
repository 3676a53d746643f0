"""Tells a model's own code from that of torch and of this package."""

import sys
import sysconfig
from functools import cache
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_NOT_OF_MODELS = ("torch", _PACKAGE)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_own(code: Any) -> bool:
    """Whether a function, method or class is the model's own; fully_shard's hooks and ours are not."""
    return str(getattr(code, "__module__", "")).partition(".")[0] not in _NOT_OF_MODELS


def is_own_file(module: Any) -> bool:
    """Whether an imported module is a file of the model's own or a notebook, and not from an installed package or
    ours."""
    if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] in _NOT_OF_MODELS:
        return False
    file = getattr(module, "__file__", None)
    return not _is_installed(file) if isinstance(file, str) else module.__name__ == "__main__"


@cache
def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED)


def is_in_own_file(code: Any) -> bool:
    """Whether a function or class was defined in a file of the model's own. A file that was run by its path alone
    (spec_from_file_location, runpy) may not be among the imported modules; its code counts as such."""
    name = getattr(code, "__module__", None)
    if not isinstance(name, str) or not is_own(code):
        return False
    return name not in sys.modules or is_own_file(sys.modules[name])
