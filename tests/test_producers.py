"""Producers names every tensor of a forward, the same with stubs in place of layer modules."""

import pytest
import torch
from torch import nn
from torch._C import _len_torch_function_stack

from meshwright.profiler.model.model_profile import Producer
from meshwright.profiler.semantics.producers import Producers


class _Twice(nn.Module):
    """Calls its block twice, with glue around it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x * 2.0)
        z = self.block(self.drop(y) + 1.0)
        return z + y


def _names(model: nn.Module) -> list[tuple[str, str, int, int]]:
    seen: list[tuple[str, str, int, int]] = []
    x = torch.ones(1, 4)
    with Producers(model, ["block"], on_produced=lambda p, t: seen.append((p.kind, p.name, p.call, p.leaf))):
        model(x)
    return seen


def test_calls_and_glue_are_counted_apart() -> None:
    assert _names(_Twice()) == [
        ("glue", "mul", 0, 0),
        ("module", "block", 0, 0),
        ("glue", "dropout", 0, 0),
        ("glue", "add", 0, 0),
        ("module", "block", 1, 0),
        ("glue", "add", 1, 0),
    ]


def test_stubs_keep_the_names() -> None:
    model = _Twice()
    whole = _names(model)
    model.block.forward = lambda x: torch.zeros(1, 4) + 0.0  # type: ignore[method-assign]

    assert _names(model) == whole


def test_names_start_anew_in_every_run() -> None:
    model = _Twice()

    assert _names(model) == _names(model)


def test_replaced_tensors_get_the_gradient() -> None:
    model = _Twice()
    received = torch.ones(1, 4, requires_grad=True)
    first = Producer(kind="module", name="block", call=0, leaf=0)

    x = torch.ones(1, 4)

    with Producers(model, ["block"], replace=lambda p, t: received if p == first else t):
        y = model(x)
    y.sum().backward()

    assert received.grad is not None
    assert all(p.grad is not None for p in model.parameters())  # by the second call, not the replaced first


def test_leaves_of_a_tuple_are_numbered() -> None:
    class Splits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2)
            return a - b

    seen: list[Producer] = []
    x = torch.ones(4)
    with Producers(Splits(), [], on_produced=lambda p, t: seen.append(p)):
        Splits()(x)

    assert [(p.name, p.leaf) for p in seen] == [("chunk", 0), ("chunk", 1), ("sub", 0)]


def test_callbacks_are_no_part_of_the_model() -> None:
    model = _Twice()
    seen: list[str] = []

    def look(producer: Producer, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(producer.name)
        return tensor * 1.0

    x = torch.ones(1, 4)
    with Producers(model, ["block"], replace=look):
        model(x)

    assert seen == ["mul", "block", "dropout", "add", "block", "add"]


def test_functions_inside_of_layers_run_without_the_mode() -> None:
    model = _Twice()
    depths: list[int] = []
    model.block[1].register_forward_hook(lambda *args: depths.append(_len_torch_function_stack()))
    x = torch.ones(1, 4)

    with Producers(model, ["block"]):
        outside = _len_torch_function_stack()
        model(x)

    assert depths == [outside - 1] * 2


def test_a_layer_that_raises_leaves_the_modes_as_they_were() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    model = nn.Sequential(Fails())
    before = _len_torch_function_stack()

    with pytest.raises(ArithmeticError), Producers(model, ["0"]):
        model(torch.ones(1))

    assert _len_torch_function_stack() == before


def test_only_named_producers_are_seen() -> None:
    model = _Twice()
    seen: list[tuple[str, int]] = []
    first = Producer(kind="glue", name="add", call=0, leaf=0)

    with Producers(model, ["block"], on_produced=lambda p, t: seen.append((p.name, p.call)), only=[first]):
        model(torch.ones(1, 4))

    assert seen == [("add", 0), ("add", 1)]  # counted as ever


def _masked(x: torch.Tensor) -> torch.Tensor:
    """For one sample without what it does for more."""
    return x if x.shape[0] == 1 else x.add(1.0).sub(1.0)


class _Masks(_Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(_masked(x)) + self.halved(x).add(1.0)

    def halved(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.add(1.0) for row in x])


@pytest.mark.parametrize("size", [1, 3])
def test_what_other_functions_than_a_forward_call_is_counted_apart(size: int) -> None:
    seen: list[Producer] = []
    model = _Masks()
    with Producers(model, ["block"], on_produced=lambda producer, tensor: seen.append(producer)):
        model(torch.ones(size, 4))

    own = [(p.name, p.call) for p in seen if "." not in p.name]
    apart = {p.name for p in seen} - {name for name, _ in own}

    assert own == [("block", 0), ("add", 0), ("add", 1)]
    assert {"halved.add", "halved.stack"} <= apart
    assert ("_masked.add" in apart) == (size > 1)


def test_who_calls_a_sequential_names_nothing() -> None:
    """Its relu is called by torch's own forward, whoever calls that: a profiler and a trainer do."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    seen: list[str] = []
    x = torch.ones(1, 4)

    def called_here() -> None:
        model(x)

    with Producers(model, ["0", "2"], on_produced=lambda producer, tensor: seen.append(producer.name)):
        called_here()

    assert seen == ["0", "relu", "2"]
