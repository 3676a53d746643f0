"""What a method found is found once for each object, and goes with the object."""

import gc
import weakref

import pytest

from meshwright.planner.cost.kept import memo, memo_by


class Counter:
    """Counts how often its methods are really called."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.calls: list[object] = []

    @memo
    def times(self, number: int) -> int | None:
        """The product; nothing for 0."""
        self.calls.append(number)
        if number < 0:
            raise ValueError("below zero")
        return self.factor * number or None

    @memo_by(lambda self, number, _: number % self.factor)
    def rest(self, number: int, name: str) -> str:
        """The name of the first number with this rest."""
        self.calls.append(name)
        return name


class Twice(Counter):
    """Builds on what the class below remembers."""

    @memo
    def times(self, number: int) -> int | None:
        """Twice the product."""
        once = super().times(number)
        return None if once is None else 2 * once


@pytest.mark.parametrize("number", [0, 4])
def test_each_argument_is_asked_once(number: int) -> None:
    counter = Counter(3)

    assert [counter.times(number) for _ in range(3)] == [3 * number or None] * 3
    assert counter.calls == [number]


def test_objects_do_not_share() -> None:
    assert (Counter(2).times(5), Counter(3).times(5)) == (10, 15)


def test_what_raised_is_asked_again() -> None:
    counter = Counter(2)

    for _ in range(2):
        with pytest.raises(ValueError, match="below zero"):
            counter.times(-1)

    assert counter.calls == [-1, -1]


def test_a_key_says_which_arguments_are_the_same() -> None:
    counter = Counter(3)

    assert [counter.rest(7, "a"), counter.rest(10, "b"), counter.rest(8, "c")] == ["a", "a", "c"]
    assert counter.calls == ["a", "c"]


def test_a_method_and_the_one_that_it_overrides_remember_apart() -> None:
    counter = Twice(3)

    assert [counter.times(4), counter.times(4), Counter.times(counter, 4)] == [24, 24, 12]
    assert counter.calls == [4]


def test_results_go_with_the_object_at_once() -> None:
    counter = Counter(3)
    counter.times(4)
    counter.rest(1, "a")
    gone = weakref.ref(counter)
    gc.disable()
    try:
        del counter
        assert gone() is None
    finally:
        gc.enable()
