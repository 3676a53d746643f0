"""Random draws inside of a model: the same for every run, so that two runs can be compared."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
"""torch's functions that drop elements or whole features; under a plan their masks are drawn sample by sample."""

_NOTHING_DROPPED = ("native_dropout", "_fused_dropout")
_IN_ORDER = ("randperm",)
_COMPUTES = ("rrelu", "_cudnn_rnn", "miopen_rnn", "_flash_attention", "_efficient_attention")
"""First letters of the names of operators that do not return random numbers themselves, but results made with some."""
_DRAWN = 0.5


class SameDraws(TorchDispatchMode):
    """While it lasts, every draw of random numbers gives one and the same number. Two runs that split a batch
    differently could not be compared otherwise, however they are seeded. drew: whether there was a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._overloadpacket.__name__
        if draws(func) and name.startswith(_COMPUTES):
            self.drew = True
            return func(**_without_chance(func, args, kwargs or {}))
        output = func(*args, **(kwargs or {}))
        if not draws(func):
            return output
        self.drew = True
        if name in _NOTHING_DROPPED:
            return args[0].clone(), torch.ones_like(output[1])
        if name in _IN_ORDER:
            return output.copy_(torch.arange(len(output), dtype=output.dtype, device=output.device))
        return tree_map(_same, output)


class SameChoices(TorchDispatchMode):
    """While it lasts, draws of a single number, which may decide whether a layer is left out, give the same in every
    run, whatever was drawn before."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        is_one = isinstance(output, torch.Tensor) and output.numel() == 1 and output.is_floating_point()
        return _same(output) if is_one and draws(func) else output


def draws(func: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in func._overloadpacket.__name__


def _without_chance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator, by name, with which it does what it does on average: it drops nothing, and takes
    slopes from the middle of their range."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    given = {argument.name: named.get(argument.name, argument.default_value) for argument in func._schema.arguments}
    given |= {name: 0.0 for name in ("dropout", "dropout_p") if name in given}
    if "upper" in given:
        given["lower"] = given["upper"] = (given["lower"] + given["upper"]) / 2
    return given


def dice() -> tuple[Any, Any]:
    """The states of Python's and numpy's own random numbers, which models draw from, too (mixup, schedules)."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


def put_dice_back(states: tuple[Any, Any]) -> None:
    """Let Python and numpy draw again what they drew after `dice`."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def seed_dice(number: int) -> None:
    """Let Python and numpy draw what follows from a number."""
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def dice_apart() -> Iterator[None]:
    """While it lasts, draws from Python and numpy do not change what is drawn from them afterwards."""
    before = dice()
    try:
        yield
    finally:
        put_dice_back(before)


@contextmanager
def seeded_dice(number: int) -> Iterator[None]:
    """While it lasts, draws from Python and numpy begin from `number`; they do not change what is drawn from them
    afterwards."""
    with dice_apart():
        seed_dice(number)
        yield


def _same(drawn: Any) -> Any:
    if not isinstance(drawn, torch.Tensor):
        return drawn
    with torch.no_grad():
        return drawn.fill_(_DRAWN if drawn.is_floating_point() else 0)
