"""What is saved beside the next steps is copied without waiting, into pages that stay. Without a GPU its calls are
stood in for; with one they are its own."""

import pytest
import torch

from meshwright.executor.state import host_copies
from meshwright.executor.state.boxes import Box
from meshwright.executor.state.host_copies import HostCopies

ON_GPU = torch.cuda.is_available()


class _Event:
    waited = 0

    def record(self) -> None: ...

    def synchronize(self) -> None:
        _Event.waited += 1


def test_a_gpus_copies_are_taken_at_once_and_waited_for_by_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if ON_GPU else "cpu"
    if not ON_GPU:
        monkeypatch.setattr(host_copies, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(host_copies, "pinned_like", torch.empty_like)
        monkeypatch.setattr(torch.cuda, "Event", _Event)
    values, copies = torch.arange(6.0, device=device).view(2, 3), HostCopies()
    box = Box("model.weight", values.shape, (0, 0), values)

    (first,), made = copies.take([box])
    values += 1.0
    made()
    assert first.tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]

    (second,), made = copies.take([box])
    made()
    assert second.tensor.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert second.tensor.data_ptr() == first.tensor.data_ptr()
    assert (second.key, second.whole, second.offsets) == (box.key, box.whole, box.offsets)
    assert ON_GPU or _Event.waited == 2


def test_a_cpus_copies_are_its_own_and_not_kept() -> None:
    values, copies = torch.zeros(3), HostCopies()

    (copy,), made = copies.take([Box("model.weight", values.shape, (0,), values)])
    values += 1.0
    made()

    assert copy.tensor.tolist() == [0.0, 0.0, 0.0]
    assert copies._pages == {}
