"""Ranks as a launcher starts them: processes of their own, which tell how they ended by exit code and stderr."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ending:
    """How a rank ended. seconds: since all were started."""

    exit_code: int | None
    stderr: str
    seconds: float


def launch(
    function: Callable[..., Any], num_ranks: int, folder: Path, *args: Any, timeout_s: float = 300.0
) -> list[Ending]:
    """[rank] -> its end; exit_code None if it was still there after timeout_s. Runs function(*args) on each."""
    ranks = start(function, num_ranks, folder, *args)
    began = time.monotonic()
    seconds = [timeout_s] * num_ranks
    for rank, process in enumerate(ranks):
        process.join(max(0.0, began + timeout_s - time.monotonic()))
        seconds[rank] = time.monotonic() - began
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    texts = [(folder / f"rank{rank}.stderr").read_text() for rank in range(num_ranks)]
    return [Ending(*parts) for parts in zip(codes, texts, seconds, strict=True)]


def start(function: Callable[..., Any], num_ranks: int, folder: Path, *args: Any) -> list[Any]:
    """The processes of the ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_main, args=(rank, num_ranks, port, folder, function, args), daemon=True)
        for rank in range(num_ranks)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    return processes


def _main(rank: int, num_ranks: int, port: int, folder: Path, function: Callable[..., Any], args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        GLOO_SOCKET_IFNAME="lo",
    )
    stream = (folder / f"rank{rank}.stderr").open("w")
    os.dup2(stream.fileno(), 2)
    sys.stderr = stream
    warnings.simplefilter("ignore")
    try:
        function(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
