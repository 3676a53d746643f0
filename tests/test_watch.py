"""Start-up, saving and resuming: a rank that is missing, raises, dies or hangs there ends all, and is named."""

import atexit
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.faults.launched import Ending, launch
from meshwright.executor import Trainer, parallelize, processes, watch
from meshwright.executor.state import box_files
from meshwright.executor.watch import Beat
from meshwright.planner.plan.document import Plan
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.tied_net import TiedNet, adamw, batch_of, loss, plan_of, samples
from support.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come often enough for a test."""
    monkeypatch.setattr(watch, "BEAT_S", 0.2)
    monkeypatch.setattr(watch, "GRACE_S", 1.0)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return trace(load_model(TiedNet, batch=batch_of, loss=loss))


def messages(endings: list[Ending]) -> list[str]:
    return [line for ending in endings for line in ending.stderr.splitlines() if line.startswith("meshwright: ")]


def raises(folder: Path) -> None:
    raise OSError("no space left")


def is_killed(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(folder: Path) -> None:
    (folder / "hangs").touch()
    while True:
        signal.pause()


def nothing(folder: Path) -> None:
    pass


def _start(plan: Plan, folder: Path, happens: Callable[[Path], None], come: tuple[int, ...], waits_for: str) -> None:
    """Rank 1 meets something while its model is built; the others of `come` start behind that, the rest never."""
    rank = int(os.environ["RANK"])
    if rank not in come:
        return
    if waits_for and rank != 1:
        until((folder / waits_for).exists)

    def build() -> TiedNet:
        if rank == 1:
            happens(folder)
        return TiedNet()

    parallelize(build, plan, adamw, loss=loss, timeout_s=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("come", "message"),
    [
        ((0,), "meshwright: rank 1 of 2 has not come for"),
        ((1,), "meshwright: rank 0 of 2, which holds the store of the job at 127.0.0.1:"),
    ],
)
def test_a_rank_that_never_comes_is_named(
    profile: ModelProfile, tmp_path: Path, come: tuple[int, ...], message: str
) -> None:
    endings = launch(_start, 2, tmp_path, plan_of(profile, shard=2), tmp_path, nothing, come, "")

    assert endings[come[0]].exit_code == 1
    assert len(messages(endings)) == 1
    assert messages(endings)[0].startswith(message)


def _waits(plan: Plan, victim: int, apart: bool) -> None:
    """One rank is killed in the middle of its start-up, while the other waits for what no connection tells it of.
    apart: neither sees the other's process, as on two machines."""
    if apart:
        watch.SILENT_S, processes.machine = 1.0, lambda: ""
    rank = int(os.environ["RANK"])

    def build() -> TiedNet:
        assert watch._current is not None
        until(watch._current._connected.is_set)
        if rank == victim:
            threading.Event().wait(1.0)  # until the other has seen it
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            threading.Event().wait(1.0)

    parallelize(build, plan, adamw, loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "apart", "message"),
    [
        (1, False, "meshwright: rank 1 of 2 has died in its start-up: process"),
        (1, True, "meshwright: rank 1 of 2 gave no sign of life for"),
        (0, False, "meshwright: rank 0 of 2, which holds the store of the job, is gone"),
    ],
)
def test_who_waits_for_a_killed_rank_without_a_connection_to_it_hears_of_it(
    profile: ModelProfile, tmp_path: Path, victim: int, apart: bool, message: str
) -> None:
    endings = launch(_waits, 2, tmp_path, plan_of(profile, shard=2), victim, apart, timeout_s=45.0)

    assert endings[1 - victim].exit_code == 1
    assert [line[: len(message)] for line in messages(endings)] == [message]


@pytest.mark.slow
def test_a_rank_that_hangs_in_start_up_is_named_with_the_line(profile: ModelProfile, tmp_path: Path) -> None:
    endings = launch(_start, 2, tmp_path, plan_of(profile, shard=2), tmp_path, hangs, (0, 1), "hangs")

    assert [ending.exit_code for ending in endings] == [1, 1]
    assert len(messages(endings)) == 1
    assert "rank 1 of 2 hangs: for" in messages(endings)[0]
    assert "in its start-up, at" in messages(endings)[0]
    assert "test_watch.py" in messages(endings)[0]
    assert "in hangs" in messages(endings)[0]


@pytest.mark.slow
def test_a_rank_that_raises_in_start_up_is_named_with_its_error(profile: ModelProfile, tmp_path: Path) -> None:
    endings = launch(_start, 2, tmp_path, plan_of(profile, shard=2), tmp_path, raises, (0, 1), "")

    assert [ending.exit_code for ending in endings] == [1, 1]
    assert messages(endings) == ["meshwright: rank 1 of 2 failed in its start-up: OSError: no space left"]


def _started_by_user(plan: Plan, happens: Callable[[Path], None], folder: Path) -> None:
    """The script has begun torch.distributed itself; rank 1 meets something in its second step."""
    dist.init_process_group("gloo")
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, timeout_s=300.0)
    shares = trainer.loader(samples)
    trainer.step(next(shares))
    if trainer.mesh.rank == 1:
        happens(folder)
    trainer.step(next(shares))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (raises, "rank 1 of 2 failed after step 1: OSError: no space left"),
        (is_killed, "rank 1 of 2 has died"),
    ],
)
def test_a_job_that_runs_already_is_watched_too(
    profile: ModelProfile, tmp_path: Path, happens: Callable[[Path], None], message: str
) -> None:
    endings = launch(_started_by_user, 2, tmp_path, plan_of(profile, shard=2), happens, tmp_path)

    assert len(messages(endings)) == 1
    assert message in messages(endings)[0]


def _leaves_early(plan: Plan, closes: bool) -> None:
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, timeout_s=300.0)
    for step, share in enumerate(trainer.loader(samples)):
        if step == 3 - trainer.mesh.rank:
            break
        trainer.step(share)
    if closes:
        trainer.close()
    else:
        atexit._run_exitfuncs()  # as where a script ends; a process that is forked runs them not


@pytest.mark.parametrize("closes", slow.but_first([True, False], 0))
def test_a_rank_that_stops_early_is_told_as_such(profile: ModelProfile, tmp_path: Path, closes: bool) -> None:
    endings = launch(_leaves_early, 2, tmp_path, plan_of(profile, shard=2), closes)

    assert len(messages(endings)) == 1
    assert "rank 1 of 2 has ended after step 2: its script came to an end" in messages(endings)[0]
    assert "while rank 0 is in step 3" in messages(endings)[0]
    assert "killed" not in messages(endings)[0]


@pytest.mark.slow
def test_closing_waits_for_a_store_that_is_slow_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python aborts where it ends while the thread is in there."""
    is_in_store, put = threading.Event(), watch.Watch._put

    def slow_put(own: watch.Watch, ended: bool = False) -> None:
        if own._connected.is_set() and not ended:
            is_in_store.set()
            threading.Event().wait(2.0)
        put(own, ended)

    monkeypatch.setattr(watch.Watch, "_put", slow_put)
    own = watch.Watch(0, 1, store=dist.HashStore())
    assert is_in_store.wait(60.0)

    own.close()

    assert not own._thread.is_alive()
    assert own._beats()[0].ended  # type: ignore[union-attr]


def _impatient(trainer: Trainer, folder: Path) -> None:
    """Let a task of this rank be late as soon as it waits for one that hangs."""
    own = trainer._watch
    assert own is not None

    def wait() -> None:
        until((folder / "hangs").exists)
        until(lambda: bool(watch._line(sys._current_frames().get(own._seen or 0))[1]))
        own.hang_s = 0.1

    threading.Thread(target=wait, daemon=True).start()


def _save(plan: Plan, folder: Path, happens: Callable[[Path], None], waits: bool) -> None:
    """Rank 1 meets something while it writes the second checkpoint."""
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, timeout_s=300.0)
    shares = trainer.loader(samples)
    trainer.step(next(shares))
    trainer.save(folder / "run")
    trainer.step(next(shares))
    if trainer.mesh.rank == 1:
        box_files.Writes.resolve_data = lambda self, item: happens(folder)  # type: ignore[method-assign,assignment,return-value]
    else:
        _impatient(trainer, folder)
    trainer.save(folder / "run", wait=waits)
    trainer.close()


@pytest.mark.parametrize("waits", slow.but_first([False, True], 1))
@pytest.mark.parametrize(
    ("happens", "message"),
    [
        pytest.param(hangs, "rank 1 of 2 hangs: for", marks=pytest.mark.slow),
        pytest.param(is_killed, "rank 1 of 2", marks=pytest.mark.slow),
        (raises, "no checkpoint of step 2 was written to"),
    ],
)
def test_a_rank_that_fails_in_a_save_is_named_and_the_checkpoint_before_stays(
    profile: ModelProfile, tmp_path: Path, happens: Callable[[Path], None], message: str, waits: bool
) -> None:
    endings = launch(_save, 2, tmp_path, plan_of(profile, shard=2), tmp_path, happens, waits)

    assert endings[0].exit_code == 1
    assert endings[1].exit_code == (-signal.SIGKILL if happens is is_killed else 1)
    assert len(messages(endings)) == 1
    assert message in messages(endings)[0]
    assert ("in hangs" in messages(endings)[0]) == (happens is hangs)
    assert ("rank 1: OSError: no space left" in messages(endings)[0]) == (happens is raises)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001"]


def _resume(plan: Plan, folder: Path, happens: Callable[[Path], None]) -> None:
    """Rank 1 meets something while it reads."""
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, timeout_s=300.0)
    trainer.step(next(trainer.loader(samples)))
    trainer.save(folder / "run")
    if trainer.mesh.rank == 1:
        box_files.Reads.resolve_tensor = lambda self, item: happens(folder)  # type: ignore[method-assign,assignment,return-value]
    else:
        _impatient(trainer, folder)
    trainer.resume(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (hangs, "rank 1 of 2 hangs: for"),
        (raises, "reading the checkpoint failed: OSError: no space left"),
        (is_killed, "rank 1 of 2"),
    ],
)
def test_a_rank_that_fails_in_resume_is_named(
    profile: ModelProfile, tmp_path: Path, happens: Callable[[Path], None], message: str
) -> None:
    endings = launch(_resume, 2, tmp_path, plan_of(profile, shard=2), tmp_path, happens)

    assert endings[0].exit_code == 1
    assert len(messages(endings)) == 1
    assert message in messages(endings)[0]
    assert ("in hangs" in messages(endings)[0]) == (happens is hangs)


def test_ranks_that_do_different_things_are_told_so() -> None:
    beat = Beat(count=9, place=5, what="in step 3", since_s=700.0, where="train.py:20 in main", waits=True)

    message = watch._who_hangs([replace(beat, what="in save after step 2", where="train.py:22 in main"), beat], "of 2")

    assert message == (
        "ranks of 2 do different things: rank 0 is in save after step 2, at train.py:22 in main; rank 1 is in step 3, "
        "at train.py:20 in main. Every rank must call step, save, evaluate, full_state_dict and the like (not under "
        "`if rank == 0`): what they write and return comes from all of them"
    )


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[watch.Watch, watch.Watch]]:
    """The watches of two ranks."""
    monkeypatch.setattr(watch, "_numbers", itertools.repeat(-1))
    store = dist.HashStore()
    first, second = watch.Watch(0, 2, store=store), watch.Watch(1, 2, store=store)
    yield first, second
    second.close()
    first.close()


def test_a_rank_that_alone_saves_is_told_so_before_anything_is_exchanged(two: tuple[watch.Watch, watch.Watch]) -> None:
    first, second = two

    with (
        second.step("in step 3", "after step 3"),
        pytest.raises(ValueError, match=r"rank 0 of 2 is in save after step 2, while rank 1 is in step 3\. Every rank"),
        first.task("in save after step 2", "after step 2", meets=True),
    ):
        pytest.fail("it began")


def test_ranks_that_meet_in_different_tasks_are_told_so(two: tuple[watch.Watch, watch.Watch]) -> None:
    first, second = two

    def evaluate() -> None:
        with suppress(ValueError), second.task("in evaluate after step 2", "after step 2", meets=True):
            pass

    other = threading.Thread(target=evaluate)
    other.start()
    until(lambda: bool(second._store.check(["meeting1"])))

    with (
        pytest.raises(
            ValueError, match=r"rank 0 of 2 is in save after step 2, while another is in evaluate after step 2"
        ),
        first.task("in save after step 2", "after step 2", meets=True),
    ):
        pytest.fail("it began")
    second._store.set("meeting1/all", "")
    other.join()


def test_a_task_that_all_ranks_come_to_begins_however_late_one_is(two: tuple[watch.Watch, watch.Watch]) -> None:
    first, second = two
    begun = []

    def save() -> None:
        with first.task("in save after step 2", "after step 2", meets=True):
            begun.append("first")

    other = threading.Thread(target=save)
    with second.step("in step 2", "after step 2"):  # which the first has done
        first._steps += 1
        other.start()
        until(lambda: first._meetings == 1)
        count = first._count
        until(lambda: first._count > count + 2)  # it has looked around
        assert not begun
    with second.task("in save after step 2", "after step 2", meets=True):
        other.join()

    assert begun == ["first"]


def _saves_alone(plan: Plan, folder: Path) -> None:
    trainer = parallelize(TiedNet, plan, adamw, loss=loss, timeout_s=300.0)
    for share in trainer.loader(samples):
        trainer.step(share)
        if trainer.mesh.rank == 0:
            trainer.save(folder / "run")


@pytest.mark.slow
def test_a_script_that_saves_on_one_rank_only_ends_with_that_word(profile: ModelProfile, tmp_path: Path) -> None:
    endings = launch(_saves_alone, 2, tmp_path, plan_of(profile, shard=2), tmp_path)

    assert [ending.exit_code for ending in endings] == [1, 1]
    assert len(messages(endings)) == 1
    assert "rank 0 of 2 is in save after step 1, while rank 1 is in step 2. Every rank must" in messages(endings)[0]
