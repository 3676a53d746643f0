"""Whether a process that left its mark somewhere is still alive, and whether threads of this one rest, as far as can be
seen from here. Needs no torch."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """What tells this process apart from any other, for `is_alive` to be asked of, wherever it was read."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "machine": machine(), "began": _began(os.getpid())}


def is_alive(process: dict[str, Any]) -> bool | None:
    """Whether it runs; None if that cannot be seen from here."""
    if not process["machine"] or process["machine"] != machine():
        return None
    return bool(process["began"]) and _began(process["pid"]) == process["began"]


def let_rest(name: str, within_s: float) -> bool:
    """Wait, without Python's lock, until all threads of this process that the system knows by `name` sleep, and return
    whether they do; True where nothing tells (not on Linux)."""
    end = time.monotonic() + within_s
    asleep = 0
    while asleep < 2 and time.monotonic() < end:  # twice: one may just wait for the lock that this thread gave away
        time.sleep(0.001)
        asleep = asleep + 1 if all(state == "S" for state in _states(name)) else 0
    return asleep == 2


def _states(name: str) -> list[str]:
    """What threads of that name do: R for those that run, or would, S for those that wait."""
    found = []
    for place in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            words, _, fields = place.read_text().rpartition(")")
            if words.partition("(")[2] == name:
                found.append(fields.split()[0])
    return found


def machine() -> str:
    """What tells apart machines and containers in which the same number is another process; "" where nothing does."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process of this machine began, in the system's own words; "" if there is none, or it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    except (OSError, ValueError, IndexError):
        return ""
