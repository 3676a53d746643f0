"""Turn a model.py, a Hugging Face config.json or a module into a constructor and example micro-batches.

A model file holds plain functions:

    def model() -> nn.Module                        # required; runs on the meta device too
    def batch(size, seq_len=1024) -> tuple | dict   # required; inputs, and targets if any; seq_len is optional
    def loss(output, batch) -> Tensor               # optional; without it the module must return its own loss
    def weight(batch) -> Tensor                     # optional; where samples weigh differently in the mean
    def small() -> nn.Module                        # optional; a small version, used by `plan verify`
    def small_batch(size, seq_len=64)               # optional; where `batch` does not suit `small`
    global_batch = 64                               # optional
    seq_len = 1024                                  # optional; else the default of batch's seq_len

A tuple batch is (inputs..., targets): see split_inputs. A batch of one tensor is given to loss as that tensor.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..document import check_ends
from .adapters import adapted, read_adapters, with_lora
from .failures import a_type, called
from .loaded import Build, LoadedModel, Loss, MakeBatch, checked
from .source import LORA, PADDED, file_of, is_hub_name, not_in_cache

if TYPE_CHECKING:
    from torch import nn


_EXAMPLE = """for example:

    def model():
        return MyModel()

    def batch(size):
        return torch.randn(size, 512), torch.randint(10, (size,))

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output, batch[1])"""


def load_model(
    source: "str | Path | nn.Module | Build",
    seq_len: int | None = None,
    batch: MakeBatch | None = None,
    loss: Loss | None = None,
    lora: str | Mapping[str, object] | None = None,
) -> LoadedModel:
    """Model at `source`: model.py, model.py:function, config.json (or its folder, or the id of a model in the Hugging
    Face cache of this machine), a module, or a constructor. config.json@vocab%128 is that of a config.json with its
    vocabulary padded to a multiple of 128 words; what ends in @lora:r=16 has adapters of that rank.

    seq_len: tokens per sample; default: the model's own. batch, loss: only for a module or a constructor, which
    bring none of their own. lora: adapters, as --lora says them. Raises ValueError that says what is missing, with an
    example.
    """
    if lora is not None and isinstance(source, str | Path):
        source = with_lora(str(source), lora)
    if not isinstance(source, str | Path):
        loaded = _from_object(source, batch, loss)
        loaded = loaded if lora is None else adapted(loaded, read_adapters(lora))
    elif batch is not None or loss is not None:
        raise ValueError(f"batch= and loss= go with a module; {source} defines its own functions batch and loss")
    else:
        loaded = _from_path(str(source))
    return loaded if seq_len is None else loaded.with_seq_len(seq_len)


def _from_path(source: str) -> LoadedModel:
    source, mark, said = source.partition(LORA)
    if mark:
        adapters = read_adapters(said)
        return adapted(_from_path(source), adapters)
    path = file_of(source)
    source, mark, multiple = source.partition(PADDED)
    if mark and not (multiple.isdecimal() and int(multiple) > 0):
        raise ValueError(
            f"{source}{mark}{multiple}: a vocabulary is padded to a multiple of a whole number, as in @vocab%128"
        )
    function = "" if path == Path(source) else source.partition(".py:")[2]
    if path.is_dir():
        path = _config_in(path)
    if not path.exists():
        raise ValueError(f"{_not_there(path)}; {not_in_cache(source)}" if is_hub_name(source) else _not_there(path))
    check_ends(path)
    if path.suffix == ".json":
        from ..hugging_face.config import from_config

        return from_config(path, int(multiple or 1), named=source if is_hub_name(source) else None)
    if mark:
        raise ValueError(f"{path} makes its vocabulary itself: pad it there; only that of a config.json is padded here")
    if path.suffix not in (".py", ""):
        raise ValueError(f"{path} is neither a .py file nor a Hugging Face config.json; give one of those")
    return _from_file(path, function or "model", source)


def _not_there(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}, so no {path.name} in it; give the path of a model.py or a config.json"
    names = sorted(p.name for p in folder.iterdir() if p.suffix in (".py", ".json") or p.is_dir())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or [n for n in names if n.endswith(".py")][:3]
    hint = f"did you mean {', '.join(near)}?" if near else "it holds no .py file; give the path of your model.py"
    return f"there is no file {path.name} in {folder.resolve()}: {hint}"


def _config_in(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} is a folder without a config.json; give a model.py or a Hugging Face model folder")
    return path


def _from_file(path: Path, function: str, source: str) -> LoadedModel:
    module = _import_file(path)
    build = _function(module, path, function)
    batch = _function(module, path, "batch")
    small = getattr(module, "small", None)
    small_batch = getattr(module, "small_batch", None) or batch
    loaded = checked(
        build,
        batch,
        name=path.stem if function == "model" else function,
        source=source,
        loss=_optional_function(module, path, "loss"),
        weight=_optional_function(module, path, "weight"),
        global_batch=_whole_number(module, path, "global_batch"),
        seq_len=_whole_number(module, path, "seq_len"),
        built_by=f"{function}() of {path}",
    )
    if small is None:
        return loaded
    _must_be_callable(small, path, "small")
    _must_be_callable(small_batch, path, "small_batch")
    make_small = functools.partial(
        checked,
        small,
        small_batch,
        name=f"{loaded.name}-small",
        source=source,
        loss=loaded.loss,
        weight=loaded.weight,
        global_batch=None,
        seq_len=None if small_batch is not batch else loaded.seq_len,
        built_by=f"small() of {path}",
    )
    return replace(loaded, small=make_small)


def _import_file(path: Path) -> ModuleType:
    """The file, imported as a module. Modules beside it, and those of its package, can be imported from it now and
    later, as if Python ran the file. A file with relative imports becomes a module of the package that its folder
    is."""
    folder = path.resolve().parent
    text = called(path.read_bytes, str(path)) if path.is_file() else b""
    levels = max(map(len, _RELATIVE.findall(text)), default=0)
    names = list[str]()
    root = folder
    while (root / "__init__.py").is_file() or (len(names) < levels and root.name):
        names.insert(0, root.name)
        root = root.parent
    package = ".".join(names) if levels else ""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"{package}.meshwright_model_{path.stem}_{digest}".lstrip(".")
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    first = [str(folder), str(root)]
    _NEIGHBOURS.folders += [each for each in dict.fromkeys(first) if each not in _NEIGHBOURS.folders]
    if _NEIGHBOURS not in sys.meta_path:
        sys.meta_path.append(_NEIGHBOURS)
    sys.path[:0] = first
    try:
        if package:
            called(functools.partial(importlib.import_module, package), f"the package {package} of {path}")
        sys.modules[name] = module
        called(functools.partial(spec.loader.exec_module, module), str(path))
    except ValueError:
        sys.modules.pop(name, None)
        raise
    finally:
        for each in first:
            sys.path.remove(each)
    return module


class _NeighbourFinder:
    """Finds modules beside model files, if functions in these import them later and nothing else finds them."""

    def __init__(self) -> None:
        self.folders: list[str] = []

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a top-level module that lies beside a model file. (sys.path is left as it is, because kept
        profiles depend on it.)"""
        return PathFinder.find_spec(name, self.folders) if path is None else None


_NEIGHBOURS = _NeighbourFinder()


_RELATIVE = re.compile(rb"^\s*from\s+(\.+)[\w\s.]*import\b", re.MULTILINE)
"""A relative import, and its dots."""


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        functions = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        near = difflib.get_close_matches(name, functions, n=1, cutoff=0.6)
        hint = f" (it has {near[0]})" if near else ""
        raise ValueError(f"{path} has no function {name}{hint}. A model file needs model and batch, {_EXAMPLE}")
    return _must_be_callable(found, path, name)


def _must_be_callable(found: Any, path: Path, name: str) -> Callable[..., Any]:
    if not callable(found):
        raise ValueError(f"{name} in {path} is {a_type(found)}; it must be a function, {_EXAMPLE}")
    function: Callable[..., Any] = found
    return function


def _optional_function(module: ModuleType, path: Path, name: str) -> Callable[..., Any] | None:
    found = getattr(module, name, None)
    return None if found is None else _must_be_callable(found, path, name)


def _whole_number(module: ModuleType, path: Path, name: str) -> int | None:
    found = getattr(module, name, None)
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
        raise ValueError(f"{name} in {path} is {found!r}; it must be a whole number of at least 1, such as {name} = 64")
    return found


def _from_object(source: Any, batch: MakeBatch | None, loss: Loss | None) -> LoadedModel:
    from torch import nn

    if not isinstance(source, nn.Module) and not callable(source):
        raise ValueError(
            f"cannot load a model from {a_type(source)}; give a path, a torch.nn.Module or a function that returns one"
        )
    name = type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", "model")
    if batch is None:
        raise ValueError(
            f"{name} came without micro-batches: give batch=, a function of the number of samples, for example "
            "batch=lambda size: (torch.randn(size, 512), torch.randint(10, (size,)))"
        )
    if not callable(batch):
        raise ValueError(f"batch= is {a_type(batch)}; it must be a function of the number of samples")
    return checked(source, batch, name=name, source=name, loss=loss, built_by=f"{name}()")
