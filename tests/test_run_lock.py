"""Two jobs on one run folder: the second is refused, and a dead one is no reason to refuse."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.executor import parallelize, processes
from meshwright.executor.state import run_lock
from meshwright.executor.state.run_lock import LOCK, RunLock
from support.tied_net import TiedNet, adamw, loss, plan_of, samples, tied_profile
from support.waiting import until

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Any]:
    """A process that holds the folder."""
    process = FORK.Process(target=_hold, args=(tmp_path,), daemon=True)
    process.start()
    until(lambda: run_lock._read(tmp_path / LOCK) is not None)
    yield process
    process.kill()
    process.join()


def _hold(folder: Path) -> None:
    run_lock.BEAT_S = 0.05
    RunLock(folder)
    while True:
        signal.pause()


def test_the_second_job_is_refused_and_the_first_ones_files_stay(tmp_path: Path, other: Any) -> None:
    partial = tmp_path / ".partial-step-00000001"
    partial.mkdir()
    trainer = parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss)
    trainer.step(next(trainer.loader(samples)))

    with pytest.raises(ValueError, match=rf"is in use by another job: process {other.pid} on .* holds it since"):
        trainer.save(tmp_path)
    with pytest.raises(ValueError, match="is in use by another job"):
        trainer.resume(tmp_path, missing_ok=True)

    assert partial.is_dir()


def test_a_killed_owner_is_followed_at_once(tmp_path: Path, other: Any) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    started = time.monotonic()

    RunLock(tmp_path).release()

    assert time.monotonic() - started < run_lock.SILENT_S / 3
    assert not list(tmp_path.iterdir())


def _elsewhere(folder: Path) -> None:
    """Let the lock look as if its owner ran on another machine."""
    document = json.loads((folder / LOCK).read_text())
    (folder / LOCK).write_text(json.dumps({**document, "machine": "another", "host": "node7"}))


def test_an_owner_on_another_machine_is_alive_while_it_counts(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "machine", lambda: "here")

    with pytest.raises(ValueError, match="in use by another job"):
        RunLock(tmp_path)


def test_a_silent_owner_on_another_machine_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "SILENT_S", 0.3)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    held = RunLock(tmp_path)
    held._ended.set()
    held._thread.join()
    _elsewhere(tmp_path)

    taken = RunLock(tmp_path)

    with pytest.raises(ValueError, match="not this job's any more"):
        held.check()
    taken.check()
    taken.release()


def _take(folder: Path, sender: Any) -> None:
    try:
        RunLock(folder)
        sender.send(os.getpid())
        signal.pause()
    except ValueError:
        sender.send(0)


def test_of_many_that_come_at_once_after_a_death_one_gets_it(tmp_path: Path, other: Any) -> None:
    other.kill()
    other.join()
    pipes = [FORK.Pipe() for _ in range(8)]
    processes = [FORK.Process(target=_take, args=(tmp_path, sender), daemon=True) for _, sender in pipes]
    for process in processes:
        process.start()

    winners = [pid for receiver, _ in pipes if (pid := receiver.recv())]

    for process in processes:
        process.kill()
        process.join()
    assert len(winners) == 1


def test_trainers_of_one_process_share_it_and_close_gives_it_back(tmp_path: Path) -> None:
    first, second = (parallelize(TiedNet, plan_of(tied_profile()), adamw, loss=loss) for _ in range(2))
    first.save(tmp_path)
    second.resume(tmp_path)

    first.close()

    assert (tmp_path / LOCK).is_file()

    second.close()

    assert not (tmp_path / LOCK).exists()
