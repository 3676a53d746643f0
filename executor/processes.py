"""Whether a process that left its mark somewhere is still alive, as far as can be seen from here. Needs no torch."""

import os
import socket
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
