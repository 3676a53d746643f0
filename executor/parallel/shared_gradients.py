"""Watch over a stage's first step: which whole parameters see a share of their gradient on each tensor rank."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..torch_compat import in_backward
from .tensor_layout import TensorLayout

_watch: "SharedGradients | None" = None
"""The watch that is running, if one is."""


class SharedGradients(TorchFunctionMode):
    """Watches the first step for whole parameters that are used between columns and rows.

    There each tensor rank has its own features or heads, and sees only their share of the gradient of, say, a norm of
    the queries. Follows every tensor that differs between ranks through torch functions: a parameter that meets one
    (or meets it as something computed from parameters alone) is added to layout.partial. Anything else that meets one
    and wants a gradient would get a share for the whole without anyone noticing, and so would a parameter that is used
    elsewhere, too: ValueError.

    Where layers run on slices of the sequence nothing is left to find: all their whole parameters are partial.
    """

    def __init__(self, stage: nn.Module, layout: TensorLayout) -> None:
        super().__init__()
        owners = {id(p): (m, own) for m in stage.modules() for own, p in m._parameters.items() if p is not None}
        self._places = [(name, *owners[id(p)]) for name, p in stage.named_parameters()]
        self._layout = layout
        self._differs = WeakIdKeyDictionary()
        self._origins = WeakIdKeyDictionary()
        self._parameters: dict[int, tuple[str, nn.Parameter]] = {}
        self._found: set[str] = set()
        self._used_whole: set[str] = set()
        self._is_muted = False

    def __enter__(self) -> Self:
        global _watch
        _watch = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        global _watch
        super().__exit__(*raised)
        _watch = None
        for name in sorted(self._found & self._used_whole) if raised[0] is None else ():
            raise ValueError(
                f"{name} is read between features that tensor parallelism cuts and outside of them; plan with tensor=1"
            )
        self._layout.partial |= self._found

    @contextmanager
    def muted(self) -> Iterator[None]:
        """While it lasts, nothing is followed: for our own functions, which join what differs with what does not on
        purpose."""
        was_muted, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = was_muted

    def differs(self, x: torch.Tensor) -> bool:
        """Whether x, or the tensor that it is a view of, differs between tensor ranks. Cut parameters do."""
        return x in self._differs or (x._base is not None and x._base in self._differs) or self._is_cut(x)

    def mark(self, x: torch.Tensor, differs: bool) -> None:
        """Note whether x differs between tensor ranks."""
        if differs:
            self._differs[x] = True
        else:
            self._differs.pop(x, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and follow what goes in and out."""
        output = func(*args, **(kwargs or {}))
        # A mode that sees operators (to count FLOPs, say) brings those of backward here, too; recompute builds a graph.
        if self._is_muted or (in_backward() and not torch.is_grad_enabled()):
            return output
        if getattr(func, "__self__", None) is torch.Tensor.grad:  # nothing that is computed from its parameter
            return output
        read = args[1:] if func is torch.Tensor.copy_ else args  # what is overwritten does not count
        given = [x for x in tree_leaves((read, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        if any(self.differs(x) for x in given):
            for x in given:
                if x.requires_grad and not self.differs(x):
                    self._found |= self._names_behind(x, func)
            for x in made:
                self.mark(x, differs=True)
            if func is torch.Tensor.copy_ and args[0]._base is not None:
                self.mark(args[0]._base, differs=True)
            return output
        known = [self._known(x) for x in given]
        names = frozenset().union(*(names for names in known if names))
        if names and made:
            if all(known):
                for x in made:
                    self._origins[x] = names
            else:
                self._used_whole |= names - self._layout.partial
        return output

    def _is_cut(self, x: torch.Tensor) -> bool:
        return isinstance(x, nn.Parameter) and not self._layout.cuts.keys().isdisjoint(self._known(x))

    def _known(self, x: torch.Tensor) -> frozenset[str]:
        """Names of the parameters that x is, or that alone it is computed from; none for other tensors."""
        if x in self._origins:
            names: frozenset[str] = self._origins[x]
            return names
        if not isinstance(x, nn.Parameter):
            return frozenset()
        if id(x) not in self._parameters:  # fully_shard makes new ones whenever it gathers
            now = ((name, module._parameters.get(own)) for name, module, own in self._places)
            self._parameters = {id(p): (name, p) for name, p in now if p is not None}
        return frozenset([self._parameters[id(x)][0]]) if id(x) in self._parameters else frozenset()

    def _names_behind(self, x: torch.Tensor, func: Callable[..., Any]) -> frozenset[str]:
        names = self._known(x)
        if not names:
            raise ValueError(
                f"{getattr(func, '__name__', func)} joins features that tensor parallelism cuts with a whole tensor of "
                f"{tuple(x.shape)} that wants a gradient, of which each rank would see a share; plan with tensor=1"
            )
        return names


def unwatched(forward: Callable[..., torch.Tensor], differs: bool) -> Callable[..., torch.Tensor]:
    """`forward`, inside of which the watch follows nothing. differs: whether its result differs between tensor
    ranks."""

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        watch = _watch
        if watch is None:
            return forward(*args, **kwargs)
        with watch.muted():
            y = forward(*args, **kwargs)
        watch.mark(y, differs)
        return y

    return watched


def out_of_sight() -> AbstractContextManager[None]:
    """While it lasts, nothing is followed, for what runs is no part of the step."""
    return nullcontext() if _watch is None else _watch.muted()


def hand_on_difference(made: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """`made`, noted as different between tensor ranks if one of the tensors it was made from is; for functions in which
    the watch follows nothing."""
    if _watch is not None and any(_watch.differs(x) for x in given):
        _watch.mark(made, differs=True)
    return made
