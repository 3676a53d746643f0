"""Wall time and peak memory of `plan profile` from the shell on every model of the zoo.

python -m benchmarks.accuracy.speed
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cases
from .report import Check, publish

SLOWEST_S = 15.0

LIMITS = {"llama31_405b": (6.0, 1.5 * 2**30)}
"""Models with limits of their own: (seconds, bytes)."""


def run(source: Path) -> tuple[float, float, int, int]:
    """(wall seconds, CPU seconds, peak bytes, exit code) of one `plan profile` as a process of its own."""
    command = shutil.which("plan")
    if command is None:
        raise SystemExit("no `plan` on PATH: pip install -e . first")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        arguments = [command, "profile", str(source), "-o", f"{folder}/profile.json"]
        start = time.monotonic()
        actions = [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), stream) for stream in (1, 2)]
        process = os.posix_spawn(command, arguments, os.environ, file_actions=actions)
        _, status, usage = os.wait4(process, 0)
        wall_s = time.monotonic() - start
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)


def check(sources: Sequence[Path]) -> Check:
    """The table over `sources`."""
    rows: list[dict[str, Any]] = []
    missed = []
    for source in sources:
        name = cases.name_of(source)
        wall_s, cpu_s, peak, code = run(source)
        most_s, most_bytes = LIMITS.get(name, (SLOWEST_S, None))
        if code != 0 or wall_s > most_s or (most_bytes is not None and peak > most_bytes):
            missed.append(name)
        rows.append({"model": name, "wall": wall_s, "CPU": cpu_s, "peak": peak, "limit": most_s, "exit code": code})
    return Check(
        name="speed",
        title="plan profile from the shell, interpreter start included",
        target=f"every model in {SLOWEST_S:.0f} s, Llama-3.1-405B in 6 s and 1.5 GiB",
        columns={"model": "", "wall": "s", "CPU": "s", "peak": "B", "limit": "s", "exit code": ""},
        rows=rows,
        verdict=f"missed by {', '.join(missed)}" if missed else f"all {len(rows)} within their limits",
        passed=not missed,
        notes=(f"on {os.cpu_count()} shared cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}",),
    )


if __name__ == "__main__":
    sys.exit(publish([check(cases.sources())]))
