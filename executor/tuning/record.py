"""The record of a race on the real cluster: a line of JSON for everything that happened, appended as it happens.

Who was ended goes on from it (`plan tune --resume`); a last line that was left half-written is left out. Needs no
torch.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from ...planner.plan.document import Plan
from ...planner.plan.training import TrainingSpec
from ...profiler.document import Frozen, in_a_sentence
from ...profiler.machine.cluster import ClusterSpec
from ..measuring.exchanges import TimedExchanges
from ..measuring.measurement import quantile

Cause = Literal["memory", "killed", "hang", "crash", "launch", "budget"]
"""Why a candidate was not measured: it ran out of memory, a rank was killed, its ranks hang, they failed, its job never
began, or the budget was over before it had taken a step."""


class TuneHeader(Frozen):
    """The line that a record begins with: what is tuned, from which constants, and how its jobs are launched."""

    schema_version: Literal[1] = 1
    kind: Literal["meshwright-tune"] = "meshwright-tune"
    model: str
    fingerprint: str
    cluster: ClusterSpec
    training: TrainingSpec
    launcher: str | None = Field(description="template of the command that starts a job; null: torchrun, here")
    hosts: NonNegativeInt | None = Field(
        default=None,
        description="hosts on which smaller jobs run in place of candidates; 0: one GPU, without peers",
    )

    @property
    def job(self) -> tuple[object, ...]:
        """What must be the same for a record to be gone on with."""
        return (self.fingerprint, self.cluster.hosts, self.cluster.network, self.training, self.hosts)


class EntrantLine(Frozen):
    """A plan that takes part."""

    event: Literal["entrant"] = "entrant"
    label: str
    by: str = Field(description="who named it: the search, a rule of thumb, --setup, ...")
    round: PositiveInt
    plan: Plan
    predicted_s: PositiveFloat = Field(description="by the constants that the race began with")
    at_s: NonNegativeFloat = Field(description="seconds since the race began, pauses left out; of every line")


class StandInLine(Frozen):
    """What runs in the place of a plan that takes more hosts than there are: a job cut down, or one rank alone. Plans
    that are cut down to the same job share its label, and its laps."""

    event: Literal["stand-in"] = "stand-in"
    label: str = Field(description="of its laps")
    of: str = Field(description="label of the plan")
    plan: Plan
    without: tuple[str, ...] = Field(default=(), description="blocks of the model that are left out")
    rank: NonNegativeInt | None = Field(default=None, description="of the plan, that runs without the others")
    predicted_s: PositiveFloat = Field(description="by the constants that the race began with")
    at_s: NonNegativeFloat


class LapLine(Frozen):
    """A few steps of a plan, in its turn."""

    event: Literal["lap"] = "lap"
    label: str
    round: PositiveInt
    turn: PositiveInt
    steps_s: tuple[PositiveFloat, ...] = Field(min_length=1, description="until the slowest rank had ended")
    started_s: NonNegativeFloat = Field(description="seconds until its job was ready, warm-up included; 0: it was")
    peak_memory_bytes: tuple[int, ...] = Field(description="[rank]")
    memory_kind: Literal["resident", "allocated"]
    peak_reserved_bytes: tuple[int, ...] = Field(default=(), description="[rank] on GPUs: what the allocator held")
    rank_compute_s: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="[rank] median seconds of a step without waiting for others; empty: not known"
    )
    exchanged: TimedExchanges | None = Field(
        default=None, description="what its ranks exchanged when they were started"
    )
    at_s: NonNegativeFloat

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return quantile(self.steps_s, 0.5)


class FallLine(Frozen):
    """A plan that could not be measured, or not any more."""

    event: Literal["fall"] = "fall"
    label: str
    round: PositiveInt
    cause: Cause
    message: str
    predicted_bytes: float = Field(description="of its fullest device: where memory ran out, it was more")
    at_s: NonNegativeFloat


class RefitLine(Frozen):
    """What the constants became, and what they predict of every plan that was measured."""

    event: Literal["refit"] = "refit"
    round: PositiveInt
    factors: dict[str, float]
    predicted_s: dict[str, float]
    best: str = Field(description="label of the fastest plan by these constants")
    best_s: PositiveFloat
    at_s: NonNegativeFloat


class EndLine(Frozen):
    """How a race, or one sitting of it, ended."""

    event: Literal["end"] = "end"
    reason: str
    agreed: bool = Field(description="no plan that was not tried is predicted to come near the best measured one")
    at_s: NonNegativeFloat


Line = EntrantLine | StandInLine | LapLine | FallLine | RefitLine | EndLine

_LINES: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="event")])


class Record:
    """A race so far, in memory and in its file. lost: why the file lacks the last lines, if it does."""

    def __init__(self, path: Path, header: TuneHeader, lines: tuple[Line, ...] = ()) -> None:
        self.path, self.header, self.lines = path, header, [*lines]
        self.lost: str | None = None

    def begin(self) -> None:
        """Write the header. Raises ValueError where that cannot be."""
        try:
            with self.path.open("x") as file:
                file.write(self.header.model_dump_json() + "\n")
        except FileExistsError:
            raise ValueError(
                f"{self.path} has a race already: --resume goes on with it; or delete it to begin a new one"
            ) from None
        except OSError as error:
            with suppress(OSError):
                self.path.unlink()
            raise ValueError(f"{self.path} cannot be written: {error.strerror or error}; choose another -o") from None

    def add(self, line: Line) -> None:
        """Append a line. What cannot be written stays in memory, and `lost` says why: the race is worth more."""
        self.lines.append(line)
        if self.lost is not None:
            return
        try:
            with self.path.open("a") as file:
                file.write(line.model_dump_json() + "\n")
        except OSError as error:
            self.lost = error.strerror or str(error)

    @property
    def elapsed_s(self) -> float:
        """Seconds until the last line, pauses between sittings left out."""
        return self.lines[-1].at_s if self.lines else 0.0

    def entrants(self) -> dict[str, EntrantLine]:
        """Label -> plan, in the order in which they came."""
        return {line.label: line for line in self.lines if isinstance(line, EntrantLine)}

    def stand_ins(self) -> dict[str, StandInLine]:
        """Label -> what runs in the place of plans, in the order in which they came."""
        found: dict[str, StandInLine] = {}
        for line in self.lines:
            if isinstance(line, StandInLine):
                found.setdefault(line.label, line)
        return found

    def stand_ins_of(self, label: str) -> list[StandInLine]:
        """What runs in the place of one plan."""
        return [line for line in self.lines if isinstance(line, StandInLine) and line.of == label]

    def laps(self) -> dict[str, list[LapLine]]:
        """Label -> what it ran, of every plan that was measured."""
        found: dict[str, list[LapLine]] = {}
        for line in self.lines:
            if isinstance(line, LapLine):
                found.setdefault(line.label, []).append(line)
        return found

    def falls(self) -> dict[str, FallLine]:
        """Label -> why it is out, of every plan whose job ended. Who met the end of the budget may try again."""
        return {line.label: line for line in self.lines if isinstance(line, FallLine) and line.cause != "budget"}

    def refits(self) -> list[RefitLine]:
        """In their order."""
        return [line for line in self.lines if isinstance(line, RefitLine)]

    def medians(self) -> dict[str, dict[int, float]]:
        """Label -> turn -> median seconds of a step in it."""
        return {label: {lap.turn: lap.step_s for lap in laps} for label, laps in self.laps().items()}


def load_record(path: Path) -> Record:
    """The record in a file. Raises ValueError for files of another kind."""
    if not path.is_file():
        raise ValueError(f"no such record: {path}; --resume goes on with one that plan tune wrote, leave it out")
    lines = list(_whole_lines(path))
    if not lines:
        raise ValueError(f"{path} is empty, so there is nothing to go on with: delete it, and leave --resume out")
    try:
        header = TuneHeader.model_validate_json(lines[0])
    except ValidationError as error:
        raise ValueError(f"{path} is no record of plan tune: {in_a_sentence(error)}; choose another -o") from None
    found = []
    for number, text in enumerate(lines[1:], 2):
        try:
            found.append(_LINES.validate_json(text))
        except ValidationError as error:
            raise ValueError(
                f"{path} line {number} is not of a race that this version reads: {in_a_sentence(error)}; delete the "
                "file to begin anew"
            ) from None
    return Record(path, header, tuple(found))


def _whole_lines(path: Path) -> Iterator[str]:
    """All lines but a last one that is half-written, which is cut off the file, too: what follows is appended."""
    text = path.read_text(errors="replace")
    lines = text.splitlines(keepends=True)
    if lines and not _is_whole(lines[-1]):
        path.write_text("".join(lines[:-1]))
        lines.pop()
    yield from (line for line in lines if line.strip())


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith("\n")


Say = Callable[[str], None]
"""Told, in a line, what is being done."""
