"""Whether and where a model calls torch's dropouts, as far as its attributes and the code of its classes show it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...profiler.running.code_state import ReachedCode
from ...profiler.running.held_tensors import HeldTensors
from ...profiler.semantics.draws import DROPOUTS

_ATTENTION = "scaled_dot_product_attention"

Drops = Literal["yes", "perhaps", "not now", "no"]
"""Whether a model drops: "yes" if an attribute holds a rate above 0, "perhaps" if only its code names dropout, "not
now" if all rates are 0, else "no"."""


@dataclass(frozen=True)
class DropoutName:
    """A name in a module's namespace that is bound to one of torch's functions: in torch's own modules, or in a file
    that has imported it."""

    namespace: dict[str, Any]
    name: str
    original: Callable[..., Any]


def may_drop(model: nn.Module) -> bool:
    """Whether a module or its configuration has a rate of dropout that is not zero."""
    return any(0 < rate <= 1 for module in model.modules() for rate in _rates(module))


def drops(model: nn.Module) -> Drops:
    """Whether a model drops, before it has run."""
    if may_drop(model):
        return "yes"
    kinds = {type(module) for module in model.modules()}
    spoken = set[str]().union(*map(_spoken, kinds))
    if holds_dropouts(model) or any("drop" not in each.name and each.name in spoken for each in _imported(model)):
        return "perhaps"
    words = {kind: _droppers(kind) for kind in kinds}
    speaking = [m for m in model.modules() if words[type(m)] - set(m._modules.keys()) - vars(m).keys()]
    if not all(any(True for _ in _rates(module)) for module in speaking):
        return "perhaps"
    return "not now" if speaking or any(map(_is_dropout, model.modules())) else "no"


def _droppers(kind: type[nn.Module]) -> set[str]:
    """Names in the code of a module's classes that speak of dropping, but for those of its methods."""
    return {word for word in _spoken(kind) if "drop" in word.lower() and not hasattr(kind, word)}


def _spoken(kind: type[nn.Module]) -> set[str]:
    """Names in the code of a module's methods; of its constructor only those in functions that it makes (lambda x:
    dropout(x)), which run later."""
    codes = [
        code
        for function in _functions(kind)
        for code in (_inside(function.__code__) if function.__name__ == "__init__" else [function.__code__])
    ]
    return {word for code in codes for word in _words(code)}


def dropout_names(model: nn.Module) -> list[DropoutName]:
    """All names under which the model's code may find torch's dropouts and its attention."""
    found = [DropoutName(vars(functional), name, original) for name, original in _originals().items()]
    return [*found, DropoutName(vars(torch), "dropout", torch.dropout), *_imported(model)]


def _originals() -> dict[str, Callable[..., Any]]:
    return {name: getattr(functional, name) for name in (*DROPOUTS, _ATTENTION)}


def _imported(model: nn.Module) -> list[DropoutName]:
    """The names to which files with code of the model have imported these functions."""
    known = {id(original) for original in (*_originals().values(), torch.dropout)}
    kinds = {type(module) for module in model.modules()}
    files = {id(f.__globals__): f.__globals__ for kind in kinds for f in _functions(kind)}
    own = [space for space in files.values() if space is not vars(functional) and space is not vars(torch)]
    return [DropoutName(space, name, value) for space in own for name, value in space.items() if id(value) in known]


def holds_dropouts(model: nn.Module) -> bool:
    """Whether a model also holds one of these functions in another way: in an attribute, a partial, a dict, a default
    of an argument."""
    known = {id(original) for original in (*_originals().values(), torch.dropout)}
    held: list[Any] = []

    def hold(holder: Any) -> None:
        if id(holder) in known:
            held.append(holder)
        else:
            code.enter(holder if isinstance(holder, FunctionType) else type(holder))

    inside = HeldTensors(lambda place, tensor: tensor, hold)
    code = ReachedCode(lambda names: None, inside.look_into)
    inside.enter(model)
    return bool(held)


def drops_by_itself(model: nn.Module) -> str:
    """The first module that drops inside one of torch's operators, as an LSTM does between its layers; "" if there is
    none."""
    for name, module in model.named_modules():
        in_layers = isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
        alpha = isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout) and module.p > 0
        if in_layers or alpha:
            return f"{type(module).__name__} {name}".rstrip()
    return ""


def _is_dropout(module: nn.Module) -> bool:
    return "drop" in type(module).__name__.lower()


def _rates(module: nn.Module) -> Iterator[float]:
    """Rates of dropout in the attributes of a module and of its configuration."""
    is_dropout = _is_dropout(module)
    config = getattr(module, "config", None)
    for source in (vars(module), getattr(config, "__dict__", {})):
        for name, value in source.items():
            if (is_dropout or "drop" in name.lower()) and isinstance(value, float):
                yield value


def _functions(kind: type[nn.Module]) -> Iterator[FunctionType]:
    """The methods of a module's classes, torch's left out, and functions that these call by name."""
    waiting: list[Any] = [value for cls in kind.__mro__ if not _is_torchs(cls) for value in vars(cls).values()]
    seen: set[FunctionType] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        function = value.fget if isinstance(value, property) else value
        if not isinstance(function, FunctionType) or _is_torchs(function):
            continue
        function = inspect.unwrap(function)
        if isinstance(function, FunctionType) and function not in seen:
            seen.add(function)
            yield function
            waiting += [function.__globals__.get(name) for name in function.__code__.co_names]


def _is_torchs(found: Any) -> bool:
    return found is object or str(found.__module__).partition(".")[0] == "torch"


def _inside(code: CodeType) -> list[CodeType]:
    """The code of functions that are defined inside of this code."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _words(code: CodeType) -> Iterator[str]:
    """Names that occur in a function's code, also in functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
        elif isinstance(constant, tuple):  # names of arguments in a call
            yield from (each for each in constant if isinstance(each, str))


class CallsInstead(TorchFunctionMode):
    """While it lasts, calls of some of torch's functions call others instead, whoever calls them."""

    def __init__(self, instead: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.backward, torch.autograd.backward) and not kwargs.get("inputs"):
            with self:  # layers may run again in it
                return self._backward(*args, **kwargs)
        return self._instead.get(func, func)(*args, **kwargs)

    @staticmethod
    def _backward(outputs: Any, gradient: Any = None, **kwargs: Any) -> None:
        """torch.autograd.backward of the graph's edges: if it were given tensors, torch would ask this mode again."""
        edges = [get_gradient_edge(output) for output in tree_leaves(outputs)]
        torch.autograd.backward(edges, kwargs.pop("grad_tensors", gradient), **kwargs)
