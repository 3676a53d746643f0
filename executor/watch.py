"""A job that cannot go on ends on every rank, soon, with one message that names the rank and why."""

import atexit
import itertools
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..planner.plan.document import Plan
from .measuring.local_ranks import is_echo, is_local_rank
from .processes import is_alive, this_process
from .torch_compat import default_store

HANG_S = 600.0
"""A step that takes longer than this is taken for a hang, unless the user says another time."""

LONGER = 3.0
"""How many times as long as a step start-up, saving and resuming may take: they read and write whole models."""

BEAT_S = 1.0
"""Seconds between signs of life of a rank, in jobs of up to 500."""

PATIENCE = 6
"""Signs of life that a rank may fail to give, beyond the first three, before it is taken for dead."""

GRACE_S = 5.0
"""How long a rank may take to end by itself once another one has failed."""

STORE_S = 30.0
"""How long the store may take to answer."""

SILENT_S = 60.0
"""How long a rank on another machine may give no sign of life while the one before it waits for others, before that
takes it for dead; of one on the same machine its process tells at once. Most waits end by themselves when a connection
breaks, but not those for connections that are still to be made."""

_FAILURE, _BEAT, _PROCESS, _MEETING = "failure", "beat", "process", "meeting"

_LAUNCHED = {"MASTER_ADDR", "MASTER_PORT", "RANK"}
"""Of the environment, where a launcher has started this process."""


@dataclass(frozen=True)
class Beat:
    """A sign of life of a rank.

    place: how much the job has asked of it, which all ranks count alike: odd inside of a step or another task, even
    after it. what: the words for that, since_s: for how long. where: the line its thread is at; waits: for others.
    ended: it is the last one, for the rank has come to its end. steps, meetings: how many of each it has begun.
    """

    count: int
    place: int
    what: str
    since_s: float
    where: str
    waits: bool
    ended: bool = False
    steps: int = 0
    meetings: int = 0


class Watch:
    """Gives signs of life, looks for those of others when something is wrong, and ends this process if it must.

    Begins by putting itself before sys.excepthook, so that an exception that ends this rank is known to the others;
    `close` puts it back. Nothing else waits for the store by which ranks hear of each other, and which the first
    process holds unless torchrun does. hang_s: how long a step may take. store: of a job that runs already, which must
    be of its own, for others wait for theirs; None: the job has none yet.
    """

    def __init__(self, rank: int, num_ranks: int, hang_s: float = HANG_S, store: Store | None = None) -> None:
        self.rank, self.num_ranks, self.hang_s = rank, num_ranks, hang_s
        self.beat_s = BEAT_S * max(1.0, num_ranks / 500)
        self._place, self._what, self._since, self._times = 0, "before its start-up", time.monotonic(), math.inf
        self._seen = threading.main_thread().ident
        self._ended, self._connected = threading.Event(), threading.Event()
        self._telling, self._told = threading.Lock(), False
        self._count = self._steps = self._meetings = 0
        self._neighbour, self._neighbour_s = b"", time.monotonic()
        self._processes: dict[int, dict[str, Any]] = {}  # of ranks that were looked for
        self._lost_store_s: float | None = None
        self._holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._given_store = store
        self._number = next(_numbers)
        self._store: PrefixStore
        self.users = 1
        self._previous_hook = sys.excepthook
        self.see_exceptions()
        self._thread = threading.Thread(target=self._run, name="meshwright-watch", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    @contextmanager
    def task(self, inside: str, after: str, times: float = LONGER, meets: bool = False) -> Iterator[None]:
        """What every rank does together, in words: while it is `inside`, and once it has come out. It may take so many
        times as long as a step. meets: it begins once all ranks have come to it."""
        self._place, self._what, self._since, self._times = self._place + 1, inside, time.monotonic(), times
        try:
            if meets:
                self._meet()
            yield
        except BaseException:
            self._times = math.inf  # whoever catches it may take the time he likes
            self._place += 1
            raise
        self._place, self._what, self._since, self._times = self._place + 1, after, time.monotonic(), math.inf

    @contextmanager
    def step(self, inside: str, after: str) -> Iterator[None]:
        """A task that is a part of a step."""
        self._steps += 1
        with self.task(inside, after, times=1.0):
            yield

    def _meet(self) -> None:
        """Return when all ranks have come here. Raises ValueError where another one does something else: what ranks
        exchange would be taken for what it is not, which ends a process without a word, or a GPU's rank never."""
        self._meetings += 1
        words, key = self._what, f"{_MEETING}{self._meetings}"
        if not self._connected.wait(STORE_S):
            return
        with suppress(dist.DistError):  # a store that is gone is told of by what comes next
            found = self._store.compare_set(key, "", words).decode()
            if found != words:
                raise self._apart(f"another is {found}")
            come = self._store.add(f"{key}/come", 1)
            if come == self.num_ranks:
                self._store.set(f"{key}/all", "")
            pause_s, looked_s = 0.001, time.monotonic()
            while not self._store.check([f"{key}/all"]):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self.beat_s / 5)
                if come == 1 and time.monotonic() - looked_s > self.beat_s:
                    self._look_for_others()
                    looked_s = time.monotonic()

    def _look_for_others(self) -> None:
        """Raise ValueError if a rank has passed by where this one waits for it."""
        for rank, beat in enumerate(self._beats()):
            if beat is not None and beat.meetings < self._meetings and (beat.ended or beat.steps > self._steps):
                what = f"has ended {beat.what}" if beat.ended else f"is {beat.what}"
                raise self._apart(f"rank {rank} {what}")

    def _apart(self, other: str) -> ValueError:
        return ValueError(f"rank {self.rank} of {self.num_ranks} is {self._what}, while {other}. {_ALIKE}")

    def see_exceptions(self) -> None:
        """Stand before what sys.excepthook is; init_process_group puts itself there, and would keep what is said."""
        sys.excepthook = self._on_exception

    @contextmanager
    def seeing(self, thread: threading.Thread) -> Iterator[None]:
        """While it lasts the main thread waits for that one, whose line is this rank's."""
        before, self._seen = self._seen, thread.ident
        try:
            yield
        finally:
            self._seen = before

    def close(self) -> None:
        """Watch no longer, once nobody in this process needs it."""
        self.users -= 1
        if self.users == 0:
            self._end()

    @property
    def is_over(self) -> bool:
        """Whether it watches no longer."""
        return self._ended.is_set()

    def _end(self) -> None:
        atexit.unregister(self._end)
        if self._ended.is_set():
            return
        self._ended.set()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        # Python aborts ("terminate called without an active exception") where it ends while a thread is in the store.
        self._thread.join(STORE_S + GRACE_S)
        if self._connected.is_set() and not self._thread.is_alive():
            with suppress(dist.DistError):  # the rank that holds the store may have ended before
                self._put(ended=True)

    def _run(self) -> None:
        if not self._connect():
            return
        while not self._ended.wait(self.beat_s):
            try:
                self._put()
                failed = self._store.check([_FAILURE])
                lost = self._lost_rank()
                self._lost_store_s = None
            except dist.DistError:
                failed, lost = False, self._lost_store()
            if lost is not None:
                self._tell(lost)
                os._exit(1)
            if failed:
                if not self._ended.wait(2 * GRACE_S if self._holds_store else GRACE_S):
                    os._exit(1)
                return
            if self._is_late():
                self._tell(self._diagnosis())
                self._let_others_end()
                os._exit(1)

    def _lost_rank(self) -> str | None:
        """Words on the next rank, if it is silent for too long while this one waits for others; else None."""
        following = (self.rank + 1) % self.num_ranks
        key = f"{_BEAT}{following}"
        seen = self._store.get(key) if self._store.check([key]) else b""
        if seen != self._neighbour or math.isinf(self._times):
            self._neighbour, self._neighbour_s = seen, time.monotonic()
        silent_s = time.monotonic() - self._neighbour_s
        is_dead = bool(seen) and not math.isinf(self._times) and self._is_dead(following)
        if not seen or (not is_dead and silent_s <= max(SILENT_S, 3 * self.beat_s)):
            return None
        beat = Beat(**json.loads(self._store.get(key)))  # what a dead one has said last was there before it died
        if beat.ended or self._store.check([_FAILURE]):
            return None
        if is_dead:
            return self._death(following, beat.what)
        return (
            f"rank {following} of {self.num_ranks} gave no sign of life for {silent_s:.0f} s {beat.what}: it was "
            "killed (most likely because memory was used up), or its machine is gone"
        )

    def _is_dead(self, rank: int) -> bool:
        """Whether a rank's process on this machine has ended; False for one on another, which cannot be seen."""
        if rank not in self._processes:
            self._processes[rank] = json.loads(self._store.get(f"{_PROCESS}{rank}"))
        return is_alive(self._processes[rank]) is False

    def _death(self, rank: int, what: str) -> str:
        return (
            f"rank {rank} of {self.num_ranks} has died {what}: process {self._processes[rank]['pid']} was "
            "killed (most likely because memory was used up), or ended itself, without a word"
        )

    def _lost_store(self) -> str | None:
        """Words on the rank that holds the store, if nobody is there any more while this one waits for others; None if
        it still is, or only the connection was lost, which a step does without."""
        now = time.monotonic()
        self._lost_store_s = self._lost_store_s or now
        if now - self._lost_store_s <= 2 * GRACE_S or math.isinf(self._times) or not os.environ.keys() >= _LAUNCHED:
            return None
        with (
            suppress(OSError),
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5.0),
        ):
            return None
        return self._diagnosis()

    def _is_late(self) -> bool:
        return time.monotonic() - self._since > self.hang_s * self._times

    def _connect(self) -> bool:
        """Whether the store was found before this watch was closed; ends the process if it does not come in time."""
        attempt = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        run = *attempt, str(self._number)
        if self._given_store is not None:
            self._use(self._given_store, (*run, "given"))
            return True
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        while not self._holds_store:
            with suppress(OSError), socket.create_connection((host, port), timeout=5.0):
                break
            if self._ended.wait(0.2):
                return False
            if self._is_late():
                _print(
                    f"rank 0 of {self.num_ranks}, which holds the store of the job at {host}:{port}, has not come "
                    f"for {time.monotonic() - self._since:.0f} s: it was not started, has ended, or hangs before its "
                    "start-up"
                )
                os._exit(1)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=self._holds_store,
            timeout=timedelta(seconds=STORE_S),
            wait_for_workers=False,
            multi_tenant=True,  # init_process_group makes the same one, or has made it
        )
        self._use(store, run)
        return True

    def _use(self, store: Store, run: tuple[str, ...]) -> None:
        self._store = PrefixStore(f"meshwright/{'/'.join(run)}", store)
        self._store.set(f"{_PROCESS}{self.rank}", json.dumps(this_process()))
        self._put()
        self._connected.set()

    def _put(self, ended: bool = False) -> None:
        self._count += 1
        where, waits = _line(sys._current_frames().get(self._seen or 0))
        since_s = time.monotonic() - self._since
        beat = Beat(self._count, self._place, self._what, since_s, where, waits, ended, self._steps, self._meetings)
        self._store.set(f"{_BEAT}{self.rank}", json.dumps(asdict(beat)))

    def _beats(self) -> list[Beat | None]:
        keys = [f"{_BEAT}{rank}" for rank in range(self.num_ranks)]
        known = [key for key in keys if self._store.check([key])]
        values = dict(zip(known, self._store.multi_get(known), strict=True))
        return [Beat(**json.loads(values[key])) if key in values else None for key in keys]

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = f"{kind.__name__}: {error}"
        if issubclass(kind, KeyboardInterrupt) or not self._connected.wait(GRACE_S):
            self._previous_hook(kind, error, trace)
            return
        if not (is_echo(text) or issubclass(kind, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError)):
            message = f"rank {self.rank} of {self.num_ranks} failed {self._what}: {text}"
            is_first = self._claim(message)
            _for_the_launcher(error)
            traceback.print_exception(kind, error, trace)
            if is_first:
                _print(message)
        else:
            self._tell(self._diagnosis(text))
        sys.stderr.flush()
        sys.stdout.flush()
        self._let_others_end()
        os._exit(1)  # what is left of torch.distributed would wait for the others

    def _let_others_end(self) -> None:
        """Keep the store until the others have heard why the job ends, and have ended."""
        if self._holds_store:
            time.sleep(GRACE_S + 2 * self.beat_s)

    def _tell(self, message: str) -> None:
        """Print a message about another rank, unless one has been printed."""
        if self._claim(message):
            _print(message)

    def _claim(self, message: str) -> bool:
        """Whether this rank is the first to know why the job ends."""
        with self._telling:
            if self._told:  # the watch and the main thread may both find out
                return False
            self._told = True
            own = f"{self.rank} {message}"
            with suppress(dist.DistError):
                return bool(self._store.compare_set(_FAILURE, "", own).decode() == own)
            return True

    def _diagnosis(self, error: str = "") -> str:
        """Which rank is the reason, as far as signs of life tell."""
        try:
            before = self._beats()
            self._wait_for_failure(3 * self.beat_s)
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode().partition(" ")[2])
            after = self._beats()
            for _ in range(PATIENCE):  # on a machine that is overloaded signs of life come late
                if not self._silent(before, after):
                    break
                self._wait_for_failure(self.beat_s)
                after = self._beats()
            silent = self._silent(before, after)
            dead = [rank for rank in silent if after[rank] is not None and self._is_dead(rank)]
        except dist.DistError:
            return f"rank 0 of {self.num_ranks}, which holds the store of the job, is gone: it was killed, or has ended"
        job = f"of {self.num_ranks}"
        here = f"; here: {error}" if error else ""
        missing = [rank for rank, beat in enumerate(after) if beat is None]
        if missing:
            return (
                f"{_ranks(missing)} {job} {'have' if len(missing) > 1 else 'has'} not come for "
                f"{time.monotonic() - self._since:.0f} s, {self._what}: not started, or ended before{here}"
            )
        beats = [beat for beat in after if beat is not None]
        ended = [rank for rank in silent if beats[rank].ended]
        if ended:
            have, their = ("have", "their scripts") if len(ended) > 1 else ("has", "its script")
            return (
                f"{_ranks(ended)} {job} {have} ended {beats[ended[0]].what}: {their} came to an end, or closed the "
                f"trainer, while rank {self.rank} is {self._what}. Every rank must take the same number of steps: "
                "give all of them data of the same length, and let none leave its loop before the others"
            )
        if dead:
            return self._death(dead[0], beats[dead[0]].what)
        if silent:
            return (
                f"{_ranks(silent)} {job} gave no sign of life any more {beats[silent[0]].what}: it was killed (most "
                f"likely because memory was used up), it has ended, or its machine is gone{here}"
            )
        return _who_hangs(beats, job)

    def _silent(self, before: Sequence[Beat | None], after: Sequence[Beat | None]) -> list[int]:
        """Other ranks without a sign of life between the two."""
        pairs = enumerate(zip(before, after, strict=True))
        return [rank for rank, (a, b) in pairs if (b is None or a == b) and rank != self.rank]

    def _wait_for_failure(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._store.check([_FAILURE]):
            self._put()  # another rank may be asking itself the same about this one
            time.sleep(self.beat_s / 5)


_ALIKE = (
    "Every rank must call step, save, evaluate, full_state_dict and the like (not under `if rank == 0`): what they "
    "write and return comes from all of them"
)


_current: Watch | None = None
"""The watch of this process, which trainers of one process share."""

_numbers = itertools.count()
"""Numbers of this process's watches, the same on all ranks: what ranks have said under an earlier one is no news."""


def watched(plan: Plan, hang_s: float) -> Watch | None:
    """The watch of this process. None where a job is one process, was begun by no launcher, or is watched by who began
    it."""
    global _current
    if plan.degrees.num_devices == 1 or is_local_rank():
        return None
    if _current is not None and not _current.is_over:
        _current.users += 1
        _current.hang_s = max(_current.hang_s, hang_s)
        return _current
    if dist.is_initialized():
        try:
            store = default_store().clone()  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=STORE_S))
        except (RuntimeError, AttributeError):  # kinds of stores that can be had only once
            return None
        _current = Watch(dist.get_rank(), plan.degrees.num_devices, hang_s, store)
    elif os.environ.keys() >= _LAUNCHED:
        _current = Watch(int(os.environ["RANK"]), plan.degrees.num_devices, hang_s)
    else:
        return None
    return _current


def _who_hangs(beats: Sequence[Beat], job: str) -> str:
    """Of ranks that all are alive: those that are behind the others, or else those that wait for nobody."""
    behind = min(beat.place for beat in beats)
    late = [rank for rank, beat in enumerate(beats) if beat.place == behind]
    outside = late if behind % 2 == 0 and len(late) < len(beats) else []
    busy = [rank for rank in late if not beats[rank].waits]
    hanging = outside or (busy if len(busy) < len(beats) else [])
    if hanging:
        beat = beats[hanging[0]]
        return f"{_ranks(hanging)} {job} hangs: for {beat.since_s:.0f} s {beat.what}, at {beat.where}; the others wait"
    tasks: dict[str, int] = {}
    for rank, beat in enumerate(beats):
        tasks.setdefault(beat.what, rank)
    if len(tasks) > 1:
        each = "; ".join(f"rank {rank} is {what}, at {beats[rank].where}" for what, rank in list(tasks.items())[:4])
        return f"ranks {job} do different things: {each}. {_ALIKE}"
    places = "; ".join(f"rank {rank} at {beat.where}" for rank, beat in enumerate(beats[:8]))
    return (
        f"all ranks {job} wait for each other for {max(b.since_s for b in beats):.0f} s {beats[0].what}, which a "
        f"longer timeout_s would allow: {places}"
    )


_WORKING = ("box_files.py", "checkpoint.py", "initialise.py", "run_state.py", "weights.py")
"""Files of this package whose own lines read and write; the others' are where totals are waited for."""


def _line(frame: FrameType | None) -> tuple[str, bool]:
    """(innermost line of the user's or a library's code, whether torch waits there for other ranks)."""
    if frame is None:
        return "an unknown place", False
    torch_home, home = Path(torch.__file__).parent, Path(__file__).parent
    sends, reads = str(torch_home / "distributed"), str(torch_home / "distributed" / "checkpoint")
    innermost = frame.f_code.co_filename
    waits = "autograd" in innermost or (innermost.startswith(str(home)) and Path(innermost).name not in _WORKING)
    place: FrameType | None = frame
    while place is not None:
        file = place.f_code.co_filename
        waits = waits or (file.startswith(sends) and not file.startswith(reads))
        if not file.startswith((str(torch_home), str(home))):
            break
        place = place.f_back
    place = place or frame
    return f"{place.f_code.co_filename}:{place.f_lineno} in {place.f_code.co_name}", waits


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _print(message: str) -> None:
    print(f"\nmeshwright: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _for_the_launcher(error: BaseException) -> None:
    """Let torchrun's own summary name the error, too."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        try:
            raise error  # what is recorded is the exception at hand
        except BaseException as current:
            get_error_handler().record_exception(current)
