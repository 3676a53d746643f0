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

import copy
import difflib
import functools
import hashlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Union

from ..document import check_ends, parsed
from ..garbage import without_garbage_collection

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch = Union[tuple[Any, ...], dict[str, Any], "torch.Tensor"]
Build = Callable[[], "nn.Module"]
MakeBatch = Callable[..., Any]
Loss = Callable[[Any, Any], "torch.Tensor"]

_EXAMPLE = """for example:

    def model():
        return MyModel()

    def batch(size):
        return torch.randn(size, 512), torch.randint(10, (size,))

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output, batch[1])"""

_DEFAULT_CONTEXT = 8192
"""Longest sequence taken from a config.json on its own: longer contexts are asked for with --seq-len."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be built anywhere, and micro-batches for it.

    build: constructs the module on torch's current default device.
    batch: micro-batch of that many samples at `seq_len`, real CPU tensors.
    loss: mean loss of (output, batch); None if the module returns its own.
    small: the same for the model file's small version; None if it has none.
    """

    build: Build
    batch: Callable[[int], Batch]
    loss: Loss | None
    name: str
    source: str
    seq_len: int | None = None
    weight: Callable[[Any], "torch.Tensor"] | None = None
    small: Callable[[], "LoadedModel"] | None = None
    global_batch: int | None = None
    make_batch: MakeBatch | None = None

    def with_seq_len(self, seq_len: int) -> "LoadedModel":
        """This model with micro-batches of another sequence length. Raises ValueError if it has no sequence."""
        if self.make_batch is None or not _takes_seq_len(self.make_batch):
            raise ValueError(
                f"--seq-len {seq_len} was given, but batch(size) of {self.source} takes no seq_len: "
                "write it as `def batch(size, seq_len=1024)`, or leave --seq-len out"
            )
        if seq_len < 1:
            raise ValueError(f"--seq-len is {seq_len}; it must be at least 1, for example --seq-len 1024")
        return replace(self, seq_len=seq_len, batch=_bound_batch(self.make_batch, seq_len, self.source))


def load_model(
    source: "str | Path | nn.Module | Build",
    seq_len: int | None = None,
    batch: MakeBatch | None = None,
    loss: Loss | None = None,
) -> LoadedModel:
    """Model at `source`: model.py, model.py:function, config.json (or its folder), a module, or a constructor.
    config.json@vocab%128 is that of a config.json with its vocabulary padded to a multiple of 128 words.

    seq_len: tokens per sample; default: the model's own. batch, loss: only for a module or a constructor, which
    bring none of their own. Raises ValueError that says what is missing, with an example.
    """
    if not isinstance(source, str | Path):
        loaded = _from_object(source, batch, loss)
    elif batch is not None or loss is not None:
        raise ValueError(f"batch= and loss= go with a module; {source} defines its own functions batch and loss")
    else:
        loaded = _from_path(str(source))
    return loaded if seq_len is None else loaded.with_seq_len(seq_len)


def split_inputs(module: "nn.Module", batch: Batch, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) for module's forward out of a micro-batch.

    A dict gives the keys that forward names (all of them, if it takes **kwargs and there is no separate loss). A tuple
    without a separate loss goes in whole. With one, the tuple is (inputs..., targets): the last element is for the
    loss only, unless forward requires it; what is more than forward accepts is for the loss, too. A tensor by itself is
    the only input, and all that the loss is given.
    """
    if not isinstance(batch, tuple | list | dict):
        return (batch,), {}
    parameters = list(inspect.signature(module.forward).parameters.values())
    if isinstance(batch, dict):
        any_key = any(p.kind is p.VAR_KEYWORD for p in parameters) and not has_loss
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        return (), {key: value for key, value in batch.items() if any_key or key in names}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    most = len(batch) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    if has_loss:
        return batch[: max(required, min(len(batch) - 1, most))], {}
    if len(batch) > most:
        raise ValueError(
            f"batch gives {len(batch)} elements, but forward of {type(module).__name__} takes {most}: "
            "give the model file a loss(output, batch), or return only the inputs from batch"
        )
    return batch, {}


PADDED = "@vocab%"
"""Between the path of a config.json and the number of words of which its vocabulary is made a multiple."""


def _from_path(source: str) -> LoadedModel:
    source, mark, multiple = source.partition(PADDED)
    if mark and not (multiple.isdecimal() and int(multiple) > 0):
        raise ValueError(
            f"{source}{mark}{multiple}: a vocabulary is padded to a multiple of a whole number, as in @vocab%128"
        )
    path_part, _, function = source.partition(".py:")
    path = Path(path_part + ".py") if function else Path(source)
    if path.is_dir():
        path = _config_in(path)
    if not path.exists():
        raise ValueError(_not_there(path))
    check_ends(path)
    if path.suffix == ".json":
        return _from_config(path, int(multiple or 1))
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
    loaded = _checked(
        build,
        batch,
        name=path.stem if function == "model" else function,
        source=source,
        loss=_optional_function(module, path, "loss"),
        weight=_optional_function(module, path, "weight"),
        global_batch=_whole_number(module, path, "global_batch"),
        seq_len=_whole_number(module, path, "seq_len"),
    )
    if small is None:
        return loaded
    _must_be_callable(small, path, "small")
    _must_be_callable(small_batch, path, "small_batch")
    make_small = functools.partial(
        _checked,
        small,
        small_batch,
        name=f"{loaded.name}-small",
        source=source,
        loss=loaded.loss,
        weight=loaded.weight,
        global_batch=None,
        seq_len=None if small_batch is not batch else loaded.seq_len,
    )
    return replace(loaded, small=make_small)


def _checked(
    build: Callable[[], Any],
    make_batch: MakeBatch,
    *,
    name: str,
    source: str,
    loss: Loss | None,
    weight: Callable[[Any], Any] | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
) -> LoadedModel:
    takes = _takes_seq_len(make_batch)
    if takes and seq_len is None:
        default = inspect.signature(make_batch).parameters["seq_len"].default
        if not isinstance(default, int):
            raise ValueError(
                f"batch(size, seq_len) of {source} has no default length: write `def batch(size, seq_len=1024)`, "
                "or set seq_len = 1024 in the file"
            )
        seq_len = default
    bound = _bound_batch(make_batch, seq_len if takes else None, source)
    return LoadedModel(
        build=_guarded_build(build, source, bound, loss is not None),
        batch=bound,
        loss=loss,
        name=name,
        source=source,
        seq_len=seq_len if takes else None,
        weight=weight,
        global_batch=global_batch,
        make_batch=make_batch,
    )


def _guarded_build(build: Callable[[], Any], source: str, batch: Callable[[int], Batch], has_loss: bool) -> Build:
    def forward(module: "nn.Module") -> None:
        args, kwargs = split_inputs(module, batch(2), has_loss)
        _call(functools.partial(module, *args, **kwargs), f"the first forward of {source}, whose modules are lazy,")

    kept: list[nn.Module] = []
    """The one module that build always returns, as it was."""

    def guarded() -> "nn.Module":
        import torch
        from torch import nn

        from .building import initialised, is_lazy, with_dense_gradients, without_compiler

        module = _copy_of(kept[0]) if kept else _call(build, f"model() of {source}")
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"model() of {source} returned a {type(module).__name__}; it must return a torch.nn.Module, "
                "for example `return MyModel()`"
            )
        is_older = torch.get_default_device().type == "meta" and not all(p.is_meta for p in module.parameters())
        if is_older and not kept and _call(build, f"model() of {source}") is module:
            kept.append(module)
            module = _copy_of(module)
        module = without_cache(with_dense_gradients(without_compiler(module)))
        return initialised(module, forward) if is_lazy(module) else module

    return guarded


def without_cache(module: "nn.Module") -> "nn.Module":
    """The module, told to keep no keys and values for generation, which Hugging Face's do unless their configuration
    says so. Training never reads them; recompute would find those of the forward there. Configurations that others may
    hold are copied, not changed."""
    copies: dict[int, Any] = {}
    for part in module.modules():
        config = part.__dict__.get("config")
        if config is not None and getattr(config, "use_cache", False) is True:
            made = copies.setdefault(id(config), copy.copy(config))
            made.use_cache = False
            part.__dict__["config"] = made
    return module


def _bound_batch(make_batch: MakeBatch, seq_len: int | None, source: str) -> Callable[[int], Batch]:
    def bound(size: int) -> Batch:
        import torch

        call = (
            functools.partial(make_batch, size)
            if seq_len is None
            else functools.partial(make_batch, size, seq_len=seq_len)
        )
        made = _call(call, f"batch({size}) of {source}")
        if isinstance(made, list):
            return tuple(made)
        if isinstance(made, tuple | dict | torch.Tensor):
            return made
        raise ValueError(
            f"batch({size}) of {source} returned a {type(made).__name__}; it must return a tuple or a dict of tensors, "
            "for example `return torch.randn(size, 512), torch.randint(10, (size,))`"
        )

    return bound


def _takes_seq_len(make_batch: MakeBatch) -> bool:
    return "seq_len" in inspect.signature(make_batch).parameters


def _import_file(path: Path) -> ModuleType:
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"meshwright_model_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        _call(functools.partial(spec.loader.exec_module, module), str(path))
    except ValueError:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _call(function: Callable[[], Any], what: str) -> Any:
    """Result of the user's code, whose failures are reported with their place in a sentence."""
    try:
        return function()
    except FileNotFoundError as error:
        raise ValueError(
            f"{what} needs the file {error.filename}, which is not there ({place_of(error)}). A plan needs shapes, not "
            "data: make the tensors with torch.randn or torch.randint, and open files only when training"
        ) from error
    except ImportError as error:
        raise ValueError(f"{what} imports what is not installed: {error} ({place_of(error)})") from error
    except SyntaxError as error:
        raise ValueError(f"{what} is not valid Python: {error.msg} ({error.filename}:{error.lineno})") from error
    except SystemExit as error:
        raise ValueError(
            f"{what} ends the process by sys.exit({error.code!r}) ({place_of(error)}); put what runs a program or "
            'reads a command line below `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error} ({place_of(error)})") from error


def place_of(error: BaseException) -> str:
    """file:line of the innermost frame that is neither a library's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename
        and not Path(frame.filename).is_relative_to(Path(__file__).parents[1])
        and not frame.filename.startswith("<")
    ]
    frame = (own or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"


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
        raise ValueError(f"{name} in {path} is a {type(found).__name__}; it must be a function, {_EXAMPLE}")
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
            f"cannot load a model from a {type(source).__name__}; give a path, a torch.nn.Module or a function "
            "that returns one"
        )
    name = type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", "model")
    if batch is None:
        raise ValueError(
            f"{name} came without micro-batches: give batch=, a function of the number of samples, for example "
            "batch=lambda size: (torch.randn(size, 512), torch.randint(10, (size,)))"
        )
    if not callable(batch):
        raise ValueError(f"batch= is a {type(batch).__name__}; it must be a function of the number of samples")
    build = functools.partial(_copy_of, source) if isinstance(source, nn.Module) else source
    return _checked(build, batch, name=name, source=name, loss=loss)


def _copy_of(module: "nn.Module") -> "nn.Module":
    """A copy with its own parameters; without their numbers when the default device is meta."""
    import torch
    from torch import nn

    memo: dict[int, Any] = {}
    if torch.get_default_device().type == "meta":
        for p in module.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for b in module.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(module, memo)


def _from_config(path: Path, multiple: int = 1) -> LoadedModel:
    """The model of a config.json. multiple: of which the number of words is made one, by adding some."""
    try:
        document = parsed(json.loads, path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. A Hugging Face config.json is a JSON object") from None
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ValueError(
            f'{path} has no "model_type", so it is no Hugging Face config.json; '
            'such a file says, for example, "model_type": "llama", "architectures": ["LlamaForCausalLM"]'
        )
    if multiple > 1:
        words = document.get("vocab_size")
        if not isinstance(words, int):
            raise ValueError(f'{path} has no "vocab_size" at its top, so there is nothing to pad')
        document["vocab_size"] = -(-words // multiple) * multiple
    transformers = _transformers(path)
    architecture = _architecture(transformers, document, path)

    def config() -> Any:
        made = _call(lambda: transformers.AutoConfig.for_model(**document), str(path))
        made.use_cache = False
        return made

    def build() -> "nn.Module":
        fused = {"attn_implementation": "sdpa"} if getattr(architecture, "_supports_sdpa", False) else {}
        module: nn.Module = architecture._from_config(config(), **fused)
        if architecture.__name__.endswith("LMHeadModel"):
            module.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else transformers warns that it guesses this
        return module

    first = config()
    make_batch = _config_batch(architecture, first, path)
    longest = next((getattr(first, key) for key in _CONTEXT_KEYS if isinstance(getattr(first, key, None), int)), None)
    return _checked(
        build,
        make_batch,
        name=path.resolve().parent.name,
        source=str(path) if multiple == 1 else f"{path}{PADDED}{multiple}",
        loss=None,
        seq_len=min(longest or 1024, _DEFAULT_CONTEXT) if _takes_seq_len(make_batch) else None,
    )


_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions")


def _transformers(path: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"{path} is a Hugging Face config.json, and transformers is not installed: pip install 'meshwright[hf]'"
        ) from None
    return transformers


def _architecture(transformers: Any, document: dict[str, Any], path: Path) -> Any:
    model_type = document["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f'{path} is of model_type "{model_type}", which transformers {transformers.__version__} does not know; '
            "write a model.py that builds it"
        )
    name = next(iter(document.get("architectures") or ()), None)
    if name is None:
        known = (found for task in _LABELS if (found := _auto_classes(task).get(model_type)))
        name = next((found if isinstance(found, str) else found[0] for found in known), None)
    if name is None:
        raise ValueError(f'{path} has no "architectures"; add for example "architectures": ["LlamaForCausalLM"]')
    with without_garbage_collection(), _without_scipy():
        architecture = getattr(transformers, name, None)
    if architecture is None:
        raise ValueError(
            f'{path} asks for the architecture "{name}", which transformers {transformers.__version__} does not have; '
            "write a model.py that builds it"
        )
    return architecture


@contextmanager
def _without_scipy() -> Iterator[None]:
    """Every model of transformers imports scipy.optimize, for the one function by which losses of object detection
    match boxes. An eighth of all time to import goes into that; here it waits until the function is called."""
    name = "scipy.optimize"
    if name in sys.modules or importlib.util.find_spec("scipy") is None:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.linear_sum_assignment = _linear_sum_assignment  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(*args, **kwargs)


def _config_batch(architecture: Any, config: Any, path: Path) -> MakeBatch:
    """Micro-batches of a Hugging Face model with a head that returns its own loss."""
    task = next((task for task in _LABELS if _is_made_for(architecture, task)), None)
    main_input = architecture.main_input_name
    if task is None or main_input not in _INPUTS:
        raise ValueError(
            f'{path} asks for "{architecture.__name__}", whose batches are not known here (known: models that take '
            f"{' or '.join(_INPUTS)} and return a loss of one of {', '.join(_LABELS)}); give another head under "
            '"architectures", or write a model.py with model() and batch(size)'
        )
    make_input, make_labels = _INPUTS[main_input], _LABELS[task]

    def sequences(size: int, seq_len: int) -> Batch:
        return {main_input: make_input(config, size, seq_len), "labels": make_labels(config, size, seq_len)}

    def samples(size: int) -> Batch:
        return {main_input: make_input(config, size, 0), "labels": make_labels(config, size, 0)}

    return sequences if {make_input, make_labels} & {_tokens, _class_per_token} else samples


def _is_made_for(architecture: Any, task: str) -> bool:
    """Whether transformers would choose the class for a task, for any type of model."""
    found = _auto_classes(task).values()
    return any(architecture.__name__ in ((names,) if isinstance(names, str) else names) for names in found)


def _auto_classes(task: str) -> dict[str, Any]:
    """Class names by model_type (a few types have several) that transformers' auto class for a task chooses from."""
    from transformers.models.auto import modeling_auto

    names: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    return names


def _tokens(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(config.vocab_size, (size, seq_len))


def _image(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    side = getattr(config, "image_size", 224)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return torch.randn(size, getattr(config, "num_channels", 3), height, width)


def _spectrogram(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    """Two frames for each position of the encoder, whose second convolution has a stride of 2."""
    import torch

    return torch.randn(size, config.num_mel_bins, 2 * config.max_source_positions)


def _class_per_sample(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(config.num_labels, (size,))


def _class_per_token(config: Any, size: int, seq_len: int) -> "torch.Tensor":
    import torch

    return torch.randint(config.num_labels, (size, seq_len))


_MakeTensor = Callable[[Any, int, int], "torch.Tensor"]

_INPUTS: dict[str, _MakeTensor] = {"input_ids": _tokens, "pixel_values": _image, "input_features": _spectrogram}
"""How to make the main input of a Hugging Face model, by the name that its class gives it."""

_LABELS: dict[str, _MakeTensor] = {
    "SPEECH_SEQ_2_SEQ": _tokens,
    "SEQ_TO_SEQ_CAUSAL_LM": _tokens,
    "MASKED_LM": _tokens,
    "CAUSAL_LM": _tokens,
    "IMAGE_CLASSIFICATION": _class_per_sample,
    "SEQUENCE_CLASSIFICATION": _class_per_sample,
    "TOKEN_CLASSIFICATION": _class_per_token,
}
"""How to make the labels, by transformers' task; a config that names no architecture gets the first that it has."""
