"""Runs a function on ranks that are forked from this process, and tells in one sentence whatever goes wrong in them."""

import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_ECHOES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Read timeout",
    "Connection was likely closed",
    "remote process exited",
    "ncclRemoteError",
    "ncclSystemError",
)
"""What ranks say when another rank has failed or hangs: these messages never tell the cause."""

_is_local_rank = False
"""Whether this process is a rank that `run_local_ranks` has started in another process."""

_APART_S = 24 * 3600.0
"""Seconds that a function in `apart` may take: far more than it needs, for it would have no limit in this process."""

T = TypeVar("T")

_SETTLE_S = 2.0
"""Seconds to wait for the cause, after a message that only echoes it."""


class RankError(RuntimeError):
    """A rank failed, or the ranks wait for each other. The message is one sentence; `detail` has the traceback."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def run_local_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float, device_type: str = "cpu"
) -> list[Any]:
    """[rank] -> what function(*args) returned there.

    Ranks find RANK, WORLD_SIZE and so on in the environment; on the CPU torch.distributed runs already, over gloo. They
    are forked, so nothing is sent to them, and the function may be a closure. Raises RankError if a rank fails, or if
    they have not ended after timeout_s. No process is left behind.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError("ranks are forked from this process, which this system cannot do; use Linux or macOS")
    context = multiprocessing.get_context("fork")
    port = _free_port()
    receivers: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(rank, num_ranks, port, device_type, sender, function, args, timeout_s), daemon=True
            )
            with _single_threaded():
                process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        return _collect(receivers, processes, time.monotonic() + timeout_s, timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """While it lasts, Python does not warn that to fork a process with threads may deadlock: ranks touch no lock of the
    parent's threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(
    rank: int,
    num_ranks: int,
    port: int,
    device_type: str,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    global _is_local_rank
    _is_local_rank = True
    gc.freeze()  # else the collector would touch, and so copy, all of the parent's memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    with suppress(OSError):  # if memory runs out, Linux should kill a rank and not the parent, who says what happened
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # each would be shown by every rank
    try:
        _begin_autograd()
        if device_type == "cpu" and num_ranks > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
            dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s))
        answer = pickle.dumps(function(*args))
        if dist.is_initialized():
            dist.destroy_process_group()
        sender.send((True, answer, ""))
    except BaseException as error:
        sender.send((False, f"{type(error).__name__}: {error}", traceback.format_exc()))
    sender.close()
    os._exit(0)  # without the destructors of the parent's objects


def _begin_autograd() -> None:
    """Run a first backward. Autograd's engine is made anew in a forked process by the first that needs it, and two
    threads at once would crash."""
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError as error:
        raise RuntimeError(
            "ranks are forked from a process that has run a backward beside a GPU, and cannot run one themselves: "
            "begin from a fresh process, or hide the GPUs from this one (CUDA_VISIBLE_DEVICES=)"
        ) from error


def apart(function: Callable[..., T], *args: Any) -> T:
    """The result of function(*args). On a machine with GPUs it runs in a process of its own: after a backward beside a
    GPU ranks that are forked from this process could not run a backward. A ValueError of the function is raised
    here."""
    if torch.cuda.device_count() == 0:  # leaves CUDA alone
        return function(*args)
    found: T | ValueError = run_local_ranks(_value_or_error, 1, function, *args, timeout_s=_APART_S)[0]
    if isinstance(found, ValueError):
        raise found
    return found


def _value_or_error(function: Callable[..., T], *args: Any) -> T | ValueError:
    try:
        return function(*args)
    except ValueError as error:
        return ValueError(str(error))


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def _collect(receivers: list[Connection], processes: list[Any], end: float, timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    errors: dict[int, tuple[str, str]] = {}
    settled: float | None = None
    while len(answers) + len(errors) < len(receivers):
        open_ones = {i: r for i, r in enumerate(receivers) if i not in answers and i not in errors}
        now = time.monotonic()
        limit = end if settled is None else min(end, settled)
        if now >= limit:
            break
        ready = wait(list(open_ones.values()), timeout=limit - now)
        for rank in [i for i, receiver in open_ones.items() if receiver in ready]:
            try:
                worked, answer, detail = receivers[rank].recv()
            except EOFError:
                processes[rank].join()
                worked, answer, detail = False, _ending(processes[rank].exitcode), ""
            if worked:
                answers[rank] = answer
            else:
                errors[rank] = (answer, detail)
        if errors and settled is None:
            settled = time.monotonic() + _SETTLE_S
        if any(not is_echo(message) for message, _ in errors.values()):
            break
    if errors:
        rank = min(errors, key=lambda r: (is_echo(errors[r][0]), r))
        message, detail = errors[rank]
        raise RankError(f"rank {rank} of {len(receivers)} failed: {' '.join(message.split())}", detail)
    if len(answers) < len(receivers):
        silent = sorted(set(range(len(receivers))) - set(answers))
        raise RankError(
            f"after {timeout_s:g} s rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))} of "
            f"{len(receivers)} had not ended: they wait for each other, or the model is too large for this machine"
        )
    return [pickle.loads(answers[rank]) for rank in range(len(receivers))]


def _ending(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "it was killed, most likely because the machine's memory was used up"
    if exit_code == -signal.SIGABRT:
        return "it died of signal SIGABRT (gloo aborts when ranks send unequal sizes)"
    if exit_code < 0:
        return f"it died of signal {signal.Signals(-exit_code).name}; with PYTHONFAULTHANDLER=1 Python says where"
    return f"it ended with exit code {exit_code} without a word"


def is_local_rank() -> bool:
    """Whether this process is a rank that run_local_ranks has started, whose failure is told there."""
    return _is_local_rank


def is_echo(message: str) -> bool:
    """Whether a message tells no more than that another rank has failed or hangs."""
    return any(echo in message for echo in _ECHOES)
