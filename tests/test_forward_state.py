"""What a forward leaves behind: it is seen when it is read, and put back."""

import weakref

import torch
from torch import nn

from meshwright.profiler.running.forward_state import TensorsRead, changed, places_of, put_back, taken


def test_a_tensor_that_is_watched_is_kept_so_that_no_other_is_taken_for_it() -> None:
    """Qwen2-VL keeps what it computed of positions and lets go of it in the next forward: another tensor got its id."""
    seen = torch.ones(2)
    place = weakref.ref(seen)
    with TensorsRead({"seen": seen}) as read:
        seen = seen.clone()
        torch.ones(2).add(seen)

    assert place() is not None
    assert read.places == ["seen"]


def test_numbers_that_nobody_wrote_into_are_copied_once() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(2))
    seen = model.get_buffer("seen")
    places = places_of(model, keep_copies=True)

    def copies() -> list[torch.Tensor]:
        return [value[1] for _, value in taken(places) if isinstance(value, tuple)]

    first = taken(places)
    (copied,) = copies()
    assert copies()[0] is copied
    seen.add_(1)
    (after,) = copies()
    assert after.tolist() == [1, 1]
    put_back(first)
    assert seen.tolist() == [0, 0]
    assert copies()[0] is copied
    seen.add_(2)
    assert copies()[0].tolist() == [2, 2]


def test_numbers_that_are_written_without_a_trace_are_put_back_too() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(2))
    seen = model.get_buffer("seen")
    places = places_of(model, keep_copies=True)

    for number in (1.0, 2.0):
        before = taken(places)
        seen.data.fill_(number)
        put_back(changed(before))
        assert seen.tolist() == [0, 0]
