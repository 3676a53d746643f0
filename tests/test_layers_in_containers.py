"""Where the layers of a model are that holds them in containers, calls what is inside of them, or has them put results
aside."""

from collections import UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.profiler.model.trace import trace
from support.habits import WIDTH, habit, linear, run


def _half() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Holder(nn.Module):
    """Two halves of a layer, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.mlp = _half(), _half()


class Held(nn.Module):
    """Layers that cannot run themselves: the model's forward calls what they hold."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.head = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for half in layer.children():
                x = x + half(x)
        out: torch.Tensor = self.head(x)
        return out


class Parts(nn.Module):
    """Its parts in a dict, as nanoGPT's, the blocks in a list there."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(_half() for _ in range(3))
        self.parts = nn.ModuleDict({"first": linear(), "blocks": blocks, "norm": nn.LayerNorm(WIDTH)})
        self.head = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts["first"](x)
        for block in self.parts["blocks"].children():
            x = x + block(x)
        out: torch.Tensor = self.head(self.parts["norm"](x))
        return out


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (lambda: Held(lambda: nn.ModuleList([_half(), _half()])), ["0.0", "0.1", "1.0", "1.1"]),
        (lambda: Held(lambda: nn.ModuleDict({"a": _half(), "b": _half()})), ["0.a", "0.b", "1.a", "1.b"]),
        (lambda: Held(Holder), ["0.mixer", "0.mlp", "1.mixer", "1.mlp"]),
        (Parts, ["first", "blocks.0", "blocks.1", "blocks.2", "norm"]),
    ],
)
def test_what_has_no_forward_is_no_layer_but_what_it_holds(build: Callable[[], nn.Module], layers: list[str]) -> None:
    names = [layer.name for layer in trace(habit(build)).layers]

    assert [name.partition(".")[2] or name for name in names] == [*layers, "head"]


class _Keeps(nn.Linear):
    """Returns what it puts into a list of the forward's own class, too."""

    def forward(self, x: torch.Tensor, kept: UserList[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        kept.append(super().forward(x).tanh())
        return kept[-1]


class _Slotted:
    """A list whose items are in none of its attributes that `vars` tells."""

    __slots__ = ("append", "items")

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []
        self.append = self.items.append

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.items[number]


class _Kept(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Keeps(WIDTH, WIDTH) for _ in range(3))
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.make()
        for layer in self.layers:
            x = layer(x, kept)
        return sum(kept, x)


class _KeepsOnItself(nn.Linear):
    """Returns what it keeps, too."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x).tanh()
        return self.kept


class _Collecting(nn.Module):
    def __init__(self, collects: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_KeepsOnItself(WIDTH, WIDTH) for _ in range(3))
        self.collects = collects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return sum((layer.kept for layer in self.layers if layer.kept is not None and self.collects), x)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: _Kept(UserList), "layers.0 changes attributes of an object of UserList"),
        (lambda: _Kept(_Slotted), "layers.0 keeps aside what it returns, and it is read there"),
        (lambda: _Collecting(True), "layers.0 keeps aside what it returns, and it is read there"),
        (lambda: _Collecting(False), ""),
    ],
)
def test_layers_that_put_aside_what_they_return_are_one_where_it_is_read(build: Any, why: str) -> None:
    profile = trace(habit(build))

    assert len(profile.layers) == (1 if why else 3)
    assert any(why in note for note in (*profile.notes, ""))


class Uncalled(Holder):
    """Its forward is not what the model calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.mixer(x))
        return out


class CallsInside(Held):
    def __init__(self) -> None:
        super().__init__(Uncalled)
        self.first = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


def test_layers_that_are_not_called_say_why_they_are_one() -> None:
    profile = trace(habit(CallsInside))

    assert len(profile.layers) == 1
    assert any("the forward does not call layers.0, but what is inside of it" in note for note in profile.notes)


@pytest.mark.slow
def test_a_model_in_the_manner_of_nano_gpt_trains_in_stages() -> None:
    assert run(habit(Parts), ranks=4, pipeline=4).ok
