"""One job at a time writes to a run's folder: a lock with its owner and a heartbeat, which outlives no owner. Needs no
torch.

`run.lock` says which process holds the folder, and counts up every few seconds. An owner that is gone from this machine
is known at once, one on another machine by a count that stands still; no clocks are compared.
"""

import atexit
import json
import os
import threading
import time
import uuid
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ...profiler.document import replace_file
from ..processes import is_alive, this_process

LOCK = "run.lock"

BEAT_S = 3.0
"""Seconds between heartbeats."""

SILENT_S = 30.0
"""Seconds for which the count of an owner on another machine may stand still; after that the owner is taken for
dead."""


class RunLock:
    """Holds a run's folder for this process until `release`; a thread of its own sends heartbeats.

    Raises ValueError if another living job holds the folder, OSError if it cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOCK
        self._own: dict[str, Any] = {
            "token": uuid.uuid4().hex,
            **this_process(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            "beat": 0,
        }
        self._lost = False
        self._ended = threading.Event()
        self._take()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise ValueError if another job has taken the folder over meanwhile."""
        if self._lost or (_read(self._path) or {}).get("token") != self._own["token"]:
            owner = _read(self._path)
            raise ValueError(
                f"{self._folder} is not this job's any more: {_words(owner) if owner else 'run.lock is gone'}. This "
                "job gave no sign of life for too long, or run.lock was removed; give it a folder of its own"
            )

    def release(self) -> None:
        """Give the folder up, so that another job may have it."""
        self._ended.set()
        self._thread.join()
        if (_read(self._path) or {}).get("token") == self._own["token"]:
            with suppress(OSError):
                self._path.unlink()

    def _take(self) -> None:
        while True:
            try:
                with self._path.open("x", encoding="utf-8") as file:
                    file.write(json.dumps(self._own))
                return
            except FileExistsError:
                owner = self._dead_owner()
            # Another process that found the same owner dead must not remove the lock that the first has made since.
            aside = self._path.with_name(f".discarded-{LOCK}-{self._own['token']}")
            with suppress(FileNotFoundError):
                self._path.rename(aside)
                if owner is not None and (_read(aside) or owner).get("token") != owner["token"]:
                    aside.rename(self._path)
                else:
                    aside.unlink()

    def _dead_owner(self) -> dict[str, Any] | None:
        """The owner of the lock, if it is dead; None if that cannot be told. Raises ValueError if it is alive."""
        first = _read(self._path)
        end = time.monotonic() + SILENT_S
        while time.monotonic() < end:
            found = _read(self._path)
            if found is not None and first is not None:
                alive = is_alive(found)
                if alive is False:
                    return found
                if alive or found["beat"] != first["beat"] or found["token"] != first["token"]:
                    raise ValueError(
                        f"{self._folder} is in use by another job: {_words(found)}. End that job, give this one a "
                        f"folder of its own, or, to read it only, a checkpoint in it ({self._folder}/step-...)"
                    )
            if not self._path.exists():
                return first
            first = first or found
            time.sleep(min(0.2, SILENT_S / 10))
        return first

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            if (_read(self._path) or {}).get("token") != self._own["token"]:
                self._lost = True
                return
            self._own["beat"] += 1
            with suppress(OSError):  # a full disk is no reason to give the folder up
                replace_file(self._path, json.dumps(self._own).encode())


_held: dict[tuple[int, str], tuple[RunLock, int]] = {}
"""(process, folder) -> (its lock, number of trainers in this process that hold it). A fork does not inherit locks."""


def hold(folder: Path) -> RunLock:
    """Lock a run's folder, which is made if it does not exist. To be given back by `let_go`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = os.getpid(), os.path.realpath(folder)
    lock, count = _held.get(key) or (RunLock(folder), 0)
    _held[key] = lock, count + 1
    return lock


def let_go(folder: Path) -> None:
    """Give a lock back; the last holder in this process releases it."""
    key = os.getpid(), os.path.realpath(folder)
    if key in _held:
        lock, count = _held.pop(key)
        if count > 1:
            _held[key] = lock, count - 1
        else:
            lock.release()


@atexit.register
def _release_all() -> None:
    for process, folder in list(_held):
        if process == os.getpid():
            _held.pop((process, folder))[0].release()


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a lock file; None if there is none, or if it is just being written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if {"token", "beat", "pid", "machine", "began"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _words(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner.get('host')} holds it since {owner.get('since')}"
