"""What a model's code keeps for its next call, beside its modules, is never a fake tensor where real ones follow."""

import functools
import gc
import itertools
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from meshwright.planner.plan.legality import can_recompute
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.trace import trace
from meshwright.profiler.running.fake_modes import LeanFakeMode, fake_mode
from meshwright.profiler.running.forward_state import undone
from meshwright.profiler.running.kept_results import fakes_forgotten, forget_fakes, forget_other_runs
from support.habits import run

TABLES: dict[int, tuple[torch.Tensor]] = {}


@functools.lru_cache(maxsize=4)
def slopes(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1).float()


@functools.cache
def offsets(count: int) -> list[torch.Tensor]:
    return [torch.ones(count)]


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


def decorated(function: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    @functools.wraps(function)
    def run(count: int) -> torch.Tensor:
        return function(count)

    return run


@functools.cache
def of_sizes(count: int) -> float:
    return count**0.5


class Keeping(nn.Module):
    kept: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] not in TABLES:
            TABLES[x.shape[-1]] = (torch.arange(8).float(),)
        if not self.kept:
            self.kept.append(torch.ones(8))
        x = self.drop(self.first(x)) * slopes(8) / of_sizes(8) + offsets(8)[0]
        return self.second(x + TABLES[8][0]) + self.kept[0]


def pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 8), torch.randn(size, 8)


def squares(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (output - batch[1]).square().mean()


LOADED = load_model(Keeping, batch=pairs, loss=squares)


def test_a_model_that_was_profiled_runs_on_real_tensors() -> None:
    trace(LOADED)

    assert of_sizes.cache_info().currsize == 1  # what is no tensor stays
    assert Keeping()(torch.ones(2, 8)).isfinite().all()


def test_what_holds_numbers_stays() -> None:
    table, numbers = slopes(3), torch.ones(3)
    TABLES[3] = (numbers,)

    TABLES[4] = (torch.ones(3, device="meta"),)  # a file may hold such for itself

    with fakes_forgotten(), fake_mode():
        TABLES[5] = (torch.ones(3),)

    assert slopes(3) is table
    assert TABLES.pop(3) == (numbers,)
    assert TABLES.pop(4)
    assert 5 not in TABLES


def test_what_ran_after_all_was_forgotten_is_forgotten_before_the_next_run() -> None:
    mode = LeanFakeMode()
    forget_fakes()
    with mode:
        TABLES[6] = (torch.ones(3),)

    forget_other_runs()

    assert 6 not in TABLES


def test_functions_of_files_imported_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_fakes()
    later = functools.cache(lambda count: torch.ones(count, device="meta"))
    later(3)
    monkeypatch.setitem(sys.modules, "imported_later", sys)

    forget_fakes()

    assert later.cache_info().currsize == 0


def test_functions_that_a_process_began_with_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_fakes()
    early = functools.cache(ones)
    monkeypatch.setattr(sys.modules[__name__], "early", early, raising=False)
    monkeypatch.setitem(sys.modules, "imported_later", sys)
    early(3)

    gc.freeze()  # as ranks begin, copies of the process that starts them
    try:
        with fakes_forgotten(), fake_mode():
            early(4)
    finally:
        gc.unfreeze()

    assert early.cache_info().currsize == 0


def test_functions_that_a_file_gets_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_fakes()
    later, inside = functools.cache(ones), functools.cache(ones)
    monkeypatch.setattr(sys.modules[__name__], "later", later, raising=False)
    monkeypatch.setattr(Keeping, "later", staticmethod(decorated(inside)), raising=False)

    for _ in range(2):  # as often as before it was emptied
        with fakes_forgotten(), fake_mode():
            for function in later, inside:
                function(3)

        assert [later.cache_info().currsize, inside.cache_info().currsize] == [0, 0]


def test_what_a_file_that_was_run_from_its_path_keeps_is_put_back(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text(
        "class Table:\n"
        "    rows = None\n"
        "TABLE = Table()\n"
        "def look(x):\n"
        "    TABLE.rows = x if TABLE.rows is None else TABLE.rows\n"
        "    return TABLE.rows\n"
    )
    look = runpy.run_path(str(file))["look"]

    with undone(look):
        look(1)

    assert look(2) == 2


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"data_shard": 2}, {"pipeline": 2}])
def test_plans_of_such_models_give_the_numbers_of_one_process(pins: dict[str, int]) -> None:
    report = run(LOADED, **pins)

    assert report.ok, report.lines


COUNTS = {"calls": 0}


class Stepping(nn.Module):
    """Scales by how often layers have run in this process."""

    calls: ClassVar[int] = 0

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.linear, self.kept, self.own = nn.Linear(8, 8), kept, 0
        self.numbers = itertools.count(1) if kept == "iterator" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept == "class":
            type(self).calls += 1
            return self.linear(x) * self.calls
        if self.kept == "file":
            COUNTS["calls"] += 1
            return self.linear(x) * COUNTS["calls"]
        if self.kept == "dice":
            return self.linear(x) * (1 + random.random())
        if self.numbers is not None:
            return self.linear(x) * next(self.numbers)
        self.own += 1
        return self.linear(x) * self.own


def stepping(kept: str) -> LoadedModel:
    return load_model(
        lambda: nn.Sequential(nn.Linear(8, 8), *(Stepping(kept) for _ in range(3))), batch=pairs, loss=squares
    )


@pytest.mark.parametrize(
    ("kept", "what"),
    [("class", "attributes of Stepping"), ("file", "an object that both hold"), ("dice", "Python's or numpy's random")],
)
def test_layers_that_count_in_common_are_in_one_stage(kept: str, what: str) -> None:
    before = Stepping.calls, COUNTS["calls"], random.getstate()

    profile = trace(stepping(kept))

    assert len(profile.layers) == 2
    assert any(f"1 and 3 change {what}" in note for note in profile.notes)
    assert (Stepping.calls, COUNTS["calls"], random.getstate()) == before


def test_layers_that_count_each_for_itself_may_be_apart() -> None:
    assert len(trace(stepping("itself")).layers) == 4


def test_layers_that_take_from_an_iterator_are_not_planned_with_recompute() -> None:
    profile = trace(stepping("iterator"))

    assert [can_recompute(profile, layer) for layer in profile.layers] == [True, False, False, False]


def test_layers_that_are_frozen_for_the_forward_alone_are_not_planned_with_recompute() -> None:
    class Judged(nn.Module):
        """The judge of a generator, which it does not learn from."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made, judge, last = self.layers
            x = made(x)
            judge.requires_grad_(False)
            x = judge(x)
            judge.requires_grad_(True)
            out: torch.Tensor = last(x)
            return out

    profile = trace(load_model(Judged, batch=pairs, loss=squares))

    assert [can_recompute(profile, layer) for layer in profile.layers] == [True, False, True]


@pytest.mark.slow
def test_a_pipeline_counts_as_one_process_does() -> None:
    report = run(stepping("file"), pipeline=2, micro_batch=2)

    assert report.ok, report.lines
