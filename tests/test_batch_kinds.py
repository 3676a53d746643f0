"""What a micro-batch may hold besides tensors in tuples, lists and dicts, and in which words the rest is refused."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from meshwright.executor.parallel.micro_batches import split_micro_batches
from meshwright.profiler.model.trace import trace
from support.habits import WIDTH, habit, linear


def test_numpy_arrays_in_a_batch_are_told_as_such() -> None:
    def batch(size: int) -> Any:
        return {"x": torch.randn(size, WIDTH), "more": [numpy.zeros((size, 2))]}

    with pytest.raises(ValueError, match=r"gives a numpy array of \[2, 2\] at \['more'\]\[0\].*torch.from_numpy"):
        trace(habit(linear, batch=batch))

    with pytest.raises(ValueError, match=r"the batch holds a numpy array of \[4, 2\]"):
        split_micro_batches(batch(4), 2, 4)


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse)")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.Tensor.to_sparse, r"a sparse tensor at \[0\], which .*to_dense"),
        (torch.Tensor.to_sparse_csr, r"a sparse tensor at \[0\], which .*to_dense"),
        (
            lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged),
            r"a nested tensor at \[0\], which .* mask",
        ),
    ],
)
def test_tensors_that_are_cut_by_no_dim_are_told_as_such(
    make: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    with pytest.raises(ValueError, match=f"gives {words}"):
        trace(habit(linear, batch=lambda size: (make(torch.randn(size, WIDTH)),)))

    with pytest.raises(ValueError, match=f"the batch holds {words}"):
        split_micro_batches((make(torch.randn(4, WIDTH)),), 2, 4)


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_of_a_forward_are_told_as_such(layout: torch.layout) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.nested.as_nested_tensor(list(x), layout=layout)
            return torch.nested.to_padded_tensor(self.only(rows), 0.0)

    with pytest.raises(ValueError, match=r"makes nested tensors .*: pad the rows"):
        trace(habit(Rows))


class Entries(dict):  # type: ignore[type-arg]
    """A dict of a class of its own, which torch does not look into."""


@dataclass
class Inputs:
    """Inputs under a name."""

    x: torch.Tensor


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: (Inputs(x), x), r"an object of Inputs at \[0\], .* a tuple or a dict of tensors"),
        (lambda x: Entries(x=x, y=x), r"an object of Entries at its top, .* make it a dict: dict\(batch\)"),
        (lambda x: UserDict(x=x), r"an object of UserDict at its top, .* make it a dict: dict\(batch\)"),
        (lambda x: (nn.utils.rnn.pack_sequence(list(x)), x), r"an object of PackedSequence at \[0\]"),
    ],
)
def test_objects_whose_tensors_nothing_cuts_are_told_as_such(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"gives {words}"):
        trace(habit(linear, batch=lambda size: make(torch.randn(size, WIDTH))))

    with pytest.raises(ValueError, match=f"the batch holds {words}"):
        split_micro_batches(make(torch.randn(4, WIDTH)), 2, 4)


def test_tensors_inside_of_lists_are_cut_with_their_samples() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(views[0].T)) - self.first(views[1])
            return out

    def batch(size: int) -> Any:
        return {"views": [torch.randn(WIDTH, size), torch.randn(size, WIDTH)]}

    profile = trace(habit(Both, batch=batch, loss=lambda output, batch: output.square().mean()))

    assert profile.batch_problem == profile.coupling == ""
    assert [(tensor.name, tensor.dims.index("batch")) for tensor in profile.batch] == [("views.0", 1), ("views.1", 0)]
    parts = split_micro_batches(batch(4), 2, 4, profile.batch)
    assert [[list(view.shape) for view in part["views"]] for part in parts] == [[[WIDTH, 2], [2, WIDTH]]] * 2
