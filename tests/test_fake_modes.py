"""The lean fake mode answers what torch's own does, and asks it for each operator only once."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.profiler.running.fake_modes import LeanFakeMode, fake_mode

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
    "part of a part": lambda x: x[1:, 1:].transpose(1, 2)[:, 2:],
    "several parts of a part": lambda x: x[1].split([1, 2])[1],
    "one of all rows": lambda x: x[1].unbind(0)[2],
    "as numbers of another dtype": lambda x: x.detach().view(torch.int16)[1, 1:],
    "the real part": lambda x: torch.view_as_real(x.to(torch.complex64))[1, 2],
    "by its place in the storage": lambda x: x[1].as_strided((2, 2), (1, 3), 5),
    "from where it begins": lambda x: x[1].as_strided((2, 2), (1, 3)),
    "several outputs by name": lambda x: torch.native_layer_norm(x, [4], None, None, 1e-5)[1],
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


def test_ctc_is_not_asked_for_the_length_of_its_targets() -> None:
    with fake_mode():
        made = torch.nn.functional.ctc_loss(
            torch.empty(6, 2, 5, requires_grad=True),
            torch.empty(2, 3, dtype=torch.long),
            torch.empty(2, dtype=torch.long),
            torch.empty(2, dtype=torch.long),
            reduction="none",
        )

    assert made.shape == (2,)
    assert made.requires_grad


def test_asks_torch_once_for_each_operator() -> None:
    mode = LeanFakeMode()
    with mode, patch.object(FakeTensorMode, "dispatch", autospec=True, side_effect=FakeTensorMode.dispatch) as asked:
        x = torch.empty(2, 3)
        torch.layer_norm(x.exp().exp(), [3])
        before = asked.call_count
        for _ in range(3):
            torch.layer_norm(x.exp().exp(), [3])

    assert before
    assert asked.call_count == before


def test_asks_torch_once_for_all_parts_of_a_shape() -> None:
    def part(window: torch.Tensor) -> torch.Tensor:
        parts: tuple[torch.Tensor, ...] = window.T.split([2, 4], 1)
        return parts[1]

    mode = LeanFakeMode()
    with mode, patch.object(mode, "_dispatch_impl", side_effect=mode._dispatch_impl) as asked:
        first, *others = torch.empty(4, 6, 2).unbind(0)
        made = [part(first)]
        before = asked.call_count
        made += [part(window) for window in others]

    assert before
    assert asked.call_count == before
    assert [each.storage_offset() for each in made] == [4, 16, 28, 40]
    assert {(each.shape, each.stride()) for each in made} == {((2, 4), (1, 2))}


@pytest.mark.parametrize("starts", [(0, 2), (2, 0)])
def test_where_a_tensor_begins_counts_where_torch_looks_at_it(starts: tuple[int, int]) -> None:
    def place(start: int) -> tuple[int, int]:
        part = torch.empty(8)[start:]
        views = part.as_strided((2,), (1,)), part.view(torch.int16)[1:]
        return int(views[0].storage_offset()), int(views[1].storage_offset())

    with LeanFakeMode():
        found = {start: place(start) for start in starts}

    assert found == {0: (0, 1), 2: (2, 5)}


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
