"""Jobs of candidates: launched by torchrun here or by the user's launcher, told to take laps, and ended for sure."""

import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import IO, Any, Protocol

from ...planner.plan.document import Plan
from ..measuring.exchanges import TimedExchanges
from .rank import MARK
from .record import Cause

ARGS = "{args}"
"""What a launcher's template has in the place of the program that it starts on every rank."""

STEP_LIMIT_S = 60.0
"""A step is not taken for a hang before this; nor before it takes PATIENCE times its prediction."""

PATIENCE = 20.0
"""Presets were seen to be off by several times; a hang lasts for ever."""

START_TIMES = 3.0
"""Times a step's limit that the start of a job may take, as in the trainer's own watch."""

_IMPORTS_S = 30.0
"""How long ranks may take to import torch and the model, which nobody watches: twice what was seen under load."""

_SETTLE_S = 12.0
"""How long the trainer's watch may take to say who hangs, beyond a step's limit."""

_ENDING_S = 10.0
"""How long a job that is done may take to end by itself."""

_TOKEN = "MESHWRIGHT_TUNE"
"""Environment variable by which the processes of a job are known."""

_SUMMARY = re.compile(r"rank\s*: (\d+)[^\n]*\n\s*exitcode\s*: (-?\d+)")
"""What torchrun says of the rank that ended first."""

_LAST_WORDS = 4000
"""Lines of a job's output that its cause is looked for in."""

_OUT_OF_MEMORY = re.compile(r"out ?of ?memory|can.?t allocate memory|cannot allocate memory|MemoryError", re.IGNORECASE)
_KILLED = re.compile(r"SIGKILL|exitcode\s*: -9|gave no sign of life|has died|died of signal", re.IGNORECASE)
_HANGS = re.compile(r"\bhangs?\b|wait for each other|had not ended", re.IGNORECASE)
_SAID = re.compile(r"^meshwright: (.*)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:\[?rank\d+\]?:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit): .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Lap:
    """Steps of a candidate, until the slowest rank had ended, and the peak of every rank. started_s: seconds until the
    job was ready, its warm-up included; 0 where it ran already. peak_reserved_bytes: of a GPU, what the allocator held;
    () on the CPU. rank_compute_s: of each rank the median seconds of a step in which it did not wait for others; ()
    where that is not known. exchanged: by ranks that were started for the lap."""

    steps_s: tuple[float, ...]
    started_s: float
    peak_memory_bytes: tuple[int, ...]
    memory_kind: str
    peak_reserved_bytes: tuple[int, ...] = ()
    rank_compute_s: tuple[float, ...] = ()
    exchanged: TimedExchanges | None = None


@dataclass(frozen=True)
class Fallen:
    """A candidate whose job ended, and why: one word, and a sentence."""

    cause: Cause
    message: str


class Track(Protocol):
    """Where candidates run."""

    @property
    def keeps(self) -> bool:
        """Whether jobs go on running between their laps."""
        ...

    def lap(self, label: str, plan: Plan, steps: int, limit_s: float, more: Sequence[str] = ()) -> Lap | Fallen:
        """Let a candidate take so many steps, alone; its job is started if it does not run. limit_s: seconds that are
        left for all of it. more: what its ranks are told beside the plan, as rank.py takes it."""
        ...

    def leave(self, label: str) -> None:
        """A candidate takes part no more."""
        ...

    def close(self) -> None:
        """End every job, whatever it does."""
        ...


def read_launcher(template: str | None, num_ranks: int) -> tuple[str, ...]:
    """The words of the command that starts a job, {args} among them. None: torchrun on this machine.

    Raises ValueError for a template without {args}, or whose command is not there.
    """
    if template is None:
        run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
        return (*run, ARGS)
    try:
        words = tuple(shlex.split(template))
    except ValueError as error:
        raise ValueError(f"--launcher {template!r} cannot be read: {error}") from None
    if not any(ARGS in word for word in words):
        raise ValueError(
            f"--launcher {template!r} has no {ARGS}, which the program of each rank takes the place of: for example "
            f'"srun -N4 --ntasks-per-node=1 torchrun --nnodes 4 --nproc-per-node 8 ... {ARGS}"'
        )
    if shutil.which(words[0]) is None:
        raise ValueError(f"--launcher {template!r}: there is no command {words[0]} here")
    return words


def filled(words: Sequence[str], args: Sequence[str]) -> list[str]:
    """The command with the program in its place: as words of its own, or inside of a longer word in quotes."""
    found: list[str] = []
    for word in words:
        found += list(args) if word == ARGS else [word.replace(ARGS, shlex.join(args))]
    return found


class LaunchedJob:
    """A launched job: what it says, line by line, and its end. Its processes are a session of their own, so that Ctrl-C
    reaches only us."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._token = uuid.uuid4().hex
        environment = {**os.environ, _TOKEN: self._token, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._log = log
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        file = log.open("w")
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except BaseException:
            file.close()
            raise
        self._reader = threading.Thread(target=self._read, args=(file,), daemon=True)
        self._reader.start()

    def _read(self, file: IO[str]) -> None:
        assert self._process.stdout is not None
        with file:
            for line in self._process.stdout:
                if MARK in line:  # launchers may say before it which rank speaks
                    with suppress(ValueError):
                        self._said.put(loads(line.partition(MARK)[2]))
                        continue
                with suppress(OSError):  # a full disk loses the log, not the job
                    file.write(line)
                    file.flush()
        self._said.put(None)

    def tell(self, words: str) -> None:
        """A line for the first rank."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, which reading from it will tell
            self._process.stdin.write(f"{words}\n")
            self._process.stdin.flush()

    def hear(self, limit_s: float) -> dict[str, Any] | None:
        """What it says next; None where it has ended. Raises TimeoutError."""
        try:
            return self._said.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            raise TimeoutError from None

    @property
    def output(self) -> str:
        """Its last lines."""
        with suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LAST_WORDS:])
        return ""

    def ended(self) -> int:
        """Wait for its end; the exit status."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        self.end()
        return self._process.returncode

    def end(self, grace_s: float = 3.0) -> None:
        """End the launcher, then whatever is left of what it began on this machine."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with suppress(OSError):
                    os.killpg(self._process.pid, ending)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
        for process in processes_with(f"{_TOKEN}={self._token}"):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        self._reader.join(grace_s)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()


def processes_with(entry: str) -> list[int]:
    """Processes of this machine that were begun with NAME=VALUE in their environment; [] where /proc tells nothing."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


class LaunchedTrack:
    """Candidates as jobs of a launcher.

    words: of read_launcher. on_cpu: whether ranks use the CPU though a GPU may be there. keeps: whether a job stays and
    waits for its next turn, where the memory of all that wait and that of the next one fit: budget_bytes, of the
    fullest device. timeout_s: of a step; None: by its prediction.
    """

    def __init__(
        self,
        words: Sequence[str],
        model: str,
        folder: Path,
        *,
        on_cpu: bool,
        keeps: bool,
        budget_bytes: float,
        timeout_s: float | None = None,
    ) -> None:
        self._words, self._model, self._folder, self._on_cpu = words, model, folder, on_cpu
        self._keeps, self._budget_bytes, self._timeout_s = keeps, budget_bytes, timeout_s
        self._jobs: dict[str, tuple[LaunchedJob, float]] = {}
        self._count = 0

    @property
    def keeps(self) -> bool:
        """Whether jobs go on running between their laps."""
        return self._keeps

    def lap(self, label: str, plan: Plan, steps: int, limit_s: float, more: Sequence[str] = ()) -> Lap | Fallen:
        """Let a candidate take so many steps, alone; its job is started if it does not run."""
        began = time.monotonic()
        step_limit_s = self._step_limit_s(plan)
        fresh = label not in self._jobs
        if fresh:
            self._make_room(_bytes_of(plan))
            self._start(label, plan, steps, step_limit_s, more)
        job, _ = self._jobs[label]
        started_s, has_begun = 0.0, not fresh
        exchanged: TimedExchanges | None = None
        if not fresh:
            job.tell(str(steps))
        while True:
            starts = fresh and not started_s
            patience_s = (step_limit_s * START_TIMES + _IMPORTS_S if starts else step_limit_s * steps) + _SETTLE_S
            left_s = limit_s - (time.monotonic() - began)
            try:
                said = job.hear(min(patience_s, left_s))
            except TimeoutError:
                self.leave(label)
                if left_s <= patience_s:
                    return Fallen("budget", f"the budget was over after {limit_s:.0f} s of its lap")
                doing = "start" if starts else "come to the end of its lap"
                return Fallen("hang", f"it did not {doing} within {patience_s:.0f} s")
            except BaseException:
                self.leave(label)
                raise
            if said is None:
                return self._fallen(label, has_begun)
            if said["event"] == "began":
                has_begun = True
            elif said["event"] == "ready":
                started_s = time.monotonic() - began
                exchanged = None if said["exchanged"] is None else TimedExchanges.model_validate(said["exchanged"])
                if self._keeps:
                    job.tell(str(steps))
            elif said["event"] == "lap":
                if not self._keeps:
                    self._jobs.pop(label)[0].ended()
                peaks, reserved = tuple(said["peak_memory_bytes"]), tuple(said["peak_reserved_bytes"])
                computed = tuple(said["rank_compute_s"])
                return Lap(tuple(said["steps_s"]), started_s, peaks, said["memory_kind"], reserved, computed, exchanged)

    def leave(self, label: str) -> None:
        """A candidate takes part no more."""
        if label in self._jobs:
            self._jobs.pop(label)[0].end()

    def close(self) -> None:
        """End every job, whatever it does."""
        for label in list(self._jobs):
            self.leave(label)

    def probe(self, plan: Plan, limit_s: float) -> list[dict[str, Any]]:
        """What each rank of a job sees: see rank.py. Raises ValueError where the launcher does not start one."""
        job = LaunchedJob(filled(self._words, [*self._args(plan, STEP_LIMIT_S), "--probe"]), self._folder / "probe.log")
        end = time.monotonic() + limit_s
        found: list[dict[str, Any]] = []
        try:
            while len(found) < max((each["ranks"] for each in found), default=1):
                said = job.hear(end - time.monotonic())
                if said is None:
                    break
                found.append(said)
        except TimeoutError:
            if not found:
                raise ValueError(
                    f"the launcher started no rank within {limit_s:.0f} s: see {self._folder / 'probe.log'}"
                ) from None
        finally:
            job.end()
        if not found:
            raise ValueError(
                f"the launcher did not start a rank; it said: {_last_line(job.output) or 'nothing'} (its output is in "
                f"{self._folder / 'probe.log'})"
            )
        return found

    def _make_room(self, needed_bytes: float) -> None:
        """End the jobs that wait longest until another fits beside the rest."""
        while self._jobs and sum(size for _, size in self._jobs.values()) + needed_bytes > self._budget_bytes:
            self.leave(next(iter(self._jobs)))

    def _start(self, label: str, plan: Plan, steps: int, step_limit_s: float, more: Sequence[str]) -> None:
        self._count += 1
        log = self._folder / f"{self._count}.log"
        laps = [] if self._keeps else ["--laps", "1", "--steps", str(steps)]
        args = [*self._args(plan, step_limit_s), *laps, *more]
        self._jobs[label] = LaunchedJob(filled(self._words, args), log), _bytes_of(plan)

    def _args(self, plan: Plan, step_limit_s: float) -> list[str]:
        file = self._folder / f"{self._count}.json"
        plan.save(file)
        words = ["-m", "meshwright.executor.tuning.rank", "--plan", str(file.resolve()), "--model", self._model]
        return [*words, "--timeout", f"{step_limit_s:g}", *(["--device", "cpu"] if self._on_cpu else [])]

    def _step_limit_s(self, plan: Plan) -> float:
        predicted_s = 0.0 if plan.prediction is None else plan.prediction.step_time_s
        return self._timeout_s or max(STEP_LIMIT_S, PATIENCE * predicted_s)

    def _fallen(self, label: str, has_begun: bool) -> Fallen:
        job, _ = self._jobs.pop(label)
        status = job.ended()
        return cause_of(job.output, status, has_begun)


def cause_of(output: str, status: int, has_begun: bool = True) -> Fallen:
    """Why a job ended, from what it printed: in the trainer's own words where it had any."""
    said, raised = _SAID.findall(output), _RAISED.findall(output)
    own = [line for line in raised if not line.startswith(("torch.distributed.elastic", "ChildFailedError"))]
    ended = [(rank, int(code)) for rank, code in _SUMMARY.findall(output)]
    ended.sort(key=lambda each: each[1] == -signal.SIGTERM)  # by which torchrun ends the others
    summary = [f"rank {rank} was killed by signal {-code}" for rank, code in ended if code < 0]
    message = (said or own or summary or [_last_line(output)])[0] or (
        f"it ended with exit status {status} without a word"
    )
    if not has_begun and not said:
        return Fallen("launch", f"the launcher did not start its ranks: {message}")
    if _OUT_OF_MEMORY.search(" ".join((*said, *own))):
        return Fallen("memory", next((line for line in (*said, *own) if _OUT_OF_MEMORY.search(line)), message))
    if said and _HANGS.search(message) and not own:
        return Fallen("hang", message)
    if summary and not own:
        return Fallen("killed", f"{summary[0]}: most likely because memory was used up")
    if _KILLED.search(message) and not own:
        return Fallen("killed", message)
    return Fallen("crash", message)


def _bytes_of(plan: Plan) -> float:
    """Predicted bytes of the plan's fullest device."""
    return 0.0 if plan.prediction is None else max(plan.prediction.stage_memory_bytes)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
