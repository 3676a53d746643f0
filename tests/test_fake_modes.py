"""The lean fake mode answers what torch's own does, and asks it for each operator only once."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.profiler.model.fake_modes import LeanFakeMode

OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda x: x * 2,
    "the same with a float, which makes another dtype of integers": lambda x: x.int() * 2.0,
    "the same with an int": lambda x: x.int() * 2,
    "product": lambda x: x @ x.mT,
    "view": lambda x: x.view(2, 12)[:, 3:],
    "transposed": lambda x: x.transpose(0, 2).contiguous(),
    "expanded": lambda x: x[:1].expand(5, 3, 4),
    "list of tensors": lambda x: torch.cat([x, x.mT.mT], 1),
    "several outputs": lambda x: x.max(dim=1)[1],
    "parts": lambda x: x.split([1, 2], 1)[1],
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "by a keyword": lambda x: x.sum(dim=1, dtype=torch.float64),
    "conjugate": lambda x: torch.conj(x.to(torch.complex64)),
    "in inference mode": lambda x: torch.inference_mode()(lambda: x + 1)(),
}


def _told(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_inference()


@pytest.mark.parametrize("name", OPERATORS)
def test_answers_twice_what_torch_answers(name: str) -> None:
    told = []
    for mode in (FakeTensorMode(), LeanFakeMode()):
        with mode:
            x = torch.empty(2, 3, 4, requires_grad=True)
            made = [OPERATORS[name](x) for _ in range(2)]
        told += [(_told(y), y.untyped_storage()._cdata == x.untyped_storage()._cdata) for y in made]

    assert all(each == told[0] for each in told)


def test_asks_torch_once_for_each_operator() -> None:
    mode = LeanFakeMode()
    with mode, patch.object(FakeTensorMode, "dispatch", autospec=True, side_effect=FakeTensorMode.dispatch) as asked:
        x = torch.empty(2, 3)
        x.exp().exp()
        before = asked.call_count
        for _ in range(3):
            x.exp().exp()

    assert before
    assert asked.call_count == before


def test_what_writes_in_place_returns_what_it_wrote_into() -> None:
    with LeanFakeMode():
        x, y = torch.empty(3), torch.empty(3)

        assert x.add_(1) is x
        assert y.add_(1) is y


def test_a_view_is_of_the_tensor_that_is_given() -> None:
    with LeanFakeMode():
        x, y = torch.empty(6), torch.empty(6)
        views = x.view(2, 3), y.view(2, 3)

    addresses = [tensor.untyped_storage()._cdata for tensor in (x, y, *views)]
    assert addresses[:2] == addresses[2:]
    assert addresses[0] != addresses[1]
