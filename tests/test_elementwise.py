"""Formulas of numbers and arrays alike: an entry of a table is what the formula says of that entry's numbers."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from meshwright.planner.cost.comm_cost import RingTimes, exposed_s, ring_s, unhidden_s
from meshwright.planner.cost.data_cost import DataRates, added_elements, exposed_data_s, gather_s, reduce_s
from meshwright.planner.cost.elementwise import choose, least, most, root
from meshwright.planner.cost.transient_cost import Turn, Working, transients

ENTRIES = 200


def _data(*given: Any) -> Any:
    """What shows of gathers and reductions of a layer, from its elements on."""
    moved, trained, over, forward_s, backward_s, overlap, rate, latency, resharded, every = given
    rates = DataRates(*(RingTimes(rate, n * latency, n * rate) for n in (1, 2, 3)))
    seconds = gather_s(moved, 2, rates), reduce_s(trained, 4, over, rates)
    return exposed_data_s(*seconds, forward_s, backward_s, resharded, every, overlap, 0.3)


def _turn(in_root: bool, logits: float, returns_loss: bool) -> Callable[..., Any]:
    def priced(*given: Any) -> Any:
        forward, backward, passed, kept, copy, fetched, new, over, resharded, copies_stay = given
        turn = Turn(copy, fetched, new, 2 * new, over, resharded, copies_stay, in_root)
        return transients(Working(forward, backward, passed, logits), turn, kept, returns_loss)

    return priced


_FORMULAS: dict[str, Callable[..., Any]] = {
    "operations": lambda a, b, *rest: (least(a, b), most(a, b), most(a, 3.0), choose(rest[-1], a, b), root(a)),
    "communication": lambda a, b, c, *_: (exposed_s(a, b, c, 0.3), unhidden_s(a, 0.4, b)),
    "rings": lambda a, b, c, *_: ring_s(a, RingTimes(b, c, 0.1 * c)),
    "added elements": lambda a, b, *rest: added_elements(a, 1 + b, rest[-1]),
    "data": _data,
    **{
        f"turn, root {in_root}, logits {logits}, its own loss {own}": _turn(in_root, logits, own)
        for in_root, logits, own in itertools.product((False, True), (0.0, 5.0), (False, True))
    },
}


def _parts(found: Any) -> Sequence[Any]:
    if dataclasses.is_dataclass(found):
        return [getattr(found, field.name) for field in dataclasses.fields(found)]
    return found if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", _FORMULAS)
def test_an_entry_of_a_table_is_the_number_itself(name: str) -> None:
    draw = random.Random(name)
    rows = [
        [draw.choice((0.0, draw.uniform(0, 9))) for _ in range(7)]
        + [draw.choice((1.0, 2.0, 8.0)), draw.random() < 0.5, draw.random() < 0.5]
        for _ in range(ENTRIES)
    ]
    for row in rows:
        row[2] += 1.0  # in `data` the ranks that shard a layer: at least one
    columns = [np.array(column) for column in zip(*rows, strict=True)]

    table = _parts(_FORMULAS[name](*columns))
    alone = [_parts(_FORMULAS[name](*row)) for row in rows]

    for place, part in enumerate(table):
        assert np.broadcast_to(part, ENTRIES).tolist() == [each[place] for each in alone]


def test_numbers_stay_numbers() -> None:
    found = _data(1.0, 1.0, 2.0, 1.0, 1.0, 0.5, 0.1, 0.1, True, False)

    assert {type(part) for part in _parts(found)} == {float}


def test_gathers_that_are_repeated_show_twice_and_those_that_stay_once_a_step() -> None:
    """Without any compute all of it shows: 2 bytes for each of 6 elements at 1 s, 4 for each of 3 at 1 s, both ways."""
    rates = DataRates(*3 * [RingTimes(1.0, 0.0, 0.0)])
    gathers, reduces = gather_s(6.0, 2, rates), reduce_s(3.0, 4, 4.0, rates)

    def shown(resharded: bool, every: bool) -> tuple[float, float, float]:
        found = exposed_data_s(gathers, reduces, 0.0, 0.0, resharded, every, 0.8, 0.3)
        return found.forward_s, found.backward_s, found.once_s

    assert (gathers, reduces) == (12.0, 15.0)
    assert shown(True, True) == (12.0, 27.0, 0.0)
    assert shown(True, False) == (12.0, 12.0, 15.0)
    assert shown(False, True) == (12.0, 15.0, 0.0)
    assert shown(False, False) == (0.0, 0.0, 27.0)
