"""Name every tensor that a model's forward makes, in the profiler and in the executor alike."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..model.model_profile import Producer

Replace = Callable[[Producer, torch.Tensor], torch.Tensor]
Notice = Callable[[Producer, torch.Tensor], None]
Start = Callable[[str, str, int], None]


class Producers(TorchFunctionMode):
    """Counts calls of layer modules, and calls of torch functions outside all of them ("glue"), while `root` runs.

    A layer module's tensors are (kind "module", its full name, call, leaf of the flattened output). A glue tensor is
    (kind "glue", name of the torch function, the how-manieth glue call of *that* function, leaf): counting per function
    keeps the names when some other helper is called once more or less. What is called in another function than a
    forward (one that makes masks, one that goes through the pictures of a batch) goes by the name of that, too:
    "make_mask.expand". Functions inside layer modules are never
    counted, so the names stay the same when layer modules are swapped for stubs that return tensors of equal structure.
    Modules without parameters (rotary tables, dropout) are not layer modules: what they call is glue. So is a custom
    torch.autograd.Function, under the name of its class: what its forward calls belongs to it. The one
    that a module's backward hooks are made of returns its inputs, and torch looks at what it returned: it is no
    producer.

    replace: may put another tensor in place of any produced one; it works above autograd, so gradients reach it. What a
        function has written into stays the same tensor, and gets the other's numbers: the model may go on with it
        whatever the function returned.
    on_produced: sees every produced tensor, after replacement.
    on_start: called with (kind, name, call) before a layer module or glue function runs. A glue function that turns out
        to return no tensor is not counted: the next call of it starts with the same number.

    only: producers for which replace and on_produced are called, if not for all (others that share their names, too).
        Where none of them is glue, neither functions are looked at nor modules that have none of them inside.
    stays: leave the hooks on the modules, which do nothing between runs, instead of making them for each.

    Inside layer modules, where nothing is counted, it steps off the stack of function modes, so that their functions
    cost what they cost without it.
    """

    def __init__(
        self,
        root: nn.Module,
        layer_modules: Iterable[str],
        replace: Replace | None = None,
        on_produced: Notice | None = None,
        on_start: Start | None = None,
        only: Iterable[Producer] | None = None,
        stays: bool = False,
    ) -> None:
        super().__init__()
        modules = {name: root.get_submodule(name) for name in layer_modules}
        self._replace = replace
        self._on_produced = on_produced
        self._on_start = on_start
        self._only = None if only is None else {(producer.kind, producer.name) for producer in only}
        has_glue = self._only is None or any(kind == "glue" for kind, _ in self._only)
        self._sees_functions = has_glue or on_start is not None
        self._modules = modules if self._sees_functions else self._around_wanted(modules)
        self._stays = stays
        self._calls: Counter[tuple[str, str]] = Counter()
        self._depth = 0
        self._runs = False
        self._handles: list[Any] = []
        self._is_aside = False

    def __enter__(self) -> Self:
        self._calls.clear()
        self._depth = 0
        self._is_aside = False
        if not self._handles:
            for name, module in self._modules.items():
                self._handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                self._handles.append(module.register_forward_hook(self._leaving(name)))
        self._runs = True
        if self._sees_functions:
            self._apply = torch.autograd.Function.__dict__["apply"]
            torch.autograd.Function.apply = classmethod(self._applied)  # type: ignore[assignment]
            super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runs = False
        if self._sees_functions:
            if not self._is_aside:  # it is where a layer has raised
                super().__exit__(kind, error, trace)
            torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        if not self._stays:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    @property
    def depth(self) -> int:
        """How many layer modules are running inside each other right now; only the outermost is counted."""
        return self._depth

    def calls(self, name: str) -> int:
        """How many calls of layer module `name` have ended so far."""
        return self._calls["module", name]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count `func` if no layer module is running."""
        if self._depth or func is torch._C._set_grad_enabled:
            return func(*args, **(kwargs or {}))
        name = _caller() + getattr(func, "__name__", str(func))
        self._start("glue", name)
        with self._uncounted():
            output = func(*args, **(kwargs or {}))
        return self._produced("glue", name, output, given=(*args, *(kwargs or {}).values()))

    def _applied(self, function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        apply = self._apply.__get__(None, function)
        if self._depth:
            return apply(*args, **kwargs)
        if function is BackwardHookFunction:
            with self._uncounted():
                return apply(*args, **kwargs)
        name = function.__name__
        self._start("glue", name)
        with self._uncounted():
            output = apply(*args, **kwargs)
        return self._produced("glue", name, output)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not self._runs:
                return
            if self._depth == 0:
                self._start("module", name)
                self._step_aside()
            self._depth += 1

        return enter

    def _leaving(self, name: str) -> Callable[..., Any]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not self._runs:
                return output
            self._depth -= 1
            if self._depth:
                return output
            self._step_back()
            return self._produced("module", name, output)

        return leave

    def _around_wanted(self, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """The modules that `only` names, and those around them."""
        names = {name for _, name in self._only or ()}
        wanted = {id(module) for name, module in modules.items() if name in names}
        return {n: m for n, m in modules.items() if any(id(inner) in wanted for inner in m.modules())}

    def _step_aside(self) -> None:
        on_top = self._sees_functions and _get_current_function_mode() is self
        if on_top:  # not if the model has put another mode there
            super().__exit__(None, None, None)
            self._is_aside = True

    def _step_back(self) -> None:
        if self._is_aside:
            super().__enter__()
            self._is_aside = False

    def _start(self, kind: str, name: str) -> None:
        if self._on_start is not None:
            with self._uncounted():
                self._on_start(kind, name, self._calls[kind, name])

    def _hand_over(self, producer: Producer, tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
        with self._uncounted():
            if self._replace is not None:
                made, tensor = tensor, self._replace(producer, tensor)
                if in_place and tensor is not made and not made._is_view():
                    tensor = made.detach_().copy_(tensor)
            if self._on_produced is not None:
                self._on_produced(producer, tensor)
        return tensor

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """While it lasts, torch functions are not counted: those that callbacks call are no part of the model."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _produced(self, kind: Any, name: str, output: Any, given: tuple[Any, ...] = ()) -> Any:
        leaves, tree = ([output], None) if isinstance(output, torch.Tensor) else tree_flatten(output)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves) or any(map(is_wrapped, leaves)):
            return output
        call = self._calls[kind, name]
        self._calls[kind, name] += 1
        if self._only is not None and (kind, name) not in self._only:
            return output
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                in_place = any(leaf is x for x in given)
                leaves[i] = self._hand_over(_producer(kind, name, call, i), leaf, in_place)
        return leaves[0] if tree is None else tree_unflatten(leaves, tree)


def _caller() -> str:
    """The name of the function that calls a torch function, followed by a dot; '' if it is a forward."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_ABOVE):
        if (
            frame.f_code.co_name == "forward"
        ):  # of a module of torch's, such as a Sequential: who calls that is not asked
            return ""
        frame = frame.f_back
    return "" if frame is None else _named(frame.f_code)


_ABOVE = ("torch.", f"{__name__.partition('.')[0]}.")
"""The names of torch's modules and of ours begin so: their functions may stand between a model and a torch function."""


@lru_cache(maxsize=10_000)
def _named(code: CodeType) -> str:
    names = [name for name in code.co_qualname.split(".") if not name.startswith("<")]
    return "" if not names or "forward" in names else f"{names[-1]}."


def is_wrapped(leaf: Any) -> bool:
    """Whether a tensor is a wrapper of torch.func (vmap, grad), which exists only while the transformation runs."""
    return isinstance(leaf, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside of what torch.func has put around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@lru_cache(maxsize=10_000)
def _producer(kind: Any, name: str, call: int, leaf: int) -> Producer:
    """The producer with these names and numbers; all forwards share one object for it."""
    return Producer(kind=kind, name=name, call=call, leaf=leaf)
