"""The model's own code in a backward: functions written in Python, and hooks on gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import BackwardHook

from ..semantics.own_code import is_own
from .meters import OwnCode, Recorder

_HERE = __name__.partition(".")[0]


def has_own_backward(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a backward from these outputs runs a function written in Python, other than ours: one of the model's own,
    or one of torch's that may call such functions (reentrant checkpoints)."""
    nodes, seen = [output.grad_fn for output in outputs], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and node._forward_cls.__module__.partition(".")[0] != _HERE:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


@contextmanager
def recorded_as_own(recorder: Recorder) -> Iterator[None]:
    """While it lasts, operators of such functions and hooks are recorded as the model's own. Hooks on a module's
    backward count as functions, for they, too, are given gradients that nobody follows."""
    run, register, begin = BackwardCFunction.apply, torch.Tensor.register_hook, BackwardHook.__init__

    def own(code: OwnCode, function: Callable[..., Any], *args: Any) -> Any:
        before, recorder.own = recorder.own, code
        try:
            return function(*args)
        finally:
            recorder.own = before

    def apply(node: Any, *args: Any) -> Any:
        return own("function", run, node, *args) if is_own(node._forward_cls) else run(node, *args)

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return register(tensor, partial(own, "hook", hook) if is_own(hook) else hook)

    def around(hook: Callable[..., Any]) -> Callable[..., Any]:
        return partial(own, "function", hook) if is_own(hook) else hook

    def begin_hooks(self: BackwardHook, module: Any, hooks: Any, pre_hooks: Any) -> None:
        begin(self, module, [around(hook) for hook in hooks], [around(hook) for hook in pre_hooks])

    with (
        patch.object(BackwardCFunction, "apply", apply),
        patch.object(torch.Tensor, "register_hook", register_hook),
        patch.object(BackwardHook, "__init__", begin_hooks),
    ):
        yield
