"""The end of a rank: Python goes only once gloo's threads rest, on machines however busy."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.executor.processes import let_rest

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be seen")

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from meshwright.executor.parallel.mesh import connect
from support.tied_net import plan_of, tied_profile

mesh = connect(plan_of(tied_profile(), shard=2))
os.sched_setaffinity(0, {int(sys.argv[1])})
for thread in Path("/proc/self/task").iterdir():
    if (thread / "comm").read_text().startswith("pt_gloo"):
        os.sched_setaffinity(int(thread.name), {int(sys.argv[1])})
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
for _ in range(5):
    dist.all_reduce(torch.ones(64))
"""


@pytest.mark.slow
def test_a_rank_ends_well_where_gloos_threads_run_only_when_nothing_else_does(tmp_path: Path) -> None:
    script, tests = tmp_path / "end.py", Path(__file__).parent
    script.write_text(SCRIPT)
    core = str(min(os.sched_getaffinity(0)))
    paths = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    busy = subprocess.Popen(["taskset", "-c", core, sys.executable, "-c", "while True: pass"])
    try:
        for _ in range(3):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen(
                    [sys.executable, str(script), core],
                    env={**os.environ, **world, "PYTHONPATH": paths, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(2)
            ]
            assert [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks] == [("", 0), ("", 0)]
    finally:
        busy.kill()
        busy.wait()


def test_threads_of_a_name_are_waited_for_as_long_as_they_run() -> None:
    ended = threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("a-worker")
        hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000)  # without Python's lock
        ended.set()
        time.sleep(2)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.05)

    assert not let_rest("a-worker", within_s=0.02)
    assert let_rest("a-worker", within_s=30.0)
    assert ended.is_set()
    assert let_rest("nobody", within_s=1.0)
